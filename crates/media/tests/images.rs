//! Pictures against Pillow and the PIL-backend processors of transformers; goldens by `data/make_images.py`.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

use std::io::Cursor;

use omnigrpo_media::qwen_vl::{ImageProcessor, PatchGrid, Processors};
use omnigrpo_media::{
    Filter, Limits, MediaError, Orientation, Rgb8Image, load_image, load_image_bytes, probe_image, resize,
    resize_bicubic,
};
use serde_json::Value;

mod common;

use common::{data, golden, noise, sha};

fn num(v: &Value) -> u32 {
    u32::try_from(v.as_u64().unwrap()).unwrap()
}

#[test]
fn resize_equals_pillow() {
    for row in golden("resize") {
        let (w, h) = (num(&row["size"][0]), num(&row["size"][1]));
        let (w2, h2) = (num(&row["out"][0]), num(&row["out"][1]));
        let pixels = noise(row["seed"].as_u64().unwrap(), (w * h * 3) as usize);
        let image = Rgb8Image::new(w, h, pixels).unwrap();
        let out = resize_bicubic(&image, w2, h2).unwrap();
        if let Some(pixels) = row["pixels"].as_array() {
            assert_eq!(out.pixels, pixels.iter().map(|v| num(v) as u8).collect::<Vec<_>>(), "{row}");
        }
        assert_eq!(sha(&out.pixels), row["sha256"], "{w}x{h} -> {w2}x{h2}");
    }
}

#[test]
fn resize_with_lanczos_equals_pillow() {
    let rows = golden("resize_lanczos");
    assert_eq!(rows.len(), 12);
    for row in rows {
        let [w, h] = [0, 1].map(|i| num(&row["size"][i]));
        let [w2, h2] = [0, 1].map(|i| num(&row["out"][i]));
        let image = Rgb8Image::new(w, h, noise(row["seed"].as_u64().unwrap(), (w * h * 3) as usize));
        let out = resize(&image.unwrap(), w2, h2, Filter::Lanczos).unwrap();
        assert_eq!(sha(&out.pixels), row["sha256"], "{row}");
    }
}

/// The two orders of the passes differ in their pixels; Pillow 13 takes either, by size.
#[test]
fn resize_takes_its_passes_in_the_order_of_pillow_13() {
    let rows = golden("resize_order");
    let vertical_first = |row: &&Value| row["vertical_first"].as_bool().unwrap();
    let count = rows.iter().filter(vertical_first).count();
    assert!(count >= 30 && rows.len() - count >= 30, "{count} of {}", rows.len());
    for row in &rows {
        let [w, h] = [0, 1].map(|i| num(&row["size"][i]));
        let [w2, h2] = [0, 1].map(|i| num(&row["out"][i]));
        let image = Rgb8Image::new(w, h, noise(row["seed"].as_u64().unwrap(), (w * h * 3) as usize));
        let out = resize_bicubic(&image.unwrap(), w2, h2).unwrap();
        assert_eq!(sha(&out.pixels), row["sha256"], "{row}");
    }
}

#[test]
fn files_decode_as_pillow_and_transformers_convert_them() {
    let limits = Limits::default();
    let mut num_exact = 0;
    for row in golden("files") {
        let name = row["name"].as_str().unwrap();
        let image = load_image(&data(name), Orientation::Stored, &limits).unwrap();
        let info = probe_image(&data(name), &limits).unwrap();
        let size = (num(&row["size"][0]), num(&row["size"][1]));
        assert_eq!((image.width_px, image.height_px), size, "{name}");
        assert_eq!((info.width_px, info.height_px), size, "{name}");
        if name.starts_with("photo") {
            // Lossy formats have another decoder than Pillow. The bound is the documented one.
            let expected = std::fs::read(data(&format!("{name}.rgb"))).unwrap();
            let worst = image.pixels.iter().zip(&expected).map(|(a, b)| a.abs_diff(*b)).max().unwrap();
            assert!(worst <= 3, "{name}: {worst} levels");
        } else {
            assert_eq!(sha(&image.pixels), row["sha256"], "{name}");
            num_exact += 1;
        }
    }
    assert_eq!(num_exact, 17);
}

/// The eight values of the tag and wrong ones, in every format and place that Pillow reads, and files with damaged tags.
#[test]
fn pictures_are_turned_as_pillow_turns_them() {
    use base64::Engine as _;
    let limits = Limits::default();
    let dir = tempfile::tempdir().unwrap();
    let rows: Vec<Value> =
        serde_json::from_slice(&std::fs::read(data("orientations.json")).unwrap()).unwrap();
    let (mut turned, mut wrong) = (0, Vec::new());
    for row in &rows {
        let name = row["name"].as_str().unwrap();
        let path = dir.path().join(name);
        let file = base64::engine::general_purpose::STANDARD.decode(row["file"].as_str().unwrap()).unwrap();
        std::fs::write(&path, &file).unwrap();
        let upright = load_image(&path, Orientation::Upright, &limits).unwrap();
        let info = probe_image(&path, &limits).unwrap();
        let size = [0, 1].map(|i| num(&row["turned"][i]));
        if sha(&upright.pixels) != row["sha256"] || [upright.width_px, upright.height_px] != size {
            wrong.push(name);
        }
        assert_eq!(info.size_px(Orientation::Upright), [upright.width_px, upright.height_px], "{name}");
        let stored = load_image(&path, Orientation::Stored, &limits).unwrap();
        assert_eq!(info.size_px(Orientation::Stored), [stored.width_px, stored.height_px], "{name}");
        assert_eq!(load_image_bytes(name, &file, Orientation::Upright, &limits).unwrap(), upright, "{name}");
        // A turn that changes pixels is one in the header.
        assert_eq!(upright != stored, info.turn.exif() != 1, "{name}");
        turned += usize::from(upright != stored);
    }
    assert_eq!(wrong, [""; 0]);
    assert!(rows.len() > 140 && turned > 80, "{turned} of {}", rows.len());
}

/// Damaged headers cost at most the turn.
#[test]
fn damaged_tags_are_no_failure_of_the_program() {
    use base64::Engine as _;
    let limits = Limits::default();
    let rows: Vec<Value> =
        serde_json::from_slice(&std::fs::read(data("orientations.json")).unwrap()).unwrap();
    let mut pictures = 0;
    for (seed, row) in rows.iter().enumerate() {
        let name = row["name"].as_str().unwrap();
        let file = base64::engine::general_purpose::STANDARD.decode(row["file"].as_str().unwrap()).unwrap();
        let random = noise(seed as u64, 3 * 40);
        for change in random.chunks_exact(3) {
            let mut damaged = file.clone();
            let at = usize::from(change[0]) * file.len() / 256;
            if change[2] < 60 {
                damaged.truncate(at);
            } else {
                damaged[at] = change[1];
            }
            if let Ok(upright) = load_image_bytes(name, &damaged, Orientation::Upright, &limits) {
                let stored = load_image_bytes(name, &damaged, Orientation::Stored, &limits).unwrap();
                assert_eq!(upright.pixels.len(), stored.pixels.len(), "{name}");
                pictures += 1;
            }
        }
    }
    assert!(pictures > 500, "{pictures}");
}

#[test]
fn patches_equal_the_transformers_processor() {
    for row in golden("patches") {
        let (h, w, channels) = (num(&row["h"]), num(&row["w"]), num(&row["channels"]));
        let pixels = noise(row["seed"].as_u64().unwrap(), (h * w * channels) as usize);
        let color = match channels {
            1 => image::ExtendedColorType::L8,
            3 => image::ExtendedColorType::Rgb8,
            _ => image::ExtendedColorType::Rgba8,
        };
        let mut png = Cursor::new(Vec::new());
        image::write_buffer_with_format(&mut png, &pixels, w, h, color, image::ImageFormat::Png).unwrap();
        let image =
            load_image_bytes("noise.png", png.get_ref(), Orientation::Upright, &Limits::default()).unwrap();

        let processor = ImageProcessor::from_json(&row["options"].to_string()).unwrap();
        let out = processor.process_image(&image).unwrap();
        let grid = PatchGrid { t: 1, h: num(&row["grid"][1]) as usize, w: num(&row["grid"][2]) as usize };
        assert_eq!(out.grid, grid, "{row}");
        assert_eq!(out.rows.len(), grid.num_patches() * out.row_len);
        let (rh, rw) = processor.resized(h, w).unwrap();
        assert_eq!(processor.grid(1, rh, rw).unwrap(), grid);
        let last = &out.rows[out.rows.len() - out.row_len..];
        for i in 0..4 {
            assert_eq!(out.rows[i], row["head"][i].as_f64().unwrap() as f32, "{row}");
            assert_eq!(last[out.row_len - 4 + i], row["tail"][i].as_f64().unwrap() as f32, "{row}");
        }
        let bytes: Vec<u8> = out.rows.iter().flat_map(|v| v.to_le_bytes()).collect();
        assert_eq!(sha(&bytes), row["sha256"], "{row}");
    }
}

#[test]
fn damaged_and_foreign_files_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    let limits = Limits::default();
    for name in ["rgba.png", "photo_420.jpg", "photo.webp", "animated.gif", "plain.bmp", "plain.tiff"] {
        let bytes = std::fs::read(data(name)).unwrap();
        let path = dir.path().join(name);
        std::fs::write(&path, &bytes[..bytes.len() / 4]).unwrap();
        let error = load_image(&path, Orientation::Upright, &limits).unwrap_err();
        assert!(error.to_string().contains(name), "{error}");
    }
    let path = dir.path().join("text.png");
    std::fs::write(&path, "no picture at all").unwrap();
    let error = load_image(&path, Orientation::Upright, &limits).unwrap_err();
    assert!(matches!(error, MediaError::Format { .. }), "{error}");
    assert!(error.to_string().contains("PNG, JPEG, WebP"), "{error}");
    assert!(matches!(probe_image(&path, &limits), Err(MediaError::Format { .. })));
    std::fs::write(&path, "").unwrap();
    assert!(matches!(load_image(&path, Orientation::Upright, &limits), Err(MediaError::Format { .. })));
    assert!(matches!(
        load_image(&dir.path().join("none.png"), Orientation::Upright, &limits),
        Err(MediaError::Read { .. })
    ));
    assert!(matches!(load_image(dir.path(), Orientation::Upright, &limits), Err(MediaError::Read { .. })));
}

#[test]
fn limits_hold_before_the_pixels_are_decoded() {
    let path = data("rgba.png"); // 13 x 9, 545 bytes
    for limits in [
        Limits { max_pixels: 13 * 9 - 1, ..Limits::default() },
        Limits { max_file_bytes: 544, ..Limits::default() },
    ] {
        for error in [
            load_image(&path, Orientation::Upright, &limits).unwrap_err(),
            probe_image(&path, &limits).unwrap_err(),
        ] {
            assert!(matches!(error, MediaError::TooLarge { .. }), "{error}");
        }
    }
    let limits = Limits { max_alloc_bytes: 13 * 9 * 4 - 1, ..Limits::default() };
    assert!(load_image(&path, Orientation::Upright, &limits).is_err());
    let limits =
        Limits { max_pixels: 13 * 9, max_file_bytes: 545, max_alloc_bytes: 1 << 20, ..Limits::default() };
    assert!(load_image(&path, Orientation::Upright, &limits).is_ok());

    // A PNG header that promises 60 000 x 60 000 pixels.
    let mut bomb = std::fs::read(&path).unwrap();
    bomb[16..24].copy_from_slice(&[0, 0, 0xEA, 0x60, 0, 0, 0xEA, 0x60]);
    assert!(load_image_bytes("bomb.png", &bomb, Orientation::Upright, &Limits::default()).is_err());
}

#[cfg(unix)]
#[test]
fn pipes_are_refused_without_blocking() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pipe.png");
    assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
    let error = load_image(&path, Orientation::Upright, &Limits::default()).unwrap_err();
    let why = omnigrpo_guard::told(&error);
    assert!(why.contains("not a regular file"), "{why}");
}

#[test]
fn processor_files_are_read_in_every_published_layout() {
    let dir = tempfile::tempdir().unwrap();
    assert!(matches!(
        Processors::load(dir.path(), &ImageProcessor::video_default()),
        Err(MediaError::Read { .. })
    ));

    // Hub file of Qwen2-VL: also governs videos.
    let hub = r#"{"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
        "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2VLProcessor"}"#;
    std::fs::write(dir.path().join("preprocessor_config.json"), hub).unwrap();
    let both = Processors::load(dir.path(), &ImageProcessor::video_default()).unwrap();
    let expected = ImageProcessor { max_pixels: 12845056, ..ImageProcessor::default() };
    assert_eq!(both, Processors { image: expected.clone(), video: expected.clone() });

    std::fs::write(
        dir.path().join("video_preprocessor_config.json"),
        r#"{"size": {"shortest_edge": 100352, "longest_edge": 602112}, "resample": 3}"#,
    )
    .unwrap();
    let both = Processors::load(dir.path(), &ImageProcessor::video_default()).unwrap();
    assert_eq!(both.image, expected);
    assert_eq!(both.video, ImageProcessor::video_default());

    // transformers 5: one nested file, which wins.
    std::fs::write(
        dir.path().join("processor_config.json"),
        r#"{"processor_class": "Qwen2_5_VLProcessor",
            "image_processor": {"size": {"shortest_edge": 784, "longest_edge": 1568}, "rescale_factor": 0.5},
            "video_processor": {"temporal_patch_size": 4, "fps": 2}}"#,
    )
    .unwrap();
    let both = Processors::load(dir.path(), &ImageProcessor::video_default()).unwrap();
    let image = ImageProcessor {
        min_pixels: 784,
        max_pixels: 1568,
        rescale_factor: 0.5,
        ..ImageProcessor::default()
    };
    assert_eq!(both.image, image);
    assert_eq!(both.video, ImageProcessor { temporal_patch_size: 4, ..ImageProcessor::video_default() });

    for bad in [
        "[]",
        r#"{"patch_size": 0}"#,
        r#"{"min_pixels": 9, "max_pixels": 8}"#,
        r#"{"image_std": [1, 0, 1]}"#,
        r#"{"resample": 2}"#,
        r#"{"size": {"height": 224, "width": 224}}"#,
    ] {
        assert!(matches!(ImageProcessor::from_json(bad), Err(MediaError::Setting { .. })), "{bad}");
    }
}

#[test]
fn sides_must_fit_when_resizing_is_off() {
    let processor = ImageProcessor { do_resize: false, ..ImageProcessor::default() };
    let image = Rgb8Image::filled(30, 56, [1, 2, 3]).unwrap();
    let error = processor.process_image(&image).unwrap_err();
    assert!(error.to_string().contains("multiples of 28"), "{error}");
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(64))]

    /// Bytes changed anywhere end in a picture or an error, never in a panic or a picture that contradicts itself.
    #[test]
    fn changed_bytes_end_in_a_picture_or_an_error(
        file in 0usize..6,
        changes in proptest::collection::vec((0usize..4000, 0u8..), 1..8),
    ) {
        let name = ["rgba.png", "palette.png", "photo_420.jpg", "photo.webp", "animated.gif", "plain.tiff"][file];
        let mut bytes = std::fs::read(data(name)).unwrap();
        for (at, value) in changes {
            let at = at % bytes.len();
            bytes[at] = value;
        }
        let limits = Limits { max_pixels: 1 << 20, max_alloc_bytes: 1 << 24, ..Limits::default() };
        if let Ok(image) = load_image_bytes(name, &bytes, Orientation::Upright, &limits) {
            proptest::prop_assert!(image.pixels.len() == (image.width_px * image.height_px * 3) as usize);
        }
    }
}

/// The first bytes of photos as `pillow-heif` 1.x and phones write them.
#[test]
fn a_photo_of_an_iphone_gets_the_command_that_converts_it() {
    let folder = tempfile::tempdir().unwrap();
    let limits = Limits::default();
    let path = folder.path().join("it's.HEIC");
    for start in [&b"\0\0\0\x1cftypheic\0\0\0\0mif1heicmiaf"[..], b"\0\0\0\x24ftypmif1\0\0\0\0mif1MiHEheic"] {
        std::fs::write(&path, start).unwrap();
        let probed = probe_image(&path, &limits).unwrap_err().to_string();
        let read = load_image(&path, Orientation::Upright, &limits).unwrap_err().to_string();
        for told in [probed, read] {
            assert!(told.contains("the content is HEIC") && told.contains("`heif-convert '"), "{told}");
            assert!(told.contains("it'\\''s.jpg'`") && told.contains("libheif-examples"), "{told}");
        }
    }
    // AVIF has the same container.
    std::fs::write(&path, b"\0\0\0\x1cftypmif1\0\0\0\0avifmif1miaf").unwrap();
    let told = probe_image(&path, &limits).unwrap_err().to_string();
    assert!(!told.contains("heif-convert"), "{told}");
}
