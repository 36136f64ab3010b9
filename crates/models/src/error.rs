//! What can go wrong between a checkpoint directory and a running model.

use std::path::PathBuf;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A file could not be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The directory holds no weights that can be read.
    #[error("{}: {what}", dir.display())]
    Checkpoint {
        /// The checkpoint directory.
        dir: PathBuf,
        /// What is wrong and what to do.
        what: String,
    },
    /// `config.json` does not describe a model of this program.
    #[error("{}: {what}", path.display())]
    Config {
        /// The configuration file.
        path: PathBuf,
        /// What is wrong, what was expected.
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
    /// A prompt and its media do not fit together, or the prompt is too long.
    #[error("{what}")]
    Prompt {
        /// What is wrong and what to do.
        what: String,
    },
    /// Weights that cannot be made, read or used as they are.
    #[error("{what}")]
    Weights {
        /// What is wrong and what to do.
        what: String,
    },
    /// An adapter and the model it is for do not fit together.
    #[error("{what}")]
    Adapter {
        /// What is wrong and what to do.
        what: String,
    },
    /// A checkpoint cannot be written in the layout that was asked for.
    #[error("{what}")]
    Layout {
        /// What is wrong and what to do.
        what: String,
    },
    /// Numbers handed to a tower, a projector or the decoder do not have its shapes.
    #[error("{what}")]
    Shape {
        /// What was given, what was expected.
        what: String,
    },
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

    pub(crate) fn prompt(what: impl Into<String>) -> Self {
        Self::Prompt { what: what.into() }
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
