//! Digests that show whether the content of a checkpoint directory has changed.
//!
//! Before weights are loaded, reading all of their bytes would take as long as loading them. Training, merging and quantising change
//! whole tensors, so the headers of the files and both ends of each tensor distinguish two checkpoints ([`source_digest`]). A single
//! changed byte in the middle of a tensor goes unnoticed.
//!
//! The processes of a run compare every byte. Each byte is hashed while it is read, by the thread that reads it, in pieces that are in the
//! cache ([`TensorDigests`], [`checksum`]). The sum finds faults and differences, and does not resist an attacker who can choose the weights.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use omnigrpo_kernels::checksum::checksum;
use sha2::{Digest, Sha256};

use super::files::{Shard, WeightFiles, shard_paths};
use crate::error::Result;
use crate::export::{COMPANIONS, companion};
use crate::peft;

/// Bytes that are hashed at each end of a tensor.
const SAMPLE_BYTES: u64 = 4096;

/// Digest of all bytes of each tensor, by its published name. It depends on the dtype of the file, and not on that in memory.
pub type TensorDigests = BTreeMap<String, u64>;

/// Digests of the tensors of several models. A clone is the same list.
#[derive(Clone, Debug, Default)]
pub struct SharedDigests(Arc<Mutex<TensorDigests>>);

impl SharedDigests {
    /// Adds the tensors of files that have been read, with the name of their directory.
    pub fn add(&self, files: &WeightFiles) {
        let dir = files.dir().file_name().unwrap_or_default().to_string_lossy();
        let each = files.digests().unwrap_or_default().into_iter();
        let each = each.map(|(tensor, digest)| (format!("{tensor} of {dir}"), digest));
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend(each);
    }

    /// Returns all digests so far.
    pub fn all(&self) -> TensorDigests {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Combines the digests of the pieces of a tensor, in their order.
pub(crate) fn of_pieces(digests: &[u64]) -> u64 {
    checksum(bytemuck::cast_slice(digests))
}

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
    let paths = weight_paths(dir);
    let (mut files, mut weights) = (Sha256::new(), Sha256::new());
    each_file(dir, |name, content| {
        files.update(name.as_bytes());
        files.update((content.len() as u64).to_le_bytes());
        files.update(content);
    })?;
    each_end(&paths, |_, bytes| weights.update(bytes))?;
    Ok(SourceDigest { weights: (!paths.is_empty()).then(|| hex(weights)), files: hex(files) })
}

/// Returns the digest of each part that [`source_digest`] covers, by its name: the configuration, tokenizer and processor files, and
/// the tensors of the weights.
///
/// # Errors
/// Returns an error if files are unreadable.
pub fn source_digests(dir: &Path) -> Result<BTreeMap<String, String>> {
    let mut all = BTreeMap::new();
    each_file(dir, |name, content| drop(all.insert(name.to_owned(), hex(Sha256::new_with_prefix(content)))))?;
    let mut parts: BTreeMap<String, Sha256> = BTreeMap::new();
    each_end(&weight_paths(dir), |part, bytes| parts.entry(part.to_owned()).or_default().update(bytes))?;
    all.extend(parts.into_iter().map(|(part, hash)| (part, hex(hash))));
    Ok(all)
}

/// Returns the files with the weights of a checkpoint or adapter directory.
fn weight_paths(dir: &Path) -> Vec<PathBuf> {
    let adapter = dir.join(peft::WEIGHTS);
    match shard_paths(dir) {
        Ok(paths) => paths,
        Err(_) if adapter.is_file() => vec![adapter],
        Err(_) => Vec::new(),
    }
}

/// Calls `add` with the name and the content of each configuration, tokenizer and processor file.
fn each_file(dir: &Path, mut add: impl FnMut(&str, &[u8])) -> Result<()> {
    for name in ["config.json", "adapter_config.json"].iter().chain(&COMPANIONS) {
        if let Some(content) = companion(dir, Path::new(name))? {
            add(name, &content);
        }
    }
    Ok(())
}

/// Calls `add` with the size and the header of each file of weights, and with both ends of each tensor, in the order of the bytes. The first
/// argument names the file's header or the tensor.
fn each_end(paths: &[PathBuf], mut add: impl FnMut(&str, &[u8])) -> Result<()> {
    for path in paths {
        let (shard, metadata) = Shard::open(path)?;
        let mut bytes = Vec::new();
        let header = format!("header of {}", path.file_name().unwrap_or_default().to_string_lossy());
        add(&header, &shard.num_bytes().to_le_bytes());
        let mut read = |part: &str, from: u64, to: u64| -> Result<()> {
            bytes.resize((to - from) as usize, 0);
            shard.read(from, &mut bytes)?;
            add(part, &bytes);
            Ok(())
        };
        let data = shard.data();
        read(&header, 0, data)?;
        let mut spans: Vec<_> = metadata.tensors().into_iter().collect();
        spans.sort_unstable_by_key(|(_, info)| info.data_offsets);
        for (name, info) in spans {
            let (start, end) = info.data_offsets;
            let (start, end) = (data + start as u64, data + end as u64);
            let tensor = format!("tensor {name}");
            read(&tensor, start, end.min(start + SAMPLE_BYTES))?;
            read(&tensor, start.max(end.saturating_sub(SAMPLE_BYTES)), end)?;
        }
    }
    Ok(())
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
            let (own, other) = (source_digests(place.path()).unwrap(), source_digests(&golden).unwrap());
            let changed: Vec<_> = own.iter().filter(|(name, digest)| other[*name] != **digest).collect();
            assert!(changed.len() == 1 && changed[0].0.starts_with("tensor "), "{changed:?}");
            bytes[at] ^= 1;
        }

        std::fs::write(place.path().join("tokenizer_config.json"), "{}").unwrap();
        assert_ne!(source_digest(place.path()).unwrap().files, before.files);
        std::fs::remove_file(&file).unwrap();
        assert_eq!(source_digest(place.path()).unwrap().weights, None);
    }
}
