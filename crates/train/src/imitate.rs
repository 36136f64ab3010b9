//! Supervised fine-tuning: the update with one completion per prompt and dL/dlogp = −1/tokens. The tokens are those of all imitated
//! turns of the model, in the examples of the complete step.
//!
//! A step is divided over ranks and leaves as one of reinforcement learning ([`crate::split`]). Every rank knows the sizes of all
//! examples.

use std::borrow::Cow;

use omnigrpo_grpo::metric;
use omnigrpo_models::{GroupStream, PackedStream, Prompt, SftExample, Training};
use omnigrpo_observe::{Metric, PhaseTimer};
use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::features::{self, Keep};
use crate::lender::{Models, in_turns};
use crate::optimizer::AdamW;
use crate::step::{Divided, UpdateAt};
use crate::streams::{Part, pack};
use crate::timing::timed;

/// Numbers of tokens of an example.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct ExampleSize {
    /// Tokens before the first imitated turn.
    pub prompt: usize,
    /// Tokens after it.
    pub target: usize,
    /// Tokens of the target that are imitated.
    pub imitated: usize,
}

/// Example of a step.
#[derive(Clone, Debug)]
pub enum StepExample<'e> {
    /// An example that this process trains on.
    Here(Cow<'e, SftExample>),
    /// An example that another rank trains on.
    Elsewhere(ExampleSize),
}

impl From<SftExample> for StepExample<'_> {
    fn from(example: SftExample) -> Self {
        Self::Here(Cow::Owned(example))
    }
}

impl<'e> From<&'e SftExample> for StepExample<'e> {
    fn from(example: &'e SftExample) -> Self {
        Self::Here(Cow::Borrowed(example))
    }
}

impl StepExample<'_> {
    /// Returns the numbers of tokens.
    pub fn size(&self) -> ExampleSize {
        match self {
            Self::Here(own) => ExampleSize {
                prompt: own.prompt.ids.len(),
                target: own.target.len(),
                imitated: own.num_imitated(),
            },
            Self::Elsewhere(size) => *size,
        }
    }

    /// Returns the example if this process trains on it.
    pub(crate) fn here(&self) -> Option<&SftExample> {
        if let Self::Here(own) = self { Some(own) } else { None }
    }
}

/// Performs a supervised update that minimizes the mean negative log-probability of the target tokens. Over ranks, each has the
/// examples of its leaves, and gets the result of all. `ready` is the result of this rank's preparation.
///
/// # Errors
/// Returns an error if a gradient is not finite. The weights are unchanged then.
pub fn imitate<'m>(
    models: impl Into<Models<'m>>,
    optimizer: &mut AdamW,
    at: UpdateAt,
    algorithm: &Divided,
    (ready, examples): (Result<()>, &[StepExample<'_>]),
    timer: &mut PhaseTimer,
) -> Result<ImitationOutcome> {
    let models = models.into();
    let sizes = || examples.iter().map(StepExample::size);
    let tokens: usize = sizes().map(|size| size.imitated).sum();
    let rows = sizes().filter(|size| size.target > 0).map(|size| size.prompt + size.target - 1).sum();
    let training = Training { temperature: 1.0, step_tokens: [rows, tokens], ..at.training(algorithm) };
    let imitation = Imitation { models, algorithm, training, examples, weight: 1.0 / tokens.max(1) as f64 };
    let split = &algorithm.split;
    let (mut done, mut own) = (ready, Vec::new());
    optimizer.exchange().begin(split);
    // A rank that has failed takes part in the exchanges of its other leaves.
    for (number, leaf) in split.own_leaves(examples.len(), algorithm.micro()) {
        let mut imitated = Imitated::default();
        let passed = imitation.leaf(leaf, done, &mut imitated, optimizer, timer);
        own.push((number, imitated));
        done = optimizer.exchange().end_leaf(passed);
    }
    let done = done.and_then(|()| optimizer.exchange().reserve(models.policy.device()));
    let each = split.collect(split.num_leaves(), done.map(|()| own))?;
    if !split.is_off() {
        timed(timer, "exchange", || optimizer.exchange().sum())?;
    }
    let mut all = Imitated::default();
    each.iter().for_each(|leaf| all.add(leaf));
    let update = timed(timer, "optimizer", || optimizer.step(at.learning_rate_factor))?;
    Ok(ImitationOutcome {
        loss: all.loss,
        entropy: all.entropy,
        grad_norm: update.grad_norm,
        params_without_grad: update.skipped,
        num_tokens: all.num_tokens,
        router: (!algorithm.router.is_off()).then_some(all.router),
    })
}

/// Sums over the streams of a leaf.
#[derive(Default, Serialize, Deserialize)]
struct Imitated {
    loss: f64,
    entropy: f64,
    num_tokens: u64,
    router: [f64; 2],
}

impl Imitated {
    fn add(&mut self, other: &Self) {
        self.loss += other.loss;
        self.entropy += other.entropy;
        self.num_tokens += other.num_tokens;
        self.router.iter_mut().zip(other.router).for_each(|(sum, own)| *sum += own);
    }
}

/// A supervised update.
struct Imitation<'a> {
    models: Models<'a>,
    algorithm: &'a Divided,
    training: Training,
    examples: &'a [StepExample<'a>],
    /// Weight of a token in the loss.
    weight: f64,
}

impl Imitation<'_> {
    /// Adds the gradient of a leaf to the gradient in the weights. `ready` is the result of the work before it.
    fn leaf(
        &self,
        leaf: std::ops::Range<usize>,
        ready: Result<()>,
        imitated: &mut Imitated,
        optimizer: &mut AdamW,
        timer: &mut PhaseTimer,
    ) -> Result<()> {
        let (split, model) = (&self.algorithm.split, self.models.policy);
        let shapes: Vec<(usize, Vec<usize>)> = self.examples[leaf.clone()]
            .iter()
            .map(|example| (example.size().prompt, vec![example.size().target]))
            .collect();
        let mut streams = pack(&shapes, self.algorithm.stream_rows());
        streams.iter_mut().flatten().for_each(|part| part.group += leaf.start);
        in_turns(
            split,
            self.models.of_policy(),
            true,
            ready.map(|()| streams),
            &mut (imitated, &mut *optimizer, timer),
            |(imitated, optimizer, timer), stream, is_last| {
                // With several leaves, gradients are summed before they are used.
                if is_last && split.is_off() {
                    optimizer.announce_last_pass(model.decoder());
                }
                let optimizer = is_last.then_some(&mut **optimizer);
                self.stream(&stream, imitated, optimizer, timer)
            },
            |(_, optimizer, _), block| optimizer.exchange().block_done(block),
        )?;
        // The files of weights are checked before the gradients are used.
        Ok(model.files_unchanged()?)
    }

    /// Runs the passes of a stream. `optimizer` is given for the last stream of a leaf, whose backward pass completes gradients.
    fn stream(
        &self,
        parts: &[Part],
        imitated: &mut Imitated,
        mut optimizer: Option<&mut AdamW>,
        timer: &mut PhaseTimer,
    ) -> Result<()> {
        let (model, algorithm, training) = (self.models.policy, self.algorithm, self.training);
        let (weight, lender) = (self.weight, self.models.of_policy());
        let done = parts.first().map_or(0, |part| part.group);
        timer.activity().parts("answers", done, self.examples.len());
        let members: Vec<&SftExample> =
            parts.iter().filter_map(|part| self.examples[part.group].here()).collect();
        let groups: Vec<GroupStream> =
            members.iter().map(|e| GroupStream { prompt: &e.prompt, completions: vec![&e.target] }).collect();
        let stream = PackedStream::with_turns(&groups, |group, _| &members[group].turns)?;
        imitated.num_tokens += stream.rows() as u64;
        let prompts: Vec<&Prompt> = members.iter().map(|e| &e.prompt).collect();
        let (features, memories) = timed(timer, "encode", || {
            features::encode(model, Keep::for_update(algorithm), prompts.iter().copied())
        })?;
        let seen = timed(timer, "encode", || {
            let seen = prompts.iter().zip(&features);
            seen.map(|(p, own)| Ok(model.features_in_training(p, own, training)?)).collect::<Result<Vec<_>>>()
        })?;
        let pass = timed(timer, "forward", || model.train_pass(&stream, &seen, training, None))?;
        imitated.loss -= weight * pass.logprobs.iter().map(|&x| f64::from(x)).sum::<f64>();
        imitated.entropy += weight * pass.entropies.iter().map(|&x| f64::from(x)).sum::<f64>();
        let dlogp = vec![-weight as f32; stream.num_targets()];
        let mut done = |block: usize| {
            if let Some(optimizer) = optimizer.as_deref_mut() {
                optimizer.exchange().block_done(block);
                if let Some(lender) = lender {
                    lender.block_done(block);
                }
            }
        };
        timed(timer, "backward", || {
            let losses = pass.router();
            let gradients = pass.backward_by_block(&dlogp, None, &[], &mut done)?;
            if let Some(losses) = losses {
                imitated.router.iter_mut().zip(losses.losses()).for_each(|(sum, own)| *sum += own);
            }
            Ok(model.backward_media(&prompts, &features, memories, gradients, training)?)
        })
    }
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
