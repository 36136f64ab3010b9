//! Mixture of experts: feed-forward layers of which a router selects a few for each row.
//!
//! `y = Σ_j softmax(chosen logits)_j · fc2_j(silu(gate) · up)`, `[gate | up] = fc1_j(x)`, over the experts `j` of the row's
//! `topk` largest logits. For the backward pass, logits, routes and the input of the activation are kept.
//!
//! Shapes: `n` rows, `e` experts, `p = n · topk` places, `h` width, `i` width of an expert.

use std::sync::Arc;

use omnigrpo_ops::{ExpertLinear, Linear, Order, PackedLinear, Pass, Result, RouterLoss, Routes, Rows};

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

/// Arrays that experts keep for their backward pass, besides their input.
pub(crate) struct KeptExperts {
    logits: Rows,
    routes: Routes,
    /// Input of the activation, `[p, 2i]`.
    wide: Rows,
}

impl KeptExperts {
    pub(crate) fn num_bytes(&self) -> usize {
        self.logits.num_bytes() + self.routes.num_bytes() + self.wide.num_bytes()
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
        Self { router, order: pass.order, loss: pass.router.clone(), rows: rows.map(<[usize]>::to_vec) }
    }

    /// Maps `x [n, h]` to the weighted sum of its experts' outputs, `[n, h]`.
    pub(crate) fn forward(&self, experts: &Experts, x: &Rows) -> Result<(Rows, KeptExperts)> {
        let logits = self.router.forward(x)?;
        let routes = Routes::choose(&logits, experts.topk, self.order)?;
        let wide = experts.fc1.forward(&routes.scatter(x)?, &routes, self.order)?;
        let weighed = routes.weigh(&wide.swiglu()?, &logits)?;
        let y = routes.gather(&experts.fc2.forward(&weighed, &routes, self.order)?)?;
        Ok((y, KeptExperts { logits, routes, wide }))
    }

    /// Returns the gradient of `x`, given that of the output, and adds the gradients of the weights to their buffers.
    pub(crate) fn backward(&self, experts: &Experts, x: &Rows, kept: KeptExperts, dy: &Rows) -> Result<Rows> {
        let KeptExperts { logits, routes, mut wide } = kept;
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
