//! Who samples what: the completions of a rollout, over ranks.
//!
//! A rank samples the prompts that it trains on, whose media it has decoded and encoded. If the first update can continue from
//! the decoder's results of a leaf, the leaf is sampled with a memory for them. All other prompts are free: where there is a queue, a
//! rank that has sampled its own prompts takes those of others. Every rank gets all completions.

use std::cell::OnceCell;
use std::sync::Arc;

use omnigrpo_guard::{WAITS, retried};
use omnigrpo_models::{AddedTurn, DecoderMemory, Features, MediumInput, PromptBuilder};
use omnigrpo_observe::PhaseTimer;
use omnigrpo_ranks::Queue;
use omnigrpo_rollout::{Completion, GenerateOptions, Generator, Request, TokenEvent};

use crate::error::Result;
use crate::features::{encode_own, encode_plain};
use crate::rollouts::{Group, Kept, Scored};
use crate::rows::{PreparedRow, bring_here, requests};
use crate::saved_turns::{self, SavedTurn};
use crate::step::Collector;
use crate::timing::timed;

/// Rows with their completions.
pub(crate) struct Completed {
    pub(crate) rows: Vec<PreparedRow>,
    /// Completions of each row.
    pub(crate) completions: Vec<Vec<Completion>>,
    /// Features of each row that this rank trains on.
    features: Vec<Vec<Features>>,
    /// Results for the first update, by leaf of this rank.
    kept: Vec<Kept>,
    /// Media that turns of an environment added to the prompts that were sampled here, with their features.
    media: Vec<Added>,
}

/// Completions of a prompt with their turns, in the form for other ranks.
type Sent = Vec<(Completion, Vec<SavedTurn>)>;

/// Media that were added to a prompt, with their features.
type Added = Vec<(Arc<MediumInput>, Features)>;

impl Completed {
    /// Returns the groups, with the media that turns added to their prompts, and the results for the first update.
    pub(crate) fn into_groups(self) -> (Vec<Group>, Vec<Kept>) {
        let each = self.rows.into_iter().zip(self.features).zip(self.completions).zip(self.media);
        let group =
            |(((mut row, mut features), completions), added): (((PreparedRow, Vec<_>), Vec<_>), Added)| {
                let (media, own): (Vec<_>, Vec<_>) = added.into_iter().unzip();
                row.add_media(media);
                features.extend(own);
                let completions =
                    completions.into_iter().map(|completion| Scored::new(completion, None)).collect();
                Group { row, features, completions }
            };
        (each.map(group).collect(), self.kept)
    }
}

/// Samples completions of rows and returns all of them. `rollout` keys the random numbers. With `keep`, results are kept for the first
/// update.
pub(crate) fn completed(
    collector: &Collector,
    mut rows: Vec<PreparedRow>,
    rollout: u64,
    keep: bool,
    timer: &mut PhaseTimer,
) -> Result<Completed> {
    let Collector { model, prompts, algorithm, .. } = *collector;
    let activity = timer.activity().clone();
    let free = free_places(collector, rows.len(), keep);
    // Turns need the rank that has their media.
    let queue = algorithm.split.ranks.queue().filter(|_| collector.interaction.is_none());
    if let Some(queue) = queue {
        let owners = algorithm.split.owners(rows.len(), algorithm.micro());
        queue.open(&free.iter().map(|&place| owners[place]).collect::<Vec<_>>());
    }
    let (features, mut kept) =
        timed(timer, "encode", || encode_own(model, prompts, algorithm, &mut rows, keep))?;
    let (completions, media) = timed(timer, "rollout", || {
        let requests = requests(&rows, &features, algorithm.num_generations, rollout);
        activity.parts("completions", 0, rows.len() * algorithm.num_generations);
        let mut own = Own::new(collector, &rows, &requests);
        let done = own.sample_all(&mut kept, queue, &free, |event| activity.token(event.last));
        own.complete(done)
    })?;
    Ok(Completed { rows, completions, features, kept, media })
}

/// Samples half as many completions of rows whose frames are shuffled, and returns all of them. A rank builds the prompts of the rows
/// that `own` marks.
pub(crate) fn shuffled(
    collector: &Collector,
    prompts: &PromptBuilder,
    (rows, own): (&mut [PreparedRow], &[bool]),
    rollout: u64,
) -> Result<Vec<Vec<Completion>>> {
    let Collector { model, algorithm, interaction, .. } = *collector;
    let count = rows.len();
    let places: Vec<usize> = (0..count).filter(|&place| own[place]).collect();
    let mut sample = || -> Result<Vec<_>> {
        for &place in &places {
            let PreparedRow { sample, epoch, .. } = rows[place].clone();
            rows[place] = retried(&WAITS, || PreparedRow::new(prompts, sample.clone(), epoch))?;
        }
        let mut features = vec![Vec::new(); count];
        let encoded = encode_plain(model, places.iter().map(|&place| &*rows[place].prompt))?;
        places.iter().zip(encoded).for_each(|(&place, own)| features[place] = own);
        let requests = requests(rows, &features, (algorithm.num_generations / 2).max(1), rollout);
        let requests = places.iter().map(|&place| requests[place]);
        let generator = Generator::new(model, prompts, &algorithm.sampling)
            .with_max_live(algorithm.max_live)
            .with_interaction(interaction);
        let generated = generator.generate(requests, GenerateOptions::default())?;
        Ok(places.iter().copied().zip(generated.into_iter().map(|of| of.completions)).collect())
    };
    let own = sample();
    algorithm.split.collect(count, own)
}

/// Returns the places of the prompts that any rank can sample: those whose leaf is not recalled.
fn free_places(collector: &Collector, prompts: usize, keep: bool) -> Vec<usize> {
    let algorithm = collector.algorithm;
    let keep = keep && algorithm.is_one_update(prompts);
    let leaves = algorithm.split.leaves_of_rollout(prompts, algorithm.micro());
    let free = leaves.into_iter().filter(|leaf| !keep || memory(collector, leaf.len()).is_none());
    free.flatten().collect()
}

/// Returns a memory for the decoder's results of a leaf if its prompts fit in one micro-batch and the model can recall. The
/// update would hold these results anyway. Whether a leaf is recalled does not depend on the rank that samples it.
fn memory(collector: &Collector, prompts: usize) -> Option<DecoderMemory> {
    let Collector { model, algorithm, .. } = *collector;
    let together = (1..=algorithm.prompts_per_micro_batch).contains(&prompts);
    let same = algorithm.recall && model.can_recall();
    (same && together).then(|| DecoderMemory::new(algorithm.stream_rows(), algorithm.recompute))
}

/// Completions that this rank samples.
struct Own<'a> {
    collector: &'a Collector<'a>,
    generator: Generator<'a>,
    rows: &'a [PreparedRow],
    requests: &'a [Request<'a>],
    /// Completions with the places of their prompts.
    done: Vec<(usize, Sent)>,
    /// Turns of each completion, with the content of their media, by place.
    turns: Vec<Vec<Vec<AddedTurn>>>,
    media: Vec<Added>,
}

impl<'a> Own<'a> {
    fn new(collector: &'a Collector<'a>, rows: &'a [PreparedRow], requests: &'a [Request<'a>]) -> Self {
        let Collector { model, prompts, algorithm, interaction, .. } = *collector;
        let generator = Generator::new(model, prompts, &algorithm.sampling)
            .with_max_live(algorithm.max_live)
            .with_interaction(interaction);
        let (turns, media) = (vec![Vec::new(); rows.len()], vec![Vec::new(); rows.len()]);
        Self { collector, generator, rows, requests, done: Vec::new(), turns, media }
    }

    /// Samples the prompts of `kept` leaves with a memory, and then the `free` ones: those that this rank trains on, or those that it
    /// takes from the queue.
    fn sample_all(
        &mut self,
        kept: &mut [Kept],
        queue: Option<&Queue>,
        free: &[usize],
        told: impl FnMut(TokenEvent) + Copy,
    ) -> Result<()> {
        for Kept { groups, recalled, .. } in kept {
            *recalled = memory(self.collector, groups.len());
            if recalled.is_some() {
                self.sample(groups.clone().collect(), recalled.as_mut(), told)?;
            }
        }
        if let Some(queue) = queue {
            return self.sample_taken(queue, free, told);
        }
        let algorithm = self.collector.algorithm;
        let own = algorithm.split.own_places(self.rows.len(), algorithm.micro()).into_iter();
        self.sample(own.filter(|place| free.contains(place)).collect(), None, told)
    }

    /// Samples the prompts in these places.
    fn sample(
        &mut self,
        places: Vec<usize>,
        memory: Option<&mut DecoderMemory>,
        mut told: impl FnMut(TokenEvent),
    ) -> Result<()> {
        let options = GenerateOptions { on_token: Some(&mut told), memory, experts: true };
        let all = self.generator.generate(places.iter().map(|&place| self.requests[place]), options)?;
        for (place, generated) in places.into_iter().zip(all) {
            self.media[place] = generated.media;
            self.turns[place] = generated.completions.iter().map(|c| c.turns.clone()).collect();
            self.done.push((place, saved_turns::sent(generated.completions)));
        }
        Ok(())
    }

    /// Takes prompts in the places `free` from the queue until it is empty, and samples them.
    fn sample_taken(
        &mut self,
        queue: &Queue,
        free: &[usize],
        mut told: impl FnMut(TokenEvent),
    ) -> Result<()> {
        let Collector { model, prompts, algorithm, .. } = *self.collector;
        let owns = algorithm.owns(self.rows.len());
        // Rows that other ranks train on are read and encoded here, too.
        let borrowed: Vec<OnceCell<(PreparedRow, Vec<Features>)>> = vec![OnceCell::new(); self.rows.len()];
        let borrow = |place: usize| -> Result<Request> {
            let mut row = self.rows[place].clone();
            bring_here(prompts, &mut row)?;
            let features = model.encode_prompt(&row.prompt)?;
            let (row, features) = borrowed[place].get_or_init(|| (row, features));
            Ok(Request { prompt: &row.prompt, features, ..self.requests[place] })
        };
        let (mut taken, mut failed) = (Vec::new(), None);
        let mut take = || -> Result<Option<Request>> {
            let Some(&place) = queue.take()?.and_then(|piece| free.get(piece)) else { return Ok(None) };
            taken.push(place);
            if owns[place] { Ok(Some(self.requests[place])) } else { borrow(place).map(Some) }
        };
        let requests = std::iter::from_fn(|| {
            take().unwrap_or_else(|error| {
                failed = Some(error);
                None
            })
        });
        let options = GenerateOptions { on_token: Some(&mut told), memory: None, experts: true };
        let generated = self.generator.generate(requests, options)?;
        failed.map_or(Ok(()), Err)?;
        let sent = generated.into_iter().map(|of| saved_turns::sent(of.completions));
        self.done.extend(taken.into_iter().zip(sent));
        Ok(())
    }

    /// Returns the completions of all ranks by place, and the media that turns added to the prompts that were sampled here. `done` is
    /// the result of this rank.
    fn complete(self, done: Result<()>) -> Result<(Vec<Vec<Completion>>, Vec<Added>)> {
        let split = &self.collector.algorithm.split;
        let completions = split.collect(self.rows.len(), done.map(|()| self.done))?;
        let mut completions: Vec<Vec<Completion>> =
            completions.into_iter().map(saved_turns::received).collect();
        // Turns that were sampled here keep the content of their media.
        let each = completions.iter_mut().zip(self.turns);
        let each = each.flat_map(|(completions, own)| completions.iter_mut().zip(own));
        each.for_each(|(completion, own)| completion.turns = own);
        Ok((completions, self.media))
    }
}
