//! Forecast of the time of a step, before anything is loaded.
//!
//! A step over real prompts runs on [`Device::Outline`](omnigrpo_ops::Device::Outline) with the code of an ordinary step. The
//! outline device records its operations ([`omnigrpo_ops::work`]), and their times are measured on this machine's CPU. All
//! completions have the same length. Rewards, the decoding of media, logs and checkpoints are not included.

use std::collections::HashMap;

use omnigrpo_models::Model;
use omnigrpo_ops::{Device, Rates, Work as Operations, work};

use crate::error::{DEVICE, Result, TrainError};
use crate::memory::{MemoryPlan, Work, evaluate, imitated, reinforce};

/// Seconds of a step by phase.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepTime {
    /// Seconds of each phase in `metrics.jsonl`, in the order of a step.
    pub phases: Vec<(&'static str, f64)>,
    /// Seconds of an evaluation of the planned prompts.
    pub evaluation: f64,
}

impl StepTime {
    /// Returns the sum of all phases in seconds.
    pub fn total(&self) -> f64 {
        self.phases.iter().map(|(_, secs)| secs).sum()
    }
}

/// Phases in the order of a step.
const PHASES: [&str; 6] = ["encode", "rollout", "reference", "forward", "backward", "optimizer"];
const EVALUATION: &str = "evaluation";

/// Returns the mean time of an optimizer step over `plans`. Each plan has the rows of one rollout or supervised update. The time
/// of a rollout is divided among its updates, including the `num_iterations` passes. Operations without an entry in `rates` are
/// measured and added to it.
///
/// # Errors
/// Returns an error if the model is not on [`Device::Outline`], or if the step fails.
pub fn step_time(
    model: &Model,
    plans: &[MemoryPlan],
    num_iterations: usize,
    rates: &mut Rates,
) -> Result<StepTime> {
    if model.device() != Device::Outline {
        let device = model.device().to_string();
        return Err(TrainError::setting(DEVICE, &device, "expected Device::Outline".into()));
    }
    let mut all = Operations::default();
    for plan in plans {
        let (done, mut own) = work(|| match &plan.work {
            Work::None => Ok(()),
            Work::Rollout(rows) => reinforce(model, plan, rows, &mut |_, _| {}),
            Work::Examples(examples) => imitated(model, plan, examples),
        });
        done?;
        let mut updates = 1;
        if let Work::Rollout(rows) = &plan.work {
            updates = rows.len().div_ceil(plan.prompts_per_step.max(1)) * num_iterations;
            let passes = num_iterations as f64;
            if recalls(model, plan) {
                // The decoder's outputs are copied once when they are kept and once when they are put into the order of the
                // stream.
                let kept = own.outputs("forward");
                own.add_copies("rollout", kept);
                // The first pass reuses outputs of the rollout; later passes compute them.
                own.scale_blocks("forward", (passes - 1.0) / passes);
                own.add_copies("forward", kept / passes);
            }
            ["forward", "backward", "optimizer"].iter().for_each(|phase| own.scale(phase, passes));
        }
        PHASES.iter().for_each(|phase| own.scale(phase, 1.0 / (updates * plans.len()) as f64));
        all.add(own);
    }
    // The plans differ only in their rows.
    if let Some(plan) = plans.first() {
        let (done, mut own) = work(|| evaluate(model, plan));
        done?;
        PHASES.iter().for_each(|phase| own.rename(phase, EVALUATION));
        all.add(own);
    }
    let secs: HashMap<&str, f64> = all.seconds(rates)?;
    let of = |phase: &'static str| (phase, secs.get(phase).copied().unwrap_or(0.0));
    Ok(StepTime { phases: PHASES.map(of).into(), evaluation: of(EVALUATION).1 })
}

/// Returns true if the first update of these rows reuses the forward pass of their rollout.
fn recalls(model: &Model, plan: &MemoryPlan) -> bool {
    let (Work::Rollout(rows), algorithm) = (&plan.work, plan.algorithm) else { return false };
    let decoded = algorithm.num_generations * algorithm.sampling.max_completion_length.saturating_sub(1);
    let tokens: usize = rows.iter().map(|row| row.prompt.ids.len() + decoded).sum();
    algorithm.recall
        && model.can_recall_on(Device::Cpu)
        && rows.len() <= algorithm.prompts_per_micro_batch
        && tokens <= algorithm.stream_rows()
}
