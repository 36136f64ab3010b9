//! Learning-rate schedules, as a factor on the base rate.
//!
//! Source: `transformers` `optimization.py`. Steps count from 0: the factor at step s applies to update s + 1.

/// Shape of a learning-rate schedule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScheduleKind {
    /// Base rate throughout.
    Constant,
    /// Linear warm-up, then the base rate.
    ConstantWithWarmup,
    /// Linear warm-up, then a linear decay to 0.
    #[default]
    Linear,
    /// Linear warm-up, then half a cosine down to 0.
    Cosine,
}

/// Schedule over a known number of steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// Shape of the schedule.
    pub kind: ScheduleKind,
    /// Number of warm-up steps.
    pub warmup_steps: u64,
    /// Number of optimizer steps in the whole run.
    pub total_steps: u64,
}

impl Schedule {
    /// Returns the factor for update number `step + 1`.
    pub fn factor(&self, step: u64) -> f64 {
        if self.kind == ScheduleKind::Constant {
            return 1.0;
        }
        if step < self.warmup_steps {
            return step as f64 / self.warmup_steps.max(1) as f64;
        }
        let left = self.total_steps.saturating_sub(self.warmup_steps).max(1) as f64;
        let progress = (step - self.warmup_steps) as f64 / left;
        match self.kind {
            ScheduleKind::Linear => (1.0 - progress).max(0.0),
            ScheduleKind::Cosine => (0.5 * (1.0 + (std::f64::consts::PI * progress).cos())).max(0.0),
            ScheduleKind::Constant | ScheduleKind::ConstantWithWarmup => 1.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn factors(kind: ScheduleKind, warmup_steps: u64, total_steps: u64) -> Vec<f64> {
        let schedule = Schedule { kind, warmup_steps, total_steps };
        (0..total_steps).map(|s| (schedule.factor(s) * 1e6).round() / 1e6).collect()
    }

    /// The expected values follow `get_{linear,cosine,constant}_schedule_with_warmup` of `transformers`, computed by hand.
    #[test]
    fn factors_are_those_of_transformers() {
        assert_eq!(factors(ScheduleKind::Linear, 2, 6), [0.0, 0.5, 1.0, 0.75, 0.5, 0.25]);
        assert_eq!(factors(ScheduleKind::Cosine, 0, 4), [1.0, 0.853_553, 0.5, 0.146_447]);
        assert_eq!(factors(ScheduleKind::ConstantWithWarmup, 2, 4), [0.0, 0.5, 1.0, 1.0]);
        assert_eq!(factors(ScheduleKind::Constant, 2, 3), [1.0, 1.0, 1.0]);
    }
}
