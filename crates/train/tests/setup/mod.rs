//! Runs on the tiny checkpoints of the `models` tests.
#![allow(clippy::unwrap_used, clippy::panic, dead_code, missing_docs)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use omnigrpo_data::{Dataset, DatasetSpec, ReadOptions, Roots};
use omnigrpo_models::{Checkpoint, PromptBuilder, PromptSettings, WeightDtype};
use omnigrpo_observe::{Console, RunLock, Trackers};
use omnigrpo_rewards::{RewardOptions, build};
use omnigrpo_rollout::SamplingParams;
use omnigrpo_train::{
    AdamWConfig, Algorithm, Divided, RecordPlan, RowPlan, RunPlan, RunSummary, SavePlan, SaveWhen, Selection,
    Signals, SkipPolicy, TrainError, TrainSetup, train,
};
use safetensors::SafeTensors;
use serde_json::{Value, json};

pub use omnigrpo_testkit::checkpoint;

pub fn prompts(dir: &Path, max_completion_length: usize) -> PromptBuilder {
    let settings = PromptSettings { max_completion_length, ..PromptSettings::default() };
    PromptBuilder::open(&Checkpoint::open(dir).unwrap(), settings).unwrap()
}

pub fn dataset(file: &Path, root: &Path) -> Dataset {
    Dataset::open(&[DatasetSpec::file(file).with_roots(Roots::all(root))], &ReadOptions::default()).unwrap()
}

/// The settings of `replay/*.json`.
pub fn algorithm(num_generations: usize, max_completion_length: usize) -> Divided {
    let algorithm = Algorithm {
        num_generations,
        sampling: SamplingParams { max_completion_length, seed: 3, ..SamplingParams::default() },
        prompts_per_micro_batch: 64,
        seed: 3,
        ..Algorithm::default()
    };
    algorithm.into()
}

pub fn optimizer() -> AdamWConfig {
    AdamWConfig { learning_rate: 1e-3, weight_decay: 0.1, ..AdamWConfig::default() }
}

/// A run of six updates with two prompts and three completions each, on the rows of a file.
pub fn setup(name: &str, file: &Path, root: &Path, output_dir: &Path) -> TrainSetup {
    let dir = checkpoint(name);
    let dataset = dataset(file, root);
    let rows = (0..dataset.len()).collect();
    TrainSetup {
        model: omnigrpo_testkit::load(&dir, WeightDtype::Auto).unwrap(),
        prompts: Arc::new(prompts(&dir, 8)),
        shuffled: None,
        dataset: Arc::new(dataset),
        rows,
        eval: None,
        rewards: build(&["random".to_owned()], &RewardOptions::default()).unwrap(),
        interaction: None,
        algorithm: algorithm(3, 8),
        optimizer: optimizer(),
        selection: Selection::ALL,
        reference_model: None,
        reference_device: omnigrpo_ops::Device::Cpu,
        run: RunPlan {
            max_steps: Some(6),
            prompts_per_step: 2,
            save: SavePlan { when: SaveWhen::Never, ..SavePlan::default() },
            rows: RowPlan {
                skip: SkipPolicy { strict: false, max_share: 0.5 },
                seed: 1,
                ..RowPlan::default()
            },
            records: RecordPlan {
                files: vec![("config.yaml", b"settings: of this test\n".to_vec())],
                ..RecordPlan::default()
            },
            ..RunPlan::default()
        },
        lock: RunLock::acquire(output_dir, "this test").unwrap(),
        observer: Box::new(()),
        trackers: Box::new(|| Trackers::none(&Console::plain(std::io::sink()))),
        signals: Signals::default(),
        curves: None,
    }
}

pub fn run(setup: TrainSetup) -> Result<RunSummary, TrainError> {
    train(setup, &Console::plain(std::io::sink()), &AtomicBool::new(false)).map(|trained| trained.summary)
}

/// The objects of a JSONL file; none if the file is missing.
pub fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Rows of `metrics.jsonl` without what a clock or the system says.
pub fn timeless(dir: &Path) -> Vec<Value> {
    let mut rows = lines(&dir.join("metrics.jsonl"));
    for row in &mut rows {
        let clock = |key: &str| {
            ["time/", "step_time", "memory/", "machine/", "data/ahead_time"]
                .iter()
                .any(|start| key.starts_with(start))
        };
        row.as_object_mut().unwrap().retain(|key, _| !clock(key));
    }
    rows
}

pub fn number(row: &Value, key: &str) -> f64 {
    row[key].as_f64().unwrap_or_else(|| panic!("no number {key} in {row}"))
}

/// The f32 tensors of a file.
pub fn tensors(path: &Path) -> BTreeMap<String, Vec<f32>> {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    file.tensors()
        .into_iter()
        .filter(|(_, view)| view.dtype() == safetensors::Dtype::F32)
        .map(|(name, view)| {
            let data = view.data().as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect();
            (name, data)
        })
        .collect()
}

/// Names, dtypes and bytes of the tensors of a file.
pub fn raw_tensors(path: &Path) -> BTreeMap<String, (String, Vec<u8>)> {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let entry = |view: safetensors::tensor::TensorView| (format!("{:?}", view.dtype()), view.data().to_vec());
    file.tensors().into_iter().map(|(name, view)| (name, entry(view))).collect()
}

/// Six questions, four of them with a picture of one colour, in `root`; returns the file.
pub fn questions(root: &Path) -> PathBuf {
    let colours = [("red", [220, 30, 20]), ("green", [20, 200, 40]), ("blue", [30, 60, 230])];
    let mut rows: Vec<Value> = Vec::new();
    for (i, (name, rgb)) in colours.iter().cycle().take(4).enumerate() {
        let size = 56 + 28 * (i as u32 % 2);
        image::RgbImage::from_pixel(size, 56, image::Rgb(*rgb)).save(root.join(format!("{i}.png"))).unwrap();
        rows.push(json!({
            "id": format!("colour-{i}"),
            "image": format!("{i}.png"),
            "conversations": [
                { "from": "human", "value": "<image>Which colour?" },
                { "from": "gpt", "value": name },
            ],
        }));
    }
    for i in 0..2 {
        rows.push(json!({
            "id": format!("sum-{i}"),
            "conversations": [
                { "from": "human", "value": format!("What is {i} + 2?") },
                { "from": "gpt", "value": format!("{}", i + 2) },
            ],
        }));
    }
    let file = root.join("rows.jsonl");
    std::fs::write(&file, rows.iter().map(|row| format!("{row}\n")).collect::<String>()).unwrap();
    file
}
