//! Every setting that is free at a resume: a run that resumes with another value resumes, in the program and in the library, and ends with
//! the same bits. `free.json` has for each of them another value and what else the run needs. The tests of the Python package read it, too.
#![cfg(feature = "cli")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};

use crate::support::{Place, ROWS, golden};
use omnigrpo::settings::{Environment, Layer, Settings, Verb, binding, resolve};
use omnigrpo::{
    Checkpoint, Console, Dataset, DatasetSpec, Front, Inputs, LoadOptions, Model, PromptBuilder,
    RewardOptions, TrainPlan, build_rewards,
};
use omnigrpo_testkit::copy_dir;
use serde_json::{Map, Value, json};

/// Settings that are free and not in the table, with the reason.
const ELSEWHERE: [(&str, &[&str]); 5] = [
    (
        "several processes: tools/ranks/check.py",
        &[
            "nproc_per_node",
            "nnodes",
            "gradient_leaves",
            "shard",
            "shard_min_elements",
            "reduce_bucket_size",
            "ddp_backend",
            "rank_address",
            "ddp_timeout",
        ],
    ),
    ("the command ends before it trains", &["print_config", "dry_run", "gpu_memory", "gpu_rates", "json"]),
    ("the hub: tests/published.rs", &["push_to_hub", "hub_model_id", "hub_private_repo", "hub_strategy"]),
    ("directories of another family: tests/humanomni.rs", &["vision_tower", "audio_tower", "bert"]),
    (
        "every run here has another directory; a preset is the values that it sets",
        &["output_dir", "exp_name", "preset"],
    ),
];

/// Settings that change the order of sums. A run that resumes with another value says so.
const ROUNDING: [&str; 2] = ["max_stream_tokens", "gradient_checkpointing"];

const MODEL: &str = "checkpoints/qwen2_5_vl_tied";

fn table() -> Vec<(String, String, Map<String, Value>)> {
    serde_json::from_str(include_str!("free.json")).unwrap()
}

/// The files that the table names.
fn place() -> Place {
    let place = Place::new();
    let rows: String = ROWS.lines().take(2).map(|row| format!("{row}\n")).collect();
    place.write("rows.jsonl", &rows);
    fs::create_dir(place.path("moved")).unwrap();
    place.write("moved/rows.jsonl", &rows);
    fs::copy(place.path("shapes.png"), place.path("moved/shapes.png")).unwrap();
    let registry = "mine: {annotation_path: rows.jsonl, data_path: .}\n";
    place.write("own.yaml", registry);
    place.write("other.yaml", format!("# The same rows.\n{registry}"));
    place.write("same.yaml", "temperature: 1.0\n");
    place.write("zero.json", r#"{"zero_optimization": {"stage": 0}}"#);
    place.write(
        "mine.py",
        "def mine(completions, **_):\n    return [float(len(text) % 7) for text in completions]\n",
    );
    copy_dir(&golden(MODEL), &place.path("model"));
    place
}

/// The settings of a run, without those that the table removes.
fn settings(with: &Map<String, Value>, steps: u64) -> Map<String, Value> {
    let base = json!({
        "model_name_or_path": golden(MODEL).display().to_string(), "train_file": "rows.jsonl", "reward_funcs": "random", "allow_text_only": false,
        "num_generations": 2, "max_completion_length": 4, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "beta": 0,
        "learning_rate": 1e-3, "lr_scheduler_type": "constant", "save_steps": 1, "max_pixels": 12_544, "max_steps": steps,
    });
    let Value::Object(mut all) = base else { unreachable!() };
    all.remove("allow_text_only");
    all.extend(with.clone());
    all.retain(|_, value| !value.is_null());
    all
}

fn line(settings: &Map<String, Value>, dir: &str) -> String {
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let flags: String = settings.iter().map(|(name, value)| format!(" --{name} {}", text(value))).collect();
    format!("train{flags} --output_dir {dir}")
}

fn weights(dir: &Path) -> Vec<u8> {
    let read = |name: &str| fs::read(dir.join(name)).ok();
    read("model.safetensors").or_else(|| read("adapter_model.safetensors")).unwrap()
}

#[test]
fn the_table_has_every_free_setting_of_training() {
    let elsewhere = ELSEWHERE.iter().flat_map(|(_, names)| names.iter().map(|name| (*name).to_owned()));
    let listed: BTreeSet<String> = table().into_iter().map(|(name, ..)| name).chain(elsewhere).collect();
    let divided = ["per_device_train_batch_size", "gradient_accumulation_steps"];
    let of_train =
        |name: &&str| omnigrpo::settings::find(name).unwrap().is_of(Verb::Train) && !divided.contains(name);
    // Every run of the table has another number of steps.
    let free: BTreeSet<String> = binding::free(Verb::Train)
        .into_iter()
        .filter(of_train)
        .filter(|name| *name != "max_steps")
        .map(str::to_owned)
        .collect();
    assert_eq!(free.symmetric_difference(&listed).collect::<Vec<_>>(), Vec::<&String>::new());
}

#[test]
fn the_program_resumes_with_another_value_of_a_free_setting() {
    let place = place();
    place
        .run(&line(
            &settings(&serde_json::from_value(json!({"use_peft": true, "lora_r": 2})).unwrap(), 1),
            "adapter",
        ))
        .ok();
    copy_dir(&place.path("adapter"), &place.path("adapter2"));
    // Runs of three and of two steps, by what they need.
    let mut whole: BTreeMap<String, (Vec<u8>, String)> = BTreeMap::new();
    for (number, (_, _, with)) in table().into_iter().enumerate() {
        let key = Value::Object(with.clone()).to_string();
        whole.entry(key).or_insert_with(|| {
            let (all, part) = (format!("all-{number}"), format!("part-{number}"));
            place.run(&line(&settings(&with, 3), &all)).ok();
            place.run(&line(&settings(&with, 2), &part)).ok();
            (weights(&place.path(&all)), part)
        });
    }
    let resumes = &|(name, value, mut with): (String, String, Map<String, Value>)| {
        let (bits, part) = &whole[&Value::Object(with.clone()).to_string()];
        copy_dir(&place.path(part), &place.path(&name));
        with.insert(name.clone(), value.into());
        let told = place.run(&line(&settings(&with, 3), &name)).ok().stderr;
        assert!(told.contains("at step 2 of 3"), "{name}: {told}");
        if ROUNDING.contains(&name.as_str()) {
            assert!(
                told.contains(&format!("resuming with --{name}")) && told.contains("differ by rounding"),
                "{name}: {told}"
            );
        } else {
            assert!(weights(&place.path(&name)) == *bits, "{name} changes the bits");
        }
    };
    let (left, right): (Vec<_>, Vec<_>) =
        table().into_iter().enumerate().partition(|(number, _)| number % 2 == 0);
    std::thread::scope(|threads| {
        for rows in [left, right] {
            threads.spawn(move || rows.into_iter().for_each(|(_, row)| resumes(row)));
        }
    });
}

/// A run of version 0.2.0, written by its program (`train`, with the flags in its `config.yaml`), resumes in the middle of a rollout, by the
/// same command and by its own file of settings. The files that a checkpoint copies from the model are added here, and the sums of the
/// checkpoint are checked.
#[test]
fn a_run_of_version_0_2_0_resumes() {
    let place = Place::new();
    let release = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/run-0.2.0");
    copy_dir(&golden(MODEL), &place.path("model"));
    fs::copy(release.join("rows.jsonl"), place.path("rows.jsonl")).unwrap();
    let flags = "train --model_name_or_path model --train_file rows.jsonl --reward_funcs random --num_generations 2 --max_completion_length 4 \
                 --per_device_train_batch_size 1 --gradient_accumulation_steps 2 --beta 0 --learning_rate 1e-3 --lr_scheduler_type constant \
                 --save_steps 1 --save_total_limit 1 --max_pixels 12544 --num_iterations 2 --use_peft --lora_r 2 --lora_alpha 4 --max_steps 5";
    for (dir, line) in [("run", flags), ("settings", "train --config settings/config.yaml --max_steps 5")] {
        copy_dir(&release.join("run"), &place.path(dir));
        for name in [
            "chat_template.jinja",
            "generation_config.json",
            "preprocessor_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
        ] {
            fs::copy(place.path("model").join(name), place.path(dir).join("checkpoint-3").join(name))
                .unwrap();
        }
        let told = place.run(&format!("{line} --output_dir {dir}")).ok().stderr;
        assert!(
            told.contains("at step 3 of 5")
                && told.contains("using --orientation stored")
                // The file of the run names it, so there it is no surprise.
                && told.contains("using --lora_dropout 0.05: the run resumes from a checkpoint with this setting") == (dir == "run"),
            "{dir}: {told}"
        );
        let state: Value =
            serde_json::from_slice(&place.bytes(&format!("{dir}/checkpoint-5/trainer_state.json"))).unwrap();
        assert_eq!(state["version"], env!("CARGO_PKG_VERSION"));
    }
    assert!(weights(&place.path("run")) == weights(&place.path("settings")));
    // A setting on which the result depends is an error that names it.
    place
        .run(
            &format!("{flags} --output_dir run --max_steps 6 --lora_alpha 8")
                .replace("--max_steps 5", "")
                .replace("--lora_alpha 4 ", ""),
        )
        .fails(1, &["lora_alpha: 4.0 → 8.0", "--resume_from_checkpoint never"]);
}

/// Lines of the console.
#[derive(Clone, Default)]
struct Told(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Told {
    fn write(&mut self, text: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(text)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn the_library_resumes_with_another_value_of_a_free_setting() {
    let place = place();
    let resolved = |with: &Map<String, Value>, steps: u64| -> Settings {
        let mut given = settings(with, steps);
        given.retain(|_, value| value.as_str().is_none_or(|text| !text.contains(".jsonl")));
        resolve(Verb::Train, Layer::of(Verb::Train, given), Environment::default()).unwrap().settings
    };
    let plan = |settings: &Settings, dir: &str| {
        let mut plan = TrainPlan::in_dir(place.path(dir));
        (plan.algorithm, plan.optimizer, plan.selection) =
            (settings.algorithm.clone(), settings.optimizer.clone(), settings.selection.clone());
        (plan.run, plan.eval) = (settings.run.clone(), settings.eval.clone());
        plan
    };
    let train = |settings: &Settings, plan: TrainPlan| {
        let checkpoint = Checkpoint::open(&golden(MODEL)).unwrap();
        let model = Model::load(&checkpoint, &LoadOptions::default()).unwrap();
        let prompts = PromptBuilder::open(&checkpoint, settings.prompts.clone()).unwrap();
        let rows = Dataset::open(&[DatasetSpec::file(place.path("rows.jsonl"))], &settings.read).unwrap();
        let rewards = build_rewards(&["random"], &RewardOptions::default()).unwrap();
        let told = Told::default();
        let mut front = Front::default();
        front.console = Console::plain(told.clone());
        let summary =
            omnigrpo::train(Inputs::new(model, prompts, rows, rewards), plan, front).unwrap().summary;
        let told = String::from_utf8(told.0.lock().unwrap().clone()).unwrap();
        (summary.steps_here, told)
    };
    let none = Map::new();
    let (all, part) = (resolved(&none, 3), resolved(&none, 2));
    train(&all, plan(&all, "all"));
    train(&part, plan(&part, "part"));
    let bits = weights(&place.path("all"));
    let mut differing = 0;
    for (name, value, with) in table().into_iter().filter(|(.., with)| with.is_empty()) {
        let mut with = with;
        with.insert(name.clone(), value.into());
        // The others are no part of a plan.
        let field = omnigrpo::settings::find(&name).unwrap().place.field;
        if !["algorithm", "optimizer", "run", "eval"].contains(&field.split('.').next().unwrap()) {
            continue;
        }
        let own = resolved(&with, 3);
        let plan = plan(&own, &name);
        differing += 1;
        copy_dir(&place.path("part"), &place.path(&name));
        let (steps, told) = train(&own, plan);
        assert_eq!(steps, 1, "{name}: {told}");
        assert!(
            ROUNDING.contains(&name.as_str()) || weights(&place.path(&name)) == bits,
            "{name} changes the bits"
        );
    }
    assert!(differing >= 12, "{differing}");
    // A setting on which the result depends is an error that names it.
    let mut other = resolved(&none, 3);
    other.optimizer.learning_rate = 2e-3;
    copy_dir(&place.path("part"), &place.path("rate"));
    let checkpoint = Checkpoint::open(&golden(MODEL)).unwrap();
    let model = Model::load(&checkpoint, &LoadOptions::default()).unwrap();
    let prompts = PromptBuilder::open(&checkpoint, other.prompts.clone()).unwrap();
    let rows = Dataset::open(&[DatasetSpec::file(place.path("rows.jsonl"))], &other.read).unwrap();
    let rewards = build_rewards(&["random"], &RewardOptions::default()).unwrap();
    let inputs = Inputs::new(model, prompts, rows, rewards);
    let error = omnigrpo::train(inputs, plan(&other, "rate"), Front::default()).err().unwrap().to_string();
    assert!(error.contains("learning_rate: 0.001 → 0.002"), "{error}");
}
