//! Load of the machine, for the page of a run in progress.

use std::fs;

use serde_json::{Value, json};

/// Returns the load and the memory of the machine and the memory of this process, in MB. Values that the system does not report
/// are `null`.
pub(crate) fn now() -> Value {
    let load = fs::read_to_string("/proc/loadavg").ok();
    let load = load.and_then(|text| text.split(' ').next()?.parse::<f64>().ok());
    let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let all = megabytes(&memory, "MemTotal:");
    json!({
        "load": load,
        "cores": std::thread::available_parallelism().map(usize::from).ok(),
        "memory_mb": all,
        "used_mb": all.zip(megabytes(&memory, "MemAvailable:")).map(|(all, free)| all.saturating_sub(free)),
        "own_mb": megabytes(&status, "VmRSS:"),
    })
}

/// Reads a line `NAME   NUMBER kB`.
fn megabytes(text: &str, name: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    Some(rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024 / 1_000_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_in_megabytes() {
        let text = "MemTotal:       16384000 kB\nMemAvailable:    8192000 kB\n";
        assert_eq!(megabytes(text, "MemTotal:"), Some(16_777));
        assert_eq!(megabytes(text, "VmRSS:"), None);
    }
}
