//! From a dataset row to a prompt ready for the model.

use std::sync::Arc;

use omnigrpo_data::{MediumInfo, MediumRef, RecordedCompletion, Sample};
use omnigrpo_text::{
    ChatTemplate, MediumKind, MediumSegment, MediumTokens, PromptRenderer, RenderOptions, RenderedPrompt,
    Role, Span, StopSet, Tokenizer, Turn,
};

use crate::checkpoint::Checkpoint;
use crate::decoder::Position;
use crate::error::{ModelError, Result};
use crate::families::{Family, MediaSettings, MediumInput, MediumKey, MediumPlan, MediumShape, probe_medium};
use crate::media_store::{Decoded, MediaStore};
use crate::rope::RopeScaling;
use crate::stream::next_key;

/// A rendered prompt with its media.
#[derive(Clone, Debug, PartialEq)]
pub struct Prompt {
    /// Token ids, media expanded.
    pub ids: Vec<u32>,
    /// Which ids stand for features of which medium.
    pub spans: Vec<Span>,
    /// Position of each id.
    pub positions: Vec<Position>,
    /// Position of the first completion token, on all axes.
    pub next_position: u32,
    /// Decoded media, in the order of the sample.
    pub media: Vec<Arc<MediumInput>>,
    /// Ids of the question that the projector reads; empty for families whose projector does not.
    pub instruction: Vec<u32>,
    /// The rendered text, one marker per medium.
    pub text: String,
}

impl Prompt {
    /// The name of the prompt in the dropout of adapters: it differs between prompts, also where only pictures differ (of whose
    /// numbers a sample is enough).
    pub(crate) fn key(&self) -> u64 {
        const SAMPLE: usize = 256;
        let text = self.ids.iter().fold(0, |key, &id| next_key(key, id));
        let media = self.media.iter().flat_map(|m| m.data.iter().step_by(m.data.len() / SAMPLE + 1));
        media.fold(text, |key, x| next_key(key, x.to_bits()))
    }

    /// The name of one of its media there.
    pub(crate) fn medium_key(&self, medium: usize) -> u64 {
        next_key(self.key(), medium as u32)
    }
}

/// How prompts are made.
#[derive(Clone, Debug)]
pub struct PromptSettings {
    /// How media are read.
    pub media: MediaSettings,
    /// How text is rendered.
    pub render: RenderOptions,
    /// Longest prompt in tokens, media expanded. `None`: what the model allows.
    pub max_prompt_length: Option<usize>,
    /// Room to leave for the completion within the model's positions, tokens.
    pub max_completion_length: usize,
    /// Strings that end a completion, besides the checkpoint's stop tokens.
    pub stop_strings: Vec<String>,
}

impl Default for PromptSettings {
    /// Media and text as the checkpoint says, prompts as long as the model allows with room for 256 tokens.
    fn default() -> Self {
        Self {
            media: MediaSettings::default(),
            render: RenderOptions::default(),
            max_prompt_length: None,
            max_completion_length: 256,
            stop_strings: Vec::new(),
        }
    }
}

/// A conversation to imitate: prompt, target tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct SftExample {
    /// The conversation up to the answer.
    pub prompt: Prompt,
    /// The answer with the token that ends it.
    pub target: Vec<u32>,
}

/// Makes prompts for one checkpoint: its chat template around the conversation of a row, and the row's media.
///
/// ```
/// use std::path::Path;
///
/// use omnigrpo_data::{ReadOptions, Sample};
/// use omnigrpo_models::{Checkpoint, PromptBuilder, PromptSettings};
/// use serde_json::json;
///
/// # let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/checkpoints/qwen2_vl_untied");
/// let checkpoint = Checkpoint::open(directory.as_ref())?;
/// let prompts = PromptBuilder::open(&checkpoint, PromptSettings::default())?;
/// let row = json!({ "prompt": "Which is larger, 3 or 5?" });
/// let sample = Sample::from_row(row, "mine", Path::new("."), &ReadOptions::default())?;
/// let prompt = prompts.build(&sample)?;
/// assert!(prompt.text.contains("3 or 5?") && prompt.media.is_empty());
/// assert_eq!(prompts.tokenizer().decode(&prompt.ids, false)?, prompt.text);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct PromptBuilder {
    family: Arc<Family>,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    stops: StopSet,
    settings: PromptSettings,
    media_store: Arc<MediaStore>,
}

impl PromptBuilder {
    /// Reads tokenizer, chat template and stop tokens of a checkpoint.
    ///
    /// # Errors
    /// Missing or malformed files, settings without effect.
    pub fn open(checkpoint: &Checkpoint, settings: PromptSettings) -> Result<Self> {
        let (dir, family) = (checkpoint.dir(), Arc::clone(checkpoint.family()));
        let tokenizer = Tokenizer::from_dir(dir)?;
        let template = family.processor().chat_template(dir)?;
        let stops = family.stops(dir, &tokenizer, &settings.stop_strings)?;
        family.check_settings(&settings.media)?;
        let media_store = Arc::clone(checkpoint.media_store());
        Ok(Self { family, tokenizer, template, stops, settings, media_store })
    }

    /// The tokenizer.
    #[must_use]
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Returns the rules that end a completion.
    #[must_use]
    pub fn stops(&self) -> &StopSet {
        &self.stops
    }

    /// How prompts are made.
    #[must_use]
    pub fn settings(&self) -> &PromptSettings {
        &self.settings
    }

    /// Where decoded media are kept.
    #[must_use]
    pub fn media_store(&self) -> &MediaStore {
        &self.media_store
    }

    /// The family.
    #[must_use]
    pub fn family(&self) -> &Family {
        &self.family
    }

    /// Decodes a row's media and renders its prompt. Headers are read first, so that no medium is decoded for a prompt over
    /// the limit.
    ///
    /// # Errors
    /// An unreadable medium, a prompt over the limit (which is never cut).
    pub fn build(&self, sample: &Sample) -> Result<Prompt> {
        self.build_in(sample, 0)
    }

    /// Makes the prompt of this pass over the data: rows that draw their number of frames draw again in each.
    pub fn build_in(&self, sample: &Sample, epoch: u64) -> Result<Prompt> {
        let keys = (0..sample.media.len() as u64).map(|index| MediumKey { row: sample.row, index, epoch });
        let settings: Vec<MediaSettings> = keys.map(|key| self.settings.media.keyed(key)).collect();
        let each = || sample.media.iter().zip(&settings);
        let found: Vec<_> = each().map(|(m, settings)| self.media_store.find(m, settings)).collect();
        let headers = sample.media.iter().zip(&found).map(|(m, found)| match &found.decoded {
            Some(decoded) => Ok(decoded.header.clone()),
            None => probe_medium(m, &self.settings.media.limits),
        });
        let headers = headers.collect::<Result<Vec<_>>>()?;
        let (rendered, plans) = self.plan(sample, &headers)?;
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
        // Fewer frames may have been drawn, and a header may promise what the file does not hold.
        let shown = self.shown(media.iter().map(|m| (m.kind, &m.shape, &m.frame_times_secs[..])))?;
        let rendered = match shown == self.shown(plans.iter().map(MediumPlan::shown))? {
            true => rendered,
            false => self.render(&sample.turns, &shown)?,
        };
        self.prompt(&sample.turns, rendered, media)
    }

    /// Makes the prompt of a row without decoding: its media have the right size and no content. For outlines of a step.
    ///
    /// # Errors
    /// An unreadable header, a prompt over the limit.
    pub fn outline(&self, sample: &Sample) -> Result<Prompt> {
        let limits = &self.settings.media.limits;
        let headers = sample.media.iter().map(|m| probe_medium(m, limits)).collect::<Result<Vec<_>>>()?;
        let (rendered, plans) = self.plan(sample, &headers)?;
        let empty = |plan: MediumPlan| {
            // A mask of zeros would leave nothing of a picture.
            let masked = matches!(plan.shape, MediumShape::Masked { .. });
            Arc::new(MediumInput {
                data: vec![f32::from(u8::from(masked)); self.family.processor().numbers(&plan.shape)],
                kind: plan.kind,
                shape: plan.shape,
                seconds_per_grid: 1.0,
                frame_times_secs: plan.frame_times_secs,
            })
        };
        let media = plans.into_iter().map(empty).collect();
        self.prompt(&sample.turns, rendered, media)
    }

    /// The prompt and its media from headers alone, without decoding. `headers` are those of the row's media, in order. Rows
    /// that draw their number of frames have the largest: what fits then fits in every epoch.
    pub fn plan(&self, sample: &Sample, headers: &[MediumInfo]) -> Result<(RenderedPrompt, Vec<MediumPlan>)> {
        let plans = self.plans(&sample.media, headers)?;
        let rendered = self.render(&sample.turns, &self.shown(plans.iter().map(MediumPlan::shown))?)?;
        Ok((rendered, plans))
    }

    /// Reads media.
    ///
    /// # Errors
    /// An unreadable medium.
    pub fn media(&self, media: &[MediumRef]) -> Result<Vec<Arc<MediumInput>>> {
        let (processor, settings) = (self.family.processor(), &self.settings.media);
        media.iter().map(|m| Ok(Arc::new(processor.prepare(m, settings)?))).collect()
    }

    /// A finished conversation with its media, as a model reads it that judges its last answer.
    ///
    /// # Errors
    /// A last turn that is not the assistant's, media other than those the turns show, a conversation over the limit (which is
    /// never cut).
    pub fn finished(&self, turns: &[Turn], media: Vec<Arc<MediumInput>>) -> Result<Prompt> {
        let tokens = self.shown(media.iter().map(|m| (m.kind, &m.shape, &m.frame_times_secs[..])))?;
        self.prompt(turns, self.render_finished(turns, &tokens)?, media)
    }

    /// The tokens of a finished conversation that can be read, from the headers of its media alone.
    pub fn check_finished(&self, turns: &[Turn], media: &[MediumRef]) -> Result<usize> {
        let limits = &self.settings.media.limits;
        let headers = media.iter().map(|m| probe_medium(m, limits)).collect::<Result<Vec<_>>>()?;
        let plans = self.plans(media, &headers)?;
        let rendered = self.render_finished(turns, &self.shown(plans.iter().map(MediumPlan::shown))?)?;
        Ok(rendered.ids.len())
    }

    fn render_finished(&self, turns: &[Turn], media: &[MediumTokens]) -> Result<RenderedPrompt> {
        // Settings of a run do not reach a model that judges.
        let too_long = |tokens| ModelError::PromptTooLong {
            tokens,
            limit: self.model_tokens(),
            which: "the positions of the model that judges",
            remedy: "shorten the text, or let the row name fewer frames or pixels".to_owned(),
        };
        let features: usize = media.iter().map(num_features).sum();
        if features > self.model_tokens().max(MOST_RENDERED) {
            return Err(too_long(features));
        }
        let arranged = self.family.processor().arrange(turns);
        let renderer = PromptRenderer::new(&self.tokenizer, &self.template);
        let options = &self.settings.render;
        let rendered = renderer.render_conversation(&arranged, media, options, &self.stops)?.prompt;
        match rendered.ids.len() {
            tokens if tokens > self.model_tokens() => Err(too_long(tokens)),
            _ => Ok(rendered),
        }
    }

    /// Tokens of the longest prompt that leaves the model room for a completion.
    fn model_tokens(&self) -> usize {
        let positions = self.family.architecture().decoder_config().max_positions;
        positions.saturating_sub(self.settings.max_completion_length)
    }

    /// A row as a supervised example: its prompt in that epoch, and its reference answer with the stop token as target.
    pub fn build_sft(&self, sample: &Sample, epoch: u64) -> Result<SftExample> {
        self.with_answer(sample, self.build_in(sample, epoch)?)
    }

    /// Makes an example of a row from its prompt.
    ///
    /// # Errors
    /// A row without an answer, a tokenizer that cannot encode it.
    pub fn with_answer(&self, sample: &Sample, prompt: Prompt) -> Result<SftExample> {
        let Some(answer) = sample.sft_target() else {
            return Err(ModelError::NoAnswer);
        };
        let placeholders = self.family.processor().placeholder_ids();
        // An end of turn that is ordinary text is encoded with the answer before it, as templates write both.
        let end =
            self.family.processor().stop_tokens().iter().find(|stop| self.tokenizer.token_id(stop).is_none());
        let answer = format!("{answer}{}", end.copied().unwrap_or_default());
        let mut target = self.tokenizer.encode_control(&answer, &placeholders)?;
        if end.is_none() {
            match self.template_stop() {
                Some(stop) => target.push(stop),
                None => return Err(ModelError::NoStopToken),
            }
        }
        Ok(SftExample { prompt, target })
    }

    /// Completion text as ids: control tokens are recognised, media placeholders are not, nothing is appended.
    ///
    /// # Errors
    /// Text the tokenizer cannot encode.
    pub fn completion_ids(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.tokenizer.encode_control(text, &self.family.processor().placeholder_ids())?)
    }

    /// The ids of a completion that came with a row: its own, else those of its text.
    ///
    /// # Errors
    /// Neither of the two, or text the tokenizer cannot encode.
    pub fn recorded_ids(&self, completion: &RecordedCompletion) -> Result<Vec<u32>> {
        match (&completion.completion_ids, &completion.text) {
            (Some(ids), _) => Ok(ids.clone()),
            (None, Some(text)) => self.completion_ids(text),
            (None, None) => Err(ModelError::NoCompletion),
        }
    }

    /// The token that ends an assistant turn: the tokenizer's own end token where it is a stop, else the first stop.
    fn template_stop(&self) -> Option<u32> {
        let turn_end = self.tokenizer.token_id("<|im_end|>").filter(|id| self.stops.is_stop(*id));
        turn_end
            .or_else(|| self.tokenizer.eos_token().filter(|id| self.stops.is_stop(*id)))
            .or_else(|| self.stops.ids.first().copied())
    }

    /// Plans media by their headers, with the largest number of frames where it is drawn.
    fn plans(&self, media: &[MediumRef], headers: &[MediumInfo]) -> Result<Vec<MediumPlan>> {
        let settings = MediaSettings { dynamic_sample: false, ..self.settings.media.clone() };
        let plan = |(m, header)| self.family.processor().plan(m, header, &settings);
        media.iter().zip(headers).map(plan).collect()
    }

    /// How media appear in the prompt.
    fn shown<'m>(
        &self,
        media: impl Iterator<Item = (MediumKind, &'m MediumShape, &'m [f64])>,
    ) -> Result<Vec<MediumTokens>> {
        media.map(|(kind, shape, times)| self.family.processor().tokens(kind, shape, times)).collect()
    }

    fn render(&self, turns: &[Turn], media: &[MediumTokens]) -> Result<RenderedPrompt> {
        let turns = &self.family.processor().arrange(turns);
        if !turns.iter().any(|turn| turn.role == Role::User) {
            return Err(ModelError::NoUserTurn);
        }
        let features = media.iter().map(num_features).sum();
        if features > MOST_RENDERED {
            self.check_length(features, media)?;
        }
        let renderer = PromptRenderer::new(&self.tokenizer, &self.template);
        let rendered = renderer.render(turns, media, &self.settings.render)?;
        self.check_length(rendered.ids.len(), media)?;
        Ok(rendered)
    }

    fn prompt(
        &self,
        turns: &[Turn],
        rendered: RenderedPrompt,
        media: Vec<Arc<MediumInput>>,
    ) -> Result<Prompt> {
        let (positions, next_position) =
            self.family.processor().positions(rendered.ids.len(), &rendered.spans, &media)?;
        let (config, last) = (self.family.architecture().decoder_config(), next_position as usize);
        if config.rope.scaling == RopeScaling::Dynamic
            && last + self.settings.max_completion_length > config.max_positions
        {
            return Err(ModelError::PromptPositions {
                reached: last,
                completion: self.settings.max_completion_length,
                limit: config.max_positions,
            });
        }
        Ok(Prompt {
            ids: rendered.ids,
            spans: rendered.spans,
            positions,
            next_position,
            media,
            instruction: self.family.processor().instruction_ids(turns)?,
            text: rendered.text,
        })
    }

    /// Compares a prompt of `tokens`, features of media included, with the limits: that of the settings, as the family
    /// counts, and the model's. The error names the limit and what would help: where media are a fifth of what is counted,
    /// the settings of the kind that has most.
    fn check_length(&self, tokens: usize, media: &[MediumTokens]) -> Result<()> {
        let of = |kind| media.iter().filter(|m| m.kind == kind).map(num_features).sum::<usize>();
        let kinds = [MediumKind::Image, MediumKind::Video, MediumKind::Audio];
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
            Some(kind) => self.family.processor().shorten(kind).unwrap_or("give fewer media"),
            None => "shorten the text",
        };
        let (tokens, limit, which, or) = match given {
            Some(given) => (
                counted,
                given,
                "PromptSettings::max_prompt_length",
                ", or raise PromptSettings::max_prompt_length",
            ),
            None => (
                tokens,
                model,
                "the model's positions less PromptSettings::max_completion_length",
                ", or lower PromptSettings::max_completion_length",
            ),
        };
        Err(ModelError::PromptTooLong { tokens, limit, which, remedy: format!("{shorten}{or}") })
    }
}

/// Features of a medium that is too large for any prompt are not written out beyond this many, tokens.
const MOST_RENDERED: usize = 1 << 20;

fn num_features(medium: &MediumTokens) -> usize {
    let count = |segment: &MediumSegment| match segment {
        MediumSegment::Features { count, .. } => *count,
        _ => 0,
    };
    medium.segments.iter().map(count).sum()
}
