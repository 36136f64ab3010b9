//! The output head in pieces of the vocabulary: there is never a matrix `[rows, vocabulary]`.

use std::ops::Range;

use crate::device::{Arg, Array, Dtype, Gpu};
use crate::linear::Weight;

/// Which tokens each row is scored with, on a device: those at `offsets[row]..offsets[row + 1]`.
#[derive(Debug)]
pub struct Marks {
    offsets: Array,
    tokens: Array,
    /// On the host too, to cut rows into pieces.
    bounds: Vec<u32>,
}

impl Marks {
    /// From offsets, one more than there are rows, and tokens.
    #[must_use]
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

/// Rows of a piece of logits, and elements of one (64 MiB).
const ROWS: usize = 2048;
const ELEMENTS: usize = 1 << 24;

/// Pieces of rows, and columns of a piece.
fn pieces(rows: usize, vocab: usize) -> (impl Iterator<Item = Range<usize>>, usize) {
    let width = (ELEMENTS / rows.clamp(1, ROWS)).min(vocab).max(1);
    ((0..rows).step_by(ROWS).map(move |at| at..rows.min(at + ROWS)), width)
}

impl Gpu {
    /// Log-probabilities of targets, entropies `[rows]` and log-sum-exps `[rows]` of softmax(logits / temperature).
    #[must_use]
    pub fn score(
        &self,
        normed: &Array,
        head: Weight,
        [vocab, h]: [usize; 2],
        marks: &Marks,
        temperature: f32,
    ) -> [Array; 3] {
        let rows = marks.rows();
        let [logp, entropy, lse] = [marks.tokens.len(), rows, rows].map(|n| self.alloc(n, Dtype::F32));
        let normed = self.held(normed, head.dtype());
        let (pieces, width) = pieces(rows, vocab);
        for piece in pieces {
            let count = piece.len();
            let x = self.rows_of(&normed, &piece, h);
            let running = self.alloc(3 * count, Dtype::F32);
            let offsets = Arg::Pointer(marks.offsets.place(piece.start));
            for first in (0..vocab).step_by(width) {
                let width = width.min(vocab - first);
                let mut logits = self.alloc(count * width, Dtype::F32);
                self.linear(&mut logits, [0, width], &x, head, [first, width, h], false);
                let args = [
                    running.pointer(),
                    logp.pointer(),
                    logits.pointer(),
                    Arg::Int(width as i32),
                    Arg::Unsigned(first as u32),
                    Arg::Float(1.0 / temperature),
                    offsets,
                    marks.tokens.pointer(),
                ];
                self.each_row("head/statistics", count, width, &args);
            }
            let [entropy, lse] = [&entropy, &lse].map(|array| Arg::Pointer(array.place(piece.start)));
            let args = [logp.pointer(), entropy, lse, running.pointer(), offsets, Arg::Int(count as i32)];
            self.each("head/finish", count, &args);
        }
        [logp, entropy, lse]
    }

    /// The gradient of `normed`, in f32, from those of log-probabilities and entropies; that of the head is added to `dhead`.
    #[must_use]
    pub fn score_back(
        &self,
        normed: &Array,
        head: Weight,
        [vocab, h]: [usize; 2],
        marks: &Marks,
        [entropy, lse]: [&Array; 2],
        temperature: f32,
        dlogp: &Array,
        dentropy: Option<&Array>,
        mut dhead: Option<&mut Array>,
    ) -> Array {
        let rows = marks.rows();
        let mut dnormed = self.zeros(rows * h, Dtype::F32);
        let normed = self.held(normed, head.dtype());
        let (pieces, width) = pieces(rows, vocab);
        for piece in pieces {
            let count = piece.len();
            let x = self.rows_of(&normed, &piece, h);
            let mut own = self.zeros(count * h, Dtype::F32);
            let at = |array: &Array| Arg::Pointer(array.place(piece.start));
            for first in (0..vocab).step_by(width) {
                let width = width.min(vocab - first);
                let mut logits = self.alloc(count * width, Dtype::F32);
                self.linear(&mut logits, [0, width], &x, head, [first, width, h], false);
                let dlogits = self.alloc(count * width, head.dtype());
                let args = [
                    dlogits.arg(),
                    logits.pointer(),
                    Arg::Int(width as i32),
                    Arg::Unsigned(first as u32),
                    Arg::Float(1.0 / temperature),
                    at(&marks.offsets),
                    marks.tokens.pointer(),
                    at(lse),
                    at(entropy),
                    dlogp.pointer(),
                    dentropy.map_or(Arg::NULL, at),
                ];
                self.each_row("head/logit_gradients", count, width, &args);
                drop(logits);
                self.linear_dx(&mut own, &dlogits, [0, width], head, [first, width, h], true);
                if let Some(dhead) = dhead.as_deref_mut() {
                    self.linear_dw(dhead, &x, &dlogits, [0, width], [first, width, h], head.dtype());
                }
            }
            let place = |first| crate::Place::new(first, h);
            self.copy_rows(&mut dnormed, place(piece.start * h), &own, place(0), [count, h]);
        }
        dnormed
    }

    /// Some rows as an array of their own.
    fn rows_of(&self, x: &Array, rows: &Range<usize>, cols: usize) -> Array {
        let mut y = self.alloc(rows.len() * cols, x.dtype());
        let place = |first| crate::Place::new(first, cols);
        self.copy_rows(&mut y, place(0), x, place(rows.start * cols), [rows.len(), cols]);
        y
    }
}
