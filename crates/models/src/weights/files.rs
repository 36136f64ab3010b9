//! Safetensors files of a checkpoint directory.
//!
//! A tensor is read straight into the memory of its weight, in pieces and by all threads. Each piece is checked for non-finite
//! values while it is in the cache. A model that only reads its weights may leave them in the mapped file
//! ([decision 13](../../../../docs/decisions/0013-weights-in-place.md)).

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt::Display;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::SystemTime;

use half::vec::HalfBitsVecExt as _;
use half::{bf16, f16};
use memmap2::Mmap;
use omnigrpo_guard::inside;
use omnigrpo_kernels::checksum::{Floats, checksum};
use omnigrpo_kernels::{Stored, parallel};
use omnigrpo_ops::{Param, ParamDtype, Part, Values};
use safetensors::SafeTensorError;
use safetensors::tensor::{Dtype, Metadata, TensorInfo};

use super::digest::{TensorDigests, of_pieces};
use super::joined::Joined;
use super::{WeightDtype, named_in};
use crate::error::{ModelError, Result};
use crate::families::{Companion, FamilyOption};

/// Largest accepted size of `model.safetensors.index.json`. The largest published ones have about 10 MB.
const MAX_INDEX_BYTES: u64 = 256 << 20;

/// Largest accepted size of a file's header, the limit of the safetensors library.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Elements of a piece, small enough for the second-level cache.
const PIECE: usize = 1 << 17;

/// Open weight files, keyed by published tensor name. A tensor is read only when it is requested.
pub struct WeightFiles {
    dir: PathBuf,
    shards: Vec<Shard>,
    tensors: HashMap<String, Entry>,
    /// Weights of experts that the files hold in other tensors.
    joined: BTreeMap<String, Joined>,
    /// Digests of the tensors that have been read; empty if nobody needs them.
    digests: OnceLock<Mutex<TensorDigests>>,
}

/// A tensor of a file.
pub(super) struct Entry {
    pub(super) shard: usize,
    pub(super) info: TensorInfo,
}

/// An open safetensors file.
pub(super) struct Shard {
    path: PathBuf,
    file: File,
    num_bytes: u64,
    /// Time of the last change, if the system reports it.
    modified: Option<SystemTime>,
    /// Offset of the tensor data in the file, in bytes.
    data: u64,
    map: OnceLock<Arc<Mmap>>,
}

impl Shard {
    /// Opens a file and reads its header. Checks that the file contains the data of all tensors in the header.
    pub(super) fn open(path: &Path) -> Result<(Self, Metadata)> {
        let invalid = |what: SafeTensorError| ModelError::safetensors(path, "read")(what);
        let file = inside::open_path(path).map_err(ModelError::io(path))?;
        let metadata = file.metadata().map_err(ModelError::io(path))?;
        let (num_bytes, modified) = (metadata.len(), metadata.modified().ok());
        let mut shard =
            Self { path: path.to_path_buf(), file, num_bytes, modified, data: 8, map: OnceLock::new() };
        if num_bytes < 8 {
            return Err(invalid(SafeTensorError::HeaderTooSmall));
        }
        let mut length = [0; 8];
        shard.read(0, &mut length)?;
        let length = u64::from_le_bytes(length);
        if length > MAX_HEADER_BYTES {
            return Err(invalid(SafeTensorError::HeaderTooLarge));
        }
        if length > num_bytes - 8 {
            return Err(invalid(SafeTensorError::InvalidHeaderLength));
        }
        let mut header = vec![0; length as usize];
        shard.read(8, &mut header)?;
        let metadata: Metadata = serde_json::from_slice(&header)
            .map_err(|e| invalid(SafeTensorError::InvalidHeaderDeserialization(e)))?;
        shard.data = 8 + length;
        if num_bytes != shard.data.saturating_add(metadata.data_len() as u64) {
            return Err(invalid(SafeTensorError::MetadataIncompleteBuffer));
        }
        Ok((shard, metadata))
    }

    /// Returns the size of the file in bytes.
    pub(super) fn num_bytes(&self) -> u64 {
        self.num_bytes
    }

    /// Returns the offset of the tensor data in the file, in bytes.
    pub(super) fn data(&self) -> u64 {
        self.data
    }

    fn unchanged(&self) -> Result<()> {
        let now = self.file.metadata().map_err(ModelError::io(&self.path))?;
        match now.len() == self.num_bytes && now.modified().ok() == self.modified {
            true => Ok(()),
            false => Err(ModelError::Changed { path: self.path.clone() }),
        }
    }

    /// Reads the bytes that start at offset `at`. Several threads can read at the same time.
    pub(super) fn read(&self, at: u64, to: &mut [u8]) -> Result<()> {
        #[cfg(unix)]
        let done = std::os::unix::fs::FileExt::read_exact_at(&self.file, to, at);
        #[cfg(not(unix))]
        let done = {
            use std::io::{Read as _, Seek as _};
            // A separate handle has its own position, which no other thread changes.
            File::open(&self.path).and_then(|mut file| {
                file.seek(std::io::SeekFrom::Start(at))?;
                file.read_exact(to)
            })
        };
        done.map_err(ModelError::io(&self.path))
    }

    /// Maps the whole file into memory. The system reads a page when it is first accessed.
    fn map(&self) -> Result<&Arc<Mmap>> {
        if let Some(map) = self.map.get() {
            return Ok(map);
        }
        // SAFETY: the map is read-only. If another program truncates the file, this process ends with a bus error. Callers that
        // leave weights in place accept this risk.
        let map = unsafe { Mmap::map(&self.file) }.map_err(ModelError::io(&self.path))?;
        // Decoding reads all weights for each token, and with large pages it misses fewer translations of addresses. A file that is not
        // in memory is read in larger pieces, too. Systems without such pages refuse or ignore this.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        Ok(self.map.get_or_init(|| Arc::new(map)))
    }

    /// Reads the values of a tensor into `to`. `number` converts the bytes of a value and returns whether it is finite. The inner
    /// error describes the first value that is not finite. `digests` receives the digest of each piece, if they are needed.
    fn numbers<T: Copy + Display + Send, const N: usize>(
        &self,
        info: &TensorInfo,
        mut to: Vec<T>,
        digests: &mut Option<Vec<u64>>,
        number: impl Fn([u8; N]) -> (T, bool) + Sync,
    ) -> Result<std::result::Result<Vec<T>, String>> {
        let start = self.data + info.data_offsets.0 as u64;
        let work = to.len() * N;
        let pieces = to.chunks_mut(PIECE).enumerate();
        let is_digested = digests.is_some();
        let found = parallel::map(pieces, work, |(i, to)| {
            let mut bytes = vec![0; N * to.len()];
            self.read(start + (i * PIECE * N) as u64, &mut bytes)?;
            let digest = if is_digested { checksum(&bytes) } else { 0 };
            let bytes = bytes.as_chunks::<N>().0;
            let mut finite = true;
            for (to, &bytes) in to.iter_mut().zip(bytes) {
                let (x, is_finite) = number(bytes);
                *to = x;
                finite &= is_finite;
            }
            let first = if finite { None } else { bytes.iter().position(|&bytes| !number(bytes).1) };
            Ok((first.map(|at| i * PIECE + at), digest))
        });
        let (found, hashes): (Vec<_>, _) = found.into_iter().collect::<Result<_>>()?;
        if let Some(digests) = digests {
            *digests = hashes;
        }
        Ok(match found.into_iter().flatten().next() {
            Some(at) => Err(not_finite(at, to[at])),
            None => Ok(to),
        })
    }
}

impl WeightFiles {
    fn empty(dir: PathBuf) -> Self {
        let (shards, tensors, joined) = (Vec::new(), HashMap::new(), BTreeMap::new());
        Self { dir, shards, tensors, joined, digests: OnceLock::new() }
    }

    /// Computes a digest of the bytes of each tensor that is read from now on.
    pub fn keep_digests(&self) {
        self.digests.get_or_init(Mutex::default);
    }

    /// Returns the digests of the tensors that have been read; `None` without [`Self::keep_digests`].
    pub fn digests(&self) -> Option<TensorDigests> {
        self.digests.get().map(|all| all.lock().unwrap_or_else(PoisonError::into_inner).clone())
    }

    /// Stores the digest of a tensor, whose pieces have these digests.
    fn note(&self, name: &str, pieces: Option<Vec<u64>>) {
        if let (Some(digests), Some(pieces)) = (self.digests.get(), pieces) {
            let mut digests = digests.lock().unwrap_or_else(PoisonError::into_inner);
            digests.insert(name.to_owned(), of_pieces(&pieces));
        }
    }

    /// Returns an empty list for the digests of a tensor's pieces, if they are needed.
    fn pieces(&self) -> Option<Vec<u64>> {
        self.digests.get().map(|_| Vec::new())
    }

    /// Reads a tensor for its digest alone, if that is needed.
    pub(super) fn digest(&self, name: &str) -> Result<()> {
        if self.digests.get().is_none() || self.shape(name).is_none() {
            return Ok(());
        }
        let mut all = Vec::new();
        for Entry { shard, info } in self.entries(name) {
            let (start, end) = info.data_offsets;
            let len: usize = info.shape.iter().product();
            let piece = PIECE * (end - start) / len.max(1);
            let pieces = parallel::map((start..end).step_by(piece.max(1)), end - start, |at| {
                let mut bytes = vec![0; piece.min(end - at)];
                let shard = &self.shards[*shard];
                shard.read(shard.data + at as u64, &mut bytes)?;
                Ok(checksum(&bytes))
            });
            all.extend(pieces.into_iter().collect::<Result<Vec<_>>>()?);
        }
        self.note(name, Some(all));
        Ok(())
    }

    /// Returns the tensors of the files that hold a weight.
    fn entries(&self, name: &str) -> impl Iterator<Item = &Entry> {
        let joined = self.joined.get(name).into_iter().flat_map(Joined::entries);
        self.tensors.get(name).into_iter().chain(joined)
    }

    /// Opens `model.safetensors`, or the shards that `model.safetensors.index.json` names. `published` maps a
    /// key of a file to the published name, or to `None` if the key is not a weight.
    ///
    /// # Errors
    /// Returns an error if there is no safetensors file or only a pickle checkpoint, a file is unreadable or truncated, or two
    /// keys belong to one tensor.
    pub fn open(dir: &Path, published: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let mut this = Self::open_as_stored(dir, published)?;
        this.joined = Joined::take(&mut this.tensors);
        Ok(this)
    }

    /// Opens the files as [`Self::open`] does. The weights of experts keep the form that they have in the files.
    ///
    /// # Errors
    /// Returns an error as [`Self::open`] does.
    pub(crate) fn open_as_stored(dir: &Path, published: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let mut this = Self::empty(dir.to_path_buf());
        let mut keys_seen = HashMap::new();
        for path in shard_paths(dir)? {
            this.add_file(&path, &published, &mut keys_seen)?;
        }
        Ok(this)
    }

    /// Opens one file, whose keys are used as tensor names.
    ///
    /// # Errors
    /// Returns an error if the file is unreadable or truncated.
    pub fn open_file(path: &Path) -> Result<Self> {
        let dir = path.parent().unwrap_or(Path::new(".")).to_path_buf();
        let mut this = Self::empty(dir);
        this.add_file(path, |key| Some(key.to_owned()), &mut HashMap::new())?;
        Ok(this)
    }

    /// Adds the tensors of a file. `seen` maps the published names of the tensors so far to their keys.
    pub(crate) fn add_file(
        &mut self,
        path: &Path,
        published: impl Fn(&str) -> Option<String>,
        seen: &mut HashMap<String, String>,
    ) -> Result<()> {
        let fail = |what: String| ModelError::Checkpoint { dir: self.dir.clone(), what };
        let (shard, metadata) = Shard::open(path)?;
        for (key, info) in metadata.tensors() {
            let Some(name) = published(&key) else { continue };
            if let Some(other) = seen.insert(name.clone(), key.clone()) {
                return Err(fail(format!("{key} and {other} both have the name {name} in the model")));
            }
            self.tensors.insert(name, Entry { shard: self.shards.len(), info: info.clone() });
        }
        self.shards.push(shard);
        Ok(())
    }

    /// Adds the tensors of towers that are stored in separate directories, and returns their names. A directory is not opened if
    /// the checkpoint contains any tensor of that tower.
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
                        "this checkpoint has no tensors with the prefix {}, and no directory of that tower was found; give one with {}",
                        companion.prefix,
                        FamilyOption::setting(companion.option)
                    ),
                });
            };
            let name =
                |key: &str| (companion.published)(key).map(|name| format!("{}{name}", companion.prefix));
            let other = Self::open(dir, name)?;
            let first = self.shards.len();
            self.shards.extend(other.shards);
            for (name, entry) in other.tensors {
                added.insert(name.clone());
                self.tensors.insert(name, Entry { shard: first + entry.shard, ..entry });
            }
        }
        Ok(added)
    }

    /// Returns the checkpoint directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns all published tensor names, in no particular order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().chain(self.joined.keys()).map(String::as_str)
    }

    /// Returns the shape of a tensor.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        let joined = || Some(self.joined.get(name)?.shape.as_slice());
        self.tensors.get(name).map(|e| e.info.shape.as_slice()).or_else(joined)
    }

    /// Returns the dtype in which a tensor will be held, or `None` if the file's dtype is unsupported.
    pub(super) fn held_as(&self, name: &str, dtype: WeightDtype) -> Option<ParamDtype> {
        held(self.entries(name).next()?, dtype)
    }

    /// Returns the dtype of a tensor in its file.
    pub(super) fn dtype(&self, name: &str) -> Option<Dtype> {
        self.tensors.get(name).map(|entry| entry.info.dtype)
    }

    /// Reads the bytes of a tensor as they are in its file.
    ///
    /// # Errors
    /// Returns an error if the file is unreadable or has become shorter.
    pub(super) fn bytes(&self, name: &str) -> Result<Vec<u8>> {
        let Some(Entry { shard, info }) = self.tensors.get(name) else { return Ok(Vec::new()) };
        let (shard, (start, end)) = (&self.shards[*shard], info.data_offsets);
        let mut bytes = vec![0; end - start];
        shard.read(shard.data + start as u64, &mut bytes)?;
        Ok(bytes)
    }

    /// Returns the size of a tensor in its file, in bytes.
    pub fn num_bytes(&self, name: &str) -> Option<usize> {
        let bytes = |entry: &Entry| entry.info.data_offsets.1 - entry.info.data_offsets.0;
        self.shape(name).map(|_| self.entries(name).map(bytes).sum())
    }

    /// Returns a weight that stays in its mapped file. Returns `None` if its values need conversion or are not aligned for
    /// reading in place. The inner error is a line for the list of problems.
    ///
    /// # Errors
    /// Returns an error if the file cannot be mapped.
    pub(super) fn in_place(
        &self,
        name: &str,
        part: Part,
        dtype: WeightDtype,
    ) -> Result<Option<std::result::Result<Param, String>>> {
        let Some(param) =
            self.held_as(name, dtype).map_or(Ok(None), |dtype| self.mapped(name, part, dtype))?
        else {
            return Ok(None);
        };
        let mut pieces = self.pieces();
        let guard = param.read();
        let bad = match guard.stored() {
            Stored::Bf16(data) => first_not_finite(data, &mut pieces),
            Stored::F32(data) => first_not_finite(data, &mut pieces),
            Stored::Quantised(_) => None,
        };
        drop(guard);
        self.note(name, pieces);
        Ok(Some(match bad {
            Some(what) => Err(format!("  tensor {name}: {what}")),
            None => Ok(param),
        }))
    }

    /// Returns a tensor in its mapped file, or `None` if the file's dtype differs or the values are not aligned.
    fn mapped(&self, name: &str, part: Part, dtype: ParamDtype) -> Result<Option<Param>> {
        let Some(Entry { shard, info }) = self.tensors.get(name) else { return Ok(None) };
        if !matches!((info.dtype, dtype), (Dtype::F32, ParamDtype::F32) | (Dtype::BF16, ParamDtype::Bf16)) {
            return Ok(None);
        }
        let shard = &self.shards[*shard];
        let at = shard.data as usize + info.data_offsets.0;
        Ok(Param::mapped(name, part, &info.shape, dtype, (Arc::clone(shard.map()?), at)).ok())
    }

    /// Finds a weight in its mapped file, to be read there without a copy. Returns `None` if the file stores it in another form
    /// or cannot be mapped. The file's values may differ from those of `weight`.
    fn found(&self, weight: &Param) -> Option<Param> {
        let found = self.mapped(weight.name(), weight.part(), weight.dtype()).ok()??;
        (found.shape() == weight.shape()).then(|| found.on_loan())
    }

    /// Finds a weight as [`Self::found`] does. Returns `None` if the file's values differ from those of `weight`.
    pub(super) fn on_loan(&self, weight: &Param) -> Option<Param> {
        let found = self.found(weight)?;
        let same = match (found.read().stored(), weight.read().stored()) {
            (Stored::F32(a), Stored::F32(b)) => same_bits(a, b),
            (Stored::Bf16(a), Stored::Bf16(b)) => same_bits(a, b),
            _ => false,
        };
        same.then_some(found)
    }

    /// Returns whether [`Self::on_loan`] would find a weight, assuming that its values equal the file's.
    pub(crate) fn lends(&self, weight: &Param) -> bool {
        self.found(weight).is_some()
    }

    /// Checks that no mapped file has been modified since it was opened. A file that was replaced, as by a download, is no
    /// problem: the open file still has the old content.
    ///
    /// # Errors
    /// Returns [`ModelError::Changed`] if a file was modified, or another error if its metadata cannot be read.
    pub(crate) fn unchanged(&self) -> Result<()> {
        self.shards.iter().filter(|shard| shard.map.get().is_some()).try_for_each(Shard::unchanged)
    }

    /// Reads a tensor. The inner error is a line for the list of problems.
    ///
    /// # Errors
    /// Returns an error if the file is unreadable or has become shorter.
    pub fn read(&self, name: &str, dtype: WeightDtype) -> Result<std::result::Result<Values, String>> {
        let mut pieces = self.pieces();
        let values = match (self.tensors.get(name), self.joined.get(name)) {
            (Some(entry), _) => self.read_entry(entry, dtype, &mut pieces)?,
            (None, Some(joined)) => joined.read(|entry| {
                let mut own = self.pieces();
                let values = self.read_entry(entry, dtype, &mut own)?;
                pieces.iter_mut().zip(own).for_each(|(all, own)| all.extend(own));
                Ok(values)
            })?,
            (None, None) => return Ok(Err(format!("  missing tensor {name}"))),
        };
        self.note(name, pieces);
        Ok(values.map_err(|what| format!("  tensor {name}: {what}")))
    }

    /// Reads a tensor of a file. The inner error says what is wrong with its values.
    fn read_entry(
        &self,
        entry: &Entry,
        dtype: WeightDtype,
        pieces: &mut Option<Vec<u64>>,
    ) -> Result<std::result::Result<Values, String>> {
        let Entry { shard, info } = entry;
        let (shard, len) = (&self.shards[*shard], info.shape.iter().product());
        // Zeroed memory comes from the system, so no thread has to write it first.
        let (wide, narrow) = (|| vec![0.0f32; len], || vec![0u16; len].reinterpret_into());
        let same = |x: f32| (x, x.is_finite());
        let round = |x: f32| (bf16::from_f32(x), x.is_finite());
        let f16 = |b| f16::from_le_bytes(b).to_f32();
        Ok(match (info.dtype, held(entry, dtype)) {
            (Dtype::BF16, Some(ParamDtype::Bf16)) => {
                let number = |b| {
                    let x = bf16::from_le_bytes(b);
                    (x, x.is_finite())
                };
                shard.numbers(info, narrow(), pieces, number)?.map(Values::Bf16)
            }
            (Dtype::F32, Some(ParamDtype::Bf16)) => {
                shard.numbers(info, narrow(), pieces, |b| round(f32::from_le_bytes(b)))?.map(Values::Bf16)
            }
            (Dtype::F16, Some(ParamDtype::Bf16)) => {
                shard.numbers(info, narrow(), pieces, |b| round(f16(b)))?.map(Values::Bf16)
            }
            (Dtype::F32, _) => {
                shard.numbers(info, wide(), pieces, |b| same(f32::from_le_bytes(b)))?.map(Values::F32)
            }
            (Dtype::F16, _) => shard.numbers(info, wide(), pieces, |b| same(f16(b)))?.map(Values::F32),
            (Dtype::BF16, _) => shard
                .numbers(info, wide(), pieces, |b| same(bf16::from_le_bytes(b).to_f32()))?
                .map(Values::F32),
            (other, _) => Err(format!("dtype {other:?}, expected F32, BF16 or F16")),
        })
    }

    /// Returns whether two tensors have the same bytes.
    ///
    /// # Errors
    /// Returns an error if the file is unreadable.
    pub fn equal(&self, a: &str, b: &str) -> Result<bool> {
        let (Some(a), Some(b)) = (self.tensors.get(a), self.tensors.get(b)) else { return Ok(false) };
        let span = |entry: &Entry| entry.info.data_offsets.1 - entry.info.data_offsets.0;
        if a.info.dtype != b.info.dtype || span(a) != span(b) {
            return Ok(false);
        }
        let mut buffers = [vec![0; PIECE], vec![0; PIECE]];
        for start in (0..span(a)).step_by(PIECE) {
            let len = PIECE.min(span(a) - start);
            for (buffer, Entry { shard, info }) in buffers.iter_mut().zip([a, b]) {
                let shard = &self.shards[*shard];
                shard.read(shard.data + (info.data_offsets.0 + start) as u64, &mut buffer[..len])?;
            }
            if buffers[0][..len] != buffers[1][..len] {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// Returns the dtype in which a tensor will be held, or `None` if the file's dtype is unsupported.
fn held(entry: &Entry, dtype: WeightDtype) -> Option<ParamDtype> {
    match (entry.info.dtype, dtype) {
        (Dtype::BF16, WeightDtype::Auto) => Some(ParamDtype::Bf16),
        (Dtype::F32 | Dtype::F16 | Dtype::BF16, WeightDtype::BFloat16) => Some(ParamDtype::Bf16),
        (Dtype::F32 | Dtype::F16 | Dtype::BF16, _) => Some(ParamDtype::F32),
        _ => None,
    }
}

/// Describes the first value that is not finite. All threads search, while the file's pages are in memory. `digests` receives the
/// digest of each piece, if they are needed: those that [`Shard::numbers`] computes.
fn first_not_finite<T: Copy + Display + Sync + Floats>(
    data: &[T],
    digests: &mut Option<Vec<u64>>,
) -> Option<String> {
    let found = parallel::map(data.chunks(PIECE).enumerate(), 2 * data.len(), |(i, piece)| {
        let (digest, finite) = T::checksum(piece);
        // The first one is searched for only if there is one: a loop that may end early cannot be vectorised.
        let at = if finite { None } else { piece.chunks(1).position(|x| !T::checksum(x).1) };
        (at.map(|at| i * PIECE + at), digest)
    });
    let (found, hashes): (Vec<_>, _) = found.into_iter().unzip();
    if let Some(digests) = digests {
        *digests = hashes;
    }
    let at = found.into_iter().flatten().next()?;
    Some(not_finite(at, data[at]))
}

/// Returns whether two slices have the same bits. All threads compare.
fn same_bits<T: bytemuck::NoUninit + Sync>(a: &[T], b: &[T]) -> bool {
    let pieces = a.chunks(PIECE).zip(b.chunks(PIECE));
    let same = parallel::map(pieces, 2 * a.len(), |(a, b)| {
        bytemuck::cast_slice::<T, u8>(a) == bytemuck::cast_slice::<T, u8>(b)
    });
    a.len() == b.len() && same.into_iter().all(|same| same)
}

fn not_finite(at: usize, number: impl Display) -> String {
    format!("element {at} is {number}, expected finite numbers")
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
        let text = inside::read_path(&index, MAX_INDEX_BYTES).map_err(ModelError::io(&index))?;
        let index: Index =
            serde_json::from_slice(&text).map_err(|source| ModelError::Json { path: index, source })?;
        let mut names: Vec<_> = index.weight_map.into_values().collect();
        names.sort_unstable();
        names.dedup();
        return names.iter().map(|name| named_in(dir, name)).collect();
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
            "only a pickle checkpoint was found ({}), which is unsupported because it can run code when it is read; convert it \
             to safetensors with `transformers` (`save_pretrained(..., safe_serialization=True)`)",
            entry.file_name().to_string_lossy()
        ),
        None => {
            "no model.safetensors and no model.safetensors.index.json; is this a checkpoint directory?".into()
        }
    }))
}
