//! Models from checkpoints, their outlines, and references.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use omnigrpo_kernels::{Arithmetic, Stored};
use omnigrpo_ops::{Device, Param};

use super::Model;
use crate::checkpoint::Checkpoint;
use crate::error::Result;
use crate::weights::{
    Chosen, FileSource, FrozenWeights, OutlineOf, OutlineSource, Quantization, RandomSource, ReferenceSource,
    TensorDigests, WeightDtype, WeightFiles,
};
use omnigrpo_kernels::checksum::checksum;

/// Options for loading a checkpoint.
#[derive(Clone, Copy, Default)]
pub struct LoadOptions<'a> {
    /// Dtype of the weights.
    pub dtype: WeightDtype,
    /// Quantisation of the weights, if any.
    pub quantization: Option<Quantization<'a>>,
    /// Device on which the model runs.
    pub device: Device,
    /// Selects, by published name and part, the weights that stay in the mapped files where possible, without a copy. Such weights
    /// cannot be written or trained. Processes of one machine share their memory. The files must not change while the model is
    /// in use ([`Model::files_unchanged`]).
    pub in_place: Option<Chosen<'a>>,
    /// How a CPU multiplies with the weights.
    pub arithmetic: Arithmetic,
    /// Seed of random weights, for training from scratch and for benchmarks; `None` to read the checkpoint's files.
    pub random: Option<u64>,
    /// True to compute a digest of each tensor while it is read ([`Model::tensor_digests`]).
    pub digests: bool,
    /// True for an outline: its weights have names, shapes and dtypes but no data, so it cannot compute anything. Only loading
    /// checks that the tensors of files fit.
    pub outline: bool,
}

/// Place of a reference's copies of the trained weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReferencePlace {
    /// Memory, for a reference that runs on this device.
    Memory(Device),
    /// The checkpoint's files, for a reference that runs on the CPU. This needs no memory between passes. A weight is copied
    /// instead if the file's values differ or the file cannot be mapped. The files must not change while the reference is in use
    /// ([`Model::files_unchanged`]).
    Files,
}

/// Opens a checkpoint's weight files. Also returns the names of the weights that are in separate directories.
fn weight_files(checkpoint: &Checkpoint) -> Result<(WeightFiles, HashSet<String>)> {
    let format = checkpoint.family().format();
    let mut files = WeightFiles::open(checkpoint.dir(), |key| format.published_name(key))?;
    let outside = files.add_companions(&format.companions())?;
    Ok((files, outside))
}

/// Opens the tensors that saved copies contain and the network does not use; `None` if there are none.
fn carried(checkpoint: &Checkpoint) -> Result<Option<WeightFiles>> {
    let format = checkpoint.family().format();
    let files = WeightFiles::open_as_stored(checkpoint.dir(), |key| format.carried(key))?;
    let is_empty = files.names().next().is_none();
    Ok((!is_empty).then_some(files))
}

/// Returns a digest of the values of a weight in memory.
fn param_digest(param: &Param) -> u64 {
    match param.read().stored() {
        Stored::F32(values) => checksum(bytemuck::cast_slice(values)),
        Stored::Bf16(values) => checksum(bytemuck::cast_slice(values)),
        Stored::Quantised(matrix) => {
            let mut wide = vec![0.0f32; matrix.len()];
            matrix.widen(&mut wide);
            checksum(bytemuck::cast_slice(&wide))
        }
    }
}

impl Model {
    /// Loads a checkpoint. All weights start frozen.
    ///
    /// # Errors
    /// Returns an error if files are unreadable, tensors do not fit, the configuration is invalid, or the CPU cannot use the
    /// arithmetic.
    pub fn load(checkpoint: &Checkpoint, options: &LoadOptions) -> Result<Self> {
        let LoadOptions { dtype, quantization, device, in_place, arithmetic, random, digests, outline } =
            *options;
        arithmetic.check()?;
        let family = checkpoint.family();
        let architecture = family.architecture();
        let new = |network, params, outside| Self::new(checkpoint.clone(), network, params, outside, device);
        if outline {
            let files = if random.is_some() { None } else { Some(weight_files(checkpoint)?.0) };
            let (files, params) = (files.as_ref(), Vec::new());
            let mut source = OutlineSource { files, dtype, quantization, arithmetic, params };
            let network = architecture.network(&mut source)?;
            return Ok(new(network, source.params, HashSet::new()));
        }
        device.begin_to_compile();
        if let Some(seed) = random {
            let std = architecture.initializer_range();
            let params = Vec::new();
            let mut source = RandomSource { seed, std, dtype, quantization, arithmetic, params };
            let network = architecture.network(&mut source)?;
            let mut model = new(network, source.params, HashSet::new());
            // The seed determines the weights.
            model.digests = digests.then(TensorDigests::new);
            return Ok(model);
        }
        let (files, outside) = weight_files(checkpoint)?;
        if digests {
            files.keep_digests();
        }
        let how = FrozenWeights { arithmetic, ..dtype.into() };
        let mut source = FileSource::new(&files, how).quantised(quantization).in_place(in_place);
        let network = architecture.network(&mut source)?;
        let mut model = new(network, source.finish(family.name())?, outside);
        model.digests = files.digests();
        model.carried = carried(checkpoint)?;
        model.lenders = Some(files).filter(|_| model.params.iter().any(|weight| weight.is_mapped()));
        Ok(model)
    }

    /// Builds the outline of this model, with its adapters: the same names, shapes and dtypes, without data.
    ///
    /// # Errors
    /// Returns an error if the adapters do not fit.
    pub fn to_outline(&self) -> Result<Self> {
        let weights = self.by_name();
        let mut source = OutlineOf { weights: &weights, tied: self.decoder().tied(), params: Vec::new() };
        let network = self.family().architecture().network(&mut source)?;
        let (checkpoint, outside) = (self.checkpoint.clone(), self.outside.clone());
        let mut outline = Self::new(checkpoint, network, source.params, outside, Device::Outline);
        if let Some(lora) = &self.lora {
            let bases = outline.by_name();
            for (weight, adapter) in self.adapted() {
                if let Some(base) = bases.get(weight.name()) {
                    outline.adapt(base, lora, adapter.rank(), None)?;
                }
            }
            outline.lora = Some(lora.clone());
        }
        Ok(outline)
    }

    /// Returns the weights of the architecture by published name.
    fn by_name(&self) -> HashMap<String, Arc<Param>> {
        self.base_params().iter().map(|param| (param.name().to_owned(), Arc::clone(param))).collect()
    }

    /// Builds a frozen model for the KL term. It copies the trained weights, shares the others and has no adapters.
    ///
    /// # Errors
    /// Returns an error if memory runs out.
    pub fn reference(&self, place: ReferencePlace) -> Result<Self> {
        let (device, files) = match place {
            ReferencePlace::Memory(device) => (device, None),
            ReferencePlace::Files => (Device::Cpu, self.lenders()),
        };
        let policy = self.by_name();
        let tied = self.decoder().tied();
        let mut source = ReferenceSource { policy: &policy, tied, files: files.as_ref(), params: Vec::new() };
        let network = self.family().architecture().network(&mut source)?;
        let (checkpoint, outside) = (self.checkpoint.clone(), self.outside.clone());
        let mut reference = Self::new(checkpoint, network, source.params, outside, device);
        reference.lenders = files.filter(|_| reference.params.iter().any(|weight| weight.is_mapped()));
        Ok(reference)
    }

    /// Returns the bytes of memory that [`Self::reference`] takes in [`ReferencePlace::Files`] if the weights equal the checkpoint's: the size of all
    /// copies, and the size of the largest weight that stays in a file. Also works for an outline.
    pub fn reference_bytes(&self) -> u64 {
        let files = self.lenders();
        let trained = self.base_params().iter().filter(|weight| weight.trainable());
        let (lent, copied): (Vec<_>, Vec<_>) =
            trained.partition(|weight| files.as_ref().is_some_and(|files| files.lends(weight)));
        let largest = lent.iter().map(|weight| weight.num_bytes()).max().unwrap_or(0);
        (largest + copied.iter().map(|weight| weight.num_bytes()).sum::<usize>()) as u64
    }

    /// Returns the bytes of the frozen weights that can stay in the checkpoint's files ([`LoadOptions::in_place`]). Also works for
    /// an outline.
    pub fn sharable_bytes(&self) -> u64 {
        let Some(files) = self.lenders() else { return 0 };
        let frozen = self.base_params().iter().filter(|weight| !weight.trainable() && files.lends(weight));
        frozen.map(|weight| weight.num_bytes() as u64).sum()
    }

    /// Returns a digest of the bytes of each tensor: those that were computed while the files were read ([`LoadOptions::digests`]), else
    /// those of the weights in memory.
    pub fn tensor_digests(&self) -> TensorDigests {
        let in_memory = || {
            let params = self.params().iter();
            params.map(|param| (param.name().to_owned(), param_digest(param))).collect()
        };
        self.digests.clone().unwrap_or_else(in_memory)
    }

    /// Opens the checkpoint's files. Returns `None` for a model of random weights without files.
    fn lenders(&self) -> Option<WeightFiles> {
        weight_files(&self.checkpoint).ok().map(|(files, _)| files)
    }

    /// Checks that the files from which weights are read have not been modified ([`LoadOptions::in_place`],
    /// [`ReferencePlace::Files`]).
    ///
    /// # Errors
    /// Returns [`ModelError::Changed`](crate::ModelError::Changed) if a file has been modified.
    pub fn files_unchanged(&self) -> Result<()> {
        self.lenders.as_ref().map_or(Ok(()), WeightFiles::unchanged)
    }
}
