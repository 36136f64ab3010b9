//! A session: requests join and leave one decoding batch, each with its own parameters.
//!
//! A prompt is prefilled once, however many completions it gets. The bits of a completion are those of a [`Generator`] with the
//! same parameters, whatever else decodes.
//!
//! [`Generator`]: crate::Generator

use std::collections::BTreeMap;
use std::sync::Arc;

use omnigrpo_models::{GroupStream, Model, PackedStream, Prompt};
use omnigrpo_ops::{DecodeBatch, DecodeRows, GroupCache, Rows, Top};
use omnigrpo_text::{StopMatcher, StopSet, Tokenizer};

use crate::completion::{Completion, FinishReason};
use crate::error::{Result, RolloutError};
use crate::rules::{Rules, prefill};
use crate::sample::{SampleKey, SamplingParams};

/// Log-probability of a token in nats, and the most probable tokens in its place with theirs.
pub type Scored = (f32, Vec<(u32, f32)>);

/// A prompt with the parameters of its completions.
#[derive(Clone, Debug)]
pub struct Job {
    /// Rendered prompt.
    pub prompt: Arc<Prompt>,
    /// Number of completions.
    pub num_samples: usize,
    /// Sampling parameters. An environment is not asked.
    pub params: SamplingParams,
    /// Conditions that end a completion.
    pub stops: StopSet,
    /// Number of the most probable tokens to report at each place.
    pub top_logprobs: usize,
    /// True if control tokens are no part of the text.
    pub skip_special: bool,
}

impl Job {
    fn rules<'a>(&'a self, tokenizer: &'a Tokenizer) -> Rules<'a> {
        Rules { params: &self.params, stops: &self.stops, tokenizer, skip_special: self.skip_special }
    }
}

/// A drawn token.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    /// Number of the job in the session.
    pub job: u64,
    /// Number of the completion in its job.
    pub sample: usize,
    pub id: u32,
    /// Log-probability under softmax(logits / scoring temperature), in nats.
    pub logprob: f32,
    /// Most probable tokens with their log-probabilities under the same distribution, in descending order.
    pub top: Vec<(u32, f32)>,
    /// Reason why the completion ends with this token, and its text.
    pub end: Option<(FinishReason, String)>,
}

/// Results of one step.
#[derive(Debug, Default)]
pub struct Step {
    /// One token of each completion in progress, in the order of the jobs.
    pub tokens: Vec<Token>,
    /// Jobs that failed. They have left the session.
    pub failed: Vec<(u64, RolloutError)>,
}

struct Live {
    job: Job,
    cache: GroupCache,
    sequences: Vec<Sequence>,
}

struct Sequence {
    slot: usize,
    done: Completion,
    matcher: StopMatcher,
}

impl Sequence {
    fn key(&self) -> SampleKey {
        SampleKey { rollout: 0, row: 0, sample: self.slot as u32 }
    }
}

/// A batch of completions in progress.
///
/// ```no_run
/// use std::sync::Arc;
///
/// use omnigrpo_models::{Model, Prompt, PromptBuilder};
/// use omnigrpo_rollout::{Job, SamplingParams, Session};
///
/// fn answer(model: &Model, prompts: &PromptBuilder, prompt: Prompt) -> Result<(), Box<dyn std::error::Error>> {
///     let stops = prompts.stops().clone();
///     let params = SamplingParams::greedy();
///     let mut session = Session::new(model, prompts.tokenizer());
///     let job = Job { prompt: Arc::new(prompt), num_samples: 1, params, stops, top_logprobs: 0, skip_special: true };
///     let mut step = session.admit(job)?.1;
///     while session.in_flight() > 0 {
///         step = session.step()?;
///     }
///     println!("{:?}", step.tokens[0].end);
///     Ok(())
/// }
/// ```
pub struct Session<'a> {
    model: &'a Model,
    tokenizer: &'a Tokenizer,
    live: BTreeMap<u64, Live>,
    admitted: u64,
}

impl<'a> Session<'a> {
    /// Creates an empty session.
    pub fn new(model: &'a Model, tokenizer: &'a Tokenizer) -> Self {
        Self { model, tokenizer, live: BTreeMap::new(), admitted: 0 }
    }

    /// Returns the number of completions in progress.
    pub fn in_flight(&self) -> usize {
        self.live.values().map(|live| live.sequences.len()).sum()
    }

    /// Encodes the media of a job, prefills its prompt and draws the first token of each completion. Returns the number of the
    /// job in this session, and these tokens.
    ///
    /// # Errors
    /// Returns an error if parameters are out of range, media do not fit the prompt, or a logit is not finite. The session goes on
    /// without the job.
    pub fn admit(&mut self, job: Job) -> Result<(u64, Step)> {
        job.params.validate()?;
        let features = self.model.encode_prompt(&job.prompt)?;
        let longest = job.params.max_completion_length;
        let (cache, logits) = prefill(self.model, &job.prompt, &features, job.num_samples, longest, None)?;
        let sequence = |slot| Sequence {
            slot,
            done: Completion::recorded(Vec::new(), FinishReason::Length, String::new()),
            matcher: StopMatcher::new(&job.stops),
        };
        let mut sequences: Vec<Sequence> = (0..job.num_samples).map(sequence).collect();
        let number = self.admitted;
        let mut step = Step::default();
        for sequences in sequences.chunks_mut(self.model.device().logit_rows()) {
            let logits = logits.select(&vec![0; sequences.len()].into())?;
            step.tokens.extend(self.draw(number, &job, sequences.iter_mut(), logits)?);
        }
        self.admitted += 1;
        self.live.insert(number, Live { job, cache, sequences });
        self.retire();
        Ok((number, step))
    }

    /// Returns the log-probability of each token of a text prompt after its first under softmax(logits), in nats, and the `top` most
    /// probable tokens in its place. A token among them has the same number there.
    ///
    /// # Errors
    /// Returns an error if the device fails or a log-probability is not finite.
    pub fn score(&self, prompt: &Prompt, top: usize) -> Result<Vec<Scored>> {
        if prompt.ids.len() < 2 {
            return Ok(Vec::new());
        }
        let start = Prompt {
            ids: prompt.ids[..1].to_vec(),
            positions: prompt.positions[..1].to_vec(),
            next_position: 1,
            ..prompt.clone()
        };
        let stream =
            PackedStream::new(&[GroupStream { prompt: &start, completions: vec![&prompt.ids[1..]] }])?;
        let top = Top { k: top, below: self.model.decoder().config().vocab };
        let scores = self.model.score_top(&stream, &[Vec::new()], 1.0, top)?;
        let k = scores.top.k;
        let each = scores.logprobs.iter().zip(&prompt.ids[1..]).enumerate();
        each.map(|(at, (&logprob, &id))| {
            if logprob.is_nan() {
                return Err(RolloutError::NonFinite { row: 0, sample: 0, token: at + 1 });
            }
            let own = at * k..(at + 1) * k;
            let top =
                scores.top.tokens[own.clone()].iter().copied().zip(scores.top.logprobs[own].iter().copied());
            let top: Vec<(u32, f32)> = top.collect();
            let logprob = top.iter().find(|most| most.0 == id).map_or(logprob, |most| most.1);
            Ok((logprob, top))
        })
        .collect()
    }

    /// Removes a job. Its completions end without a last token.
    pub fn cancel(&mut self, job: u64) {
        self.live.remove(&job);
    }

    /// Draws one token of every completion in progress.
    ///
    /// # Errors
    /// Returns an error if the device fails. The session is then empty.
    pub fn step(&mut self) -> Result<Step> {
        let mut live = std::mem::take(&mut self.live);
        let (mut ids, mut positions) = (Vec::new(), Vec::new());
        let (mut groups, mut rows) = (Vec::new(), Vec::new());
        for (number, Live { job, cache, sequences }) in &mut live {
            for sequence in &*sequences {
                ids.extend(sequence.done.ids.last());
                positions.push([job.prompt.next_position + sequence.done.ids.len() as u32 - 1; 3]);
            }
            groups.push(DecodeRows { cache, slots: sequences.iter().map(|s| s.slot).collect() });
            rows.extend(sequences.iter_mut().map(|sequence| (*number, &*job, sequence)));
        }
        let mut step = Step::default();
        if ids.is_empty() {
            return Ok(step);
        }
        let (decoder, pass) = (self.model.decoder(), self.model.pass());
        let x = decoder.embed(&ids, &pass)?;
        let rope = decoder.rope_table(&positions);
        let hidden = decoder.decode(x, &rope, &mut DecodeBatch::new(groups), &pass, None)?;
        let (at_once, mut first) = (self.model.device().logit_rows(), 0);
        for rows in rows.chunks_mut(at_once) {
            let logits = decoder.logits(&hidden.row_range(first..first + rows.len())?)?;
            first += rows.len();
            let mut at = 0;
            for rows in rows.chunk_by_mut(|a, b| a.0 == b.0) {
                let logits = logits.row_range(at..at + rows.len())?;
                at += rows.len();
                let (number, job) = (rows[0].0, rows[0].1);
                match self.draw(number, job, rows.iter_mut().map(|row| &mut *row.2), logits) {
                    Ok(tokens) => step.tokens.extend(tokens),
                    Err(error) => step.failed.push((number, error)),
                }
            }
        }
        step.failed.iter().for_each(|(number, _)| drop(live.remove(number)));
        self.live = live;
        self.retire();
        Ok(step)
    }

    /// Removes completions that are over, and jobs that have none left.
    fn retire(&mut self) {
        self.live.retain(|_, live| {
            let rules = live.job.rules(self.tokenizer);
            live.sequences.retain(|sequence| !rules.is_over(&sequence.done));
            !live.sequences.is_empty()
        });
    }

    /// Draws a token of each of these completions of a job, one for each row of logits.
    fn draw<'s>(
        &self,
        number: u64,
        job: &Job,
        sequences: impl Iterator<Item = &'s mut Sequence>,
        logits: Rows,
    ) -> Result<Vec<Token>> {
        let rules = job.rules(self.tokenizer);
        let sequences: Vec<&mut Sequence> = sequences.collect();
        let tops = match job.top_logprobs {
            0 => vec![Vec::new(); sequences.len()],
            count => {
                let temperature = job.params.scoring_temperature();
                logits
                    .to_vec()
                    .chunks(logits.cols())
                    .map(|row| most_probable(row, temperature, count))
                    .collect()
            }
        };
        let from = sequences.iter().map(|s| rules.draw_from(&job.prompt.ids, &s.done, s.key()));
        let drawn = logits.draw(&rules.sampler(), &from.collect::<Vec<_>>())?;
        // Returns the cause if a GPU could not compute the logits.
        self.model.device().finish()?;
        let each = sequences.into_iter().zip(drawn).zip(tops);
        each.map(|((sequence, drawn), top)| {
            let (sample, token) = (sequence.slot, sequence.done.ids.len());
            let drawn = drawn.ok_or(RolloutError::NonFinite { row: 0, sample: sample as u32, token })?;
            rules.append(&mut sequence.done, &mut sequence.matcher, drawn);
            let end = match rules.is_over(&sequence.done) {
                true => Some((sequence.done.finish_reason, rules.text_of(&sequence.done.ids)?)),
                false => None,
            };
            Ok(Token { job: number, sample, id: drawn.id, logprob: drawn.logprob, top, end })
        })
        .collect()
    }
}

/// Returns the most probable tokens of a row of logits with their log-probabilities, in descending order.
fn most_probable(logits: &[f32], temperature: f32, count: usize) -> Vec<(u32, f32)> {
    let scaled = |x: f32| f64::from(x) / f64::from(temperature);
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let lse = scaled(max) + logits.iter().map(|&x| (scaled(x) - scaled(max)).exp()).sum::<f64>().ln();
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    let order = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
    let count = count.min(ids.len());
    if count < ids.len() {
        ids.select_nth_unstable_by(count, order);
        ids.truncate(count);
    }
    ids.sort_unstable_by(order);
    ids.into_iter().map(|id| (id, (scaled(logits[id as usize]) - lse) as f32)).collect()
}
