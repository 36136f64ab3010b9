//! Weights from files, from a seed or from another model, and their way back to files.
//!
//! A model is built by requesting each tensor from a [`WeightSource`] by its published name. The same building code
//! therefore loads a checkpoint, creates a random model and copies a reference, and it is the only place that
//! defines the tensors of an architecture.

pub(crate) mod digest;
mod files;
mod joined;
pub(crate) mod save;

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use omnigrpo_kernels::quant::{GROUP, QuantBits, QuantMatrix};
use omnigrpo_kernels::{Arithmetic, Stored, parallel};
use omnigrpo_ops::{Linear, Norm, Param, ParamDtype, Part, Values};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

pub use digest::{SharedDigests, SourceDigest, TensorDigests, source_digest, source_digests};
pub use files::WeightFiles;
pub use save::{save_weights, share};

use crate::error::{ModelError, Result};

/// Dtype in which weights are held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum WeightDtype {
    /// The stored dtype: bf16 stays bf16, f32 stays f32, f16 becomes f32.
    #[default]
    Auto,
    /// f32 for all weights.
    Float32,
    /// bf16 for all weights.
    BFloat16,
}

/// Chooses weights by their published name and part.
pub type Chosen<'a> = &'a (dyn Fn(&str, Part) -> bool + Sync);

/// Selection of the weights to quantise. Only frozen weights can be quantised.
#[derive(Clone, Copy)]
pub struct Quantization<'a> {
    /// Number of bits of a quantised weight.
    pub bits: QuantBits,
    /// Selects, by published name and part, the weights that are not quantised because they will be trained.
    pub keep: Chosen<'a>,
}

impl Quantization<'_> {
    /// Returns whether a tensor is quantised. Quantising rows shorter than a group would save nothing.
    fn takes(&self, name: &str, part: Part, shape: &[usize]) -> bool {
        self.asks_for(name, part, shape) && shape.last().is_some_and(|&k| k >= GROUP)
    }

    /// Returns whether a tensor is left unquantised because its rows are shorter than a group, [`Self::GROUP`].
    pub fn leaves(&self, name: &str, part: Part, shape: &[usize]) -> bool {
        self.asks_for(name, part, shape) && !self.takes(name, part, shape)
    }

    /// Length of a group of weights that share one scale.
    pub const GROUP: usize = GROUP;

    /// Returns whether a tensor is an untrained weight of a linear layer or of experts. Embeddings, output heads and routers are
    /// excluded, as in `bitsandbytes`' integration.
    fn asks_for(&self, name: &str, part: Part, shape: &[usize]) -> bool {
        let plain = |component: &str| {
            !(component.contains("embed") || ["lm_head", "head", "router", "gate"].contains(&component))
        };
        let experts = name.split('.').any(|component| component == "experts");
        let matrix = match *shape {
            [_, _] => true,
            [_, _, _] => experts,
            _ => false,
        };
        let linear = matrix && (experts || name.ends_with(".weight"));
        linear && name.split('.').all(plain) && !(self.keep)(name, part)
    }
}

/// Converts a weight to the form in which it will be held.
fn hold(
    name: &str,
    part: Part,
    shape: &[usize],
    values: Values,
    quantization: Option<&Quantization>,
) -> Result<std::result::Result<Param, String>> {
    let dense = Param::new(name, part, shape, values)?;
    let (Some(q), Some((&k, n))) = (quantization.filter(|q| q.takes(name, part, shape)), shape.split_last())
    else {
        return Ok(Ok(dense));
    };
    let n = n.iter().product();
    let guard = dense.read();
    let weight = guard.weight(n, k);
    let matrix = QuantMatrix::from_rows(q.bits, n, k, |i, row| match weight.rows(i..i + 1).stored() {
        Stored::F32(from) => row.copy_from_slice(from),
        Stored::Bf16(from) => row.iter_mut().zip(from).for_each(|(to, x)| *to = x.to_f32()),
        Stored::Quantised(from) => from.widen(row),
    });
    Ok(match matrix {
        Some(matrix) => Ok(Param::quantised(name, part, shape, matrix)?),
        None => Err(format!("  tensor {name}: values too large to quantise")),
    })
}

/// Initial values of a new weight if there is no checkpoint.
#[derive(Clone, Copy, Debug)]
pub enum Init {
    /// Normal distribution with the configuration's `initializer_range`.
    Normal,
    /// Zeros, for biases.
    Zeros,
    /// Ones, for normalisation weights.
    Ones,
}

/// Returns the number of elements of a tensor with the shape that a configuration gives.
fn num_elements(name: &str, shape: &[usize]) -> Result<usize> {
    let len = shape.iter().try_fold(1usize, |n, &side| n.checked_mul(side)).filter(|&n| n < 1 << 48);
    len.ok_or_else(|| {
        ModelError::weights(format!(
            "tensor {name} would have shape {shape:?}, which is too large; check the sizes in config.json"
        ))
    })
}

/// Source of a model's weights.
pub trait WeightSource {
    /// Returns the weight with this published name and shape.
    ///
    /// # Errors
    /// Returns an error if a device is out of memory. Missing and mis-shaped tensors are collected and reported together by
    /// the creator of the source.
    fn get(&mut self, name: &str, part: Part, shape: &[usize], init: Init) -> Result<Arc<Param>>;

    /// Returns whether input embedding and output head are one tensor. `config` is the configuration's setting.
    ///
    /// # Errors
    /// Returns an error if files are unreadable.
    fn tied(&mut self, embed: &str, head: &str, config: bool) -> Result<bool>;

    /// Returns whether a tensor of this name exists, for tensors that only some checkpoints of an architecture have. A new
    /// model does not have them.
    fn has(&self, _name: &str) -> bool {
        false
    }
}

/// Weights below a prefix, all of one part, from which a network is built.
pub struct Scope<'s> {
    source: &'s mut dyn WeightSource,
    prefix: String,
    part: Part,
}

impl<'s> Scope<'s> {
    /// Creates a scope of the weights of `source` whose names begin with `prefix`.
    pub fn new(source: &'s mut dyn WeightSource, prefix: &str, part: Part) -> Self {
        Self { source, prefix: prefix.to_owned(), part }
    }

    /// Returns a scope of the weights below a further prefix.
    pub fn sub(&mut self, prefix: &str) -> Scope<'_> {
        let (prefix, part) = (format!("{}{prefix}", self.prefix), self.part);
        Scope { source: &mut *self.source, prefix, part }
    }

    /// Returns a scope of the same weights as another part of the model.
    pub fn of(&mut self, part: Part) -> Scope<'_> {
        Scope { source: &mut *self.source, prefix: self.prefix.clone(), part }
    }

    /// Returns the weight with this name and shape.
    pub fn get(&mut self, name: &str, shape: &[usize], init: Init) -> Result<Arc<Param>> {
        self.source.get(&format!("{}{name}", self.prefix), self.part, shape, init)
    }

    /// Returns the linear layer `name`, `[n, k]`.
    pub fn linear(&mut self, name: &str, n: usize, k: usize, bias: bool) -> Result<Linear> {
        let (weight, bias) = self.weight_and_bias(name, &[n, k], bias)?;
        Ok(Linear::new(weight, bias)?)
    }

    /// Returns a convolution as a linear layer over its windows. The values of a window are in the order of the published
    /// `shape`, `[n, k…]`.
    pub fn convolution(&mut self, name: &str, shape: &[usize], bias: bool) -> Result<Linear> {
        let (n, k) = (shape[0], shape[1..].iter().product());
        let (weight, bias) = self.weight_and_bias(name, shape, bias)?;
        Ok(Linear::reshaped(weight, bias, n, k)?)
    }

    fn weight_and_bias(
        &mut self,
        name: &str,
        shape: &[usize],
        bias: bool,
    ) -> Result<(Arc<Param>, Option<Arc<Param>>)> {
        let weight = self.get(&format!("{name}.weight"), shape, Init::Normal)?;
        let bias = bias.then(|| self.get(&format!("{name}.bias"), &shape[..1], Init::Zeros)).transpose()?;
        Ok((weight, bias))
    }

    /// Returns the layer norm `name` over rows of `c`.
    pub fn layer_norm(&mut self, name: &str, c: usize, eps: f32) -> Result<Norm> {
        let weight = self.get(&format!("{name}.weight"), &[c], Init::Ones)?;
        let bias = self.get(&format!("{name}.bias"), &[c], Init::Zeros)?;
        Ok(Norm::Layer { weight, bias, eps })
    }

    /// Returns the RMS norm `name` over rows of `c`.
    pub fn rms_norm(&mut self, name: &str, c: usize, eps: f32) -> Result<Norm> {
        Ok(Norm::Rms { weight: self.get(&format!("{name}.weight"), &[c], Init::Ones)?, eps })
    }
}

/// How the weights of a frozen model are loaded.
#[derive(Clone, Debug, Default)]
pub struct FrozenWeights {
    /// Dtype of the weights in memory.
    pub dtype: WeightDtype,
    /// Checks names and shapes, but keeps no values. Such a model cannot compute, and takes no memory.
    pub is_outline: bool,
    /// Receives a digest of each tensor, computed while it is read. An outline then reads its files, too. `None` if nobody needs them.
    pub digests: Option<SharedDigests>,
    /// How a CPU multiplies with the weights.
    pub arithmetic: Arithmetic,
}

impl From<WeightDtype> for FrozenWeights {
    fn from(dtype: WeightDtype) -> Self {
        Self { dtype, ..Self::default() }
    }
}

/// Tensors that do not fit an architecture, to report all of them together.
#[derive(Debug, Default)]
pub(crate) struct Problems(Vec<String>);

impl Problems {
    /// Adds a line about a tensor.
    pub fn push(&mut self, line: String) {
        self.0.push(line);
    }

    /// Adds a tensor that the architecture lacks.
    pub fn unknown(&mut self, name: &str) {
        self.push(format!("  unknown tensor {name}: not part of this architecture"));
    }

    /// Returns the line about a tensor that has not the expected shape; `None` if it has.
    pub fn of_shape(name: &str, got: Option<&[usize]>, expected: &[usize]) -> Option<String> {
        match got {
            None => Some(format!("  missing tensor {name} {expected:?}")),
            Some(got) if got != expected => {
                Some(format!("  tensor {name}: shape {got:?}, expected {expected:?}"))
            }
            Some(_) => None,
        }
    }

    /// Returns whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns [`ModelError::Tensors`] if there are problems with the weights in this place.
    pub fn none_or(self, place: &Path, family: &'static str) -> Result<()> {
        const SHOWN: usize = 20;
        let count = self.0.len();
        if count == 0 {
            return Ok(());
        }
        let mut list = self.0[..count.min(SHOWN)].join("\n");
        if count > SHOWN {
            list.push_str(&format!("\n  … and {} more", count - SHOWN));
        }
        Err(ModelError::Tensors { dir: place.to_path_buf(), family, count, list })
    }
}

/// A source that reads weights from a checkpoint directory and collects all problems.
pub struct FileSource<'a> {
    files: &'a WeightFiles,
    dtype: WeightDtype,
    is_outline: bool,
    quantization: Option<Quantization<'a>>,
    in_place: Option<Chosen<'a>>,
    used: HashSet<String>,
    problems: Problems,
    params: Vec<Arc<Param>>,
    digests: Option<SharedDigests>,
    arithmetic: Arithmetic,
}

impl<'a> FileSource<'a> {
    /// Creates a source over open files.
    pub fn new(files: &'a WeightFiles, how: impl Into<FrozenWeights>) -> Self {
        let FrozenWeights { dtype, is_outline, digests, arithmetic } = how.into();
        if digests.is_some() {
            files.keep_digests();
        }
        let (used, problems, params) = (HashSet::new(), Problems::default(), Vec::new());
        Self {
            files,
            dtype,
            is_outline,
            quantization: None,
            in_place: None,
            used,
            problems,
            params,
            digests,
            arithmetic,
        }
    }

    /// Quantises the selected weights as they are read.
    #[must_use]
    pub fn quantised(mut self, quantization: Option<Quantization<'a>>) -> Self {
        self.quantization = quantization;
        self
    }

    /// Leaves the selected weights in the mapped files if they can be read there.
    #[must_use]
    pub fn in_place(mut self, in_place: Option<Chosen<'a>>) -> Self {
        self.in_place = in_place;
        self
    }

    /// Returns all weights that were requested.
    ///
    /// # Errors
    /// Returns [`ModelError::Tensors`], which lists every missing, extra, mis-shaped or non-finite tensor, or an error if the CPU
    /// cannot use the arithmetic.
    pub fn finish(mut self, family: &'static str) -> Result<Vec<Arc<Param>>> {
        self.arithmetic.check()?;
        let mut extra: Vec<_> = self.files.names().filter(|n| !self.used.contains(*n)).collect();
        extra.sort_unstable();
        extra.into_iter().for_each(|name| self.problems.unknown(name));
        if let Some(shared) = &self.digests {
            shared.add(self.files);
        }
        self.problems.none_or(self.files.dir(), family)?;
        Ok(self.params)
    }
}

impl FileSource<'_> {
    fn hand_out(&mut self, param: Param) -> Arc<Param> {
        let param = Arc::new(param.with(self.arithmetic));
        self.params.push(Arc::clone(&param));
        param
    }
}

impl WeightSource for FileSource<'_> {
    fn get(&mut self, name: &str, part: Part, shape: &[usize], _init: Init) -> Result<Arc<Param>> {
        self.used.insert(name.to_owned());
        num_elements(name, shape)?;
        let value = match Problems::of_shape(name, self.files.shape(name), shape) {
            Some(problem) => Err(problem),
            None if self.is_outline => {
                self.files.digest(name)?;
                return Ok(self.hand_out(Param::outline(name, part, shape, ParamDtype::F32)));
            }
            None => {
                let stays = self.in_place.is_some_and(|stays| stays(name, part))
                    && !self.quantization.is_some_and(|q| q.takes(name, part, shape));
                let mapped = if stays { self.files.in_place(name, part, self.dtype)? } else { None };
                match mapped {
                    Some(Ok(param)) => return Ok(self.hand_out(param)),
                    Some(Err(problem)) => Err(problem),
                    None => self.files.read(name, self.dtype)?,
                }
            }
        };
        // After the first problem, tensors are checked but not kept. A tensor that the files lack never takes memory, whatever
        // size the configuration gives.
        let param = match value {
            Ok(value) if self.problems.is_empty() => {
                hold(name, part, shape, value, self.quantization.as_ref())?
            }
            Ok(_) => Ok(Param::outline(name, part, shape, ParamDtype::F32)),
            Err(problem) => Err(problem),
        };
        let param = match param {
            Ok(param) => param,
            Err(problem) => {
                self.problems.push(problem);
                Param::outline(name, part, shape, ParamDtype::F32)
            }
        };
        Ok(self.hand_out(param))
    }

    /// Decides as `transformers` 5.23 does: two tensors that are both present are tied if the configuration says so and they are
    /// equal. If only one is present, they are tied whatever the configuration says; `transformers` would initialise the other
    /// one randomly.
    fn tied(&mut self, embed: &str, head: &str, config: bool) -> Result<bool> {
        let tied = match (self.files.shape(embed), self.files.shape(head)) {
            (Some(_), Some(_)) => config && self.files.equal(embed, head)?,
            _ => true,
        };
        if tied {
            self.used.insert(head.to_owned());
        }
        Ok(tied)
    }

    fn has(&self, name: &str) -> bool {
        self.files.shape(name).is_some()
    }
}

/// A source of names, shapes and dtypes without data, used to compute a model's size before it is loaded.
pub(crate) struct OutlineSource<'a> {
    /// Files of the checkpoint; `None` for a random model.
    pub(crate) files: Option<&'a WeightFiles>,
    pub(crate) dtype: WeightDtype,
    pub(crate) quantization: Option<Quantization<'a>>,
    pub(crate) arithmetic: Arithmetic,
    pub(crate) params: Vec<Arc<Param>>,
}

impl WeightSource for OutlineSource<'_> {
    fn get(&mut self, name: &str, part: Part, shape: &[usize], _init: Init) -> Result<Arc<Param>> {
        let in_file = self.files.and_then(|files| files.held_as(name, self.dtype));
        let dense = in_file.unwrap_or(match self.dtype {
            WeightDtype::BFloat16 => ParamDtype::Bf16,
            _ => ParamDtype::F32,
        });
        let quantised = self.quantization.filter(|q| q.takes(name, part, shape));
        let dtype = quantised.map_or(dense, |q| ParamDtype::Quantised(q.bits));
        let param = Arc::new(Param::outline(name, part, shape, dtype).with(self.arithmetic));
        self.params.push(Arc::clone(&param));
        Ok(param)
    }

    fn tied(&mut self, embed: &str, head: &str, config: bool) -> Result<bool> {
        match self.files {
            Some(files) if files.shape(embed).is_some() && files.shape(head).is_some() => {
                Ok(config && files.equal(embed, head)?)
            }
            Some(_) => Ok(true),
            None => Ok(config),
        }
    }

    fn has(&self, name: &str) -> bool {
        self.files.is_some_and(|files| files.shape(name).is_some())
    }
}

/// A source of random weights, for training from scratch and for benchmarks. The values depend only on the seed and the tensor's
/// name, not on the order of building.
pub struct RandomSource<'a> {
    /// Seed of all tensors.
    pub seed: u64,
    /// Standard deviation of [`Init::Normal`].
    pub std: f32,
    /// f32, or bf16 if requested.
    pub dtype: WeightDtype,
    /// Quantisation of the weights, if any.
    pub quantization: Option<Quantization<'a>>,
    /// How a CPU multiplies with the weights.
    pub arithmetic: Arithmetic,
    /// Weights that were requested so far.
    pub params: Vec<Arc<Param>>,
}

impl WeightSource for RandomSource<'_> {
    fn get(&mut self, name: &str, part: Part, shape: &[usize], init: Init) -> Result<Arc<Param>> {
        let len = num_elements(name, shape)?;
        let mut data = Vec::new();
        data.try_reserve_exact(len + 1).map_err(|_| {
            ModelError::weights(format!(
                "tensor {name} {shape:?} does not fit into memory; check the sizes in config.json"
            ))
        })?;
        match init {
            Init::Zeros => data.resize(len, 0.0),
            Init::Ones => data.resize(len, 1.0),
            Init::Normal => {
                data.resize(len.next_multiple_of(2), 0.0);
                normal(self.seed, name, self.std, &mut data);
                data.truncate(len);
            }
        }
        let values = Values::F32(data);
        let values = if self.dtype == WeightDtype::BFloat16 { values.into_bf16() } else { values };
        let param = hold(name, part, shape, values, self.quantization.as_ref())?;
        let param = Arc::new(param.map_err(ModelError::weights)?.with(self.arithmetic));
        self.params.push(Arc::clone(&param));
        Ok(param)
    }

    fn tied(&mut self, _embed: &str, _head: &str, config: bool) -> Result<bool> {
        Ok(config)
    }
}

/// Number of random numbers that a thread draws together, an even number.
const DRAWN_TOGETHER: usize = 1 << 16;

/// Fills pairs of normally distributed numbers by the Box-Muller transform. Seed and name select the random stream, of which each
/// number takes one word.
fn normal(seed: u64, name: &str, std: f32, data: &mut [f32]) {
    let mut key = [0u8; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    for (i, byte) in name.bytes().enumerate() {
        let slot = &mut key[8 + i % 24];
        *slot = slot.wrapping_mul(31).wrapping_add(byte);
    }
    let rng = ChaCha8Rng::from_seed(key);
    let work = 32 * data.len();
    parallel::map(data.chunks_mut(DRAWN_TOGETHER).enumerate(), work, |(i, chunk)| {
        let mut rng = rng.clone();
        rng.set_word_pos((i * DRAWN_TOGETHER) as u128);
        let mut uniform = move || (f64::from(rng.next_u32()) + 0.5) / (f64::from(u32::MAX) + 1.0);
        for pair in chunk.chunks_exact_mut(2) {
            let (radius, angle) = ((-2.0 * uniform().ln()).sqrt(), std::f64::consts::TAU * uniform());
            pair[0] = (radius * angle.cos()) as f32 * std;
            pair[1] = (radius * angle.sin()) as f32 * std;
        }
    });
}

/// A source for the reference model: frozen copies of the trained weights, and the policy's own tensors, without adapters, for
/// the rest.
pub struct ReferenceSource<'a> {
    /// Weights of the policy, keyed by published name.
    pub policy: &'a std::collections::HashMap<String, Arc<Param>>,
    /// Whether the policy's output head is its input embedding.
    pub tied: bool,
    /// Files in which weights may stay.
    pub files: Option<&'a WeightFiles>,
    /// Weights that were requested so far.
    pub params: Vec<Arc<Param>>,
}

impl WeightSource for ReferenceSource<'_> {
    fn get(&mut self, name: &str, _part: Part, _shape: &[usize], _init: Init) -> Result<Arc<Param>> {
        let Some(param) = self.policy.get(name) else {
            return Err(ModelError::weights(format!("reference model: the policy has no tensor {name}")));
        };
        let param = if param.trainable() {
            let lent = self.files.and_then(|files| files.on_loan(param));
            let lent = lent.map(|lent| lent.with(param.arithmetic()));
            Arc::new(lent.unwrap_or_else(|| param.frozen_copy()))
        } else if param.adapter().is_some() {
            Arc::new(param.bare())
        } else {
            Arc::clone(param)
        };
        self.params.push(Arc::clone(&param));
        Ok(param)
    }

    fn tied(&mut self, _embed: &str, _head: &str, _config: bool) -> Result<bool> {
        Ok(self.tied)
    }

    fn has(&self, name: &str) -> bool {
        self.policy.contains_key(name)
    }
}

/// A source of the names, shapes and dtypes of a model in memory.
pub(crate) struct OutlineOf<'a> {
    /// Weights of the model, keyed by published name.
    pub(crate) weights: &'a std::collections::HashMap<String, Arc<Param>>,
    /// Whether the output head is the input embedding.
    pub(crate) tied: bool,
    /// Weights that were requested so far.
    pub(crate) params: Vec<Arc<Param>>,
}

impl WeightSource for OutlineOf<'_> {
    fn get(&mut self, name: &str, part: Part, shape: &[usize], _init: Init) -> Result<Arc<Param>> {
        let Some(weight) = self.weights.get(name) else {
            return Err(ModelError::weights(format!("outline: the model has no tensor {name}")));
        };
        let param = Arc::new(Param::outline(name, part, shape, weight.dtype()).with(weight.arithmetic()));
        self.params.push(Arc::clone(&param));
        Ok(param)
    }

    fn tied(&mut self, _embed: &str, _head: &str, _config: bool) -> Result<bool> {
        Ok(self.tied)
    }

    fn has(&self, name: &str) -> bool {
        self.weights.contains_key(name)
    }
}

/// Joins a file name from a checkpoint's index to its directory. Returns an error unless it is a plain file name.
fn named_in(dir: &Path, name: &str) -> Result<PathBuf> {
    let plain = Path::new(name).components().count() == 1
        && matches!(Path::new(name).components().next(), Some(std::path::Component::Normal(_)));
    if plain {
        Ok(dir.join(name))
    } else {
        Err(ModelError::Checkpoint {
            dir: dir.to_path_buf(),
            what: format!(
                "the index names the file {name:?}; expected a file name inside the checkpoint directory"
            ),
        })
    }
}
