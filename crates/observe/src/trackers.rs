//! Destinations outside the run directory that receive the numbers of a run.
//!
//! Each tracker works on its own thread behind a bounded queue. A tracker that fails or does not keep up is dropped with one
//! warning, so no tracker stops or slows a run.

use std::sync::Arc;
use std::sync::mpsc::{
    Receiver, RecvTimeoutError, SyncSender, TryRecvError, TrySendError, channel, sync_channel,
};
use std::time::{Duration, Instant};

use crate::{Console, Metric, Rollout};

/// Capacity of a tracker's queue, in events.
const QUEUE: usize = 64;
/// Longest wait that is not reported to the user.
const QUIET: Duration = Duration::from_secs(2);

/// Messages to trackers.
#[derive(Debug, Clone, PartialEq)]
pub enum Tracked {
    /// Means over a logging window, or the results of an evaluation.
    Metrics {
        /// Last step of the window.
        step: u64,
        /// Position in the training data, in epochs.
        epoch: f64,
        /// Names and values.
        metrics: Vec<Metric>,
    },
    /// Completions for some of the prompts of a step.
    Completions {
        /// Step that trains on these completions.
        step: u64,
        /// Complete groups, one after the other.
        rollouts: Vec<Rollout>,
    },
}

/// A destination for the numbers of a run.
pub trait Tracker: Send {
    /// Returns the tracker's name.
    fn name(&self) -> &'static str;

    /// Processes an event.
    ///
    /// # Errors
    /// Returns the reason, for the user, why the tracker cannot process more events.
    fn take(&mut self, event: &Tracked) -> Result<(), String>;

    /// Finishes the tracker at the end of the run.
    fn finish(&mut self) -> Result<(), String> {
        Ok(())
    }

    /// Returns a function that releases a hanging tracker from its wait. Another thread calls that function.
    fn abandon(&self) -> Box<dyn FnOnce() + Send> {
        Box::new(|| {})
    }
}

/// All trackers of a run.
pub struct Trackers {
    running: Vec<Running>,
    console: Console,
}

struct Running {
    name: &'static str,
    queue: SyncSender<Arc<Tracked>>,
    outcome: Receiver<Result<(), String>>,
    abandon: Box<dyn FnOnce() + Send>,
}

impl Trackers {
    /// Starts one thread per tracker.
    pub fn start(trackers: Vec<Box<dyn Tracker>>, console: &Console) -> Self {
        let running = trackers.into_iter().map(Running::start).collect();
        Self { running, console: console.clone() }
    }

    /// Creates an empty set of trackers.
    pub fn none(console: &Console) -> Self {
        Self::start(Vec::new(), console)
    }

    /// Returns true if there are no trackers.
    pub fn is_empty(&self) -> bool {
        self.running.is_empty()
    }

    /// Sends an event to all trackers without waiting.
    pub fn tell(&mut self, event: Tracked) {
        if self.running.is_empty() {
            return;
        }
        let event = Arc::new(event);
        for tracker in std::mem::take(&mut self.running) {
            let why = match tracker.queue.try_send(Arc::clone(&event)) {
                Ok(()) => {
                    self.running.push(tracker);
                    continue;
                }
                Err(TrySendError::Full(_)) => format!("it is {QUEUE} events behind"),
                Err(TrySendError::Disconnected(_)) => tracker.failure(),
            };
            self.drop_one(tracker, &why);
        }
    }

    /// Finishes all trackers, and waits at most `patience` for all of them together.
    pub fn finish(&mut self, patience: Duration) {
        let end = Instant::now() + patience;
        for tracker in std::mem::take(&mut self.running) {
            let Running { name, queue, outcome, abandon } = tracker;
            drop(queue);
            let left = || end.saturating_duration_since(Instant::now());
            let mut told = outcome.recv_timeout(left().min(QUIET));
            if matches!(told, Err(RecvTimeoutError::Timeout)) && !left().is_zero() {
                let secs = left().as_secs_f64().ceil();
                self.console.line(&format!("waiting for {name}, at most {secs} s"));
                told = outcome.recv_timeout(left());
            }
            let why = match told {
                Ok(Ok(())) => continue,
                Ok(Err(why)) => why,
                Err(RecvTimeoutError::Timeout) => {
                    format!("it had not finished {} s after the run", patience.as_secs())
                }
                Err(RecvTimeoutError::Disconnected) => "its thread ended".to_owned(),
            };
            abandon();
            self.warn(name, &why);
        }
    }

    fn drop_one(&self, tracker: Running, why: &str) {
        (tracker.abandon)();
        self.warn(tracker.name, why);
    }

    fn warn(&self, name: &str, why: &str) {
        self.console.warning(&format!(
            "{name} receives no more data: {why}. The run continues, and metrics.jsonl contains all metrics"
        ));
    }
}

impl Running {
    fn start(mut tracker: Box<dyn Tracker>) -> Self {
        let (queue, events) = sync_channel::<Arc<Tracked>>(QUEUE);
        let (tell, outcome) = channel();
        let (name, abandon) = (tracker.name(), tracker.abandon());
        let work = move || {
            let done =
                events.iter().try_for_each(|event| tracker.take(&event)).and_then(|()| tracker.finish());
            // The outcome is sent before the queue closes, so a sender that finds the queue closed also finds the reason.
            let _ = tell.send(done);
            drop(events);
        };
        // If the thread does not start, the queue is closed and the first event reports it.
        let _ = std::thread::Builder::new().name(format!("tracker-{name}")).spawn(work);
        Self { name, queue, outcome, abandon }
    }

    fn failure(&self) -> String {
        match self.outcome.try_recv() {
            Ok(Err(why)) => why,
            Ok(Ok(())) | Err(TryRecvError::Empty | TryRecvError::Disconnected) => {
                "its thread ended".to_owned()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{self, Write};
    use std::sync::Mutex;

    use super::*;

    #[derive(Clone, Default)]
    struct Buffer(Arc<Mutex<Vec<u8>>>);

    impl Write for Buffer {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// A tracker that records steps, fails at a given step, or hangs at its first event until it is abandoned.
    struct Made {
        steps: Arc<Mutex<Vec<u64>>>,
        fails_at: u64,
        hangs: Option<Receiver<()>>,
        release: SyncSender<()>,
    }

    fn made(fails_at: u64, hangs: bool) -> (Made, Arc<Mutex<Vec<u64>>>) {
        let steps = Arc::new(Mutex::new(Vec::new()));
        let (release, waits) = sync_channel(1);
        (Made { steps: Arc::clone(&steps), fails_at, hangs: hangs.then_some(waits), release }, steps)
    }

    impl Tracker for Made {
        fn name(&self) -> &'static str {
            "made"
        }
        fn take(&mut self, event: &Tracked) -> Result<(), String> {
            if let Some(waits) = &self.hangs {
                let _ = waits.recv();
            }
            let Tracked::Metrics { step, .. } = event else { return Ok(()) };
            if *step == self.fails_at {
                return Err("the disk is full".to_owned());
            }
            self.steps.lock().unwrap().push(*step);
            Ok(())
        }
        fn abandon(&self) -> Box<dyn FnOnce() + Send> {
            let release = self.release.clone();
            Box::new(move || {
                let _ = release.try_send(());
            })
        }
    }

    fn metrics(step: u64) -> Tracked {
        Tracked::Metrics { step, epoch: 0.0, metrics: vec![("loss".to_owned(), Some(1.0))] }
    }

    fn said(buffer: &Buffer) -> String {
        String::from_utf8(buffer.0.lock().unwrap().clone()).unwrap()
    }

    #[test]
    fn events_arrive_in_order_and_the_end_waits_for_them() {
        let (tracker, steps) = made(99, false);
        let buffer = Buffer::default();
        let mut trackers = Trackers::start(vec![Box::new(tracker)], &Console::plain(buffer.clone()));
        (1..=20).for_each(|step| trackers.tell(metrics(step)));
        trackers.finish(Duration::from_secs(20));
        assert_eq!(*steps.lock().unwrap(), (1..=20).collect::<Vec<_>>());
        assert_eq!(said(&buffer), "");
    }

    #[test]
    fn one_that_fails_is_dropped_with_one_warning_and_the_others_go_on() {
        let ((bad, bad_steps), (good, steps)) = (made(2, false), made(99, false));
        let buffer = Buffer::default();
        let mut trackers =
            Trackers::start(vec![Box::new(bad), Box::new(good)], &Console::plain(buffer.clone()));
        for step in 1..=30 {
            trackers.tell(metrics(step));
            std::thread::sleep(Duration::from_millis(2));
        }
        trackers.finish(Duration::from_secs(20));
        assert_eq!((bad_steps.lock().unwrap().as_slice(), steps.lock().unwrap().len()), (&[1][..], 30));
        let expected = "warning: made receives no more data: the disk is full. The run continues, and metrics.jsonl \
                        contains all metrics\n";
        assert_eq!(said(&buffer), expected);
    }

    #[test]
    fn one_that_hangs_holds_up_nothing() {
        let (tracker, _) = made(99, true);
        let buffer = Buffer::default();
        let mut trackers = Trackers::start(vec![Box::new(tracker)], &Console::plain(buffer.clone()));
        let start = Instant::now();
        (1..=500).for_each(|step| trackers.tell(metrics(step)));
        assert!(trackers.is_empty() && start.elapsed() < Duration::from_secs(5));
        assert!(said(&buffer).contains("it is 64 events behind") && said(&buffer).lines().count() == 1);

        let (tracker, _) = made(99, true);
        let mut trackers = Trackers::start(vec![Box::new(tracker)], &Console::plain(buffer.clone()));
        trackers.tell(metrics(1));
        trackers.finish(Duration::from_millis(20));
        assert!(said(&buffer).contains("it had not finished 0 s after the run"), "{}", said(&buffer));
    }
}
