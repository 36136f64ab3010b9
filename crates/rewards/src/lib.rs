//! Rewards: pure scoring functions, one file each, in one [`table`]; programs and endpoints as scorers; and the interface of all
//! rewards ([`Reward`], [`RewardSet`]).
//!
//! This crate converts text to numbers. It has no models, tensors or training.

mod accuracy;
mod all_match;
mod answer;
mod boxes;
mod choice;
mod cider;
mod contract;
mod corpus;
mod detection;
mod emotion;
mod error;
mod evaluation;
mod external;
mod format;
mod fuzzy;
mod interval;
mod iou;
mod latex;
mod length;
mod math;
mod options;
mod overlong;
mod random;
mod repetition;
mod short_text;
mod table;
mod tags;
mod temporal;
#[cfg(test)]
mod testing;
mod think;
mod weighted_sum;
mod yes_no;
mod zoomed;

pub use accuracy::suitable_rule;
pub use cider::{DocumentFrequencies, explanation, references};
pub use contract::{Logged, Reward, RewardInput, RewardMatrix, RewardSet, RowKey, Score, TokenLimit, reward};
pub use corpus::Corpus;
pub use error::{RewardError, SETTINGS};
pub use evaluation::{
    Category, Confusion, EvalRow, Explained, ExplanationReport, LabelSet, Labels, MEASURES, Measures,
    Summary, TextScores, answer, answer_reward, explanations, pass_at_k, summarize, wilson_interval,
};
pub use external::{
    CallError, Caller, ExternalOptions, StatedRange, conversation, redacted, rows_as_json, spec_files,
};
pub use omnigrpo_data::Think;
pub use options::{AccuracyMode, AnswerPolicy, Compat, FormatMode, RewardOptions};
pub use table::{RewardRow, build, build_with, table};
pub use tags::opened_tag;
pub use temporal::{length_bonus, temporal_order_bonus};
