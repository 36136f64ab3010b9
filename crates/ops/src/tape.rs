//! The tape, which records a pass and computes the gradient.
//!
//! An operation is an [`Op`]: a hand-written forward and backward pass. [`Tape::apply`] runs it on the values of the pass. The
//! tape's mode determines what is stored:
//!
//! * *off*: nothing is recorded (generation, scoring, a frozen tower);
//! * *recording*: inputs and kept values of operations are stored until [`Tape::backward`] frees them one operation after
//!   another; with `recompute`, blocks keep only their inputs and run a second time (Chen et al., arXiv 1604.06174);
//! * *remembering*: nothing is recorded, but the results of blocks are stored in a [`Memory`] for a later tape, which *recalls*
//!   them instead of computing them again.
//!
//! Operations hold references to their weights and add gradients to the weights' buffers, so the tape carries only activations. A
//! value that needs no gradient is a constant, and operations skip the gradients of constant inputs.

use std::any::Any;
use std::collections::VecDeque;

use crate::error::{Error, Result};
use crate::rows::Rows;

/// Values that an operation keeps from its forward pass for its backward pass.
pub trait Kept: Send + 'static {
    /// Returns the bytes that the values occupy in memory.
    fn num_bytes(&self) -> usize;
}

impl Kept for () {
    fn num_bytes(&self) -> usize {
        0
    }
}

impl Kept for Rows {
    fn num_bytes(&self) -> usize {
        Self::num_bytes(self)
    }
}

/// An operation with `N` inputs, one output and a derivative.
pub trait Op<const N: usize = 1> {
    /// Values that the backward pass needs in addition to the inputs.
    type Kept: Kept;

    /// True for operations whose results are worth remembering, and which are worth running twice to save the memory of their
    /// kept values.
    const BLOCK: bool = false;

    /// Returns the output and the values that the backward pass needs.
    fn forward(&self, inputs: [&Rows; N]) -> Result<(Rows, Self::Kept)>;

    /// Returns the gradients of the `wanted` inputs, given the gradient `dy` of the output. Adds the gradients of weights to
    /// their buffers.
    fn backward(
        &self,
        inputs: [&Rows; N],
        kept: Self::Kept,
        dy: Rows,
        wanted: [bool; N],
    ) -> Result<[Option<Rows>; N]>;
}

/// A value computed or used in a pass.
#[derive(Clone, Debug)]
pub struct Var {
    rows: Rows,
    /// Index on the tape; `None` for constants.
    node: Option<usize>,
}

impl Var {
    /// Creates a value without a gradient.
    pub fn constant(rows: Rows) -> Self {
        Self { rows, node: None }
    }

    pub fn rows(&self) -> &Rows {
        &self.rows
    }

    pub fn into_rows(self) -> Rows {
        self.rows
    }
}

/// Results of the blocks of a pass, in order, for a later pass over the same input.
#[derive(Default)]
pub struct Memory {
    /// Output of each block, with the values for its backward pass if they were stored.
    kept: VecDeque<Box<dyn Any + Send>>,
}

impl Memory {
    /// Appends the output `y` of the next block and the values for its backward pass. If the values are `None`, the backward pass
    /// computes them again.
    pub fn push<K: Kept>(&mut self, y: Rows, kept: Option<K>) {
        self.kept.push_back(Box::new((y, kept)));
    }
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.debug_struct("Memory").field("blocks", &self.kept.len()).finish()
    }
}

enum Mode {
    Off,
    Record {
        recompute: bool,
        recalled: Memory,
    },
    /// Results of blocks; `None` once they exceed the available bytes.
    Remember {
        memory: Option<Memory>,
        room: usize,
    },
}

type Back = Box<dyn FnOnce(Rows) -> Result<Vec<Option<Rows>>>>;

/// A recorded operation, or an input of the pass.
struct Node {
    inputs: Vec<Option<usize>>,
    back: Option<Back>,
    is_block: bool,
}

/// The record of a pass.
pub struct Tape {
    mode: Mode,
    nodes: Vec<Node>,
}

impl Tape {
    /// Creates a tape that records nothing.
    pub fn off() -> Self {
        Self { mode: Mode::Off, nodes: Vec::new() }
    }

    /// Creates a tape that records. With `recompute`, blocks do not keep values, and the backward pass computes them again.
    pub fn recording(recompute: bool) -> Self {
        Self { mode: Mode::Record { recompute, recalled: Memory::default() }, nodes: Vec::new() }
    }

    /// Creates a tape that records nothing, but stores up to `room` bytes of results of blocks.
    pub fn remembering(room: usize) -> Self {
        Self { mode: Mode::Remember { memory: Some(Memory::default()), room }, nodes: Vec::new() }
    }

    /// Creates a tape that records, and recalls the results of an earlier pass. `recompute` has the same meaning as in
    /// [`Self::recording`].
    pub fn recalling(memory: Memory, recompute: bool) -> Self {
        Self { mode: Mode::Record { recompute, recalled: memory }, nodes: Vec::new() }
    }

    /// Returns the results that this pass remembered and the number of unused bytes. Returns `None` if nothing was remembered or
    /// the results exceeded the available bytes.
    pub fn into_memory(self) -> Option<(Memory, usize)> {
        match self.mode {
            Mode::Remember { memory: Some(memory), room } if !memory.kept.is_empty() => Some((memory, room)),
            _ => None,
        }
    }

    /// Adds an input whose gradient [`Self::backward`] returns.
    pub fn input(&mut self, rows: Rows) -> Var {
        let node = matches!(self.mode, Mode::Record { .. }).then(|| self.push(Vec::new(), None, false));
        Var { rows, node }
    }

    fn push(&mut self, inputs: Vec<Option<usize>>, back: Option<Back>, is_block: bool) -> usize {
        self.nodes.push(Node { inputs, back, is_block });
        self.nodes.len() - 1
    }

    /// Runs an operation, and records it if the tape records.
    pub fn apply<const N: usize, O: Op<N> + 'static>(&mut self, op: O, inputs: [&Var; N]) -> Result<Var> {
        let x = inputs.map(|input| &input.rows);
        let (recompute, recalled) = match &mut self.mode {
            Mode::Off => return Ok(Var::constant(op.forward(x)?.0)),
            Mode::Remember { memory, room } => {
                let (y, kept) = op.forward(x)?;
                if O::BLOCK {
                    let bytes = kept.num_bytes() + y.num_bytes();
                    match memory {
                        Some(memory) if bytes <= *room => {
                            *room -= bytes;
                            memory.push(y.clone(), Some(kept));
                        }
                        _ => *memory = None,
                    }
                }
                return Ok(Var::constant(y));
            }
            Mode::Record { recompute, recalled } => {
                let known = if O::BLOCK { recalled.kept.pop_front() } else { None };
                (*recompute && O::BLOCK, known)
            }
        };
        let (y, kept) = match recalled.map(|known| known.downcast::<(Rows, Option<O::Kept>)>()) {
            Some(Ok(known)) => *known,
            Some(Err(_)) => {
                return Err(Error::Tape {
                    what: "the remembered result is that of another operation; expected the memory of the same pass".into(),
                });
            }
            None => {
                let (y, kept) = op.forward(x)?;
                (y, Some(kept))
            }
        };
        let kept = kept.filter(|_| !recompute);
        let (x, nodes) = (x.map(Rows::clone), inputs.map(|input| input.node));
        let back = move |dy: Rows| {
            let x = x.each_ref();
            let kept = match kept {
                Some(kept) => kept,
                None => op.forward(x)?.1,
            };
            Ok(op.backward(x, kept, dy, nodes.map(|node| node.is_some()))?.into())
        };
        let node = self.push(nodes.into(), Some(Box::new(back)), O::BLOCK);
        Ok(Var { rows: y, node: Some(node) })
    }

    /// Runs several operations as one block. With `recompute`, the tape keeps only the inputs of the block, and the block runs
    /// twice to save memory.
    pub fn segment<const N: usize>(
        &mut self,
        inputs: [&Var; N],
        run: impl Fn(&mut Self, [&Var; N]) -> Result<Var> + 'static,
    ) -> Result<Var> {
        match &self.mode {
            Mode::Record { recompute: true, .. } => {}
            _ => return run(self, inputs),
        }
        let constants = inputs.map(|input| Var::constant(input.rows.clone()));
        let y = run(&mut Self::off(), constants.each_ref())?.rows;
        let nodes = inputs.map(|input| input.node);
        let back = move |dy: Rows| {
            let mut tape = Self::recording(false);
            let mut at = 0;
            let inputs = constants.map(|constant| {
                at += 1;
                if nodes[at - 1].is_some() { tape.input(constant.rows) } else { constant }
            });
            let y = run(&mut tape, inputs.each_ref())?;
            let mut gradients = tape.backward(&y, dy)?;
            Ok(inputs.iter().map(|input| gradients.take(input)).collect())
        };
        let node = self.push(nodes.into(), Some(Box::new(back)), false);
        Ok(Var { rows: y, node: Some(node) })
    }

    /// Propagates `dy`, the gradient of `output`, back to the inputs, and adds weight gradients to their buffers. Each operation
    /// is freed as soon as its gradient is computed. Returns an error if `dy` and `output` differ in shape, or if `output` was
    /// not recorded.
    pub fn backward(self, output: &Var, dy: Rows) -> Result<Gradients> {
        self.backward_by_block(output, dy, &mut |_| {})
    }

    /// Runs [`Self::backward`] and calls `done` after the backward pass of each block, with the number of blocks whose backward pass
    /// is still to come.
    pub fn backward_by_block(
        mut self,
        output: &Var,
        dy: Rows,
        done: &mut dyn FnMut(usize),
    ) -> Result<Gradients> {
        if output.rows.dims() != dy.dims() {
            let what = format!("the output is {:?}, its gradient {:?}", output.rows.dims(), dy.dims());
            return Err(Error::Tape { what });
        }
        let device = output.rows.device();
        device.check("backward", &dy)?;
        let last = match output.node {
            Some(node) if node < self.nodes.len() => node,
            _ => return Err(Error::Tape { what: "the output was not recorded on this tape".into() }),
        };
        let mut gradients: Vec<Option<Rows>> = vec![None; self.nodes.len()];
        gradients[last] = Some(dy);
        self.nodes.truncate(last + 1);
        let mut blocks = self.nodes.iter().filter(|node| node.is_block).count();
        while let Some(Node { inputs, back, is_block }) = self.nodes.pop() {
            // The gradient of an input stays.
            let Some(back) = back else { continue };
            if let Some(dy) = gradients[self.nodes.len()].take() {
                for (input, dx) in inputs.into_iter().zip(back(dy)?) {
                    let (Some(input), Some(dx)) = (input, dx) else { continue };
                    device.check("backward", &dx)?;
                    match &mut gradients[input] {
                        Some(sum) => sum.add(&dx)?,
                        empty => *empty = Some(dx),
                    }
                }
            }
            if is_block {
                blocks -= 1;
                done(blocks);
            }
        }
        Ok(Gradients(gradients))
    }
}

pub struct Gradients(Vec<Option<Rows>>);

impl Gradients {
    /// Returns the gradient of an input, or `None` if no gradient reached it.
    pub fn take(&mut self, input: &Var) -> Option<Rows> {
        self.0.get_mut(input.node?)?.take()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::Device;

    /// Multiplication by a constant, `by · x`, as a block that keeps nothing.
    struct Times(f32);

    impl Op for Times {
        type Kept = ();
        const BLOCK: bool = true;

        fn forward(&self, [x]: [&Rows; 1]) -> Result<(Rows, ())> {
            let mut y = x.clone();
            y.scale(self.0);
            Ok((y, ()))
        }

        fn backward(
            &self,
            _: [&Rows; 1],
            (): (),
            mut dy: Rows,
            wanted: [bool; 1],
        ) -> Result<[Option<Rows>; 1]> {
            dy.scale(self.0);
            Ok([wanted[0].then_some(dy)])
        }
    }

    fn row(x: f32) -> Rows {
        Rows::from_vec(vec![x], 1, 1).unwrap()
    }

    #[test]
    fn a_value_used_twice_gets_the_sum() {
        for recompute in [false, true] {
            let mut tape = Tape::recording(recompute);
            let x = tape.input(row(3.0));
            let fixed = Var::constant(row(5.0));
            let y = tape
                .segment([&x, &fixed], |tape, [x, fixed]| {
                    let a = tape.apply(Times(2.0), [x])?;
                    let b = tape.add(&a, x)?;
                    tape.add(&b, fixed)
                })
                .unwrap();
            assert_eq!(y.rows().to_vec(), [14.0]);
            let mut gradients = tape.backward(&y, row(1.0)).unwrap();
            assert_eq!(gradients.take(&x).unwrap().to_vec(), [3.0]);
            assert!(gradients.take(&fixed).is_none());
        }
    }

    #[test]
    fn a_pass_recalls_another_within_its_room() {
        let run = |tape: &mut Tape| {
            let x = tape.input(row(1.0));
            let y = tape.apply(Times(2.0), [&x]).unwrap();
            (tape.apply(Times(3.0), [&y]).unwrap(), x)
        };
        let mut first = Tape::remembering(10);
        run(&mut first);
        let (memory, room) = first.into_memory().unwrap();
        assert_eq!((memory.kept.len(), room), (2, 2));
        let mut second = Tape::recalling(memory, false);
        let (y, x) = run(&mut second);
        let mut gradients = second.backward(&y, row(1.0)).unwrap();
        assert_eq!(gradients.take(&x).unwrap().to_vec(), [6.0]);
        // A pass that recomputes the kept values of blocks needs only their outputs.
        let mut memory = Memory::default();
        memory.push(row(2.0), None::<()>);
        memory.push(row(7.0), None::<()>);
        let mut third = Tape::recalling(memory, true);
        let (y, x) = run(&mut third);
        assert_eq!(y.rows().to_vec(), [7.0]);
        assert_eq!(third.backward(&y, row(1.0)).unwrap().take(&x).unwrap().to_vec(), [6.0]);
        // The results exceed the limit, so the tape returns none of them.
        let mut first = Tape::remembering(7);
        run(&mut first);
        assert!(first.into_memory().is_none());
    }

    #[test]
    fn a_tape_that_is_off_records_nothing() {
        let mut tape = Tape::off();
        let x = tape.input(row(1.0));
        let y = tape.apply(Times(2.0), [&x]).unwrap();
        assert_eq!(y.rows().to_vec(), [2.0]);
        assert!(tape.backward(&y, row(1.0)).is_err());
        assert_eq!(Rows::zeros(Device::Cpu, 0, 3).dims(), (0, 3));
    }
}
