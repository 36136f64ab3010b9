//! Values that the rewards of a run return: a reward from which nothing can be learned is named after the first step, and a reward that
//! never applies ends the run.
//!
//! [`Survey`](crate::survey::Survey) finds built-in rewards that apply to no row before the run. Whether a function, a program or an
//! endpoint applies is known only after it has scored completions.

use omnigrpo_rewards::RewardMatrix;

use crate::error::{REWARDS, Refusal};

/// Number of rollouts after which a run ends if no reward has applied to any completion, or if a pass over the rows is complete and one
/// of its rewards has not.
pub(crate) const PATIENCE: u64 = 10;

/// Counter of the values of each reward.
#[derive(Default)]
pub(crate) struct Returned {
    rollouts: u64,
    completions: usize,
    /// True for each reward that has applied to a completion.
    applied: Vec<bool>,
}

impl Returned {
    /// Adds the scores of a rollout. `num_rewards` is the number of the run's own rewards, which come first in the matrix. Returns
    /// warnings if it is the first rollout.
    pub(crate) fn add(&mut self, step: u64, matrix: &RewardMatrix, num_rewards: usize) -> Vec<String> {
        let own = matrix.names.iter().zip(&matrix.values).take(num_rewards);
        self.rollouts += 1;
        self.completions += matrix.total.len();
        self.applied.resize(num_rewards, false);
        let mut warnings = Vec::new();
        for ((name, values), applied) in own.zip(&mut self.applied) {
            *applied |= values.iter().any(Option::is_some);
            if self.rollouts == 1 {
                warnings.extend(idle(name, values, step, num_rewards));
            }
        }
        warnings
    }

    /// Returns the reason to end the run, if there is one. `is_pass` is true after the first pass over the rows.
    pub(crate) fn refusal(&self, names: &[&str], is_pass: bool) -> Option<Refusal> {
        let none = !self.applied.contains(&true);
        if self.rollouts < PATIENCE || !(none || is_pass) {
            return None;
        }
        let (name, _) = names.iter().zip(&self.applied).find(|(_, applied)| !**applied)?;
        Some(
            Refusal::failure(format!("the reward `{name}` applies to no row"))
                .at(REWARDS)
                .got(format!(
                    "no value for any of the {} completions of {} rollouts",
                    self.completions, self.rollouts
                ))
                .expected("a number for some completions; none (None, null) means that the reward does not apply")
                .help("correct the reward, choose another one, or leave it out; `omnigrpo rewards run` scores the recorded rollouts"),
        )
    }
}

/// Returns a warning about a reward whose values do not tell completions apart. A rule of [`health`](crate::health) reports a run whose
/// only reward gives equal values.
fn idle(name: &str, values: &[Option<f64>], step: u64, num_rewards: usize) -> Option<String> {
    let count = values.len();
    let first = values.iter().flatten().next();
    let Some(first) = first else {
        return (count > 0).then(|| {
            format!(
                "the reward `{name}` gave no value (none) to all {count} completions of step {step}: it does not apply to them, and \
                 takes no part in the training"
            )
        });
    };
    (count > 1 && num_rewards > 1 && values.iter().all(|value| value.as_ref() == Some(first))).then(|| {
        format!(
            "the reward `{name}` gave {first} to all {count} completions of step {step}: equal rewards teach nothing. Compare what it reads \
             with what the model writes, in rollouts/step-{step:06}.jsonl"
        )
    })
}

#[cfg(test)]
mod tests {
    use omnigrpo_rewards::Logged;

    use super::*;

    fn matrix(values: &[&[Option<f64>]]) -> RewardMatrix {
        RewardMatrix {
            names: (0..values.len()).map(|at| format!("r{at}")).collect(),
            values: values.iter().map(|row| row.to_vec()).collect(),
            weights: vec![1.0; values.len()],
            total: vec![None; values[0].len()],
            logged: Logged::default(),
        }
    }

    #[test]
    fn rewards_that_teach_nothing_are_named_once() {
        let scores = matrix(&[
            &[None, None, None],
            &[Some(0.5), Some(0.5), Some(0.5)],
            &[Some(0.5), None, Some(0.5)],
            &[Some(0.0), Some(1.0), Some(0.0)],
            &[Some(0.0), Some(0.0), Some(0.0)],
        ]);
        let mut returned = Returned::default();
        // The last row is a bonus of the run, not a reward.
        let warnings = returned.add(1, &scores, 4);
        assert_eq!(warnings.len(), 2, "{warnings:?}");
        assert!(
            warnings[0].contains("`r0` gave no value (none) to all 3 completions of step 1"),
            "{warnings:?}"
        );
        assert!(warnings[1].contains("`r1` gave 0.5 to all 3 completions of step 1"), "{warnings:?}");
        assert!(returned.add(2, &scores, 4).is_empty());
        // One completion cannot differ from others.
        assert!(Returned::default().add(1, &matrix(&[&[Some(1.0)], &[Some(0.0)]]), 2).is_empty());
        // The rule `dead_reward` reports a single reward.
        assert!(Returned::default().add(1, &matrix(&[&[Some(1.0), Some(1.0)]]), 1).is_empty());
    }

    #[test]
    fn a_reward_that_never_applies_ends_the_run() {
        let names = ["r0", "r1"];
        let (nothing, half) = (matrix(&[&[None], &[None]]), matrix(&[&[Some(1.0)], &[None]]));
        let mut returned = Returned::default();
        for rollout in 1..PATIENCE {
            returned.add(rollout, &nothing, 2);
            assert!(returned.refusal(&names, true).is_none());
        }
        let mut other =
            Returned { rollouts: returned.rollouts, completions: 9, applied: returned.applied.clone() };
        returned.add(PATIENCE, &nothing, 2);
        let refusal = returned.refusal(&names, false).unwrap().to_string();
        assert!(
            refusal.contains("`r0` applies to no row") && refusal.contains("the 10 completions of 10"),
            "{refusal}"
        );
        // Beside a reward that applies, a pass over the rows decides.
        other.add(PATIENCE, &half, 2);
        assert!(other.refusal(&names, false).is_none());
        assert!(other.refusal(&names, true).unwrap().to_string().contains("`r1`"));
        other.add(11, &matrix(&[&[None], &[Some(0.0)]]), 2);
        assert!(other.refusal(&names, true).is_none());
    }
}
