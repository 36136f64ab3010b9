//! Error type of the crate. Each message states the failure, its place, the value found, the value expected, and a remedy.

use std::path::PathBuf;

use crate::MediumKind;

/// Result type of this crate.
pub type Result<T> = std::result::Result<T, TextError>;

/// Error of another library.
pub type Cause = Box<dyn std::error::Error + Send + Sync>;

/// Error on the way between a conversation and its token ids.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// File that exists but cannot be read.
    #[error("cannot read {path}; check that the file exists and is readable")]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// File above the size limit of this crate.
    #[error("{path} has {got} bytes, more than the limit of {limit} bytes; check that it is the right file")]
    TooLarge {
        /// Path of the file.
        path: PathBuf,
        /// Size of the file, bytes.
        got: u64,
        /// Maximum size, bytes.
        limit: u64,
    },
    /// File with invalid content.
    #[error("{path}: {problem}")]
    BadFile {
        /// Path of the file.
        path: PathBuf,
        /// Problem and expected value.
        problem: String,
        /// Error of the parser, if any.
        source: Option<Cause>,
    },
    /// Model directory without a loadable tokenizer.
    #[error(
        "no tokenizer in {dir}: expected tokenizer.json, or vocab.json with merges.txt; copy tokenizer.json from the \
         model's published files, or write it with `AutoTokenizer.from_pretrained(MODEL).save_pretrained(DIR)`"
    )]
    NoTokenizer {
        /// Directory that was searched.
        dir: PathBuf,
    },
    /// Text that the tokenizer failed to encode.
    #[error("cannot encode {excerpt:?}")]
    Encode {
        /// Start of the text.
        excerpt: String,
        /// Error of the tokenizer.
        source: Cause,
    },
    /// Plain text that would have become a control token.
    #[error(
        "the tokenizer turns the plain text {excerpt:?} into the control token {token:?} (id {id}), so text could \
         forge the prompt's structure; use a tokenizer whose control tokens are not reachable from text"
    )]
    ControlInText {
        /// Start of the text.
        excerpt: String,
        /// Literal of the control token.
        token: String,
        /// Id of the control token.
        id: u32,
    },
    /// Token ids that cannot be decoded into text.
    #[error("cannot decode {num_ids} token ids")]
    Decode {
        /// Number of ids.
        num_ids: usize,
        /// Error of the tokenizer.
        source: Cause,
    },
    /// Tokenizer that cannot be written as `tokenizer.json`.
    #[error("the tokenizer cannot be written as tokenizer.json")]
    Unwritable {
        /// Error of the tokenizer.
        source: Cause,
    },
    /// Name that is not a token of this vocabulary.
    #[error(
        "the tokenizer has no token {token:?}, needed as {needed_for}; check that tokenizer and model belong together"
    )]
    UnknownToken {
        /// Literal that was looked up.
        token: String,
        /// Purpose of the token.
        needed_for: String,
    },
    /// Chat template that does not compile, fails, or exceeds its limits.
    #[error("chat template ({origin}): {problem}")]
    Template {
        /// Source of the template.
        origin: String,
        /// Message of the template engine, with line and reason.
        problem: String,
    },
    /// Chat template that needs more work or memory than one may take for a conversation.
    #[error("chat template ({origin}): needs too much work or memory{line}; simplify the template")]
    TemplateWork {
        /// Source of the template.
        origin: String,
        /// " (line 3)", or empty.
        line: String,
    },
    /// Failure of the machine to start a thread. No row is to blame.
    #[error("{what} needs a separate thread, which could not be started; raise the process or memory limit")]
    NoThread {
        /// Work that needs the thread.
        what: String,
        /// Error of the operating system.
        source: omnigrpo_guard::MachineFailure,
    },
    /// Chat template that does not reproduce a part of the conversation verbatim.
    #[error(
        "chat template ({origin}) {problem} (turn {turn}); the template must keep every part of the conversation, so change the turn or the template"
    )]
    TemplateChangesPart {
        /// Source of the template.
        origin: String,
        /// Index of the turn.
        turn: usize,
        /// Problem with the part.
        problem: String,
    },
    /// Mismatch between the media markers that the template wrote and the media of the conversation.
    #[error(
        "the rendered prompt has {got} media marker(s) {marker:?}, expected {expected}, one per medium; the chat template does not fit the model or the row"
    )]
    MarkerCount {
        /// Literal that stands for a medium.
        marker: String,
        /// Number of markers in the template's own output.
        got: usize,
        /// Number of media in the conversation that use this marker.
        expected: usize,
    },
    /// Part that names a missing medium, or medium that no part names.
    #[error("{kind} {index} is used {got} time(s) in the conversation, expected once; media given: {given}")]
    MediumUse {
        /// Kind of the medium.
        kind: MediumKind,
        /// Index among the media of this kind.
        index: usize,
        /// Number of times that the conversation names the medium.
        got: usize,
        /// Number of media of this kind that were given.
        given: usize,
    },
    /// Mismatch between `<image>`, `<video>` or `<audio>` in the text and the row's media.
    #[error(
        "the text has {got} {placeholder} placeholder(s) but the row has {expected} {kind} file(s); write one \
         {placeholder} per file, in order, or none at all to put them before the text"
    )]
    PlaceholderCount {
        /// Kind of the medium.
        kind: MediumKind,
        /// Literal of the placeholder.
        placeholder: &'static str,
        /// Number of placeholders found.
        got: usize,
        /// Number of media of this kind in the row.
        expected: usize,
    },
    /// Conversation that cannot be rendered.
    #[error("conversation: {problem}")]
    Conversation {
        /// Description of the problem.
        problem: &'static str,
    },
    /// Assistant turn after which the template writes no stop token or stop string.
    #[error(
        "the chat template ends assistant turn {turn} with {got:?}, which does not start with a stop token or stop string of the model; a model trained on it would never stop"
    )]
    NoStopAfterAssistant {
        /// Index of the turn.
        turn: usize,
        /// Text that follows the assistant's text.
        got: String,
    },
}
