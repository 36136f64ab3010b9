//! How much memory a model and its training take, by arithmetic, before anything is loaded.

use omnigrpo_models::{LoraConfig, Model};
use omnigrpo_ops::ParamDtype;

use crate::error::Result;
use crate::selection::Selection;

/// Whose memory it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryOf {
    /// The machine's, with everything in it.
    Host,
    /// A card's that holds weights and gradients, and the optimizer's state unless that is offloaded.
    Card {
        /// Whether it is.
        offload: bool,
    },
}

/// What is trained, as far as memory depends on it.
#[derive(Clone, Debug)]
pub struct MemoryPlan<'a> {
    /// What is trained whole; `None` for a model that is only used.
    pub selection: Option<&'a Selection>,
    /// Adapters to be added.
    pub lora: Option<&'a LoraConfig>,
    /// Whether bf16 weights are trained without masters.
    pub pure_bf16: bool,
    /// Whether a reference is kept there.
    pub reference: bool,
    /// Where the model is.
    pub of: MemoryOf,
    /// Rows of a packed stream at most.
    pub stream_rows: usize,
    /// Whether activations are computed again in the backward pass.
    pub recompute: bool,
}

/// Bytes by what takes them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Weights, those of adapters included.
    pub weights: u64,
    /// Gradients and the optimizer's moments and masters.
    pub training: u64,
    /// The reference's copies of what is trained whole.
    pub reference: u64,
    /// An allowance for activations of a full stream. Media, caches of long rollouts and the program itself come on top.
    pub activations: u64,
}

impl Memory {
    /// All of it.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.weights
            .saturating_add(self.training)
            .saturating_add(self.reference)
            .saturating_add(self.activations)
    }
}

/// Bytes that training adds for each value of a weight: gradient and two moments in f32, and a master of a bf16 weight, of which a
/// card keeps the half that the weight lacks.
fn training_bytes(dtype: ParamDtype, plan: &MemoryPlan) -> u64 {
    let has_master = dtype == ParamDtype::Bf16 && !plan.pure_bf16;
    match (plan.of, has_master) {
        (MemoryOf::Card { offload: true }, _) => 4,
        (MemoryOf::Card { offload: false }, true) => 14,
        (MemoryOf::Host, true) => 16,
        (_, false) => 12,
    }
}

/// The memory of a model, of which an outline is enough.
///
/// # Errors
/// A pattern or a target that names nothing.
pub fn memory(model: &Model, plan: &MemoryPlan) -> Result<Memory> {
    let mut out = Memory::default();
    let trained = plan.selection.map(Selection::matcher).transpose()?;
    for param in model.base_params() {
        let (len, bytes) = (param.len() as u64, param.num_bytes() as u64);
        out.weights = out.weights.saturating_add(bytes);
        if trained.as_ref().is_some_and(|trained| trained(param.name(), param.part())) {
            out.training = out.training.saturating_add(len * training_bytes(param.dtype(), plan));
            out.reference += if plan.reference { bytes } else { 0 };
        }
    }
    if let Some(lora) = plan.lora {
        let len = model.adapter_len(lora)? as u64;
        out.weights += 4 * len;
        out.training += len * training_bytes(ParamDtype::F32, plan);
    }
    if plan.selection.is_some() {
        let c = model.decoder().config();
        let (q, kv) = (c.heads.q * c.heads.dim, c.heads.kv * c.heads.dim);
        // Of a block: its input, the normed rows, queries, keys, values, attention's output, and three of the feed-forward.
        let block = 3 * c.hidden + 2 * q + 2 * kv + 3 * c.intermediate;
        // Of experts: logits, and of each that a row uses its input, its answer and three of its feed-forward layer.
        let experts = c.experts.map_or(0, |e| e.count + e.topk * (2 * c.hidden + 3 * e.intermediate));
        let block = block + experts;
        let kept = if plan.recompute { c.layers * c.hidden + block } else { c.layers * block };
        let bf16 = model.decoder().embedding().dtype() == ParamDtype::Bf16;
        // Between bf16 weights a card keeps most of them in bf16.
        let bytes = if plan.of == MemoryOf::Host || !bf16 { 4 } else { 2 };
        out.activations = bytes * (plan.stream_rows * kept) as u64;
    }
    Ok(out)
}
