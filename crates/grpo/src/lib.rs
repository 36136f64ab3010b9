//! Mathematics of group-relative policy optimisation in f64 over plain slices.
//!
//! ```text
//! rewards ─► advantage ─► Batch { logp, old, reference, advantages, … } ─► loss::evaluate ─► loss, dL/dlogp, dL/dentropy
//!                                                                              └──────────► MetricSums ─► metrics
//! ```
//!
//! The loss is a scalar function of per-token log-probabilities (and entropies). This crate computes its gradient with respect to
//! them in closed form, so backpropagation only has to start at the log-probabilities. The crate does not depend on tensors,
//! devices or models.
//!
//! The row order is prompt-major everywhere: `row = prompt * group_size + sample`. The tokens of one completion are contiguous.
//!
//! Four independent choices define an algorithm: advantage, surrogate, aggregation and KL. [`RECIPES`] names the known
//! combinations.

pub mod advantage;
mod custom;
mod divergence;
mod error;
pub mod loss;
pub mod mask;
pub mod metric;
pub mod metrics;
mod papers;
pub mod recipe;

pub use advantage::{AdvantageKind, Advantages};
pub use custom::{CustomTerm, Dual, PolicyToken};
pub use divergence::{Divergence, LEAST_REST};
pub use error::Error;
pub use loss::{
    Aggregation, Batch, Correction, CorrectionKind, Covariance, Kl, LossOutput, LossPlan, Normalizer,
    PolicyShift, RatioLevel, Surrogate, TeacherTokens, chosen_tokens, evaluate, top_entropy_tokens,
};
pub use metrics::{Metric, MetricSums};
pub use papers::Paper;
pub use recipe::{RECIPES, Recipe, recipe};
