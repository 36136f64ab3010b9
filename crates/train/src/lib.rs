//! Training: the step, the loop, the optimizer, checkpoints and evaluation, and the scoring and generation of dataset rows.
//!
//! The code of the step ([`Collector::collect`], [`update`]) follows the formulas of the algorithm. All random numbers are keyed by
//! seed and position, so a step is a function of (weights, rows, seed) alone.

mod alike;
mod bucket;
mod buffer;
mod card;
pub mod checkpoint;
pub mod checks;
mod error;
mod evaluate;
mod exchange;
mod external;
mod features;
mod forecast;
mod gap;
mod health;
mod imitate;
mod infer;
mod inputs;
mod lender;
mod length;
mod longest;
mod memory;
mod model_card;
mod optimizer;
mod pass;
mod plan;
mod policy;
mod prepare;
mod records;
mod replay;
mod resume;
mod returned;
mod rollouts;
pub mod roofline;
pub mod room;
mod rounding;
mod rows;
mod run;
mod sampling;
mod saved_turns;
mod schedule;
mod scoring;
mod selection;
mod split;
mod step;
mod streams;
mod survey;
mod temporal;
mod timing;

pub use alike::check as check_ranks;
pub use buffer::BufferState;
pub use card::{CardRates, Speed};
pub use error::{Refusal, Result, SETTINGS, TrainError};
pub use evaluate::{Batch, EvalOptions, EvalPlan, Evaluation, Judged, eval_row, evaluate, evaluate_split};
pub use external::{Peer, environment, environment_of};
pub use features::{Keep, encode};
pub use forecast::{StepTime, step_time};
pub use health::{Aims, Health, RULES, Rule};
pub use imitate::{ExampleSize, ImitationOutcome, StepExample, imitate};
pub use infer::{GeneratedBatch, Recorded, generate, generate_split, logprobs, score_recorded};
pub use inputs::{described, digests};
pub use lender::Models;
pub use longest::Longest;
pub use memory::{BytesEach, Memory, MemoryOf, MemoryPlan, Phase, ReferenceKept, Work, media_bytes, memory};
pub use omnigrpo_rollout::MAX_LIVE;
pub use optimizer::{AdamW, AdamWConfig, GradDtype, Moments, Offload, Optim, Update};
pub use plan::{
    CardPlan, Curves, EvalSchedule, EvalWhen, Objective, Observer, RecordPlan, ResumeFrom, ResumePlan,
    RowPlan, RunPlan, RunSummary, SavePlan, SaveWhen, SchedulePlan, Signals, SyncReference, TrainSetup,
};
pub use policy::{ModelPlan, Policy, weights_fit};
pub use prepare::{Forecast, Limit, Need, Output, Prepared, Run, Variant, fits};
pub use records::environment_turns;
pub use replay::replay;
pub use resume::{MICRO_BATCHES, PROMPTS};
pub use rollouts::{Group, Rollouts, Scored};
pub use rows::{
    Making, PreparedRow, RowSource, SkipPolicy, SkippedRow, Unusable, media_paths, prepare, requests,
};
pub use run::{Trained, train};
pub use saved_turns::SavedTurn;
pub use schedule::{Schedule, ScheduleKind};
pub use scoring::{applies, probe, score};
pub use selection::{Selection, decayed_names, summary};
pub use split::{Division, GradientSum, Shard, Split};
pub use step::{Algorithm, Collector, Divided, STREAM_ROWS, StepOutcome, UpdateAt, update};
pub use streams::{Part, pack};
pub use survey::{RowCheck, Survey, Surveyed};
pub use timing::peak_memory_bytes;
