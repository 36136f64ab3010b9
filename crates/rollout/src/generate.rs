//! The generator: prefill per prompt, decode in one batch.

use omnigrpo_kernels::profile;
use omnigrpo_models::{DecoderMemory, Features, Model, NextTokens, Prompt, PromptBuilder};
use omnigrpo_ops::{DecodeRows, Draw, DrawFrom, GroupCache};
use omnigrpo_text::{StopMatcher, StopSet, StreamDecoder, Tokenizer};

use crate::error::{Result, RolloutError};
use crate::sample::{SampleKey, SamplingParams};

/// A prompt to complete.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The rendered prompt.
    pub prompt: &'a Prompt,
    /// Features of its media, in order.
    pub features: &'a [Features],
    /// Completions to sample.
    pub num_samples: usize,
    /// Which rollout of the run.
    pub rollout: u64,
    /// Dataset row.
    pub row: u64,
    /// Number of the first completion, which keys its random numbers: not 0 where the row came before in the same
    /// rollout and has completions already.
    pub first_sample: u32,
}

impl<'a> Request<'a> {
    /// Asks for one completion of a prompt that stands in no dataset.
    #[must_use]
    pub fn new(prompt: &'a Prompt, features: &'a [Features]) -> Self {
        Self { prompt, features, num_samples: 1, rollout: 0, row: 0, first_sample: 0 }
    }
}

/// Why a completion ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FinishReason {
    /// A stop token or stop string.
    Stop,
    /// The length limit.
    Length,
}

/// A sampled completion.
#[derive(Clone, Debug, PartialEq)]
pub struct Completion {
    /// Token ids, stop token included.
    pub ids: Vec<u32>,
    /// Log-probability of each token under softmax(logits / scoring temperature), in nats.
    pub logprobs: Vec<f32>,
    /// Log-probability of each token under the distribution it was drawn from (after penalties and truncation), in nats.
    pub sampler_logprobs: Vec<f32>,
    /// Entropy of softmax(logits / scoring temperature) at each token, nats.
    pub entropies: Vec<f32>,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// Text without control tokens, truncated before a stop string.
    pub text: String,
}

impl Completion {
    /// A completion that was recorded elsewhere: nothing is known of how it was drawn.
    #[must_use]
    pub fn recorded(ids: Vec<u32>, finish_reason: FinishReason, text: String) -> Self {
        let (logprobs, sampler_logprobs, entropies) = (Vec::new(), Vec::new(), Vec::new());
        Self { ids, logprobs, sampler_logprobs, entropies, finish_reason, text }
    }
}

/// A token as it is drawn, for streaming to a terminal and for progress.
#[derive(Clone, Copy, Debug)]
pub struct TokenEvent {
    /// Index of the request.
    pub request: usize,
    /// Sample in the group.
    pub sample: usize,
    /// The token.
    pub id: u32,
    /// Whether its completion ends with it.
    pub last: bool,
}

/// Samples completions from a model.
///
/// ```no_run
/// use omnigrpo_models::{Model, Prompt, PromptBuilder};
/// use omnigrpo_rollout::{Generator, Request, SamplingParams};
///
/// fn answers(model: &Model, prompts: &PromptBuilder, prompt: &Prompt) -> Result<(), Box<dyn std::error::Error>> {
///     let params = SamplingParams { temperature: 0.7, ..SamplingParams::default() };
///     let features = model.encode_prompt(prompt)?;
///     let four = Request { num_samples: 4, ..Request::new(prompt, &features) };
///     for completion in Generator::new(model, prompts, &params, 64).generate(&[four], |_| {})?.concat() {
///         println!("{} ({:?})", completion.text, completion.finish_reason);
///     }
///     Ok(())
/// }
/// ```
pub struct Generator<'a> {
    /// The model.
    pub model: &'a Model,
    /// Tokenizer of the model.
    pub tokenizer: &'a Tokenizer,
    /// Rules that end a completion.
    pub stops: &'a StopSet,
    /// How to sample.
    pub params: &'a SamplingParams,
    /// Completions in flight at once, though a group is never split. Bounds memory, changes nothing else.
    pub max_live: usize,
}

struct Live<'a> {
    request: usize,
    prompt: &'a Prompt,
    cache: GroupCache,
    sequences: Vec<Sequence>,
}

struct Sequence {
    slot: usize,
    key: SampleKey,
    done: Completion,
    matcher: StopMatcher,
}

impl<'a> Generator<'a> {
    /// A generator with the tokenizer and the stops that prompts are made with.
    #[must_use]
    pub fn new(
        model: &'a Model,
        prompts: &'a PromptBuilder,
        params: &'a SamplingParams,
        max_live: usize,
    ) -> Self {
        Self { model, tokenizer: prompts.tokenizer(), stops: prompts.stops(), params, max_live }
    }

    /// Completes every request; the result is in request order, then sample order. `on_token` sees tokens as they
    /// are drawn.
    ///
    /// # Errors
    /// Parameters out of range, features that do not fit, weights that have diverged.
    pub fn generate(
        &self,
        requests: &[Request<'a>],
        on_token: impl FnMut(TokenEvent),
    ) -> Result<Vec<Vec<Completion>>> {
        self.generate_with(requests, on_token, None)
    }

    /// Runs [`Self::generate`] and stores what the decoder computed in `memory`, which stays empty if the model
    /// [cannot recall it](Model::can_recall).
    pub fn generate_with(
        &self,
        requests: &[Request<'a>],
        mut on_token: impl FnMut(TokenEvent),
        memory: Option<&mut DecoderMemory>,
    ) -> Result<Vec<Vec<Completion>>> {
        self.params.validate()?;
        let mut memory = memory.filter(|_| self.model.can_recall());
        let mut finished: Vec<Vec<Option<Completion>>> =
            requests.iter().map(|r| vec![None; r.num_samples]).collect();
        let mut waiting = requests.iter().enumerate();
        let mut next = waiting.next();
        let mut live: Vec<Live> = Vec::new();
        let sampler = self.params.sampler(&self.stops.ids);
        let mut tokens = self.model.decoder().next_tokens(sampler, &self.model.pass());
        loop {
            let mut in_flight: usize = live.iter().map(|g| g.sequences.len()).sum();
            while let Some((index, request)) = next {
                if in_flight > 0 && in_flight + request.num_samples > self.max_live {
                    break;
                }
                in_flight += request.num_samples;
                let before = profile::enter("prefill");
                live.push(self.admit(index, request, &mut on_token, memory.as_deref_mut())?);
                profile::enter(before);
                next = waiting.next();
            }
            self.retire(&mut live, &mut finished);
            if live.is_empty() {
                if next.is_none() {
                    break;
                }
                continue;
            }
            let before = profile::enter("decode");
            self.step(&mut live, &mut tokens, &mut on_token, memory.as_deref_mut())?;
            profile::enter(before);
            self.retire(&mut live, &mut finished);
        }
        if let Some(memory) = memory {
            memory.finish();
        }
        let mut out = Vec::with_capacity(requests.len());
        for group in finished {
            let mut completions = Vec::with_capacity(group.len());
            for completion in group.into_iter().flatten() {
                completions.push(self.with_text(completion)?);
            }
            out.push(completions);
        }
        Ok(out)
    }

    /// Prefills a prompt and draws the first token of each completion from its last row.
    fn admit(
        &self,
        index: usize,
        request: &Request<'a>,
        on_token: &mut impl FnMut(TokenEvent),
        mut memory: Option<&mut DecoderMemory>,
    ) -> Result<Live<'a>> {
        let decoder = self.model.decoder();
        let (prompt, pass) = (request.prompt, self.model.pass());
        let slot_rows = self.params.max_completion_length - 1;
        let mut cache = decoder.cache(prompt.ids.len(), request.num_samples, slot_rows, &pass)?;
        let x = self.model.embed_prompt(prompt, request.features)?;
        if let Some(memory) = memory.as_deref_mut() {
            let longest = self.params.max_completion_length;
            memory.begin_prompt(&prompt.ids, request.num_samples, longest);
        }
        let rope = decoder.rope_table(&prompt.positions);
        let hidden = decoder.prefill(x, &rope, &mut cache, &pass, memory)?;
        let logits = decoder.logits(&hidden)?;
        let sequence = |slot: usize| {
            let Request { rollout, row, first_sample, .. } = *request;
            Sequence {
                slot,
                key: SampleKey { rollout, row, sample: first_sample + slot as u32 },
                done: Completion::recorded(Vec::new(), FinishReason::Length, String::new()),
                matcher: StopMatcher::new(self.stops),
            }
        };
        let mut sequences: Vec<Sequence> = (0..request.num_samples).map(sequence).collect();
        for sequences in sequences.chunks_mut(pass.device.logit_rows()) {
            let logits = logits.select(&vec![0; sequences.len()].into())?;
            let from: Vec<_> = sequences.iter().map(|s| self.draw_from(prompt, s)).collect();
            let drawn = logits.draw(&self.params.sampler(&self.stops.ids), &from)?;
            self.record(sequences.iter_mut().map(|s| (index, s)), drawn, on_token)?;
        }
        Ok(Live { request: index, prompt, cache, sequences })
    }

    /// Draws one token for every live completion.
    fn step(
        &self,
        live: &mut [Live],
        tokens: &mut NextTokens,
        on_token: &mut impl FnMut(TokenEvent),
        mut memory: Option<&mut DecoderMemory>,
    ) -> Result<()> {
        if let Some(memory) = memory.as_deref_mut() {
            let of_group = |g: &Live| -> Vec<(usize, usize, u32)> {
                let last = |s: &Sequence| Some((g.request, s.slot, *s.done.ids.last()?));
                g.sequences.iter().filter_map(last).collect()
            };
            memory.begin_step(live.iter().flat_map(of_group));
        }
        let (mut ids, mut positions, mut from) = (Vec::new(), Vec::new(), Vec::new());
        let mut groups = Vec::with_capacity(live.len());
        for Live { prompt, cache, sequences, .. } in live.iter_mut() {
            let sequences = &*sequences;
            for sequence in sequences {
                ids.extend(sequence.done.ids.last());
                positions.push([prompt.next_position + sequence.done.ids.len() as u32 - 1; 3]);
                from.push(self.draw_from(prompt, sequence));
            }
            groups.push(DecodeRows { slots: sequences.iter().map(|s| s.slot).collect(), cache });
        }
        let drawn = tokens.next(groups, ids, &positions, &from, memory)?;
        let sequences = live.iter_mut().flat_map(|g| {
            let request = g.request;
            g.sequences.iter_mut().map(move |s| (request, s))
        });
        self.record(sequences, drawn, on_token)
    }

    /// Returns the settings of a completion's next draw.
    fn draw_from<'s>(&self, prompt: &'s Prompt, sequence: &'s Sequence) -> DrawFrom<'s> {
        let token = sequence.done.ids.len();
        DrawFrom {
            seen: [prompt.ids.as_slice(), sequence.done.ids.as_slice()],
            forbids: token < self.params.min_completion_length,
            uniform: sequence.key.uniform(self.params.seed, token),
        }
    }

    /// Appends the tokens that were drawn for these completions.
    fn record<'s>(
        &self,
        sequences: impl Iterator<Item = (usize, &'s mut Sequence)>,
        drawn: Vec<Option<Draw>>,
        on_token: &mut impl FnMut(TokenEvent),
    ) -> Result<()> {
        // Tells why, where a card could not compute the logits.
        self.model.device().finish()?;
        for ((request, sequence), drawn) in sequences.zip(drawn) {
            let SampleKey { row, sample, .. } = sequence.key;
            let token = sequence.done.ids.len();
            let drawn = drawn.ok_or(RolloutError::NonFinite { row, sample, token })?;
            self.append(sequence, drawn);
            let (sample, last) = (sequence.slot, self.is_over(sequence));
            on_token(TokenEvent { request, sample, id: drawn.id, last });
        }
        Ok(())
    }

    fn append(&self, sequence: &mut Sequence, drawn: Draw) {
        let done = &mut sequence.done;
        done.ids.push(drawn.id);
        done.logprobs.push(drawn.logprob);
        done.sampler_logprobs.push(drawn.sampler_logprob);
        done.entropies.push(drawn.entropy);
        let allowed = done.ids.len() >= self.params.min_completion_length;
        let hit = !self.stops.strings.is_empty()
            && sequence.matcher.push(&self.tokenizer.token_bytes(drawn.id)).is_some();
        // A stop string ends the completion whatever its length: the text is cut there in any case.
        if hit || (allowed && self.stops.is_stop(drawn.id)) {
            done.finish_reason = FinishReason::Stop;
        }
    }

    fn with_text(&self, mut completion: Completion) -> Result<Completion> {
        completion.text = self.text_of(&completion.ids)?;
        Ok(completion)
    }

    /// The text of completion ids: no control tokens, cut before a stop string.
    ///
    /// # Errors
    /// Ids the tokenizer cannot decode.
    pub fn text_of(&self, ids: &[u32]) -> Result<String> {
        if self.stops.strings.is_empty() {
            return Ok(self.tokenizer.decode(ids, true)?);
        }
        let mut matcher = StopMatcher::new(self.stops);
        let mut decoder = StreamDecoder::new(true);
        let mut text = String::new();
        for &id in ids {
            text.push_str(&decoder.push(self.tokenizer, id));
            if matcher.push(&self.tokenizer.token_bytes(id)).is_some() {
                break;
            }
        }
        text.push_str(&decoder.finish());
        let cut = self.stops.strings.iter().filter_map(|s| text.find(s.as_str())).min();
        text.truncate(cut.unwrap_or(text.len()));
        Ok(text)
    }

    fn is_over(&self, sequence: &Sequence) -> bool {
        sequence.done.finish_reason == FinishReason::Stop
            || sequence.done.ids.len() >= self.params.max_completion_length
    }

    /// Takes completions that have ended out of the batch, and groups without any left.
    fn retire(&self, live: &mut Vec<Live>, finished: &mut [Vec<Option<Completion>>]) {
        for group in live.iter_mut() {
            let (over, going): (Vec<_>, Vec<_>) =
                std::mem::take(&mut group.sequences).into_iter().partition(|s| self.is_over(s));
            group.sequences = going;
            for sequence in over {
                finished[group.request][sequence.slot] = Some(sequence.done);
            }
        }
        live.retain(|group| !group.sequences.is_empty());
    }
}
