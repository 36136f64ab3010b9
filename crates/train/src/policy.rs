//! The model of a run: in memory, or a plan to load it after the checks.

use std::collections::BTreeSet;
use std::path::PathBuf;

use omnigrpo_models::{
    Checkpoint, Chosen, LoadOptions, LoraConfig, Model, QuantBits, Quantization, WeightDtype, whole_tensors,
};
use omnigrpo_ops::{Arithmetic, Device, Part};

use crate::error::{DTYPE, QUANTIZATION, Refusal, Result};
use crate::room;
use crate::selection::Selection;
use crate::split::Split;

/// Source and form of a model.
#[derive(Clone)]
pub struct ModelPlan {
    /// Opened checkpoint.
    pub checkpoint: Checkpoint,
    /// Precision of the weights.
    pub dtype: WeightDtype,
    /// Bits of frozen weights of linear layers; `None` for the precision above.
    pub bits: Option<QuantBits>,
    /// Device on which the model runs.
    pub device: Device,
    /// How a CPU multiplies with the weights.
    pub arithmetic: Arithmetic,
    /// Seed of random weights; `None` for the weights of the checkpoint.
    pub random: Option<u64>,
    /// Directory of an adapter that was trained on this checkpoint.
    pub adapter: Option<PathBuf>,
    /// New adapters to train. They are added only if no `adapter` is given.
    pub lora: Option<LoraConfig>,
}

impl ModelPlan {
    /// Returns the plan of a checkpoint as it is, on the CPU.
    pub fn of(checkpoint: &Checkpoint) -> Self {
        Self {
            checkpoint: checkpoint.clone(),
            dtype: WeightDtype::Auto,
            bits: None,
            device: Device::Cpu,
            arithmetic: Arithmetic::default(),
            random: None,
            adapter: None,
            lora: None,
        }
    }

    /// Loads the model with weights that can be changed. Weights that are `trained` are never quantised.
    ///
    /// # Errors
    /// Returns an error if the weights do not fit into memory, or files are unreadable or do not fit together.
    pub fn load(&self, trained: &Selection) -> Result<Model> {
        self.load_to_train(trained, InPlace::None, false)
    }

    /// Loads the model of a rank as [`Self::load`] does. If the ranks of a machine share their memory, frozen weights stay in their files
    /// where possible. The files must not change ([`Model::files_unchanged`]). Several ranks also need digests of the weights
    /// ([`Model::tensor_digests`]).
    ///
    /// # Errors
    /// Returns the errors of [`Self::load`].
    pub fn load_on(&self, split: &Split, trained: &Selection) -> Result<Model> {
        let in_place = if split.shares_base() { InPlace::Frozen } else { InPlace::None };
        self.load_to_train(trained, in_place, split.ranks.size() > 1)
    }

    fn load_to_train(&self, trained: &Selection, in_place: InPlace, digests: bool) -> Result<Model> {
        let mut model = self.load_as(trained, in_place, digests)?;
        if let Some(lora) = self.new_adapters() {
            model.add_lora(lora)?;
        }
        Ok(model)
    }

    /// Loads the model to be read. Weights stay in their files if possible. A long run has to ask [`Model::files_unchanged`] before it uses
    /// what it computed, since a file could change.
    ///
    /// # Errors
    /// Returns the errors of [`Self::load`].
    pub fn load_to_read(&self) -> Result<Model> {
        self.load_as(&Selection::NONE, InPlace::All, false)
    }

    /// Returns the outline of the model that [`Self::load`] returns, with its trained weights marked.
    ///
    /// # Errors
    /// Returns an error if files are unreadable or nothing can be trained.
    pub fn outline(&self, trained: &Selection) -> Result<Model> {
        let mut outline = self.with_options(trained, (Device::Outline, InPlace::None), |options| {
            Ok(Model::load(&self.checkpoint, &LoadOptions { outline: true, ..*options })?)
        })?;
        if let Some(adapter) = &self.adapter {
            outline.load_adapter(adapter)?;
        }
        if let Some(lora) = self.new_adapters() {
            outline.add_lora(lora)?;
        }
        trained.apply(&outline)?;
        Ok(outline)
    }

    /// Returns the outline of the model that [`Self::load_to_read`] returns.
    pub(crate) fn outline_to_read(&self) -> Result<Model> {
        let mut outline =
            self.with_options(&Selection::NONE, (Device::Outline, InPlace::All), |options| {
                Ok(Model::load(&self.checkpoint, &LoadOptions { outline: true, ..*options })?)
            })?;
        if let Some(adapter) = &self.adapter {
            outline.load_adapter(adapter)?;
        }
        Ok(outline)
    }

    fn new_adapters(&self) -> Option<&LoraConfig> {
        self.lora.as_ref().filter(|_| self.adapter.is_none())
    }

    fn load_as(&self, trained: &Selection, in_place: InPlace, digests: bool) -> Result<Model> {
        let mut model = self.with_options(trained, (self.device, in_place), |options| {
            let outline = Model::load(&self.checkpoint, &LoadOptions { outline: true, ..*options })?;
            weights_fit(&outline, Device::Cpu)?;
            weights_fit(&outline, self.device)?;
            let model = Model::load(&self.checkpoint, &LoadOptions { digests, ..*options })?;
            if let Some(quantization) = &options.quantization {
                let params = model.params().iter();
                let left = params.filter(|p| quantization.leaves(p.name(), p.part(), p.shape())).count();
                if left > 0 {
                    tracing::warn!(
                        "{left} linear weights are not quantised, because their rows are shorter than a group of {} numbers",
                        Quantization::GROUP
                    );
                }
            }
            Ok(model)
        })?;
        if let Some(adapter) = &self.adapter {
            model.load_adapter(adapter)?;
        }
        Ok(model)
    }

    /// Calls `f` with the options of loading.
    fn with_options<R>(
        &self,
        trained: &Selection,
        (device, in_place): (Device, InPlace),
        f: impl FnOnce(&LoadOptions) -> Result<R>,
    ) -> Result<R> {
        let whole = match &self.adapter {
            Some(adapter) if self.bits.is_some() || in_place != InPlace::None => {
                whole_tensors(adapter, self.checkpoint.family().format())?
            }
            _ => BTreeSet::new(),
        };
        let trained = trained.matcher()?;
        let keep = |name: &str, part: Part| whole.contains(name) || trained(name, part);
        let quantization = self.bits.map(|bits| Quantization { bits, keep: &keep });
        let stays = |name: &str, part: Part| match in_place {
            InPlace::None => false,
            InPlace::Frozen => !keep(name, part),
            InPlace::All => whole.is_empty(),
        };
        let in_place: Option<Chosen> = if device == Device::Cpu { Some(&stays) } else { None };
        let Self { dtype, arithmetic, random, .. } = *self;
        let (digests, outline) = (false, false);
        f(&LoadOptions { dtype, quantization, device, in_place, arithmetic, random, digests, outline })
    }
}

/// Weights that stay in their files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InPlace {
    None,
    /// Weights that are not trained.
    Frozen,
    All,
}

/// Model of a run.
pub enum Policy {
    /// Model in memory.
    Loaded(Box<Model>),
    /// Model that is loaded after the checks.
    Planned(Box<ModelPlan>),
}

impl Policy {
    pub(crate) fn checkpoint(&self) -> &Checkpoint {
        match self {
            Self::Loaded(model) => model.checkpoint(),
            Self::Planned(plan) => &plan.checkpoint,
        }
    }

    pub(crate) fn device(&self) -> Device {
        match self {
            Self::Loaded(model) => model.device(),
            Self::Planned(plan) => plan.device,
        }
    }

    /// Returns the model, loaded to be read, if it is not in memory.
    pub(crate) fn load_to_read(self) -> Result<Model> {
        match self {
            Self::Loaded(model) => Ok(*model),
            Self::Planned(plan) => plan.load_to_read(),
        }
    }

    /// Returns the outline of the model as it is read.
    pub(crate) fn outline_to_read(&self) -> Result<Model> {
        match self {
            Self::Planned(plan) => plan.outline_to_read(),
            Self::Loaded(model) => Ok(model.to_outline()?),
        }
    }

    /// Returns the outline of the model, with its trained weights marked.
    pub(crate) fn outline(&self, trained: &Selection) -> Result<Model> {
        match self {
            Self::Planned(plan) => plan.outline(trained),
            Self::Loaded(model) => {
                let outline = model.to_outline()?;
                trained.apply(&outline)?;
                Ok(outline)
            }
        }
    }
}

/// Returns an error if the weights alone exceed the free memory of a device. Weights are loaded through main memory.
///
/// # Errors
/// Returns [`TrainError::Refused`](crate::TrainError::Refused) if they do.
pub fn weights_fit(outline: &Model, device: Device) -> Result<()> {
    let weights: u64 = outline.params().iter().map(|param| param.num_bytes() as u64).sum();
    let short = room::free_on(device).filter(|(free, _)| weights > *free);
    let Some((free, whose)) = short else { return Ok(()) };
    Err(Refusal::failure(format!("the model does not fit into {whose}"))
        .at(outline.dir().display())
        .got(format!("{} of weights", room::size(weights)))
        .expected(format!("at most the free {}", room::size(free)))
        .help(format!(
            "{QUANTIZATION} stores frozen weights in fewer bits; bfloat16 as {DTYPE} halves the size of f32 weights; \
             `omnigrpo doctor` with the model shows the memory of each way of training"
        ))
        .into())
}
