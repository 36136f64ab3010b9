//! Phases of a step, and the load of the machine.

use std::time::Instant;

use omnigrpo_kernels::profile;
use omnigrpo_observe::{Gpu, GpuLoad, PhaseTimer};
use omnigrpo_ops::{Device, phase};

/// Runs `f` as the phase `name`.
pub(crate) fn timed<R>(timer: &mut PhaseTimer, name: &'static str, f: impl FnOnce() -> R) -> R {
    timer.enter(name, Instant::now());
    let before = profile::enter(name);
    let result = phase(name, f);
    profile::enter(before);
    timer.leave(Instant::now());
    result
}

/// Returns a function that asks the driver for the load of a GPU; `None` on the CPU, and without the driver's management library.
pub(crate) fn gpu_load(device: Device) -> Option<Gpu> {
    let Device::Gpu(card) = device else { return None };
    let monitor = card.monitor()?;
    Some(Box::new(move || {
        let load = monitor.load();
        let megabytes = |at: usize| load.memory.map(|memory| memory[at] as f64 / 1e6);
        GpuLoad {
            busy_percent: load.busy_percent.map(f64::from),
            memory_mb: megabytes(0),
            total_memory_mb: megabytes(1),
        }
    }))
}

/// Returns the largest resident memory of this process so far, in bytes (`VmHWM`); `None` if the system does not report it.
pub fn peak_memory_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib * 1024)
}
