//! Checks that any bytes are a GGUF file or an error, that each tensor of a file can be read, and that a file becomes a checkpoint that loads
//! or an error.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use omnigrpo_gguf::GgufFile;
use omnigrpo_models::{Checkpoint, LoadOptions, Model, WeightDtype, convert_gguf};

static FOLDER: LazyLock<tempfile::TempDir> = LazyLock::new(|| tempfile::tempdir().expect("a folder"));

fuzz_target!(init: omnigrpo_fuzz::let_guarded_panics_pass(), |bytes: &[u8]| {
    let (path, dir) = (FOLDER.path().join("x.gguf"), FOLDER.path().join("checkpoint"));
    std::fs::write(&path, bytes).expect("a file");
    let Ok(file) = GgufFile::open(&path) else { return };
    for tensor in file.tensors() {
        // The narrowest type has 18 bytes for 32 values.
        assert!(tensor.num_values() <= 2 * bytes.len(), "{} is larger than its file", tensor.name());
        let mut values = vec![0.0; tensor.num_values()];
        file.read(tensor, 0, &mut values).expect("the values of a tensor");
    }
    if convert_gguf(&path, &dir, WeightDtype::Auto).is_ok() {
        let checkpoint = Checkpoint::open(&dir).expect("a checkpoint");
        Model::load(&checkpoint, &LoadOptions::default()).expect("a model");
    }
    let _ = std::fs::remove_dir_all(&dir);
});
