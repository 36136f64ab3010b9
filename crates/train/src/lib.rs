//! Training: the step, the loop, the optimizer, checkpoints, evaluation; scoring and generation of dataset rows.
//!
//! [`step`] reads as the algorithm. Everything random is keyed by seed and place, so a step is a function of (weights,
//! rows, seed) alone.

pub mod checkpoint;
mod error;
mod evaluate;
mod memory;
mod model_card;
mod optimizer;
mod plan;
mod records;
mod resume;
mod rows;
mod run;
mod schedule;
mod scoring;
mod selection;
pub mod step;
mod streams;
mod temporal;
mod timing;

pub use error::{Result, TrainError};
pub use evaluate::{Batch, EvalPlan, Evaluation, Judged, eval_row, evaluate, evaluate_rest};
pub use memory::{Memory, MemoryPlan, memory};
pub use optimizer::{AdamW, AdamWConfig, Moments, Update};
pub use plan::{EvalWhen, Objective, ResumeFrom, RunPlan, RunSummary, SaveWhen, TrainSetup};
pub use resume::say_incomplete;
pub use rows::{Making, PreparedRow, RowSource, SkipPolicy, SkippedRow, media_paths};
pub use run::train;
pub use schedule::{Schedule, ScheduleKind};
pub use scoring::{applies, probe, score};
pub use selection::{Selection, decayed_names, summary};
pub use step::{Algorithm, UpdateAt};
pub use streams::{Part, pack};
pub use timing::peak_memory_bytes;
