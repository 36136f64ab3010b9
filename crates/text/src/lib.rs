//! Conversion between conversations and token ids.
//!
//! - [`Tokenizer`]: a model's vocabulary; it keeps text and control tokens apart.
//! - [`ChatTemplate`]: the model's Jinja template, run with limits.
//! - [`PromptRenderer`]: turns with text and media → ids, with a [`Span`] for every medium.
//! - [`split_placeholders`]: `<image>`, `<video>`, `<audio>` in a dataset's text → [`Part`]s.
//! - [`tool_calls`]: the calls of tools in a completion.
//! - [`StopSet`], [`StopMatcher`]: detection of the end of a completion.
//!
//! Text of a conversation cannot forge structure: the literals of control tokens and media placeholders inside it are encoded as
//! ordinary text. Only literals that the template itself wrote become control tokens.
//!
//! ```no_run
//! # use omnigrpo_text::*;
//! # fn main() -> Result<()> {
//! let dir = std::path::Path::new("Qwen2-VL-2B-Instruct");
//! let (tokenizer, template) = (Tokenizer::from_dir(dir)?, ChatTemplate::from_dir(dir)?);
//! let parts = split_placeholders("<image>\nHow many cubes?", [(MediumKind::Image, 1)].into())?;
//! let image = MediumTokens::repeated(MediumKind::Image, "<|image_pad|>", 151_655, 64);
//! let turns = [Turn { role: Role::User, parts }];
//! let prompt = PromptRenderer::new(&tokenizer, &template).render(&turns, &[image], &RenderOptions::default())?;
//! assert_eq!(prompt.spans[0].len, 64);
//! # Ok(())
//! # }
//! ```

mod charsmap;
mod error;
mod files;
mod kinds;
mod placeholders;
mod prompt;
mod stop;
mod template;
mod tokenizer;
mod tools;

pub use error::{Cause, Result, TextError};
pub use kinds::{Form, MediumKind, PerKind};
pub use placeholders::{split_conversation, split_placeholders};
pub use prompt::{
    MediumSegment, MediumTokens, Part, PromptRenderer, RenderOptions, RenderedConversation, RenderedPrompt,
    RenderedTurn, Role, Span, Turn, with_system,
};
pub use stop::{StopHit, StopMatcher, StopSet};
pub use template::{ChatTemplate, RENDER_STACK_BYTES, TemplateOrigin, render_on_this_thread};
pub use tokenizer::{StreamDecoder, Tokenizer};
pub use tools::{ToolCall, split_calls, tool_calls};
