//! Supervised fine-tuning: the update with one completion per prompt and dL/dlogp = −1/tokens. The tokens are those of all imitated
//! turns of the model.

use omnigrpo_grpo::metric;
use omnigrpo_models::{GroupStream, Model, PackedStream, Prompt, SftExample};
use omnigrpo_observe::{Metric, PhaseTimer};

use crate::error::Result;
use crate::features::{self, Keep};
use crate::optimizer::AdamW;
use crate::step::{Divided, UpdateAt};
use crate::streams::pack;
use crate::timing::timed;

/// Performs a supervised update that minimizes the mean negative log-probability of the target tokens.
///
/// # Errors
/// Returns an error if a gradient is not finite. The weights are unchanged then.
pub fn imitate(
    model: &Model,
    optimizer: &mut AdamW,
    at: UpdateAt,
    algorithm: &Divided,
    examples: &[SftExample],
    timer: &mut PhaseTimer,
) -> Result<ImitationOutcome> {
    let shapes: Vec<(usize, Vec<usize>)> =
        examples.iter().map(|e| (e.prompt.ids.len(), vec![e.target.len()])).collect();
    let tokens: usize = examples.iter().map(SftExample::num_imitated).sum();
    let weight = 1.0 / tokens.max(1) as f64;
    let each = examples.iter().filter(|e| !e.target.is_empty());
    let step_tokens = [each.map(|e| e.prompt.ids.len() + e.target.len() - 1).sum(), tokens];
    let training = omnigrpo_models::Training { temperature: 1.0, step_tokens, ..at.training(algorithm) };
    let mut router = [0.0; 2];
    let (mut loss, mut entropy, mut num_tokens) = (0.0, 0.0, 0);
    let streams = pack(&shapes, algorithm.stream_rows());
    let count = streams.len();
    for (at, parts) in streams.into_iter().enumerate() {
        if at + 1 == count {
            optimizer.announce_last_pass(model.decoder());
        }
        let done = parts.first().map_or(0, |part| part.group);
        timer.activity().parts("answers", done, examples.len());
        let members: Vec<&SftExample> = parts.iter().map(|p| &examples[p.group]).collect();
        let groups: Vec<GroupStream> =
            members.iter().map(|e| GroupStream { prompt: &e.prompt, completions: vec![&e.target] }).collect();
        let stream = PackedStream::with_turns(&groups, |group, _| &members[group].turns)?;
        num_tokens += stream.rows() as u64;
        let prompts: Vec<&Prompt> = members.iter().map(|e| &e.prompt).collect();
        let (features, memories) = timed(timer, "encode", || {
            features::encode(model, Keep::for_update(algorithm), prompts.iter().copied())
        })?;
        let seen = timed(timer, "encode", || {
            let seen = prompts.iter().zip(&features);
            seen.map(|(p, own)| Ok(model.features_in_training(p, own, training)?)).collect::<Result<Vec<_>>>()
        })?;
        let pass = timed(timer, "forward", || model.train_pass(&stream, &seen, training, None))?;
        loss -= weight * pass.logprobs.iter().map(|&x| f64::from(x)).sum::<f64>();
        entropy += weight * pass.entropies.iter().map(|&x| f64::from(x)).sum::<f64>();
        let dlogp = vec![-weight as f32; stream.num_targets()];
        timed(timer, "backward", || {
            let losses = pass.router();
            let gradients = pass.backward(&dlogp, None)?;
            if let Some(losses) = losses {
                router.iter_mut().zip(losses.losses()).for_each(|(sum, own)| *sum += own);
            }
            model.backward_media(&prompts, &features, memories, gradients, training)
        })?;
    }
    let update = timed(timer, "optimizer", || optimizer.step(at.learning_rate_factor))?;
    Ok(ImitationOutcome {
        loss,
        entropy,
        grad_norm: update.grad_norm,
        params_without_grad: update.skipped,
        num_tokens,
        router: (!algorithm.router.is_off()).then_some(router),
    })
}

/// Result of a supervised update.
#[derive(Clone, Copy, Debug)]
pub struct ImitationOutcome {
    /// Mean negative log-probability per target token, in nats.
    pub loss: f64,
    /// Mean entropy at the target tokens, in nats.
    pub entropy: f64,
    /// Norm of the gradient before clipping.
    pub grad_norm: f64,
    /// Trained weights without a gradient.
    pub params_without_grad: usize,
    /// Number of token positions that the decoder processed.
    pub num_tokens: u64,
    /// Router losses, as in [`StepOutcome`](crate::StepOutcome).
    pub router: Option<[f64; 2]>,
}

impl ImitationOutcome {
    /// Returns the metrics of the update.
    pub(crate) fn metrics(&self) -> Vec<Metric> {
        let each = [
            (metric::LOSS, self.loss),
            (metric::ENTROPY, self.entropy),
            (metric::GRAD_NORM, self.grad_norm),
            (metric::NUM_TOKENS, self.num_tokens as f64),
            ("params_without_grad", self.params_without_grad as f64),
        ];
        let router = self.router.into_iter().flatten();
        let router = ["router_aux_loss", "router_z_loss"].into_iter().zip(router);
        each.into_iter().chain(router).map(|(name, value)| (name.to_owned(), Some(value))).collect()
    }
}
