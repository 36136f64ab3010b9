//! The embedded checkpoint: the architecture of Qwen2.5-VL in a few megabytes.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::DemoError;

macro_rules! embedded {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_bytes!(concat!("../assets/model/", $name)))),*]
    };
}

/// Name and bytes of every file of the checkpoint directory. `config.json` gives the tensors' shapes. The tokenizer
/// has a token for every word of the generated questions and one for every byte.
pub const MODEL_FILES: &[(&str, &[u8])] = embedded![
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "preprocessor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
];

/// Writes the checkpoint's files to `dir`. Creates the directory if it is missing, and replaces files of the same names.
/// Several threads and processes may write to one directory at the same time.
///
/// # Errors
/// Returns [`DemoError::Write`] if the directory or a file cannot be written.
pub fn write_model(dir: &Path) -> Result<(), DemoError> {
    let write = |path: &Path, result: std::io::Result<()>| {
        result.map_err(|source| DemoError::Write { path: path.to_path_buf(), source })
    };
    static WRITES: AtomicU64 = AtomicU64::new(0);
    write(dir, fs::create_dir_all(dir))?;
    let own = format!("{}-{}", std::process::id(), WRITES.fetch_add(1, Ordering::Relaxed));
    for (name, bytes) in MODEL_FILES {
        let path = dir.join(name);
        // A run may be reading the existing file, so a rename replaces it in one step.
        let part = dir.join(format!(".{name}.{own}.part"));
        let written = fs::write(&part, bytes).and_then(|()| fs::rename(&part, &path));
        if written.is_err() {
            // An error here is ignored; the error of writing is reported.
            let _ = fs::remove_file(&part);
        }
        write(&path, written)?;
    }
    Ok(())
}
