//! `bench --workload`: a step of the shape that another program publishes, on any device.
//!
//! The weights are random, and so is the length of a completion: so many tokens end a completion that each token does with probability
//! 1 / mean. The lengths then have a geometric distribution, cut at four times the mean. A published run says the mean of its lengths at
//! most; the distribution is an assumption, and the result names it.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, Result};
use omnigrpo_models::{Checkpoint, LoadOptions, Model, ReferencePlace};
use omnigrpo_observe::PhaseTimer;
use omnigrpo_rewards::RewardOptions;
use omnigrpo_train::{
    AdamW, AdamWConfig, Collector, Divided, PreparedRow, Selection, UpdateAt, peak_memory_bytes, update,
};
use serde_json::{Value, json};

use super::super::print;
use super::{prompts, rows};
use crate::settings::Settings;
use omnigrpo_session::Session;

/// Cut of the lengths, as a multiple of their mean.
const LONGEST: usize = 4;

/// A step: seconds, phases with their seconds, and completion tokens.
struct Step {
    secs: f64,
    phases: Vec<(String, f64)>,
    tokens: usize,
    completions: usize,
}

/// Measures the steps of a published shape, and prints the last one.
pub fn measure(settings: &Settings, session: &Session, start: &Checkpoint, dir: &Path) -> Result<()> {
    let mean = settings.bench.completion_tokens;
    let options = LoadOptions {
        dtype: settings.model.dtype,
        device: session.device()?,
        random: Some(settings.algorithm.seed),
        ..LoadOptions::default()
    };
    let model = Model::load(start, &options)?;
    Selection::ALL.apply(&model)?;
    let prompts = prompts(settings, start, LONGEST * mean)?;
    let rows = rows(settings, &prompts, dir)?;
    let mut algorithm = settings.algorithm.clone();
    algorithm.sampling.max_completion_length = LONGEST * mean;
    let algorithm: Divided = algorithm.into();
    let reference = match algorithm.loss.needs_reference() {
        true => Some(model.reference(ReferencePlace::Memory(model.device()))?),
        false => None,
    };
    let mut optimizer = AdamW::new(AdamWConfig::default(), model.params());
    let rewards = omnigrpo_rewards::build(&["random".to_owned()], &RewardOptions::default())?;
    let collector = Collector {
        model: &model,
        prompts: &prompts,
        shuffled: None,
        rewards: &rewards,
        interaction: None,
        algorithm: &algorithm,
    };
    let mut step = |rows: &[PreparedRow], index: u64| -> Result<Step> {
        let started = Instant::now();
        let mut timer = PhaseTimer::start(started);
        let mut rollouts = collector.collect(rows.to_vec(), index, &mut |_| Ok(Vec::new()), &mut timer)?;
        let lengths: Vec<usize> = rollouts
            .groups
            .iter()
            .flat_map(|group| &group.completions)
            .map(|own| own.completion.ids.len())
            .collect();
        let at = UpdateAt { step: 0, learning_rate_factor: 1.0 };
        update((&model, reference.as_ref()), &mut optimizer, at, &algorithm, &mut rollouts, &mut timer)?;
        model.device().finish()?;
        let now = Instant::now();
        let phases = timer
            .finish(now)
            .into_iter()
            .filter_map(|(name, secs)| Some((name.strip_prefix("time/")?.to_owned(), secs?)));
        Ok(Step {
            secs: (now - started).as_secs_f64(),
            phases: phases.collect(),
            tokens: lengths.iter().sum(),
            completions: lengths.len(),
        })
    };
    session.console.line("a first step of one prompt, which compiles kernels and touches memory");
    step(&rows[..1], 0)?;
    let mut last = None;
    for index in 1..=settings.bench.num_steps {
        let done = step(&rows, index as u64)?;
        session.console.line(&format!("step {index}: {:.1} s", done.secs));
        last = Some(done);
    }
    let last = last.context("no step was measured")?;
    let shape = Shape {
        device: model.device().to_string(),
        num_params: model.params().iter().map(|p| p.len()).sum(),
        num_prompts: rows.len(),
        prompt_tokens: rows[0].prompt.ids.len(),
    };
    if let Some(path) = &settings.io.json {
        let text = serde_json::to_string_pretty(&shape.json(settings, &last))? + "\n";
        std::fs::write(path, text).with_context(|| format!("writing {}", path.display()))?;
    }
    print(&shape.text(settings, &last))
}

/// Sizes of the measured step.
struct Shape {
    device: String,
    num_params: usize,
    num_prompts: usize,
    prompt_tokens: usize,
}

impl Shape {
    fn text(&self, settings: &Settings, last: &Step) -> String {
        let Self { device, num_params, num_prompts, prompt_tokens } = self;
        let (images, mean) = (settings.bench.num_images, settings.bench.completion_tokens);
        let mut out = format!(
            "{:.2} million parameters with random values on {device}, {num_prompts} prompts of {prompt_tokens} tokens with {images} image{}, {} \
             completions each\nlengths: geometric with a mean of {mean} tokens, at most {} (an assumption); here {:.0} in the mean\n\n",
            *num_params as f64 / 1e6,
            if images == 1 { "" } else { "s" },
            settings.algorithm.num_generations,
            LONGEST * mean,
            last.tokens as f64 / last.completions.max(1) as f64,
        );
        for (name, secs) in last.phases.iter().filter(|(_, secs)| *secs > 0.0) {
            out.push_str(&format!("{name:24}{secs:>10.2} s{:>6.0} %\n", 100.0 * secs / last.secs));
        }
        let rate = last.tokens as f64 / last.secs;
        out.push_str(&format!(
            "{:24}{:>10.2} s\n{:24}{rate:>10.1}\n",
            "step", last.secs, "completion tokens/s"
        ));
        out
    }

    fn json(&self, settings: &Settings, last: &Step) -> Value {
        let phases: serde_json::Map<String, Value> =
            last.phases.iter().map(|(name, secs)| (name.clone(), json!(secs))).collect();
        json!({
            "device": self.device, "parameters": self.num_params, "num_prompts": self.num_prompts,
            "num_generations": settings.algorithm.num_generations, "prompt_tokens": self.prompt_tokens,
            "mean_tokens": settings.bench.completion_tokens, "completion_tokens": last.tokens, "step_secs": last.secs,
            "tokens_per_sec": last.tokens as f64 / last.secs, "phases": phases, "peak_bytes": peak_memory_bytes(),
        })
    }
}

/// Lets so many tokens end a completion that its mean length is `mean`.
pub fn write_ends(dir: &Path, mean: usize) -> Result<()> {
    let config: Value = serde_json::from_slice(&std::fs::read(dir.join("config.json"))?)?;
    let sizes = if config["text_config"].is_object() { &config["text_config"] } else { &config };
    let vocabulary = sizes["vocab_size"].as_u64().context("config.json has no vocab_size")?;
    let count = (vocabulary / mean as u64).max(1);
    let ids: Vec<u64> = (0..count).map(|i| (2 * i + 1) * vocabulary / (2 * count)).collect();
    let text = json!({ "eos_token_id": ids, "bos_token_id": config["bos_token_id"] }).to_string();
    Ok(std::fs::write(dir.join("generation_config.json"), text)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_token_of_many_ends_a_completion() {
        let dir = tempfile::tempdir().unwrap();
        for (config, mean, wanted) in [
            (json!({"vocab_size": 1000}), 250, vec![125, 375, 625, 875]),
            (json!({"text_config": {"vocab_size": 90}}), 300, vec![45]),
        ] {
            std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
            write_ends(dir.path(), mean).unwrap();
            let text = std::fs::read(dir.path().join("generation_config.json")).unwrap();
            let written: Value = serde_json::from_slice(&text).unwrap();
            assert_eq!(written["eos_token_id"], json!(wanted));
        }
    }
}
