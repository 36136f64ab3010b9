//! Conversation → prompt ids with the span of every medium.

use std::fmt;

use crate::{ChatTemplate, Result, StopSet, TextError, Tokenizer};

/// Who speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// Instructions that frame the conversation.
    System,
    /// The person asking.
    User,
    /// The model.
    Assistant,
}

impl Role {
    /// The name chat templates use.
    pub fn as_str(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
        }
    }
}

/// What a medium is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MediumKind {
    /// One still picture.
    Image,
    /// One clip of frames.
    Video,
    /// One sound.
    Audio,
}

impl MediumKind {
    /// The name chat templates use in `{"type": …}`.
    pub fn as_str(self) -> &'static str {
        match self {
            MediumKind::Image => "image",
            MediumKind::Video => "video",
            MediumKind::Audio => "audio",
        }
    }
}

impl fmt::Display for MediumKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A piece of a turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    /// Text, kept verbatim and never read as control tokens.
    Text(String),
    /// A medium.
    Medium {
        /// Its kind.
        kind: MediumKind,
        /// Its index among the media of this kind.
        index: usize,
    },
}

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Turn {
    /// Who speaks.
    pub role: Role,
    /// What is said and shown, in order.
    pub parts: Vec<Part>,
}

impl Turn {
    /// A turn of text only.
    pub fn text(role: Role, text: impl Into<String>) -> Self {
        Turn { role, parts: vec![Part::Text(text.into())] }
    }
}

/// A piece of what a medium becomes in the prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MediumSegment {
    /// Text around features, written by the model family (`<img>`, `Frame1: `): control tokens in it are recognised.
    Text(String),
    /// `count` positions that the medium's features fill.
    Features {
        /// Id written at these positions.
        token: u32,
        /// How many positions.
        count: usize,
    },
}

/// How one medium appears in the prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MediumTokens {
    /// Its kind.
    pub kind: MediumKind,
    /// What the template writes for it (`<|image_pad|>`): replaced by `segments`. Must not be empty.
    pub marker: String,
    /// What stands there instead.
    pub segments: Vec<MediumSegment>,
}

impl MediumTokens {
    /// The common case: the template writes the token `marker` once, and it is repeated `count` times.
    pub fn repeated(kind: MediumKind, marker: impl Into<String>, token: u32, count: usize) -> Self {
        MediumTokens { kind, marker: marker.into(), segments: vec![MediumSegment::Features { token, count }] }
    }
}

/// Where features of a medium stand in the ids: `ids[start..start + len]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Index into the media given to the renderer.
    pub medium: usize,
    /// First position, in tokens.
    pub start: usize,
    /// Positions, in tokens.
    pub len: usize,
}

/// How to render.
#[derive(Debug, Clone, Default)]
pub struct RenderOptions {
    /// Replaces the first system turn, or is put before the conversation if there is none. The template's own default
    /// applies if neither is there.
    pub system: Option<String>,
    /// Ask the template to number media ("Picture 1: "), where it knows how.
    pub add_vision_id: bool,
    /// Further variables for the template.
    pub kwargs: serde_json::Map<String, serde_json::Value>,
    /// The time that `strftime_now` sees. A template that asks for the time without one is an error, so that a prompt
    /// never changes unnoticed between runs.
    pub now: Option<jiff::civil::DateTime>,
}

/// A prompt ready for the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RenderedPrompt {
    /// Token ids, media expanded.
    pub ids: Vec<u32>,
    /// Runs of feature positions in the order they stand in `ids`; a medium with text between its frames has several.
    pub spans: Vec<Span>,
    /// The template's output, each medium still one marker. For people; ids are not made from it again.
    pub text: String,
}

/// A whole conversation with the tokens to train on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RenderedConversation {
    /// Ids, spans and text as for a prompt.
    pub prompt: RenderedPrompt,
    /// One flag per id: true for assistant text and the stop that ends it.
    pub train_mask: Vec<bool>,
}

/// Renders conversations with a model's tokenizer and template.
#[derive(Debug, Clone)]
pub struct PromptRenderer<'a> {
    tokenizer: &'a Tokenizer,
    template: &'a ChatTemplate,
}

impl<'a> PromptRenderer<'a> {
    /// Joins the two.
    pub fn new(tokenizer: &'a Tokenizer, template: &'a ChatTemplate) -> Self {
        PromptRenderer { tokenizer, template }
    }

    /// The prompt that asks for the next assistant turn.
    pub fn render(
        &self,
        turns: &[Turn],
        media: &[MediumTokens],
        options: &RenderOptions,
    ) -> Result<RenderedPrompt> {
        let _ = (self.tokenizer, self.template, turns, media, options);
        Err(TextError::Conversation { problem: "rendering is not built in yet" })
    }

    /// A finished conversation for supervised training.
    pub fn render_conversation(
        &self,
        turns: &[Turn],
        media: &[MediumTokens],
        options: &RenderOptions,
        stops: &StopSet,
    ) -> Result<RenderedConversation> {
        let _ = (turns, media, options, stops);
        Err(TextError::Conversation { problem: "rendering is not built in yet" })
    }
}
