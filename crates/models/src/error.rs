//! Errors of loading, running and saving models.

use std::path::{Path, PathBuf};

use omnigrpo_guard::Setting;
use omnigrpo_text::MediumKind;

use crate::{FamilyOption, LoraConfig, MediaSettings, PromptSettings};

omnigrpo_guard::settings! {
    struct LoraConfig { LORA_DROPOUT = dropout, LORA_RANK = rank, LORA_TARGETS = targets }
    struct MediaSettings {
        BASE_INTERVAL_SECS = base_interval_secs, MAX_TILES = max_tiles, RULE = rule,
        IMAGE_MAX_PIXELS = image.max_pixels, IMAGE_MIN_PIXELS = image.min_pixels,
        VIDEO_MAX_PIXELS = video.max_pixels, VIDEO_MIN_PIXELS = video.min_pixels, VIDEO_TOTAL_PIXELS = video.total_pixels,
        VIDEO_FPS = video.fps, VIDEO_NFRAMES = video.nframes, VIDEO_MAX_FRAMES = video.max_frames,
        VIDEO_MIN_FRAMES = video.min_frames, MISSING_AUDIO = missing_audio,
    }
    struct PromptSettings { MAX_COMPLETION_LENGTH = max_completion_length, MAX_PROMPT_LENGTH = max_prompt_length, TEACHER_COLUMN = privileged_context }
}

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A file could not be read or written.
    #[error("{} cannot be read or written", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A turn of an environment does not fit the model.
    #[error("a turn of an environment: {what}")]
    AddedTurn {
        /// Problem and advice.
        what: String,
    },
    /// An environment says more in one turn, or before the first, than is read.
    #[error("the environment says too much at once: {what}")]
    SaysTooMuch {
        /// Actual and largest size.
        what: String,
    },
    /// The CPU cannot multiply with the weights as requested.
    #[error(transparent)]
    Arithmetic(#[from] omnigrpo_kernels::paths::Unavailable),
    /// A weight file was modified while the model that reads it was in use.
    #[error(
        "{} was modified while the reference model read its weights from it. Restore the file, leave it unchanged \
         until the run has ended, and start the run again: it resumes from its last checkpoint",
        path.display()
    )]
    Changed {
        /// The file.
        path: PathBuf,
    },
    /// The directory contains no readable weights.
    #[error("{}: {what}", dir.display())]
    Checkpoint {
        /// The checkpoint directory.
        dir: PathBuf,
        /// Problem and advice.
        what: String,
    },
    /// `config.json` does not describe a supported model.
    #[error("{}: {what}", path.display())]
    Config {
        /// The configuration file.
        path: PathBuf,
        /// Problem and expected value.
        what: String,
    },
    /// The tensors in the files do not match those of the architecture.
    #[error("{}: {count} tensors do not fit the {family} architecture of config.json:\n{list}", dir.display())]
    Tensors {
        /// The checkpoint directory.
        dir: PathBuf,
        /// Expected family.
        family: &'static str,
        /// Number of problems.
        count: usize,
        /// First problems of the list, one per line.
        list: String,
    },
    /// A weight file is not a safetensors file, or cannot be written as one.
    #[error("{} cannot be {action} as safetensors", path.display())]
    Safetensors {
        /// The file.
        path: PathBuf,
        /// `read` or `written`.
        action: &'static str,
        /// Error of the safetensors library.
        source: safetensors::SafeTensorError,
    },
    /// A file is not the expected JSON.
    #[error("{} does not contain the expected JSON", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The parser's message, with line and column.
        source: serde_json::Error,
    },
    /// A prompt has more tokens than the model or the settings allow.
    #[error(
        "the prompt is too long: got {tokens} tokens, expected at most {limit} ({which}); prompts are never truncated: {remedy}"
    )]
    PromptTooLong {
        /// Number of tokens, including those of media.
        tokens: usize,
        /// Limit in tokens.
        limit: usize,
        /// Setting or file that defines the limit.
        which: String,
        /// Advice to shorten the prompt or raise the limit.
        remedy: String,
    },
    /// A row lacks the text that its teacher reads.
    #[error(
        "the teacher reads the column `{column}` ({TEACHER_COLUMN}), and the row has {got} in it; expected a text that is not empty"
    )]
    PrivilegedContext {
        /// Name of the column.
        column: String,
        /// Content of the column in the row.
        got: String,
    },
    /// A prompt with its completion reaches positions at which the model would use different rotary angles.
    #[error(
        "the prompt and its media take {reached} positions, and the completion up to {completion} more; with dynamic \
         rope_scaling, expected at most max_position_embeddings ({limit}): lower the number of frames, or use another \
         type of rope_scaling"
    )]
    PromptPositions {
        /// Position after the prompt.
        reached: usize,
        /// Positions reserved for the completion.
        completion: usize,
        /// Number of positions of the model.
        limit: usize,
    },
    /// A conversation has no turn of the user.
    #[error("the conversation has no user turn to answer")]
    NoUserTurn,
    /// A given token cannot be part of a prompt.
    #[error("token {id} cannot be part of a prompt; expected ids below {vocab} that do not stand for media")]
    TokenIds {
        /// The token.
        id: u32,
        /// Number of tokens of the vocabulary.
        vocab: usize,
    },
    /// A row for supervised training has no answer.
    #[error("the row has no answer to train on; expected a final assistant turn, `solution` or `answer`")]
    NoAnswer,
    /// A recorded completion has neither text nor ids.
    #[error("a completion has neither text nor `completion_ids`")]
    NoCompletion,
    /// No token ends a completion.
    #[error("the checkpoint defines no stop token (eos_token_id)")]
    NoStopToken,
    /// The model does not support a kind of medium.
    #[error("the row has a medium of kind {kind}, but {what}; remove it from the row")]
    MediumKind {
        /// Kind of the medium.
        kind: MediumKind,
        /// Support that the model has or lacks.
        what: &'static str,
    },
    /// The model's processor cannot use a medium.
    #[error("the {kind} cannot be used: {what}")]
    Medium {
        /// Kind of the medium.
        kind: MediumKind,
        /// Actual and expected values.
        what: &'static str,
    },
    /// The model's processor cannot apply the options of a row's medium.
    #[error("the row's options for the {kind} are unsupported: {what}")]
    MediumOptions {
        /// Kind of the medium.
        kind: MediumKind,
        /// Requested and possible options.
        what: &'static str,
    },
    /// A setting has no effect on this family.
    #[error("{setting} has no effect on {family}: {why}; remove it")]
    IdleSetting {
        /// Media setting.
        setting: Setting,
        /// Name of the family.
        family: &'static str,
        /// Reason, and alternative setting.
        why: String,
    },
    /// Required files of another model were not found.
    #[error(
        "{what} cannot be read: {missing} was not found; give its directory with {}",
        FamilyOption::setting(option)
    )]
    NoCompanion {
        /// Purpose of the tensors.
        what: &'static str,
        /// Names of the files.
        missing: &'static str,
        /// Option that gives their directory.
        option: &'static str,
    },
    /// Weights cannot be created, read or used as they are.
    #[error("{what}")]
    Weights {
        /// Problem and advice.
        what: String,
    },
    /// An adapter does not fit its model.
    #[error("{what}")]
    Adapter {
        /// Problem and advice.
        what: String,
    },
    /// A pattern that selects layers is not a regular expression.
    #[error("{setting} {pattern:?} is not a valid regular expression")]
    Pattern {
        /// Setting that contains the pattern.
        setting: String,
        /// The pattern.
        pattern: String,
        /// Position of the error.
        source: regex::Error,
    },
    /// A checkpoint cannot be written in the requested layout.
    #[error("{what}")]
    Layout {
        /// Problem and advice.
        what: String,
    },
    /// The input of a tower, a projector or the decoder has the wrong shape.
    #[error("{what}")]
    Shape {
        /// Actual and expected values.
        what: String,
    },
    /// The attention layout of a pass is invalid.
    #[error(transparent)]
    Attention(#[from] omnigrpo_ops::LayoutError),
    /// A file without the sound that its row asks for.
    #[error(
        "{}: the file has no audio track; remove the audio from the row, or take silence in its place ({MISSING_AUDIO} silence)",
        path.display()
    )]
    NoSound {
        /// The file.
        path: PathBuf,
    },
    /// A medium could not be read.
    #[error(transparent)]
    Media(#[from] omnigrpo_media::MediaError),
    /// Text could not be rendered or tokenised.
    #[error(transparent)]
    Text(#[from] omnigrpo_text::TextError),
    /// A GGUF file could not be read or written.
    #[error(transparent)]
    Gguf(#[from] omnigrpo_gguf::GgufError),
    /// An operation failed.
    #[error(transparent)]
    Op(#[from] omnigrpo_ops::Error),
}

impl ModelError {
    pub(crate) fn io(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { path, source }
    }

    pub(crate) fn safetensors(
        path: &Path,
        action: &'static str,
    ) -> impl FnOnce(safetensors::SafeTensorError) -> Self {
        move |source| match source {
            safetensors::SafeTensorError::IoError(source) => Self::Io { path: path.to_owned(), source },
            source => Self::Safetensors { path: path.to_owned(), action, source },
        }
    }

    pub(crate) fn weights(what: impl Into<String>) -> Self {
        Self::Weights { what: what.into() }
    }

    pub(crate) fn adapter(what: impl Into<String>) -> Self {
        Self::Adapter { what: what.into() }
    }

    pub(crate) fn layout(what: impl Into<String>) -> Self {
        Self::Layout { what: what.into() }
    }

    pub(crate) fn shape(what: impl Into<String>) -> Self {
        Self::Shape { what: what.into() }
    }
}

/// Result with this crate's error.
pub type Result<T, E = ModelError> = std::result::Result<T, E>;
