//! `plan`, and what `train` knows of memory before it loads a model: by part, and with which flags a run would take less.

use anyhow::{Context as _, Result};
use omnigrpo_models::Checkpoint;
use omnigrpo_ops::Device;
use omnigrpo_train::{Memory, Phase};
use serde_json::{Map, Value as Json, json};

use super::memory::{self, size};
use super::train::Prepared;
use super::{Context, print};
use crate::flags;
use crate::problem::Problem;
use crate::rules;
use crate::settings::Settings;
use crate::values::{Given, Origin, Raw, Resolved};

/// Columns of the longest bar.
const BAR: u64 = 40;

/// A run with other flags.
struct Way {
    /// As they are typed.
    flags: String,
    memory: Memory,
}

/// What a run takes and what there is.
struct Forecast {
    memory: Memory,
    /// Of whom, and how many bytes this process may have there.
    limit: Option<(u64, &'static str)>,
    /// Bytes of main memory for decoded media that are kept.
    for_media: u64,
}

impl Forecast {
    fn new(settings: &Settings, checkpoint: &Checkpoint, prepared: &Prepared) -> Result<Self> {
        let device = prepared.devices[0];
        let mut memory = with_program(memory::of_run(settings, checkpoint, prepared)?, prepared);
        // What this process has already is in both.
        let own = if device == Device::Cpu { memory::resident() } else { 0 };
        let limit = memory::free_on(device).map(|(free, whose)| (free + own, whose));
        let left = match device {
            Device::Cpu => limit.map(|(limit, _)| limit.saturating_sub(memory.total())),
            // The rest is for what the run keeps beside the card: moments, a reference, rewards, media of two steps.
            _ => memory::free().map(|free| free / 2),
        };
        let for_media = memory::for_media(settings, left);
        if device == Device::Cpu {
            memory.media_store = memory::kept(prepared.media_bytes(&settings.run), for_media, memory.media);
        }
        Ok(Self { memory, limit, for_media })
    }

    fn fits(&self, memory: &Memory) -> bool {
        self.limit.is_none_or(|(limit, _)| memory.total() <= limit)
    }
}

/// Adds what stands in this process already, where the model comes to the same memory.
fn with_program(mut memory: Memory, prepared: &Prepared) -> Memory {
    if prepared.devices[0] == Device::Cpu {
        // Rows that were prepared to count with are gone when the model comes.
        memory.program = memory::resident().saturating_sub(prepared.reward_bytes + prepared.longest.held());
        memory.rewards = prepared.reward_bytes;
    }
    memory
}

/// Prints what a run takes; an error where it does not fit.
pub fn show(resolved: &Resolved, context: &Context, prepared: &Prepared) -> Result<()> {
    let checkpoint = context.checkpoint()?;
    let forecast = Forecast::new(&resolved.settings, checkpoint, prepared)?;
    let ways = ways(resolved, checkpoint, prepared)?;
    if let Some(path) = &resolved.settings.io.json {
        let text = serde_json::to_string_pretty(&as_json(&forecast, &ways))?;
        std::fs::write(path, text + "\n").with_context(|| format!("writing {}", path.display()))?;
    }
    print(&table(&forecast, &ways))?;
    match too_much(&forecast, &ways) {
        Some(problem) => Err(problem.into()),
        None => Ok(()),
    }
}

/// Before a run: an error where what lasts does not fit, a warning where the whole does not. Decoded media are kept in what is left.
pub fn foresee(resolved: &Resolved, checkpoint: &Checkpoint, prepared: &Prepared) -> Result<()> {
    let forecast = Forecast::new(&resolved.settings, checkpoint, prepared)?;
    checkpoint.media_store().set_max_bytes(forecast.for_media);
    if forecast.fits(&forecast.memory) {
        return Ok(());
    }
    let ways = ways(resolved, checkpoint, prepared)?;
    let Some(problem) = too_much(&forecast, &ways) else { return Ok(()) };
    if forecast.limit.is_some_and(|(limit, _)| forecast.memory.lasting() > limit) {
        return Err(problem.into());
    }
    // With activations the estimate is of the longest rows and completions, which may never come together.
    tracing::warn!("{}", problem.to_string().replacen("error: ", "", 1));
    Ok(())
}

/// Why a run does not fit, and which flags would make it.
fn too_much(forecast: &Forecast, ways: &[Way]) -> Option<Problem> {
    let (limit, whose) = forecast.limit.filter(|_| !forecast.fits(&forecast.memory))?;
    let help = match ways.iter().find(|way| forecast.fits(&way.memory)) {
        Some(way) => format!("with `{}` it takes {}", way.flags, size(way.memory.total())),
        None => {
            "no flag that `omnigrpo plan` knows of makes it fit: take a smaller model, or shorter rows".into()
        }
    };
    Some(
        Problem::failure(format!("this run does not fit into {whose}"))
            .got(format!("{} ({})", size(forecast.memory.total()), memory::parts(&forecast.memory)))
            .expected(format!("at most {}, what is free", size(limit)))
            .help(help),
    )
}

/// The run with flags that make it smaller, those first that change least of what comes out.
fn ways(resolved: &Resolved, checkpoint: &Checkpoint, prepared: &Prepared) -> Result<Vec<Way>> {
    let s = &resolved.settings;
    let on_a_card = prepared.devices[0] != Device::Cpu;
    let completion = s.algorithm.sampling.max_completion_length;
    let one = |name: &'static str, value: String| vec![(name, value)];
    let on = |name: &'static str| one(name, "true".into());
    let mut single = Vec::new();
    if !s.algorithm.recompute {
        single.push(on("gradient_checkpointing"));
    }
    // A stream holds a prompt with one completion at least.
    let least = (prepared.longest.prompt_tokens() + completion).next_multiple_of(64);
    if 2 * least <= s.algorithm.stream_rows() {
        single.push(one("max_stream_tokens", least.to_string()));
    }
    if on_a_card && !s.optimizer.offload {
        single.push(on("offload_optimizer"));
    }
    single.push(one("torch_dtype", "bfloat16".into()));
    if s.algorithm.num_generations >= 4 {
        single.push(one("num_generations", (s.algorithm.num_generations / 2).to_string()));
    }
    if completion >= 64 {
        single.push(one("max_completion_length", (completion / 2).to_string()));
    }
    if s.algorithm.loss.needs_reference() {
        single.push(one("beta", "0".into()));
    }
    if !s.model.use_peft {
        single.push(on("use_peft"));
    }
    let quantised = s.model.load_in_8bit || s.model.load_in_4bit;
    let adapted = |flag: &'static str| {
        let mut flags = on(flag);
        flags.splice(0..0, if s.model.use_peft { Vec::new() } else { on("use_peft") });
        flags
    };
    if !quantised {
        single.push(adapted("load_in_8bit"));
        single.push(adapted("load_in_4bit"));
    }
    // Together: what changes nothing of the result, then with adapters, then with few bits.
    let exact: Vec<_> =
        single.iter().take_while(|flags| flags[0].0 != "torch_dtype").flatten().cloned().collect();
    let mut all = single;
    if exact.len() > 1 {
        all.push(exact.clone());
    }
    if !exact.is_empty() && !s.model.use_peft {
        all.push([on("use_peft"), exact.clone()].concat());
    }
    if !exact.is_empty() && !quantised {
        all.push([adapted("load_in_4bit"), exact].concat());
    }
    let mut ways = Vec::new();
    for flags in all {
        // What contradicts another setting of the run is no way.
        let Some(settings) = changed(resolved, &flags) else { continue };
        let memory = with_program(memory::of_run(&settings, checkpoint, prepared)?, prepared);
        let typed = |(name, value): &(&str, String)| match value.as_str() {
            "true" => format!("--{name}"),
            value => format!("--{name} {value}"),
        };
        ways.push(Way { flags: flags.iter().map(typed).collect::<Vec<_>>().join(" "), memory });
    }
    let forecast = memory::of_run(s, checkpoint, prepared)?;
    let base = with_program(forecast, prepared).total();
    // A flag that saves less than one percent is none worth a line.
    ways.retain(|way| way.memory.total() < base - base / 100);
    Ok(ways)
}

/// The settings with other values of some flags; `None` where that contradicts the others.
fn changed(resolved: &Resolved, flags: &[(&'static str, String)]) -> Option<Settings> {
    let mut values = resolved.values.clone();
    for (name, text) in flags {
        let flag = flags::find(name).filter(|flag| flag.verbs.contains(&resolved.verb))?;
        values.set(Given::read(flag, &Raw::Arguments(vec![text.clone()]), Origin::Flag).ok()?);
    }
    let settings = Settings::from_values(&values, resolved.settings.env.clone()).ok()?;
    rules::check(resolved.verb, &settings).is_empty().then_some(settings)
}

fn table(forecast: &Forecast, ways: &[Way]) -> String {
    let Forecast { memory, limit, .. } = forecast;
    let most = limit.map_or(0, |(limit, _)| limit).max(memory.total()).max(1);
    let bar = |bytes: u64| {
        let full = "█".repeat((bytes * BAR / most) as usize);
        if full.is_empty() && bytes > 0 { "▏".to_owned() } else { full }
    };
    let width = ways.iter().map(|way| way.flags.len()).max().unwrap_or(0).max(22);
    let line = |name: &str, bytes: u64, note: &str| {
        format!("{name:width$}  {:>9}  {}{note}\n", size(bytes), bar(bytes))
    };
    let when = match memory.peak {
        Phase::Rollout => "a rollout",
        Phase::Update => "an update",
        Phase::Evaluation => "an evaluation",
    };
    let mut out = format!("memory of this run, with its longest rows, in {when}\n\n");
    for (name, bytes) in memory.parts().into_iter().filter(|(_, bytes)| *bytes > 0) {
        out.push_str(&line(name, bytes, ""));
    }
    out.push_str(&line("all of it", memory.total(), ""));
    if let Some((limit, whose)) = limit {
        let name = format!("free, {whose}");
        out.push_str(&line(
            &name,
            *limit,
            if forecast.fits(memory) { "  it fits" } else { "  it does not fit" },
        ));
    }
    if !ways.is_empty() {
        out.push_str("\nwith other flags\n\n");
    }
    for way in ways {
        let note = if forecast.fits(&way.memory) { "  fits" } else { "" };
        out.push_str(&line(&way.flags, way.memory.total(), note));
    }
    out
}

fn as_json(forecast: &Forecast, ways: &[Way]) -> Json {
    let parts = |memory: &Memory| -> Map<String, Json> {
        memory.parts().into_iter().map(|(name, bytes)| (name.replace(' ', "_"), bytes.into())).collect()
    };
    let ways = ways.iter().map(|way| {
        json!({
            "flags": way.flags,
            "total": way.memory.total(),
            "fits": forecast.fits(&way.memory),
        })
    });
    json!({
        "total": forecast.memory.total(),
        "parts": parts(&forecast.memory),
        "limit": forecast.limit.map(|(limit, _)| limit),
        "fits": forecast.fits(&forecast.memory),
        "with_other_flags": ways.collect::<Vec<_>>(),
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn of(weights: u64, activations: u64) -> Memory {
        Memory { weights, activations, ..Memory::default() }
    }

    #[test]
    fn bars_are_shares_of_the_longest_and_the_first_way_that_fits_is_told() {
        let forecast = Forecast {
            memory: of(2_000_000_000, 2_000_000_000),
            limit: Some((3_000_000_000, "memory")),
            for_media: 0,
        };
        let way = |flags: &str, memory: Memory| Way { flags: flags.into(), memory };
        let ways = [
            way("--num_generations 4", of(2_000_000_000, 1_500_000_000)),
            way("--gradient_checkpointing", of(2_000_000_000, 500_000_000)),
            way("--use_peft --load_in_4bit", of(700_000_000, 500_000_000)),
        ];
        let told = table(&forecast, &ways);
        let line = |start: &str| told.lines().find(|line| line.starts_with(start)).unwrap().to_owned();
        assert!(line("weights").ends_with(&format!(" 2.0 GB  {}", "█".repeat(20))), "{told}");
        assert!(line("all of it").ends_with(&format!(" 4.0 GB  {}", "█".repeat(40))), "{told}");
        assert!(line("free, memory").ends_with("  it does not fit"), "{told}");
        assert!(
            !line("--num_generations").ends_with("fits") && line("--gradient").ends_with("  fits"),
            "{told}"
        );
        assert!(!told.contains("adapters"), "what takes nothing has no line: {told}");

        let problem = too_much(&forecast, &ways).unwrap().to_string();
        for part in [
            "does not fit into memory",
            "4.0 GB (weights 2.0 GB, activations 2.0 GB)",
            "at most 3.0 GB, what is free",
            "with `--gradient_checkpointing` it takes 2.5 GB",
        ] {
            assert!(problem.contains(part), "{problem}");
        }
        assert!(too_much(&forecast, &ways[..1]).unwrap().to_string().contains("no flag"));
        let enough = Forecast { limit: Some((4_000_000_000, "memory")), ..forecast };
        assert!(too_much(&enough, &ways).is_none());

        let json = as_json(&enough, &ways);
        assert_eq!(json["total"], json!(4_000_000_000_u64));
        assert_eq!((&json["fits"], &json["parts"]["activations"]), (&json!(true), &json!(2_000_000_000)));
        assert_eq!(json["with_other_flags"][2]["flags"], json!("--use_peft --load_in_4bit"));
    }
}
