//! Errors between a checkpoint directory and a running model.

use std::path::{Path, PathBuf};

use omnigrpo_text::MediumKind;

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
    /// A file of weights that is read while the model is used is not what it was.
    #[error(
        "{} was written to while its weights were in use: the reference is read where it lies. Put the file back as it was, keep it so \
         until the run has ended, and start the run again: it goes on from its last checkpoint",
        path.display()
    )]
    Changed {
        /// The file.
        path: PathBuf,
    },
    /// The directory holds no weights that can be read.
    #[error("{}: {what}", dir.display())]
    Checkpoint {
        /// The checkpoint directory.
        dir: PathBuf,
        /// Problem and advice.
        what: String,
    },
    /// `config.json` does not describe a model of this program.
    #[error("{}: {what}", path.display())]
    Config {
        /// The configuration file.
        path: PathBuf,
        /// Problem and expected value.
        what: String,
    },
    /// Tensors in the files and tensors of the architecture do not match.
    #[error("{}: {count} tensors do not fit the {family} architecture of config.json:\n{list}", dir.display())]
    Tensors {
        /// The checkpoint directory.
        dir: PathBuf,
        /// The family that was asked for.
        family: &'static str,
        /// How many problems there are.
        count: usize,
        /// The first of them, one a line.
        list: String,
    },
    /// A file of weights is no safetensors file, or cannot be written as one.
    #[error("{} cannot be {action} as safetensors", path.display())]
    Safetensors {
        /// The file.
        path: PathBuf,
        /// `read` or `written`.
        action: &'static str,
        /// Error of the content.
        source: safetensors::SafeTensorError,
    },
    /// A file that is not the JSON it should be.
    #[error("{} is not the JSON that is expected of it", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The parser's message, with line and column.
        source: serde_json::Error,
    },
    /// A prompt has more tokens than the model or the settings allow.
    #[error(
        "the prompt is too long: got {tokens} tokens, expected at most {limit} ({which}); prompts are never cut: {remedy}"
    )]
    PromptTooLong {
        /// Number of tokens, including those of media.
        tokens: usize,
        /// The limit, tokens.
        limit: usize,
        /// Setting or file that sets the limit.
        which: &'static str,
        /// Advice to shorten the prompt or raise the limit.
        remedy: String,
    },
    /// A prompt with its completion reaches positions at which the model would turn other angles.
    #[error(
        "the prompt's positions reach {reached} with its media, and up to {completion} more for the completion; with dynamic \
         rope_scaling they must stay within max_position_embeddings ({limit}): lower the number of frames, or give \
         rope_scaling another type"
    )]
    PromptPositions {
        /// The position behind the prompt.
        reached: usize,
        /// Positions kept for the completion.
        completion: usize,
        /// Positions of the model.
        limit: usize,
    },
    /// A conversation without a turn of the user.
    #[error("the conversation has no user turn to answer")]
    NoUserTurn,
    /// A row without an answer, where one is to be imitated.
    #[error("the row has no answer to imitate; expected a final assistant turn, `solution` or `answer`")]
    NoAnswer,
    /// A completion that came with a row and is empty of everything.
    #[error("a completion has neither text nor `completion_ids`")]
    NoCompletion,
    /// No token ends a completion.
    #[error("the checkpoint names no stop token (eos_token_id)")]
    NoStopToken,
    /// A kind of medium that the model does not take.
    #[error("the row has a medium of kind {kind}, but {what}; remove it from the row")]
    MediumKind {
        /// The kind.
        kind: MediumKind,
        /// Support that the model has or lacks.
        what: &'static str,
    },
    /// A medium that the model's processor can make nothing of.
    #[error("the {kind} cannot be used: {what}")]
    Medium {
        /// Kind of the medium.
        kind: MediumKind,
        /// Actual and expected values.
        what: &'static str,
    },
    /// Options of a row's medium that the model's processor cannot follow.
    #[error("the row's options of the {kind} cannot be followed: {what}")]
    MediumOptions {
        /// Kind of the medium.
        kind: MediumKind,
        /// Request, and what is possible.
        what: &'static str,
    },
    /// A setting without effect on this family.
    #[error("MediaSettings::{setting} has no effect on {family}: {why}; remove it")]
    IdleSetting {
        /// The field of the media's settings.
        setting: &'static str,
        /// The family.
        family: &'static str,
        /// Why, and what to set instead.
        why: &'static str,
    },
    /// Files of another model, which this one needs, are not there.
    #[error("{what} cannot be read: {missing} was not found; give its directory with FamilyOption::{option}")]
    NoCompanion {
        /// Purpose of the tensors.
        what: &'static str,
        /// The files.
        missing: &'static str,
        /// The option that names their directory.
        option: &'static str,
    },
    /// Weights that cannot be made, read or used as they are.
    #[error("{what}")]
    Weights {
        /// Problem and advice.
        what: String,
    },
    /// An adapter and the model it is for do not fit together.
    #[error("{what}")]
    Adapter {
        /// Problem and advice.
        what: String,
    },
    /// A pattern that chooses layers is no regular expression.
    #[error("{setting} {pattern:?} is no regular expression")]
    Pattern {
        /// The field.
        setting: &'static str,
        /// The pattern.
        pattern: String,
        /// Position of the error.
        source: regex::Error,
    },
    /// A checkpoint cannot be written in the layout that was asked for.
    #[error("{what}")]
    Layout {
        /// Problem and advice.
        what: String,
    },
    /// Numbers handed to a tower, a projector or the decoder do not have its shapes.
    #[error("{what}")]
    Shape {
        /// Actual and expected values.
        what: String,
    },
    /// Rows of a pass that cannot see each other as asked.
    #[error(transparent)]
    Attention(#[from] omnigrpo_ops::LayoutError),
    /// A medium could not be read.
    #[error(transparent)]
    Media(#[from] omnigrpo_media::MediaError),
    /// Text could not be rendered or tokenised.
    #[error(transparent)]
    Text(#[from] omnigrpo_text::TextError),
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

/// The crate's result.
pub type Result<T, E = ModelError> = std::result::Result<T, E>;
