//! A network with its weights, which scores and trains packed streams.

mod loading;
mod media;
mod score;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use omnigrpo_ops::{Device, Dropout, Lend, Param, Part, Pass};

use crate::checkpoint::Checkpoint;
use crate::decoder::Decoder;
use crate::error::Result;
use crate::families::{Family, Network};
use crate::lora::LoraConfig;
use crate::weights::{TensorDigests, WeightFiles};

pub use loading::{LoadOptions, ReferencePlace};
pub use media::{FeatureGradients, Features, Memories};
pub use score::{StreamPass, StreamScores, TopTokens, Training};

/// A model: a checkpoint, a network and its weights.
///
/// ```
/// use omnigrpo_models::{Checkpoint, LoadOptions, Model};
///
/// # let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/checkpoints/qwen2_vl_untied");
/// let checkpoint = Checkpoint::open(directory.as_ref())?;
/// let model = Model::load(&checkpoint, &LoadOptions::default())?;
/// // Weights are named as in the files.
/// let head = model.params().iter().find(|weight| weight.name() == "lm_head.weight");
/// let config = model.decoder().config();
/// assert_eq!(head.map(|head| head.shape()), Some(&[config.vocab, config.hidden][..]));
/// # Ok::<(), omnigrpo_models::ModelError>(())
/// ```
pub struct Model {
    checkpoint: Checkpoint,
    network: Network,
    /// Weights of the architecture, followed by those of adapters.
    params: Vec<Arc<Param>>,
    num_base: usize,
    /// Names of the weights that were read from separate directories.
    outside: HashSet<String>,
    tower_runs: AtomicU64,
    pub(crate) lora: Option<LoraConfig>,
    /// Tensors that a loaded adapter contains in full. They are saved with the adapter even if they are no longer trained.
    pub(crate) whole: BTreeSet<String>,
    /// Alphas of single layers of a loaded adapter, keyed by the layer's published name.
    pub(crate) alphas: BTreeMap<String, f64>,
    device: Device,
    /// Files from which weights are read while the model is in use. They must not change.
    lenders: Option<WeightFiles>,
    /// Tensors of the checkpoint that the network does not use and that saved copies contain.
    carried: Option<WeightFiles>,
    /// Digests of the tensors that were read from files; `None` if nobody asked for them.
    pub(crate) digests: Option<TensorDigests>,
    /// Source of the decoder's weights that are not in memory all the time.
    lender: Option<Arc<dyn Lend>>,
}

impl Model {
    pub(crate) fn new(
        checkpoint: Checkpoint,
        network: Network,
        params: Vec<Arc<Param>>,
        outside: HashSet<String>,
        device: Device,
    ) -> Self {
        let (num_base, whole) = (params.len(), BTreeSet::new());
        Self {
            checkpoint,
            network,
            params,
            num_base,
            outside,
            tower_runs: AtomicU64::new(0),
            lora: None,
            whole,
            alphas: BTreeMap::new(),
            device,
            lenders: None,
            carried: None,
            digests: None,
            lender: None,
        }
    }

    /// Returns the checkpoint from which the model was built.
    pub fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// Returns the family.
    pub fn family(&self) -> &Family {
        self.checkpoint.family()
    }

    /// Returns the language model.
    pub fn decoder(&self) -> &Decoder {
        &self.network.decoder
    }

    /// Returns the weights in building order, those of adapters last.
    pub fn params(&self) -> &[Arc<Param>] {
        &self.params
    }

    /// Returns the weights without those of adapters.
    pub fn base_params(&self) -> &[Arc<Param>] {
        &self.params[..self.num_base]
    }

    /// Returns the weights of the adapters.
    pub fn adapter_params(&self) -> &[Arc<Param>] {
        &self.params[self.num_base..]
    }

    pub(crate) fn push_adapter_param(&mut self, param: Arc<Param>) {
        self.params.push(param);
    }

    pub(crate) fn forget_adapters(&mut self) {
        self.params.truncate(self.num_base);
        self.lora = None;
        self.whole.clear();
        self.alphas.clear();
    }

    /// Returns the settings of a pass over the weights, without dropout.
    pub fn pass(&self) -> Pass {
        Pass { lender: self.lender.clone(), ..Pass::on(self.device) }
    }

    /// Lets scoring and training passes fetch the weights of the decoder's [layers](Decoder::layers) from `lender`, layer by layer.
    /// For all other passes, the weights must be in memory.
    pub fn set_lender(&mut self, lender: Arc<dyn Lend>) {
        self.lender = Some(lender);
    }

    /// Fetches the weights of a layer, if they are not in memory all the time.
    fn lend(&self, layer: usize) -> Result<()> {
        Ok(self.lender.as_ref().map_or(Ok(()), |lender| lender.lend(layer))?)
    }

    /// Returns the settings of a training pass, with dropout if adapters use it. `rows` identifies each row of the pass; without
    /// `rows`, a row is identified by its index and `salt`.
    fn training_pass(&self, training: Training, rows: Option<&[u64]>, salt: u64) -> Pass {
        let on = self.lora.as_ref().is_some_and(|lora| lora.dropout > 0.0);
        self.pass().dropping(on.then(|| Dropout::new(training.dropout_key ^ salt, rows.map(Arc::from))))
    }

    /// Returns whether an adapter of one of these parts uses dropout in training.
    fn drops(&self, parts: &[Part]) -> bool {
        self.lora.as_ref().is_some_and(|lora| lora.dropout > 0.0)
            && self.adapted().any(|(base, _)| parts.contains(&base.part()))
    }

    /// Returns the directory of the checkpoint.
    pub fn dir(&self) -> &Path {
        self.checkpoint.dir()
    }

    /// Returns whether any weight of `part` is trained.
    pub fn trains(&self, part: Part) -> bool {
        self.params.iter().any(|p| p.part() == part && p.trainable())
    }

    /// Returns whether any weight of a tower is trained.
    pub fn trains_tower(&self) -> bool {
        self.trains(Part::Vision) || self.trains(Part::Audio)
    }

    /// Returns whether any weight between the towers and the language model is trained.
    pub fn trains_projection(&self) -> bool {
        self.trains(Part::Projector) || self.trains(Part::Instruction)
    }

    /// Returns whether a weight was read from a separate directory and can stay there, because no weight of its part is trained.
    pub(crate) fn stays_outside(&self, param: &Param) -> bool {
        self.outside.contains(param.name()) && !self.trains(param.part())
    }

    /// Returns the weights to write into a saved copy. Untrained weights from separate directories are left out.
    pub(crate) fn saved_params(&self) -> Vec<Arc<Param>> {
        self.base_params().iter().filter(|p| !self.stays_outside(p)).map(Arc::clone).collect()
    }

    /// Returns the tensors of the checkpoint that saved copies contain unchanged.
    pub(crate) fn carried(&self) -> Option<&WeightFiles> {
        self.carried.as_ref()
    }

    /// Returns the device on which the model runs.
    pub fn device(&self) -> Device {
        self.device
    }
}
