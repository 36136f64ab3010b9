//! Phases of a step.

use std::time::Instant;

use omnigrpo_kernels::profile;
use omnigrpo_observe::PhaseTimer;
use omnigrpo_ops::phase;

/// Runs `f` as the phase `name`.
pub(crate) fn timed<R>(timer: &mut PhaseTimer, name: &'static str, f: impl FnOnce() -> R) -> R {
    timer.enter(name, Instant::now());
    let before = profile::enter(name);
    let result = phase(name, f);
    profile::enter(before);
    timer.leave(Instant::now());
    result
}

/// Returns the largest resident memory of this process so far, in bytes (`VmHWM`); `None` if the system does not report it.
#[must_use]
pub fn peak_memory_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib * 1024)
}
