//! The generator: one prefill per prompt, then decoding in one batch.

use omnigrpo_kernels::profile;
use omnigrpo_models::{DecoderMemory, Features, Model, NextTokens, Prompt, PromptBuilder};
use omnigrpo_ops::{DecodeRows, Draw, DrawFrom, GroupCache};
use omnigrpo_text::{StopMatcher, StopSet, StreamDecoder, Tokenizer};

use crate::error::{Result, RolloutError};
use crate::sample::{SampleKey, SamplingParams};

/// A prompt to complete.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Rendered prompt.
    pub prompt: &'a Prompt,
    /// Features of the prompt's media, in order.
    pub features: &'a [Features],
    /// Number of completions to sample.
    pub num_samples: usize,
    /// Number of the rollout in the run.
    pub rollout: u64,
    pub row: u64,
    /// Number of the first completion, which keys its random numbers. Not 0 if an earlier request of the same rollout
    /// sampled completions for the row.
    pub first_sample: u32,
}

impl<'a> Request<'a> {
    /// Creates a request for one completion of a prompt that belongs to no dataset.
    #[must_use]
    pub fn new(prompt: &'a Prompt, features: &'a [Features]) -> Self {
        Self { prompt, features, num_samples: 1, rollout: 0, row: 0, first_sample: 0 }
    }
}

/// Reason why a completion ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FinishReason {
    /// Stop token or stop string.
    Stop,
    /// Length limit.
    Length,
}

/// A sampled completion.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Completion {
    /// Token ids, including the stop token.
    pub ids: Vec<u32>,
    /// Log-probability of each token under softmax(logits / scoring temperature), in nats.
    pub logprobs: Vec<f32>,
    /// Log-probability of each token under the distribution it was drawn from (after penalties and truncation), in
    /// nats.
    pub sampler_logprobs: Vec<f32>,
    /// Entropy of softmax(logits / scoring temperature) at each token, in nats.
    pub entropies: Vec<f32>,
    pub finish_reason: FinishReason,
    /// Decoded text without control tokens, truncated before a stop string.
    pub text: String,
}

impl Completion {
    /// Creates a completion that was recorded elsewhere, without log-probabilities and entropies.
    #[must_use]
    pub fn recorded(ids: Vec<u32>, finish_reason: FinishReason, text: String) -> Self {
        let (logprobs, sampler_logprobs, entropies) = (Vec::new(), Vec::new(), Vec::new());
        Self { ids, logprobs, sampler_logprobs, entropies, finish_reason, text }
    }
}

/// A drawn token, for streaming to a terminal and for progress.
#[derive(Clone, Copy, Debug)]
pub struct TokenEvent {
    /// Index of the request.
    pub request: usize,
    /// Sample in the group.
    pub sample: usize,
    pub id: u32,
    /// Whether the completion ends with it.
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
    pub model: &'a Model,
    pub tokenizer: &'a Tokenizer,
    /// Conditions that end a completion.
    pub stops: &'a StopSet,
    pub params: &'a SamplingParams,
    /// Maximum number of completions in flight, although a group is never split. Affects only memory use.
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
    /// Creates a generator with the tokenizer and the stops of the prompt builder.
    #[must_use]
    pub fn new(
        model: &'a Model,
        prompts: &'a PromptBuilder,
        params: &'a SamplingParams,
        max_live: usize,
    ) -> Self {
        Self { model, tokenizer: prompts.tokenizer(), stops: prompts.stops(), params, max_live }
    }

    /// Completes every request; results are in request order, then sample order. `on_token` receives each token when it
    /// is drawn.
    ///
    /// # Errors
    /// If parameters are out of range, features do not fit, or weights have diverged.
    pub fn generate(
        &self,
        requests: &[Request<'a>],
        on_token: impl FnMut(TokenEvent),
    ) -> Result<Vec<Vec<Completion>>> {
        self.generate_with(requests, on_token, None)
    }

    /// Generates like [`Self::generate`] and stores the decoder's activations in `memory`, which stays empty if the
    /// model [cannot recall them](Model::can_recall).
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

    /// Returns the inputs of a completion's next draw.
    fn draw_from<'s>(&self, prompt: &'s Prompt, sequence: &'s Sequence) -> DrawFrom<'s> {
        let token = sequence.done.ids.len();
        DrawFrom {
            seen: [prompt.ids.as_slice(), sequence.done.ids.as_slice()],
            forbids: token < self.params.min_completion_length,
            uniform: sequence.key.uniform(self.params.seed, token),
        }
    }

    /// Appends the drawn tokens to their completions.
    fn record<'s>(
        &self,
        sequences: impl Iterator<Item = (usize, &'s mut Sequence)>,
        drawn: Vec<Option<Draw>>,
        on_token: &mut impl FnMut(TokenEvent),
    ) -> Result<()> {
        // Returns the cause if a GPU could not compute the logits.
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
        // A stop string ends the completion whatever its length: the text is truncated there in any case.
        if hit || (allowed && self.stops.is_stop(drawn.id)) {
            done.finish_reason = FinishReason::Stop;
        }
    }

    fn with_text(&self, mut completion: Completion) -> Result<Completion> {
        completion.text = self.text_of(&completion.ids)?;
        Ok(completion)
    }

    /// Decodes completion ids to text without control tokens, truncated before a stop string.
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

    /// Removes finished completions from the batch, and groups that have none left.
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
