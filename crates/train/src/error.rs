//! Errors of a run.

use std::fmt::Display;
use std::path::PathBuf;

use omnigrpo_data::{ColumnNames, ReadOptions};
use omnigrpo_guard::{Fault, Setting, fault};
use omnigrpo_models::{LoadOptions, LoraConfig, MediaSettings, PromptSettings};
use omnigrpo_ranks::Cause;

use crate::{
    AdamWConfig, Algorithm, Division, EvalSchedule, ResumeFrom, ResumePlan, RowPlan, RunPlan, SavePlan,
    Selection, SkipPolicy, TrainSetup,
};

omnigrpo_guard::settings! {
    struct AdamWConfig { GRAD_DTYPE = grad_dtype, LEARNING_RATE = learning_rate, MAX_GRAD_NORM = max_grad_norm, OFFLOAD = offload }
    struct Algorithm {
        BETA = loss.beta, CORRECTION = loss.correction.kind, ENTROPY_COEF = loss.entropy_coef, LENGTH_BONUS = length_bonus,
        MICRO_BATCH = prompts_per_micro_batch, NUM_GENERATIONS = num_generations, RECOMPUTE = recompute,
        STREAM_ROWS = max_stream_tokens, TEMPERATURE = sampling.temperature
    }
    struct ColumnNames { IMAGE = image, SOLUTION = solution }
    struct LoadOptions { DEVICE = device, DTYPE = dtype, QUANTIZATION = quantization }
    struct MediaSettings { ORIENTATION = orientation }
    struct LoraConfig { LORA_TARGETS = targets }
    struct PromptSettings { MAX_COMPLETION_LENGTH = max_completion_length }
    struct ReadOptions { CONTINUE = continue_text_prompts, TEMPLATE = template }
    struct EvalSchedule { BEST_METRIC = best_metric }
    enum ResumeFrom { NEWEST = Newest, START = Start }
    struct ResumePlan { ALLOW_CHANGED = allow_changed, RESUME = from }
    struct RowPlan { CURRICULUM = lessons.curriculum, HIGH = lessons.high, TEXT_ONLY = text_only }
    struct RunPlan { MAX_STEPS = max_steps, SYNC_REFERENCE = sync_reference }
    struct SavePlan { SAVE_ONLY_MODEL = only_model }
    struct Selection { GATE = gate, LLM = llm, PATTERNS = patterns, PROJECTOR = projector, TOWERS = towers }
    struct SkipPolicy { MAX_SHARE = max_share, STRICT = strict }
    struct Division { GRADIENT_SUM = sum, LEAVES = leaves }
    struct TrainSetup {
        EVAL = eval, LOCK = lock, REFERENCE_DEVICE = reference_device, REWARDS = rewards, ORDER_BONUS = shuffled
    }
}

/// Error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// Failure of another rank, or of the connection between ranks.
    #[error(transparent)]
    Ranks(#[from] omnigrpo_ranks::Error),
    /// Setting with an unusable value.
    #[error("{name}: {got:?}: {what}")]
    Setting {
        /// Name of the setting.
        name: String,
        /// Value of the setting.
        got: String,
        /// Problem and advice.
        what: String,
    },
    /// Run that cannot work, found before its first step or after the first ones.
    #[error("{0}")]
    Refused(Box<Refusal>),
    /// Invalid regular expression in a pattern that selects weights.
    #[error("{name} {pattern:?} is not a valid regular expression")]
    Pattern {
        /// Field with the pattern.
        name: Setting,
        /// Pattern with the error.
        pattern: String,
        /// Parser error with its position.
        source: regex::Error,
    },
    /// Too few usable rows.
    #[error("{what}")]
    Data {
        /// Problem and advice.
        what: String,
    },
    /// Repeated failure of the machine. The row is not to blame, and the same work can succeed later.
    #[error("the machine failed at row {row} ({id}); the row itself may be valid")]
    Machine {
        /// Index of the row in the dataset.
        row: u64,
        /// Id of the row.
        id: String,
        /// Failure of the machine.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Environment that cannot start a row.
    #[error("the environment failed before the first turn of row {row} ({id})")]
    Environment {
        /// Index of the row in the dataset.
        row: u64,
        /// Id of the row.
        id: String,
        /// Failure of the environment.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Gradient that is not finite.
    #[error(
        "the gradient of {name} is not finite; the weights were not updated. Lower {LEARNING_RATE} or set {MAX_GRAD_NORM}"
    )]
    NonFiniteGradient {
        /// Name of the weight.
        name: String,
    },
    /// Loss that is not finite.
    #[error("step {step}: {what}; the rows are in {}", rows.display())]
    NonFiniteLoss {
        /// Optimizer step.
        step: u64,
        /// Value that is not finite.
        what: String,
        /// File with the affected rows.
        rows: PathBuf,
    },
    /// Weight or optimizer state that is not finite.
    #[error(
        "{what} of {name} is not finite; nothing was saved, and the previous checkpoint is still the newest. Lower \
         {LEARNING_RATE} or set {MAX_GRAD_NORM}"
    )]
    NonFiniteState {
        /// Name of the weight.
        name: String,
        /// Part of its state.
        what: &'static str,
    },
    /// Checkpoint that cannot be read or does not fit.
    #[error("checkpoint: {what}")]
    Checkpoint {
        /// Problem and advice.
        what: String,
    },
    /// Optimizer state that cannot be written as safetensors.
    #[error("{} cannot be written as safetensors", path.display())]
    Safetensors {
        /// Path of the file.
        path: PathBuf,
        /// Cause of the failure.
        source: safetensors::SafeTensorError,
    },
    /// Checkpoint with damaged files.
    #[error("checkpoint: {} is damaged: {what}; resume from an earlier checkpoint", checkpoint.display())]
    Damaged {
        /// Path of the checkpoint.
        checkpoint: PathBuf,
        /// Problem of the file.
        what: String,
        /// Read error, if reading failed.
        source: Option<Box<dyn std::error::Error + Send + Sync>>,
    },
    /// File that cannot be read or written.
    #[error("{} cannot be read or written", path.display())]
    Io {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// Error of the sampler.
    #[error(transparent)]
    Rollout(#[from] omnigrpo_rollout::RolloutError),
    /// Error of the model.
    #[error(transparent)]
    Model(#[from] omnigrpo_models::ModelError),
    /// Error of a reward.
    #[error(transparent)]
    Reward(#[from] omnigrpo_rewards::RewardError),
    /// Error of a reward, together with the completions to be scored, so that they are not lost.
    #[error("the completions of a step could not be scored")]
    Unscored {
        /// Error of the reward.
        source: Box<omnigrpo_rewards::RewardError>,
        /// Rows with their completions, one JSON object each.
        rows: Vec<String>,
    },
    /// Error of a reward; the completions were written to a file.
    #[error("the completions of a step could not be scored; they were saved to {}", rows.display())]
    UnscoredKept {
        /// Error of the reward.
        source: Box<omnigrpo_rewards::RewardError>,
        /// File with the rows and completions.
        rows: PathBuf,
    },
    /// Error of the loss.
    #[error(transparent)]
    Loss(#[from] omnigrpo_grpo::Error),
    /// Error while writing metrics or rollouts.
    #[error(transparent)]
    Observe(#[from] omnigrpo_observe::Error),
    /// Data order without a remaining row, or a position outside the order.
    #[error(transparent)]
    Order(#[from] omnigrpo_data::OrderError),
    /// Error of the dataset.
    #[error(transparent)]
    Dataset(#[from] omnigrpo_data::DataError),
    /// Error of a tensor operation.
    #[error(transparent)]
    Op(#[from] omnigrpo_ops::Error),
}

impl TrainError {
    /// Returns [`Fault::Machine`] if the same command can succeed once the machine works again, otherwise [`Fault::Run`].
    ///
    /// A file that cannot be written is a fault of the run: without it, the results of the run would be incomplete.
    pub fn fault(&self) -> Fault {
        match self {
            Self::Machine { .. } => Fault::Machine,
            Self::Ranks(omnigrpo_ranks::Error::Other { fault, .. }) => *fault,
            Self::Dataset(error @ omnigrpo_data::DataError::Machine { .. }) => fault(error, Fault::Machine),
            Self::Model(omnigrpo_models::ModelError::Media(_) | omnigrpo_models::ModelError::Text(_))
            | Self::Reward(_)
            | Self::Rollout(omnigrpo_rollout::RolloutError::Environment { .. })
            | Self::Environment { .. }
            | Self::Unscored { .. }
            | Self::UnscoredKept { .. } => fault(self, Fault::Run),
            _ => Fault::Run,
        }
    }

    /// Returns the cause of a failure for the other ranks.
    pub(crate) fn cause(&self) -> Cause {
        let is_known = matches!(self, Self::Ranks(omnigrpo_ranks::Error::Other { .. }));
        Cause { fault: self.fault(), is_known }
    }

    pub(crate) fn setting(name: impl Display, got: &str, what: String) -> Self {
        Self::Setting { name: name.to_string(), got: got.to_owned(), what }
    }

    pub(crate) fn io(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { path, source }
    }
}

/// Reason why a run cannot start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Problem.
    pub what: String,
    /// Place of the problem: a setting, a file or a directory.
    pub at: Option<String>,
    /// Value that was found.
    pub got: Option<String>,
    /// Description of a correct value.
    pub expected: Option<String>,
    /// Advice.
    pub help: Option<String>,
    /// True if only other settings can help.
    pub by_settings: bool,
}

impl Refusal {
    /// Creates the refusal of rows, files or a machine.
    pub(crate) fn failure(what: impl Into<String>) -> Self {
        let (at, got, expected, help) = (None, None, None, None);
        Self { what: what.into(), at, got, expected, help, by_settings: false }
    }

    /// Creates the refusal of settings.
    pub(crate) fn usage(what: impl Into<String>) -> Self {
        Self { by_settings: true, ..Self::failure(what) }
    }

    /// Adds the place.
    pub(crate) fn at(mut self, place: impl Display) -> Self {
        self.at = Some(place.to_string());
        self
    }

    /// Adds the value that was found.
    pub(crate) fn got(mut self, got: impl Into<String>) -> Self {
        self.got = Some(got.into());
        self
    }

    /// Adds a description of a correct value.
    pub(crate) fn expected(mut self, expected: impl Into<String>) -> Self {
        self.expected = Some(expected.into());
        self
    }

    /// Adds advice.
    pub(crate) fn help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.what)?;
        let parts =
            [(" at ", &self.at), (": got ", &self.got), ("; expected ", &self.expected), ("; ", &self.help)];
        parts.into_iter().try_for_each(|(joint, part)| match part {
            Some(part) => write!(f, "{joint}{part}"),
            None => Ok(()),
        })
    }
}

impl From<Refusal> for TrainError {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(Box::new(refusal))
    }
}

/// Result type of this crate.
pub type Result<T, E = TrainError> = std::result::Result<T, E>;
