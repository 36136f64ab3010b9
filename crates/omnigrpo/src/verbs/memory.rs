//! Whether a model fits into memory, before it is loaded.

use anyhow::Result;
use omnigrpo_models::Model;
use omnigrpo_ops::Device;
use omnigrpo_train::Memory;

use crate::problem::Problem;

/// Bytes as people write them.
pub fn size(bytes: u64) -> String {
    match bytes as f64 {
        b if b < 1e9 => format!("{:.1} MB", b / 1e6),
        b => format!("{:.1} GB", b / 1e9),
    }
}

/// Bytes that are free where a model runs, and whose they are.
fn free_on(device: Device) -> Option<(u64, &'static str)> {
    match device {
        Device::Gpu(card) => Some((card.memory()?[0] as u64, "the GPU's memory")),
        _ => Some((free()?, "memory")),
    }
}

/// An error where the weights alone are larger than what is free: in main memory, through which they come, and where they are used.
pub fn weights_fit(model: &Model, device: Device) -> Result<()> {
    weights_fit_on(model, Device::Cpu)?;
    weights_fit_on(model, device)
}

fn weights_fit_on(model: &Model, device: Device) -> Result<()> {
    let weights: u64 = model.params().iter().map(|param| param.num_bytes() as u64).sum();
    match free_on(device) {
        Some((free, whose)) if weights > free => Err(Problem::failure(format!("the model does not fit into {whose}"))
            .at(model.dir().display().to_string())
            .got(format!("{} of weights", size(weights)))
            .expected(format!("at most the {} that are free", size(free)))
            .help(
                "--load_in_8bit or --load_in_4bit hold frozen weights in fewer bits, --torch_dtype bfloat16 f32 ones in half; \
                 `omnigrpo doctor --model_name_or_path DIR` shows what each way of training takes",
            )
            .into()),
        _ => Ok(()),
    }
}

/// A warning where training will take more than what is free.
pub fn warn(memory: &Memory, device: Device) {
    if let Some((free, whose)) = free_on(device).filter(|(free, _)| memory.total() > *free) {
        let on_a_card = if device == Device::Cpu { "" } else { "offload_optimizer, " };
        tracing::warn!(
            "this run takes about {} of {whose} ({}), and {} are free; {on_a_card}use_peft, load_in_4bit, gradient_checkpointing or \
             a smaller max_stream_tokens need less",
            size(memory.total()),
            parts(memory),
            size(free)
        );
    }
}

/// What the memory is for.
pub fn parts(memory: &Memory) -> String {
    let all = [
        ("weights", memory.weights),
        ("gradients and optimizer", memory.training),
        ("reference", memory.reference),
        ("activations", memory.activations),
    ];
    let some = all.into_iter().filter(|(_, bytes)| *bytes > 0);
    some.map(|(name, bytes)| format!("{name} {}", size(bytes))).collect::<Vec<_>>().join(", ")
}

/// Bytes this process may still take: what the system has, or what its container or its address space leaves where that is
/// less. `None` where the system does not say.
pub fn free() -> Option<u64> {
    let read = |path: &str| std::fs::read_to_string(path).ok();
    let system = read("/proc/meminfo").and_then(|text| field(&text, "MemAvailable:")).map(|kib| 1024 * kib);
    let container = read("/proc/self/cgroup").and_then(|text| {
        let group = text.lines().find_map(|line| line.strip_prefix("0::"))?.trim_end_matches('/').to_owned();
        let number = |name: &str| read(&format!("/sys/fs/cgroup{group}/{name}"))?.trim().parse::<u64>().ok();
        // Cached files count as taken, those of the weights too, and give way.
        let cached = read(&format!("/sys/fs/cgroup{group}/memory.stat")).map_or(0, |text| {
            ["active_file ", "inactive_file "].iter().filter_map(|name| field(&text, name)).sum::<u64>()
        });
        // `max` is no number: no limit.
        Some(number("memory.max")?.saturating_sub(number("memory.current")?.saturating_sub(cached)))
    });
    let address_space = read("/proc/self/limits")
        .and_then(|text| field(&text, "Max address space"))
        .zip(read("/proc/self/status").and_then(|text| field(&text, "VmSize:")))
        .map(|(limit, taken_kib)| limit.saturating_sub(1024 * taken_kib));
    [system, container, address_space].into_iter().flatten().min()
}

/// The first number behind a line's name.
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
        let memory = Memory { weights: 1_000_000, training: 3_000_000, ..Memory::default() };
        assert_eq!(parts(&memory), "weights 1.0 MB, gradients and optimizer 3.0 MB");
        assert_eq!(memory.total(), 4_000_000);
    }
}
