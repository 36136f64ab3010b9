//! The output head, computed in pieces of the vocabulary. A matrix `[rows, vocabulary]` is never stored.

use std::ops::Range;

use crate::device::{Array, Dtype, Gpu};
use crate::driver::LOGITS;
use crate::launchers::head as kernels;
use crate::linear::{Onto, Weight};

/// The target tokens of each row, on a device. A row has the tokens at `offsets[row]..offsets[row + 1]`.
#[derive(Debug)]
pub struct Marks {
    offsets: Array,
    tokens: Array,
    /// Copy of the offsets on the host, used to divide rows into pieces.
    bounds: Vec<u32>,
}

impl Marks {
    /// Uploads the tokens and their offsets. There is one more offset than there are rows.
    pub fn new(gpu: &Gpu, offsets: &[u32], tokens: &[u32]) -> Self {
        Self {
            offsets: gpu.upload_words(offsets),
            tokens: gpu.upload_words(tokens),
            bounds: offsets.to_vec(),
        }
    }

    fn rows(&self) -> usize {
        self.bounds.len().saturating_sub(1)
    }
}

/// Returns the number of rows and of logits that a GPU computes at a time.
pub fn piece(rows: usize, vocab: usize) -> [usize; 2] {
    let [most, elements] = LOGITS;
    let rows = rows.min(most);
    [rows, rows * (elements / rows.max(1)).min(vocab)]
}

/// Returns the pieces of the rows, and the number of columns of a piece.
fn pieces(gpu: &Gpu, rows: usize, vocab: usize) -> (impl Iterator<Item = Range<usize>>, usize) {
    let [most, elements] = gpu.driver().logits();
    let width = (elements / rows.clamp(1, most)).min(vocab).max(1);
    ((0..rows).step_by(most).map(move |at| at..rows.min(at + most)), width)
}

/// The weight and the temperature of the output layer.
#[derive(Clone, Copy, Debug)]
pub struct Head<'a> {
    /// Weight of the layer, `[vocab, h]`.
    pub weight: Weight<'a>,
    /// Number of tokens in the vocabulary.
    pub vocab: usize,
    pub h: usize,
    /// Temperature, by which the logits are divided.
    pub temperature: f32,
}

impl Gpu {
    /// Returns the log-probabilities of the targets, the entropies `[rows]` and the log-sum-exps `[rows]` of softmax(logits /
    /// temperature).
    pub fn score(&self, normed: &Array, head: Head, marks: &Marks) -> [Array; 3] {
        let Head { weight, vocab, h, temperature } = head;
        let rows = marks.rows();
        let out = [marks.tokens.len(), rows, rows].map(|n| self.alloc(n, Dtype::F32));
        let normed = self.held(normed, weight.dtype());
        let (pieces, width) = pieces(self, rows, vocab);
        for piece in pieces {
            let x = self.rows_of(&normed, &piece, h);
            let running = self.alloc(3 * piece.len(), Dtype::F32);
            for first in (0..vocab).step_by(width) {
                let width = width.min(vocab - first);
                let mut logits = self.alloc(piece.len() * width, Dtype::F32);
                self.linear(&mut logits, [0, width], &x, weight, [first, width, h], Onto::Nothing);
                self.statistics([&running, &out[0]], &logits, [first, width], marks, &piece, temperature);
            }
            self.finish(&out, &running, marks, &piece);
        }
        out
    }

    fn statistics(
        &self,
        [running, picked]: [&Array; 2],
        logits: &Array,
        [first, width]: [usize; 2],
        marks: &Marks,
        rows: &Range<usize>,
        temperature: f32,
    ) {
        let (inverse, offsets) = (1.0 / temperature, marks.offsets.element(rows.start));
        let kernel =
            kernels::statistics(running, picked, logits, width, first, inverse, offsets, &marks.tokens);
        self.each_row(kernel, rows.len(), width);
    }

    fn finish(&self, [logp, entropy, lse]: &[Array; 3], running: &Array, marks: &Marks, rows: &Range<usize>) {
        let [entropy, lse, offsets] = [entropy, lse, &marks.offsets].map(|array| array.element(rows.start));
        self.each(kernels::finish(logp, entropy, lse, running, offsets, rows.len()), rows.len());
    }

    /// Returns the gradient with respect to `normed` in f32, and adds the gradient with respect to the weight to `dhead`.
    ///
    /// The function takes the gradients of the log-probabilities and, optionally, of the entropies. The entropies and
    /// log-sum-exps must be those that [`Self::score`] returned.
    pub fn score_back(
        &self,
        normed: &Array,
        head: Head,
        marks: &Marks,
        [entropy, lse]: [&Array; 2],
        (dlogp, dentropy): (&Array, Option<&Array>),
        mut dhead: Option<&mut Array>,
    ) -> Array {
        let Head { weight, vocab, h, temperature } = head;
        let rows = marks.rows();
        let mut dnormed = self.zeros(rows * h, Dtype::F32);
        let normed = self.held(normed, weight.dtype());
        let (pieces, width) = pieces(self, rows, vocab);
        for piece in pieces {
            let count = piece.len();
            let x = self.rows_of(&normed, &piece, h);
            let mut own = self.zeros(count * h, Dtype::F32);
            let at = piece.start;
            for first in (0..vocab).step_by(width) {
                let width = width.min(vocab - first);
                let mut logits = self.alloc(count * width, Dtype::F32);
                self.linear(&mut logits, [0, width], &x, weight, [first, width, h], Onto::Nothing);
                let dlogits = self.alloc(count * width, weight.dtype());
                let kernel = kernels::logit_gradients(
                    &dlogits,
                    &logits,
                    width,
                    first,
                    1.0 / temperature,
                    marks.offsets.element(at),
                    &marks.tokens,
                    lse.element(at),
                    entropy.element(at),
                    dlogp,
                    dentropy.map(|dentropy| dentropy.element(at)),
                );
                self.each_row(kernel, count, width);
                drop(logits);
                self.linear_dx(&mut own, &dlogits, [0, width], weight, [first, width, h], true);
                if let Some(dhead) = dhead.as_deref_mut() {
                    self.linear_dw(dhead, &x, &dlogits, [0, width], [first, width, h], weight.dtype());
                }
            }
            let place = |first| crate::Place::new(first, h);
            self.copy_rows(&mut dnormed, place(piece.start * h), &own, place(0), [count, h]);
        }
        dnormed
    }

    /// Copies a range of rows into a new array.
    fn rows_of(&self, x: &Array, rows: &Range<usize>, cols: usize) -> Array {
        let mut y = self.alloc(rows.len() * cols, x.dtype());
        let place = |first| crate::Place::new(first, cols);
        self.copy_rows(&mut y, place(0), x, place(rows.start * cols), [rows.len(), cols]);
        y
    }
}
