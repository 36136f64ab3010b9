//! Builds prompts for the model from dataset rows.

use std::path::PathBuf;
use std::sync::Arc;

use omnigrpo_data::{
    Cause, MediumInfo, MediumOptions, MediumRef, MediumSource, RecordedCompletion, RecordedTurn, Sample,
};
use omnigrpo_text::{
    ChatTemplate, MediumKind, MediumSegment, MediumTokens, Part, PromptRenderer, RenderOptions,
    RenderedPrompt, Role, Span, StopSet, TextError, Tokenizer, Turn,
};

use serde_json::Value;

use crate::checkpoint::Checkpoint;
use crate::decoder::Position;
use crate::error::{MAX_COMPLETION_LENGTH, MAX_PROMPT_LENGTH, ModelError, Result};
use crate::families::{
    Family, MediaSettings, MediumInput, MediumKey, MediumPlan, MediumShape, Shown, probe_medium,
};
use crate::media_store::{Decoded, MediaStore};
use crate::rope::RopeScaling;
use crate::stream::{AddedTurn, next_key};

/// A rendered prompt with its media.
#[derive(Clone, Debug, PartialEq)]
pub struct Prompt {
    /// Token ids, with the placeholders of media expanded.
    pub ids: Vec<u32>,
    /// Spans of ids that represent the features of a medium.
    pub spans: Vec<Span>,
    /// Position of each id.
    pub positions: Vec<Position>,
    /// Position of the first completion token, on all axes.
    pub next_position: u32,
    /// Decoded media, in the order of the sample.
    pub media: Vec<Arc<MediumInput>>,
    /// Token ids of the question that the projector reads; empty for families whose projector does not read it.
    pub instruction: Vec<u32>,
    /// Rendered text, with one marker per medium.
    pub text: String,
}

impl Prompt {
    /// Returns a key of the prompt for the dropout masks of adapters. Prompts that differ only in their pictures have different
    /// keys; a sample of the pixel values is enough for that.
    pub(crate) fn key(&self) -> u64 {
        const SAMPLE: usize = 256;
        let text = self.ids.iter().fold(0, |key, &id| next_key(key, id));
        // The media of added turns follow those of the prompt.
        let own = self.spans.iter().map(|span| span.medium + 1).max().unwrap_or_default();
        let media = self.media.iter().take(own);
        let media = media.flat_map(|m| m.data.iter().step_by(m.data.len() / SAMPLE + 1));
        media.fold(text, |key, x| next_key(key, x.to_bits()))
    }

    /// Returns a key of one of its media for the dropout masks.
    pub(crate) fn medium_key(&self, medium: usize) -> u64 {
        next_key(self.key(), medium as u32)
    }
}

/// Settings for building prompts.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct PromptSettings {
    /// Settings for reading media.
    pub media: MediaSettings,
    /// Settings for rendering text.
    pub render: RenderOptions,
    /// Length of the longest prompt in tokens, with media expanded. `None` for the limit of the model.
    pub max_prompt_length: Option<usize>,
    /// Tokens reserved for the completion within the model's positions.
    pub max_completion_length: usize,
    /// Strings that end a completion, besides the checkpoint's stop tokens.
    pub stop_strings: Vec<String>,
    /// Column that a teacher reads beside the prompt ([`PromptBuilder::for_teacher`]); `None` if it reads the prompt alone.
    pub privileged_context: Option<PrivilegedContext>,
}

/// A column of each row that a teacher reads and the policy does not, such as the solution or a hint (self-distillation: SDFT,
/// arXiv 2601.19897; TRL `SDFTTrainer`).
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct PrivilegedContext {
    /// Name of the column. `solution` also stands for the row's solution from another column ([`Sample::solution`]).
    pub column: String,
    /// Text of the teacher's last turn.
    pub template: ContextTemplate,
}

/// Text of the teacher's last turn: the policy's text first, so that both prompts have a common beginning, and then the value of the
/// column.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContextTemplate {
    before: String,
    after: String,
}

impl Default for ContextTemplate {
    /// Returns `{prompt}`, an empty line and `{privileged_context}`, as in TRL's `SDFTTrainer`.
    fn default() -> Self {
        Self { before: "\n\n".to_owned(), after: String::new() }
    }
}

impl std::str::FromStr for ContextTemplate {
    type Err = String;

    /// Reads a text that begins with `{prompt}` and has `{privileged_context}` once after it.
    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let rest = text.strip_prefix("{prompt}").filter(|rest| !rest.contains("{prompt}"));
        let parts = rest.and_then(|rest| rest.split_once("{privileged_context}"));
        match parts.filter(|(_, after)| !after.contains("{privileged_context}")) {
            Some((before, after)) => Ok(Self { before: before.to_owned(), after: after.to_owned() }),
            None => {
                Err("a text that begins with `{prompt}` and has `{privileged_context}` once after it"
                    .to_owned())
            }
        }
    }
}

impl std::fmt::Display for ContextTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{{prompt}}{}{{privileged_context}}{}", self.before, self.after)
    }
}

impl serde::Serialize for ContextTemplate {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl PrivilegedContext {
    /// Says of the error about a long prompt that the teacher's is meant.
    fn named(&self, error: ModelError) -> ModelError {
        match error {
            ModelError::PromptTooLong { tokens, limit, which, remedy } => ModelError::PromptTooLong {
                which: format!("{which}, for the teacher's prompt with the column `{}`", self.column),
                tokens,
                limit,
                remedy,
            },
            other => other,
        }
    }

    /// Returns the row as the teacher reads it.
    fn told(&self, sample: &Sample) -> Result<Sample> {
        let refused =
            |got: &str| ModelError::PrivilegedContext { column: self.column.clone(), got: got.to_owned() };
        let solution = || sample.solution.clone().filter(|_| self.column == "solution");
        let value = match sample.columns.get(&self.column) {
            Some(Value::String(text)) => text.clone(),
            Some(Value::Null) | None => solution().ok_or_else(|| refused("no value"))?,
            Some(other) => other.to_string(),
        };
        if value.trim().is_empty() {
            return Err(refused("an empty text"));
        }
        let mut told = sample.clone();
        let added = format!("{}{value}{}", self.template.before, self.template.after);
        let parts = told.turns.last_mut().map(|turn| &mut turn.parts).ok_or(ModelError::NoUserTurn)?;
        match parts.last_mut() {
            Some(Part::Text(text)) => text.push_str(&added),
            _ => parts.push(Part::Text(added)),
        }
        Ok(told)
    }
}

/// Function that adds text and media to the last turn of a row: what an environment shows before the model's first turn.
#[derive(Clone)]
pub struct Opening(pub Arc<OpeningFn>);

type OpeningFn = dyn Fn(&mut Sample) -> std::result::Result<(), Cause> + Send + Sync;

impl Default for PromptSettings {
    /// Returns the checkpoint's own settings for media and text. A prompt may have any length that leaves room for 256 tokens.
    fn default() -> Self {
        Self {
            media: MediaSettings::default(),
            render: RenderOptions::default(),
            max_prompt_length: None,
            max_completion_length: 256,
            stop_strings: Vec::new(),
            privileged_context: None,
        }
    }
}

/// A supervised example: a prompt and its target tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct SftExample {
    /// Conversation up to the first imitated turn of the model, with the media of all turns.
    pub prompt: Prompt,
    /// Tokens after it. Every imitated turn ends with its stop token.
    pub target: Vec<u32>,
    /// Turns of others in the target, which are not imitated.
    pub turns: Vec<AddedTurn>,
}

impl SftExample {
    /// Returns the number of imitated tokens.
    pub fn num_imitated(&self) -> usize {
        self.target.len() - self.turns.iter().map(|turn| turn.turn.ids.len()).sum::<usize>()
    }
}

/// Builds prompts for one checkpoint from its chat template, the conversation of a row and the row's media.
///
/// ```
/// use omnigrpo_data::RowReader;
/// use omnigrpo_models::{Checkpoint, PromptBuilder, PromptSettings};
/// use serde_json::json;
///
/// # let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/checkpoints/qwen2_vl_untied");
/// let checkpoint = Checkpoint::open(directory.as_ref())?;
/// let prompts = PromptBuilder::open(&checkpoint, PromptSettings::default())?;
/// let row = json!({ "prompt": "Which is larger, 3 or 5?" });
/// let sample = RowReader::new("mine").sample(row)?;
/// let prompt = prompts.build(&sample)?;
/// assert!(prompt.text.contains("3 or 5?") && prompt.media.is_empty());
/// assert_eq!(prompts.tokenizer().decode(&prompt.ids, false)?, prompt.text);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct PromptBuilder {
    family: Arc<Family>,
    tokenizer: Arc<Tokenizer>,
    template: Arc<ChatTemplate>,
    stops: StopSet,
    settings: PromptSettings,
    opening: Option<Opening>,
    media_store: Arc<MediaStore>,
}

impl PromptBuilder {
    /// Reads tokenizer, chat template and stop tokens of a checkpoint.
    ///
    /// # Errors
    /// Returns an error if files are missing or malformed, or settings have no effect.
    pub fn open(checkpoint: &Checkpoint, settings: PromptSettings) -> Result<Self> {
        let (dir, family) = (checkpoint.dir(), Arc::clone(checkpoint.family()));
        let tokenizer = Arc::new(Tokenizer::from_dir(dir)?);
        let template = Arc::new(family.processor().chat_template(dir)?);
        let stops = family.stops(dir, &tokenizer, &settings.stop_strings)?;
        family.check_settings(&settings.media)?;
        let media_store = Arc::clone(checkpoint.media_store());
        Ok(Self { family, tokenizer, template, stops, settings, opening: None, media_store })
    }

    /// Sets what [`Self::add_opening`] adds to rows.
    #[must_use]
    pub fn with_opening(self, opening: Opening) -> Self {
        Self { opening: Some(opening), ..self }
    }

    /// Returns a builder for the policy alone, which needs no column for a teacher and is otherwise the same.
    pub fn without_teacher(&self) -> Self {
        let mut own = self.clone();
        own.settings.privileged_context = None;
        own
    }

    /// Returns a builder of prompts that describe these tools ([`RenderOptions::tools`]), and is otherwise the same.
    pub fn with_tools(&self, tools: Vec<Value>) -> Self {
        let mut own = self.clone();
        own.settings.render.tools = tools;
        own
    }

    /// Returns a builder whose chat template has these variables besides its own ([`RenderOptions::kwargs`]), and is otherwise the
    /// same.
    pub fn with_variables(&self, variables: serde_json::Map<String, Value>) -> Self {
        let mut own = self.clone();
        own.settings.render.kwargs.extend(variables);
        own
    }

    /// Returns the tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Returns the rules that end a completion.
    pub fn stops(&self) -> &StopSet {
        &self.stops
    }

    /// Returns the settings.
    pub fn settings(&self) -> &PromptSettings {
        &self.settings
    }

    /// Returns the store of decoded media.
    pub fn media_store(&self) -> &MediaStore {
        &self.media_store
    }

    /// Returns the family.
    pub fn family(&self) -> &Family {
        &self.family
    }

    /// Adds to a row what an environment shows before the model's first turn ([`Self::with_opening`]). It must be called once
    /// per row, before the prompt is built.
    ///
    /// # Errors
    /// Returns the error of the environment, and [`ModelError::SaysTooMuch`] if it adds more than [`MAX_SAID_BYTES`] or
    /// [`MAX_SAID_PARTS`]. The row is then unusable.
    pub fn add_opening(&self, sample: &mut Sample) -> std::result::Result<(), Cause> {
        let Some(Opening(add)) = &self.opening else { return Ok(()) };
        let (parts, bytes) = size_of(&sample.turns);
        add(sample)?;
        let (all_parts, all_bytes) = size_of(&sample.turns);
        Ok(check_said(all_parts.saturating_sub(parts), all_bytes.saturating_sub(bytes))?)
    }

    /// Decodes a row's media and renders its prompt. Headers are read first, so that no medium is decoded for a prompt over
    /// the limit.
    ///
    /// # Errors
    /// Returns an error if a medium is unreadable or the prompt exceeds a limit. Prompts are never truncated.
    pub fn build(&self, sample: &Sample) -> Result<Prompt> {
        self.build_in(sample, 0)
    }

    /// Builds the prompt of a text that the model continues as it stands, without the chat template ([`Sample::is_text`]).
    ///
    /// # Errors
    /// Returns an error if the text is empty or exceeds a limit.
    pub fn continuing(&self, text: &str) -> Result<Prompt> {
        self.prompt(&[], self.continued(text)?, Vec::new())
    }

    /// Builds the prompt of tokens that the model continues as they stand.
    ///
    /// # Errors
    /// Returns [`ModelError::TokenIds`] if a token is not in the vocabulary or stands for the features of a medium, and an error if
    /// there are none or they exceed a limit.
    pub fn continuing_tokens(&self, ids: Vec<u32>) -> Result<Prompt> {
        let vocab = self.family.architecture().decoder_config().vocab;
        let excluded = self.family.processor().placeholder_ids();
        if let Some(&id) = ids.iter().find(|id| **id as usize >= vocab || excluded.contains(id)) {
            return Err(ModelError::TokenIds { id, vocab });
        }
        if ids.is_empty() {
            return Err(ModelError::NoUserTurn);
        }
        self.check_length(ids.len(), &[])?;
        let text = self.tokenizer.decode(&ids, false)?;
        self.prompt(&[], RenderedPrompt { ids, spans: Vec::new(), text }, Vec::new())
    }

    /// Builds the prompt for a given pass over the data. Rows with a random number of frames draw it again in each pass.
    pub fn build_in(&self, sample: &Sample, epoch: u64) -> Result<Prompt> {
        let media = (sample.row, sample.media.as_slice());
        let ((rendered, plans), media) = self.read(media, epoch, |headers| self.plan(sample, headers))?;
        // Fewer frames may have been drawn, or the file may contain less than its header says.
        let shown = self.shown_media(&media)?;
        let rendered = match shown == self.shown(plans.iter().map(MediumPlan::shown))? {
            true => rendered,
            false => self.render(sample, &sample.turns, &shown)?,
        };
        self.prompt(&sample.turns, rendered, media)
    }

    /// Reads the headers of media of a row, passes them to `plan`, and then decodes the media.
    fn read<T>(
        &self,
        (row, media): (u64, &[MediumRef]),
        epoch: u64,
        plan: impl FnOnce(&[MediumInfo]) -> Result<T>,
    ) -> Result<(T, Vec<Arc<MediumInput>>)> {
        let keys = (0..media.len() as u64).map(|index| MediumKey { row, index, epoch });
        let settings: Vec<MediaSettings> = keys.map(|key| self.settings.media.keyed(key)).collect();
        let each = || media.iter().zip(&settings);
        let found: Vec<_> = each().map(|(m, settings)| self.media_store.find(m, settings)).collect();
        let headers = media.iter().zip(&found).map(|(m, found)| match &found.decoded {
            Some(decoded) => Ok(decoded.header.clone()),
            None => probe_medium(m, &self.settings.media.limits),
        });
        let headers = headers.collect::<Result<Vec<_>>>()?;
        let planned = plan(&headers)?;
        let mut media = Vec::with_capacity(headers.len());
        for (((m, settings), found), header) in each().zip(found).zip(headers) {
            media.push(match &found.decoded {
                Some(decoded) => Arc::clone(&decoded.input),
                None => {
                    let input = Arc::new(self.family.processor().prepare(m, settings)?);
                    let decoded = Decoded { header, input: Arc::clone(&input) };
                    self.media_store.keep(&found, m, settings, decoded);
                    input
                }
            });
        }
        Ok((planned, media))
    }

    /// Builds the prompt of a row without decoding, for the outline of a step. Its media have the right size and no content.
    ///
    /// # Errors
    /// Returns an error if a header is unreadable or the prompt exceeds a limit.
    pub fn outline(&self, sample: &Sample) -> Result<Prompt> {
        let (rendered, plans) = self.plan(sample, &self.headers(&sample.media)?)?;
        self.prompt(&sample.turns, rendered, self.empty(plans))
    }

    /// Builds the prompt of a teacher that reads more than the policy ([`PromptSettings::privileged_context`]); `None` if it reads
    /// the same. `prompt` is the policy's prompt of the row. Both have the same media, whose features they share, and the same tokens
    /// up to the added text.
    ///
    /// # Errors
    /// Returns [`ModelError::PrivilegedContext`] if the row lacks the column, and an error if the longer prompt exceeds a limit.
    pub fn for_teacher(&self, sample: &Sample, prompt: &Prompt) -> Result<Option<Prompt>> {
        let Some(context) = &self.settings.privileged_context else { return Ok(None) };
        let told = context.told(sample)?;
        let rendered = self.render(&told, &told.turns, &self.shown_media(&prompt.media)?);
        let own = self.prompt(&told.turns, rendered.map_err(|e| context.named(e))?, prompt.media.clone())?;
        // A projector reads the question alone, so that the features are those of the policy.
        Ok(Some(Prompt { instruction: prompt.instruction.clone(), ..own }))
    }

    /// Counts the tokens of the teacher's prompt, from the plans of the row's media ([`Self::plan`]); `None` if it reads the policy's
    /// prompt.
    ///
    /// # Errors
    /// Returns an error as [`Self::for_teacher`] does.
    pub fn plan_for_teacher(&self, sample: &Sample, plans: &[MediumPlan]) -> Result<Option<usize>> {
        let Some(context) = &self.settings.privileged_context else { return Ok(None) };
        let told = context.told(sample)?;
        let shown = self.shown(plans.iter().map(MediumPlan::shown))?;
        let rendered = self.render(&told, &told.turns, &shown);
        Ok(Some(rendered.map_err(|e| context.named(e))?.ids.len()))
    }

    fn headers(&self, media: &[MediumRef]) -> Result<Vec<MediumInfo>> {
        media.iter().map(|m| probe_medium(m, &self.settings.media.limits)).collect()
    }

    /// Returns media of the planned size without content.
    fn empty(&self, plans: Vec<MediumPlan>) -> Vec<Arc<MediumInput>> {
        let empty = |plan: MediumPlan| {
            // A mask of zeros would hide the whole picture.
            let masked = matches!(plan.shape, MediumShape::Masked { .. });
            Arc::new(MediumInput {
                data: vec![f32::from(u8::from(masked)); self.family.processor().numbers(&plan.shape)],
                kind: plan.kind,
                shape: plan.shape,
                seconds_per_grid: plan.seconds_per_grid,
                frame_times_secs: plan.frame_times_secs,
                of_clip: plan.of_clip,
            })
        };
        plans.into_iter().map(empty).collect()
    }

    /// Builds the prompt and plans its media from headers only, without decoding. `headers` are those of the row's media, in
    /// order. Rows with a random number of frames get the largest number, so that a prompt that fits here fits in every epoch.
    pub fn plan(&self, sample: &Sample, headers: &[MediumInfo]) -> Result<(RenderedPrompt, Vec<MediumPlan>)> {
        let plans = self.plans(&sample.media, headers)?;
        let shown = self.shown(plans.iter().map(MediumPlan::shown))?;
        Ok((self.render(sample, &sample.turns, &shown)?, plans))
    }

    /// Returns the stop token that the template writes after a turn of the model. Another turn may follow a completion that ends
    /// with it ([`Self::turn`]).
    ///
    /// # Errors
    /// Returns an error if the model cannot go on after another turn, or if settings number the media of a conversation.
    pub fn turn_stop(&self) -> Result<u32> {
        let unsupported = |what: &str| ModelError::AddedTurn { what: what.to_owned() };
        if self.settings.render.add_vision_id {
            return Err(unsupported(
                "add_vision_id numbers the media of a whole conversation, so it cannot be used with turns that arrive later",
            ));
        }
        let question = [Turn::text(Role::User, "?")];
        if self.family.processor().reads_question() {
            return Err(unsupported(
                "this model's projector reads the question, and later turns have none; use a model of another family",
            ));
        }
        let renderer = PromptRenderer::new(&self.tokenizer, &self.template);
        let turn = renderer.render_turns(&question, &[], &self.settings.render, &self.stops)?;
        self.tokenizer.token_id(&turn.after).ok_or_else(|| {
            unsupported(&format!(
                "the template ends a turn of the model with {:?}, which is not one token, so no turn can follow it; use a model \
                 of another family",
                turn.after
            ))
        })
    }

    /// Builds a turn that answers the model in the middle of a completion, up to the start of the model's next turn. Spans and
    /// positions count from its first token. Returns `None` if it has more than `max_tokens` tokens; its media are not decoded
    /// then.
    ///
    /// # Errors
    /// Returns an error if a medium is unreadable or the turn cannot be rendered. Returns [`ModelError::SaysTooMuch`] if the turn
    /// has more than [`MAX_SAID_BYTES`] or [`MAX_SAID_PARTS`], or needs more work of the template than one may cause.
    pub fn turn(&self, turn: &Turn, media: &[MediumRef], max_tokens: usize) -> Result<Option<Prompt>> {
        let (parts, bytes) = size_of(std::slice::from_ref(turn));
        check_said(parts, bytes)?;
        let plans = self.plans(media, &self.headers(media)?)?;
        let planned = self.shown(plans.iter().map(MediumPlan::shown))?;
        if planned.iter().map(num_features).sum::<usize>() > max_tokens {
            return Ok(None);
        }
        let media = self.media(media)?;
        let rendered = self.render_turns(std::slice::from_ref(turn), &self.shown_media(&media)?)?;
        let fits = rendered.ids.len() <= max_tokens;
        fits.then(|| self.placed(rendered, media, Vec::new())).transpose()
    }

    /// Builds a turn of a tool with up to `pictures` pictures of equal size, the largest that fit into `max_tokens` tokens. Its
    /// media have no content. Returns `None` if no picture fits.
    ///
    /// # Errors
    /// Returns an error if the turn cannot be rendered.
    pub fn outline_turn(&self, pictures: usize, max_tokens: usize) -> Result<Option<Prompt>> {
        const LARGEST_PX: u32 = 1 << 14;
        const SMALLEST_PX: u32 = 28;
        let picture = MediumRef {
            kind: MediumKind::Image,
            source: MediumSource::Path(PathBuf::new()),
            options: MediumOptions::default(),
        };
        let with = |pictures: usize, side: u32| -> Result<Option<Prompt>> {
            let size = MediumInfo { width_px: Some(side), height_px: Some(side), ..MediumInfo::default() };
            let plans = self.plans(&vec![picture.clone(); pictures], &vec![size; pictures])?;
            if plans.iter().map(|plan| plan.tokens).sum::<usize>() > max_tokens {
                return Ok(None);
            }
            let parts = (0..pictures).map(|index| Part::Medium { kind: MediumKind::Image, index }).collect();
            let shown = self.shown(plans.iter().map(MediumPlan::shown))?;
            let rendered = self.render_turns(&[Turn { role: Role::Tool, parts }], &shown)?;
            let fits = rendered.ids.len() <= max_tokens;
            fits.then(|| self.placed(rendered, self.empty(plans), Vec::new())).transpose()
        };
        for pictures in (1..=pictures).rev() {
            let smaller = |side: &u32| Some(side * 7 / 8).filter(|side| *side >= SMALLEST_PX);
            for side in std::iter::successors(Some(LARGEST_PX), smaller) {
                if let Some(turn) = with(pictures, side)? {
                    return Ok(Some(turn));
                }
            }
        }
        Ok(None)
    }

    fn render_turns(&self, turns: &[Turn], media: &[MediumTokens]) -> Result<RenderedPrompt> {
        let turns = self.family.processor().arrange(turns);
        let renderer = PromptRenderer::new(&self.tokenizer, &self.template);
        match renderer.render_turns(&turns, media, &self.settings.render, &self.stops) {
            // The template renders these turns alone, so they are the reason.
            Err(error @ TextError::TemplateWork { .. }) => {
                Err(ModelError::SaysTooMuch { what: error.to_string() })
            }
            rendered => Ok(rendered?.prompt),
        }
    }

    /// Builds a turn from the tokens and media of an earlier [`Self::turn`].
    ///
    /// # Errors
    /// Returns an error if a medium is unreadable or does not fill its spans.
    pub fn restored_turn(&self, rendered: RenderedPrompt, media: &[MediumRef]) -> Result<Prompt> {
        let media = self.media(media)?;
        let shown = self.shown_media(&media)?;
        let mut features = vec![0; media.len()];
        for span in &rendered.spans {
            let fits = span.start.checked_add(span.len).is_some_and(|end| end <= rendered.ids.len());
            *features.get_mut(span.medium).filter(|_| fits).ok_or_else(|| ModelError::AddedTurn {
                what: "a span is outside of the turn's tokens and media".to_owned(),
            })? += span.len;
        }
        if features != shown.iter().map(num_features).collect::<Vec<_>>() {
            return Err(ModelError::AddedTurn {
                what: format!("its media have other sizes than before: {features:?} tokens were recorded"),
            });
        }
        self.placed(rendered, media, Vec::new())
    }

    /// Reads media.
    ///
    /// # Errors
    /// Returns an error if a medium is unreadable.
    pub fn media(&self, media: &[MediumRef]) -> Result<Vec<Arc<MediumInput>>> {
        let (processor, settings) = (self.family.processor(), &self.settings.media);
        media.iter().map(|m| Ok(Arc::new(processor.prepare(m, settings)?))).collect()
    }

    /// Builds a finished conversation with its media, for a reward model that judges the last answer.
    ///
    /// # Errors
    /// Returns an error if the last turn is not the assistant's, the media differ from those of the turns, or the conversation
    /// exceeds the limit. Conversations are never truncated.
    pub fn finished(&self, turns: &[Turn], media: Vec<Arc<MediumInput>>) -> Result<Prompt> {
        let tokens = self.shown_media(&media)?;
        self.prompt(turns, self.render_finished(turns, &tokens)?, media)
    }

    /// Checks that a finished conversation can be read, and counts its tokens. Reads only the headers of its media.
    pub fn check_finished(&self, turns: &[Turn], media: &[MediumRef]) -> Result<usize> {
        let plans = self.plans(media, &self.headers(media)?)?;
        let rendered = self.render_finished(turns, &self.shown(plans.iter().map(MediumPlan::shown))?)?;
        Ok(rendered.ids.len())
    }

    fn render_finished(&self, turns: &[Turn], media: &[MediumTokens]) -> Result<RenderedPrompt> {
        // The limits of a run do not apply to a reward model.
        let too_long = |tokens| ModelError::PromptTooLong {
            tokens,
            limit: self.model_tokens(),
            which: "the positions of the reward model".into(),
            remedy: "shorten the text, or set fewer frames or pixels in the row".to_owned(),
        };
        let features: usize = media.iter().map(num_features).sum();
        if features > self.model_tokens().max(MOST_RENDERED) {
            return Err(too_long(features));
        }
        let arranged = self.arranged(turns, media);
        let renderer = PromptRenderer::new(&self.tokenizer, &self.template);
        let options = &self.settings.render;
        let rendered = renderer.render_conversation(&arranged, media, options, &self.stops)?.prompt;
        match rendered.ids.len() {
            tokens if tokens > self.model_tokens() => Err(too_long(tokens)),
            _ => Ok(rendered),
        }
    }

    /// Returns the length of the longest prompt that leaves room for a completion, in tokens.
    fn model_tokens(&self) -> usize {
        let positions = self.family.architecture().decoder_config().max_positions;
        positions.saturating_sub(self.settings.max_completion_length)
    }

    /// Builds a supervised example from a row in a given pass over the data. Its tokens are those of a completion with turns of an
    /// environment: the template renders each turn apart, so it cannot rewrite an earlier turn of the model.
    ///
    /// # Errors
    /// Returns an error if the row has no answer, a medium is unreadable, or the example exceeds a limit.
    pub fn build_sft(&self, sample: &Sample, epoch: u64) -> Result<SftExample> {
        let media = sample.sft_media();
        let (_, media) =
            self.read((sample.row, &media), epoch, |headers| self.plan_all(sample, &media, headers))?;
        self.example(sample, &media)
    }

    /// Builds a supervised example without decoding. Its media have the right size and no content.
    ///
    /// # Errors
    /// Returns an error as [`Self::build_sft`] does.
    pub fn outline_sft(&self, sample: &Sample) -> Result<SftExample> {
        let (_, plans) = self.plan_sft(sample, &self.headers(&sample.media)?)?;
        self.example(sample, &self.empty(plans))
    }

    /// Counts the tokens of a supervised example and plans its media from their headers, like [`Self::plan`].
    pub fn plan_sft(&self, sample: &Sample, headers: &[MediumInfo]) -> Result<(usize, Vec<MediumPlan>)> {
        let later = self.headers(&sample.reference.media)?;
        self.plan_all(sample, &sample.sft_media(), &[headers, &later].concat())
    }

    /// Counts the tokens of a supervised example and plans all of its media from their headers.
    fn plan_all(
        &self,
        sample: &Sample,
        media: &[MediumRef],
        headers: &[MediumInfo],
    ) -> Result<(usize, Vec<MediumPlan>)> {
        let plans = self.plans(media, headers)?;
        let pieces = self.pieces(sample, &self.shown(plans.iter().map(MediumPlan::shown))?)?;
        Ok((pieces.iter().map(|piece| piece.before.ids.len() + piece.imitated.len()).sum(), plans))
    }

    /// Builds a supervised example from the decoded media of a row.
    fn example(&self, sample: &Sample, media: &[Arc<MediumInput>]) -> Result<SftExample> {
        let mut pieces = self.pieces(sample, &self.shown_media(media)?)?.into_iter();
        let of = |piece: &Piece| piece.media.iter().map(|&at| Arc::clone(&media[at])).collect::<Vec<_>>();
        let first = pieces.next().ok_or(ModelError::NoAnswer)?;
        let own = of(&first);
        let mut prompt = self.prompt(&sample.turns, first.before, own)?;
        let (mut target, mut turns) = (first.imitated, Vec::new());
        for piece in pieces {
            let own = of(&piece);
            let places = prompt.media.len()..prompt.media.len() + own.len();
            prompt.media.extend(own.iter().cloned());
            let start = target.len();
            target.extend(&piece.before.ids);
            target.extend(piece.imitated);
            turns.push(AddedTurn {
                start,
                turn: Arc::new(self.placed(piece.before, own, Vec::new())?),
                media: places.collect(),
                sources: Vec::new(),
                said: Turn { role: Role::Tool, parts: Vec::new() },
            });
        }
        Ok(SftExample { prompt, target, turns })
    }

    /// Splits a row into the turns that supervised training imitates, each with what the model reads before it.
    fn pieces(&self, sample: &Sample, media: &[MediumTokens]) -> Result<Vec<Piece>> {
        let turns = [sample.turns.clone(), sample.sft_turns()].concat();
        let asked = turns.iter().position(|turn| turn.role == Role::User).unwrap_or(turns.len());
        let first = sample.reference.from.max(asked);
        let answers = (first..turns.len()).filter(|&at| turns[at].role == Role::Assistant);
        let renderer = PromptRenderer::new(&self.tokenizer, &self.template);
        let lead = renderer.answer_lead(&self.settings.render);
        let (mut pieces, mut from, mut tokens): (Vec<Piece>, _, _) = (Vec::new(), 0, 0);
        for at in answers {
            let (before, shown) = own_media(&turns[from..at], media);
            let tokens_of: Vec<MediumTokens> = shown.iter().map(|&medium| media[medium].clone()).collect();
            if !pieces.is_empty() && !shown.is_empty() && self.settings.render.add_vision_id {
                return Err(ModelError::AddedTurn {
                    what: "add_vision_id numbers the media of a whole conversation; leave it out for rows that show media after a turn \
                           of the model"
                        .to_owned(),
                });
            }
            let before = match pieces.is_empty() {
                true => self.render(sample, &before, &tokens_of)?,
                false => self.render_turns(&before, &tokens_of)?,
            };
            let imitated = self.imitated_ids(&format!("{lead}{}", renderer.said(&turns[at])))?;
            tokens += before.ids.len() + imitated.len();
            let limit = self.family.architecture().decoder_config().max_positions;
            if tokens > limit {
                let (which, remedy) =
                    ("the model's positions".into(), "shorten the row, or use fewer pixels".to_owned());
                return Err(ModelError::PromptTooLong { tokens, limit, which, remedy });
            }
            pieces.push(Piece { before, media: shown, imitated });
            from = at + 1;
        }
        if pieces.is_empty() { Err(ModelError::NoAnswer) } else { Ok(pieces) }
    }

    /// Returns the tokens of a turn of the model, with the token that ends it.
    ///
    /// # Errors
    /// Returns an error if the tokenizer cannot encode it.
    fn imitated_ids(&self, text: &str) -> Result<Vec<u32>> {
        let placeholders = self.family.processor().placeholder_ids();
        // If the end of a turn is ordinary text, it is encoded together with the answer, as in the text that templates write.
        let end =
            self.family.processor().stop_tokens().iter().find(|stop| self.tokenizer.token_id(stop).is_none());
        let answer = format!("{text}{}", end.copied().unwrap_or_default());
        let mut ids = self.tokenizer.encode_control(&answer, &placeholders)?;
        if end.is_none() {
            ids.push(self.template_stop().ok_or(ModelError::NoStopToken)?);
        }
        Ok(ids)
    }

    /// Encodes the text of a completion. Control tokens are recognised, media placeholders are not, and nothing is appended.
    ///
    /// # Errors
    /// Returns an error if the tokenizer cannot encode the text.
    pub fn completion_ids(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.tokenizer.encode_control(text, &self.family.processor().placeholder_ids())?)
    }

    /// Returns the tokens of a completion that a row contains, its own or those of its text, with the turns of an environment.
    /// `media` holds the media of its group so far, first those of the prompt. Other media of the turns are appended there.
    ///
    /// # Errors
    /// Returns an error if the completion has neither tokens nor text, if a text cannot be encoded, if a medium is unreadable, or
    /// if a turn has other tokens than the recorded ones.
    pub fn recorded(
        &self,
        completion: &RecordedCompletion,
        media: &mut Vec<Arc<MediumInput>>,
    ) -> Result<(Vec<u32>, Vec<AddedTurn>)> {
        let unlike = |what: String| ModelError::AddedTurn { what };
        let whole = completion.completion_ids.as_deref();
        let (mut ids, mut turns) = (Vec::new(), Vec::new());
        for (number, recorded) in completion.turns.iter().enumerate() {
            match whole {
                Some(whole) => {
                    let left = whole.get(ids.len()..).unwrap_or_default();
                    ids.extend(recorded_tokens(number, recorded, left)?);
                }
                None => {
                    ids.extend(self.completion_ids(&recorded.model)?);
                    ids.push(self.turn_stop()?);
                }
            }
            let (start, said) = (ids.len(), &recorded.said);
            let built = self.turn(said, &recorded.media, usize::MAX)?;
            let turn =
                built.ok_or_else(|| unlike(format!("turn {number} of the environment is too long")))?;
            let end = start + turn.ids.len();
            if start == 0 || whole.is_some_and(|whole| whole.get(start..end) != Some(turn.ids.as_slice())) {
                return Err(unlike(format!(
                    "turn {number} of the environment has other tokens than `completion_ids`: it was recorded with another \
                     checkpoint or other settings of media"
                )));
            }
            let mut places = Vec::with_capacity(turn.media.len());
            for medium in &turn.media {
                let known = media.iter().position(|known| known == medium);
                places.push(known.unwrap_or(media.len()));
                if known.is_none() {
                    media.push(Arc::clone(medium));
                }
            }
            ids.extend(&turn.ids);
            turns.push(AddedTurn {
                start,
                turn: Arc::new(turn),
                media: places,
                sources: recorded.media.clone(),
                said: said.clone(),
            });
        }
        match (whole, &completion.text) {
            (Some(whole), _) => ids.extend(whole.get(ids.len()..).unwrap_or_default()),
            (None, Some(text)) => ids.extend(self.completion_ids(text)?),
            (None, None) => return Err(ModelError::NoCompletion),
        }
        Ok((ids, turns))
    }

    /// Returns the token that ends an assistant turn: `<|im_end|>` or the tokenizer's own end token if it is a stop, else the
    /// first stop.
    fn template_stop(&self) -> Option<u32> {
        let turn_end = self.tokenizer.token_id("<|im_end|>").filter(|id| self.stops.is_stop(*id));
        turn_end
            .or_else(|| self.tokenizer.eos_token().filter(|id| self.stops.is_stop(*id)))
            .or_else(|| self.stops.ids.first().copied())
    }

    /// Plans media by their headers. A random number of frames is replaced by its maximum.
    fn plans(&self, media: &[MediumRef], headers: &[MediumInfo]) -> Result<Vec<MediumPlan>> {
        let settings = MediaSettings { dynamic_sample: false, ..self.settings.media.clone() };
        let plan = |(m, header)| self.family.processor().plan(m, header, &settings);
        media.iter().zip(headers).map(plan).collect()
    }

    /// Returns the tokens of media in the prompt. The tokens of a clip that is interleaved with its sound include those of the sound.
    fn shown<'m>(&self, media: impl Iterator<Item = Shown<'m>>) -> Result<Vec<MediumTokens>> {
        let (processor, media) = (self.family.processor(), media.collect::<Vec<_>>());
        let tokens = media.iter().map(|m| processor.tokens(m.kind, m.shape, m.times_secs));
        let mut tokens = tokens.collect::<Result<Vec<_>>>()?;
        for (at, sound) in media.iter().enumerate() {
            let clips = || (0..media.len()).filter(|&m| media[m].kind == MediumKind::Video);
            let Some(clip) = sound.of_clip.and_then(|clip| clips().nth(clip)) else { continue };
            if let Some(both) = processor.tokens_with_sound(media[clip], *sound)? {
                tokens[clip] = both;
                tokens[at] = MediumTokens::inside(sound.kind);
            }
        }
        Ok(tokens)
    }

    fn shown_media(&self, media: &[Arc<MediumInput>]) -> Result<Vec<MediumTokens>> {
        self.shown(media.iter().map(|m| m.shown()))
    }

    /// Returns the text of a prompt, whose end is what the chat template writes before a completion, such as `<think>\n`.
    ///
    /// # Errors
    /// Returns an error if the template cannot render a question.
    pub fn rendered_question(&self) -> Result<String> {
        let question = self.family.processor().arrange(&[Turn::text(Role::User, "?")]);
        let renderer = PromptRenderer::new(&self.tokenizer, &self.template);
        Ok(renderer.render(&question, &[], &self.settings.render)?.text)
    }

    /// Renders a text as it stands. Control tokens in it count, since the text may be the output of a chat template, and the tokenizer
    /// adds its start token.
    fn continued(&self, text: &str) -> Result<RenderedPrompt> {
        let ids = self.tokenizer.encode_continued(text, &self.family.processor().placeholder_ids())?;
        if ids.is_empty() {
            return Err(ModelError::NoUserTurn);
        }
        self.check_length(ids.len(), &[])?;
        Ok(RenderedPrompt { ids, spans: Vec::new(), text: text.to_owned() })
    }

    /// Returns the conversation in the form to be rendered. Between a clip and the sound inside it there is nothing.
    fn arranged(&self, turns: &[Turn], media: &[MediumTokens]) -> Vec<Turn> {
        let is_inside = |part: &Part| match *part {
            Part::Medium { kind, index } => {
                media.iter().filter(|m| m.kind == kind).nth(index).is_some_and(MediumTokens::is_inside)
            }
            _ => false,
        };
        let mut turns = turns.to_vec();
        for turn in &mut turns {
            for at in (2..turn.parts.len()).rev() {
                let is_space = |part: &Part| matches!(part, Part::Text(text) if text.trim().is_empty());
                if is_inside(&turn.parts[at]) && is_space(&turn.parts[at - 1]) {
                    turn.parts.remove(at - 1);
                }
            }
        }
        self.family.processor().arrange(&turns)
    }

    /// Renders turns of a row, with the tools of the row if it has its own.
    fn render(&self, sample: &Sample, turns: &[Turn], media: &[MediumTokens]) -> Result<RenderedPrompt> {
        if sample.is_text {
            return self.continued(&sample.question());
        }
        let turns = &self.arranged(turns, media);
        if !turns.iter().any(|turn| turn.role == Role::User) {
            return Err(ModelError::NoUserTurn);
        }
        let features = media.iter().map(num_features).sum();
        if features > MOST_RENDERED {
            self.check_length(features, media)?;
        }
        let renderer = PromptRenderer::new(&self.tokenizer, &self.template);
        let own = sample.tools.as_ref();
        let own = own.map(|tools| RenderOptions { tools: tools.clone(), ..self.settings.render.clone() });
        let rendered = renderer.render(turns, media, own.as_ref().unwrap_or(&self.settings.render))?;
        self.check_length(rendered.ids.len(), media)?;
        Ok(rendered)
    }

    fn prompt(
        &self,
        turns: &[Turn],
        rendered: RenderedPrompt,
        media: Vec<Arc<MediumInput>>,
    ) -> Result<Prompt> {
        let instruction = self.family.processor().instruction_ids(turns)?;
        let prompt = self.placed(rendered, media, instruction)?;
        let (config, last) = (self.family.architecture().decoder_config(), prompt.next_position as usize);
        if config.rope.scaling == RopeScaling::Dynamic
            && last + self.settings.max_completion_length > config.max_positions
        {
            return Err(ModelError::PromptPositions {
                reached: last,
                completion: self.settings.max_completion_length,
                limit: config.max_positions,
            });
        }
        Ok(prompt)
    }

    /// Adds media and positions to rendered tokens.
    fn placed(
        &self,
        rendered: RenderedPrompt,
        media: Vec<Arc<MediumInput>>,
        instruction: Vec<u32>,
    ) -> Result<Prompt> {
        let RenderedPrompt { ids, spans, text } = rendered;
        let (positions, next_position) = self.family.processor().positions(ids.len(), &spans, &media)?;
        Ok(Prompt { ids, spans, positions, next_position, media, instruction, text })
    }

    /// Compares a prompt of `tokens`, which include the features of media, with the model's limit and that of the settings.
    /// Tokens are counted for the latter as the family does. The error names the limit and a remedy. If more than a fifth of the
    /// tokens belong to one kind of media, the remedy names the settings of that kind.
    fn check_length(&self, tokens: usize, media: &[MediumTokens]) -> Result<()> {
        let of = |kind| media.iter().filter(|m| m.kind == kind).map(num_features).sum::<usize>();
        let kinds = MediumKind::ALL;
        let as_one = self.family.processor().counts_medium_as_one();
        let counted = match as_one {
            true => tokens.saturating_sub(kinds.into_iter().map(of).sum()) + media.len(),
            false => tokens,
        };
        let model = self.model_tokens();
        let given =
            self.settings.max_prompt_length.filter(|&given| counted > given && (given <= model || as_one));
        if given.is_none() && tokens <= model {
            return Ok(());
        }
        let longest = kinds.into_iter().max_by_key(|kind| of(*kind));
        let longest = longest.filter(|kind| 5 * of(*kind) > tokens && !(as_one && given.is_some()));
        let shorten = match longest {
            Some(kind) => self.family.processor().shorten(kind).unwrap_or_else(|| "use fewer media".into()),
            None => "shorten the text".into(),
        };
        let (tokens, limit, which, or) = match given {
            Some(given) => {
                (counted, given, MAX_PROMPT_LENGTH.to_string(), format!(", or raise {MAX_PROMPT_LENGTH}"))
            }
            None => (
                tokens,
                model,
                format!("the model's positions minus {MAX_COMPLETION_LENGTH}"),
                format!(", or lower {MAX_COMPLETION_LENGTH}"),
            ),
        };
        Err(ModelError::PromptTooLong { tokens, limit, which, remedy: format!("{shorten}{or}") })
    }
}

/// Largest number of bytes of text that an environment may say in one turn, or add to a row before the first.
pub const MAX_SAID_BYTES: usize = 1 << 20;
/// Largest number of texts and media that an environment may say in one turn, or add to a row before the first.
pub const MAX_SAID_PARTS: usize = 1 << 10;

/// Returns [`ModelError::SaysTooMuch`] if a number of texts and media, or the bytes of the texts, exceed [`MAX_SAID_PARTS`] or
/// [`MAX_SAID_BYTES`].
pub fn check_said(parts: usize, bytes: usize) -> Result<()> {
    let what = if parts > MAX_SAID_PARTS {
        format!("{parts} texts and media, expected at most {MAX_SAID_PARTS}")
    } else if bytes > MAX_SAID_BYTES {
        format!("{bytes} bytes of text, expected at most {MAX_SAID_BYTES}")
    } else {
        return Ok(());
    };
    Err(ModelError::SaysTooMuch { what })
}

/// Returns the number of parts of turns, and the bytes of their texts.
fn size_of(turns: &[Turn]) -> (usize, usize) {
    let bytes = |part: &Part| if let Part::Text(text) = part { text.len() } else { 0 };
    let parts = turns.iter().flat_map(|turn| &turn.parts);
    (parts.clone().count(), parts.map(bytes).sum())
}

/// Number of feature tokens above which a prompt is checked before rendering. A medium may be too large for any prompt, and its
/// tokens are then never written out.
const MOST_RENDERED: usize = 1 << 20;

/// Turn of the model that supervised training imitates.
struct Piece {
    /// Turns that the model reads before it.
    before: RenderedPrompt,
    /// Media in `before`, as indices of the row's media.
    media: Vec<usize>,
    /// Tokens of the turn.
    imitated: Vec<u32>,
}

/// Returns turns of a conversation with media counted from the first of these turns, and the indices of these media.
fn own_media(turns: &[Turn], media: &[MediumTokens]) -> (Vec<Turn>, Vec<usize>) {
    let mut own: Vec<usize> = Vec::new();
    let mut part = |part: &Part| match part {
        &Part::Medium { kind, index } => {
            let same = |at: &usize| media[*at].kind == kind;
            let before = own.iter().filter(|at| same(at)).count();
            own.extend((0..media.len()).filter(same).nth(index));
            Part::Medium { kind, index: before }
        }
        other => other.clone(),
    };
    let mut turn = |turn: &Turn| Turn { role: turn.role, parts: turn.parts.iter().map(&mut part).collect() };
    (turns.iter().map(&mut turn).collect(), own)
}

fn num_features(medium: &MediumTokens) -> usize {
    let count = |segment: &MediumSegment| match segment {
        MediumSegment::Features { count, .. } | MediumSegment::Inner { count, .. } => *count,
        MediumSegment::Text(_) => 0,
    };
    medium.segments.iter().map(count).sum()
}

/// Returns the tokens of a recorded turn of the model, the first of those that are left.
fn recorded_tokens<'w>(number: usize, recorded: &RecordedTurn, left: &'w [u32]) -> Result<&'w [u32]> {
    let unlike = |what: &str| ModelError::AddedTurn { what: format!("turn {number} {what}") };
    let tokens = recorded.model_tokens.ok_or_else(|| {
        unlike(
            "has no `model_tokens`, so its place in `completion_ids` is unknown; leave out the ids to tokenise the texts",
        )
    })?;
    left.get(..tokens).ok_or_else(|| unlike("of the model has more tokens than `completion_ids`"))
}
