//! Safetensors files of a checkpoint directory.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use memmap2::Mmap;
use omnigrpo_ops::{ParamDtype, Values};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorInfo};

use super::{WeightDtype, inside};
use crate::error::{ModelError, Result};
use crate::families::Companion;

/// Of `model.safetensors.index.json`; the largest published ones have about 10 MB.
const MAX_INDEX_BYTES: u64 = 256 << 20;

/// Open weight files, by published tensor name. Nothing is read until a tensor is asked for.
pub struct WeightFiles {
    dir: PathBuf,
    maps: Vec<Mmap>,
    tensors: HashMap<String, Entry>,
}

struct Entry {
    file: usize,
    info: TensorInfo,
    /// Offset of the data section in the file.
    base: usize,
}

impl WeightFiles {
    /// Opens `model.safetensors`, or the shards that `model.safetensors.index.json` names. `published` turns a
    /// key of a file into the published name, or `None` for keys that are no weights.
    ///
    /// # Errors
    /// No safetensors file, a pickle checkpoint, an unreadable or truncated file, two keys for one tensor.
    pub fn open(dir: &Path, published: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let mut this = Self { dir: dir.to_path_buf(), maps: Vec::new(), tensors: HashMap::new() };
        let mut keys_seen = HashMap::new();
        for path in shard_paths(dir)? {
            this.add_file(&path, &published, &mut keys_seen)?;
        }
        Ok(this)
    }

    /// Adds the tensors of a file. `seen` has the keys of the tensors so far by published name.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub(crate) fn add_file(
        &mut self,
        path: &Path,
        published: impl Fn(&str) -> Option<String>,
        seen: &mut HashMap<String, String>,
    ) -> Result<()> {
        let fail = |what: String| ModelError::Checkpoint { dir: self.dir.clone(), what };
        let file = File::open(path).map_err(ModelError::io(path))?;
        // SAFETY: the map is read-only; a file that another program truncates meanwhile ends this process
        // with a bus error, which is the accepted price of not copying checkpoints through memory.
        let map = unsafe { Mmap::map(&file) }.map_err(ModelError::io(path))?;
        let (header_len, metadata) =
            SafeTensors::read_metadata(&map).map_err(ModelError::safetensors(path, "read"))?;
        let base = header_len + 8;
        for (key, info) in metadata.tensors() {
            if map.len() < base + info.data_offsets.1 {
                return Err(fail(format!(
                    "{} is truncated: tensor {key} ends at byte {}, the file has {}; copy it again",
                    path.display(),
                    base + info.data_offsets.1,
                    map.len()
                )));
            }
            let Some(name) = published(&key) else { continue };
            if let Some(other) = seen.insert(name.clone(), key.clone()) {
                return Err(fail(format!("{key} and {other} are both the tensor {name}")));
            }
            let entry = Entry { file: self.maps.len(), info: info.clone(), base };
            self.tensors.insert(name, entry);
        }
        self.maps.push(map);
        Ok(())
    }

    /// Adds the tensors of towers that this checkpoint leaves to directories of their own, and names them. A directory is
    /// not opened where the checkpoint has any tensor of that tower.
    ///
    /// # Errors
    /// As [`Self::open`]; a tower that is nowhere.
    pub(crate) fn add_companions(&mut self, companions: &[Companion]) -> Result<HashSet<String>> {
        let mut added = HashSet::new();
        for companion in companions {
            if self.tensors.keys().any(|name| name.starts_with(companion.prefix)) {
                continue;
            }
            let Some(dir) = &companion.dir else {
                return Err(ModelError::Checkpoint {
                    dir: self.dir.clone(),
                    what: format!(
                        "no tensor below {} in this checkpoint, and no directory of that tower was found; give one with FamilyOption::{}",
                        companion.prefix, companion.option
                    ),
                });
            };
            let name =
                |key: &str| (companion.published)(key).map(|name| format!("{}{name}", companion.prefix));
            let other = Self::open(dir, name)?;
            let first = self.maps.len();
            self.maps.extend(other.maps);
            for (name, entry) in other.tensors {
                added.insert(name.clone());
                self.tensors.insert(name, Entry { file: first + entry.file, ..entry });
            }
        }
        Ok(added)
    }

    /// The checkpoint directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// All published tensor names, in no order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// A tensor's shape.
    #[must_use]
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.tensors.get(name).map(|e| e.info.shape.as_slice())
    }

    /// How a tensor will be held; `None` for a dtype that is not read.
    pub(super) fn held_as(&self, name: &str, dtype: WeightDtype) -> Option<ParamDtype> {
        match (self.tensors.get(name)?.info.dtype, dtype) {
            (Dtype::BF16, WeightDtype::Auto) => Some(ParamDtype::Bf16),
            (Dtype::F32 | Dtype::F16 | Dtype::BF16, WeightDtype::BFloat16) => Some(ParamDtype::Bf16),
            (Dtype::F32 | Dtype::F16 | Dtype::BF16, _) => Some(ParamDtype::F32),
            _ => None,
        }
    }

    /// Bytes of a tensor in its file.
    #[must_use]
    pub fn num_bytes(&self, name: &str) -> Option<usize> {
        self.bytes(name).map(|(_, bytes)| bytes.len())
    }

    fn bytes(&self, name: &str) -> Option<(&Entry, &[u8])> {
        let entry = self.tensors.get(name)?;
        let (start, end) = entry.info.data_offsets;
        self.maps[entry.file].get(entry.base + start..entry.base + end).map(|bytes| (entry, bytes))
    }

    /// Reads a tensor. The inner error is a line for the list of problems.
    ///
    /// # Errors
    /// Out of memory.
    pub fn read(&self, name: &str, dtype: WeightDtype) -> Result<std::result::Result<Values, String>> {
        let Some((entry, bytes)) = self.bytes(name) else {
            return Ok(Err(format!("  missing tensor {name}")));
        };
        let keep_bf16 = entry.info.dtype == Dtype::BF16 && dtype != WeightDtype::Float32;
        if keep_bf16 {
            let data: Vec<bf16> = le(bytes, |b: [u8; 2]| bf16::from_le_bytes(b));
            if let Some(i) = data.iter().position(|x| !x.is_finite()) {
                return Ok(Err(format!(
                    "  tensor {name}: element {i} is {}, expected finite numbers",
                    data[i]
                )));
            }
            return Ok(Ok(Values::Bf16(data)));
        }
        let data: Vec<f32> = match entry.info.dtype {
            Dtype::F32 => le(bytes, f32::from_le_bytes),
            Dtype::F16 => le(bytes, |b: [u8; 2]| f16::from_le_bytes(b).to_f32()),
            Dtype::BF16 => le(bytes, |b: [u8; 2]| bf16::from_le_bytes(b).to_f32()),
            other => return Ok(Err(format!("  tensor {name}: dtype {other:?}, expected F32, BF16 or F16"))),
        };
        if let Some(i) = data.iter().position(|x| !x.is_finite()) {
            return Ok(Err(format!("  tensor {name}: element {i} is {}, expected finite numbers", data[i])));
        }
        let values = Values::F32(data);
        Ok(Ok(if dtype == WeightDtype::BFloat16 { values.into_bf16() } else { values }))
    }

    /// Whether two tensors hold the same bytes.
    ///
    /// # Errors
    /// Never at present; files are mapped.
    pub fn equal(&self, a: &str, b: &str) -> Result<bool> {
        Ok(match (self.bytes(a), self.bytes(b)) {
            (Some((ea, ba)), Some((eb, bb))) => ea.info.dtype == eb.info.dtype && ba == bb,
            _ => false,
        })
    }
}

fn le<const N: usize, T>(bytes: &[u8], f: impl Fn([u8; N]) -> T) -> Vec<T> {
    bytes.as_chunks::<N>().0.iter().map(|&b| f(b)).collect()
}

pub(super) fn shard_paths(dir: &Path) -> Result<Vec<PathBuf>> {
    let fail = |what: String| ModelError::Checkpoint { dir: dir.to_path_buf(), what };
    if !dir.is_dir() {
        return Err(fail("not a directory; expected a checkpoint directory with config.json".into()));
    }
    let index = dir.join("model.safetensors.index.json");
    if index.is_file() {
        #[derive(serde::Deserialize)]
        struct Index {
            weight_map: BTreeMap<String, String>,
        }
        let bytes = std::fs::metadata(&index).map_err(ModelError::io(&index))?.len();
        if bytes > MAX_INDEX_BYTES {
            return Err(fail(format!(
                "model.safetensors.index.json has {bytes} bytes, expected at most {MAX_INDEX_BYTES}"
            )));
        }
        let text = std::fs::read(&index).map_err(ModelError::io(&index))?;
        let index: Index =
            serde_json::from_slice(&text).map_err(|source| ModelError::Json { path: index, source })?;
        let mut names: Vec<_> = index.weight_map.into_values().collect();
        names.sort_unstable();
        names.dedup();
        return names.iter().map(|name| inside(dir, name)).collect();
    }
    let single = dir.join("model.safetensors");
    if single.is_file() {
        return Ok(vec![single]);
    }
    let pickles = std::fs::read_dir(dir).map_err(ModelError::io(dir))?.flatten().find(|entry| {
        let name = entry.file_name().to_string_lossy().into_owned();
        [".bin", ".pt", ".pth", ".ckpt", ".pkl"].iter().any(|end| name.ends_with(end))
    });
    Err(fail(match pickles {
        Some(entry) => format!(
            "only a pickle checkpoint was found ({}), which can run code when it is read and is refused; convert it \
             to safetensors with `transformers` (`save_pretrained(..., safe_serialization=True)`)",
            entry.file_name().to_string_lossy()
        ),
        None => {
            "no model.safetensors and no model.safetensors.index.json; is this a checkpoint directory?".into()
        }
    }))
}
