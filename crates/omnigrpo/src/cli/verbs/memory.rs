//! Checks whether a model, and a run with it, fit into memory before the model is loaded.

use std::cmp::Reverse;
use std::sync::Arc;

use anyhow::Result;
use omnigrpo_data::{Dataset, MediumKind, Sample};
use omnigrpo_models::{Checkpoint, MediumShape, Model, Prompt, PromptBuilder, SftExample};
use omnigrpo_ops::{Device, Rates};
use omnigrpo_train::{
    Memory, MemoryOf, MemoryPlan, Objective, PreparedRow, ReferenceKept, StepTime, Work, media_bytes,
};

use super::setup;
use super::train::Prepared;
use crate::settings::Settings;
use crate::settings::problem::Problem;

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

/// Returns an error if the weights alone exceed the free main memory, through which they are loaded, or the free memory of the
/// device.
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
            .expected(format!("at most the free {}", size(free)))
            .help(
                "--load_in_8bit or --load_in_4bit store frozen weights in fewer bits; --torch_dtype bfloat16 halves \
                 the size of f32 weights; `omnigrpo doctor --model_name_or_path DIR` shows the memory of each way of training",
            )
            .into()),
        _ => Ok(()),
    }
}

/// Returns the parts of the memory as text.
pub fn parts(memory: &Memory) -> String {
    let some = memory.parts().into_iter().filter(|(_, bytes)| *bytes > 0);
    some.map(|(name, bytes)| format!("{name} {}", size(bytes))).collect::<Vec<_>>().join(", ")
}

/// Maximum number of rows that represent all rows of a step. The longest rows are used.
pub const PREPARED: usize = 64;
/// Number of rows, evenly spaced over the dataset, that represent all rows when time is predicted.
pub const TYPICAL: usize = 16;
/// Limit on the number of rows with media, whose tensors take address space.
const PREPARED_WITH_MEDIA: usize = 8;

/// Outlines of the longest rows of a run: their media have a size and no content.
pub struct Longest {
    samples: Vec<Sample>,
    rows: Vec<PreparedRow>,
    examples: Vec<SftExample>,
    versions: u64,
}

impl Longest {
    /// Reads some rows and the headers of their media. Leaves out rows that cannot be used; they are reported when they are
    /// drawn.
    pub fn prepare(prompts: &PromptBuilder, dataset: &Dataset, rows: &[u64], objective: Objective) -> Self {
        let mut with_media = 0;
        let few = |sample: &Sample| {
            with_media += usize::from(!sample.media.is_empty());
            with_media <= PREPARED_WITH_MEDIA
        };
        let samples = rows.iter().filter_map(|&row| dataset.get(row).ok()).take_while(few).collect();
        Self::of(prompts, samples, objective)
    }

    fn of(prompts: &PromptBuilder, samples: Vec<Sample>, objective: Objective) -> Self {
        let mut this = Self { samples: Vec::new(), rows: Vec::new(), examples: Vec::new(), versions: 1 };
        for sample in samples {
            for segments in sample.media.iter().filter_map(|medium| medium.options.segments.as_ref()) {
                if segments.dynamic_sample {
                    let more = segments.max_frames.saturating_sub(segments.min_frames);
                    this.versions = this.versions.max(1 + u64::from(more));
                }
            }
            match objective {
                Objective::Imitate => {
                    let outline = prompts.outline(&sample);
                    this.examples.extend(outline.and_then(|prompt| prompts.with_answer(&sample, prompt)));
                }
                Objective::Reinforce => this.rows.extend(PreparedRow::outline(prompts, sample.clone())),
            }
            this.samples.push(sample);
        }
        // The rows are sorted by their prompts only, so the answers have to be included here.
        this.examples.sort_by_key(|example| Reverse(example.prompt.ids.len() + example.target.len()));
        this
    }

    /// Returns the same rows built with other settings of media; `None` if none of them can be used.
    pub fn with(&self, prompts: &PromptBuilder, objective: Objective) -> Option<Self> {
        let other = Self::of(prompts, self.samples.clone(), objective);
        let any = other.prompts().next().is_some();
        any.then_some(other)
    }

    /// Returns the shapes of the media of the longest row.
    pub fn media(&self) -> Vec<(MediumKind, MediumShape)> {
        let longest = self.prompts().max_by_key(|prompt| prompt.ids.len());
        longest.map_or(Vec::new(), |prompt| prompt.media.iter().map(|m| (m.kind, m.shape)).collect())
    }

    /// Returns the number of tokens of the longest prompt.
    pub fn prompt_tokens(&self) -> usize {
        self.prompts().map(|prompt| prompt.ids.len()).max().unwrap_or(0)
    }

    /// Returns the maximum number of different frame counts with which a clip of these rows may be drawn.
    pub fn versions(&self) -> u64 {
        self.versions
    }

    /// Returns the largest size of the decoded media of one row, bytes.
    pub fn media_bytes(&self) -> u64 {
        self.prompts().map(media_bytes).max().unwrap_or(0)
    }

    fn prompts(&self) -> impl Iterator<Item = &Prompt> {
        let examples = self.examples.iter().map(|example| &example.prompt);
        self.rows.iter().map(|row| &*row.prompt).chain(examples)
    }

    /// Returns the number of usable rows.
    fn len(&self) -> usize {
        self.rows.len().max(self.examples.len())
    }

    /// Returns `count` rows from index `first`, longest first. Starts again at the first row if there are too few.
    fn work(&self, first: usize, count: usize, objective: Objective) -> Work {
        match objective {
            Objective::Imitate => {
                Work::Examples(self.examples.iter().cycle().skip(first).take(count).cloned().collect())
            }
            Objective::Reinforce => {
                Work::Rollout(self.rows.iter().cycle().skip(first).take(count).cloned().collect())
            }
        }
    }
}

/// Returns the memory that a run with these settings and rows needs on the model's device, without the program itself.
pub fn of_run(
    settings: &Settings,
    checkpoint: &Checkpoint,
    prepared: &Prepared,
    longest: &Longest,
) -> Result<Memory> {
    let outline = setup::trained_outline(settings, checkpoint)?;
    Ok(omnigrpo_train::memory(&outline, &plan(settings, prepared, longest, 0))?)
}

/// Predicts the time of a step and of an evaluation batch on this machine's CPU, for completions of the given length in
/// tokens. `typical` contains rows as a step draws them.
pub fn step_time(
    settings: &Settings,
    checkpoint: &Checkpoint,
    prepared: &Prepared,
    typical: &Longest,
    completion_tokens: usize,
    rates: &mut Rates,
) -> Result<StepTime> {
    let outline = setup::trained_outline(settings, checkpoint)?;
    let mut settings = settings.clone();
    settings.limit_completions(completion_tokens);
    settings.algorithm.sampling.min_completion_length = 0;
    let rollout = prompts_here(&settings) * settings.run.steps_per_generation;
    // The steps together use every row once.
    let steps = typical.len().div_ceil(rollout).max(1);
    let plans: Vec<MemoryPlan> =
        (0..steps).map(|step| plan(&settings, prepared, typical, step * rollout)).collect();
    Ok(omnigrpo_train::step_time(&outline, &plans, settings.run.num_iterations, rates)?)
}

/// Returns the number of prompts of a step that this process computes.
fn prompts_here(settings: &Settings) -> usize {
    settings.run.prompts_per_step.div_ceil(settings.env.processes.max(1))
}

/// Returns the memory plan of a step with the rows from index `first`.
fn plan<'s>(settings: &'s Settings, prepared: &Prepared, longest: &Longest, first: usize) -> MemoryPlan<'s> {
    let Prepared { objective, devices: [device, reference_device], .. } = *prepared;
    let prompts = prompts_here(settings);
    let rows = match objective {
        Objective::Imitate => prompts,
        Objective::Reinforce => prompts * settings.run.steps_per_generation,
    };
    let evaluation = prepared.eval.as_ref().map(|plan| {
        let rows = plan.rows.len().min(plan.options.batch_rows);
        let prompts: Vec<Arc<Prompt>> = longest.prompts().map(|p| Arc::new(p.clone())).collect();
        (prompts.into_iter().cycle().take(rows).collect(), plan.options.num_generations)
    });
    let needed = objective == Objective::Reinforce && settings.algorithm.loss.needs_reference();
    // True if the weights at the start of the run are those in the checkpoint's files.
    let published = settings.model.init_weights.is_none() && settings.model.adapter.is_none();
    let reference = if !needed || device != reference_device {
        ReferenceKept::No
    } else if published && settings.run.lends_reference(device) {
        ReferenceKept::InPlace
    } else {
        ReferenceKept::Copied
    };
    MemoryPlan {
        algorithm: &settings.algorithm,
        optimizer: &settings.optimizer,
        work: longest.work(first, rows, objective),
        prompts_per_step: prompts,
        evaluation,
        reference,
        of: if device == Device::Cpu { MemoryOf::Host } else { MemoryOf::Card },
    }
}

/// Returns the number of bytes for stored decoded media, given the free bytes. Without a setting, unknown free memory gives 0.
pub fn for_media(settings: &Settings, left: Option<u64>) -> u64 {
    const GIB: f64 = (1u64 << 30) as f64;
    match (settings.data.mm_processor_cache_gb, left) {
        (Some(given), left) => ((given * GIB) as u64).min(left.unwrap_or(u64::MAX)),
        (None, left) => (left.unwrap_or(0) / 4).min(4 << 30),
    }
}

/// Returns the bytes that a store of this capacity will use for decoded media, in addition to the media of the current step. If
/// the capacity suffices for all media, those of the current step are among the stored ones.
pub fn kept(all: u64, room: u64, of_the_moment: u64) -> u64 {
    if all <= room { all.saturating_sub(of_the_moment) } else { room }
}

/// Enables the store of decoded media for commands that do not predict their memory. Must be called after their models are
/// loaded.
pub fn keep_media(settings: &Settings, checkpoint: &Checkpoint) {
    checkpoint.media_store().set_max_bytes(for_media(settings, free()));
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
        let memory = Memory { weights: 1_000_000, optimizer: 3_000_000, ..Memory::default() };
        assert_eq!(parts(&memory), "weights 1.0 MB, moments and masters 3.0 MB");
        assert_eq!(memory.total(), 4_000_000);
    }

    #[test]
    fn media_are_kept_in_a_part_of_what_is_left() {
        let mut settings = Settings::default();
        for (given, left, bytes) in [
            (None, Some(8 << 30), 2 << 30),
            (None, Some(1 << 40), 4 << 30),
            (None, None, 0),
            (Some(0.0), Some(8 << 30), 0),
            (Some(6.5), Some(8 << 30), 13 << 29),
            (Some(6.5), Some(5 << 30), 5 << 30),
            (Some(6.5), None, 13 << 29),
        ] {
            settings.data.mm_processor_cache_gb = given;
            assert_eq!(for_media(&settings, left), bytes, "{given:?} of {left:?}");
        }
        // A picture that every step shows is stored once. Media that do not fit into the store are held in addition to the stored
        // ones.
        assert_eq!(
            [kept(10, 100, 20), kept(100, 100, 20), kept(101, 100, 20), kept(50, 0, 20)],
            [0, 80, 100, 0]
        );
    }
}
