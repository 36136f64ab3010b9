//! Videos: animations, lists and directories of pictures, and files through ffmpeg. Tests named `ffmpeg_*` make their clips with
//! ffmpeg and are ignored by default; run them with `cargo test -p omnigrpo-media -- --ignored`.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use omnigrpo_media::qwen_vl::{ImageProcessor, PatchGrid};
use omnigrpo_media::{
    FrameSampling, FrameSize, Limits, MediaError, Orientation, PixelBudget, QwenSampling, Rgb8Image,
    VideoFrames, VideoRequest, VideoSource, decode_video, load_image, probe_video, resize_bicubic,
};
use serde_json::Value;

mod common;

use common::{data, golden, noise, sha};

fn request(sampling: FrameSampling) -> VideoRequest {
    VideoRequest { sampling, size: FrameSize::Native, listed_fps: None, orientation: Orientation::Upright }
}

/// Midpoints of as many shares as there are frames: every frame once.
fn every(num_frames: usize) -> VideoRequest {
    request(FrameSampling::Midpoints { num_frames })
}

fn nframes(n: usize) -> FrameSampling {
    FrameSampling::Qwen(QwenSampling { nframes: Some(n), ..Default::default() })
}

fn save_png(path: &Path, image: &Rgb8Image) {
    let (w, h) = (image.width_px, image.height_px);
    image::save_buffer(path, &image.pixels, w, h, image::ExtendedColorType::Rgb8).unwrap();
}

#[test]
fn animations_equal_pillow_and_keep_their_delays() {
    let limits = Limits::default();
    let gif = VideoSource::File(data("animated.gif"));
    let mut exact = Vec::new();
    for row in golden("animations") {
        let source = VideoSource::File(data(row["name"].as_str().unwrap()));
        let info = probe_video(&source, None, &limits).unwrap();
        assert_eq!((info.width_px, info.height_px, info.num_frames), (13, 9, 3));
        assert!((info.fps - 15.0).abs() < 1e-9, "{info:?}"); // 3 frames in 50 + 70 + 80 ms
        let video = decode_video(&source, &every(3), &limits).unwrap();
        let expected = row["frames"].as_array().unwrap();
        if source == gif {
            for (frame, expected) in video.frames.iter().zip(expected) {
                assert_eq!(sha(&frame.pixels), *expected);
            }
            exact = video.frames.clone();
        } else {
            // The pictures are equal. The WebP decoder blends an opaque frame over the last one with an error of 1 level.
            assert_eq!(expected, golden("animations")[0]["frames"].as_array().unwrap());
            for (frame, exact) in video.frames.iter().zip(&exact) {
                assert!(frame.pixels.iter().zip(&exact.pixels).all(|(a, b)| a.abs_diff(*b) <= 1));
            }
        }
        assert_eq!(video.indices, [0, 1, 2]);
        for (t, expected) in video.timestamps_s.iter().zip([0.0, 0.05, 0.12]) {
            assert!((t - expected).abs() < 1e-9, "{:?}", video.timestamps_s);
        }
        assert!((video.sampled_fps - 15.0).abs() < 1e-9);
        assert!((2.0 / video.sampled_fps - 2.0 / 15.0).abs() < 1e-12);
    }
}

#[test]
fn damaged_animations_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["animated.gif", "animated_lossless.webp"] {
        let bytes = std::fs::read(data(name)).unwrap();
        let path = dir.path().join(name);
        std::fs::write(&path, &bytes[..bytes.len() * 3 / 4]).unwrap();
        let error = decode_video(&VideoSource::File(path), &every(3), &Limits::default()).unwrap_err();
        assert!(error.to_string().contains(name), "{error}");
    }
    let limits = Limits { max_frames: 2, ..Limits::default() };
    let error = decode_video(&VideoSource::File(data("animated.gif")), &every(3), &limits).unwrap_err();
    assert!(matches!(error, MediaError::TooLarge { got: 3, max: 2, .. }), "{error}");
}

#[test]
fn a_still_webp_is_a_video_of_one_frame() {
    let source = VideoSource::File(data("rgba_lossless.webp"));
    let video = decode_video(&source, &every(1), &Limits::default()).unwrap();
    assert_eq!(
        video.frames,
        [load_image(&data("rgba_lossless.webp"), Orientation::Upright, &Limits::default()).unwrap()]
    );
}

#[test]
fn lists_and_directories_of_pictures_are_videos() {
    let dir = tempfile::tempdir().unwrap();
    let frames: Vec<Rgb8Image> =
        (0..11).map(|i| Rgb8Image::new(8, 6, noise(i, 8 * 6 * 3)).unwrap()).collect();
    let paths: Vec<PathBuf> = (0..11).map(|i| dir.path().join(format!("frame_{i}.png"))).collect();
    for (path, frame) in paths.iter().zip(&frames) {
        save_png(path, frame);
    }
    std::fs::write(dir.path().join("notes.txt"), "no frame").unwrap();
    std::fs::write(dir.path().join(".hidden.png"), "no frame").unwrap();
    let limits = Limits::default();
    let default = request(FrameSampling::Qwen(QwenSampling::default()));

    let source = VideoSource::from_path(dir.path());
    assert_eq!(source, VideoSource::FrameDir(dir.path().into()));
    let video = decode_video(&source, &default, &limits).unwrap();
    assert_eq!(video.frames, frames); // frame_10 last
    assert_eq!((video.source_fps, video.sampled_fps), (2.0, 2.0));
    assert_eq!(video.timestamps_s[3], 1.5);
    assert_eq!(2.0 / video.sampled_fps, 1.0);

    let list = VideoSource::FrameList(paths.iter().rev().cloned().collect());
    let four = VideoRequest { listed_fps: Some(5.5), ..request(nframes(4)) };
    let video = decode_video(&list, &four, &limits).unwrap();
    assert_eq!(video.indices, [0, 3, 7, 10]); // 0, 3.33, 6.67, 10
    assert_eq!(video.frames[1], frames[7]);
    assert!((video.sampled_fps - 2.0).abs() < 1e-12); // 4 of 11 at 5.5
    let info = probe_video(&list, Some(5.5), &limits).unwrap();
    assert_eq!((info.num_frames, info.duration_s), (11, 2.0));

    // More samples than pictures repeat pictures.
    let twice = decode_video(&VideoSource::FrameList(paths[..2].to_vec()), &every(4), &limits).unwrap();
    assert_eq!(twice.indices, [0, 0, 1, 1]);
    assert_eq!(twice.frames, [&frames[0], &frames[0], &frames[1], &frames[1]].map(Clone::clone));

    // Budgeted: 6 x 8 is enlarged to one token, with the resize of pictures.
    let budget = PixelBudget { min_pixels: Some(784), max_pixels: Some(1568), total_pixels: None };
    let sized = VideoRequest { size: FrameSize::Budget { budget, factor: 28 }, ..default };
    let video = decode_video(&source, &sized, &limits).unwrap();
    assert_eq!(video.frames[4], resize_bicubic(&frames[4], 28, 28).unwrap());
    let small = Limits { max_video_bytes: 28 * 28 * 3 * 11 - 1, ..Limits::default() };
    assert!(matches!(decode_video(&source, &sized, &small), Err(MediaError::TooLarge { .. })));

    save_png(&paths[5], &Rgb8Image::filled(9, 6, [0; 3]).unwrap());
    let error = decode_video(&source, &every(11), &limits).unwrap_err();
    assert!(error.to_string().contains("frame_5.png") && error.to_string().contains("9x6"), "{error}");
    let empty = tempfile::tempdir().unwrap();
    assert!(decode_video(&VideoSource::from_path(empty.path()), &every(1), &limits).is_err());
    assert!(decode_video(&VideoSource::FrameList(vec![]), &every(1), &limits).is_err());
    let still = VideoSource::File(paths[0].clone());
    let error = decode_video(&still, &every(1), &limits).unwrap_err();
    assert!(error.to_string().contains("still image"), "{error}");
}

#[test]
fn frames_become_the_patches_of_the_transformers_video_processor() {
    for row in golden("videos") {
        let int = |v: &Value| v.as_u64().unwrap() as usize;
        let (t, h, w) = (int(&row["t"]), int(&row["h"]), int(&row["w"]));
        let bytes = noise(int(&row["seed"]) as u64, t * h * w * 3);
        let frames: Vec<Rgb8Image> = bytes
            .chunks_exact(h * w * 3)
            .map(|p| Rgb8Image::new(w as u32, h as u32, p.to_vec()).unwrap())
            .collect();
        let processor = ImageProcessor::from_json(&row["options"].to_string()).unwrap();
        let (rh, rw) = processor.resized(h as u32, w as u32).unwrap();
        let out = processor.process_frames(&frames, rh, rw).unwrap();
        let [gt, gh, gw] = [0, 1, 2].map(|i| int(&row["grid"][i]));
        assert_eq!(out.grid, PatchGrid { t: gt, h: gh, w: gw });
        assert_eq!(gt, t.div_ceil(2));
        if (rh as usize, rw as usize) == (h, w) {
            let bytes: Vec<u8> = out.rows.iter().flat_map(|v| v.to_le_bytes()).collect();
            assert_eq!(sha(&bytes), row["sha256"], "{row}");
        } else {
            // torchvision's bicubic is not Pillow's: at most 2 levels.
            let expected = std::fs::read(data("video_levels.bin")).unwrap();
            assert_eq!(expected.len(), out.rows.len());
            let mut num_differ = 0;
            for (i, (value, level)) in out.rows.iter().zip(&expected).enumerate() {
                let c = i % out.row_len / (out.row_len / 3);
                let got = (f64::from(*value) * processor.std[c] + processor.mean[c]) * 255.0;
                assert!((got - f64::from(*level)).abs() < 2.01, "at {i}: {got} and {level}");
                num_differ += usize::from((got - f64::from(*level)).abs() > 0.5);
            }
            assert!(num_differ * 50 < expected.len(), "{num_differ} of {} differ", expected.len());
        }
    }
}

#[test]
fn other_sources_refuse_a_list_rate() {
    let wrong = VideoRequest { listed_fps: Some(2.0), ..every(1) };
    let error =
        decode_video(&VideoSource::File(data("animated.gif")), &wrong, &Limits::default()).unwrap_err();
    assert!(matches!(error, MediaError::Setting { .. }), "{error}");
}

/// Makes a clip with ffmpeg. Frame i of the lossless clips has the grey level 4 i + 10 everywhere.
fn ffmpeg(args: &[&str], path: &Path) {
    let status = Command::new("ffmpeg").args(["-v", "error", "-y"]).args(args).arg(path).status().unwrap();
    assert!(status.success());
}

const COUNTER: &str = "color=c=black:s=32x24:r=10:d=5,geq=lum='4*N+10':cb=128:cr=128";

fn counter_clip(path: &Path) {
    ffmpeg(
        &[
            "-f",
            "lavfi",
            "-i",
            COUNTER,
            "-c:v",
            "libx264",
            "-qp",
            "0",
            "-bf",
            "2",
            "-pix_fmt",
            "yuv420p",
            "-color_range",
            "tv",
        ],
        path,
    );
}

/// The number that `COUNTER` wrote into a frame: limited-range luma to full range and back.
fn counted(video: &VideoFrames) -> Vec<usize> {
    let index = |f: &Rgb8Image| {
        let luma = f64::from(f.pixels[0]) * 219.0 / 255.0 + 16.0;
        ((luma - 10.0) / 4.0).round() as usize
    };
    video.frames.iter().map(index).collect()
}

#[test]
#[ignore = "needs ffmpeg; .ci/run runs it"]
fn ffmpeg_gives_exactly_the_frames_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let limits = Limits::default();
    // One with a frame count in the header, one without, one with a name that looks like a flag and a protocol.
    for name in ["clip.mp4", "clip.mkv", "-i http:clip.mp4"] {
        let path = dir.path().join(name);
        counter_clip(&path);
        let source = VideoSource::File(path);
        let info = probe_video(&source, None, &limits).unwrap();
        assert_eq!((info.width_px, info.height_px, info.num_frames), (32, 24, 50), "{name}");
        assert!((info.fps - 10.0).abs() < 1e-9 && (info.duration_s - 5.0).abs() < 1e-9);

        let one_fps = QwenSampling { fps: Some(1.0), ..Default::default() };
        let video = decode_video(&source, &request(FrameSampling::Qwen(one_fps)), &limits).unwrap();
        // 5 s at 1 per second, made even: 4 of 50: 0, 16.33, 32.67, 49.
        assert_eq!(video.indices, [0, 16, 33, 49]);
        // Luma is cut at 16 and 235 on the way to RGB: frames 0 and 1 look like 1.5.
        assert_eq!(counted(&video)[1..], [16, 33, 49]);
        assert_eq!(video.timestamps_s, [0.0, 1.6, 3.3, 4.9]);
        assert!((video.sampled_fps - 0.8).abs() < 1e-12 && (2.0 / video.sampled_fps - 2.5).abs() < 1e-12);

        let range = QwenSampling {
            nframes: Some(6),
            video_start: Some(2.0),
            video_end: Some(3.0),
            ..Default::default()
        };
        let video = decode_video(&source, &request(FrameSampling::Qwen(range)), &limits).unwrap();
        assert_eq!(video.indices, [20, 22, 24, 26, 28, 30]);
        assert_eq!(counted(&video), video.indices);
        let segments = FrameSampling::Segments { frame_counts: vec![30.0, 20.0], num_frames: 4 };
        let video = decode_video(&source, &request(segments), &limits).unwrap();
        assert_eq!(video.indices, [0, 9, 19, 29, 30, 36, 42, 49]);
        assert_eq!(counted(&video)[1..], video.indices[1..]);
        let all = decode_video(&source, &every(50), &limits).unwrap();
        assert_eq!(counted(&all)[2..], all.indices[2..]);
    }
}

/// Sets the display matrix of the first track of an MP4: the upper left 2 × 2 numbers.
fn with_matrix(mp4: &[u8], matrix: [i32; 4]) -> Vec<u8> {
    let mut out = mp4.to_vec();
    // Version 0 of the box has the nine numbers of the matrix 44 bytes behind its name.
    let start = 44 + mp4.windows(4).position(|name| name == b"tkhd").unwrap();
    let [a, b, c, d] = matrix.map(|number| number << 16);
    for (at, number) in [a, b, 0, c, d, 0, 0, 0, 1 << 30].into_iter().enumerate() {
        out[start + 4 * at..][..4].copy_from_slice(&i32::to_be_bytes(number));
    }
    out
}

/// The frames of each turn equal those of decord 0.6 up to its conversion of colours: `transpose=1` for 90 degrees and so on. Decord
/// reads the angle of a matrix that mirrors, which is 0 or 180.
#[test]
#[ignore = "needs ffmpeg; .ci/run runs it"]
fn ffmpeg_frames_are_turned_by_the_display_matrix() {
    let (dir, limits) = (tempfile::tempdir().unwrap(), Limits::default());
    let path = dir.path().join("clip.mp4");
    ffmpeg(&["-f", "lavfi", "-i", "testsrc=s=64x48:r=10:d=1", "-pix_fmt", "yuv420p"], &path);
    let plain = std::fs::read(&path).unwrap();
    let stored = VideoRequest { orientation: Orientation::Stored, ..request(nframes(2)) };
    let expected = decode_video(&VideoSource::File(path.clone()), &stored, &limits).unwrap();
    for (matrix, turn) in [
        ([1, 0, 0, 1], 1),
        ([0, 1, -1, 0], 6),
        ([-1, 0, 0, -1], 3),
        ([0, -1, 1, 0], 8),
        ([-1, 0, 0, 1], 3),
        ([1, 0, 0, -1], 1),
        // 45 degrees.
        ([1, 1, -1, 1], 1),
    ] {
        std::fs::write(&path, with_matrix(&plain, matrix)).unwrap();
        let source = VideoSource::File(path.clone());
        let info = probe_video(&source, None, &limits).unwrap();
        assert_eq!((info.turn.exif(), info.width_px, info.height_px), (turn, 64, 48), "{matrix:?}");
        assert_eq!(decode_video(&source, &stored, &limits).unwrap(), expected, "{matrix:?}");
        let upright = decode_video(&source, &request(nframes(2)), &limits).unwrap();
        for (frame, stored) in upright.frames.iter().zip(&expected.frames) {
            let [w, h] = info.size_px(Orientation::Upright);
            assert_eq!((frame.width_px, frame.height_px), (w, h), "{matrix:?}");
            let pixel = |of: &Rgb8Image, x: u32, y: u32| {
                of.pixels[3 * (y * of.width_px + x) as usize..][..3].to_vec()
            };
            for (x, y) in [(0, 0), (5, 9), (w - 1, h - 1), (w - 1, 3)] {
                let from = match turn {
                    1 => (x, y),
                    3 => (63 - x, 47 - y),
                    6 => (y, 47 - x),
                    _ => (63 - y, x),
                };
                assert_eq!(pixel(frame, x, y), pixel(stored, from.0, from.1), "{matrix:?} {x} {y}");
            }
        }
        // Frames are turned before they are resized.
        let size = FrameSize::Exact { width_px: 28, height_px: 56 };
        let sized = decode_video(&source, &VideoRequest { size, ..request(nframes(2)) }, &limits).unwrap();
        assert_eq!(sized.frames[0], resize_bicubic(&upright.frames[0], 28, 56).unwrap());
    }
}

#[test]
#[ignore = "needs ffmpeg; .ci/run runs it"]
fn ffmpeg_frames_are_resized_as_they_arrive() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("clip.mp4");
    ffmpeg(&["-f", "lavfi", "-i", "testsrc=s=320x180:r=25:d=2", "-pix_fmt", "yuv420p"], &path);
    let source = VideoSource::File(path);
    let native = decode_video(&source, &request(nframes(4)), &Limits::default()).unwrap();
    assert_eq!((native.frames[0].width_px, native.frames[0].height_px), (320, 180));
    let budget = PixelBudget { min_pixels: Some(784), max_pixels: Some(20000), total_pixels: None };
    let (h, w) = budget.frame_size(4, 180, 320, 28).unwrap();
    let size = FrameSize::Budget { budget, factor: 28 };
    let sized = VideoRequest { size, ..request(nframes(4)) };
    let sized = decode_video(&source, &sized, &Limits::default()).unwrap();
    assert_eq!((h, w), (84, 168));
    for (a, b) in native.frames.iter().zip(&sized.frames) {
        assert_eq!(resize_bicubic(a, w, h).unwrap(), *b);
    }
    // The frames move: consecutive samples differ.
    assert_ne!(native.frames[0], native.frames[1]);
    let patches = ImageProcessor::video_default().process_frames(&sized.frames, h, w).unwrap();
    assert_eq!(patches.grid, PatchGrid { t: 2, h: 6, w: 12 });
}

#[test]
#[ignore = "needs ffmpeg; .ci/run runs it"]
fn ffmpeg_handles_many_frames_hidden_frames_and_odd_sizes() {
    let dir = tempfile::tempdir().unwrap();
    let limits = Limits::default();
    let path = dir.path().join("long.mp4");
    ffmpeg(&["-f", "lavfi", "-i", "testsrc=s=33x25:r=30:d=60", "-c:v", "mpeg4"], &path);
    let source = VideoSource::File(path);
    let video = decode_video(&source, &request(nframes(768)), &limits).unwrap();
    assert_eq!((video.frames.len(), video.frames[0].width_px, video.frames[0].height_px), (768, 33, 25));
    assert_eq!(video.indices[767], 1799);

    // VP8 with alternate reference frames: more packets than pictures.
    let path = dir.path().join("hidden.webm");
    ffmpeg(
        &[
            "-f",
            "lavfi",
            "-i",
            "testsrc=s=64x48:r=10:d=4",
            "-c:v",
            "libvpx",
            "-auto-alt-ref",
            "1",
            "-lag-in-frames",
            "16",
        ],
        &path,
    );
    let video = decode_video(&VideoSource::File(path), &every(40), &limits).unwrap();
    assert_eq!(video.indices, (0..40).collect::<Vec<_>>());
    assert!((video.source_fps - 10.0).abs() < 0.01, "{}", video.source_fps);
}

#[test]
#[ignore = "needs ffmpeg; .ci/run runs it"]
fn ffmpeg_reports_damage_within_the_time_limit() {
    let dir = tempfile::tempdir().unwrap();
    let limits = Limits { timeout: Duration::from_secs(10), ..Limits::default() };
    for name in ["cut.mp4", "cut.mkv", "faststart.mp4"] {
        let whole = dir.path().join(format!("whole_{name}"));
        let args =
            ["-f", "lavfi", "-i", "testsrc=s=160x120:r=25:d=4", "-c:v", "libx264", "-pix_fmt", "yuv420p"];
        let front: &[&str] = if name == "faststart.mp4" { &["-movflags", "+faststart"] } else { &[] };
        ffmpeg(&[&args, front].concat(), &whole);
        let bytes = std::fs::read(&whole).unwrap();
        let path = dir.path().join(name);
        std::fs::write(&path, &bytes[..bytes.len() * 3 / 5]).unwrap();
        let started = Instant::now();
        let error = decode_video(&VideoSource::File(path), &request(nframes(8)), &limits).unwrap_err();
        assert!(started.elapsed() < limits.timeout, "{error}");
        assert!(error.to_string().contains(name), "{error}");
        assert!(
            matches!(error, MediaError::Truncated { .. } | MediaError::ProgramFailed { .. }),
            "{name}: {error}"
        );
    }
    // Bytes overwritten in the middle.
    let whole = dir.path().join("whole_cut.mp4");
    let mut bytes = std::fs::read(&whole).unwrap();
    let mid = bytes.len() / 2;
    bytes[mid - 3000..mid].copy_from_slice(&noise(1, 3000));
    let path = dir.path().join("scratched.mp4");
    std::fs::write(&path, &bytes).unwrap();
    let error = decode_video(&VideoSource::File(path), &request(nframes(8)), &limits).unwrap_err();
    assert!(matches!(error, MediaError::ProgramFailed { .. }), "{error}");

    let path = dir.path().join("text.mp4");
    std::fs::write(&path, "not a video").unwrap();
    let error = probe_video(&VideoSource::File(path), None, &limits).unwrap_err();
    assert!(matches!(error, MediaError::ProgramFailed { .. }), "{error}");

    let hasty = Limits { timeout: Duration::from_millis(1), ..Limits::default() };
    let started = Instant::now();
    let error = decode_video(&VideoSource::File(whole.clone()), &request(nframes(8)), &hasty).unwrap_err();
    assert!(matches!(error, MediaError::Timeout { .. }), "{error}");
    assert!(started.elapsed() < Duration::from_secs(2));
    let few = Limits { max_frames: 99, ..Limits::default() };
    let error = decode_video(&VideoSource::File(whole), &request(nframes(8)), &few).unwrap_err();
    assert!(matches!(error, MediaError::TooLarge { got: 100, max: 99, .. }), "{error}");
}

#[test]
#[ignore = "needs ffmpeg; .ci/run runs it"]
fn ffmpeg_follows_no_playlist() {
    let dir = tempfile::tempdir().unwrap();
    counter_clip(&dir.path().join("secret.mp4"));
    for (name, text) in [
        ("list.mp4", "ffconcat version 1.0\nfile secret.mp4\n"),
        ("list.m3u8", "#EXTM3U\n#EXT-X-TARGETDURATION:5\n#EXTINF:5,\nsecret.mp4\n#EXT-X-ENDLIST\n"),
    ] {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        let error = decode_video(&VideoSource::File(path), &every(2), &Limits::default()).unwrap_err();
        assert!(matches!(error, MediaError::ProgramFailed { .. }), "{error}");
    }
    // Sound alone is no video.
    let path = dir.path().join("sound.mp4");
    ffmpeg(&["-f", "lavfi", "-i", "sine=d=1"], &path);
    let error = probe_video(&VideoSource::File(path), None, &Limits::default()).unwrap_err();
    assert!(matches!(error, MediaError::Format { .. }), "{error}");
}
