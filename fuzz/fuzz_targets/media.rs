//! Checks that any bytes are a picture, an animation or sound within the limits, or an error.
#![no_main]

use std::path::Path;
use std::sync::LazyLock;
use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use omnigrpo_media::audio::{AudioRange, probe_audio, read_audio};
use omnigrpo_media::{Limits, Orientation, VideoSource, load_image, load_image_bytes, probe_image, probe_video};

static FOLDER: LazyLock<tempfile::TempDir> = LazyLock::new(|| tempfile::tempdir().expect("a folder"));
static LIMITS: LazyLock<Limits> = LazyLock::new(|| Limits {
    max_pixels: 1 << 20,
    max_alloc_bytes: 64 << 20,
    max_frames: 100,
    max_video_bytes: 64 << 20,
    max_audio_secs: 60.0,
    timeout: Duration::from_secs(5),
    ..Limits::default()
});

/// Extensions for which no other program is started.
const NAMES: [&str; 6] = ["x.wav", "x.flac", "x.mp3", "x.ogg", "x.m4a", "x.gif"];

fuzz_target!(init: omnigrpo_fuzz::let_guarded_panics_pass(), |bytes: &[u8]| {
    // The last byte chooses the name.
    let Some((&kind, bytes)) = bytes.split_last() else { return };
    let name = NAMES[usize::from(kind) % NAMES.len()];
    let path = FOLDER.path().join(name);
    std::fs::write(&path, bytes).expect("a file");
    pictures(&path, bytes);
    if name == "x.gif" {
        let _ = probe_video(&VideoSource::File(path), None, &LIMITS);
    } else if probe_audio(&path, &LIMITS).is_ok()
        && let Ok(clip) = read_audio(&path, &AudioRange::default(), &LIMITS)
    {
        assert!(clip.duration_s() <= LIMITS.max_audio_secs + 1.0, "{} s of sound", clip.duration_s());
    }
});

/// Checks that a picture has the size that its header states, from a file and from memory.
fn pictures(path: &Path, bytes: &[u8]) {
    let Ok(image) = load_image_bytes("fuzz", bytes, Orientation::Upright, &LIMITS) else { return };
    assert!(u64::from(image.width_px) * u64::from(image.height_px) <= LIMITS.max_pixels);
    let info = probe_image(path, &LIMITS).expect("a header");
    assert_eq!(info.size_px(Orientation::Upright), [image.width_px, image.height_px]);
    let again = load_image(path, Orientation::Upright, &LIMITS).expect("the same picture");
    assert_eq!(again.pixels, image.pixels);
}
