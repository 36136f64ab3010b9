//! GRPO post-training of models that read, see and hear, as a library.
//!
//! GRPO (group relative policy optimisation) needs no second network that judges: a model answers each question several
//! times, a reward scores the answers, and the model is moved towards those that scored better than the others of their
//! group. This page tells how the pieces of this crate do that; each links to its own page. The program `omnigrpo` is the
//! same pieces behind a command line.
//!
//! # Train with a reward of your own
//!
//! ```no_run
#![doc = include_str!("../examples/train_with_own_reward.rs")]
//! ```
//!
//! # The way of a row
//!
//! 1. A [`Checkpoint`] is a directory as the Hugging Face hub has it, opened: its `config.json` says which family the model
//!    is of. [`Model::load_with`] reads the weights; [`Model::random`] draws them.
//! 2. A [`Dataset`] is rows: of files ([`Dataset::open`]) or of an iterator ([`Dataset::from_rows`]). A row is a JSON object
//!    with a question, perhaps a ground truth, and paths of pictures, clips and sounds; its columns may have the names that
//!    other trainers use. [`Dataset::get`] gives a [`Sample`].
//! 3. A [`PromptBuilder`] decodes the media of a sample, renders its conversation with the checkpoint's chat template, and
//!    returns a [`Prompt`]: token ids, and where media stand among them.
//! 4. [`Model::encode_prompt`] runs towers and projectors: the [`Features`] of the media.
//! 5. A [`Generator`] samples completions of prompts, by [`SamplingParams`]. [`logprobs`] gives the log-probabilities of
//!    completions that are there already.
//! 6. A [`RewardSet`] scores them: [rewards by name](build_rewards) (`accuracy`, `format`, …), [a closure](reward()), or anything that
//!    implements [`Reward`], with a weight each.
//! 7. [`train()`] repeats this. An [`Algorithm`] says how rewards become advantages and which loss the weights go down;
//!    [`Algorithm::of`] takes a published [`Recipe`] by [name](recipe()), and every value stays open. [`AdamWConfig`],
//!    [`Selection`] (which parts are trained) and [`RunPlan`] (length, checkpoints, resuming) are the rest of a [`TrainPlan`].
//! 8. [`evaluate`] answers held-out rows and sums up what rewards and measures say.
//!
//! # Look on
//!
//! A run writes what the program writes: `metrics.jsonl`, all completions with their rewards in `rollouts/`, checkpoints, and at
//! the end the model. [`TrainPlan::on_rollout`], [`TrainPlan::on_step`] and [`TrainPlan::on_evaluation`] call functions of
//! yours with the same numbers; one that returns [`ControlFlow::Break`](std::ops::ControlFlow::Break) ends the run after its step, with a checkpoint to
//! go on from.
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
//! The families this crate knows are a table, and a checkpoint finds its row by `model_type`. `examples/own_family.rs` opens
//! a checkpoint with a [`Family`](family::Family) that is not in the table.
//!
//! # What repeats
//!
//! Everything random is keyed by a seed and by place, never by a state that advances: the same plan, rows and seed give the same
//! bytes on one machine, and a run that was killed goes on as if it had not been.
//!
//! # Errors
//!
//! Errors say what failed, what was found and what was expected. Every crate below has error types of its own; that of rows, for
//! example, has [`DataError`] for a dataset and [`RowError`] for one of its rows, which a run may skip. A message says its own
//! part and its cause is its [source](std::error::Error::source), so print the chain (`{:#}` of `anyhow` does). [`TrainError`] is
//! what [`train()`] and [`evaluate`] fail with. Nothing here prints, reads environment variables or ends the process.
//!
//! # Features
//!
//! `cli` (default) is what the program needs besides. `https` and `parquet` (default) bring rewards behind TLS and tables as
//! rows; both build C.

mod training;

pub use omnigrpo_data::{
    ColumnNames, Curriculum, DataError, Dataset, DatasetSpec, Lessons, MediumOptions, QUESTION_TEMPLATES,
    QuestionTemplate, ReadOptions, Registry, Roots, RowError, Sample, ThinkMode,
};
pub use omnigrpo_grpo::{
    AdvantageKind, Aggregation, Correction, CorrectionKind, CustomTerm, Dual, Kl, LossPlan, PolicyToken,
    RECIPES, RatioLevel, Recipe, Surrogate, recipe,
};
pub use omnigrpo_models::{
    Checkpoint, Features, FrameRule, Limits, LoadOptions, LoraConfig, MediaSettings, Model, ModelError,
    Prompt, PromptBuilder, PromptSettings, QuantBits, Quantization, WeightDtype,
};
pub use omnigrpo_observe::Console;
pub use omnigrpo_ops::Device;
pub use omnigrpo_rewards::{
    AccuracyMode, AnswerPolicy, ExternalOptions, FormatMode, Measures, Reward, RewardError, RewardInput,
    RewardMatrix, RewardOptions, RewardSet, RowKey, Score, Summary, Think, build as build_rewards, reward,
};
pub use omnigrpo_rollout::{
    Completion, FinishReason, Generator, Request, RolloutError, SamplingParams, TokenEvent,
};
pub use omnigrpo_text::{RenderOptions, Tokenizer};
pub use omnigrpo_train::{
    AdamWConfig, Algorithm, EvalOptions, EvalPlan, EvalWhen, Evaluation, Generated, Group, Objective,
    PreparedRow, ResumeFrom, Rollouts, RunPlan, RunSummary, SaveWhen, ScheduleKind, Scored, Selection,
    SkipPolicy, SyncReference, TrainError, evaluate, generate, logprobs,
};
pub use training::{StepReport, TrainPlan, train};

pub use omnigrpo_demo as demo;

/// What a model family is made of: `examples/own_family.rs` has one.
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
        TextDefaults, WeightSource,
    };
    pub use omnigrpo_ops::{Pass, Tape, Var};
    pub use omnigrpo_text::{MediumKind, MediumTokens, Span, Turn};
}
