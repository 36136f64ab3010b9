//! From a conversation to token ids and back.
//!
//! - [`Tokenizer`]: a model's vocabulary; text and control tokens never mix by accident.
//! - [`ChatTemplate`]: the model's Jinja template, run with limits.
//! - [`PromptRenderer`]: turns with text and media → ids, with a [`Span`] for every medium.
//! - [`split_placeholders`]: `<image>`, `<video>`, `<audio>` in a dataset's text → [`Part`]s.
//! - [`StopSet`], [`StopMatcher`]: when a completion ends.
//!
//! Text of a conversation cannot forge structure: the literals of control tokens and media placeholders inside it are
//! encoded as ordinary text. Only what the template itself wrote becomes control tokens.

mod error;
mod files;
mod placeholders;
mod prompt;
mod stop;
mod template;
mod tokenizer;

pub use error::{Result, TextError};
pub use placeholders::{MediaCounts, split_conversation, split_placeholders};
pub use prompt::{
    MediumKind, MediumSegment, MediumTokens, Part, PromptRenderer, RenderOptions, RenderedConversation,
    RenderedPrompt, Role, Span, Turn,
};
pub use stop::{StopHit, StopMatcher, StopSet};
pub use template::{ChatTemplate, TemplateOrigin};
pub use tokenizer::{StreamDecoder, Tokenizer};
