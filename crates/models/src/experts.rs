//! Mixture of experts: feed-forward layers of which a router selects a few for each row.
//!
//! `y = Σ_j softmax(chosen logits)_j · fc2_j(silu(gate) · up)`, `[gate | up] = fc1_j(x)`, over the experts `j` of the row's
//! `topk` largest logits. For the backward pass, logits, routes and the input of the activation are kept.
//!
//! Shapes: `n` rows, `e` experts, `p = n · topk` places, `h` width, `i` width of an expert.

use std::sync::Arc;

use omnigrpo_ops::{
    ExpertLinear, Linear, Order, PackedLinear, Pass, Result, RouterLoss, Routes, Rows, SameExperts,
};

use crate::config_json::ConfigJson;
use crate::weights::{Init, Scope};

/// Sizes and names of a decoder's experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertsConfig {
    /// Number of experts.
    pub count: usize,
    /// Number of experts that each row uses.
    pub topk: usize,
    /// Width of one expert.
    pub intermediate: usize,
    /// Names of the weights.
    pub names: &'static ExpertNames,
    /// Whether training may reuse what sampling computed ([`crate::DecoderMemory`]). Aria's training always runs the experts again,
    /// so that its numbers stay those of earlier versions.
    pub recalled: bool,
}

/// Names of the weights of a block's experts, below the block.
#[derive(Debug, PartialEq, Eq)]
pub struct ExpertNames {
    /// `[e, h]`
    pub router: &'static str,
    /// First layers of all experts, `[e, h, 2i]`: gate, then up.
    pub fc1: &'static str,
    /// Second layers of all experts, `[e, i, h]`.
    pub fc2: &'static str,
    /// Feed-forward layer of all rows, if there is one.
    pub shared: Option<&'static str>,
}

impl ExpertNames {
    /// Names of Qwen's mixtures.
    pub const QWEN: Self = Self {
        router: "mlp.gate.weight",
        fc1: "mlp.experts.gate_up_proj",
        fc2: "mlp.experts.down_proj",
        shared: None,
    };
}

/// Defaults of a class of Qwen's mixtures in `transformers` 5.23, whose blocks have experts in place of the feed-forward layer.
#[derive(Clone, Copy, Debug)]
pub struct MixtureClass {
    /// `num_experts`.
    pub count: usize,
    /// `num_experts_per_tok`.
    pub topk: usize,
    /// `moe_intermediate_size`.
    pub intermediate: usize,
    /// `norm_topk_prob`; `None` if the class always divides the probabilities of a row's experts by their sum.
    pub normalised: Option<bool>,
}

impl MixtureClass {
    /// `Qwen3MoeConfig`.
    pub const QWEN3: Self = Self { count: 128, topk: 8, intermediate: 768, normalised: Some(false) };
    /// `Qwen3VLMoeTextConfig`.
    pub const QWEN3_VL: Self = Self { count: 60, topk: 4, intermediate: 1408, normalised: None };

    /// Reads the sizes of the experts.
    ///
    /// # Errors
    /// Returns an error if a size is invalid, if some blocks have no experts, or if the probabilities of a row's experts are not
    /// divided by their sum.
    pub(crate) fn parse(self, text: &ConfigJson) -> crate::error::Result<ExpertsConfig> {
        let count = text.size(text.either("num_experts", "num_local_experts"), Some(self.count))?;
        let topk = text.size("num_experts_per_tok", Some(self.topk))?;
        if topk > count {
            let what = format!("num_experts_per_tok is {topk}, but num_experts is only {count}");
            return Err(text.error(what));
        }
        text.only("decoder_sparse_step", 1)?;
        if let Some(dense) = text.sizes("mlp_only_layers")?.filter(|dense| !dense.is_empty()) {
            let what = "blocks without experts are not supported";
            return Err(text.error(format!("mlp_only_layers is {dense:?}; {what}")));
        }
        if let Some(default) = self.normalised
            && !text.boolean("norm_topk_prob", default)?
        {
            let what =
                "norm_topk_prob is false; expected true, so that the weights of a row's experts sum to 1";
            return Err(text.error(what));
        }
        let intermediate = text.size("moe_intermediate_size", Some(self.intermediate))?;
        Ok(ExpertsConfig { count, topk, intermediate, names: &ExpertNames::QWEN, recalled: true })
    }
}

/// Experts and their router.
pub struct Experts {
    /// `[e, h]`
    pub router: Linear,
    /// `[e, h, 2i]`: gate, then up.
    pub fc1: ExpertLinear,
    /// `[e, i, h]`
    pub fc2: ExpertLinear,
    /// Number of experts that each row uses.
    pub topk: usize,
}

impl Experts {
    /// Builds the experts of a block of width `h`.
    pub(crate) fn build(config: &ExpertsConfig, h: usize, layer: &mut Scope) -> crate::error::Result<Self> {
        let ExpertsConfig { count, topk, intermediate, names, recalled: _ } = *config;
        // The router is a parameter rather than a layer in `transformers`, so it takes no adapter.
        let router = layer.get(names.router, &[count, h], Init::Normal)?;
        let fc1 = layer.get(names.fc1, &[count, h, 2 * intermediate], Init::Normal)?;
        let fc2 = layer.get(names.fc2, &[count, intermediate, h], Init::Normal)?;
        let router = Linear::reshaped(router, None, count, h)?;
        Ok(Self { router, fc1: ExpertLinear::new(fc1)?, fc2: ExpertLinear::new(fc2)?, topk })
    }
}

/// Arrays that experts keep for their backward pass, besides their input.
pub(crate) struct KeptExperts {
    logits: Rows,
    routes: Routes,
    /// Input of the activation, `[p, 2i]`.
    wide: Rows,
}

impl KeptExperts {
    /// Returns the logits `[n, e]`, the input of the activation by row, `[n, topk · 2i]`, and `topk`. No row of the arrays depends on
    /// the other rows.
    pub(crate) fn into_rows(self) -> Result<([Rows; 2], usize)> {
        let Self { logits, routes, wide } = self;
        let topk = routes.places() / routes.rows().max(1);
        Ok(([logits, routes.by_row(&wide)?], topk))
    }

    /// Reverses [`Self::into_rows`]. The logits choose the same experts again.
    pub(crate) fn from_rows([logits, wide]: [Rows; 2], topk: usize) -> Result<Self> {
        let routes = Routes::choose(&logits, topk, Order::Blocked)?;
        Ok(Self { wide: routes.by_place(&wide)?, logits, routes })
    }

    pub(crate) fn num_bytes(&self) -> usize {
        self.logits.num_bytes() + self.routes.num_bytes() + self.wide.num_bytes()
    }

    /// Returns a number for the experts of each row ([`Routes::marks`]).
    pub(crate) fn marks(&self) -> Option<Vec<u32>> {
        self.routes.marks()
    }
}

/// Weights of the routers' losses relative to the policy loss; see [`RouterLoss`].
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct RouterPlan {
    /// Weight of the load-balancing loss.
    pub aux: f64,
    /// Weight of the loss on the size of the logits.
    pub z: f64,
}

impl RouterPlan {
    /// Returns whether both weights are 0, so that no loss is added.
    pub fn is_off(self) -> bool {
        self == Self::default()
    }
}

/// Experts, prepared for one pass.
pub(crate) struct ExpertsPass {
    router: PackedLinear,
    order: Order,
    loss: Option<Arc<RouterLoss>>,
    /// Comparison of the rows' experts with those of an earlier pass, and the number of the block there.
    same: Option<(Arc<SameExperts>, usize)>,
    rows: Option<Vec<usize>>,
}

impl ExpertsPass {
    /// Prepares the experts for a pass, or only for the given `rows` of it.
    pub(crate) fn new(experts: &Experts, pass: &Pass, rows: Option<&[usize]>) -> Self {
        let router = PackedLinear::new(&[&experts.router], pass);
        let router = match rows {
            Some(rows) => router.of_rows(rows),
            None => router,
        };
        Self {
            router,
            order: pass.order,
            loss: pass.router.clone(),
            same: None,
            rows: rows.map(<[usize]>::to_vec),
        }
    }

    /// Compares the experts of rows as those of block `l`, if the pass asks for it.
    pub(crate) fn compared(self, pass: &Pass, l: usize) -> Self {
        Self { same: pass.experts.clone().map(|same| (same, l)), ..self }
    }

    fn compare(&self, routes: &Routes) {
        if let Some((same, l)) = &self.same {
            same.compare(*l, routes, self.rows.as_deref());
        }
    }

    /// Maps `x [n, h]` to the weighted sum of its experts' outputs, `[n, h]`.
    pub(crate) fn forward(&self, experts: &Experts, x: &Rows) -> Result<(Rows, KeptExperts)> {
        let logits = self.router.forward(x)?;
        let routes = Routes::choose(&logits, experts.topk, self.order)?;
        self.compare(&routes);
        let wide = experts.fc1.forward(&routes.scatter(x)?, &routes, self.order)?;
        let weighed = routes.weigh(&wide.swiglu()?, &logits)?;
        let y = routes.gather(&experts.fc2.forward(&weighed, &routes, self.order)?)?;
        Ok((y, KeptExperts { logits, routes, wide }))
    }

    /// Returns the gradient of `x`, given that of the output, and adds the gradients of the weights to their buffers.
    pub(crate) fn backward(&self, experts: &Experts, x: &Rows, kept: KeptExperts, dy: &Rows) -> Result<Rows> {
        let KeptExperts { logits, routes, mut wide } = kept;
        // Recalled rows had no forward pass.
        self.compare(&routes);
        let inner = wide.swiglu()?;
        let dweighed = {
            let weighed = routes.weigh(&inner, &logits)?;
            experts.fc2.backward(&weighed, &routes.scatter(dy)?, &routes)?
        };
        let [dinner, mut dlogits] = routes.weigh_back(&inner, &logits, &dweighed)?;
        drop((inner, dweighed));
        if let Some(loss) = &self.loss {
            dlogits.add(&loss.gradient(&logits, &routes, self.rows.as_deref())?)?;
        }
        wide.swiglu_back(&dinner)?;
        let mut dx = routes.gather(&experts.fc1.backward(&routes.scatter(x)?, &wide, &routes)?)?;
        dx.add(&self.router.backward(x, &dlogits)?)?;
        Ok(dx)
    }
}
