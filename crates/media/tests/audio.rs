//! Sound against other programs: ffmpeg's decoders, soxr's resampler, the features of `transformers`. The expected numbers
//! and the files are made by `tests/data/make_audio.py`.
#![allow(clippy::unwrap_used, missing_docs)]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use omnigrpo_media::audio::{AudioClip, AudioRange, LogMel, probe_audio, read_audio, resample};
use omnigrpo_media::{Limits, MediaError};
use serde_json::Value;

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/audio").join(name)
}

fn golden() -> Value {
    serde_json::from_slice(&std::fs::read(data("audio.json")).unwrap()).unwrap()
}

fn f32s(name: &str) -> Vec<f32> {
    let bytes = std::fs::read(data(name)).unwrap();
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

/// Returns what ffmpeg decodes from a file of `tests/data/audio`.
fn decoded_by_ffmpeg(name: &str) -> Vec<f32> {
    let order =
        ["speech.wav", "speech.mp3", "speech.m4a", "speech.aac", "speech.ogg", "speech.opus", "clip.mp4"];
    let golden = golden();
    let len = |name: &str| golden["lengths"][name].as_u64().unwrap() as usize;
    let start: usize = order.iter().take_while(|&&other| other != name).map(|other| len(other)).sum();
    let bytes = std::fs::read(data("decoded.bin")).unwrap();
    let bytes = &bytes[2 * start..2 * (start + len(name))];
    bytes.chunks_exact(2).map(|b| f32::from(i16::from_le_bytes([b[0], b[1]])) / 32768.0).collect()
}

fn read(name: &str) -> AudioClip {
    read_audio(&data(name), &AudioRange::default(), &Limits::default()).unwrap()
}

fn seconds(start_s: Option<f64>, end_s: Option<f64>, keep_s: Option<f64>) -> AudioRange {
    AudioRange { start_s, end_s, keep_s }
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// The generator of `make_audio.py`, in [-1, 1).
fn noise(n: usize) -> Vec<f32> {
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 16) as f32 / 32768.0 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

#[test]
fn lossless_files_give_their_exact_samples() {
    let expected = decoded_by_ffmpeg("speech.wav");
    for name in ["speech.wav", "speech.flac"] {
        let clip = read(name);
        assert_eq!(clip.sample_rate_hz, 22050);
        assert_eq!(clip.samples, expected, "{name}");
        assert!((clip.duration_s() - 0.2).abs() < 1e-9);
    }
    // Left is the word, right minus half of it: the mean is a quarter (sox rounds the right channel to 16 bits).
    let stereo = read("speech_stereo.wav");
    assert_eq!(stereo.samples.len(), expected.len());
    for (i, (mean, left)) in stereo.samples.iter().zip(&expected).enumerate() {
        assert!((mean - left / 4.0).abs() <= 0.5 / 32768.0, "{i}: {mean} and {left}");
    }
    // 300 samples from 0.05 s on at other depths: 24 bits and float hold 16 bits exactly, 8 bits to half a step.
    let part = &expected[1103..1403];
    for (name, tolerance) in
        [("short_24.wav", 0.0), ("short_f32.wav", 0.0), ("short_u8.wav", 0.5 / 128.0 + 1e-6)]
    {
        let clip = read(name);
        assert_eq!(clip.samples.len(), 300, "{name}");
        let difference = largest_difference(&clip.samples, part);
        assert!(difference <= tolerance, "{name}: {difference}");
    }
}

#[test]
fn lossy_files_equal_ffmpegs_decoders() {
    // (file, samples that come before ffmpeg's first: the encoder delay that only the edit list tells)
    for (name, early) in
        [("speech.mp3", 0), ("speech.ogg", 0), ("speech.aac", 0), ("speech.m4a", 1024), ("clip.mp4", 1024)]
    {
        let clip = read(name);
        let expected = decoded_by_ffmpeg(name);
        assert_eq!(clip.sample_rate_hz, 22050, "{name}");
        assert!(clip.samples.len() >= expected.len() + early, "{name}: {}", clip.samples.len());
        // The expected samples are rounded to 16 bits: half a step of 2^-15.
        let difference = largest_difference(&clip.samples[early..], &expected);
        assert!(difference < 1.6e-5, "{name}: {difference}");
        let info = probe_audio(&data(name), &Limits::default()).unwrap();
        assert_eq!((info.sample_rate_hz, info.num_channels), (22050, 1), "{name}");
    }
    // The padding that MP3 and Vorbis need is cut.
    assert_eq!((read("speech.mp3").samples.len(), read("speech.ogg").samples.len()), (4410, 4410));
}

#[test]
fn headers_tell_rate_channels_and_length() {
    let limits = Limits::default();
    for (name, channels) in
        [("speech.wav", 1), ("speech_stereo.wav", 2), ("speech.flac", 1), ("speech.mp3", 1)]
    {
        let info = probe_audio(&data(name), &limits).unwrap();
        assert_eq!((info.sample_rate_hz, info.num_channels), (22050, channels), "{name}");
        assert!((info.duration_s.unwrap() - 0.2).abs() < 1e-6, "{name}: {info:?}");
    }
    assert!((probe_audio(&data("clip.mp4"), &limits).unwrap().duration_s.unwrap() - 0.25).abs() < 0.06);
}

#[test]
fn ranges_are_cut_in_seconds() {
    let whole = read("speech.wav").samples;
    let cut = |range| read_audio(&data("speech.wav"), &range, &Limits::default()).map(|clip| clip.samples);
    assert_eq!(cut(seconds(Some(0.1), Some(0.15), None)).unwrap(), whole[2205..3308]);
    assert_eq!(cut(seconds(Some(0.1), None, None)).unwrap(), whole[2205..]);
    assert_eq!(cut(seconds(None, Some(9.0), None)).unwrap(), whole);
    assert_eq!(cut(seconds(None, None, Some(0.01))).unwrap(), whole[..221]);
    assert_eq!(cut(seconds(Some(0.1), Some(0.15), Some(0.01))).unwrap(), whole[2205..2426]);
    let error = cut(seconds(Some(0.2), None, None)).unwrap_err().to_string();
    assert!(error.contains("got 0.2, expected a time within the sound of 0.200 s"), "{error}");
    for wrong in [
        seconds(Some(-1.0), None, None),
        seconds(Some(f64::NAN), None, None),
        seconds(Some(0.1), Some(0.1), None),
        seconds(None, Some(f64::INFINITY), None),
        seconds(None, None, Some(0.0)),
    ] {
        assert!(matches!(cut(wrong).unwrap_err(), MediaError::Setting { .. }), "{wrong:?}");
    }
}

#[test]
fn resampling_equals_the_exact_signal() {
    let tones = |rate: u32, hz: &[f64]| AudioClip {
        samples: (0..rate)
            .map(|i| {
                let t = f64::from(i) / f64::from(rate);
                hz.iter().map(|hz| 0.25 * (std::f64::consts::TAU * hz * t).sin()).sum::<f64>() as f32
            })
            .collect(),
        sample_rate_hz: rate,
    };
    for rate in [8000, 11025, 22050, 32000, 44100, 48000, 96000] {
        let edge = f64::from(rate.min(16000)) / 2.0;
        let heard = [100.0, 0.4 * edge, 0.9 * edge];
        let mut hz = heard.to_vec();
        if rate > 16000 {
            hz.push(8200.0); // above what 16 kHz can carry
        }
        let got = resample(&tones(rate, &hz), 16000).unwrap();
        assert_eq!((got.samples.len(), got.sample_rate_hz), (16000, 16000), "{rate}");
        let expected = tones(16000, &heard).samples;
        // The ends, where the signal begins and stops abruptly, are another signal.
        let difference = largest_difference(&got.samples[2400..13600], &expected[2400..13600]);
        assert!(difference < 1e-5, "{rate}: {difference}");
    }
    let same = tones(16000, &[100.0]);
    assert_eq!(resample(&same, 16000).unwrap(), same);
    // Lengths round up; short sounds and odd rates work.
    for (n, rate, expected) in [(1, 44100, 1), (3, 44100, 2), (0, 8000, 0), (100, 44099, 37), (5, 7, 11429)] {
        let clip = AudioClip { samples: vec![0.5; n], sample_rate_hz: rate };
        assert_eq!(resample(&clip, 16000).unwrap().samples.len(), expected, "{n} at {rate}");
    }
    assert!(resample(&AudioClip { samples: vec![0.0; 8], sample_rate_hz: 0 }, 16000).is_err());
}

#[test]
fn resampling_is_close_to_soxr() {
    let speech = read("speech.wav");
    let (got, expected) = (resample(&speech, 16000).unwrap().samples, f32s("resampled.bin"));
    assert_eq!(got.len(), expected.len());
    let peak = expected.iter().fold(0.0f32, |a, x| a.max(x.abs()));
    // The two differ in how they cut what lies next to 8 kHz.
    let rms = |x: &mut dyn Iterator<Item = f32>| {
        (x.map(|x| f64::from(x * x)).sum::<f64>() / got.len() as f64).sqrt()
    };
    let difference = rms(&mut got.iter().zip(&expected).map(|(a, b)| a - b));
    assert!(difference < 5e-4 * f64::from(peak), "{difference} of {peak}");
}

#[test]
fn log_mel_features_equal_transformers() {
    let long = noise(16_000 * 31);
    let last = (long.len() - 1) as f32;
    let cases = [
        ("noise_80", noise(20_000).iter().map(|x| x * 0.5).collect::<Vec<_>>()),
        ("speech_128", f32s("resampled.bin")),
        // 31 s: the last second is cut.
        ("long_128", long.iter().enumerate().map(|(i, x)| x * (i as f32 / last) * 0.5).collect()),
        ("silence_80", vec![0.0; 1600]),
    ];
    for (name, samples) in cases {
        let case = &golden()["mels"][name];
        let num_mels = case["num_mels"].as_u64().unwrap() as usize;
        let mel = LogMel::whisper(num_mels).unwrap();
        assert_eq!((mel.sample_rate_hz(), mel.window_s(), mel.num_frames()), (16000, 30.0, 3000));
        let features = mel.features(&samples).unwrap();
        assert_eq!(
            (features.num_mels, features.num_frames, features.data.len()),
            (num_mels, 3000, num_mels * 3000)
        );
        let columns: Vec<_> =
            case["columns"].as_array().unwrap().iter().map(|c| c.as_u64().unwrap() as usize).collect();
        let expected = f32s(&format!("mel_{name}.bin"));
        assert_eq!(expected.len(), num_mels * columns.len());
        for (m, row) in expected.chunks(columns.len()).enumerate() {
            for (&column, &expected) in columns.iter().zip(row) {
                let got = features.data[m * 3000 + column];
                assert!(
                    (got - expected).abs() < 1e-4,
                    "{name}, filter {m}, frame {column}: {got}, {expected}"
                );
            }
        }
    }
    // Nothing at all is silence: ten decades down, no maximum above that.
    let nothing = LogMel::whisper(80).unwrap().features(&[]).unwrap();
    assert!(nothing.data.iter().all(|&x| x == -1.5));
}

#[test]
fn features_of_a_file_at_another_rate() {
    let mel = LogMel::from_config(&data("preprocessor_config.json")).unwrap();
    assert_eq!((mel.num_mels(), mel.num_frames()), (128, 3000));
    let clip = read("speech.wav");
    let by_hand = mel.features(&resample(&clip, 16000).unwrap().samples).unwrap();
    assert_eq!(mel.features_of(&clip).unwrap(), by_hand);
    // The whole way against soxr and transformers; where they differ is next to 8 kHz, in the highest filters.
    let (expected, columns) = (f32s("mel_speech_128.bin"), 27);
    let difference = |m: usize| {
        (0..24).map(|t| (by_hand.data[m * 3000 + t] - expected[m * columns + t]).abs()).fold(0.0, f32::max)
    };
    let low = (0..120).map(difference).fold(0.0, f32::max);
    assert!(low < 1e-3, "{low}");
}

#[test]
fn processors_that_do_something_else_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("preprocessor_config.json");
    let refused = |text: &str| {
        std::fs::write(&path, text).unwrap();
        LogMel::from_config(&path).err().unwrap().to_string()
    };
    for (text, word) in [
        ("{\"feature_extractor_type\": \"Wav2Vec2FeatureExtractor\"}", "Wav2Vec2FeatureExtractor"),
        ("{\"dither\": 0.1}", "dither"),
        ("{\"do_normalize\": true}", "do_normalize"),
        ("{\"n_fft\": 0}", "n_fft"),
        ("{\"hop_length\": 0}", "hop_length"),
        ("{\"hop_length\": 401}", "hop_length"),
        ("{\"feature_size\": 0}", "feature_size"),
        ("{\"chunk_length\": 100000}", "chunk_length"),
        ("{\"sampling_rate\": 0}", "sampling_rate"),
        ("{\"padding_side\": \"left\"}", "padding_side"),
        ("[]", "preprocessor_config.json"),
    ] {
        let error = refused(text);
        assert!(error.contains(word), "{text}: {error}");
    }
    assert!(LogMel::whisper(80).unwrap().features(&[0.0, f32::NAN]).is_err());
    assert!(matches!(LogMel::from_config(dir.path()).err().unwrap(), MediaError::Read { .. }));
}

/// A WAV file of 16-bit or float mono samples that claims `num_bytes` of data and is as long on disk.
fn wav(path: &Path, format: u16, channels: u16, rate: u32, num_bytes: u32, samples: &[u8]) {
    let width = if format == 3 { 4u16 } else { 2 };
    let mut bytes = b"RIFF".to_vec();
    bytes.extend((num_bytes.saturating_add(36)).to_le_bytes());
    bytes.extend(b"WAVEfmt \x10\0\0\0");
    bytes.extend(format.to_le_bytes());
    bytes.extend(channels.to_le_bytes());
    bytes.extend(rate.to_le_bytes());
    bytes.extend(rate.wrapping_mul(u32::from(width * channels)).to_le_bytes());
    bytes.extend((width * channels).to_le_bytes());
    bytes.extend((8 * width).to_le_bytes());
    bytes.extend(b"data");
    bytes.extend(num_bytes.to_le_bytes());
    bytes.extend(samples);
    std::fs::write(path, &bytes).unwrap();
    if samples.is_empty() {
        // A hole: takes no room on disk.
        std::fs::File::options().write(true).open(path).unwrap().set_len(44 + u64::from(num_bytes)).unwrap();
    }
}

#[test]
fn bad_files_are_refused_clearly() {
    let dir = tempfile::tempdir().unwrap();
    let limits = Limits::default();
    let failure = |name: &str| {
        let started = Instant::now();
        let error = read_audio(&dir.path().join(name), &AudioRange::default(), &limits).unwrap_err();
        assert!(started.elapsed() < Duration::from_secs(5), "{name}: {error}");
        assert!(error.to_string().contains(name), "{error}");
        error
    };
    let write = |name: &str, bytes: &[u8]| std::fs::write(dir.path().join(name), bytes).unwrap();
    assert!(matches!(failure("missing.wav"), MediaError::Read { .. }));
    write("empty.wav", b"");
    assert!(omnigrpo_guard::told(&failure("empty.wav")).contains("is empty"));
    std::fs::create_dir(dir.path().join("folder.wav")).unwrap();
    assert!(matches!(failure("folder.wav"), MediaError::Read { .. }));

    // Cut off in the middle.
    for (name, numerator) in [("speech.wav", 5), ("speech.flac", 7), ("speech.mp3", 4)] {
        let bytes = std::fs::read(data(name)).unwrap();
        write(name, &bytes[..bytes.len() * numerator / 10]);
        let error = failure(name);
        assert!(matches!(error, MediaError::Decode { .. }), "{name}: {error}");
    }
    // Overwritten in the middle.
    for name in ["speech.flac", "speech.ogg"] {
        let mut bytes = std::fs::read(data(name)).unwrap();
        let middle = bytes.len() - 600;
        for (i, byte) in bytes[middle..middle + 200].iter_mut().enumerate() {
            *byte = (i * 37) as u8;
        }
        write(name, &bytes);
        let error = failure(name);
        assert!(matches!(error, MediaError::Decode { .. }), "{name}: {error}");
    }

    let path = |name: &str| dir.path().join(name);
    wav(&path("nan.wav"), 3, 1, 8000, 8, &[0, 0, 0, 0, 0, 0, 0xc0, 0x7f]);
    assert!(omnigrpo_guard::told(&failure("nan.wav")).contains("sample 1 is NaN"));
    wav(&path("fast.wav"), 1, 1, 4_000_000_000, 4, &[1, 0, 2, 0]);
    assert!(matches!(failure("fast.wav"), MediaError::TooLarge { got: 4_000_000_000, .. }));
    wav(&path("none.wav"), 1, 1, 8000, 0, &[]);
    assert!(matches!(failure("none.wav"), MediaError::Decode { .. }));
    // Containers without sound.
    std::fs::copy(data("mute.mp4"), path("mute.mp4")).unwrap();
    let error = failure("mute.mp4");
    assert!(matches!(error, MediaError::NoAudioTrack { .. }), "{error}");
    assert!(matches!(probe_audio(&path("mute.mp4"), &limits).unwrap_err(), MediaError::NoAudioTrack { .. }));
}

#[test]
fn an_hour_costs_neither_time_nor_memory() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("hour.wav");
    wav(&path, 1, 1, 48_000, 3600 * 96_000, &[]);
    let started = Instant::now();
    for range in [AudioRange::default(), seconds(None, None, Some(30.0))] {
        let error = read_audio(&path, &range, &Limits::default()).unwrap_err();
        assert!(matches!(error, MediaError::TooLarge { got: 3600, max: 1800, .. }), "{error}");
    }
    // A part of it is fine, and only that part is decoded.
    let clip = read_audio(&path, &seconds(Some(10.0), Some(3600.0), Some(30.0)), &Limits::default()).unwrap();
    assert_eq!(clip.samples.len(), 30 * 48_000);
    assert!(started.elapsed() < Duration::from_secs(10));
    // So many samples do not fit, whatever the length.
    let small = Limits { max_alloc_bytes: 1 << 20, ..Limits::default() };
    assert!(matches!(
        read_audio(&path, &seconds(None, Some(60.0), None), &small),
        Err(MediaError::TooLarge { .. })
    ));
    let hasty = Limits { timeout: Duration::ZERO, ..Limits::default() };
    let error = read_audio(&data("speech.mp3"), &AudioRange::default(), &hasty).unwrap_err();
    assert!(matches!(error, MediaError::Timeout { .. }), "{error}");
}

#[test]
fn the_name_does_not_matter() {
    let dir = tempfile::tempdir().unwrap();
    for (name, wrong) in
        [("speech.flac", "a.wav"), ("speech.wav", "b.mp3"), ("speech.ogg", "c.m4a"), ("clip.mp4", "d.flac")]
    {
        std::fs::copy(data(name), dir.path().join(wrong)).unwrap();
        let clip = read_audio(&dir.path().join(wrong), &AudioRange::default(), &Limits::default()).unwrap();
        assert_eq!(clip, read(name), "{name}");
    }
}

#[test]
fn damaged_bytes_never_hang_or_panic() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("damaged");
    let limits = Limits { timeout: Duration::from_secs(5), ..Limits::default() };
    let mut state = 7u32;
    let mut random = move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as usize
    };
    for name in ["speech.wav", "speech.flac", "speech.mp3", "speech.m4a", "speech.aac", "speech.ogg"] {
        let whole = std::fs::read(data(name)).unwrap();
        for _ in 0..40 {
            let mut bytes = whole.clone();
            for _ in 0..4 {
                // Mostly in the header, where it hurts.
                let reach = if random() % 2 == 0 { 200 } else { bytes.len() };
                bytes[random() % reach] = random() as u8;
            }
            // The first bytes stay, so that the file is not left to ffmpeg.
            bytes[..16].copy_from_slice(&whole[..16]);
            std::fs::write(&path, &bytes).unwrap();
            let started = Instant::now();
            if let Ok(clip) = read_audio(&path, &seconds(None, Some(60.0), None), &limits) {
                assert!(clip.samples.iter().all(|x| x.is_finite()));
            }
            assert!(started.elapsed() < Duration::from_secs(15), "{name}");
        }
    }
}

#[test]
fn silence_has_a_length() {
    let clip = AudioClip::silence(1.5, 16000);
    assert_eq!((clip.samples.len(), clip.duration_s()), (24000, 1.5));
    assert!(clip.samples.iter().all(|&x| x == 0.0));
}

#[test]
#[ignore = "needs ffmpeg; .ci/run runs it"]
fn ffmpeg_reads_opus_and_what_else_it_knows() {
    let clip = read("speech.opus");
    assert_eq!(clip.sample_rate_hz, 48000);
    let expected = decoded_by_ffmpeg("speech.opus");
    assert!(clip.samples.len() == expected.len() && largest_difference(&clip.samples, &expected) < 1.6e-5);
    // The word is the same: loudest where it is in the original, and heard in the same mel filters.
    let mel = LogMel::whisper(80).unwrap();
    let (opus, original) = (mel.features_of(&clip).unwrap(), mel.features_of(&read("speech.wav")).unwrap());
    let mean: f32 = (0..80 * 20)
        .map(|i| (opus.data[i / 20 * 3000 + i % 20] - original.data[i / 20 * 3000 + i % 20]).abs())
        .sum::<f32>()
        / 1600.0;
    assert!(mean < 0.15, "{mean}");

    let dir = tempfile::tempdir().unwrap();
    for (name, args) in [
        ("clip.mkv", &["-c:a", "libopus"][..]),
        ("sound.ac3", &["-c:a", "ac3"]),
        ("sound.mka", &["-c:a", "flac"]),
        ("sound.au", &[]),
        ("video.webm", &["-c:a", "libvorbis"]),
    ] {
        let path = dir.path().join(name);
        let status = Command::new("ffmpeg")
            .args(["-v", "error", "-y", "-f", "lavfi", "-i", "sine=f=440:r=48000:d=2", "-ac", "2"])
            .args(args)
            .arg(&path)
            .status()
            .unwrap();
        assert!(status.success(), "{name}");
        let info = probe_audio(&path, &Limits::default()).unwrap();
        assert_eq!((info.sample_rate_hz, info.num_channels), (48000, 2), "{name}");
        assert!((info.duration_s.unwrap() - 2.0).abs() < 0.1, "{name}: {info:?}");
        let clip = read_audio(&path, &seconds(Some(0.5), Some(1.5), None), &Limits::default()).unwrap();
        assert_eq!(clip.samples.len(), 48_000, "{name}");
        // 440 Hz cross zero 880 times a second.
        let crossings = clip.samples.windows(2).filter(|w| w[0] < 0.0 && w[1] >= 0.0).count();
        assert!((438..=442).contains(&crossings), "{name}: {crossings}");
    }
    // A cut file, a file of text, a video without sound.
    let whole = std::fs::read(dir.path().join("clip.mkv")).unwrap();
    std::fs::write(dir.path().join("cut.mkv"), &whole[..whole.len() / 2]).unwrap();
    let clip = std::fs::read(data("clip.mp4")).unwrap();
    std::fs::write(dir.path().join("cut.mp4"), &clip[..clip.len() / 2]).unwrap();
    std::fs::write(dir.path().join("text.mp3"), "these are words, no sound ".repeat(40)).unwrap();
    for name in ["cut.mkv", "cut.mp4", "text.mp3"] {
        let error =
            read_audio(&dir.path().join(name), &AudioRange::default(), &Limits::default()).unwrap_err();
        let known = matches!(error, MediaError::ProgramFailed { .. } | MediaError::Decode { .. });
        assert!(known && error.to_string().contains(name), "{error}");
    }
    let mute = dir.path().join("mute.mkv");
    let args = ["-v", "error", "-y", "-f", "lavfi", "-i", "color=d=1:s=16x16:r=5", "-an"];
    assert!(Command::new("ffmpeg").args(args).arg(&mute).status().unwrap().success());
    let error = read_audio(&mute, &AudioRange::default(), &Limits::default()).unwrap_err();
    assert!(matches!(error, MediaError::NoAudioTrack { .. }), "{error}");
    let hasty = Limits { timeout: Duration::from_millis(1), ..Limits::default() };
    let error = read_audio(&dir.path().join("clip.mkv"), &AudioRange::default(), &hasty).unwrap_err();
    assert!(matches!(error, MediaError::Timeout { .. }), "{error}");
}
