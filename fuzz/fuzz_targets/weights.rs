//! Checks that any bytes are a file of weights or an error, and that each tensor of a file can be read or is an error.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use omnigrpo_models::{WeightDtype, WeightFiles};

static FOLDER: LazyLock<tempfile::TempDir> = LazyLock::new(|| tempfile::tempdir().expect("a folder"));

fuzz_target!(|bytes: &[u8]| {
    let path = FOLDER.path().join("model.safetensors");
    std::fs::write(&path, bytes).expect("a file");
    let Ok(files) = WeightFiles::open_file(&path) else { return };
    for name in files.names() {
        // No tensor is larger than its file, so reading allocates at most two bytes for each of them.
        let stored = files.num_bytes(name).expect("a tensor");
        assert!(stored <= bytes.len(), "{name} has {stored} bytes in a file of {}", bytes.len());
        let _ = files.read(name, WeightDtype::Float32);
        let _ = files.read(name, WeightDtype::BFloat16);
        assert!(files.equal(name, name).unwrap_or(true), "{name} differs from itself");
    }
});
