//! Rewards: pure scoring functions, one file each, in one [`table`]; programs and endpoints as scorers; and the
//! contract that every one of them is held to ([`Reward`], [`RewardSet`]).
//!
//! Text in, numbers out: this crate knows nothing of models, tensors or training.

mod accuracy;
mod answer;
mod cider;
mod contract;
mod error;
mod external;
mod format;
mod options;
mod random;
mod table;
mod tags;
#[cfg(test)]
mod testing;

pub use cider::DocumentFrequencies;
pub use contract::{Reward, RewardInput, RewardMatrix, RewardSet, RowKey, Think};
pub use error::RewardError;
pub use external::ExternalOptions;
pub use options::{AccuracyMode, AnswerPolicy, Compat, FormatMode, Named, RewardOptions};
pub use table::{RewardRow, build, table};
