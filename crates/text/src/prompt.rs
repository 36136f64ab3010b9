//! Conversation → prompt ids with the span of every medium.
//!
//! The template is run with a private stand-in for every text. What the template wrote around the stand-ins is its own,
//! and only there do literals of control tokens become control tokens and media markers become media. Then the texts
//! are put in place, and everything between two control tokens is encoded as one string, so that a word whose bytes
//! come half from the template and half from a text merges as it would in `transformers`.
//!
//! Two guarantees follow, and are tested: a text cannot forge structure, whatever is written in it; and for texts
//! without such literals the ids equal those of `transformers`. Where a model spells its turn end in ordinary tokens
//! (Aria), the first cannot hold for that literal.
//!
//! Refused: a template that drops, repeats or changes a text (other than trimming white space at its ends), or that
//! writes a different string for the stand-ins than for the texts themselves.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::ops::Range;

use serde_json::{Value, json};

use crate::template::ContentForm;
use crate::tokenizer::{Run, excerpt};
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

/// Kind of a medium.
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
        /// Kind of the medium.
        kind: MediumKind,
        /// Index among the media of this kind.
        index: usize,
    },
}

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Turn {
    /// Who speaks.
    pub role: Role,
    /// Texts and media, in order.
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
    /// Kind of the medium.
    pub kind: MediumKind,
    /// Text that the template writes for it (`<|image_pad|>`), replaced by `segments`. Must not be empty.
    pub marker: String,
    /// Replacement of the marker.
    pub segments: Vec<MediumSegment>,
}

impl MediumTokens {
    /// The common case: the template writes the token `marker` once, and it is repeated `count` times.
    pub fn repeated(kind: MediumKind, marker: impl Into<String>, token: u32, count: usize) -> Self {
        MediumTokens { kind, marker: marker.into(), segments: vec![MediumSegment::Features { token, count }] }
    }
}

/// Place of a medium's features in the ids: `ids[start..start + len]`.
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
#[derive(Debug, Clone, Copy)]
pub struct PromptRenderer<'a> {
    tokenizer: &'a Tokenizer,
    template: &'a ChatTemplate,
}

impl<'a> PromptRenderer<'a> {
    /// Joins the two.
    pub fn new(tokenizer: &'a Tokenizer, template: &'a ChatTemplate) -> Self {
        PromptRenderer { tokenizer, template }
    }

    /// The prompt that asks for the next assistant turn. Every medium must be named by exactly one part.
    ///
    /// # Errors
    /// [`TextError::Conversation`] without turns or if the last is the assistant's; [`TextError::MediumUse`],
    /// [`TextError::MarkerCount`], [`TextError::Template`], [`TextError::TemplateChangesPart`], [`TextError::Encode`],
    /// [`TextError::ControlInText`].
    pub fn render(
        &self,
        turns: &[Turn],
        media: &[MediumTokens],
        options: &RenderOptions,
    ) -> Result<RenderedPrompt> {
        if turns.last().is_some_and(|turn| turn.role == Role::Assistant) {
            return Err(TextError::Conversation {
                problem: "ends with an assistant turn, so nothing is asked",
            });
        }
        let output = self.output(turns, media, options, true)?;
        let (prompt, _) = self.encode(&output, media, &[])?;
        Ok(prompt)
    }

    /// A finished conversation for supervised training. The mask holds for the text of every assistant turn and the
    /// stop token or stop string that follows it, not for the line break behind that: exactly what a sampled completion
    /// consists of. Ids are cut where assistant text starts, as they are when it is sampled after a prompt.
    ///
    /// # Errors
    /// As [`render`](Self::render), but the last turn may be the assistant's; [`TextError::Conversation`] if no turn is,
    /// or one shows media; [`TextError::NoStopAfterAssistant`].
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
        let (prompt, train_mask) = self.encode(&output, media, &trained)?;
        Ok(RenderedConversation { prompt, train_mask })
    }

    /// A finished conversation of texts as another model reads it, a reward model for example; media are left out.
    ///
    /// A template may rewrite a text (Qwen3's takes an answer's thinking apart). Then its output is encoded as one
    /// string, and a text's literals of control tokens are broken by a space, so that they still cannot forge structure.
    ///
    /// # Errors
    /// [`TextError::Conversation`] without turns; [`TextError::Template`], [`TextError::Encode`],
    /// [`TextError::ControlInText`].
    pub fn render_finished(&self, turns: &[Turn], options: &RenderOptions) -> Result<RenderedPrompt> {
        let texts = |text: &dyn Fn(&str) -> String| -> Vec<Turn> {
            let part = |part: &Part| match part {
                Part::Text(own) => Some(Part::Text(text(own))),
                Part::Medium { .. } => None,
            };
            let turn =
                |turn: &Turn| Turn { role: turn.role, parts: turn.parts.iter().filter_map(part).collect() };
            turns.iter().map(turn).collect()
        };
        match self.output(&texts(&str::to_owned), &[], options, false) {
            Err(TextError::TemplateChangesPart { .. }) => {
                let turns =
                    with_system(&texts(&|own| self.tokenizer.defused(own)), options.system.as_deref());
                let variables = self.variables(options);
                let text = self.template.run(
                    &self.messages(&turns, &[], &[], None),
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
            output => Ok(self.encode(&output?, &[], &[])?.0),
        }
    }

    /// Returns the variables of a template beside the messages.
    fn variables(&self, options: &RenderOptions) -> serde_json::Map<String, Value> {
        let mut variables: serde_json::Map<String, Value> =
            self.tokenizer.named_tokens().iter().map(|(name, token)| (name.clone(), json!(token))).collect();
        if options.add_vision_id {
            variables.insert("add_vision_id".to_owned(), Value::Bool(true));
        }
        variables.extend(options.kwargs.iter().map(|(name, value)| (name.clone(), value.clone())));
        variables
    }

    /// Runs the template and finds every text and medium in what it wrote.
    fn output(
        &self,
        turns: &[Turn],
        media: &[MediumTokens],
        options: &RenderOptions,
        add_generation_prompt: bool,
    ) -> Result<Output> {
        if turns.is_empty() {
            return Err(TextError::Conversation { problem: "has no turns" });
        }
        let turns = with_system(turns, options.system.as_deref());
        let media_in_order = media_in_order(&turns, media)?;

        let variables = self.variables(options);
        let run =
            |messages: &Value| self.template.run(messages, add_generation_prompt, &variables, options.now);

        let known = format!("{}{}", self.template.source(), Value::Object(variables.clone()));
        let with_stand_ins = |trim_assistant: bool| {
            let mut stand_ins = StandIns::absent_from(&known, trim_assistant);
            let marked = run(&self.messages(&turns, &media_in_order, media, Some(&mut stand_ins)))?;
            stand_ins.resolve(&marked).map_err(|(turn, problem)| self.changed(turn, problem))
        };
        let plain = run(&self.messages(&turns, &media_in_order, media, None))?;
        let mut output = with_stand_ins(false)?;
        if output.string != plain && turns.iter().any(|turn| turn.role == Role::Assistant) {
            output = with_stand_ins(true)?;
        }
        if output.string != plain {
            let same = output.string.bytes().zip(plain.bytes()).take_while(|(a, b)| a == b).count();
            let turn = output.texts.iter().take_while(|t| t.range.start <= same).last().map_or(0, |t| t.turn);
            let problem = "writes something else depending on what the text says".to_owned();
            return Err(self.changed(turn, problem));
        }
        let markers = find_markers(&output, &media_in_order, media)?;
        Ok(Output { markers, ..output })
    }

    fn changed(&self, turn: usize, problem: String) -> TextError {
        TextError::TemplateChangesPart { origin: self.template.origin().to_string(), turn, problem }
    }

    /// The messages a template sees, with stand-ins for the texts or the texts themselves.
    fn messages(
        &self,
        turns: &[Turn],
        media_in_order: &[usize],
        media: &[MediumTokens],
        mut stand_ins: Option<&mut StandIns>,
    ) -> Value {
        let mut media_in_order = media_in_order.iter();
        let mut messages = Vec::with_capacity(turns.len());
        for (t, turn) in turns.iter().enumerate() {
            let form = self.template.form(turn.role);
            let mut parts = Vec::new();
            let mut string = String::new();
            for part in merge_assistant_text(turn) {
                match part {
                    Part::Text(text) => {
                        let shown = match &mut stand_ins {
                            Some(stand_ins) => stand_ins.stand_for(t, turn.role, &text),
                            None => text,
                        };
                        string.push_str(&shown);
                        parts.push(json!({"type": "text", "text": shown}));
                    }
                    Part::Medium { kind, .. } => {
                        if let Some(&medium) = media_in_order.next() {
                            string.push_str(&media[medium].marker);
                        }
                        parts.push(json!({"type": kind.as_str()}));
                    }
                }
            }
            let content = match form {
                ContentForm::Parts => Value::Array(parts),
                ContentForm::Text => Value::String(string),
            };
            messages.push(json!({"role": turn.role.as_str(), "content": content}));
        }
        Value::Array(messages)
    }

    /// Where the stop behind an assistant text ends, in bytes of the output.
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

    /// Ids of the output. `trained` are byte ranges of it, in order; the second result is their mask.
    fn encode(
        &self,
        output: &Output,
        media: &[MediumTokens],
        trained: &[Range<usize>],
    ) -> Result<(RenderedPrompt, Vec<bool>)> {
        let mut placeholders = HashSet::new();
        for medium in media {
            placeholders.extend(self.tokenizer.token_id(&medium.marker));
            placeholders.extend(medium.segments.iter().filter_map(|segment| match segment {
                MediumSegment::Features { token, .. } => Some(*token),
                MediumSegment::Text(_) => None,
            }));
        }
        let placeholders: Vec<u32> = placeholders.into_iter().collect();

        let mut prompt = RenderedPrompt { ids: Vec::new(), spans: Vec::new(), text: output.string.clone() };
        let mut mask = Vec::new();
        let mut at = 0;
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

/// Output of a template, with the texts in place.
#[derive(Debug)]
struct Output {
    string: String,
    /// In the order they stand; they do not overlap.
    texts: Vec<TextRange>,
    /// (range, index of the medium), in the order they stand.
    markers: Vec<(Range<usize>, usize)>,
}

/// Where a text stands: white space at its ends may be outside.
#[derive(Debug)]
struct TextRange {
    turn: usize,
    role: Role,
    range: Range<usize>,
}

impl Output {
    /// A stretch of the output as runs. It must not begin or end inside a marker.
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
                })),
            }
            at = range.end;
        }
        trusted(at..stretch.end, &mut runs);
        runs
    }
}

/// Private strings that stand for texts while the template runs.
struct StandIns {
    nonce: String,
    trim_assistant: bool,
    texts: Vec<StandIn>,
}

struct StandIn {
    turn: usize,
    role: Role,
    text: String,
}

const OPEN: char = '\u{E000}';
const CLOSE: char = '\u{E001}';

impl StandIns {
    /// Stand-ins that do not occur in `known`, which is everything else the template may write.
    fn absent_from(known: &str, trim_assistant: bool) -> Self {
        let mut nonce = 0u64;
        while known.contains(&format!("{OPEN}{nonce}.")) {
            nonce += 1;
        }
        StandIns { nonce: format!("{OPEN}{nonce}."), trim_assistant, texts: Vec::new() }
    }

    /// Returns the stand-in of a text for the template. White space at the ends stays visible, so that a template that trims does
    /// what it does to the text itself, and an empty text stays empty, so that a template that asks for emptiness sees
    /// it. Assistant texts are replaced whole, since where they start must be known to the byte, or trimmed if that is
    /// what the template does.
    fn stand_for(&mut self, turn: usize, role: Role, text: &str) -> String {
        let core = text.trim();
        if role == Role::Assistant {
            let kept = if self.trim_assistant { core } else { text };
            return self.stand_in(turn, role, kept);
        }
        if core.is_empty() {
            return text.to_owned();
        }
        let lead = &text[..text.len() - text.trim_start().len()];
        let trail = &text[lead.len() + core.len()..];
        format!("{lead}{}{trail}", self.stand_in(turn, role, core))
    }

    fn stand_in(&mut self, turn: usize, role: Role, text: &str) -> String {
        self.texts.push(StandIn { turn, role, text: text.to_owned() });
        format!("{}{}{CLOSE}", self.nonce, self.texts.len() - 1)
    }

    /// Puts the texts in place. Error: turn and what is wrong.
    fn resolve(&self, marked: &str) -> std::result::Result<Output, (usize, String)> {
        let mut output =
            Output { string: String::with_capacity(marked.len()), texts: Vec::new(), markers: Vec::new() };
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
        match seen.iter().position(|&times| times != 1) {
            Some(k) if seen[k] == 0 => Err((self.texts[k].turn, "drops or changes a text".to_owned())),
            Some(k) => Err((self.texts[k].turn, format!("writes a text {} times", seen[k]))),
            None => Ok(output),
        }
    }
}

/// Replaces the first system turn, or puts one in front.
#[must_use]
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

/// Indices into `media` in the order the conversation shows them; each exactly once.
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

/// Markers in what the template itself wrote: the k-th occurrence of a literal is the k-th medium that uses it.
fn find_markers(
    output: &Output,
    media_in_order: &[usize],
    media: &[MediumTokens],
) -> Result<Vec<(Range<usize>, usize)>> {
    let mut waiting: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for &m in media_in_order.iter().rev() {
        waiting.entry(&media[m].marker).or_default().push(m);
    }
    if waiting.contains_key("") {
        return Err(TextError::Conversation { problem: "has a medium whose marker is empty" });
    }
    let expected: BTreeMap<&str, usize> =
        waiting.iter().map(|(&marker, list)| (marker, list.len())).collect();
    let mut got: BTreeMap<&str, usize> = BTreeMap::new();
    let mut found = Vec::new();
    let mut at = 0;
    let texts = output.texts.iter().map(|text| text.range.clone());
    for text in texts.chain(std::iter::once(output.string.len()..output.string.len())) {
        while let Some((start, marker)) = waiting
            .keys()
            .filter_map(|&marker| {
                output.string[at..text.start].find(marker).map(|found| (at + found, marker))
            })
            .min_by_key(|&(start, marker)| (start, std::cmp::Reverse(marker.len())))
        {
            *got.entry(marker).or_default() += 1;
            if let Some(m) = waiting.get_mut(marker).and_then(Vec::pop) {
                found.push((start..start + marker.len(), m));
            }
            at = start + marker.len();
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

/// The parts of a turn; an assistant's consecutive texts are one, and there is always at least one.
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
