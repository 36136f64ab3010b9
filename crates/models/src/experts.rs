//! Experts: feed-forward layers of which a router gives each row a few.
//!
//! `y = Σ_j softmax(chosen logits)_j · fc2_j(silu(gate) · up)`, `[gate | up] = fc1_j(x)`, over the experts `j` that the row's
//! `topk` largest logits choose. For its backward pass it keeps logits, routes and what goes into the activation.
//!
//! Shapes: `n` rows, `e` experts, `p = n · topk` places, `h` width, `i` width of an expert.

use std::sync::Arc;

use omnigrpo_ops::{ExpertLinear, Linear, Order, PackedLinear, Pass, Result, RouterLoss, Routes, Rows};

/// Experts and their router.
pub struct Experts {
    /// `[e, h]`
    pub router: Linear,
    /// `[e, h, 2i]`: gate and up.
    pub fc1: ExpertLinear,
    /// `[e, i, h]`
    pub fc2: ExpertLinear,
    /// Experts of a row.
    pub topk: usize,
}

/// Arrays that experts keep for their backward pass, besides their input.
pub(crate) struct KeptExperts {
    logits: Rows,
    routes: Routes,
    /// Before the activation, `[p, 2i]`.
    wide: Rows,
}

impl KeptExperts {
    pub(crate) fn num_bytes(&self) -> usize {
        self.logits.num_bytes() + self.routes.num_bytes() + self.wide.num_bytes()
    }
}

/// How much routers' losses weigh beside that of the policy; see [`RouterLoss`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RouterPlan {
    /// Loss of the use of experts.
    pub aux: f64,
    /// Loss of the size of logits.
    pub z: f64,
}

impl RouterPlan {
    /// Whether nothing is added.
    #[must_use]
    pub fn is_off(self) -> bool {
        self == Self::default()
    }
}

/// Experts in one pass.
pub(crate) struct ExpertsPass {
    router: PackedLinear,
    order: Order,
    loss: Option<Arc<RouterLoss>>,
    rows: Option<Vec<usize>>,
}

impl ExpertsPass {
    /// For some rows of the pass only, where `rows` are given.
    pub(crate) fn new(experts: &Experts, pass: &Pass, rows: Option<&[usize]>) -> Self {
        let router = PackedLinear::new(&[&experts.router], pass);
        let router = match rows {
            Some(rows) => router.of_rows(rows),
            None => router,
        };
        Self { router, order: pass.order, loss: pass.router.clone(), rows: rows.map(<[usize]>::to_vec) }
    }

    /// `x [n, h]` to the sum of its experts' answers, `[n, h]`.
    pub(crate) fn forward(&self, experts: &Experts, x: &Rows) -> Result<(Rows, KeptExperts)> {
        let logits = self.router.forward(x)?;
        let routes = Routes::choose(&logits, experts.topk)?;
        let wide = experts.fc1.forward(&routes.scatter(x)?, &routes, self.order)?;
        let weighed = routes.weigh(&wide.swiglu()?, &logits)?;
        let y = routes.gather(&experts.fc2.forward(&weighed, &routes, self.order)?)?;
        Ok((y, KeptExperts { logits, routes, wide }))
    }

    /// The gradient of `x` for that of the output; those of weights are added to their buffers.
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
