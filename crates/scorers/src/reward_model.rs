//! A reward by path: a sequence-classification checkpoint with one output, its own tokenizer and its own chat template. The model
//! reads text, or belongs to a supported family and also reads the row's media.
//!
//! The text is that of TRL (1.16, `GRPOTrainer._calculate_rewards`). If a row's `prompt` is a text, the model reads prompt and
//! completion as one text. Any other row is a conversation: the model's own template renders it, with the completion as the last
//! turn. Text models ignore media. Models of a family read the row's media with their own processor, and always use their
//! template. The media settings of a row (part of a video, frames, pixels) apply to this model too. The media settings of a run
//! apply only to the policy.
//!
//! Deliberate differences from TRL:
//!
//! * Control tokens that appear as text remain ordinary text. In TRL, a completion can forge turns with them.
//! * Encoders get the start and end tokens of their tokenizer, since their heads read the row of the first token.
//! * An encoder without a template reads the last question and the completion, separated by a line break. TRL fails here.
//! * Nothing is truncated. If the prompt alone is too long, the row has an error. If prompt and completion together are too long,
//!   the completion has no value; such completions are counted (`too_long`) and reported.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use omnigrpo_data::MediumRef;
use omnigrpo_guard::{Fault, fault, told};
use omnigrpo_models::{FrozenWeights, MediaClassifier, MediumInput, ModelError, Prompt, SequenceClassifier};
use omnigrpo_ops::Pass;
use omnigrpo_rewards::{Logged, Reward, RewardError, RewardInput, TokenLimit};
use omnigrpo_text::{ChatTemplate, PromptRenderer, RenderOptions, Role, TemplateOrigin, Tokenizer, Turn};

use crate::error::{Result, ScorerError};

/// Reason why a row cannot be scored. If [`omnigrpo_guard::fault`] attributes the failure to the machine, the row may be good.
type Cause = Box<dyn std::error::Error + Send + Sync>;

/// A frozen model that assigns one number to a prompt and its completion.
pub struct RewardModel {
    name: String,
    model: Reader,
    /// Length in tokens of the longest prompt so far.
    longest_prompt: AtomicUsize,
    /// Number of completions of the last batch that were too long.
    too_long: AtomicUsize,
}

enum Reader {
    Text(Box<TextReader>),
    Media(Box<MediaClassifier>),
}

/// A text model, with the tokenizer and template that convert a row into tokens.
struct TextReader {
    model: SequenceClassifier,
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    render: RenderOptions,
}

impl RewardModel {
    /// Loads a directory. `name` is the name of the reward. `render` has the options for rendering prompts, such as a system
    /// text.
    ///
    /// # Errors
    /// Returns an error if a file is unreadable, the architecture is unsupported, the head is missing or has several outputs, or
    /// the tokenizer is missing.
    pub fn load(
        name: &str,
        dir: &Path,
        how: impl Into<FrozenWeights>,
        render: RenderOptions,
    ) -> Result<Self> {
        let model = if MediaClassifier::is_one(dir)? {
            Reader::Media(Box::new(MediaClassifier::load(dir, how, render)?))
        } else {
            // Small files are read first, so that a missing tokenizer is found before gigabytes are read.
            let tokenizer = Tokenizer::from_dir(dir)?;
            let template = ChatTemplate::from_dir(dir)?;
            let template = (template.origin() != TemplateOrigin::BuiltIn).then_some(template);
            let model = SequenceClassifier::load(dir, how)?;
            Reader::Text(Box::new(TextReader { model, tokenizer, template, render }))
        };
        let (longest_prompt, too_long) = Default::default();
        Ok(Self { name: name.to_owned(), model, longest_prompt, too_long })
    }

    /// Returns the maximum number of tokens that the model can read.
    fn max_tokens(&self) -> usize {
        match &self.model {
            Reader::Text(text) => text.model.max_tokens(),
            Reader::Media(model) => model.max_tokens(),
        }
    }

    /// Parses the spec of a reward. Returns the name and location of its model, or `None` if the spec is neither a path nor such
    /// a name.
    ///
    /// The spec is `DIR`, `ORG/MODEL`, or one of them after `NAME=`. Without `NAME=`, the last part of the path is the name.
    pub fn spec(spec: &str) -> Option<(&str, &str)> {
        if spec.contains(':') || spec.ends_with(".py") {
            return None;
        }
        let (name, place) = match spec.split_once('=') {
            Some((name, place)) => (Some(name.trim()), place.trim()),
            None => (None, spec.trim()),
        };
        let is_model = place.contains('/') || Path::new(place).is_dir();
        let last = || Path::new(place).file_name().and_then(|name| name.to_str()).unwrap_or("reward_model");
        is_model.then(|| (name.unwrap_or_else(last), place))
    }

    /// Returns the error of a row or, if the machine failed, of the reward. The source of the error shows which one.
    fn of_row(&self, index: usize, input: &RewardInput<'_>, source: Cause) -> RewardError {
        let reward = self.name.clone();
        if fault(&*source, Fault::Row) == Fault::Machine {
            return RewardError::Failed { reward, source };
        }
        let row = format!("{index} (dataset row {}, sample {})", input.key.row, input.key.sample);
        RewardError::Row { reward, row, what: told(&*source) }
    }
}

/// Returns row and completion as a complete conversation.
fn turns(input: &RewardInput<'_>) -> Vec<Turn> {
    let mut turns = input.turns.to_vec();
    turns.push(Turn::text(Role::Assistant, input.completion));
    turns
}

/// Encodes row and completion for the model. Returns `None` if they are too long. Media that the previous row has already read
/// are taken from `last`.
fn conversation(
    model: &MediaClassifier,
    input: &RewardInput<'_>,
    last: &mut Option<(Vec<MediumRef>, Vec<Arc<MediumInput>>)>,
) -> Result<Option<Prompt>, Cause> {
    let asked = input.media.to_vec();
    let read = match last.take().filter(|(before, _)| *before == asked) {
        Some((_, read)) => read,
        None => model.media(&asked)?,
    };
    *last = Some((asked, read.clone()));
    match model.conversation(&turns(input), read) {
        Ok(prompt) => Ok(Some(prompt)),
        Err(ModelError::PromptTooLong { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Returns one value per completion: the next score for each completion that fits, and `None` for the others.
fn placed(fits: &[bool], scores: Vec<f32>) -> Vec<Option<f64>> {
    let mut scores = scores.into_iter().map(f64::from);
    fits.iter().map(|&fits| if fits { scores.next() } else { None }).collect()
}

impl TextReader {
    /// Returns the tokens of prompt and completion, or the reason why they cannot be encoded.
    fn ids(&self, input: &RewardInput<'_>) -> Result<Vec<u32>, Cause> {
        let is_list = |name: &&str| input.columns.get(*name).is_some_and(serde_json::Value::is_array);
        let is_text = input.columns.get("prompt").is_some_and(serde_json::Value::is_string)
            && ["conversations", "messages"].iter().all(|name| !is_list(name));
        let encoder = self.model.is_encoder();
        let ids = match &self.template {
            Some(template) if !is_text => {
                let renderer = PromptRenderer::new(&self.tokenizer, template);
                renderer.render_finished(&turns(input), &self.render).map(|prompt| prompt.ids)
            }
            None if !is_text && !encoder => {
                return Err("the row is a conversation, and the reward model has no chat template to write it with: put \
                            its chat_template.jinja into its directory, or give `prompt` as a text"
                    .into());
            }
            _ => {
                let between = if is_text { "" } else { "\n" };
                let text = format!("{}{between}{}", input.prompt, input.completion);
                if encoder { self.tokenizer.encode_framed(&text) } else { self.tokenizer.encode_text(&text) }
            }
        };
        let ids = ids?;
        match ids.len() {
            0 => Err("the reward model got no token: prompt and completion are empty".into()),
            _ => Ok(ids),
        }
    }

    fn scores(&self, ids: &[Vec<u32>]) -> omnigrpo_models::Result<Vec<f32>> {
        let slices: Vec<&[u32]> = ids.iter().map(Vec::as_slice).collect();
        // TRL pads with the end token if the tokenizer has no padding token.
        let padding = self.tokenizer.pad_token().or_else(|| self.tokenizer.eos_token());
        self.model.scores(&slices, padding, &Pass::default())
    }
}

impl Reward for RewardModel {
    fn name(&self) -> &str {
        &self.name
    }

    fn range(&self) -> (f64, f64) {
        (f64::NEG_INFINITY, f64::INFINITY)
    }

    fn score(&self, batch: &[RewardInput<'_>]) -> Result<Vec<Option<f64>>, RewardError> {
        let rows = || batch.iter().enumerate();
        let (mut fits, mut scores) = (Vec::with_capacity(batch.len()), Vec::with_capacity(batch.len()));
        let failed = |e| ScorerError::from(e).of_batch(&self.name);
        match &self.model {
            Reader::Text(text) => {
                let mut all = Vec::with_capacity(batch.len());
                for (i, input) in rows() {
                    let ids = text.ids(input).map_err(|what| self.of_row(i, input, what))?;
                    fits.push(ids.len() <= self.max_tokens());
                    all.extend(Some(ids).filter(|ids| ids.len() <= self.max_tokens()));
                }
                scores = text.scores(&all).map_err(failed)?;
            }
            Reader::Media(model) => {
                let mut last = None;
                // Decoded media are large, so only those of one row are in memory at a time.
                for group in rows().collect::<Vec<_>>().chunk_by(|(_, a), (_, b)| a.media == b.media) {
                    let mut own = Vec::with_capacity(group.len());
                    for (i, input) in group {
                        let prompt = conversation(model, input, &mut last);
                        let prompt = prompt.map_err(|what| self.of_row(*i, input, what))?;
                        fits.push(prompt.is_some());
                        own.extend(prompt);
                    }
                    scores.extend(model.scores(&own).map_err(failed)?);
                }
            }
        }
        let too_long = fits.iter().filter(|fits| !**fits).count();
        self.too_long.store(too_long, Ordering::Relaxed);
        if too_long > 0 {
            tracing::warn!(
                "reward `{}`: {too_long} of {} completions have no value: with their prompts they are longer than the {} tokens \
                 that it reads",
                self.name,
                batch.len(),
                self.max_tokens()
            );
        }
        Ok(placed(&fits, scores))
    }

    fn take_logged(&self) -> Logged {
        let too_long = self.too_long.swap(0, Ordering::Relaxed);
        let metric = (too_long > 0).then(|| ("too_long".to_owned(), too_long as f64));
        Logged { metrics: metric.into_iter().collect(), ..Logged::default() }
    }

    fn applies(&self, row: &RewardInput<'_>) -> Result<Option<bool>, RewardError> {
        let asked = match &self.model {
            Reader::Text(text) => text.ids(row).map(|ids| ids.len()),
            Reader::Media(model) => model.check(&turns(row), row.media).map_err(Cause::from),
        };
        let most = self.max_tokens();
        let tokens = asked.and_then(|tokens| match tokens {
            _ if tokens <= most => Ok(tokens),
            _ => Err(format!(
                "the prompt alone is {tokens} tokens for the reward model, which reads at most {most}; nothing is cut: shorten \
                 the prompt, or take another model"
            )
            .into()),
        });
        let tokens = tokens.map_err(|what| self.of_row(0, row, what))?;
        self.longest_prompt.fetch_max(tokens, Ordering::Relaxed);
        Ok(Some(true))
    }

    fn token_limit(&self) -> Option<TokenLimit> {
        let longest_prompt = self.longest_prompt.load(Ordering::Relaxed);
        Some(TokenLimit { most: self.max_tokens(), longest_prompt })
    }
}
