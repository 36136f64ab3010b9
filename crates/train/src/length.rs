//! Length of a run in rows and updates.

use crate::error::{Result, TrainError};
use crate::plan::RunPlan;
use crate::schedule::Schedule;

/// Length of a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Length {
    /// Rows per rollout.
    per_rollout: u64,
    /// Rows in all epochs.
    rows: u64,
    by_epochs: bool,
    /// Number of updates.
    pub(crate) total: u64,
}

impl Length {
    /// Computes the length of a run with `usable` rows.
    ///
    /// # Errors
    /// Returns an error if no row is usable.
    pub(crate) fn of(run: &RunPlan, usable: usize) -> Result<Self> {
        if usable == 0 {
            return Err(TrainError::Data {
                what: "no usable training row; `omnigrpo data check` lists the reasons".into(),
            });
        }
        let per_step = run.prompts_per_step as u64;
        // Rounding can leave an integral product slightly above the integer.
        let rows = (usable as f64 * run.num_epochs - 1e-6).ceil().max(1.0) as u64;
        let total = run
            .max_steps
            .unwrap_or_else(|| rows.div_ceil(per_step).saturating_mul(run.num_iterations as u64));
        let per_rollout = per_step * run.steps_per_generation as u64;
        Ok(Self { per_rollout, rows, by_epochs: run.max_steps.is_none(), total })
    }

    /// Returns the number of rows in the rollout or batch with this index. A run that resumes with changed settings can have more
    /// rollouts than the epochs need; none of them is empty.
    pub(crate) fn num_rows(self, index: u64) -> usize {
        let left = self.rows.saturating_sub(index.saturating_mul(self.per_rollout));
        (if self.by_epochs && left > 0 { self.per_rollout.min(left) } else { self.per_rollout }) as usize
    }

    pub(crate) fn schedule(self, run: &RunPlan) -> Schedule {
        let total_steps = self.total;
        let warmup_steps = if run.schedule.warmup_steps > 0 {
            run.schedule.warmup_steps
        } else {
            (run.schedule.warmup_ratio * total_steps as f64).ceil() as u64
        };
        Schedule { kind: run.schedule.kind, warmup_steps, total_steps }
    }
}
