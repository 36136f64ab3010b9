//! The crate's errors: what failed, what was found and expected, where, and what to do.

use std::path::PathBuf;

use crate::MediumKind;

/// Shorthand for results of this crate.
pub type Result<T> = std::result::Result<T, TextError>;

/// Error of another library.
pub type Cause = Box<dyn std::error::Error + Send + Sync>;

/// Everything that can go wrong between a conversation and its token ids.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// A file exists but could not be read.
    #[error("cannot read {path}; check that the file is there and may be read")]
    Read {
        /// The file.
        path: PathBuf,
        /// Error of the system.
        source: std::io::Error,
    },
    /// A file is larger than anything this crate would load.
    #[error(
        "{path} has {got} bytes, more than the {limit} this program reads; check that it is the right file"
    )]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Size in bytes.
        got: u64,
        /// The bound in bytes.
        limit: u64,
    },
    /// A file does not hold what its name promises.
    #[error("{path}: {problem}")]
    BadFile {
        /// The file.
        path: PathBuf,
        /// Problem and expected value.
        problem: String,
        /// Error of the parser, if there is one.
        source: Option<Cause>,
    },
    /// A model directory without any tokenizer that can be loaded.
    #[error(
        "no tokenizer in {dir}: expected tokenizer.json, or vocab.json with merges.txt; copy tokenizer.json from the \
         model's published files, or write it with `AutoTokenizer.from_pretrained(MODEL).save_pretrained(DIR)`"
    )]
    NoTokenizer {
        /// The directory searched.
        dir: PathBuf,
    },
    /// The tokenizer refused a text.
    #[error("cannot encode {excerpt:?}")]
    Encode {
        /// Start of the text.
        excerpt: String,
        /// Error of the tokenizer.
        source: Cause,
    },
    /// Plain text would have become a control token.
    #[error(
        "the tokenizer turns the plain text {excerpt:?} into the control token {token:?} (id {id}), so text could \
         forge the prompt's structure; use a tokenizer whose control tokens are not reachable from text"
    )]
    ControlInText {
        /// Start of the text.
        excerpt: String,
        /// The control token's literal.
        token: String,
        /// Id of the token.
        id: u32,
    },
    /// Token ids could not be turned into text.
    #[error("cannot decode {num_ids} token ids")]
    Decode {
        /// How many ids were given.
        num_ids: usize,
        /// Error of the tokenizer.
        source: Cause,
    },
    /// A name that is no token of this vocabulary.
    #[error(
        "the tokenizer has no token {token:?}, needed as {needed_for}; check that tokenizer and model belong together"
    )]
    UnknownToken {
        /// The literal looked up.
        token: String,
        /// Purpose of the token.
        needed_for: String,
    },
    /// The chat template does not compile, fails, or exceeds its limits.
    #[error("chat template ({origin}): {problem}")]
    Template {
        /// Where the template came from.
        origin: String,
        /// The engine's message with line and reason.
        problem: String,
    },
    /// The machine has no thread left for work that needs one. No row is to blame.
    #[error(
        "{what} needs a thread of its own, and none could be started; raise the limit of processes or of memory"
    )]
    NoThread {
        /// The work that needs it.
        what: String,
        /// The answer of the system.
        source: omnigrpo_guard::MachineFailure,
    },
    /// The chat template does not reproduce a part of the conversation verbatim.
    #[error(
        "chat template ({origin}) {problem} (turn {turn}); a prompt is only used if the template keeps every part, so \
         change the turn or the template"
    )]
    TemplateChangesPart {
        /// Where the template came from.
        origin: String,
        /// Index of the turn.
        turn: usize,
        /// Problem with the part.
        problem: String,
    },
    /// The template wrote another number of media markers than there are media in the conversation.
    #[error(
        "the rendered prompt holds {got} media marker(s) {marker:?}, expected {expected}, one per medium; the chat template does not fit the model or the row"
    )]
    MarkerCount {
        /// The literal that stands for a medium.
        marker: String,
        /// Markers found in the template's own output.
        got: usize,
        /// Media in the conversation that use this marker.
        expected: usize,
    },
    /// A part names a medium that was not given, or a medium was given that no part names.
    #[error("{kind} {index} is used {got} time(s) in the conversation, expected once; media given: {given}")]
    MediumUse {
        /// Kind of the medium.
        kind: MediumKind,
        /// Index among the media of its kind.
        index: usize,
        /// How often the conversation names it.
        got: usize,
        /// How many media of this kind were given.
        given: usize,
    },
    /// `<image>`, `<video>` or `<audio>` in the text do not match the row's media.
    #[error(
        "the text has {got} {placeholder} placeholder(s) but the row has {expected} {kind} file(s); write one \
         {placeholder} per file, in order, or none at all to put them before the text"
    )]
    PlaceholderCount {
        /// Kind of medium.
        kind: MediumKind,
        /// The placeholder's literal.
        placeholder: &'static str,
        /// Placeholders found.
        got: usize,
        /// Media of this kind in the row.
        expected: usize,
    },
    /// A conversation that cannot be rendered at all.
    #[error("conversation: {problem}")]
    Conversation {
        /// Missing part.
        problem: &'static str,
    },
    /// The template ends an assistant turn with nothing that stops generation.
    #[error(
        "the chat template ends assistant turn {turn} with {got:?}, which starts with no stop token or stop string of \
         the model; training on it would teach the model never to stop"
    )]
    NoStopAfterAssistant {
        /// Index of the turn.
        turn: usize,
        /// Text after the assistant's.
        got: String,
    },
}
