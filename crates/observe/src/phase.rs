//! Timing of the phases of a step.

use std::time::{Duration, Instant};

use crate::{Activity, Metric};

/// Timer that splits the wall time of a step into named phases, which add up to the total.
///
/// Exactly one phase is active at a time, from its [`PhaseTimer::enter`] to the next. Entering a name again adds to its time. The
/// caller supplies the clock, so tests do not have to sleep.
#[derive(Debug, Clone)]
pub struct PhaseTimer {
    started: Instant,
    switched: Instant,
    current: Option<usize>,
    phases: Vec<(&'static str, Duration)>,
    activity: Activity,
}

impl PhaseTimer {
    /// Starts a step. Time before the first [`PhaseTimer::enter`] counts in `step_time` but not in any phase.
    pub fn start(now: Instant) -> Self {
        Self::shown(now, &Activity::default())
    }

    /// Starts as [`Self::start`] does, and reports each phase to `activity`.
    pub fn shown(now: Instant, activity: &Activity) -> Self {
        let (phases, activity) = (Vec::new(), activity.clone());
        Self { started: now, switched: now, current: None, phases, activity }
    }

    /// Returns the activity, for counts within a phase.
    pub fn activity(&self) -> &Activity {
        &self.activity
    }

    /// Ends the active phase and begins another.
    pub fn enter(&mut self, phase: &'static str, now: Instant) {
        self.leave(now);
        self.activity.enter(phase, now);
        let at = self.phases.iter().position(|(name, _)| *name == phase).unwrap_or_else(|| {
            self.phases.push((phase, Duration::ZERO));
            self.phases.len() - 1
        });
        self.current = Some(at);
    }

    /// Ends the active phase. Later time does not count in any phase.
    pub fn leave(&mut self, now: Instant) {
        if let Some(at) = self.current.take() {
            self.phases[at].1 += now.saturating_duration_since(self.switched);
            self.activity.leave();
        }
        self.switched = now;
    }

    /// Ends the step. Returns `step_time` and each `time/<phase>` in the order of first entry, in seconds.
    pub fn finish(mut self, now: Instant) -> Vec<Metric> {
        self.leave(now);
        let total = now.saturating_duration_since(self.started);
        let phases =
            self.phases.iter().map(|(name, time)| (format!("time/{name}"), Some(time.as_secs_f64())));
        std::iter::once(("step_time".to_owned(), Some(total.as_secs_f64()))).chain(phases).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_add_up_to_the_step() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut timer = PhaseTimer::start(at(0));
        timer.enter("rollout", at(0));
        timer.enter("reward", at(500));
        timer.enter("rollout", at(625));
        timer.leave(at(750));
        timer.enter("update", at(1000));
        let expected =
            [("step_time", 2.0), ("time/rollout", 0.625), ("time/reward", 0.125), ("time/update", 1.0)];
        let expected: Vec<Metric> = expected.map(|(name, secs)| (name.to_owned(), Some(secs))).into();
        assert_eq!(timer.finish(at(2000)), expected);
    }
}
