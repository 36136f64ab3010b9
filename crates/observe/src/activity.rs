//! Current activity of a run, for display while it trains.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::machine::Machine;
use crate::text::{count, span};

/// Number of recent steps whose mean duration estimates the remaining time.
const RECENT_STEPS: usize = 20;

/// Step, phase and counts of a run. The worker writes them and the console shows them; all clones share one state.
#[derive(Clone, Debug, Default)]
pub struct Activity(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    machine: Machine,
    state: Mutex<State>,
    listener: Mutex<Listener>,
}

/// Function that hears of every change.
#[derive(Default)]
struct Listener(Option<Hearing>);

type Hearing = Box<dyn FnMut(&StepProgress) + Send>;

impl std::fmt::Debug for Listener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Listener").field(&self.0.is_some()).finish()
    }
}

/// Work of a run at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepProgress {
    /// Step, counted from 1; 0 outside of steps.
    pub step: u64,
    /// Number of steps of the run.
    pub num_steps: u64,
    /// Name of the phase, as in `time/<phase>`; empty between phases.
    pub phase: &'static str,
    /// Name of the parts that are counted, such as `completions`; empty if the step has not counted any.
    pub part: &'static str,
    /// Number of parts that are done.
    pub done: usize,
    /// Number of all parts.
    pub of: usize,
    /// Number of tokens sampled in this phase.
    pub tokens: u64,
}

#[derive(Debug, Default)]
struct State {
    steps: Option<Steps>,
    phase: Option<Phase>,
    parts: Option<(&'static str, usize, usize)>,
}

#[derive(Debug)]
struct Steps {
    done: u64,
    total: u64,
    since: Instant,
    recent: VecDeque<Duration>,
}

#[derive(Debug)]
struct Phase {
    name: &'static str,
    since: Instant,
    tokens: u64,
}

impl Activity {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the function that is called after every change, also after every sampled token. It runs on the thread that works, so it
    /// must be quick, and must not change the activity. It replaces an earlier function.
    pub fn listen(&self, listener: impl FnMut(&StepProgress) + Send + 'static) {
        *self.0.listener.lock().unwrap_or_else(PoisonError::into_inner) = Listener(Some(Box::new(listener)));
    }

    /// Calls the listener.
    fn tell(&self) {
        let mut listener = self.0.listener.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(listener) = &mut listener.0 {
            listener(&self.progress());
        }
    }

    /// Returns the machine that the run uses.
    pub fn machine(&self) -> &Machine {
        &self.0.machine
    }

    /// Returns what the run is doing.
    #[must_use]
    pub fn progress(&self) -> StepProgress {
        let state = self.state();
        let (part, done, of) = state.parts.unwrap_or_default();
        let steps = state.steps.as_ref();
        StepProgress {
            step: steps.map_or(0, |steps| (steps.done + 1).min(steps.total)),
            num_steps: steps.map_or(0, |steps| steps.total),
            phase: state.phase.as_ref().map_or("", |phase| phase.name),
            part,
            done,
            of,
            tokens: state.phase.as_ref().map_or(0, |phase| phase.tokens),
        }
    }

    pub(crate) fn begin(&self, done: u64, total: u64, now: Instant) {
        let steps = Steps { done, total, since: now, recent: VecDeque::new() };
        *self.state() = State { steps: Some(steps), ..State::default() };
    }

    pub(crate) fn end(&self) {
        *self.state() = State::default();
    }

    /// Ends a step and returns how long it took.
    pub(crate) fn step_done(&self, now: Instant) -> Duration {
        let mut state = self.state();
        (state.phase, state.parts) = (None, None);
        let Some(steps) = &mut state.steps else { return Duration::ZERO };
        let took = now.saturating_duration_since(steps.since);
        steps.done += 1;
        steps.recent.push_back(took);
        steps.recent.drain(..steps.recent.len().saturating_sub(RECENT_STEPS));
        steps.since = now;
        took
    }

    /// Returns the current step, counted from 1, or `None` outside a run.
    pub fn step(&self) -> Option<u64> {
        self.state().steps.as_ref().map(|steps| (steps.done + 1).min(steps.total))
    }

    /// Begins a phase.
    pub fn enter(&self, name: &'static str, now: Instant) {
        self.state().phase = Some(Phase { name, since: now, tokens: 0 });
        self.tell();
    }

    /// Ends the phase.
    pub fn leave(&self) {
        self.state().phase = None;
        self.tell();
    }

    /// Sets how many named parts of the step are done. The counts stay until the next call.
    pub fn parts(&self, name: &'static str, done: usize, total: usize) {
        self.state().parts = Some((name, done, total));
        self.tell();
    }

    /// Counts one sampled token. With `last`, it also counts one more part as done.
    pub fn token(&self, last: bool) {
        let mut state = self.state();
        if let Some(phase) = &mut state.phase {
            phase.tokens += 1;
        }
        if let (true, Some((_, done, _))) = (last, &mut state.parts) {
            *done += 1;
        }
        drop(state);
        self.tell();
    }

    /// Returns the number of tokens sampled in this phase.
    pub(crate) fn tokens(&self) -> u64 {
        self.state().phase.as_ref().map_or(0, |phase| phase.tokens)
    }

    /// Returns the number of completed steps and the total number of steps.
    pub fn steps(&self) -> Option<(u64, u64)> {
        self.state().steps.as_ref().map(|steps| (steps.done, steps.total))
    }

    /// Estimates the time for the remaining steps from the mean of the recent ones; `None` before the first step is done.
    pub fn left(&self, now: Instant) -> Option<Duration> {
        let state = self.state();
        let steps = state.steps.as_ref()?;
        let mean =
            steps.recent.iter().sum::<Duration>().checked_div(u32::try_from(steps.recent.len()).ok()?)?;
        let under_way = now.saturating_duration_since(steps.since).min(mean);
        let left = mean.as_secs_f64() * steps.total.saturating_sub(steps.done) as f64;
        Duration::try_from_secs_f64((left - under_way.as_secs_f64()).max(0.0)).ok()
    }

    /// Formats the current phase: `rollout · completions 37/64 · 4.1 k tokens · 12 tok/s`, or `backward · prompts 3/8 · 12 s`.
    pub fn doing(&self, now: Instant) -> String {
        let state = self.state();
        let Some(phase) = &state.phase else { return String::new() };
        let time = now.saturating_duration_since(phase.since);
        let mut out = phase.name.replace('_', " ");
        if let Some((name, done, total)) = state.parts {
            out.push_str(&format!(" · {name} {done}/{total}"));
        }
        if phase.tokens > 0 {
            out.push_str(&format!(" · {} {}", count(phase.tokens as f64), tokens(phase.tokens)));
            if time.as_secs_f64() >= 1.0 {
                out.push_str(&format!(" · {} tok/s", count(phase.tokens as f64 / time.as_secs_f64())));
            }
        } else {
            out.push_str(&format!(" · {}", span(time)));
        }
        out
    }

    /// Formats the whole activity as one line for a plain log. It is empty outside a run.
    pub fn line(&self, now: Instant) -> String {
        let doing = self.doing(now);
        let Some((done, total)) = self.steps() else { return doing };
        let mut parts = vec![format!("step {}/{total}:", (done + 1).min(total))];
        if !doing.is_empty() {
            parts.push(format!("{doing} ·"));
        }
        if let Some(since) = self.state().steps.as_ref().map(|steps| steps.since) {
            parts.push(format!("{} in this step", span(now.saturating_duration_since(since))));
        }
        if let Some(left) = self.left(now) {
            parts.push(format!("· eta {}", span(left)));
        }
        parts.join(" ")
    }
}

pub(crate) fn tokens(number: u64) -> &'static str {
    if number == 1 { "token" } else { "tokens" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_tells_phase_counts_and_time_left() {
        let start = Instant::now();
        let at = |secs: f64| start + Duration::from_secs_f64(secs);
        let activity = Activity::default();
        assert_eq!((activity.step(), activity.doing(at(0.0))), (None, String::new()));

        activity.begin(9, 300, at(0.0));
        assert_eq!((activity.step(), activity.left(at(5.0))), (Some(10), None));
        activity.enter("rollout", at(1.0));
        activity.parts("completions", 0, 64);
        (0..4100).for_each(|i| activity.token(i % 100 == 0 && i < 3700));
        assert_eq!(activity.doing(at(342.0)), "rollout · completions 37/64 · 4.1 k tokens · 12 tok/s");
        let line =
            "step 10/300: rollout · completions 37/64 · 4.1 k tokens · 12 tok/s · 5 min 42 s in this step";
        assert_eq!(activity.line(at(342.0)), line);

        activity.enter("shuffled_rollout", at(343.0));
        assert_eq!(activity.doing(at(355.0)), "shuffled rollout · completions 37/64 · 12 s");
        activity.enter("backward", at(360.0));
        activity.parts("prompts", 3, 8);
        assert_eq!(activity.doing(at(372.0)), "backward · prompts 3/8 · 12 s");

        // 290 steps of 40 s each remain, and the next step has run for 10 s.
        activity.step_done(at(40.0));
        assert_eq!((activity.step(), activity.left(at(50.0))), (Some(11), Some(Duration::from_secs(11_590))));
        assert_eq!(activity.line(at(50.0)), "step 11/300: 10 s in this step · eta 3 h 14 min");
        // A step that takes longer than the mean counts as almost done.
        assert_eq!(activity.left(at(400.0)), Some(Duration::from_secs(289 * 40)));
        activity.end();
        assert_eq!(activity.step(), None);
    }

    #[test]
    fn a_listener_hears_every_change() {
        let (activity, now) = (Activity::default(), Instant::now());
        let heard = Arc::new(Mutex::new(Vec::new()));
        let told = Arc::clone(&heard);
        activity.listen(move |progress| told.lock().unwrap().push(*progress));
        activity.begin(2, 9, now);
        activity.enter("rollout", now);
        activity.parts("completions", 0, 2);
        activity.token(false);
        activity.token(true);
        activity.leave();
        let of = |phase, part, done, of, tokens| StepProgress {
            step: 3,
            num_steps: 9,
            phase,
            part,
            done,
            of,
            tokens,
        };
        let expected = [
            of("rollout", "", 0, 0, 0),
            of("rollout", "completions", 0, 2, 0),
            of("rollout", "completions", 0, 2, 1),
            of("rollout", "completions", 1, 2, 2),
            of("", "completions", 1, 2, 0),
        ];
        assert_eq!(*heard.lock().unwrap(), expected);
        activity.listen(|_| {});
        activity.leave();
        assert_eq!(heard.lock().unwrap().len(), expected.len());
    }

    #[test]
    fn only_the_last_steps_count() {
        let start = Instant::now();
        let activity = Activity::default();
        activity.begin(0, 100, start);
        let mut now = start;
        for secs in [1000].into_iter().chain(std::iter::repeat_n(2, RECENT_STEPS)) {
            now += Duration::from_secs(secs);
            activity.step_done(now);
        }
        assert_eq!(activity.left(now), Some(Duration::from_secs(2 * (100 - 21))));
    }
}
