//! AdamW over a model's trained weights.
//!
//! Source: `torch.optim.AdamW` (decoupled decay, bias-corrected moments, epsilon outside the root), and
//! `torch.nn.utils.clip_grad_norm_`. A bf16 weight is updated through an f32 master copy unless `pure_bf16` is set: at small
//! learning rates, rounding to bf16 would cancel an update. A weight that nothing in the step could reach has no gradient and is
//! skipped, as PyTorch skips `grad = None`. A weight that was reached with advantages of 0 has a gradient of 0. Momentum, decay
//! and its count of updates still apply.
//!
//! Memory per trained weight: gradient 4 B, two moments 8 B, and 4 B of master for bf16. On a card the master consists of the
//! bf16 weight and the 2 B that it lacks, so weight, gradient, moments and master take 16 B. With `offload` the card holds the
//! weight and at most the gradient, 6 B, and the CPU applies the update. With [`Offload::File`] the moments and masters are in files
//! that are mapped into memory; an update reads and writes 12 B per weight there.
//!
//! Three settings take less, and change results: [`Optim::AdamW8bit`] keeps the moments in 2 B, `stochastic_rounding` makes a master
//! unnecessary, and [`GradDtype::Bfloat16`] keeps a gradient in 2 B. With all three, a bf16 weight takes 6 B with its state.

use std::borrow::Cow;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use omnigrpo_kernels::moments::BLOCK;
use omnigrpo_models::{Decoder, Model};
use omnigrpo_observe::Console;
pub use omnigrpo_ops::Moments;
use omnigrpo_ops::{Device, LEAST_CODED, Numbers, Param, ParamDtype, Part, Squares, Step};

use crate::error::{GRAD_DTYPE, Result, TrainError};
use crate::exchange::Exchange;
use crate::selection::decayed_names;
use crate::split::Split;

/// Place of the moments and masters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub enum Offload {
    /// The device of the model.
    #[default]
    None,
    /// Main memory. The CPU then applies the updates.
    Cpu,
    /// Files that are mapped into main memory. The CPU then applies the updates.
    File,
}

/// Form of the moments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub enum Optim {
    /// f32.
    #[default]
    AdamW,
    /// 8 bits in blocks of 256, for weights of at least 4,096 values ([`omnigrpo_kernels::moments`]). A checkpoint stores them in f32.
    AdamW8bit,
}

/// Form in which a gradient is kept until the update.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub enum GradDtype {
    /// f32.
    #[default]
    Float32,
    /// bf16 for weights of the language model with at least 4,096 values. Each addition computes in f32 and is rounded: one for each
    /// stream of tokens, and two for a head that is also the embedding. Towers and projector add up media, and keep f32.
    Bfloat16,
}

/// Settings of the optimizer.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct AdamWConfig {
    /// Base learning rate.
    pub learning_rate: f64,
    /// Learning rate of the projector, if it differs.
    pub projector_lr: Option<f64>,
    /// Learning rate of the towers, if it differs.
    pub tower_lr: Option<f64>,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Constant added to the root of the second moment.
    pub epsilon: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Maximum norm of all gradients; larger gradients are scaled down. 0 disables scaling.
    pub max_grad_norm: f64,
    /// True to update bf16 weights without an f32 master.
    pub pure_bf16: bool,
    /// True to round bf16 weights without a master up or down at random, with the exact value as the mean. The random numbers follow
    /// from the weight's name, the element and the number of the update.
    pub stochastic_rounding: bool,
    /// Form of the moments.
    pub optim: Optim,
    /// Form of the gradients.
    pub grad_dtype: GradDtype,
    /// Place of the moments and masters.
    pub offload: Offload,
    /// Folder of the files of [`Offload::File`]. `None` is the directory of the run, or the system's folder for temporary files
    /// outside of a run.
    pub offload_folder: Option<PathBuf>,
}

impl Default for AdamWConfig {
    /// Returns the defaults of TRL's trainer: 1e-6 for every part, betas 0.9 and 0.999, gradients clipped to a norm of 1, no
    /// decay.
    fn default() -> Self {
        Self {
            learning_rate: 1e-6,
            projector_lr: None,
            tower_lr: None,
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-8,
            weight_decay: 0.0,
            max_grad_norm: 1.0,
            pure_bf16: false,
            stochastic_rounding: false,
            optim: Optim::AdamW,
            grad_dtype: GradDtype::Float32,
            offload: Offload::None,
            offload_folder: None,
        }
    }
}

impl AdamWConfig {
    /// Returns whether the moments of a weight with `len` values have 8 bits.
    fn codes(&self, len: usize) -> bool {
        self.optim == Optim::AdamW8bit && len >= LEAST_CODED && self.offload != Offload::File
    }

    /// Returns the bytes of both moments of a weight with `len` values.
    pub fn moment_bytes(&self, len: usize) -> usize {
        if self.codes(len) { 2 * (len + 4 * len.div_ceil(BLOCK)) } else { 8 * len }
    }

    /// Lets a weight keep its gradient in the dtype of these settings.
    pub(crate) fn place_grad(&self, param: &Param) {
        param.keep_grad_in_bf16(self.grad_dtype == GradDtype::Bfloat16 && param.part() == Part::Llm);
    }

    /// Returns the bytes of the gradient of a weight, between two additions.
    pub fn grad_bytes(&self, param: &Param) -> usize {
        self.place_grad(param);
        if param.keeps_grad_in_bf16() { 2 * param.len() } else { 4 * param.len() }
    }
}

/// Result of one update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Update {
    /// Norm of all gradients together, before scaling.
    pub grad_norm: f64,
    /// Number of trained weights without a gradient.
    pub skipped: usize,
}

/// AdamW optimizer.
pub struct AdamW {
    config: AdamWConfig,
    params: Vec<(Arc<Param>, f64, f64)>,
    /// State of each weight that was updated; of this rank's part of it, if the state is cut.
    state: HashMap<String, Moments>,
    exchange: Exchange,
    /// Folder of the files with the state, if it is in files.
    folder: Option<Arc<Path>>,
    /// State of weights that were never updated: files, or main memory.
    reserved: HashMap<String, Moments>,
}

impl AdamW {
    /// Creates an optimizer for the trained weights among `params`.
    pub fn new(config: AdamWConfig, params: &[Arc<Param>]) -> Self {
        let decayed = decayed_names(params);
        let trained = params.iter().filter(|p| p.trainable());
        let params: Vec<_> = trained
            .map(|p| {
                let lr = match p.part() {
                    Part::Llm => None,
                    Part::Projector => config.projector_lr,
                    Part::Vision | Part::Audio | Part::Instruction => config.tower_lr,
                };
                let decay = if decayed.contains(p.name()) { config.weight_decay } else { 0.0 };
                (Arc::clone(p), lr.unwrap_or(config.learning_rate), decay)
            })
            .collect();
        for (param, ..) in &params {
            config.place_grad(param);
        }
        let exchange = Exchange::alone(params.iter().map(|(param, ..)| Arc::clone(param)).collect());
        let given = || config.offload_folder.clone().unwrap_or_else(std::env::temp_dir);
        let folder = (config.offload == Offload::File).then(|| given().into());
        Self { config, params, state: HashMap::new(), exchange, folder, reserved: HashMap::new() }
    }

    /// Stores files in the directory of a run, unless the settings name a folder.
    #[must_use]
    pub(crate) fn in_run(mut self, dir: &Path) -> Self {
        self.folder =
            self.folder.map(|folder| if self.config.offload_folder.is_some() { folder } else { dir.into() });
        self
    }

    /// Reserves the state of all weights that have none: files, so that a disk without room is an error before the first step, or
    /// main memory beside a card. All threads touch that memory, since the system gives it page by page, and one thread alone would
    /// need seconds for each 10 GB of the first step.
    ///
    /// # Errors
    /// Returns an error if a file cannot be created.
    pub(crate) fn reserve(&mut self, device: Device, console: &Console) -> Result<()> {
        let in_memory = self.config.offload == Offload::Cpu && matches!(device, Device::Gpu(_));
        if self.folder.is_none() && !in_memory {
            return Ok(());
        }
        let mut bar = console.progress("reserving room for the optimizer", self.params.len() as u64);
        for (weight, (param, ..)) in self.params.iter().enumerate() {
            let (name, range) = (param.name(), self.exchange.own_part(weight));
            if !range.is_empty() && !self.state.contains_key(name) {
                let master = self.has_master(param);
                let own = match &self.folder {
                    Some(folder) => Moments::reserved(folder, range.len(), master)?,
                    None => Moments::in_memory(param, range, master, self.config.codes(param.len()))?,
                };
                self.reserved.insert(name.to_owned(), own);
            }
            if in_memory && !self.exchange.is_cut() {
                param.reserve_grad();
            }
            bar.advance(1);
        }
        Ok(())
    }

    /// Moves new state of a weight to where the settings place it.
    fn placed(folder: Option<&Arc<Path>>, moments: Moments) -> Result<Moments> {
        Ok(match folder {
            Some(folder) => moments.in_file(folder)?,
            None => moments,
        })
    }

    /// Returns true if the CPU applies the updates of weights on a card.
    fn offloads(&self) -> bool {
        self.config.offload != Offload::None
    }

    /// Divides the work and, if the settings request it, the state over ranks. `model` is the model of the weights.
    ///
    /// # Errors
    /// Returns an error if gradients are kept in bf16: sums over ranks and leaves are formed in f32.
    pub fn over(self, split: &Split, model: &Model) -> Result<Self> {
        if self.config.grad_dtype == GradDtype::Bfloat16 && !split.is_off() {
            let what = format!(
                "gradients that {} parts of an update sum up are in float32; expected float32, or one process with one leaf",
                split.num_leaves()
            );
            return Err(TrainError::setting(GRAD_DTYPE, "bfloat16", what));
        }
        Ok(Self { exchange: self.exchange.over(split, model), ..self })
    }

    /// Returns the exchange of gradients between the ranks.
    pub(crate) fn exchange(&mut self) -> &mut Exchange {
        &mut self.exchange
    }

    /// Applies the accumulated gradients and clears them. `factor` scales every learning rate. If the state is cut, each rank
    /// updates its part of the weights, and all ranks receive the parts of the others.
    ///
    /// # Errors
    /// Returns an error with the name of the weight if a gradient is not finite. Nothing is changed then.
    pub fn step(&mut self, factor: f64) -> Result<Update> {
        let done = self.apply(factor);
        self.exchange.end(done)
    }

    /// Updates the weights of this rank. Also returns which weights have a gradient.
    fn apply(&mut self, factor: f64) -> Result<(Update, Vec<bool>)> {
        let each = self.exchange.squares(self.offloads())?;
        let mut squares = 0.0;
        let mut device = Device::Cpu;
        for ((param, ..), Squares { device: on, sum }) in
            self.params.iter().zip(&each).filter_map(|(p, s)| Some((p, s.as_ref()?)))
        {
            if !sum.is_finite() {
                // A card returns NaN if a computation failed; `finish` reports that failure.
                on.finish()?;
                return Err(TrainError::NonFiniteGradient { name: param.name().to_owned() });
            }
            (device, squares) = (*on, squares + sum);
        }
        let grad_norm = squares.sqrt();
        let scale = match self.config.max_grad_norm {
            max if max > 0.0 => (max / (grad_norm + 1e-6)).min(1.0),
            _ => 1.0,
        };
        let updated: Vec<bool> = each.iter().map(Option::is_some).collect();
        self.update(&updated, factor, scale as f32)?;
        device.finish()?;
        let skipped = updated.iter().filter(|updated| !**updated).count();
        Ok((Update { grad_norm, skipped }, updated))
    }

    /// Updates the weights that have a gradient, or this rank's part of them if the state is cut.
    fn update(&mut self, updated: &[bool], factor: f64, grad_scale: f32) -> Result<()> {
        let (c, offload) = (&self.config, self.offloads());
        // Gradients that were sent first have arrived while the others are on their way.
        let mut order: Vec<usize> = (0..self.params.len()).filter(|&weight| updated[weight]).collect();
        order.sort_by_key(|&weight| self.params[weight].0.sent());
        for weight in order {
            let (param, lr, decay) = &self.params[weight];
            let step = Step {
                lr: (lr * factor) as f32,
                betas: [c.beta1 as f32, c.beta2 as f32],
                eps: c.epsilon as f32,
                weight_decay: *decay as f32,
                grad_scale,
                master: !c.pure_bf16,
                random: c.stochastic_rounding,
                eight_bits: c.optim == Optim::AdamW8bit,
                offload,
            };
            let moments = match self.state.entry(param.name().to_owned()) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(new) => match self.reserved.remove(param.name()) {
                    Some(reserved) => new.insert(reserved),
                    None => new.insert(Self::placed(self.folder.as_ref(), Moments::default())?),
                },
            };
            if !self.exchange.is_cut() {
                param.adamw(moments, &step)?;
                continue;
            }
            moments.step += 1;
            let (range, grad) = (self.exchange.own_part(weight), self.exchange.take_own(weight));
            if let Some(grad) = grad.filter(|grad| !grad.is_empty()) {
                param.adamw_range(range, &grad, moments, &step)?;
            }
        }
        Ok(())
    }

    /// Announces that the next pass through the decoder is the last of this step. With offload, the gradients of its linear layers
    /// and of its output head then travel to main memory during the pass. Other weights have several gradients in a pass.
    pub(crate) fn announce_last_pass(&self, decoder: &Decoder) {
        let is_head = |p: &Arc<Param>| decoder.own_head().is_some_and(|head| Arc::ptr_eq(head, p));
        let params = self.params.iter().filter(|_| self.offloads());
        let single =
            params.filter(|(p, ..)| p.part() == Part::Llm && (p.is_linear() || p.is_experts() || is_head(p)));
        single.for_each(|(param, ..)| param.send_next_grad());
    }

    /// Returns the settings.
    pub fn config(&self) -> &AdamWConfig {
        &self.config
    }

    /// Returns the base learning rate.
    pub fn learning_rate(&self) -> f64 {
        self.config.learning_rate
    }

    /// Clears all gradients.
    pub fn clear(&self) {
        for (param, ..) in &self.params {
            param.clear_grad();
        }
    }

    /// Returns each weight that was updated at least once, with its state. If the state is cut, it is that of this rank's part.
    pub fn state(&self) -> impl Iterator<Item = (&Param, &Moments)> {
        self.numbered().map(|(_, param, own)| (param, own))
    }

    /// Returns the numbers of the weights, too.
    pub(crate) fn numbered(&self) -> impl Iterator<Item = (usize, &Param, &Moments)> {
        let all = self.params.iter().enumerate();
        all.filter_map(|(at, (param, ..))| Some((at, &**param, self.state.get(param.name())?)))
    }

    /// Returns the bytes of the state in main memory.
    pub fn host_bytes(&self) -> usize {
        self.state.values().chain(self.reserved.values()).map(Moments::host_bytes).sum()
    }

    /// Returns the arrays of the state of a weight.
    pub(crate) fn arrays(&self, param: &Param) -> impl Iterator<Item = StateArray> + use<> {
        StateArray::ALL.into_iter().take(if self.has_master(param) { 3 } else { 2 })
    }

    /// Returns a complete array of the state of a weight. If the state is cut, the other ranks must be in [`Self::serve`].
    pub(crate) fn whole(&self, weight: usize, array: StateArray) -> Result<Cow<'_, [f32]>> {
        let param = &self.params[weight].0;
        match self.state.get(param.name()) {
            Some(own) if !self.exchange.is_cut() => Ok(array.of(own, param)),
            _ => {
                self.exchange.ask(Some((weight, array as usize)))?;
                Ok(self.collect(weight, array)?.into())
            }
        }
    }

    /// Sends this rank's part of the state to the first rank, until it calls [`Self::end_of_service`].
    pub(crate) fn serve(&self) -> Result<()> {
        while let Some((weight, array)) = self.exchange.asked()? {
            self.collect(weight, StateArray::ALL[array])?;
        }
        Ok(())
    }

    /// Ends [`Self::serve`] on the other ranks.
    pub(crate) fn end_of_service(&self) -> Result<()> {
        self.exchange.ask(None)
    }

    /// Collects an array of the state from all ranks.
    fn collect(&self, weight: usize, array: StateArray) -> Result<Vec<f32>> {
        let param = &self.params[weight].0;
        let own = self.state.get(param.name()).map(|own| array.of(own, param));
        self.exchange.collect(weight, own.as_deref().unwrap_or_default())
    }

    /// Returns the names of trained weights that were never updated.
    pub(crate) fn never_reached(&self) -> Vec<&str> {
        let names = self.params.iter().map(|(p, ..)| p.name());
        names.filter(|name| !self.state.contains_key(*name)).collect()
    }

    /// Returns the saved state of a weight, or of this rank's part of it if the state is cut.
    ///
    /// # Errors
    /// Returns an error if the weight is not trained or has another size, or if a file for the state cannot be created.
    pub(crate) fn own_state(&self, name: &str, step: u64, saved: Numbers) -> Result<Moments> {
        let known = self.params.iter().enumerate().find(|(_, (param, ..))| param.name() == name);
        let fits = |param: &Param| {
            let master = if self.has_master(param) { param.len() } else { 0 };
            [saved.m.len(), saved.v.len(), saved.master.len()] == [param.len(), param.len(), master]
        };
        let Some((weight, (param, ..))) = known.filter(|(_, (param, ..))| fits(param)) else {
            return Err(TrainError::Checkpoint {
                what: format!(
                    "the optimizer state of {name} ({} values) does not match a trained weight of this size",
                    saved.m.len()
                ),
            });
        };
        let part = self.exchange.own_part(weight);
        let coded = self.config.codes(param.len());
        if part.len() == param.len() {
            return Self::placed(self.folder.as_ref(), Moments::new(step, saved, coded));
        }
        let cut = |all: Vec<f32>| all.get(part.clone()).map(<[f32]>::to_vec).unwrap_or_default();
        let Numbers { m, v, master } = saved;
        let own = Numbers { m: cut(m), v: cut(v), master: cut(master) };
        Self::placed(self.folder.as_ref(), Moments::new(step, own, coded))
    }

    /// Restores the states that [`Self::own_state`] returned, by the names of their weights.
    pub(crate) fn restore(&mut self, state: HashMap<String, Moments>) {
        self.state = state;
    }

    fn has_master(&self, param: &Param) -> bool {
        param.dtype() != ParamDtype::F32 && !self.config.pure_bf16
    }

    /// Returns the bytes of gradients, moments and masters if every trained weight has them.
    pub fn bytes(&self) -> usize {
        let each = |p: &Param| {
            let master = if self.has_master(p) { 4 * p.len() } else { 0 };
            self.config.grad_bytes(p) + self.config.moment_bytes(p.len()) + master
        };
        self.params.iter().map(|(p, ..)| each(p)).sum()
    }
}

/// Array of the optimizer's state of a weight.
#[derive(Clone, Copy, Debug)]
pub(crate) enum StateArray {
    M,
    V,
    Master,
}

impl StateArray {
    const ALL: [Self; 3] = [Self::M, Self::V, Self::Master];

    /// Returns the suffix of the tensor's name in a checkpoint.
    pub(crate) fn name(self) -> &'static str {
        ["m", "v", "master"][self as usize]
    }

    /// Returns the name for messages.
    pub(crate) fn what(self) -> &'static str {
        ["the first moment", "the second moment", "the master copy"][self as usize]
    }

    /// Returns the values.
    pub(crate) fn of<'a>(self, moments: &'a Moments, param: &'a Param) -> Cow<'a, [f32]> {
        match self {
            Self::M => moments.m(),
            Self::V => moments.v(),
            Self::Master => moments.master(param),
        }
    }
}
