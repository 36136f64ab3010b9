//! Memory of this machine: what is free, and what a run may keep of decoded media.

use omnigrpo_ops::Device;

/// Formats a number of bytes as MB or GB.
pub fn size(bytes: u64) -> String {
    match bytes as f64 {
        b if b < 1e9 => format!("{:.1} MB", b / 1e6),
        b => format!("{:.1} GB", b / 1e9),
    }
}

/// Returns the free bytes of the memory in which a device's models are stored, and the name of that memory.
pub fn free_on(device: Device) -> Option<(u64, &'static str)> {
    match device {
        Device::Gpu(card) => Some((card.memory()?[0] as u64, "the GPU's memory")),
        _ => Some((free()?, "memory")),
    }
}

/// Returns the number of bytes for stored decoded media, from the number that the user gave and the free bytes. Without either,
/// nothing is stored.
pub fn for_media(given: Option<u64>, left: Option<u64>) -> u64 {
    match (given, left) {
        (Some(given), left) => given.min(left.unwrap_or(u64::MAX)),
        (None, left) => (left.unwrap_or(0) / 4).min(4 << 30),
    }
}

/// Returns the bytes that a store of this capacity will use for decoded media, in addition to the media of the current step. If
/// the capacity suffices for all media, those of the current step are among the stored ones.
pub(crate) fn kept(all: u64, room: u64, of_the_moment: u64) -> u64 {
    if all <= room { all.saturating_sub(of_the_moment) } else { room }
}

/// Returns the resident memory of this process, bytes; 0 if the system does not report it.
pub fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").ok();
    status.and_then(|text| field(&text, "VmRSS:")).map_or(0, |kib| 1024 * kib)
}

/// Returns the bytes that this process may still allocate: the system's free memory, or less if its container or its address
/// space limits it further. Returns `None` if the system does not report it.
pub fn free() -> Option<u64> {
    let read = |path: &str| std::fs::read_to_string(path).ok();
    let system = read("/proc/meminfo").and_then(|text| field(&text, "MemAvailable:")).map(|kib| 1024 * kib);
    let container = read("/proc/self/cgroup").and_then(|text| {
        let group = text.lines().find_map(|line| line.strip_prefix("0::"))?.trim_end_matches('/').to_owned();
        let number = |name: &str| read(&format!("/sys/fs/cgroup{group}/{name}"))?.trim().parse::<u64>().ok();
        // The kernel counts cached files, including those of the weights, as used memory, but frees them when necessary.
        let cached = read(&format!("/sys/fs/cgroup{group}/memory.stat")).map_or(0, |text| {
            ["active_file ", "inactive_file "].iter().filter_map(|name| field(&text, name)).sum::<u64>()
        });
        // `max` does not parse as a number and means no limit.
        Some(number("memory.max")?.saturating_sub(number("memory.current")?.saturating_sub(cached)))
    });
    let address_space = read("/proc/self/limits")
        .and_then(|text| field(&text, "Max address space"))
        .zip(read("/proc/self/status").and_then(|text| field(&text, "VmSize:")))
        .map(|(limit, taken_kib)| limit.saturating_sub(1024 * taken_kib));
    [system, container, address_space].into_iter().flatten().min()
}

/// Returns the first number after the name at the start of a line.
fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_fields_are_read() {
        assert_eq!((size(2_500_000).as_str(), size(15_200_000_000).as_str()), ("2.5 MB", "15.2 GB"));
        let text =
            "MemTotal:  24 kB\nMemAvailable:   12 kB\nMax address space         unlimited            bytes\n";
        assert_eq!((field(text, "MemAvailable:"), field(text, "Max address space")), (Some(12), None));
    }

    #[test]
    fn media_are_kept_in_a_part_of_what_is_left() {
        for (given, left, bytes) in [
            (None, Some(8 << 30), 2 << 30),
            (None, Some(1 << 40), 4 << 30),
            (None, None, 0),
            (Some(0), Some(8 << 30), 0),
            (Some(13 << 29), Some(8 << 30), 13 << 29),
            (Some(13 << 29), Some(5 << 30), 5 << 30),
            (Some(13 << 29), None, 13 << 29),
        ] {
            assert_eq!(for_media(given, left), bytes, "{given:?} of {left:?}");
        }
        // A picture that every step shows is stored once. Media that do not fit into the store are held in addition to the stored
        // ones.
        assert_eq!(
            [kept(10, 100, 20), kept(100, 100, 20), kept(101, 100, 20), kept(50, 0, 20)],
            [0, 80, 100, 0]
        );
    }
}
