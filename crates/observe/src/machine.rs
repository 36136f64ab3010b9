//! Load of the machine on which a run trains: its processor, its memory, and the card of the run.
//!
//! Processor and memory come from Linux' `/proc`; on other systems they are unknown. The caller passes a function for the card.

use std::fs;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::Metric;

/// Time between two looks at the machine while a run trains. A driver reports the mean of at most a second.
const EVERY: Duration = Duration::from_secs(1);

/// Load at one moment. What the system does not report is `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Load {
    /// Percent of the time since the look before in which the cores were busy, for whichever process.
    pub cpu_percent: Option<f64>,
    /// Memory that all processes use, in MB.
    pub memory_mb: Option<f64>,
    /// Memory of the machine, in MB.
    pub total_memory_mb: Option<f64>,
    /// Memory that this process uses, in MB.
    pub own_memory_mb: Option<f64>,
    /// The card of the run.
    pub gpu: GpuLoad,
}

/// Load of a card at one moment. What its driver does not report is `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct GpuLoad {
    /// Percent of the last second, or less, in which the card computed.
    pub busy_percent: Option<f64>,
    /// Memory that all processes use, in MB.
    pub memory_mb: Option<f64>,
    /// Memory of the card, in MB.
    pub total_memory_mb: Option<f64>,
}

/// Function that returns the load of a card.
pub type Gpu = Box<dyn FnMut() -> GpuLoad + Send>;

/// The machine and what was seen of it. All clones share one state.
#[derive(Clone, Debug, Default)]
pub struct Machine(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    gpu: Option<Gpu>,
    last: Option<(Load, Instant)>,
    /// Time of the cores at the last look and at the end of the last step.
    times: Option<Times>,
    step_times: Option<Times>,
    /// Loads since the end of the last step.
    seen: Vec<Load>,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State").field("last", &self.last).finish_non_exhaustive()
    }
}

/// The machine is looked at every second until this value is dropped.
#[derive(Debug)]
pub struct Watching {
    machine: Machine,
    /// Ends the thread when it is dropped.
    lasts: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Watching {
    fn drop(&mut self) {
        self.lasts = None;
        if let Some(thread) = self.thread.take() {
            // A panic of the thread leaves out loads, and nothing else.
            let _ = thread.join();
        }
        self.machine.state().gpu = None;
    }
}

impl Machine {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at the machine every second, and at the card of a run if there is one.
    #[must_use]
    pub fn watch(&self, gpu: Option<Gpu>) -> Watching {
        *self.state() = State { gpu, step_times: Times::now(), ..State::default() };
        let (lasts, ends) = mpsc::channel();
        let machine = self.clone();
        let looks = move || {
            loop {
                machine.state().look();
                if ends.recv_timeout(EVERY) != Err(RecvTimeoutError::Timeout) {
                    break;
                }
            }
        };
        // Without the thread, each step looks once.
        let thread = std::thread::Builder::new().name("machine".to_owned()).spawn(looks).ok();
        Watching { machine: self.clone(), lasts: Some(lasts), thread }
    }

    /// Returns the load of the machine, which is at most a second old.
    pub fn now(&self) -> Load {
        let mut state = self.state();
        match state.last {
            Some((load, at)) if at.elapsed() < EVERY => load,
            _ => state.look(),
        }
    }

    /// Ends a step and returns its metrics: the mean of the percents, and the largest memory that was seen.
    pub fn step(&self) -> Vec<Metric> {
        let mut state = self.state();
        if state.seen.is_empty() {
            state.look();
        }
        let times = Times::now();
        let cpu = times.zip(state.step_times).and_then(|(now, before)| now.busy_percent(before));
        state.step_times = times;
        let seen = std::mem::take(&mut state.seen);
        drop(state);
        let of = |of: fn(&Load) -> Option<f64>| seen.iter().filter_map(of).collect::<Vec<_>>();
        let busy = of(|load| load.gpu.busy_percent);
        let mean = (!busy.is_empty()).then(|| busy.iter().sum::<f64>() / busy.len() as f64);
        let most = |all: Vec<f64>| all.into_iter().reduce(f64::max);
        let metrics = [
            ("machine/cpu_percent", cpu),
            ("machine/memory_mb", most(of(|load| load.memory_mb))),
            ("machine/gpu_percent", mean),
            ("machine/gpu_memory_mb", most(of(|load| load.gpu.memory_mb))),
        ];
        metrics
            .into_iter()
            .filter(|(_, own)| own.is_some())
            .map(|(name, own)| (name.to_owned(), own))
            .collect()
    }
}

impl State {
    fn look(&mut self) -> Load {
        let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let times = Times::now();
        let total_memory_mb = megabytes(&memory, "MemTotal:");
        let free_mb = megabytes(&memory, "MemAvailable:");
        let load = Load {
            cpu_percent: times.zip(self.times).and_then(|(now, before)| now.busy_percent(before)),
            memory_mb: total_memory_mb.zip(free_mb).map(|(all, free)| all - free),
            total_memory_mb,
            own_memory_mb: megabytes(&status, "VmRSS:"),
            gpu: self.gpu.as_mut().map(|gpu| gpu()).unwrap_or_default(),
        };
        self.times = times;
        self.last = Some((load, Instant::now()));
        self.seen.push(load);
        load
    }
}

/// Time of all cores since the machine started, in ticks of the system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Times {
    busy: u64,
    all: u64,
}

impl Times {
    fn now() -> Option<Self> {
        Self::read(&fs::read_to_string("/proc/stat").ok()?)
    }

    /// Reads `cpu USER NICE SYSTEM IDLE IOWAIT IRQ SOFTIRQ STEAL …`. Later columns are parts of these.
    fn read(text: &str) -> Option<Self> {
        let line = text.lines().next()?.strip_prefix("cpu ")?;
        let times: Vec<u64> = line.split_whitespace().take(8).map_while(|own| own.parse().ok()).collect();
        let (all, idle) = (times.iter().sum::<u64>(), times.get(3)? + times.get(4).unwrap_or(&0));
        Some(Self { busy: all - idle, all })
    }

    /// Returns the percent of the time since `before` in which the cores were busy; `None` if no tick has passed.
    fn busy_percent(self, before: Self) -> Option<f64> {
        let all = self.all.checked_sub(before.all).filter(|&all| all > 0)?;
        Some(100.0 * self.busy.saturating_sub(before.busy) as f64 / all as f64)
    }
}

/// Reads a line `NAME   NUMBER kB`.
fn megabytes(text: &str, name: &str) -> Option<f64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    Some(rest.trim().strip_suffix("kB")?.trim().parse::<f64>().ok()? * 1024.0 / 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_in_megabytes() {
        let text = "MemTotal:       16384000 kB\nMemAvailable:    8192000 kB\n";
        assert_eq!(megabytes(text, "MemTotal:"), Some(16_777.216));
        assert_eq!(megabytes(text, "VmRSS:"), None);
    }

    #[test]
    fn the_time_of_cores_is_busy_or_idle() {
        // 30 + 10 + 20 + 5 ticks of work, 100 + 15 of waiting. A guest's time is part of the user's.
        let before = Times::read("cpu  30 10 20 100 15 3 2 0 25 0\ncpu0 1 2 3\n").unwrap();
        assert_eq!(before, Times { busy: 65, all: 180 });
        let after = Times::read("cpu  60 10 20 160 25 3 2 0 55 0\n").unwrap();
        assert_eq!(after.busy_percent(before), Some(30.0));
        assert_eq!((after.busy_percent(after), before.busy_percent(after)), (None, None));
        assert_eq!(Times::read("intr 5"), None);
    }

    #[test]
    fn a_step_has_the_mean_of_the_card_and_the_largest_memory() {
        let machine = Machine::default();
        let gpu = |busy: u32, memory: f64| Load {
            gpu: GpuLoad { busy_percent: Some(busy.into()), memory_mb: Some(memory), total_memory_mb: None },
            ..Load::default()
        };
        machine.state().seen = vec![gpu(20, 100.0), gpu(100, 300.0), gpu(60, 200.0), Load::default()];
        let of_card = |name: &str| machine.step().into_iter().find(|(own, _)| own == name);
        let first: Vec<Metric> =
            machine.step().into_iter().filter(|(name, _)| name.contains("gpu")).collect();
        let expected = [("machine/gpu_percent", 60.0), ("machine/gpu_memory_mb", 300.0)];
        assert_eq!(first, expected.map(|(name, value)| (name.to_owned(), Some(value))));
        assert_eq!(of_card("machine/gpu_percent"), None, "a step without a card");
    }

    #[test]
    fn a_card_is_asked_until_the_run_ends() {
        let machine = Machine::default();
        let asked = Arc::new(());
        let told = Arc::clone(&asked);
        let watching = machine.watch(Some(Box::new(move || {
            let _ = &told;
            GpuLoad { busy_percent: Some(40.0), ..GpuLoad::default() }
        })));
        let metrics = machine.step();
        assert!(metrics.contains(&("machine/gpu_percent".to_owned(), Some(40.0))), "{metrics:?}");
        assert_eq!(machine.now().gpu.busy_percent, Some(40.0));
        drop(watching);
        assert_eq!(Arc::strong_count(&asked), 1, "the connection to the card is closed");
    }
}
