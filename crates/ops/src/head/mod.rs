//! The output head: log-probabilities of targets, without a matrix of logits.

mod cpu;
mod gpu;
mod outline;
#[cfg(feature = "twin")]
mod twin;

use omnigrpo_kernels::Top;
use omnigrpo_kernels::logprob;
use omnigrpo_kernels::sample::{Draw, DrawFrom, Sampler};

use crate::Param;
use crate::error::{Error, Result};
use crate::rows::Rows;

/// The output head.
pub(crate) trait HeadOps {
    /// Returns log-probabilities of targets and the `top` most probable tokens of each row, without a matrix of logits.
    fn score(&self, normed: &Rows, head: &Param, targets: &Targets, temperature: f32, top: Top) -> Scores;
    /// Returns the gradient of `normed`, and adds the gradient of the head to its buffer. `dentropy` has one value per row.
    fn score_back(
        &self,
        normed: &Rows,
        head: &Param,
        targets: &Targets,
        scores: &Scores,
        dlogp: &[f32],
        dentropy: Option<&[f32]>,
    ) -> Rows;
    /// Returns logits `[t, vocabulary]`. The logits of a row do not depend on other rows.
    fn logits(&self, normed: &Rows, head: &Param) -> Rows;
    /// Draws a token from each row of logits, and overwrites the logits. A draw is `None` if a logit is NaN or +∞, or if no token
    /// can be drawn.
    fn draw(&self, logits: &mut Rows, how: &Sampler, from: &[DrawFrom]) -> Vec<Option<Draw>>;
}

/// Rows to score, with their target tokens: row `rows[i]` has the targets `tokens[offsets[i]..offsets[i + 1]]`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Targets {
    /// Indices of distinct rows of the stream.
    pub rows: Vec<usize>,
    /// Offsets into `tokens`, with length `rows.len() + 1`.
    pub offsets: Vec<usize>,
    pub tokens: Vec<u32>,
}

impl Targets {
    /// Returns an error unless the offsets assign each token to one row, in order.
    fn check(&self) -> Result<()> {
        let bounds = (self.offsets.first(), self.offsets.last());
        let whole = self.offsets.len() == self.rows.len() + 1
            && bounds == (Some(&0), Some(&self.tokens.len()))
            && self.offsets.is_sorted();
        match whole {
            true => Ok(()),
            false => {
                let (rows, tokens) = (self.rows.len(), self.tokens.len());
                let what =
                    format!("offsets {bounds:?} do not divide {tokens} tokens among {rows} rows in order");
                Err(Error::shape("targets", what))
            }
        }
    }

    /// Converts to the kernels' structure.
    pub(crate) fn kernel(&self) -> logprob::Targets<'_> {
        logprob::Targets { tokens: &self.tokens, offsets: &self.offsets }
    }
}

/// Log-probabilities of targets, and statistics needed for the gradient.
#[derive(Debug)]
pub struct Scores {
    /// Log-probability of each target under softmax(logits / temperature), in nats, with shape `[1, targets]`.
    pub logprobs: Rows,
    /// Entropy of the distribution at each row, in nats, with shape `[1, rows]`.
    pub entropies: Rows,
    /// Log-sum-exp of the logits of each row, with shape `[1, rows]`.
    pub lse: Rows,
    /// Temperature, by which the logits are divided.
    pub temperature: f32,
    /// Most probable tokens of each row with their log-probabilities, `[rows, k]`, the most probable first; empty if none were asked
    /// for. They are in main memory.
    pub top: Vec<(u32, f32)>,
}

/// Returns log-probabilities and entropies of `targets`. `normed [targets.rows.len(), h]` contains only the rows with targets.
/// The vocabulary is processed in chunks.
pub fn score(normed: &Rows, head: &Param, targets: &Targets, temperature: f32) -> Result<Scores> {
    score_top(normed, head, targets, temperature, Top::NONE)
}

/// Returns what [`score`] does, and the `top` most probable tokens of each row; all tokens if there are fewer.
pub fn score_top(
    normed: &Rows,
    head: &Param,
    targets: &Targets,
    temperature: f32,
    top: Top,
) -> Result<Scores> {
    check(normed, head)?;
    targets.check()?;
    let vocab = head.len() / normed.cols().max(1);
    if normed.rows() != targets.rows.len() || targets.tokens.iter().any(|&id| id as usize >= vocab) {
        let what = format!(
            "{} rows for {} with targets, or a token id of {vocab} or more",
            normed.rows(),
            targets.rows.len()
        );
        return Err(Error::shape("score", what));
    }
    Ok(normed.device().backend().score(normed, head, targets, temperature, top.within(vocab)))
}

/// Returns the gradient of [`score`] with respect to `normed`, given dL/dlogp per target and dL/dentropy per row. Adds the
/// gradient of the head to its buffer.
pub fn score_backward(
    normed: &Rows,
    head: &Param,
    targets: &Targets,
    scores: &Scores,
    dlogp: &[f32],
    dentropy: Option<&[f32]>,
) -> Result<Rows> {
    check(normed, head)?;
    targets.check()?;
    for operand in [&scores.lse, &scores.entropies] {
        normed.device().check("score backward", operand)?;
    }
    if normed.rows() != targets.rows.len()
        || scores.lse.len() != targets.rows.len()
        || scores.entropies.len() != targets.rows.len()
    {
        let what = format!("{} rows, {} scores of {}", normed.rows(), scores.lse.len(), targets.rows.len());
        return Err(Error::shape("score backward", what));
    }
    if dlogp.len() != targets.tokens.len() || dentropy.is_some_and(|d| d.len() != targets.rows.len()) {
        let what = format!("{} gradients for {} targets", dlogp.len(), targets.tokens.len());
        return Err(Error::shape("score backward", what));
    }
    Ok(normed.device().backend().score_back(normed, head, targets, scores, dlogp, dentropy))
}

/// Returns logits `[t, vocabulary]` for sampling. The logits of a row do not depend on other rows.
pub fn logits(normed: &Rows, head: &Param) -> Result<Rows> {
    check(normed, head)?;
    Ok(normed.device().backend().logits(normed, head))
}

fn check(normed: &Rows, head: &Param) -> Result<()> {
    head.usable(normed.device())?;
    match head.shape() {
        &[_, h] if h == normed.cols() => Ok(()),
        shape => Err(Error::shape(
            format!("head {}", head.name()),
            format!("rows of {} for a weight of {shape:?}", normed.cols()),
        )),
    }
}

impl Rows {
    /// Draws a token from each row of logits. A draw is `None` if a logit of the row is NaN or +∞, or if no token can
    /// be drawn.
    pub fn draw(mut self, how: &Sampler, from: &[DrawFrom]) -> Result<Vec<Option<Draw>>> {
        if from.len() != self.rows() {
            return Err(Error::shape("draw", format!("{} draws from {} rows", from.len(), self.rows())));
        }
        Ok(self.device().backend().draw(&mut self, how, from))
    }
}
