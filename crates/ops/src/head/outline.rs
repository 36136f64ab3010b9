//! The output head on an outline.

use omnigrpo_gpu::{Dtype, piece};

use crate::outline::{Outline, Span, card, dtype, factor, in_f32, reach};
use crate::work::{Call, Form, note};

use super::*;

impl HeadOps for Outline {
    fn score(&self, normed: &Rows, head: &Param, targets: &Targets, temperature: f32, top: Top) -> Scores {
        note_score(normed, head, None);
        drop(pieces(normed, head, false));
        let row = |cols| in_f32(1, cols);
        let (logprobs, rows) = (row(targets.tokens.len()), normed.rows());
        Scores {
            logprobs,
            entropies: row(rows),
            lse: row(rows),
            temperature,
            top: vec![(0, 0.0); rows * top.k],
        }
    }

    fn score_back(
        &self,
        normed: &Rows,
        head: &Param,
        _: &Targets,
        _: &Scores,
        _: &[f32],
        _: Option<&[f32]>,
    ) -> Rows {
        note_score(normed, head, Some(head.trainable()));
        reach(head);
        drop(pieces(normed, head, true));
        in_f32(normed.rows(), normed.cols())
    }

    fn logits(&self, normed: &Rows, head: &Param) -> Rows {
        let (rows, h, form) = (normed.rows(), normed.cols(), Form::of(head));
        note(|| Call::Logits { rows, h, v: head.len() / h.max(1), form });
        in_f32(normed.rows(), head.len() / normed.cols().max(1))
    }

    fn draw(&self, logits: &mut Rows, _: &Sampler, _: &[DrawFrom]) -> Vec<Option<Draw>> {
        note(|| Call::Draw { rows: logits.rows(), v: logits.cols() });
        vec![None; logits.rows()]
    }
}

/// Counts the pieces of logits of a GPU, and a copy of the normalised rows. The gradient has its own logits and sums.
fn pieces(normed: &Rows, head: &Param, back: bool) -> Vec<Span> {
    if card().is_none() {
        return Vec::new();
    }
    let (rows, h, factor) = (normed.rows(), normed.cols(), factor(head));
    let [piece, logits] = piece(rows, head.len() / h.max(1));
    let copy = (factor != dtype(normed)).then(|| Span::new(rows * h, factor));
    let own = [Span::new(piece * h, factor), Span::new(logits, Dtype::F32)];
    let of_back = back.then(|| [Span::new(piece * h, Dtype::F32), Span::new(logits, factor)]);
    copy.into_iter().chain(own).chain(of_back.into_iter().flatten()).collect()
}

/// Lists the scoring of rows by the head. `back` is `None` for the forward pass; for the backward pass, it is true if the head is
/// trained.
fn note_score(normed: &Rows, head: &Param, back: Option<bool>) {
    let (rows, h, form) = (normed.rows(), normed.cols(), Form::of(head));
    note(|| Call::Score { rows, h, v: head.len() / h.max(1), form, back });
}
