//! The generator: one prefill per prompt, then decoding in one batch.

use std::sync::Arc;
use std::thread::Scope;

use omnigrpo_data::Sample;
use omnigrpo_kernels::profile;
use omnigrpo_models::{
    AddedTurn, DecoderMemory, Features, MediumInput, Model, NextTokens, Prompt, PromptBuilder,
};
use omnigrpo_ops::{DecodeRows, Draw, DrawFrom, GroupCache, Rows};
use omnigrpo_text::{Span, StopMatcher, StopSet, Tokenizer, ToolCall, tool_calls};

use crate::answers::{Answers, Question, Reaction, Reply, Said, Shared};
use crate::completion::{Completion, FinishReason};
use crate::environment::{Episode, EpisodeKey, Interaction};
use crate::error::{Result, RolloutError};
use crate::rules::{Rules, prefill};
use crate::sample::{SampleKey, SamplingParams, TurnLimits};

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
    /// Row of the prompt, for an environment.
    pub sample: Option<&'a Sample>,
}

impl<'a> Request<'a> {
    /// Creates a request for one completion of a prompt that belongs to no dataset.
    pub fn new(prompt: &'a Prompt, features: &'a [Features]) -> Self {
        Self { prompt, features, num_samples: 1, rollout: 0, row: 0, first_sample: 0, sample: None }
    }
}

/// Completions of a request.
#[derive(Clone, Debug, Default)]
pub struct Generated {
    /// Completions in sample order.
    pub completions: Vec<Completion>,
    /// Media that an environment added to them and that the prompt does not have, each once, with their features. Their places
    /// follow those of the prompt's media ([`AddedTurn::media`]).
    pub media: Vec<(Arc<MediumInput>, Features)>,
}

impl Generated {
    /// Numbers the added media by their first use, which does not depend on the order in which answers arrived. `first` is the
    /// number of the prompt's media.
    fn number_media(&mut self, first: usize) {
        let mut order: Vec<usize> = Vec::with_capacity(self.media.len());
        for place in self.completions.iter_mut().flat_map(|c| &mut c.turns).flat_map(|turn| &mut turn.media) {
            let Some(old) = place.checked_sub(first) else { continue };
            let new = order.iter().position(|&known| known == old).unwrap_or_else(|| {
                order.push(old);
                order.len() - 1
            });
            *place = first + new;
        }
        self.media = order.iter().map(|&old| self.media[old].clone()).collect();
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

/// Options of [`Generator::generate`].
#[derive(Default)]
pub struct GenerateOptions<'o> {
    /// Function that receives each token when it is drawn.
    pub on_token: Option<&'o mut dyn FnMut(TokenEvent)>,
    /// Memory for the decoder's results. It stays empty if the model [cannot recall them](Model::can_recall).
    pub memory: Option<&'o mut DecoderMemory>,
    /// True to record [`Completion::experts`]: four bytes per token and block.
    pub experts: bool,
}

/// Default maximum of completions decoded at once. It is large enough to share a pass over the weights and small enough for the
/// caches of long prompts.
pub const MAX_LIVE: usize = 64;

/// Samples completions from a model.
///
/// ```no_run
/// use omnigrpo_models::{Model, Prompt, PromptBuilder};
/// use omnigrpo_rollout::{GenerateOptions, Generator, Request, SamplingParams};
///
/// fn answers(model: &Model, prompts: &PromptBuilder, prompt: &Prompt) -> Result<(), Box<dyn std::error::Error>> {
///     let params = SamplingParams { temperature: 0.7, ..SamplingParams::default() };
///     let features = model.encode_prompt(prompt)?;
///     let four = Request { num_samples: 4, ..Request::new(prompt, &features) };
///     for of_prompt in Generator::new(model, prompts, &params).generate([four], GenerateOptions::default())? {
///         for completion in of_prompt.completions {
///             println!("{} ({:?})", completion.text, completion.finish_reason);
///         }
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
    /// Builder of the turns of an environment; required if the parameters allow turns.
    pub prompts: Option<&'a PromptBuilder>,
    /// Environment that answers completions; required if the parameters allow turns.
    pub interaction: Option<&'a Interaction>,
}

struct Live<'a> {
    request: usize,
    of: Request<'a>,
    cache: GroupCache,
    /// Completions that decode.
    sequences: Vec<Sequence>,
    /// Completions that wait for an answer.
    waiting: Vec<Sequence>,
}

struct Sequence {
    slot: usize,
    key: SampleKey,
    /// Position of the next token, on all axes.
    next_position: u32,
    done: Completion,
    matcher: StopMatcher,
    /// Calls of its last turn, if the environment must answer it.
    asks: Option<Vec<Result<ToolCall, String>>>,
    /// Episode of the environment, after its first answer.
    episode: Option<Box<dyn Episode>>,
    /// Whether an answer that does not fit has ended the completion.
    ended: bool,
}

/// The environment of a rollout, with the token that ends a turn of the model.
#[derive(Clone, Copy)]
struct Asked<'a> {
    interaction: &'a Interaction,
    limits: &'a TurnLimits,
    turn_stop: u32,
}

/// Completions of a request in progress.
struct Partial {
    completions: Vec<Option<Completion>>,
    /// Media that an environment added, with their features, in the order of their arrival.
    media: Vec<(Arc<MediumInput>, Features)>,
}

impl<'a> Generator<'a> {
    /// Creates a generator with the tokenizer and the stops of the prompt builder.
    pub fn new(model: &'a Model, prompts: &'a PromptBuilder, params: &'a SamplingParams) -> Self {
        Self {
            model,
            tokenizer: prompts.tokenizer(),
            stops: prompts.stops(),
            params,
            max_live: MAX_LIVE,
            prompts: Some(prompts),
            interaction: None,
        }
    }

    /// Sets the environment that answers completions.
    #[must_use]
    pub fn with_interaction(self, interaction: Option<&'a Interaction>) -> Self {
        Self { interaction, ..self }
    }

    /// Limits the number of completions in flight.
    #[must_use]
    pub fn with_max_live(self, max_live: usize) -> Self {
        Self { max_live, ..self }
    }

    /// Completes every request; results are in request order. A request is taken when there is room for its completions.
    ///
    /// # Errors
    /// If parameters are out of range, features do not fit, or weights have diverged.
    pub fn generate(
        &self,
        requests: impl IntoIterator<Item = Request<'a>>,
        options: GenerateOptions,
    ) -> Result<Vec<Generated>> {
        self.params.validate()?;
        let mut requests = requests.into_iter();
        let next: &mut dyn FnMut() -> Option<Request<'a>> = &mut || requests.next();
        let mut ignore = |_: TokenEvent| {};
        let on_token = options.on_token.unwrap_or(&mut ignore);
        let mut experts_only = DecoderMemory::new(0, true);
        let memory = options.memory.filter(|_| self.model.can_recall());
        let records = options.experts && self.model.remembers_experts();
        let memory = memory.or_else(|| records.then_some(&mut experts_only));
        let Some(limits) = &self.params.turns else {
            return self.generate_asking(next, on_token, memory, None, None);
        };
        let missing = |name, expected| RolloutError::Parameter { name, got: "none".to_owned(), expected };
        let prompts = self.prompts;
        let prompts =
            prompts.ok_or_else(|| missing("Generator::prompts", "a builder of the environment's turns"))?;
        let interaction = self.interaction;
        let interaction = interaction
            .ok_or_else(|| missing("Generator::interaction", "an environment that answers turns"))?;
        let asked = Asked { interaction, limits, turn_stop: prompts.turn_stop()? };
        let shared = Shared::new(interaction, limits, prompts);
        std::thread::scope(|scope| {
            let mut answers = (Answers::new(&shared), scope);
            self.generate_asking(next, on_token, memory, Some(asked), Some(&mut answers))
        })
    }

    fn generate_asking<'s>(
        &self,
        next: &mut dyn FnMut() -> Option<Request<'a>>,
        on_token: &mut dyn FnMut(TokenEvent),
        mut memory: Option<&mut DecoderMemory>,
        asked: Option<Asked>,
        mut answers: Option<&mut (Answers<'s, 'a>, &'s Scope<'s, '_>)>,
    ) -> Result<Vec<Generated>> {
        let (mut requests, mut finished): (Vec<Request<'a>>, Vec<Partial>) = Default::default();
        let mut drained = false;
        let mut live: Vec<Live> = Vec::new();
        let sampler = self.rules().sampler();
        let mut tokens = self.model.decoder().next_tokens(sampler, &self.model.pass());
        loop {
            let mut in_flight: usize = live.iter().map(|g| g.sequences.len() + g.waiting.len()).sum();
            let mut each = requests.last().map_or(0, |last| last.num_samples);
            while !drained && (in_flight == 0 || in_flight + each <= self.max_live) {
                let Some(request) = next() else {
                    drained = true;
                    break;
                };
                if asked.is_some() && request.sample.is_none() {
                    let (got, expected) = ("none".to_owned(), "the row of the prompt, for the environment");
                    return Err(RolloutError::Parameter { name: "Request::sample", got, expected });
                }
                each = request.num_samples;
                in_flight += each;
                let index = requests.len();
                requests.push(request);
                finished.push(Partial { completions: vec![None; each], media: Vec::new() });
                let before = profile::enter("prefill");
                live.push(self.admit(index, &request, asked, on_token, memory.as_deref_mut())?);
                profile::enter(before);
            }
            self.retire(&mut live, &mut finished, answers.as_deref_mut())?;
            if let Some((answers, _)) = answers.as_deref_mut() {
                let idle = live.iter().all(|group| group.sequences.is_empty());
                let mut waits = idle && live.iter().any(|group| !group.waiting.is_empty());
                while let Some(reply) = answers.next(waits) {
                    waits = false;
                    let before = profile::enter("prefill");
                    self.take(reply, &mut live, &mut finished, asked, on_token, memory.as_deref_mut())?;
                    profile::enter(before);
                }
            }
            self.retire(&mut live, &mut finished, answers.as_deref_mut())?;
            if live.iter().all(|group| group.sequences.is_empty()) {
                if live.is_empty() && drained {
                    break;
                }
                continue;
            }
            let before = profile::enter("decode");
            self.step(&mut live, &mut tokens, asked, on_token, memory.as_deref_mut())?;
            profile::enter(before);
            self.retire(&mut live, &mut finished, answers.as_deref_mut())?;
        }
        if let Some(memory) = memory {
            memory.finish();
            for ((request, slot), experts) in memory.take_experts() {
                if let Some(completion) = &mut finished[request].completions[slot] {
                    completion.experts = experts;
                }
            }
        }
        finished.into_iter().zip(&requests).map(|(partial, request)| self.finish(partial, request)).collect()
    }

    /// Returns the finished completions of a request.
    fn finish(&self, Partial { completions, media }: Partial, request: &Request) -> Result<Generated> {
        let each = completions.into_iter().flatten().map(|completion| self.with_text(completion));
        let mut generated = Generated { completions: each.collect::<Result<_>>()?, media };
        generated.number_media(request.prompt.media.len());
        Ok(generated)
    }

    /// Prefills a prompt and draws the first token of each completion from its last row.
    fn admit(
        &self,
        index: usize,
        request: &Request<'a>,
        asked: Option<Asked>,
        on_token: &mut dyn FnMut(TokenEvent),
        memory: Option<&mut DecoderMemory>,
    ) -> Result<Live<'a>> {
        let (prompt, longest) = (request.prompt, self.params.max_completion_length);
        let (cache, logits) =
            prefill(self.model, prompt, request.features, request.num_samples, longest, memory)?;
        let sequence = |slot: usize| {
            let Request { rollout, row, first_sample, .. } = *request;
            Sequence {
                slot,
                key: SampleKey { rollout, row, sample: first_sample + slot as u32 },
                next_position: prompt.next_position,
                done: Completion::recorded(Vec::new(), FinishReason::Length, String::new()),
                matcher: StopMatcher::new(self.stops),
                asks: None,
                episode: None,
                ended: false,
            }
        };
        let mut sequences: Vec<Sequence> = (0..request.num_samples).map(sequence).collect();
        for sequences in sequences.chunks_mut(self.model.device().logit_rows()) {
            let logits = logits.select(&vec![0; sequences.len()].into())?;
            let from: Vec<_> = sequences.iter().map(|s| self.draw_from(prompt, s)).collect();
            let drawn = logits.draw(&self.rules().sampler(), &from)?;
            self.record(sequences.iter_mut().map(|s| (index, s)), drawn, asked, on_token)?;
        }
        Ok(Live { request: index, of: *request, cache, sequences, waiting: Vec::new() })
    }

    /// Draws one token for every live completion.
    fn step(
        &self,
        live: &mut [Live],
        tokens: &mut NextTokens,
        asked: Option<Asked>,
        on_token: &mut dyn FnMut(TokenEvent),
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
        for Live { of, cache, sequences, .. } in live.iter_mut().filter(|group| !group.sequences.is_empty()) {
            let sequences = &*sequences;
            for sequence in sequences {
                ids.extend(sequence.done.ids.last());
                positions.push([sequence.next_position - 1; 3]);
                from.push(self.draw_from(of.prompt, sequence));
            }
            groups.push(DecodeRows { slots: sequences.iter().map(|s| s.slot).collect(), cache });
        }
        let drawn = tokens.next(groups, ids, &positions, &from, memory)?;
        let sequences = live.iter_mut().flat_map(|g| {
            let request = g.request;
            g.sequences.iter_mut().map(move |s| (request, s))
        });
        self.record(sequences, drawn, asked, on_token)
    }

    /// Returns the inputs of a completion's next draw.
    fn draw_from<'s>(&self, prompt: &'s Prompt, sequence: &'s Sequence) -> DrawFrom<'s> {
        self.rules().draw_from(&prompt.ids, &sequence.done, sequence.key)
    }

    fn rules(&self) -> Rules<'a> {
        Rules { params: self.params, stops: self.stops, tokenizer: self.tokenizer, skip_special: true }
    }

    /// Appends the drawn tokens to their completions.
    fn record<'s>(
        &self,
        sequences: impl Iterator<Item = (usize, &'s mut Sequence)>,
        drawn: Vec<Option<Draw>>,
        asked: Option<Asked>,
        on_token: &mut dyn FnMut(TokenEvent),
    ) -> Result<()> {
        // Returns the cause if a GPU could not compute the logits.
        self.model.device().finish()?;
        for ((request, sequence), drawn) in sequences.zip(drawn) {
            let SampleKey { row, sample, .. } = sequence.key;
            let token = sequence.done.ids.len();
            let drawn = drawn.ok_or(RolloutError::NonFinite { row, sample, token })?;
            self.append(sequence, drawn, asked)?;
            let (sample, last) = (sequence.slot, self.is_over(sequence));
            on_token(TokenEvent { request, sample, id: drawn.id, last });
        }
        Ok(())
    }

    fn append(&self, sequence: &mut Sequence, drawn: Draw, asked: Option<Asked>) -> Result<()> {
        let (rules, done) = (self.rules(), &mut sequence.done);
        let hit = rules.append(done, &mut sequence.matcher, drawn);
        let allowed = rules.may_stop(done);
        sequence.next_position += 1;
        let ends_turn = |asked: &Asked| {
            !hit && allowed && drawn.id == asked.turn_stop && done.turns.len() < asked.limits.max_turns
        };
        if let Some(Asked { interaction, .. }) = asked.filter(ends_turn) {
            let calls = tool_calls(&self.text_of(&done.ids[done.last_turn()])?);
            let answered = !calls.is_empty() || interaction.environment.answers_text();
            let full = done.ids.len() + 2 > self.params.max_completion_length;
            match (answered, full) {
                (true, false) => sequence.asks = Some(calls),
                // No token of an answer fits.
                (true, true) => (done.finish_reason, sequence.ended) = (FinishReason::Length, true),
                (false, _) => {}
            }
        }
        Ok(())
    }

    /// Continues a completion with the reply of the environment, or ends it.
    fn take(
        &self,
        reply: Reply,
        live: &mut [Live<'a>],
        finished: &mut [Partial],
        asked: Option<Asked>,
        on_token: &mut dyn FnMut(TokenEvent),
        memory: Option<&mut DecoderMemory>,
    ) -> Result<()> {
        let Reply { place: (request, slot), key, result } = reply;
        let (episode, reaction) = result.map_err(|source| RolloutError::Environment {
            environment: asked.map_or("", |asked| asked.interaction.environment.name()).to_owned(),
            row: key.row,
            sample: key.sample,
            source,
        })?;
        let Some(group) = live.iter_mut().find(|group| group.request == request) else { return Ok(()) };
        let Some(at) = group.waiting.iter().position(|sequence| sequence.slot == slot) else { return Ok(()) };
        let mut sequence = group.waiting.remove(at);
        sequence.episode = Some(episode);
        match reaction {
            Reaction::Stop => {}
            Reaction::TooLong => {
                sequence.done.finish_reason = FinishReason::Length;
                sequence.ended = true;
            }
            Reaction::Said(said) => {
                sequence.done.calls += said.calls;
                sequence.done.failed_calls += said.failed;
                let logits = self.read(*said, group, &mut sequence, &mut finished[request].media, memory)?;
                let from = [self.draw_from(group.of.prompt, &sequence)];
                let drawn = logits.draw(&self.rules().sampler(), &from)?;
                self.record(std::iter::once((request, &mut sequence)), drawn, asked, on_token)?;
            }
        }
        group.sequences.push(sequence);
        group.sequences.sort_by_key(|sequence| sequence.slot);
        Ok(())
    }

    /// Appends a turn of the environment to a completion. Returns the logits of the token after it.
    fn read(
        &self,
        said: Said,
        group: &mut Live,
        sequence: &mut Sequence,
        media: &mut Vec<(Arc<MediumInput>, Features)>,
        mut memory: Option<&mut DecoderMemory>,
    ) -> Result<Rows> {
        let Said { turn, said, sources, .. } = said;
        let own = &group.of.prompt.media;
        let mut places = Vec::with_capacity(turn.media.len());
        for medium in &turn.media {
            let mut known = own.iter().chain(media.iter().map(|(medium, _)| medium));
            places.push(match known.position(|known| Arc::ptr_eq(known, medium) || known == medium) {
                Some(known) => known,
                None => {
                    media.push((Arc::clone(medium), self.model.encode(medium, &turn.instruction)?));
                    own.len() + media.len() - 1
                }
            });
        }
        let done = &mut sequence.done;
        let start = done.ids.len();
        // The stop token of the model's turn was drawn but not read.
        let before = done.ids[start - 1];
        let rows = Prompt {
            ids: std::iter::once(before).chain(turn.ids.iter().copied()).collect(),
            spans: turn.spans.iter().map(|span| Span { start: span.start + 1, ..*span }).collect(),
            positions: std::iter::once([sequence.next_position - 1; 3])
                .chain(turn.positions.iter().map(|at| at.map(|axis| sequence.next_position + axis)))
                .collect(),
            next_position: sequence.next_position + turn.next_position,
            media: turn.media.clone(),
            instruction: Vec::new(),
            text: String::new(),
        };
        let known = |place: usize| match place.checked_sub(own.len()) {
            Some(added) => media.get(added).map(|(_, features)| features),
            None => group.of.features.get(place),
        };
        let features: Vec<Features> = places.iter().filter_map(|&place| known(place)).cloned().collect();
        let (decoder, pass) = (self.model.decoder(), self.model.pass());
        let x = self.model.embed_prompt(&rows, &features)?;
        if let Some(memory) = memory.as_deref_mut() {
            memory.begin_step(rows.ids.iter().map(|&id| (group.request, sequence.slot, id)));
        }
        let rope = decoder.rope_table(&rows.positions);
        let hidden = decoder.extend(x, &rope, &mut group.cache, sequence.slot, &pass, memory)?;
        sequence.next_position = rows.next_position;
        sequence.matcher = StopMatcher::new(self.stops);
        done.finish_reason = FinishReason::Length;
        done.ids.extend_from_slice(&turn.ids);
        done.turns.push(AddedTurn { start, turn: Arc::new(turn), media: places, sources, said });
        Ok(decoder.logits(&hidden)?)
    }

    fn with_text(&self, mut completion: Completion) -> Result<Completion> {
        let mut texts = completion.model_turns().map(|ids| self.text_of(ids)).collect::<Result<Vec<_>>>()?;
        completion.text = texts.pop().unwrap_or_default();
        completion.earlier = texts;
        Ok(completion)
    }

    /// Decodes completion ids to text without control tokens, truncated before a stop string.
    pub fn text_of(&self, ids: &[u32]) -> Result<String> {
        self.rules().text_of(ids)
    }

    fn is_over(&self, sequence: &Sequence) -> bool {
        sequence.asks.is_none() && (sequence.ended || self.rules().is_over(&sequence.done))
    }

    /// Removes finished completions from the batch, and groups that have none left. Completions with a question to the
    /// environment wait for its answer.
    fn retire<'s>(
        &self,
        live: &mut Vec<Live<'a>>,
        finished: &mut [Partial],
        mut answers: Option<&mut (Answers<'s, 'a>, &'s Scope<'s, '_>)>,
    ) -> Result<()> {
        for group in live.iter_mut() {
            let (stopped, going): (Vec<_>, Vec<_>) = std::mem::take(&mut group.sequences)
                .into_iter()
                .partition(|s| s.asks.is_some() || self.is_over(s));
            group.sequences = going;
            for mut sequence in stopped {
                match (sequence.asks.take(), group.of.sample, answers.as_deref_mut()) {
                    (Some(calls), Some(row), Some((answers, scope))) => {
                        let question = self.question(group.request, row, &mut sequence, calls)?;
                        let key = question.key;
                        answers.ask(scope, question).map_err(|error| RolloutError::Environment {
                            environment: "threads".to_owned(),
                            row: key.row,
                            sample: key.sample,
                            source: error.into(),
                        })?;
                        group.waiting.push(sequence);
                    }
                    _ => finished[group.request].completions[sequence.slot] = Some(sequence.done),
                }
            }
        }
        live.retain(|group| !group.sequences.is_empty() || !group.waiting.is_empty());
        Ok(())
    }

    /// Returns the question of a completion to the environment.
    fn question(
        &self,
        request: usize,
        row: &'a Sample,
        sequence: &mut Sequence,
        calls: Vec<Result<ToolCall, String>>,
    ) -> Result<Question<'a>> {
        let SampleKey { rollout, row: number, sample } = sequence.key;
        let done = &sequence.done;
        let ids = done.ids[done.last_turn()].to_vec();
        Ok(Question {
            place: (request, sequence.slot),
            key: EpisodeKey { seed: self.params.seed, rollout, row: number, sample },
            row,
            episode: sequence.episode.take(),
            text: self.text_of(&ids)?,
            ids,
            calls,
            number: done.turns.len() + 1,
            // At least one token of the model follows an answer.
            tokens_left: (self.params.max_completion_length - done.ids.len()).saturating_sub(1),
        })
    }
}
