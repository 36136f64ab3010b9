//! Rewards that need a model of their own, behind the contract of `omnigrpo-rewards`.
//!
//! * `explanation`: a CLIP score of text and picture, and CIDEr of text and references ([`ClipScorer`]).
//! * `bertscore`: similarity of text and references by contextual embeddings ([`BertScorer`]).
//! * A reward by path: a checkpoint with one output that reads prompt and completion ([`RewardModel`]).
//!
//! A scorer is loaded once, is frozen, and runs on the CPU whatever trains. Its number for a completion depends on the
//! completion, the picture and the texts scored with it, never on what was scored before, so a resumed run goes on
//! with the same numbers.
//!
//! Directories are those that `transformers` and `sentence-transformers` save, with `tokenizer.json` (BERT's
//! `vocab.txt` will do) and safetensors. Refused: pickle files, pictures by URL.

mod bertscore;
mod clip_score;
mod error;
mod explanation;
mod reward_model;
mod sentence;
mod table;

pub use bertscore::{BertScore, BertScorer};
pub use clip_score::ClipScorer;
pub use error::{Result, ScorerError};
pub use reward_model::RewardModel;
pub use table::{ScorerOptions, ScorerRow, table};
