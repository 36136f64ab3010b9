//! Backward through a model one segment at a time.
//!
//! A segment is a function from one `[t, h]` tensor to another, typically one transformer block. Either it knows its own
//! backward pass ([`Segments::own`]), or its input is a fresh `Var` in training, so that candle records the segment's ops and
//! nothing before them. The backward pass walks the
//! segments in reverse, and each segment's activations are freed as soon as its gradient is known; with
//! `recompute` they are not even kept, and the segment runs a second time (Chen et al., arXiv 1604.06174).
//!
//! A chain that will run with a tape later can run without one first and leave a [`Memory`] of what its segments computed:
//! the run with the tape then takes that instead of computing it again.

use std::any::Any;
use std::collections::VecDeque;

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, Var, bail};

type Run<'a> = Box<dyn Fn(&Tensor, Option<&Tensor>) -> Result<Tensor> + 'a>;
type Back<'a> = Box<dyn FnOnce(Tensor) -> Result<Tensor> + 'a>;

/// What the segments of a run computed, in their order, for a second run of the same chain on the same input.
pub struct Memory {
    kept: VecDeque<Box<dyn Any + Send>>,
    /// Bytes that may still be kept.
    room: usize,
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.debug_struct("Memory").field("kept", &self.kept.len()).field("room", &self.room).finish()
    }
}

/// Whether a run leaves a memory or has one.
#[derive(Default)]
enum Mode {
    #[default]
    Plain,
    /// Nothing is recorded. Empty once there was no room.
    Remember(Option<Memory>),
    Recall(Memory),
}

/// A chain of segments that has run forward and waits for its backward pass.
#[derive(Default)]
pub struct Segments<'a> {
    recompute: bool,
    mode: Mode,
    chain: Vec<Segment<'a>>,
}

enum Segment<'a> {
    /// Recorded by candle.
    Recorded {
        input: Var,
        /// A second input, and the chain it comes from.
        side: Option<(Var, Segments<'a>)>,
        output: Option<Tensor>,
        run: Run<'a>,
    },
    /// With a backward pass written by hand.
    Own(Back<'a>),
}

impl<'a> Segments<'a> {
    /// An empty chain. With `recompute`, activations inside segments are computed again in the backward pass
    /// instead of being kept.
    #[must_use]
    pub fn new(recompute: bool) -> Self {
        Self { recompute, ..Self::default() }
    }

    /// A chain that records nothing, but keeps what segments [`Self::remember`], up to `room` bytes in all.
    #[must_use]
    pub fn remembering(room: usize) -> Self {
        let mode = Mode::Remember(Some(Memory { kept: VecDeque::new(), room }));
        // A chain on the side would otherwise keep its activations.
        Self { recompute: true, mode, chain: Vec::new() }
    }

    /// An empty chain that takes what an earlier run remembered.
    #[must_use]
    pub fn recalling(memory: Memory) -> Self {
        Self { mode: Mode::Recall(memory), ..Self::default() }
    }

    /// What this run remembered and the bytes that were left; nothing if there was no room for all of it.
    #[must_use]
    pub fn into_memory(self) -> Option<(Memory, usize)> {
        match self.mode {
            Mode::Remember(Some(memory)) if !memory.kept.is_empty() => {
                let room = memory.room;
                Some((memory, room))
            }
            _ => None,
        }
    }

    /// Whether this run is to be remembered and not recorded.
    #[must_use]
    pub fn remembers(&self) -> bool {
        matches!(self.mode, Mode::Remember(_))
    }

    /// Keeps what a segment of `bytes` bytes computed for [`Self::recall`].
    pub fn remember(&mut self, bytes: usize, what: impl Any + Send) {
        if let Mode::Remember(slot) = &mut self.mode {
            match slot {
                Some(memory) if bytes <= memory.room => {
                    memory.room -= bytes;
                    memory.kept.push_back(Box::new(what));
                }
                _ => *slot = None,
            }
        }
    }

    /// What the same segment remembered, if an earlier run did.
    pub fn recall<T: Any>(&mut self) -> Option<T> {
        let Mode::Recall(memory) = &mut self.mode else { return None };
        let what = memory.kept.pop_front()?.downcast().ok();
        debug_assert!(what.is_some(), "another segment remembered this");
        what.map(|what| *what)
    }

    /// Runs `run` on `x` and records it. The result is detached: it belongs to the next segment.
    ///
    /// # Errors
    /// Whatever `run` returns.
    pub fn push(&mut self, x: &Tensor, run: impl Fn(&Tensor) -> Result<Tensor> + 'a) -> Result<Tensor> {
        self.record(x, None, Box::new(move |x, _| run(x)))
    }

    /// As [`Self::push`] with a second input `y`, the output of the chain `side`, which gets the gradient of `y`.
    ///
    /// # Errors
    /// Whatever `run` returns.
    pub fn join(
        &mut self,
        x: &Tensor,
        y: &Tensor,
        side: Self,
        run: impl Fn(&Tensor, &Tensor) -> Result<Tensor> + 'a,
    ) -> Result<Tensor> {
        let run: Run<'a> = Box::new(move |x, y| match y {
            Some(y) => run(x, y),
            None => bail!("segment: the second input is missing"),
        });
        self.record(x, Some((Var::from_tensor(&y.detach())?, side)), run)
    }

    fn record(&mut self, x: &Tensor, side: Option<(Var, Self)>, run: Run<'a>) -> Result<Tensor> {
        if self.remembers() {
            return run(&x.detach(), side.map(|(y, _)| y.as_detached_tensor()).as_ref());
        }
        let input = Var::from_tensor(&x.detach())?;
        let y = side.as_ref().map(|(y, _)| y);
        let output = if self.recompute {
            run(&input.as_detached_tensor(), y.map(Var::as_detached_tensor).as_ref())?
        } else {
            run(&input, y.map(Var::as_tensor))?
        };
        let next = output.detach();
        let output = (!self.recompute).then_some(output);
        self.chain.push(Segment::Recorded { input, side, output, run });
        Ok(next)
    }

    /// Records a segment that has run already and knows its own backward pass: `back` takes the gradient of its output
    /// and returns that of its input. What it keeps until then is its own affair; see [`Self::recompute`].
    pub fn own(&mut self, back: impl FnOnce(Tensor) -> Result<Tensor> + 'a) {
        if !self.remembers() {
            self.chain.push(Segment::Own(Box::new(back)));
        }
    }

    /// Whether activations inside segments are to be computed again instead of being kept.
    #[must_use]
    pub fn recompute(&self) -> bool {
        self.recompute
    }

    /// Carries `dy`, the gradient of the last output, back to the first input, adding weight gradients on the way.
    ///
    /// # Errors
    /// A shape of `dy` that differs from the output's.
    pub fn backward(self, mut dy: Tensor) -> Result<Tensor> {
        for segment in self.chain.into_iter().rev() {
            let (input, side, output, run) = match segment {
                Segment::Recorded { input, side, output, run } => (input, side, output, run),
                Segment::Own(back) => {
                    dy = back(dy)?;
                    continue;
                }
            };
            let output = match output {
                Some(output) => output,
                None => run(&input, side.as_ref().map(|(y, _)| y.as_tensor()))?,
            };
            if output.shape() != dy.shape() {
                bail!("segment backward: output is {:?}, gradient is {:?}", output.shape(), dy.shape());
            }
            let mut grads = output.apply_op1(Seed(dy))?.backward()?;
            drop(output);
            let mut of = |input: &Var| match grads.remove(input) {
                Some(dx) => Ok(dx),
                None => bail!("segment backward: no gradient reached the input of shape {:?}", input.shape()),
            };
            dy = of(&input)?;
            if let Some((y, side)) = side {
                side.backward(of(&y)?)?;
            }
        }
        Ok(dy)
    }
}

/// A scalar whose gradient with respect to its input is the stored tensor: the start of a backward pass whose
/// upstream gradient is already known.
struct Seed(Tensor);

impl CustomOp1 for Seed {
    fn name(&self) -> &'static str {
        "seed"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(vec![0.0]), Shape::from(())))
    }

    fn bwd(&self, _x: &Tensor, _y: &Tensor, _one: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(self.0.clone()))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_run_takes_what_another_remembered_in_order_and_within_its_room() {
        let run = |tape: &mut Segments, values: &[u32]| -> Vec<Option<u32>> {
            let segment = |&value| {
                let known = tape.recall::<u32>();
                if known.is_none() {
                    tape.remember(4, value);
                }
                known
            };
            values.iter().map(segment).collect()
        };
        let mut first = Segments::remembering(10);
        assert!(first.remembers());
        assert_eq!(run(&mut first, &[7, 8]), [None, None]);
        let (memory, room) = first.into_memory().unwrap();
        assert_eq!(room, 2);
        let mut second = Segments::recalling(memory);
        assert!(!second.remembers() && !second.recompute());
        assert_eq!(run(&mut second, &[0, 0, 0]), [Some(7), Some(8), None]);
        assert!(second.into_memory().is_none());

        // Half of it would be of no use.
        let mut first = Segments::remembering(10);
        run(&mut first, &[7, 8, 9]);
        assert!(first.into_memory().is_none());
        assert!(Segments::remembering(10).into_memory().is_none());
    }

    #[test]
    fn a_remembering_run_records_nothing() {
        let mut tape = Segments::remembering(10);
        let x = Tensor::ones((2, 3), candle_core::DType::F32, &candle_core::Device::Cpu).unwrap();
        let y = tape.push(&x, |x| x * 2.0).unwrap();
        tape.own(|_| bail!("this is not recorded"));
        assert_eq!(y.sum_all().unwrap().to_scalar::<f32>().unwrap(), 12.0);
        // Nothing stands between the output and the input.
        let dy = tape.backward(x.clone()).unwrap();
        assert_eq!(dy.to_vec2::<f32>().unwrap(), x.to_vec2::<f32>().unwrap());
    }
}
