//! The output head on the f64 twin.

use omnigrpo_kernels::logprob::Gradient;
use omnigrpo_kernels::{Mat, twin};

use crate::twin::{Twin, accumulate, values};

use super::*;

impl HeadOps for Twin {
    fn score(&self, normed: &Rows, head: &Param, targets: &Targets, temperature: f32, top: Top) -> Scores {
        let (weight, t) = (values(head), f64::from(temperature));
        let head = Mat::new(&weight, head.len() / normed.cols().max(1), normed.cols());
        let scores = twin::logprob_forward(normed.mat64(), head, targets.kernel(), t);
        let most = twin::most_probable(normed.mat64(), head, t, top).into_iter();
        let top = most.map(|(id, logp)| (id, logp as f32)).collect();
        let [logprobs, entropies, lse] = [scores.logp, scores.entropy, scores.lse].map(of_len);
        Scores { logprobs, entropies, lse, temperature, top }
    }

    fn score_back(
        &self,
        normed: &Rows,
        head: &Param,
        targets: &Targets,
        scores: &Scores,
        dlogp: &[f32],
        dentropy: Option<&[f32]>,
    ) -> Rows {
        let wide = |d: &[f32]| d.iter().map(|&d| f64::from(d)).collect::<Vec<_>>();
        let (dlogp, dentropy) = (wide(dlogp), dentropy.map(wide));
        let gradient = Gradient { logp: &dlogp, entropy: dentropy.as_deref() };
        let (weight, t) = (values(head), f64::from(scores.temperature));
        let mat = Mat::new(&weight, head.len() / normed.cols().max(1), normed.cols());
        let (dnormed, dhead) = twin::logprob_backward(gradient, normed.mat64(), mat, targets.kernel(), t);
        accumulate(head, &dhead);
        Rows::on_twin(dnormed, normed.rows(), normed.cols())
    }

    fn logits(&self, normed: &Rows, head: &Param) -> Rows {
        let (n, h) = normed.dims();
        let (weight, vocab) = (values(head), head.len() / h.max(1));
        Rows::on_twin(twin::linear_forward(normed.mat64(), Mat::new(&weight, vocab, h), None), n, vocab)
    }

    fn draw(&self, logits: &mut Rows, how: &Sampler, from: &[DrawFrom]) -> Vec<Option<Draw>> {
        let rows = logits.twin().chunks(logits.cols().max(1)).zip(from);
        rows.map(|(logits, from)| twin::draw(logits, how, from)).collect()
    }
}

fn of_len(data: Vec<f64>) -> Rows {
    let cols = data.len();
    Rows::on_twin(data, 1, cols)
}
