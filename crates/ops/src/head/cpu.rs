//! The output head on the CPU.

use omnigrpo_kernels::{MatMut, parallel, profile, sample};

use crate::cpu::{Cpu, with_table};
use crate::device::Device;

use super::*;

impl HeadOps for Cpu {
    fn score(&self, normed: &Rows, head: &Param, targets: &Targets, temperature: f32, top: Top) -> Scores {
        let (logprob::Scores { logp, entropy, lse }, top) = with_table(head, normed.cols(), |weight| {
            logprob::forward_top(normed.mat(), logprob::Head { weight, temperature }, targets.kernel(), top)
        });
        let row = |data: Vec<f32>| {
            let cols = data.len();
            Rows::on_cpu(data, 1, cols)
        };
        Scores { logprobs: row(logp), entropies: row(entropy), lse: row(lse), temperature, top }
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
        let dnormed = with_table(head, normed.cols(), |weight| {
            let ((v, h), mut gradient) = (weight.dims(), head.gradient(Device::Cpu));
            logprob::backward(
                logprob::Gradient { logp: dlogp, entropy: dentropy },
                normed.mat(),
                logprob::Head { weight, temperature: scores.temperature },
                targets.kernel(),
                logprob::Statistics { entropy: scores.entropies.cpu(), lse: scores.lse.cpu() },
                gradient.as_mut().map(|gradient| MatMut::new(gradient.cpu(), v, h)),
            )
        });
        Rows::on_cpu(dnormed, normed.rows(), normed.cols())
    }

    fn logits(&self, normed: &Rows, head: &Param) -> Rows {
        let logits = with_table(head, normed.cols(), |head| logprob::logits_rows(normed.mat(), head));
        Rows::on_cpu(logits, normed.rows(), head.len() / normed.cols().max(1))
    }

    fn draw(&self, logits: &mut Rows, how: &Sampler, from: &[DrawFrom]) -> Vec<Option<Draw>> {
        let (work, vocab) = (logits.len(), logits.cols());
        let _span = profile::span(profile::Op::Sampler, || (0, 4 * work));
        let rows = logits.cpu_mut().chunks_mut(vocab.max(1)).zip(from);
        parallel::map(rows, work, |(logits, from)| sample::draw(logits, how, from))
    }
}
