//! Rewards that need a model, with the interface of `omnigrpo-rewards`.
//!
//! * `explanation`: a CLIP score of text and picture, and CIDEr of text and references ([`ClipScorer`]).
//! * `bertscore`: similarity of text and references by contextual embeddings ([`BertScorer`]).
//! * A reward by path: a checkpoint with one output that reads prompt and completion ([`RewardModel`]).
//!
//! A scorer is loaded once, is frozen, and runs on the CPU even if training uses a GPU. The value of a completion depends on the
//! completion, the picture and the texts of the same batch, but not on earlier batches. A resumed run therefore gets the same
//! values.
//!
//! Directories have the layout of `transformers` or `sentence-transformers`, with safetensors and `tokenizer.json` (or BERT's
//! `vocab.txt`). Pickle files and pictures by URL are refused.

mod bertscore;
mod clip_score;
mod error;
mod explanation;
mod options;
mod reward_model;
mod sentence;
mod table;

pub use bertscore::{BertScore, BertScorer};
pub use clip_score::ClipScorer;
pub use error::{Result, SETTINGS, ScorerError};
pub use options::ScorerOptions;
pub use reward_model::RewardModel;
pub use table::{ScorerRow, table};
