//! Writes weights in the published layout.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use omnigrpo_kernels::Stored;
use omnigrpo_ops::{Param, ParamDtype};
use safetensors::tensor::{Dtype, View};

use super::joined::{OwnLayer, own_layers};
use crate::error::{ModelError, Result};

/// Largest size of a shard in bytes, as in the tools of the Hugging Face Hub.
const SHARD_BYTES: usize = 5_000_000_000;

/// Writes `model.safetensors`, or shards with an index if the weights exceed 5 GB, into `dir`. Dtypes are those of
/// the weights in memory. Only one tensor at a time is copied. With `split_experts`, the layers of each expert become tensors of
/// their own.
///
/// The files have their final names while they are written. A caller that needs atomicity writes into a
/// temporary directory and renames it.
///
/// # Errors
/// Returns an error if the directory cannot be written or the disk is full.
pub fn save_weights(dir: &Path, params: &[Arc<Param>], split_experts: bool) -> Result<()> {
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
    let whole = |param: &&Arc<Param>| !(split_experts && param.is_experts());
    let (whole, experts): (Vec<&Arc<Param>>, Vec<_>) = params.iter().partition(whole);
    let whole = whole.into_iter().map(|param| (param.name().to_owned(), ParamView { param, part: None }));
    let parts = experts.into_iter().flat_map(|param| {
        own_layers(param).into_iter().map(move |(name, part)| (name, ParamView { param, part: Some(part) }))
    });
    let named: Vec<(String, ParamView)> = whole.chain(parts).collect();
    let tensors: Vec<_> = named.iter().map(|(name, view)| (name.as_str(), *view)).collect();
    save_tensors(dir, &tensors)
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

/// A weight, or a part of it, as a tensor of a file.
#[derive(Clone, Copy)]
struct ParamView<'a> {
    param: &'a Param,
    part: Option<OwnLayer>,
}

impl View for &ParamView<'_> {
    fn dtype(&self) -> Dtype {
        if self.param.dtype() == ParamDtype::Bf16 { Dtype::BF16 } else { Dtype::F32 }
    }

    fn shape(&self) -> &[usize] {
        self.part.as_ref().map_or(self.param.shape(), |part| &part.shape)
    }

    fn data(&self) -> Cow<'_, [u8]> {
        match self.param.read().stored() {
            Stored::F32(data) => self.values(data).iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>(),
            Stored::Bf16(data) => self.values(data).iter().flat_map(|x| x.to_le_bytes()).collect(),
            Stored::Quantised(_) => Vec::new(),
        }
        .into()
    }

    fn data_len(&self) -> usize {
        self.param.num_bytes() / self.param.len().max(1) * View::shape(self).iter().product::<usize>()
    }
}

impl ParamView<'_> {
    /// Returns the values of the weight that belong to the tensor, in its order.
    fn values<'d, T: Copy + Send + Sync>(&self, data: &'d [T]) -> Cow<'d, [T]> {
        self.part.map_or(Cow::Borrowed(data), |part| Cow::Owned(part.values(data)))
    }
}
