//! Checks that any JSON is a row or an error.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use omnigrpo_data::{Part, Role, RowReader};

static FOLDER: LazyLock<tempfile::TempDir> = LazyLock::new(|| {
    let folder = tempfile::tempdir().expect("a folder");
    for name in ["a.png", "clip.mp4", "sound.wav"] {
        std::fs::write(folder.path().join(name), "x").expect("a file");
    }
    folder
});

fuzz_target!(|text: &[u8]| {
    let Ok(row) = serde_json::from_slice(text) else { return };
    if let Ok(sample) = RowReader::new("fuzz").media_in(FOLDER.path()).sample(row) {
        assert_eq!(sample.turns.last().map(|turn| turn.role), Some(Role::User));
        let mentioned = sample.turns.iter().flat_map(|turn| &turn.parts);
        assert_eq!(mentioned.filter(|part| matches!(part, Part::Medium { .. })).count(), sample.media.len());
    }
});
