//! Digests that show whether the content of a checkpoint directory has changed.
//!
//! Reading every byte of large weights would take as long as loading them. Training, merging and quantising change whole
//! tensors, so the headers of the files and both ends of each tensor distinguish two checkpoints. A single changed byte
//! in the middle of a tensor goes unnoticed.

use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::files::{Shard, shard_paths};
use crate::error::Result;
use crate::export::{COMPANIONS, companion};
use crate::peft;

/// Bytes that are hashed at each end of a tensor.
const SAMPLE_BYTES: u64 = 4096;

/// Digests of a checkpoint or adapter directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceDigest {
    /// Digest of the weights: sizes, headers and both ends of each tensor. `None` without weights.
    pub weights: Option<String>,
    /// Digest of the complete configuration, tokenizer and processor files.
    pub files: String,
}

/// Computes the digests of a directory. They do not depend on its path.
///
/// # Errors
/// Returns an error if files are unreadable.
pub fn source_digest(dir: &Path) -> Result<SourceDigest> {
    let adapter = dir.join(peft::WEIGHTS);
    let paths = match shard_paths(dir) {
        Ok(paths) => paths,
        Err(_) if adapter.is_file() => vec![adapter],
        Err(_) => Vec::new(),
    };
    let mut files = Sha256::new();
    for name in ["config.json", "adapter_config.json"].iter().chain(&COMPANIONS) {
        if let Some(content) = companion(dir, Path::new(name))? {
            files.update(name.as_bytes());
            files.update((content.len() as u64).to_le_bytes());
            files.update(content);
        }
    }
    let weights = if paths.is_empty() { None } else { Some(weights(&paths)?) };
    Ok(SourceDigest { weights, files: hex(files) })
}

fn weights(paths: &[PathBuf]) -> Result<String> {
    let mut hash = Sha256::new();
    for path in paths {
        let (shard, metadata) = Shard::open(path)?;
        let mut bytes = Vec::new();
        hash.update(shard.num_bytes().to_le_bytes());
        let mut add = |from: u64, to: u64| -> Result<()> {
            bytes.resize((to - from) as usize, 0);
            shard.read(from, &mut bytes)?;
            hash.update(&bytes);
            Ok(())
        };
        let data = shard.data();
        add(0, data)?;
        let offsets = metadata.tensors().into_values().map(|info| info.data_offsets);
        let mut spans: Vec<_> =
            offsets.map(|(start, end)| (data + start as u64, data + end as u64)).collect();
        spans.sort_unstable();
        for (start, end) in spans {
            add(start, end.min(start + SAMPLE_BYTES))?;
            add(start.max(end.saturating_sub(SAMPLE_BYTES)), end)?;
        }
    }
    Ok(hex(hash))
}

/// Returns the first 16 of the 32 bytes in hexadecimal. They suffice to distinguish two checkpoints and are short enough to read.
fn hex(hash: Sha256) -> String {
    hash.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_tensor_or_file_changes_the_digest_and_another_place_does_not() {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/checkpoints/qwen2_5_vl_tied");
        let place = tempfile::tempdir().unwrap();
        for entry in std::fs::read_dir(&golden).unwrap() {
            let path = entry.unwrap().path();
            std::fs::copy(&path, place.path().join(path.file_name().unwrap())).unwrap();
        }
        let before = source_digest(&golden).unwrap();
        assert!(before.weights.is_some());
        assert_eq!(source_digest(place.path()).unwrap(), before);

        let file = place.path().join("model.safetensors");
        let mut bytes = std::fs::read(&file).unwrap();
        let data = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        for at in [data, bytes.len() - 1] {
            bytes[at] ^= 1;
            std::fs::write(&file, &bytes).unwrap();
            let after = source_digest(place.path()).unwrap();
            assert_ne!(after.weights, before.weights);
            assert_eq!(after.files, before.files);
            bytes[at] ^= 1;
        }

        std::fs::write(place.path().join("tokenizer_config.json"), "{}").unwrap();
        assert_ne!(source_digest(place.path()).unwrap().files, before.files);
        std::fs::remove_file(&file).unwrap();
        assert_eq!(source_digest(place.path()).unwrap().weights, None);
    }
}
