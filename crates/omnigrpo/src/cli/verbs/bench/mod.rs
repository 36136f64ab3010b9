//! `bench`: a GRPO step of a model with random weights, compared with the limits of the machine.
//!
//! The step is the same as in `train`: prompts with images, sampling, reference, policy forward and backward, optimizer. Every
//! weight is trained. Two rates of the machine are measured with all threads. Matrix products of the model's own shapes
//! (three per layer: output, input gradient, weight gradient) are measured before and after every step. Memory reads are measured
//! before the first and after the last step. The medians are printed. The policy pass of a step is compared with the rates just
//! before and after it, and the median of these shares is printed.
//!
//! [`omnigrpo_train::roofline`] defines useful work and the bytes that decoding has to read.

mod workload;

use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, Result};
use omnigrpo_data::{Dataset, DatasetSpec, MediumOptions, Roots};
use omnigrpo_demo::MODEL_FILES;
use omnigrpo_kernels::profile::{self, Profile};
use omnigrpo_models::{
    Checkpoint, LoadOptions, MediaSettings, Model, PromptBuilder, PromptSettings, ReferencePlace,
};
use omnigrpo_observe::PhaseTimer;
use omnigrpo_rewards::RewardOptions;
use omnigrpo_rollout::SamplingParams;
use omnigrpo_train::roofline::{
    RolloutShape, decode_bytes, gemm_rate, median, memory_rate, policy_flops, secs, useful_flops,
};
use omnigrpo_train::{
    AdamW, AdamWConfig, Collector, Divided, PreparedRow, Selection, UpdateAt, peak_memory_bytes, prepare,
    update,
};
use serde_json::json;

use super::print;
use crate::settings::problem::Problem;
use crate::settings::{Settings, Workload};
use omnigrpo_session::profile::table;
use omnigrpo_session::{Session, setup};

/// Configuration of a Qwen2.5-VL with 28 million parameters, for a bench without `--model_name_or_path`.
const CONFIG: &[u8] = include_bytes!("../../../../assets/bench/config.json");
/// Image processor of that model, also used for directories without one.
const PREPROCESSOR: &[u8] = include_bytes!("../../../../assets/bench/preprocessor_config.json");

/// Phase that is compared with the machine's rates.
const POLICY: &str = "policy, forward and backward";

/// Measures the steps of the chosen workload and prints the results.
pub fn bench(settings: &Settings, session: &Session) -> Result<()> {
    let scratch = tempfile::tempdir().context("a temporary directory could not be made")?;
    let dir = scratch.path();
    checkpoint(settings, dir)?;
    if settings.bench.workload != Workload::Own {
        workload::write_ends(dir, settings.bench.completion_tokens)?;
    }
    let start = Checkpoint::open(dir)?;
    let mut settings = settings.clone();
    if start.family().reads_text_only() {
        settings.bench.num_images = 0;
    }
    match settings.bench.workload {
        Workload::Own => measure(&settings, session, &start, dir),
        _ => workload::measure(&settings, session, &start, dir),
    }
}

/// Measures the steps of the shape in the settings.
fn measure(settings: &Settings, session: &Session, start: &Checkpoint, dir: &Path) -> Result<()> {
    let options = LoadOptions { dtype: settings.model.dtype, ..LoadOptions::default() };
    let model = Model::load(start, &LoadOptions { random: Some(settings.algorithm.seed), ..options })?;
    Selection::ALL.apply(&model)?;
    let prompts = prompts(settings, start, settings.bench.completion_tokens)?;
    let rows = rows(settings, &prompts, dir)?;
    let shape = RolloutShape {
        prompt_tokens: rows[0].prompt.ids.len(),
        num_prompts: rows.len(),
        num_generations: settings.algorithm.num_generations,
        completion_tokens: settings.bench.completion_tokens,
    };
    let measured = Measured::of(settings, session, &model, &prompts, &rows, shape)?;
    let results = Results::of(&measured, &model, shape);
    if let Some(path) = &settings.io.json {
        let text = serde_json::to_string_pretty(&results.json(settings, &measured))?;
        std::fs::write(path, text + "\n").with_context(|| format!("writing {}", path.display()))?;
    }
    print(&results.text(settings, &measured))
}

/// Times of the steps and rates of the machine.
struct Measured {
    /// Seconds and phases of each step, the fastest first.
    steps: Vec<(f64, Profile)>,
    /// Floating-point operations per second in matrix products: the median.
    gemm_rate: f64,
    /// Bytes per second from memory: the median.
    memory_rate: f64,
    /// Share of the rate of matrix products that the policy pass reaches: the median.
    policy_share: f64,
    peak_bytes: u64,
}

impl Measured {
    fn of(
        settings: &Settings,
        session: &Session,
        model: &Model,
        prompts: &PromptBuilder,
        rows: &[PreparedRow],
        shape: RolloutShape,
    ) -> Result<Self> {
        let algorithm = algorithm(settings);
        let reference = if algorithm.loss.needs_reference() {
            Some(model.reference(ReferencePlace::Memory(model.device()))?)
        } else {
            None
        };
        let mut optimizer = AdamW::new(AdamWConfig::default(), model.params());
        let rewards = omnigrpo_rewards::build(&["random".to_owned()], &RewardOptions::default())?;
        let collector = Collector {
            model,
            prompts,
            shuffled: None,
            rewards: &rewards,
            interaction: None,
            algorithm: &algorithm,
        };
        let stream_rows =
            rows.len() * (shape.prompt_tokens + shape.num_generations * (shape.completion_tokens - 1));
        session.console.line("measuring this machine");
        // The speed of a shared machine varies, so its rates are measured several times.
        let mut gemm_rates = Vec::new();
        let mut steps: Vec<(f64, Profile)> = Vec::new();
        for index in 0..=settings.bench.num_steps {
            // The first step is not measured, because it includes page faults of fresh memory.
            profile::enable(false);
            gemm_rates.push(gemm_rate(model, stream_rows));
            profile::enable(index > 0);
            let started = Instant::now();
            let mut timer = PhaseTimer::start(started);
            let mut rollouts =
                collector.collect(rows.to_vec(), index as u64, &mut |_| Ok(Vec::new()), &mut timer)?;
            let at = UpdateAt { step: 0, learning_rate_factor: 1.0 };
            update((model, reference.as_ref()), &mut optimizer, at, &algorithm, &mut rollouts, &mut timer)?;
            if index > 0 {
                steps.push((started.elapsed().as_secs_f64(), profile::take()));
                session.console.line(&format!("step {index}: {:.3} s", steps[index - 1].0));
            }
        }
        profile::enable(false);
        gemm_rates.push(gemm_rate(model, stream_rows));
        // The rate of memory takes a gigabyte, which is none of a step.
        let peak_bytes = peak_memory_bytes().unwrap_or(0);
        let memory_rates = vec![memory_rate(), memory_rate()];
        // A step's share refers to the rates just before and after it.
        let shares = steps.iter().zip(gemm_rates[1..].windows(2)).map(|((_, of_step), rates)| {
            let time = secs(of_step, "forward") + secs(of_step, "backward");
            policy_flops(of_step) / time / median(rates.to_vec())
        });
        let policy_share = median(shares.collect());
        steps.sort_by(|a, b| a.0.total_cmp(&b.0));
        let (gemm_rate, memory_rate) = (median(gemm_rates), median(memory_rates));
        Ok(Self { steps, gemm_rate, memory_rate, policy_share, peak_bytes })
    }

    /// Returns the seconds and the phases of the median step.
    fn typical(&self) -> &(f64, Profile) {
        &self.steps[(self.steps.len() - 1) / 2]
    }
}

/// Numbers of the median step.
struct Results {
    shape: RolloutShape,
    num_params: usize,
    /// Name, seconds and useful operations of each phase.
    phases: [(&'static str, f64, f64); 6],
    decode_bytes: f64,
    decode_share: f64,
}

impl Results {
    fn of(measured: &Measured, model: &Model, shape: RolloutShape) -> Self {
        let (_, typical) = measured.typical();
        let phase = |name, phase| (name, secs(typical, phase), useful_flops(typical, phase));
        let policy_secs = secs(typical, "forward") + secs(typical, "backward");
        let phases = [
            phase("tower, for the rollout", "encode"),
            phase("prefill", "prefill"),
            phase("decode", "decode"),
            phase("reference", "reference"),
            (POLICY, policy_secs, policy_flops(typical)),
            ("optimizer", secs(typical, "optimizer"), 0.0),
        ];
        let decode_bytes = decode_bytes(model, shape);
        let decode_share = decode_bytes / measured.memory_rate / phases[2].1;
        let num_params = model.params().iter().map(|p| p.len()).sum();
        Self { shape, num_params, phases, decode_bytes, decode_share }
    }

    fn text(&self, settings: &Settings, measured: &Measured) -> String {
        let Self { shape, num_params, phases, decode_bytes, decode_share } = self;
        let Measured { gemm_rate, memory_rate, policy_share, peak_bytes, .. } = measured;
        let (step_secs, typical) = measured.typical();
        let mut out = format!(
            "{:.2} million parameters, {} prompt{} of {} tokens with {} images, {} completions of {} tokens, \
             {} threads\nthis machine: {:.1} GFLOP/s in matrix products of these shapes, {:.1} GB/s from memory\n\n",
            *num_params as f64 / 1e6,
            shape.num_prompts,
            if shape.num_prompts == 1 { "" } else { "s" },
            shape.prompt_tokens,
            settings.bench.num_images,
            shape.num_generations,
            shape.completion_tokens,
            rayon::current_num_threads(),
            gemm_rate / 1e9,
            memory_rate / 1e9,
        );
        out.push_str(&format!("{:30}{:>9}{:>10}{:>10}{:>14}\n", "", "s", "GFLOP", "GFLOP/s", "of the rate"));
        for (name, secs, flops) in phases {
            out.push_str(&format!("{name:30}{secs:>9.3}"));
            if *flops > 0.0 {
                let rate = flops / secs;
                let share = 100.0 * if *name == POLICY { *policy_share } else { rate / gemm_rate };
                out.push_str(&format!("{:>10.2}{:>10.1}{share:>12.0} %", flops / 1e9, rate / 1e9));
            }
            out.push('\n');
        }
        out.push_str(&format!("{:30}{step_secs:>9.3}\n\n", "step"));
        out.push_str(&format!(
            "policy: {:.0} % of the rate of matrix products\ndecode: {:.0} % of the rate of memory ({:.2} GB have to be read)\n\
             peak memory: {:.0} MB\n\n",
            100.0 * policy_share,
            100.0 * decode_share,
            decode_bytes / 1e9,
            *peak_bytes as f64 / 1e6
        ));
        out.push_str(&table(typical, 1));
        out
    }

    fn json(&self, settings: &Settings, measured: &Measured) -> serde_json::Value {
        let phases = self.phases.iter();
        let phases: serde_json::Map<String, serde_json::Value> = phases
            .map(|(name, secs, flops)| ((*name).to_owned(), json!({"secs": secs, "flops": flops})))
            .collect();
        let all: Vec<f64> = measured.steps.iter().map(|(secs, _)| *secs).collect();
        json!({
            "prompt_tokens": self.shape.prompt_tokens,
            "num_prompts": self.shape.num_prompts,
            "num_generations": self.shape.num_generations,
            "completion_tokens": self.shape.completion_tokens,
            "num_images": settings.bench.num_images,
            "gradient_checkpointing": settings.algorithm.recompute,
            "threads": rayon::current_num_threads(),
            "parameters": self.num_params,
            "gemm_flops_per_sec": measured.gemm_rate,
            "memory_bytes_per_sec": measured.memory_rate,
            "step_secs": measured.typical().0,
            "steps_secs": all,
            "phases": phases,
            "policy_share_of_gemm": measured.policy_share,
            "decode_share_of_memory": self.decode_share,
            "peak_bytes": measured.peak_bytes,
        })
    }
}

/// Writes a directory with everything except weights: the files of the given directory, or the embedded ones.
fn checkpoint(settings: &Settings, dir: &Path) -> Result<()> {
    // A template file would override the template in the settings of a given tokenizer.
    let left_out: &[&str] = match settings.model.name {
        Some(_) => &[".safetensors", ".jinja"],
        None => &[".safetensors"],
    };
    let taken = |name: &str| !left_out.iter().any(|ending| name.ends_with(ending));
    for (name, bytes) in MODEL_FILES.iter().filter(|(name, _)| taken(name)) {
        std::fs::write(dir.join(name), bytes)?;
    }
    std::fs::write(dir.join("preprocessor_config.json"), PREPROCESSOR)?;
    if settings.model.name.is_none() {
        let config = match settings.bench.workload {
            Workload::Own => CONFIG.to_vec(),
            Workload::EasyR1 => published_3b()?,
        };
        return Ok(std::fs::write(dir.join("config.json"), config)?);
    }
    let from = setup::checkpoint_dir(settings)?;
    for entry in std::fs::read_dir(&from).with_context(|| format!("reading {}", from.display()))? {
        let path = entry?.path();
        let text =
            path.extension().is_some_and(|e| e == "json" || e == "jinja" || e == "txt" || e == "model");
        if let Some(name) = path.file_name().filter(|_| text) {
            let copied = omnigrpo_guard::inside::open_path(&path)
                .and_then(|mut file| std::io::copy(&mut file, &mut std::fs::File::create(dir.join(name))?));
            copied.with_context(|| format!("copying {}", path.display()))?;
        }
    }
    Ok(())
}

/// Returns the configuration of the embedded model with the published sizes of Qwen2.5-VL-3B.
fn published_3b() -> Result<Vec<u8>> {
    let mut config: serde_json::Value = serde_json::from_slice(CONFIG)?;
    let sizes = json!({
        "hidden_size": 2048, "intermediate_size": 11008, "num_attention_heads": 16, "num_hidden_layers": 36,
        "num_key_value_heads": 2, "max_window_layers": 36, "vocab_size": 151_936, "max_position_embeddings": 128_000,
    });
    let tower = json!({
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 2048,
        "fullatt_block_indexes": [7, 15, 23, 31],
    });
    let put = |to: &mut serde_json::Value, from: serde_json::Value| {
        for (key, value) in from.as_object().into_iter().flatten() {
            to[key] = value.clone();
        }
    };
    put(&mut config, sizes);
    put(&mut config["vision_config"], tower);
    config["rope_scaling"]["mrope_section"] = json!([16, 24, 24]);
    Ok(serde_json::to_vec(&config)?)
}

fn algorithm(settings: &Settings) -> Divided {
    let length = settings.bench.completion_tokens;
    let mut algorithm = settings.algorithm.clone();
    algorithm.sampling = SamplingParams {
        min_completion_length: length,
        max_completion_length: length,
        seed: settings.algorithm.seed,
        ..SamplingParams::default()
    };
    if algorithm.num_generations == 1 {
        // There is no second policy to compare with. The step computes the same for the KL alone.
        algorithm.alpha = 0.0;
    }
    algorithm.into()
}

fn prompts(settings: &Settings, start: &Checkpoint, longest: usize) -> Result<PromptBuilder> {
    let area = (settings.bench.image_px * settings.bench.image_px) as u64;
    let sized =
        !start.family().processor().idle_settings().fields.iter().any(|s| s.field == "image.max_pixels");
    let image = MediumOptions { max_pixels: sized.then_some(area), ..MediumOptions::default() };
    let prompt = PromptSettings {
        media: MediaSettings { image, ..MediaSettings::default() },
        max_completion_length: longest,
        ..PromptSettings::default()
    };
    Ok(PromptBuilder::open(start, prompt)?)
}

/// Returns prompts of the given length with pictures of noise.
fn rows(settings: &Settings, prompts: &PromptBuilder, dir: &Path) -> Result<Vec<PreparedRow>> {
    let b = &settings.bench;
    let names: Vec<String> = (0..b.num_images).map(|i| format!("{i}.bmp")).collect();
    for (i, name) in names.iter().enumerate() {
        std::fs::write(dir.join(name), bitmap(b.image_px as u32, i as u32 + 1))?;
    }
    let build = |words: usize, count: usize| -> Result<Vec<PreparedRow>> {
        let problem = "<image>".repeat(b.num_images) + &"a".repeat(words);
        let row = json!({"image": names, "problem": problem, "solution": "a"}).to_string() + "\n";
        let file = dir.join("rows.jsonl");
        std::fs::write(&file, row.repeat(count))?;
        let dataset = Dataset::open(
            &[DatasetSpec::file(&file).with_roots(Roots::all(dir))],
            &setup::read_options(settings),
        )?;
        let made = |row| {
            prepare(&dataset, prompts, None, row, 0)?
                .map_err(|unusable| Problem::failure(unusable.reason).into())
        };
        (0..dataset.len()).map(made).collect()
    };
    // Each added letter adds at most one token, so the loop ends.
    let text_tokens =
        |row: &PreparedRow| row.prompt.ids.len() - row.prompt.spans.iter().map(|s| s.len).sum::<usize>();
    let mut words = 1;
    loop {
        let short = b.prompt_tokens.saturating_sub(text_tokens(&build(words, 1)?[0]));
        if short == 0 {
            return build(words, b.num_prompts);
        }
        words += short;
    }
}

/// Returns a picture of noise, 24 bits per pixel.
fn bitmap(px: u32, seed: u32) -> Vec<u8> {
    let stride = (px * 3).next_multiple_of(4);
    let mut out = Vec::with_capacity(54 + (stride * px) as usize);
    out.extend_from_slice(b"BM");
    for word in [54 + stride * px, 0, 54, 40, px, px, 1 | (24 << 16), 0, stride * px, 2835, 2835, 0, 0] {
        out.extend_from_slice(&word.to_le_bytes());
    }
    let mut state = seed;
    for _ in 0..stride * px {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        out.push((state >> 24) as u8);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_template_of_a_given_checkpoint_is_its_own() {
        let given =
            concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tests/golden/checkpoints/qwen2_vl_untied");
        let yaml = format!("model_name_or_path: {given}");
        let values = crate::settings::config::parse(&yaml, "test", |_| crate::settings::values::Origin::Flag);
        let environment = crate::settings::environment::Environment::default();
        let settings =
            crate::settings::resolve(crate::settings::Verb::Bench, values, environment).unwrap().settings;
        let dir = tempfile::tempdir().unwrap();
        checkpoint(&settings, dir.path()).unwrap();
        let template = |dir: &Path| omnigrpo_text::ChatTemplate::from_dir(dir).unwrap().source().to_owned();
        assert_eq!(template(dir.path()), template(Path::new(given)));
    }

    #[test]
    fn a_workload_sets_the_published_sizes_and_flags_change_them() {
        let settings = |yaml: &str| {
            let values =
                crate::settings::config::parse(yaml, "test", |_| crate::settings::values::Origin::Flag);
            let environment = crate::settings::environment::Environment::default();
            crate::settings::resolve(crate::settings::Verb::Bench, values, environment).unwrap().settings
        };
        let sizes = |s: &Settings| {
            let b = &s.bench;
            (b.num_prompts, b.prompt_tokens + b.num_images * (b.image_px / 28).pow(2), b.completion_tokens)
        };
        let of = |s: &Settings| (s.algorithm.num_generations, s.algorithm.loss.beta, s.algorithm.recompute);
        let published = settings("workload: easyr1-3b");
        assert_eq!((sizes(&published), of(&published)), ((512, 375, 300), (5, 0.01, true)));
        let changed = settings("num_prompts: 51\nworkload: easyr1-3b\nbeta: 0");
        assert_eq!((sizes(&changed), of(&changed)), ((51, 375, 300), (5, 0.0, true)));
    }

    /// The sizes are those of the published configuration.
    #[test]
    fn the_3b_has_its_published_sizes() {
        let path = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../models/tests/golden/published/qwen2_5_vl_3B/config.json"
        );
        let published: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        let own: serde_json::Value = serde_json::from_slice(&published_3b().unwrap()).unwrap();
        let mut compared = 0;
        for (own, published) in [(&own, &published), (&own["vision_config"], &published["vision_config"])] {
            for (key, value) in own
                .as_object()
                .unwrap()
                .iter()
                .filter(|(key, value)| !key.ends_with("token_id") && value.is_u64())
            {
                assert!(published[key].is_null() || published[key] == *value, "{key}: {value}");
                compared += usize::from(!published[key].is_null());
            }
        }
        assert!(compared > 15, "{compared} sizes");
        assert_eq!(own["rope_scaling"]["mrope_section"], published["rope_scaling"]["mrope_section"]);
    }

    #[test]
    fn a_bitmap_has_its_size_in_its_header() {
        let bytes = bitmap(30, 1);
        // A row of 90 bytes is padded to 92.
        assert_eq!(bytes.len(), 54 + 92 * 30);
        assert_eq!(bytes[2..6], (54u32 + 92 * 30).to_le_bytes());
        assert_eq!((bytes[18], bytes[22], bytes[28]), (30, 30, 24));
    }
}
