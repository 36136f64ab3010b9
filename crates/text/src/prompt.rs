//! Renderer from a conversation to prompt ids, with the span of every medium.
//!
//! The template runs with a private stand-in for every text. Everything around the stand-ins was written by the template itself.
//! Only there do literals of control tokens become control tokens, and media markers become media. Then the texts replace their
//! stand-ins. Everything between two control tokens is encoded as one string. A word whose bytes come partly from the template
//! and partly from a text therefore merges as it would in `transformers`.
//!
//! Two guarantees follow, and both are tested. First, no text can forge structure. Second, for texts without such literals the
//! ids equal those of `transformers`. If a model spells its turn end in ordinary tokens (Aria), the first guarantee does not
//! cover that literal.
//!
//! Two kinds of template are errors: one that drops, repeats or changes a text (other than trimming white space at its ends), and
//! one whose own output differs between the stand-ins and the texts themselves. In a prompt, a template may read the tags of an
//! earlier answer, such as `</think>`, and drop what comes before them.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;

use serde_json::{Value, json};

use crate::template::ContentForm;
use crate::tokenizer::{Run, excerpt};
use crate::tools::{DEFAULT_SYSTEM, RESPONSE, described};
use crate::{ChatTemplate, MediumKind, Result, StopSet, TextError, Tokenizer, ToolCall};

/// Speaker of a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// Author of the instructions that frame the conversation.
    System,
    /// Person who asks.
    User,
    /// Model that answers.
    Assistant,
    /// Tool that answers a call of the model.
    Tool,
}

impl Role {
    /// Returns the name used in chat templates.
    pub fn as_str(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::Tool => "tool",
        }
    }
}

/// Part of a turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    /// Text, which stays verbatim and is never read as control tokens.
    Text(String),
    /// Reference to a medium.
    Medium {
        /// Kind of the medium.
        kind: MediumKind,
        /// Index among the media of this kind.
        index: usize,
    },
    /// Call of a tool in a turn of the model, which the template writes in its own format.
    Call(ToolCall),
}

/// Message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Turn {
    /// Speaker of the turn.
    pub role: Role,
    /// Texts and media in order.
    pub parts: Vec<Part>,
}

impl Turn {
    /// Creates a turn that contains only text.
    pub fn text(role: Role, text: impl Into<String>) -> Self {
        Turn { role, parts: vec![Part::Text(text.into())] }
    }

    /// Returns the text of the turn, without its media. Calls of tools are written as Hermes and Qwen2.5 write them.
    pub fn written(&self) -> String {
        let mut text = String::new();
        for part in &self.parts {
            match part {
                Part::Text(own) => text.push_str(own),
                Part::Medium { .. } => {}
                Part::Call(call) => {
                    let gap = if text.is_empty() { "" } else { "\n" };
                    text.push_str(&format!("{gap}{call}"));
                }
            }
        }
        text
    }

    /// Returns the calls of tools in the turn.
    fn calls(&self) -> Vec<ToolCall> {
        let call = |part: &Part| if let Part::Call(call) = part { Some(call.clone()) } else { None };
        self.parts.iter().filter_map(call).collect()
    }
}

/// Segment of a medium in the prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MediumSegment {
    /// Text around features, written by the model family (`<img>`, `Frame1: `). Control tokens in it are recognised.
    Text(String),
    /// Run of `count` positions for the medium's features.
    Features {
        /// Token id at these positions.
        token: u32,
        /// Number of positions.
        count: usize,
    },
    /// Run of `count` positions for the features of the medium that follows in the conversation ([`MediumTokens::inside`]).
    Inner {
        /// Token id at these positions.
        token: u32,
        /// Number of positions.
        count: usize,
    },
}

/// Representation of one medium in the prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MediumTokens {
    /// Kind of the medium.
    pub kind: MediumKind,
    /// Text that the template writes for the medium (`<|image_pad|>`). It is replaced by `segments`. It is empty for a medium
    /// that is shown inside the one before it, such as the sound of a clip.
    pub marker: String,
    /// Segments that replace the marker.
    pub segments: Vec<MediumSegment>,
}

impl MediumTokens {
    /// Describes the common case, in which the template writes the token `marker` once and it is replaced by `count` copies of
    /// `token`.
    pub fn repeated(kind: MediumKind, marker: impl Into<String>, token: u32, count: usize) -> Self {
        MediumTokens { kind, marker: marker.into(), segments: vec![MediumSegment::Features { token, count }] }
    }

    /// Describes a medium that directly follows another one in the conversation and is shown inside it, by segments
    /// [`MediumSegment::Inner`] of that one.
    pub fn inside(kind: MediumKind) -> Self {
        MediumTokens { kind, marker: String::new(), segments: Vec::new() }
    }

    /// Returns true for [`Self::inside`].
    pub fn is_inside(&self) -> bool {
        self.marker.is_empty()
    }

    fn has_inner(&self) -> bool {
        self.segments.iter().any(|segment| matches!(segment, MediumSegment::Inner { .. }))
    }
}

/// Position of a medium's features in the ids: `ids[start..start + len]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Index into the media passed to the renderer.
    pub medium: usize,
    /// First position, tokens.
    pub start: usize,
    /// Number of positions, tokens.
    pub len: usize,
}

/// Options for rendering a prompt.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize)]
pub struct RenderOptions {
    /// System prompt. It replaces the first system turn, or becomes a new first turn. Without it and without a system turn, the
    /// template's own default applies.
    pub system: Option<String>,
    /// Tools that the model may call, in the format of OpenAI: `{"type": "function", "function": {…}}`. The template describes
    /// them if it reads `tools`, else the end of the system turn does.
    pub tools: Vec<Value>,
    /// Flag that makes the template number media ("Picture 1: "), if it supports that.
    pub add_vision_id: bool,
    /// Additional variables for the template.
    pub kwargs: serde_json::Map<String, serde_json::Value>,
    /// Time returned by `strftime_now`. If it is `None`, a template that reads the time fails, so that a prompt never changes
    /// unnoticed between runs.
    pub now: Option<jiff::civil::DateTime>,
}

/// Prompt ready for the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RenderedPrompt {
    /// Token ids with expanded media.
    pub ids: Vec<u32>,
    /// Spans of feature positions, in the order of `ids`. A medium with text between its frames has several spans.
    pub spans: Vec<Span>,
    /// Output of the template, with one marker per medium. It is meant for people; ids are not computed from it.
    pub text: String,
}

/// Turn that follows a turn of the model, with the start of the model's next turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RenderedTurn {
    /// Ids, spans and text as for a prompt. They begin after the stop of the model's turn.
    pub prompt: RenderedPrompt,
    /// Stop of the model's turn before it, such as `<|im_end|>`.
    pub after: String,
}

/// Whole conversation with a mask of the tokens to train on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RenderedConversation {
    /// Ids, spans and text as for a prompt.
    pub prompt: RenderedPrompt,
    /// Training mask with one flag per id: true for assistant text and the stop that ends it.
    pub train_mask: Vec<bool>,
}

/// Renderer of conversations with a model's tokenizer and template.
#[derive(Debug, Clone, Copy)]
pub struct PromptRenderer<'a> {
    tokenizer: &'a Tokenizer,
    template: &'a ChatTemplate,
}

impl<'a> PromptRenderer<'a> {
    /// Creates a renderer from a tokenizer and a template.
    pub fn new(tokenizer: &'a Tokenizer, template: &'a ChatTemplate) -> Self {
        PromptRenderer { tokenizer, template }
    }

    /// Renders the prompt for the next assistant turn. Exactly one part must name each medium.
    ///
    /// # Errors
    /// Returns [`TextError::Conversation`] if there are no turns or the last turn is the assistant's. Also returns
    /// [`TextError::MediumUse`], [`TextError::MarkerCount`], [`TextError::Template`], [`TextError::TemplateChangesPart`],
    /// [`TextError::Encode`] and [`TextError::ControlInText`].
    pub fn render(
        &self,
        turns: &[Turn],
        media: &[MediumTokens],
        options: &RenderOptions,
    ) -> Result<RenderedPrompt> {
        if turns.last().is_some_and(|turn| turn.role == Role::Assistant) {
            return Err(TextError::Conversation {
                problem: "ends with an assistant turn, expected a user turn",
            });
        }
        let output = self.output(turns, media, options, true)?;
        let (prompt, _) = self.encode(&output, 0, media, &[])?;
        Ok(prompt)
    }

    /// Renders a finished conversation for supervised training. The mask covers the text of every assistant turn and the stop
    /// token or stop string after it, but not a line break after the stop. These are exactly the tokens of a sampled completion.
    /// Encoding restarts where assistant text starts, as it does when a completion is sampled after a prompt.
    ///
    /// # Errors
    /// Returns the errors of [`render`](Self::render), except that the last turn may be the assistant's. Returns
    /// [`TextError::Conversation`] if there is no assistant turn, or if one contains media. Returns
    /// [`TextError::NoStopAfterAssistant`] if no stop follows an assistant turn.
    pub fn render_conversation(
        &self,
        turns: &[Turn],
        media: &[MediumTokens],
        options: &RenderOptions,
        stops: &StopSet,
    ) -> Result<RenderedConversation> {
        let shows_media = |turn: &Turn| turn.parts.iter().any(|part| matches!(part, Part::Medium { .. }));
        if turns.iter().any(|turn| turn.role == Role::Assistant && shows_media(turn)) {
            return Err(TextError::Conversation {
                problem: "has media in an assistant turn, which cannot be trained on",
            });
        }
        let output = self.output(turns, media, options, false)?;
        let mut trained = Vec::new();
        for text in output.texts.iter().filter(|text| text.role == Role::Assistant) {
            trained.push(text.range.start..self.end_of_stop(&output, text, stops)?);
        }
        if trained.is_empty() {
            return Err(TextError::Conversation { problem: "has no assistant turn to train on" });
        }
        let (prompt, train_mask) = self.encode(&output, 0, media, &trained)?;
        Ok(RenderedConversation { prompt, train_mask })
    }

    /// Renders turns that answer the model in the middle of a completion, up to the start of the model's next turn. The turns
    /// before them do not change a token of them. If the template has no place for a tool's answer, it becomes a user turn.
    ///
    /// A template may rewrite a tool's text, for example as JSON. Its output is then encoded as one string, in which a space
    /// breaks the literals of control tokens that come from the text.
    ///
    /// # Errors
    /// Returns the errors of [`render`](Self::render). Returns [`TextError::NoStopAfterAssistant`] if the template writes no stop
    /// after a turn of the model.
    pub fn render_turns(
        &self,
        turns: &[Turn],
        media: &[MediumTokens],
        options: &RenderOptions,
        stops: &StopSet,
    ) -> Result<RenderedTurn> {
        let asked = [Turn::text(Role::User, "?"), Turn::text(Role::Assistant, "!")];
        let turns: Vec<Turn> = asked.into_iter().chain(turns.iter().cloned()).collect();
        let output = match self.output(&turns, media, options, true) {
            Err(TextError::TemplateChangesPart { .. }) => {
                self.output_of(&self.defused(&turns), media, options, true, true)?
            }
            output => output?,
        };
        let model = output.texts.iter().find(|text| text.role == Role::Assistant);
        let model = model.ok_or_else(|| self.changed(1, "drops or changes a text".to_owned()))?;
        let end = self.end_of_stop(&output, model, stops)?;
        let after = output.string[model.range.end..end].trim_start().to_owned();
        let (mut prompt, _) = self.encode(&output, end, media, &[])?;
        prompt.text.drain(..end);
        Ok(RenderedTurn { prompt, after })
    }

    /// Returns the white space that the template writes between the start of the model's turn, where a prompt ends, and the text
    /// of a turn. It belongs to what the model says. Text other than white space, such as an empty thought, does not count.
    pub fn answer_lead(&self, options: &RenderOptions) -> String {
        let asked = Turn::text(Role::User, "?");
        let whole = [asked.clone(), Turn::text(Role::Assistant, "!")];
        let lead = || -> Result<Option<String>> {
            let prompt = self.output(&[asked], &[], options, true)?.string;
            let whole = self.output(&whole, &[], options, false)?;
            let said = whole.texts.iter().find(|text| text.role == Role::Assistant);
            let lead = said.and_then(|said| whole.string[..said.range.start].strip_prefix(&prompt));
            Ok(lead.filter(|lead| lead.trim().is_empty()).map(str::to_owned))
        };
        // A template that refuses this conversation reports it for the row.
        lead().ok().flatten().unwrap_or_default()
    }

    /// Returns the text of a turn of the model, with its calls of tools in the format of the template.
    pub fn said(&self, turn: &Turn) -> String {
        let calls = turn.calls();
        let texts = turn.parts.iter().filter(|part| matches!(part, Part::Text(_))).cloned().collect();
        let said = || Turn { role: turn.role, parts: texts };
        let written =
            (!calls.is_empty()).then(|| self.template.with_calls(&said().written(), &calls)).flatten();
        written.unwrap_or_else(|| turn.written())
    }

    /// Returns turns whose calls of tools are texts.
    fn with_said(&self, turns: Vec<Turn>) -> Vec<Turn> {
        let said = |turn: Turn| match turn.calls().is_empty() {
            true => turn,
            false => Turn::text(turn.role, self.said(&turn)),
        };
        turns.into_iter().map(said).collect()
    }

    /// Returns turns in whose texts a space breaks the literals of control tokens.
    fn defused(&self, turns: &[Turn]) -> Vec<Turn> {
        let part = |part: &Part| match part {
            Part::Text(own) => Part::Text(self.tokenizer.defused(own)),
            other => other.clone(),
        };
        let turn = |turn: &Turn| Turn { role: turn.role, parts: turn.parts.iter().map(part).collect() };
        turns.iter().map(turn).collect()
    }

    /// Renders the texts of a finished conversation for another model, such as a reward model. Media are left out.
    ///
    /// A template may rewrite a text; for example, Qwen3's template separates the thinking from an answer. Its output is then
    /// encoded as one string. The literals of control tokens in the texts are broken by a space, so that they still cannot forge
    /// structure.
    ///
    /// # Errors
    /// Returns [`TextError::Conversation`] if there are no turns. Also returns [`TextError::Template`], [`TextError::Encode`] and
    /// [`TextError::ControlInText`].
    pub fn render_finished(&self, turns: &[Turn], options: &RenderOptions) -> Result<RenderedPrompt> {
        let said = |turn: &Turn| {
            let parts = turn.parts.iter().filter(|part| !matches!(part, Part::Medium { .. }));
            Turn { role: turn.role, parts: parts.cloned().collect() }
        };
        let turns = self.with_said(turns.iter().map(said).collect());
        match self.output(&turns, &[], options, false) {
            Err(TextError::TemplateChangesPart { .. }) => {
                let turns = with_system(&self.defused(&turns), options.system.as_deref());
                let turns = self.with_tools(turns, options);
                let variables = self.variables(options);
                let text = self.template.run(
                    &self.messages(&turns, &[], &[], &self.tools_of_system(options), None),
                    false,
                    &variables,
                    options.now,
                )?;
                Ok(RenderedPrompt {
                    ids: self.tokenizer.encode_control(&text, &[])?,
                    spans: Vec::new(),
                    text,
                })
            }
            output => Ok(self.encode(&output?, 0, &[], &[])?.0),
        }
    }

    /// Returns the template's variables other than the messages.
    fn variables(&self, options: &RenderOptions) -> serde_json::Map<String, Value> {
        let mut variables: serde_json::Map<String, Value> =
            self.tokenizer.named_tokens().iter().map(|(name, token)| (name.clone(), json!(token))).collect();
        if options.add_vision_id {
            variables.insert("add_vision_id".to_owned(), Value::Bool(true));
        }
        if !options.tools.is_empty() && self.template.writes_tools() {
            variables.insert("tools".to_owned(), Value::Array(options.tools.clone()));
        }
        variables.extend(options.kwargs.iter().map(|(name, value)| (name.clone(), value.clone())));
        variables
    }

    /// Runs the template and locates every text and medium in its output.
    fn output(
        &self,
        turns: &[Turn],
        media: &[MediumTokens],
        options: &RenderOptions,
        add_generation_prompt: bool,
    ) -> Result<Output> {
        self.output_of(turns, media, options, add_generation_prompt, false)
    }

    /// Runs the template as [`Self::output`] does. If it `rewrites`, only texts of the model are located, and the others count as
    /// written by the template.
    fn output_of(
        &self,
        turns: &[Turn],
        media: &[MediumTokens],
        options: &RenderOptions,
        add_generation_prompt: bool,
        rewrites: bool,
    ) -> Result<Output> {
        if turns.is_empty() {
            return Err(TextError::Conversation { problem: "has no turns" });
        }
        let turns = self.with_said(self.with_tools(with_system(turns, options.system.as_deref()), options));
        let media_in_order = media_in_order(&turns, media)?;

        let variables = self.variables(options);
        let run =
            |messages: &Value| self.template.run(messages, add_generation_prompt, &variables, options.now);
        let tools = self.tools_of_system(options);

        let with_stand_ins = |answers: Answers| {
            let mut stand_ins = StandIns::absent_from(self.template.source(), &variables, answers, rewrites);
            let marked = self.messages(&turns, &media_in_order, media, &tools, Some(&mut stand_ins));
            // Conversations of the same form have the same stand-ins.
            let marked =
                self.template.run_remembered(marked, add_generation_prompt, &variables, options.now)?;
            stand_ins.resolve(&marked).map_err(|(turn, problem)| self.changed(turn, problem))
        };
        let plain = run(&self.messages(&turns, &media_in_order, media, &tools, None))?;
        let mut output = with_stand_ins(Answers::Whole)?;
        if output.string != plain && turns.iter().any(|turn| turn.role == Role::Assistant) {
            output = with_stand_ins(Answers::Trimmed)?;
            if output.string != plain && add_generation_prompt {
                let source = self.template.source();
                let harmless = |tag: &&str| {
                    let marks = |medium: &MediumTokens| tag.contains(&medium.marker);
                    self.tokenizer.defused(tag) == **tag && !media.iter().any(marks)
                };
                let read: HashSet<&str> = tags(source).map(|tag| &source[tag]).filter(harmless).collect();
                let pieces = with_stand_ins(Answers::Pieces(&read));
                output = pieces.ok().filter(|pieces| pieces.string == plain).unwrap_or(output);
            }
        }
        if output.string != plain {
            let same = output.string.bytes().zip(plain.bytes()).take_while(|(a, b)| a == b).count();
            let turn = output.texts.iter().take_while(|t| t.range.start <= same).last().map_or(0, |t| t.turn);
            let problem = "writes different output depending on the content of a text".to_owned();
            return Err(self.changed(turn, problem));
        }
        let inner = inner_media(&media_in_order, media)?;
        let markers = find_markers(&output, &media_in_order, media)?;
        Ok(Output { markers, inner, ..output })
    }

    /// Returns the text that describes the tools in the system turn; empty if there are none or the template describes them.
    fn tools_of_system(&self, options: &RenderOptions) -> String {
        let by_system = !options.tools.is_empty() && !self.template.writes_tools();
        if by_system { described(&options.tools) } else { String::new() }
    }

    /// Adds a system turn if it must describe tools and there is none.
    fn with_tools(&self, turns: Vec<Turn>, options: &RenderOptions) -> Vec<Turn> {
        let missing =
            !self.tools_of_system(options).is_empty() && turns.iter().all(|turn| turn.role != Role::System);
        if missing { with_system(&turns, Some(DEFAULT_SYSTEM)) } else { turns }
    }

    fn changed(&self, turn: usize, problem: String) -> TextError {
        TextError::TemplateChangesPart { origin: self.template.origin().to_string(), turn, problem }
    }

    /// Returns the messages for a template, with either the texts or their stand-ins.
    fn messages(
        &self,
        turns: &[Turn],
        media_in_order: &[usize],
        media: &[MediumTokens],
        tools: &str,
        mut stand_ins: Option<&mut StandIns>,
    ) -> Value {
        let mut media_in_order = media_in_order.iter();
        let mut messages: Vec<Value> = Vec::with_capacity(turns.len());
        let mut tools = Some(tools).filter(|tools| !tools.is_empty());
        for (t, turn) in turns.iter().enumerate() {
            let role = self.template.role(turn.role);
            let form = self.template.form(role);
            let mut parts = Vec::new();
            let mut string = String::new();
            // Text around the texts of a turn, which counts as written by the template.
            let [before, after] = match turn.role {
                Role::Tool if role == Role::User => RESPONSE,
                Role::System => ["", tools.take().unwrap_or_default()],
                _ => ["", ""],
            };
            let frame = |text: &str, parts: &mut Vec<Value>, string: &mut String| {
                if !text.is_empty() {
                    string.push_str(text);
                    parts.push(json!({"type": "text", "text": text}));
                }
            };
            frame(before, &mut parts, &mut string);
            for part in merge_assistant_text(turn) {
                let text = match part {
                    Part::Medium { kind, .. } => {
                        if let Some(&medium) = media_in_order.next() {
                            if media[medium].is_inside() {
                                continue;
                            }
                            string.push_str(&media[medium].marker);
                        }
                        parts.push(json!({"type": kind.form().content_type()}));
                        continue;
                    }
                    Part::Text(text) => text,
                    Part::Call(call) => call.to_string(),
                };
                let shown = match &mut stand_ins {
                    Some(stand_ins) => stand_ins.stand_for(t, turn.role, &text),
                    None => text,
                };
                string.push_str(&shown);
                parts.push(json!({"type": "text", "text": shown}));
            }
            frame(after, &mut parts, &mut string);
            // Answers of tools that follow each other share a user turn.
            let shares =
                turn.role == Role::Tool && role == Role::User && t > 0 && turns[t - 1].role == Role::Tool;
            match messages.last_mut().filter(|_| shares).map(|message| &mut message["content"]) {
                Some(Value::Array(earlier)) => {
                    earlier.push(json!({"type": "text", "text": "\n"}));
                    earlier.extend(parts);
                }
                Some(Value::String(earlier)) => earlier.push_str(&format!("\n{string}")),
                _ => {
                    let content = match form {
                        ContentForm::Parts => Value::Array(parts),
                        ContentForm::Text => Value::String(string),
                    };
                    messages.push(json!({"role": role.as_str(), "content": content}));
                }
            }
        }
        Value::Array(messages)
    }

    /// Returns the end of the stop after an assistant text, in bytes of the output.
    fn end_of_stop(&self, output: &Output, text: &TextRange, stops: &StopSet) -> Result<usize> {
        let rest = &output.string[text.range.end..];
        let literals =
            stops.ids.iter().filter_map(|&id| self.tokenizer.token(id)).chain(stops.strings.iter().cloned());
        let space = rest.len() - rest.trim_start().len();
        let longest =
            literals.filter(|stop| rest[space..].starts_with(stop.as_str())).map(|stop| stop.len()).max();
        match longest {
            Some(len) => Ok(text.range.end + space + len),
            None => Err(TextError::NoStopAfterAssistant { turn: text.turn, got: excerpt(rest) }),
        }
    }

    /// Encodes the output from byte `from` and returns the prompt with its training mask. `trained` contains byte ranges of the
    /// output, in order.
    fn encode(
        &self,
        output: &Output,
        from: usize,
        media: &[MediumTokens],
        trained: &[Range<usize>],
    ) -> Result<(RenderedPrompt, Vec<bool>)> {
        let mut placeholders = HashSet::new();
        for medium in media {
            placeholders.extend(self.tokenizer.token_id(&medium.marker));
            placeholders.extend(medium.segments.iter().filter_map(|segment| match segment {
                MediumSegment::Features { token, .. } | MediumSegment::Inner { token, .. } => Some(*token),
                MediumSegment::Text(_) => None,
            }));
        }
        let placeholders: Vec<u32> = placeholders.into_iter().collect();

        let mut prompt = RenderedPrompt { ids: Vec::new(), spans: Vec::new(), text: output.string.clone() };
        let mut mask = Vec::new();
        let mut at = from;
        let cuts = trained.iter().flat_map(|range| [(range.start, false), (range.end, true)]);
        for (end, is_trained) in cuts.chain([(output.string.len(), false)]) {
            let encoded = self.tokenizer.encode_runs(&output.runs(at..end, media), &placeholders)?;
            let first = prompt.ids.len();
            prompt.ids.extend(&encoded.ids);
            let holes = encoded.holes.into_iter();
            prompt.spans.extend(holes.map(|(medium, start, len)| Span { medium, start: first + start, len }));
            mask.resize(prompt.ids.len(), is_trained);
            at = end;
        }
        Ok((prompt, mask))
    }
}

/// Output of a template, with the texts in place of their stand-ins.
#[derive(Debug)]
struct Output {
    string: String,
    /// Texts in order of position, without overlaps.
    texts: Vec<TextRange>,
    /// Markers as (range, index of the medium), in order of position.
    markers: Vec<(Range<usize>, usize)>,
    /// Index of the medium inside a medium, by the latter's index.
    inner: BTreeMap<usize, usize>,
}

/// Position of a text. The range may exclude white space at the ends of the text.
#[derive(Debug)]
struct TextRange {
    turn: usize,
    role: Role,
    range: Range<usize>,
}

impl Output {
    /// Splits a stretch of the output into runs. It must not begin or end inside a marker.
    fn runs(&self, stretch: Range<usize>, media: &[MediumTokens]) -> Vec<Run> {
        let mut runs = Vec::new();
        let trusted = |range: Range<usize>, runs: &mut Vec<Run>| {
            if !range.is_empty() {
                runs.push(Run::Trusted(self.string[range].to_owned()));
            }
        };
        let mut at = stretch.start;
        let texts = self.texts.iter().map(|text| (text.range.clone(), None));
        let markers = self.markers.iter().map(|(range, medium)| (range.clone(), Some(*medium)));
        let mut fixed: Vec<_> = texts.chain(markers).collect();
        fixed.sort_by_key(|(range, _)| (range.start, range.end));
        for (range, medium) in fixed {
            if range.start < stretch.start || range.end > stretch.end {
                continue;
            }
            trusted(at..range.start, &mut runs);
            match medium {
                None => runs.push(Run::Plain(self.string[range.clone()].to_owned())),
                Some(medium) => runs.extend(media[medium].segments.iter().map(|segment| match segment {
                    MediumSegment::Text(text) => Run::Trusted(text.clone()),
                    &MediumSegment::Features { token, count } => Run::Hole { medium, token, count },
                    &MediumSegment::Inner { token, count } => {
                        Run::Hole { medium: self.inner.get(&medium).copied().unwrap_or(medium), token, count }
                    }
                })),
            }
            at = range.end;
        }
        trusted(at..stretch.end, &mut runs);
        runs
    }
}

/// Returns true if a text or a name inside a value contains a text.
fn contains(value: &Value, text: &str) -> bool {
    match value {
        Value::String(own) => own.contains(text),
        Value::Array(items) => items.iter().any(|item| contains(item, text)),
        Value::Object(fields) => {
            fields.iter().any(|(name, value)| name.contains(text) || contains(value, text))
        }
        _ => false,
    }
}

/// Private strings that stand for texts while the template runs.
struct StandIns<'a> {
    nonce: String,
    answers: Answers<'a>,
    /// Whether only texts of the model have stand-ins.
    only_assistant: bool,
    texts: Vec<StandIn>,
}

/// Form of the stand-ins of the model's texts.
#[derive(Clone, Copy)]
enum Answers<'a> {
    /// One for the text with the white space at its ends, so that the start of the text is known to the byte.
    Whole,
    /// One for the text without that white space, for templates that trim it.
    Trimmed,
    /// One for each piece between two tags, for templates that take thoughts out of earlier answers. The tags are those in the
    /// source of the template. They stay visible, so none contains a control token or the marker of a medium.
    Pieces(&'a HashSet<&'a str>),
}

struct StandIn {
    turn: usize,
    role: Role,
    text: String,
    /// Whether the template may drop the text, because a tag follows it.
    may_be_dropped: bool,
}

const OPEN: char = '\u{E000}';
const CLOSE: char = '\u{E001}';

impl<'a> StandIns<'a> {
    /// Creates stand-ins that occur neither in a template nor in its variables, which contain everything else that it may write.
    fn absent_from(
        source: &str,
        variables: &serde_json::Map<String, Value>,
        answers: Answers<'a>,
        only_assistant: bool,
    ) -> Self {
        let mut nonce = 0u64;
        let occurs = |text: &str| {
            source.contains(text)
                || variables.iter().any(|(name, value)| name.contains(text) || contains(value, text))
        };
        while occurs(&format!("{OPEN}{nonce}.")) {
            nonce += 1;
        }
        StandIns { nonce: format!("{OPEN}{nonce}."), answers, only_assistant, texts: Vec::new() }
    }

    /// Returns the stand-in of a text. White space at the ends stays visible, so that a template trims it as it would trim the
    /// text. An empty text stays empty, so that a template can test for it. Assistant texts follow [`Answers`].
    fn stand_for(&mut self, turn: usize, role: Role, text: &str) -> String {
        match (role, self.answers) {
            (Role::Assistant, Answers::Whole) => self.stand_in(turn, role, text, false),
            (Role::Assistant, Answers::Trimmed) => self.stand_in(turn, role, text.trim(), false),
            (Role::Assistant, Answers::Pieces(read)) => {
                let (mut shown, mut at) = (String::new(), 0);
                for tag in tags(text).filter(|tag| read.contains(&text[tag.clone()])) {
                    if tag.start < at {
                        continue;
                    }
                    shown += &self.stand_in_core(turn, role, &text[at..tag.start], true);
                    shown += &text[tag.clone()];
                    at = tag.end;
                }
                shown + &self.stand_in_core(turn, role, &text[at..], false)
            }
            _ if self.only_assistant => text.to_owned(),
            _ => self.stand_in_core(turn, role, text, false),
        }
    }

    /// Returns a text with a stand-in for all but the white space at its ends.
    fn stand_in_core(&mut self, turn: usize, role: Role, text: &str, may_be_dropped: bool) -> String {
        let core = text.trim();
        if core.is_empty() {
            return text.to_owned();
        }
        let lead = &text[..text.len() - text.trim_start().len()];
        let trail = &text[lead.len() + core.len()..];
        format!("{lead}{}{trail}", self.stand_in(turn, role, core, may_be_dropped))
    }

    fn stand_in(&mut self, turn: usize, role: Role, text: &str, may_be_dropped: bool) -> String {
        self.texts.push(StandIn { turn, role, text: text.to_owned(), may_be_dropped });
        format!("{}{}{CLOSE}", self.nonce, self.texts.len() - 1)
    }

    /// Replaces the stand-ins by their texts. The error contains the turn and a description.
    fn resolve(&self, marked: &str) -> std::result::Result<Output, (usize, String)> {
        let mut output = Output {
            string: String::with_capacity(marked.len()),
            texts: Vec::new(),
            markers: Vec::new(),
            inner: BTreeMap::new(),
        };
        let mut seen = vec![0usize; self.texts.len()];
        let mut rest = marked;
        while let Some(open) = rest.find(&self.nonce) {
            let (before, after) = rest.split_at(open);
            output.string.push_str(before);
            let after = &after[self.nonce.len()..];
            let known = after.split_once(CLOSE).and_then(|(index, after)| {
                let index: usize = index.parse().ok()?;
                Some((index, self.texts.get(index)?, after))
            });
            let Some((index, text, after)) = known else {
                return Err((0, "cuts a text".to_owned()));
            };
            seen[index] += 1;
            let start = output.string.len();
            output.string.push_str(&text.text);
            output.texts.push(TextRange {
                turn: text.turn,
                role: text.role,
                range: start..output.string.len(),
            });
            rest = after;
        }
        output.string.push_str(rest);
        let wrong = |(text, &times): (&StandIn, &usize)| times > 1 || (times == 0 && !text.may_be_dropped);
        match self.texts.iter().zip(&seen).position(wrong) {
            Some(k) if seen[k] == 0 => Err((self.texts[k].turn, "drops or changes a text".to_owned())),
            Some(k) => Err((self.texts[k].turn, format!("writes a text {} times", seen[k]))),
            None => Ok(output),
        }
    }
}

/// Returns the parts of a text that have the form of a tag, such as `</think>` and `[/THINK]`.
fn tags(text: &str) -> impl Iterator<Item = Range<usize>> {
    /// Length of the longest tag, in bytes.
    const LONGEST: usize = 32;
    let end_of = |start: usize, open: u8| {
        let (bytes, close) = (&text.as_bytes()[start + 1..], if open == b'<' { b'>' } else { b']' });
        let inside =
            bytes.iter().take(LONGEST).position(|&b| b == close || b == open || b.is_ascii_whitespace());
        inside.filter(|&at| bytes[at] == close).map(|at| start..start + at + 2)
    };
    let opens = text.bytes().enumerate().filter(|(_, byte)| matches!(byte, b'<' | b'['));
    opens.filter_map(move |(start, open)| end_of(start, open))
}

/// Replaces the first system turn, or inserts one at the start.
pub fn with_system(turns: &[Turn], system: Option<&str>) -> Vec<Turn> {
    let mut turns = turns.to_vec();
    if let Some(system) = system {
        let system = Turn::text(Role::System, system);
        match turns.iter_mut().find(|turn| turn.role == Role::System) {
            Some(turn) => *turn = system,
            None => turns.insert(0, system),
        }
    }
    turns
}

/// Returns the indices into `media` in the order of the conversation, each exactly once.
fn media_in_order(turns: &[Turn], media: &[MediumTokens]) -> Result<Vec<usize>> {
    let mut of_kind: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (m, medium) in media.iter().enumerate() {
        of_kind.entry(medium.kind.as_str()).or_default().push(m);
    }
    let mut uses = vec![0usize; media.len()];
    let mut order = Vec::with_capacity(media.len());
    let wrong = |kind: MediumKind, index: usize, got: usize| {
        let given = of_kind.get(kind.as_str()).map_or(0, Vec::len);
        TextError::MediumUse { kind, index, got, given }
    };
    for part in turns.iter().flat_map(|turn| &turn.parts) {
        if let &Part::Medium { kind, index } = part {
            let Some(&m) = of_kind.get(kind.as_str()).and_then(|list| list.get(index)) else {
                return Err(wrong(kind, index, 1));
            };
            uses[m] += 1;
            order.push(m);
        }
    }
    for (m, &got) in uses.iter().enumerate() {
        if got != 1 {
            let kind = media[m].kind;
            let index = media[..m].iter().filter(|other| other.kind == kind).count();
            return Err(wrong(kind, index, got));
        }
    }
    Ok(order)
}

/// Returns the media that are shown inside the medium before them, by the index of that one.
fn inner_media(media_in_order: &[usize], media: &[MediumTokens]) -> Result<BTreeMap<usize, usize>> {
    let pairs = media_in_order.windows(2).map(|pair| (pair[0], pair[1]));
    let inner: BTreeMap<usize, usize> = pairs.filter(|&(_, m)| media[m].is_inside()).collect();
    let outside = |m: usize| media[m].has_inner();
    let inside = media.iter().filter(|medium| medium.is_inside()).count();
    match inner.len() == inside && media_in_order.iter().all(|m| outside(*m) == inner.contains_key(m)) {
        true => Ok(inner),
        false => Err(TextError::Conversation {
            problem: "has a medium inside another one that has no place for it",
        }),
    }
}

/// Finds markers in the text that the template itself wrote. The k-th occurrence of a literal is the k-th medium that uses it.
fn find_markers(
    output: &Output,
    media_in_order: &[usize],
    media: &[MediumTokens],
) -> Result<Vec<(Range<usize>, usize)>> {
    let mut waiting: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for &m in media_in_order.iter().rev().filter(|&&m| !media[m].is_inside()) {
        waiting.entry(&media[m].marker).or_default().push(m);
    }
    let expected: BTreeMap<&str, usize> =
        waiting.iter().map(|(&marker, list)| (marker, list.len())).collect();
    let mut got: BTreeMap<&str, usize> = BTreeMap::new();
    let mut found = Vec::new();
    let mut at = 0;
    let markers: Vec<&str> = waiting.keys().copied().collect();
    let texts = output.texts.iter().map(|text| text.range.clone());
    for text in texts.chain(std::iter::once(output.string.len()..output.string.len())) {
        let next = |marker: &str, at: usize| {
            output.string[at..text.start].find(marker).map_or(usize::MAX, |found| at + found)
        };
        // Each place is searched once. The text may have many markers of one kind.
        let mut places: Vec<usize> = markers.iter().map(|marker| next(marker, at)).collect();
        while let Some((start, marker)) = places
            .iter()
            .zip(&markers)
            .map(|(&start, &marker)| (start, marker))
            .filter(|(start, _)| *start != usize::MAX)
            .min_by_key(|&(start, marker)| (start, std::cmp::Reverse(marker.len())))
        {
            *got.entry(marker).or_default() += 1;
            if let Some(m) = waiting.get_mut(marker).and_then(Vec::pop) {
                found.push((start..start + marker.len(), m));
            }
            at = start + marker.len();
            for (place, marker) in places.iter_mut().zip(&markers).filter(|(place, _)| **place < at) {
                *place = next(marker, at);
            }
        }
        at = text.end;
    }
    for (&marker, &expected) in &expected {
        let got = got.get(marker).copied().unwrap_or(0);
        if got != expected {
            return Err(TextError::MarkerCount { marker: marker.to_owned(), got, expected });
        }
    }
    Ok(found)
}

/// Returns the parts of a turn. Consecutive texts of an assistant are merged, and an assistant turn always has at least one part.
fn merge_assistant_text(turn: &Turn) -> Vec<Part> {
    if turn.role != Role::Assistant {
        return turn.parts.clone();
    }
    let mut parts: Vec<Part> = Vec::new();
    for part in &turn.parts {
        match (parts.last_mut(), part) {
            (Some(Part::Text(so_far)), Part::Text(text)) => so_far.push_str(text),
            _ => parts.push(part.clone()),
        }
    }
    if parts.is_empty() {
        parts.push(Part::Text(String::new()));
    }
    parts
}
