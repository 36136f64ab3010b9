//! Writes weights in the published layout.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use omnigrpo_kernels::Stored;
use omnigrpo_ops::{Param, ParamDtype};
use safetensors::tensor::{Dtype, View};

use super::files::WeightFiles;
use super::joined::{OwnLayer, own_layers};
use crate::error::{ModelError, Result};

/// Largest size of a shard in bytes, as in the tools of the Hugging Face Hub.
const SHARD_BYTES: usize = 5_000_000_000;

/// Writes `model.safetensors`, or shards with an index if the weights exceed 5 GB, into `dir`. Dtypes are those of
/// the weights in memory. With `split_experts`, the layers of each expert become tensors of their own. The tensors of `carried` are copied
/// as they are in their files. Only one tensor at a time is in memory.
///
/// The files have their final names while they are written. A caller that needs atomicity writes into a
/// temporary directory and renames it.
///
/// # Errors
/// Returns an error if the directory cannot be written or the disk is full.
pub fn save_weights(
    dir: &Path,
    params: &[Arc<Param>],
    split_experts: bool,
    carried: Option<&WeightFiles>,
) -> Result<()> {
    if let Some(param) = params.iter().find(|p| matches!(p.dtype(), ParamDtype::Quantised(_))) {
        return Err(ModelError::Checkpoint {
            dir: dir.to_path_buf(),
            what: format!(
                "{} is quantised, which the published layout does not support; save the adapter, or merge it into \
                 the checkpoint it was trained on",
                param.name()
            ),
        });
    }
    let failure = Mutex::default();
    let mut names: Vec<&str> = carried.into_iter().flat_map(WeightFiles::names).collect();
    names.sort_unstable();
    let copies = names.into_iter().zip(carried.into_iter().cycle());
    let copies =
        copies.map(|(name, files)| (name.to_owned(), Saved::Copied { name, files, failure: &failure }));
    let whole = |param: &&Arc<Param>| !(split_experts && param.is_experts());
    let (whole, experts): (Vec<&Arc<Param>>, Vec<_>) = params.iter().partition(whole);
    let whole = whole.into_iter().map(|param| (param.name().to_owned(), Saved::Param(param, None)));
    let parts = experts.into_iter().flat_map(|param| {
        own_layers(param).into_iter().map(move |(name, part)| (name, Saved::Param(param, Some(part))))
    });
    let named: Vec<(String, Saved)> = whole.chain(parts).chain(copies).collect();
    let tensors: Vec<_> = named.iter().map(|(name, saved)| (name.as_str(), *saved)).collect();
    save_tensors(dir, &tensors)?;
    failure.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}

/// Writes named tensors as [`save_weights`] does. The bytes of a tensor are requested when its turn comes.
pub(crate) fn save_tensors<'a, V>(dir: &Path, tensors: &'a [(&'a str, V)]) -> Result<()>
where
    &'a V: View,
{
    let mut shards: Vec<Vec<(&str, &'a V)>> = vec![Vec::new()];
    let mut used = 0;
    let mut total = 0;
    for (name, tensor) in tensors {
        let bytes = tensor.data_len();
        if used + bytes > SHARD_BYTES && used > 0 {
            shards.push(Vec::new());
            used = 0;
        }
        used += bytes;
        total += bytes;
        if let Some(shard) = shards.last_mut() {
            shard.push((*name, tensor));
        }
    }
    let metadata = Some([("format".to_owned(), "pt".to_owned())].into());
    let write = |path: PathBuf, shard: &[(&str, &'a V)]| {
        safetensors::serialize_to_file(shard.iter().copied(), metadata.clone(), &path)
            .map_err(ModelError::safetensors(&path, "written"))?;
        share(&path)
    };
    if let [shard] = shards.as_slice() {
        return write(dir.join("model.safetensors"), shard);
    }
    let mut weight_map = BTreeMap::new();
    for (i, shard) in shards.iter().enumerate() {
        let file = format!("model-{:05}-of-{:05}.safetensors", i + 1, shards.len());
        write(dir.join(&file), shard)?;
        weight_map.extend(shard.iter().map(|(name, _)| ((*name).to_owned(), file.clone())));
    }
    let index = serde_json::json!({ "metadata": { "total_size": total }, "weight_map": weight_map });
    let path = dir.join("model.safetensors.index.json");
    fs::write(&path, format!("{index:#}\n")).map_err(ModelError::io(path))
}

/// Gives a file the mode of other new files in its directory. The safetensors library creates files that only their owner can
/// read, whatever the umask.
///
/// # Errors
/// Returns an error if the directory cannot be written.
#[cfg(unix)]
pub fn share(path: &Path) -> Result<()> {
    // The umask can only be read by setting it, so the mode of a new file is read instead.
    let mut name = std::ffi::OsString::from(".mode-of-");
    name.push(path.file_name().unwrap_or_default());
    let probe = path.with_file_name(name);
    let mode = fs::File::create(&probe).and_then(|file| file.metadata()).map_err(ModelError::io(&probe))?;
    fs::remove_file(&probe).map_err(ModelError::io(&probe))?;
    fs::set_permissions(path, mode.permissions()).map_err(ModelError::io(path))
}

/// Does nothing on this system, where files have no Unix mode.
///
/// # Errors
/// Never returns an error.
#[cfg(not(unix))]
pub fn share(_path: &Path) -> Result<()> {
    Ok(())
}

/// A tensor to write.
#[derive(Clone, Copy)]
enum Saved<'a> {
    /// A weight in memory, or the layer of one of its experts.
    Param(&'a Param, Option<OwnLayer>),
    /// A tensor of another file. The library that writes tensors cannot pass on that a file is unreadable, so the first such error is
    /// kept in `failure`.
    Copied { name: &'a str, files: &'a WeightFiles, failure: &'a Mutex<Option<ModelError>> },
}

impl View for &Saved<'_> {
    fn dtype(&self) -> Dtype {
        match self {
            Saved::Param(param, _) if param.dtype() == ParamDtype::Bf16 => Dtype::BF16,
            Saved::Param(..) => Dtype::F32,
            Saved::Copied { name, files, .. } => files.dtype(name).unwrap_or(Dtype::F32),
        }
    }

    fn shape(&self) -> &[usize] {
        match self {
            Saved::Param(param, part) => part.as_ref().map_or(param.shape(), |part| &part.shape),
            Saved::Copied { name, files, .. } => files.shape(name).unwrap_or_default(),
        }
    }

    fn data(&self) -> Cow<'_, [u8]> {
        match self {
            Saved::Param(param, part) => match param.read().stored() {
                Stored::F32(data) => bytes(*part, data, |x| x.to_le_bytes()),
                Stored::Bf16(data) => bytes(*part, data, |x| x.to_le_bytes()),
                Stored::Quantised(_) => Vec::new(),
            },
            Saved::Copied { name, files, failure } => files.bytes(name).unwrap_or_else(|error| {
                failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                vec![0; self.data_len()]
            }),
        }
        .into()
    }

    fn data_len(&self) -> usize {
        match self {
            Saved::Param(param, None) => param.num_bytes(),
            Saved::Param(param, Some(part)) => {
                param.num_bytes() / param.len().max(1) * part.shape.iter().product::<usize>()
            }
            Saved::Copied { name, files, .. } => files.num_bytes(name).unwrap_or_default(),
        }
    }
}

/// Returns the bytes of the values of a weight, or of one of its layers.
fn bytes<T: Copy + Send + Sync, const N: usize>(
    part: Option<OwnLayer>,
    data: &[T],
    of: impl Fn(T) -> [u8; N],
) -> Vec<u8> {
    let values = part.map_or(Cow::Borrowed(data), |part| Cow::Owned(part.values(data)));
    values.iter().flat_map(|&x| of(x)).collect()
}
