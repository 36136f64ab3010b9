//! Weights that are cut into a part for each rank (ZeRO stage 3).
//!
//! The large weights of the decoder are cut: blocks, embedding and head. A pass that scores or trains completes the weights of one
//! layer at a time: all ranks send each other their parts before the layer runs, and drop the parts of the others when the next
//! layer runs. Sampling, evaluation and checkpoints complete all weights at once ([`Lender::gather`]).
//!
//! A layer needs all ranks, but their numbers of streams differ, and a pass may fail. The ranks therefore run passes in *turns*. Every
//! turn has the same list of exchanges on all ranks. [`Lend::lend`] works through this list up to the layer that the pass
//! needs. [`Lender::end`] works through the rest of it, so a rank without a stream, or with one that has failed or needs no backward
//! pass, still sends its parts.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use omnigrpo_models::Model;
use omnigrpo_ops::{Error, Lend, Param, ParamDtype};

use crate::bucket::Bucket;
use crate::error::{Result, TrainError};
use crate::split::{Shard, Split};

/// Passes of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// A forward pass.
    Score,
    /// A forward and a backward pass.
    Train {
        /// True if the gradients of each block are exchanged after its backward pass.
        exchanges: bool,
    },
}

/// Exchange of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// Completes the weights of a layer.
    Lend(usize),
    /// Exchanges the gradients of a block.
    Done(usize),
}

/// Weights of a model that are cut.
#[derive(Debug)]
pub(crate) struct Lender {
    split: Split,
    /// Cut weights of each layer ([`omnigrpo_models::Decoder::layers`]).
    layers: Vec<Vec<(Arc<Param>, Bucket)>>,
    /// Numbers of the embedding and of the head among the layers.
    ends: [usize; 2],
    is_tied: bool,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    steps: VecDeque<Step>,
    /// Layer whose weights are complete.
    lent: Option<usize>,
    /// True while all weights are complete.
    whole: bool,
}

/// Returns true if a weight of a decoder's layer is cut.
pub(crate) fn is_lent(split: &Split, param: &Param) -> bool {
    let in_memory = !param.is_mapped() && !matches!(param.dtype(), ParamDtype::Quantised(_));
    split.settings.shard == Shard::Weights
        && split.ranks.size() > 1
        && in_memory
        && param.len() >= split.settings.least_cut
}

impl Lender {
    /// Cuts the large weights of a model's decoder, and lets its passes complete them. Returns `None` if nothing is cut.
    pub(crate) fn cut(split: &Split, model: &mut Model) -> Result<Option<Arc<Self>>> {
        let size = split.ranks.size();
        let with_bucket = |param: Arc<Param>| {
            let bucket = Bucket::of(0..1, std::slice::from_ref(&param), size);
            (param, bucket)
        };
        let of_layer = |layer: Vec<Arc<Param>>| -> Vec<_> {
            layer.into_iter().filter(|param| is_lent(split, param)).map(with_bucket).collect()
        };
        let layers: Vec<Vec<_>> = model.decoder().layers().into_iter().map(of_layer).collect();
        if layers.iter().all(Vec::is_empty) {
            return Ok(None);
        }
        for (param, bucket) in layers.iter().flatten() {
            param.cut(bucket.part(split.ranks.rank(), 0))?;
        }
        let ends = model.decoder().ends();
        let is_tied = model.decoder().tied();
        let lender = Arc::new(Self { split: split.clone(), layers, ends, is_tied, state: Mutex::default() });
        model.set_lender(Arc::clone(&lender) as Arc<dyn Lend>);
        Ok(Some(lender))
    }

    /// Returns true if the cut weights are those of `model`.
    fn serves(&self, model: &Model) -> bool {
        let layers = model.decoder().layers();
        let own =
            self.layers.iter().zip(&layers).flat_map(|(own, layer)| own.iter().zip(std::iter::repeat(layer)));
        let mut own = own.map(|((param, _), layer)| layer.iter().any(|other| other.shares_storage(param)));
        self.layers.len() == layers.len() && own.all(|shared| shared)
    }

    /// Begins a turn. All ranks begin the same turns.
    pub(crate) fn begin(&self, turn: Turn) {
        let [embedding, head] = self.ends;
        let mut steps = VecDeque::from([Step::Lend(embedding)]);
        steps.extend((0..embedding).map(Step::Lend));
        steps.push_back(Step::Lend(head));
        if let Turn::Train { exchanges } = turn {
            for block in (0..embedding).rev() {
                steps.push_back(Step::Lend(block));
                steps.extend(exchanges.then_some(Step::Done(block)));
            }
        }
        self.lock().steps = steps;
    }

    /// Marks the exchange of a block's gradients in this turn as done.
    pub(crate) fn block_done(&self, block: usize) {
        self.lock().steps.pop_front_if(|next| *next == Step::Done(block));
    }

    /// Does the exchanges of the turn that are left, `done` those of gradients, and drops the weights of the last layer.
    pub(crate) fn end(&self, mut done: impl FnMut(usize)) -> Result<()> {
        let mut state = self.lock();
        while let Some(step) = state.steps.pop_front() {
            match step {
                Step::Lend(layer) => self.exchange(layer, false)?,
                Step::Done(block) => done(block),
            }
        }
        self.release(&mut state);
        Ok(())
    }

    /// Completes all weights until [`Self::drop_others`].
    pub(crate) fn gather(&self) -> Result<()> {
        let mut state = self.lock();
        if !state.whole {
            self.release(&mut state);
            // A tied head is the embedding.
            let count = self.layers.len() - usize::from(self.is_tied);
            (0..count).try_for_each(|layer| self.exchange(layer, true))?;
            state.whole = true;
        }
        Ok(())
    }

    /// Drops the parts that other ranks sent.
    pub(crate) fn drop_others(&self) {
        let mut state = self.lock();
        state.whole = false;
        self.layers.iter().flatten().for_each(|(param, _)| param.release());
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Drops the weights of the layer that is lent.
    fn release(&self, state: &mut State) {
        if let Some(layer) = state.lent.take() {
            self.layers[layer].iter().for_each(|(param, _)| param.release());
        }
    }

    /// Sends this rank's parts of a layer's weights to all ranks. With `keep`, completes the weights.
    fn exchange(&self, layer: usize, keep: bool) -> Result<()> {
        let mut all = Vec::new();
        for (param, bucket) in &self.layers[layer] {
            if keep {
                param.complete();
            }
            bucket.gather(&self.split, std::slice::from_ref(param), keep, &mut all)?;
        }
        Ok(())
    }

    /// Does the exchanges of the turn up to that of `layer`.
    fn lend_in_turn(&self, layer: usize) -> Result<()> {
        let mut state = self.lock();
        if state.whole || state.lent == Some(layer) {
            return Ok(());
        }
        self.release(&mut state);
        while let Some(Step::Lend(next)) = state.steps.pop_front() {
            self.exchange(next, next == layer)?;
            if next == layer {
                state.lent = Some(layer);
                return Ok(());
            }
        }
        Err(TrainError::Data { what: format!("layer {layer} is not part of this pass over the ranks") })
    }
}

impl Lend for Lender {
    fn lend(&self, layer: usize) -> omnigrpo_ops::Result<()> {
        self.lend_in_turn(layer).map_err(|error| Error::Weight {
            name: self
                .layers
                .get(layer)
                .and_then(|own| own.first())
                .map_or_else(String::new, |(own, _)| own.name().to_owned()),
            what: omnigrpo_guard::told(&error),
        })
    }
}

/// Weights of the policy and of the reference that are cut.
#[derive(Clone, Debug, Default)]
pub(crate) struct Lenders {
    pub(crate) policy: Option<Arc<Lender>>,
    pub(crate) reference: Option<Arc<Lender>>,
}

impl Lenders {
    /// Cuts the weights of the policy and of the reference.
    pub(crate) fn cut(split: &Split, policy: &mut Model, reference: Option<&mut Model>) -> Result<Self> {
        let of_policy = Lender::cut(split, policy)?;
        let Some(reference) = reference else { return Ok(Self { policy: of_policy, reference: None }) };
        let of_reference = match &of_policy {
            // A reference without weights of its own uses those of the policy.
            Some(lender) if lender.serves(reference) => {
                reference.set_lender(Arc::clone(lender) as Arc<dyn Lend>);
                Some(Arc::clone(lender))
            }
            _ => Lender::cut(split, reference)?,
        };
        Ok(Self { policy: of_policy, reference: of_reference })
    }

    fn each(&self) -> impl Iterator<Item = &Arc<Lender>> {
        self.policy.iter().chain(&self.reference)
    }

    /// Completes all weights for the rest of the run.
    pub(crate) fn gather(&self) -> Result<()> {
        self.each().try_for_each(|lender| lender.gather())
    }

    /// Runs `f` with complete weights.
    pub(crate) fn whole<T>(&self, f: impl FnOnce() -> Result<T>) -> Result<T> {
        self.gather()?;
        let out = f();
        self.each().for_each(|lender| lender.drop_others());
        out
    }

    /// Returns the weights of the policy alone.
    pub(crate) fn of_policy(&self) -> Self {
        Self { policy: self.policy.clone(), reference: None }
    }
}

/// The policy and the reference of a step.
#[derive(Clone, Copy)]
pub struct Models<'m> {
    /// Policy, which is trained.
    pub policy: &'m Model,
    /// Reference of the KL term, or teacher, if any. It is the policy itself if that is its own teacher.
    pub reference: Option<&'m Model>,
    /// Lenders of the weights that are cut.
    lenders: Option<&'m Lenders>,
}

impl<'m> From<(&'m Model, Option<&'m Model>)> for Models<'m> {
    fn from((policy, reference): (&'m Model, Option<&'m Model>)) -> Self {
        Self { policy, reference, lenders: None }
    }
}

impl<'m> Models<'m> {
    /// Completes weights that are cut with these lenders.
    pub(crate) fn lent(self, lenders: &'m Lenders) -> Self {
        Self { lenders: Some(lenders), ..self }
    }

    /// Returns the lender of the policy's weights.
    pub(crate) fn of_policy(self) -> Option<&'m Lender> {
        self.lenders?.policy.as_deref()
    }

    /// Returns the lender of the reference's weights.
    pub(crate) fn of_reference(self) -> Option<&'m Lender> {
        let is_policy = self.reference.is_some_and(|own| std::ptr::eq(own, self.policy));
        if is_policy { self.of_policy() } else { self.lenders?.reference.as_deref() }
    }
}

/// Runs `run` for each of this rank's streams, in the turns of all ranks if the weights are cut. `run` also receives whether the turn
/// is the last one of all ranks. `done` exchanges the gradients of a block, for [`Turn::Train`] in the last turn.
pub(crate) fn in_turns<S, C>(
    split: &Split,
    lender: Option<&Lender>,
    trains: bool,
    streams: Result<Vec<S>>,
    context: &mut C,
    mut run: impl FnMut(&mut C, S, bool) -> Result<()>,
    mut done: impl FnMut(&mut C, usize),
) -> Result<()> {
    let Some(lender) = lender else {
        let streams = streams?;
        let count = streams.len();
        let mut streams = streams.into_iter().enumerate();
        return streams.try_for_each(|(at, stream)| run(context, stream, at + 1 == count));
    };
    // A rank that has failed has no streams, but takes part in the turns of the others.
    let (streams, mut result) = match streams {
        Ok(streams) => (streams, Ok(())),
        Err(error) => (Vec::new(), Err(error)),
    };
    let turns = split.ranks.all_gather(&[streams.len() as u64])?.into_iter().max().unwrap_or(0);
    let mut streams = streams.into_iter();
    for turn in 0..turns {
        let is_last = turn + 1 == turns;
        lender.begin(if trains { Turn::Train { exchanges: is_last } } else { Turn::Score });
        if let Some(stream) = streams.next().filter(|_| result.is_ok()) {
            result = run(context, stream, is_last);
        }
        lender.end(|block| done(context, block))?;
    }
    result
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::thread;

    use omnigrpo_kernels::Stored;
    use omnigrpo_models::WeightDtype;
    use omnigrpo_ops::SQUARES_BLOCK;
    use omnigrpo_ranks::{Ranks, Threads};
    use omnigrpo_testkit::models::checkpoint;

    use super::*;
    use crate::split::Division;

    /// Runs `run` on two ranks, each with its model.
    fn on_two_ranks<T: Send>(run: impl Fn(&Split, &Model, &Lender) -> T + Sync) -> Vec<T> {
        let run = &run;
        let rank = move |engine: Threads| {
            let split = Split {
                settings: Division { shard: Shard::Weights, least_cut: 1000, ..Division::default() },
                ..Split::over(Ranks::new(engine))
            };
            let mut model =
                omnigrpo_testkit::load(&checkpoint("qwen2_5_vl_tied"), WeightDtype::Auto).unwrap();
            let lender = Lender::cut(&split, &mut model).unwrap().unwrap();
            run(&split, &model, &lender)
        };
        thread::scope(|scope| {
            let all: Vec<_> =
                Threads::new(2).into_iter().map(|engine| scope.spawn(move || rank(engine))).collect();
            all.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    /// Returns the number of values in memory.
    fn held(param: &Param) -> usize {
        match param.read().stored() {
            Stored::F32(data) => data.len(),
            Stored::Bf16(data) => data.len(),
            Stored::Quantised(_) => 0,
        }
    }

    #[test]
    fn a_rank_has_its_part_and_one_layer() {
        let whole = omnigrpo_testkit::load(&checkpoint("qwen2_5_vl_tied"), WeightDtype::Auto).unwrap();
        let refused = on_two_ranks(|split, model, lender| {
            // A part ends at a block of squares, so a small weight belongs to one rank.
            let own = |(param, bucket): &(Arc<Param>, Bucket)| {
                let part = bucket.part(split.ranks.rank(), 0).len();
                assert!(part.abs_diff(param.len() / 2) <= SQUARES_BLOCK, "{}: {part}", param.name());
                part
            };
            let lent = || lender.layers.iter().map(|layer| layer.iter().map(|cut| (held(&cut.0), own(cut))));
            assert!(lender.layers.iter().all(|layer| !layer.is_empty()));
            assert!(lent().flatten().all(|(held, own)| held == own));
            // The head of this model is its embedding.
            let (last, once) = lender.layers.split_last().unwrap();
            assert!(Arc::ptr_eq(&last[0].0, &once[once.len() - 1][0].0));
            let in_decoder = once.iter().flatten().map(|(param, _)| param.len()).sum::<usize>();
            let all = |model: &Model| model.params().iter().map(|param| held(param)).sum::<usize>();
            let parts = once.iter().flatten().map(|(param, _)| held(param)).sum::<usize>();
            assert_eq!(all(model), all(&whole) - in_decoder + parts);

            lender.begin(Turn::Score);
            lender.lend(0).unwrap();
            for (layer, (params, lent)) in lender.layers.iter().zip(lent()).enumerate() {
                for ((param, _), (held, own)) in params.iter().zip(lent) {
                    assert_eq!(held, if layer == 0 { param.len() } else { own }, "{}", param.name());
                }
            }
            lender.end(|_| ()).unwrap();
            assert!(lent().flatten().all(|(held, own)| held == own));

            lender.gather().unwrap();
            for (param, all) in model.params().iter().zip(whole.params()) {
                assert_eq!(param.read().f32(), all.read().f32(), "{}", param.name());
            }
            lender.drop_others();
            let refused = model.params().iter().filter_map(|param| param.values().err());
            refused.map(|error| error.to_string()).collect::<Vec<_>>()
        });
        let refused = refused.concat();
        let expected = "only a part of its values is in this process";
        assert!(!refused.is_empty() && refused.iter().all(|told| told.contains(expected)), "{refused:?}");
    }

    /// A rank with fewer streams, and one whose stream fails, send their parts in all turns.
    #[test]
    fn uneven_and_failing_ranks_end_their_turns() {
        let outcomes = on_two_ranks(|split, _, lender| {
            let rank = split.ranks.rank();
            let streams = if rank == 0 { vec![0, 1, 2] } else { vec![0, 1] };
            let mut log = Vec::new();
            let run = |log: &mut Vec<String>, stream: usize, is_last: bool| {
                log.push(format!("stream {stream} {is_last}"));
                lender.lend(lender.ends[0]).and_then(|()| lender.lend(1))?;
                if rank == 1 && stream == 0 {
                    return Err(TrainError::Data { what: "no more room".into() });
                }
                Ok(())
            };
            let done = |log: &mut Vec<String>, block| log.push(format!("block {block}"));
            let result = in_turns(split, Some(lender), true, Ok(streams), &mut log, run, done);
            (result.map_err(|error| error.to_string()), log)
        });
        let [(first, of_first), (second, of_second)] = <[_; 2]>::try_from(outcomes).unwrap();
        assert_eq!((first, second), (Ok(()), Err("no more room".to_owned())));
        let blocks = ["block 1", "block 0"];
        let expected = ["stream 0 false", "stream 1 false", "stream 2 true"];
        assert_eq!(of_first, expected.into_iter().chain(blocks).collect::<Vec<_>>());
        assert_eq!(of_second, ["stream 0 false"].into_iter().chain(blocks).collect::<Vec<_>>());
    }
}
