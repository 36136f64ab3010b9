//! GRPO post-training of models that read, see and hear, as a library.
//!
//! GRPO (group relative policy optimisation) needs no second network as a critic: a model answers each question several
//! times, a reward scores the answers, and training makes answers that scored better than the others of their group more
//! likely. This page shows how the parts of this crate do that; each has its own page. The program `omnigrpo` puts the same
//! parts behind a command line.
//!
//! # Train with a reward of your own
//!
//! ```no_run
#![doc = include_str!("../examples/train_with_own_reward.rs")]
//! ```
//!
//! # From a row to an update
//!
//! 1. A [`Checkpoint`] is an opened directory in the layout of the Hugging Face hub; its `config.json` names the family of the
//!    model. [`Model::load`] reads the weights, or draws random ones.
//! 2. A [`Dataset`] holds rows of files ([`Dataset::open`]) or of an iterator ([`RowReader`]). A row is a JSON object
//!    with a question, usually a ground truth, and paths of pictures, clips and sounds; its columns may have the names of other
//!    trainers. [`Dataset::get`] returns a [`Sample`].
//! 3. A [`PromptBuilder`] decodes the media of a sample, renders its conversation with the checkpoint's chat template, and
//!    returns a [`Prompt`]: token ids, and the positions of media among them.
//! 4. [`Model::encode_prompt`] runs towers and projectors and returns the [`Features`] of the media.
//! 5. A [`Generator`] samples completions of prompts, by [`SamplingParams`]. [`logprobs`] returns the log-probabilities of
//!    existing completions.
//! 6. A [`RewardSet`] scores them: [rewards by name](build_rewards) (`accuracy`, `format`, …), [a closure](reward()), or anything that
//!    implements [`Reward`], with a weight each. [`build_rewards_with`] mixes names with rewards of your own.
//! 7. [`train()`] repeats this. An [`Algorithm`] sets how rewards become advantages, and the loss;
//!    [`Algorithm::of`] takes a published [`Recipe`] by [name](recipe()), whose values can all be changed. [`AdamWConfig`],
//!    [`Selection`] (which parts are trained) and [`RunPlan`] (length, checkpoints, resuming) are the rest of a [`TrainPlan`].
//! 8. [`evaluate`] answers held-out rows and summarises rewards and measures.
//!
//! # Observe a run
//!
//! [`train()`] starts a run as the program does: before the first step it checks all rows and rewards, forecasts the memory, and
//! compares the inputs of a resumed run by content. A run writes the same files as the program: `metrics.jsonl`, all completions
//! with their rewards in `rollouts/`, checkpoints, and at the end the model. [`Front::on_rollout`], [`Front::on_step`]
//! and [`Front::on_evaluation`] call your functions with the same numbers. One that returns
//! [`ControlFlow::Break`](std::ops::ControlFlow::Break) ends the run after its step, with a checkpoint to resume from.
//! [`Front::on_progress`] reports progress inside a step. A plan is data, and a front is [`Send`], so a service can train on a thread
//! of its own.
//!
//! # The settings of the program
//!
//! [`session`] runs what the program runs: it takes its settings by name, with rewards and an environment of your own as functions, and
//! returns the trained model, an evaluation, a plan or completions. The Python package is built on it.
//!
//! # A loss of your own
//!
//! The loss is a function of log-probabilities, so it needs no tensors: write the term of one token as a function of its
//! ratio, log-probability and advantage, and [`Dual`] numbers carry the derivative.
//!
//! ```
//! use omnigrpo::{Algorithm, CustomTerm, LossPlan, Surrogate, recipe};
//!
//! // The ratio's logarithm instead of the ratio, so that one token cannot run away with the step.
//! let term = CustomTerm(|token| -(token.ratio.ln() + 1.0) * token.advantage);
//! let mut algorithm = Algorithm::default();
//! algorithm.loss.surrogate = Surrogate::Custom(term);
//! assert!(algorithm.loss.validate().is_ok());
//! # let _: (LossPlan, Option<&omnigrpo::Recipe>) = (algorithm.loss, recipe("grpo"));
//! ```
//!
//! # A model family of your own
//!
//! The families of this crate are a table, and `model_type` selects the row of a checkpoint. `examples/own_family.rs` opens
//! a checkpoint with a [`Family`](family::Family) that is not in the table.
//!
//! # Reproducibility
//!
//! Random numbers are functions of a seed and a position, never of a state that advances: the same plan, rows and seed give the
//! same bytes on one machine, also when a run was killed and resumed.
//!
//! # Errors
//!
//! Errors name the failure, the value found and the value expected. Every crate below has its own error types: for rows,
//! [`DataError`] is about a dataset and [`RowError`] about one row, which a run may skip. A message does not repeat its
//! [source](std::error::Error::source), so print the chain (as `{:#}` of `anyhow` does). [`train()`] and [`evaluate`] return
//! [`TrainError`]. Nothing here prints, reads environment variables or ends the process, except [`session`].
//!
//! # Features
//!
//! `cli` (default) adds the program, and `session` (part of it) the commands as functions; both need Unix. `https` and `parquet` (default) add rewards behind TLS and rows in parquet
//! tables; both build C.

#![warn(missing_docs)]

#[cfg(feature = "cli")]
pub mod cli;
mod training;

pub use omnigrpo_data::{
    Cause, ColumnNames, Curriculum, DataError, Dataset, DatasetSpec, Lessons, MediumOptions,
    QUESTION_TEMPLATES, QuestionTemplate, ReadOptions, Registry, Roots, RowError, RowReader, Sample, Think,
    store_medium,
};
pub use omnigrpo_grpo::{
    AdvantageKind, Aggregation, Correction, CorrectionKind, CustomTerm, Dual, Kl, LossPlan, PolicyToken,
    RECIPES, RatioLevel, Recipe, Surrogate, metric, recipe,
};
pub use omnigrpo_models::{
    Arithmetic, Bf16Path, Checkpoint, ConvertedGguf, DecoderMemory, Features, FrameRule, GgufPrecision,
    Limits, LoadOptions, LoraConfig, MediaSettings, Model, ModelError, Opening, Prompt, PromptBuilder,
    PromptSettings, QuantBits, Quantization, ReferencePlace, WeightDtype, convert_gguf,
};
pub use omnigrpo_observe::{Activity, AskedBy, Console, Event, StepProgress, Tone, TrainingProblem};
pub use omnigrpo_ops::Device;
pub use omnigrpo_rewards::{
    AccuracyMode, AnswerPolicy, Corpus, ExternalOptions, FormatMode, Logged, Measures, Reward, RewardError,
    RewardInput, RewardMatrix, RewardOptions, RewardSet, RowKey, Score, StatedRange, Summary,
    build as build_rewards, build_with as build_rewards_with, reward, rows_as_json,
};
pub use omnigrpo_rollout::{
    Answer, AnswerPart, Completion, Environment, Episode, EpisodeKey, FinishReason, GenerateOptions,
    Generated, Generator, Interaction, ModelTurn, Request, RolloutError, SamplingParams, TokenEvent,
    TurnLimits, answer_calls, append,
};
pub use omnigrpo_settings as settings;
pub use omnigrpo_text::{RenderOptions, Tokenizer};
pub use omnigrpo_train::{
    AdamWConfig, Algorithm, CardPlan, EvalOptions, EvalPlan, EvalSchedule, EvalWhen, Evaluation,
    GeneratedBatch, Group, Objective, Observer, Peer, PreparedRow, RecordPlan, Refusal, ResumeFrom,
    ResumePlan, Rollouts, RowPlan, RunPlan, RunSummary, SavePlan, SaveWhen, ScheduleKind, SchedulePlan,
    Scored, Selection, Signals, SkipPolicy, SyncReference, TrainError, Trained, environment, environment_of,
    evaluate, generate, logprobs,
};
pub use training::{Front, Inputs, StepReport, TrainPlan, train};

pub use omnigrpo_demo as demo;

/// The commands of the program in the process of another one: settings by name, and rewards and an environment as functions.
///
/// [`train`](session::train), [`evaluate`](session::evaluate) and [`plan`](session::plan) take [resolved](session::checked) settings and return
/// values. [`connect`](session::connect) makes this process a rank of a run with several processes; it may end the process together with
/// the other ranks.
#[cfg(feature = "session")]
pub mod session {
    pub use omnigrpo_session::{
        Caller, Functions, Loaded, checked, connect, evaluate, given, leave, plan, read, train,
    };
}

/// Parts of a model family; `examples/own_family.rs` defines one.
///
/// A [`FamilyRow`](family::FamilyRow) opens a checkpoint directory as three [`Roles`](family::Roles): a
/// [`Processor`](family::Processor) reads media and writes prompts, an [`Architecture`](family::Architecture) builds the
/// network from a [`WeightSource`](family::WeightSource), and a [`Format`](family::Format) knows the names in the files.
pub mod family {
    pub use omnigrpo_data::{MediumInfo, MediumRef, MediumSource};
    pub use omnigrpo_models::{
        Architecture, Block, Companion, ConfigJson, Converted, Decoder, DecoderConfig, DecoderNames, Encoder,
        FAMILIES, Family, FamilyOption, FamilyRow, Format, IdleSettings, Init, MediumInput, MediumPlan,
        MediumShape, ModelError, Network, OptionKind, Part, Position, Processor, Result, Roles, Scope,
        Setting, TextDefaults, WeightSource,
    };
    pub use omnigrpo_ops::{Pass, Tape, Var};
    pub use omnigrpo_text::{MediumKind, MediumTokens, Span, Turn};
}
