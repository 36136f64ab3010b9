//! Whole runs on a tiny checkpoint: records, resuming, broken rows, checkpoints, trouble.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

#[path = "run/algorithms.rs"]
mod algorithms;
#[path = "run/events.rs"]
mod events;
#[path = "run/exact.rs"]
mod exact;
#[path = "run/health.rs"]
mod health;
#[path = "run/healthy.rs"]
mod healthy;
#[path = "run/machine.rs"]
mod machine;
#[path = "run/ranks.rs"]
mod ranks;
#[path = "run/resume.rs"]
mod resume;
mod setup;
#[path = "run/teachers.rs"]
mod teachers;
#[path = "run/turns.rs"]
mod turns;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use omnigrpo_data::Order;
use omnigrpo_grpo::Kl;
use omnigrpo_guard::told;
use omnigrpo_models::{GroupStream, Model, PackedStream, ReferencePlace, WeightDtype};
use omnigrpo_observe::{Console, DebugLog, Metric, PhaseTimer, Tracked, Tracker, Trackers};
use omnigrpo_rewards::{Reward, RewardError, RewardInput, RewardSet};
use omnigrpo_rollout::SamplingParams;
use omnigrpo_testkit::golden;
use omnigrpo_train::{
    AdamW, AdamWConfig, Collector, EvalOptions, EvalPlan, EvalWhen, GradDtype, Making, Objective, Observer,
    Optim, PreparedRow, ResumeFrom, Rollouts, RowSource, RunSummary, SaveWhen, Selection, TrainError,
    TrainSetup, replay, train, update,
};
use serde_json::{Value, json};
use setup::{
    algorithm, checkpoint, lines, number, optimizer, prompts, questions, raw_tensors, run, tensors, timeless,
};
use tempfile::TempDir;

/// The first update, at the full rate.
const AT: omnigrpo_train::UpdateAt = omnigrpo_train::UpdateAt { step: 0, learning_rate_factor: 1.0 };

const NAME: &str = "qwen2_5_vl_tied";

/// A folder with questions, and runs beside it.
struct Place {
    dir: TempDir,
    file: PathBuf,
}

impl Place {
    fn new() -> Self {
        let dir = TempDir::new().unwrap();
        let file = questions(dir.path());
        Self { dir, file }
    }

    fn out(&self, run: &str) -> PathBuf {
        self.dir.path().join(run)
    }

    fn setup(&self, run: &str) -> TrainSetup {
        setup::setup(NAME, &self.file, self.dir.path(), &self.out(run))
    }
}

/// Replaces the model of a run, and what builds its prompts.
fn run_model(setup: &mut TrainSetup, name: &str) {
    let dir = checkpoint(name);
    setup.model = omnigrpo_testkit::load(&dir, WeightDtype::Auto).unwrap();
    setup.prompts = Arc::new(prompts(&dir, setup.algorithm.sampling.max_completion_length));
}

/// A reward from a closure over the completion.
struct By<F>(F);

impl<F: Fn(&RewardInput) -> f64 + Send + Sync> Reward for By<F> {
    fn name(&self) -> &str {
        "by"
    }

    fn range(&self) -> (f64, f64) {
        (f64::NEG_INFINITY, f64::INFINITY)
    }

    fn score(&self, batch: &[RewardInput<'_>]) -> Result<Vec<Option<f64>>, RewardError> {
        Ok(batch.iter().map(|input| Some((self.0)(input))).collect())
    }
}

fn reward(f: impl Fn(&RewardInput) -> f64 + Send + Sync + 'static) -> RewardSet {
    RewardSet::new(vec![Box::new(By(f))], &[]).unwrap()
}

fn names(dir: &Path) -> BTreeSet<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
}

fn checkpoints(dir: &Path) -> Vec<String> {
    names(dir).into_iter().filter(|n| n.starts_with("checkpoint-")).collect()
}

#[test]
fn a_run_leaves_metrics_rollouts_and_a_model() {
    let place = Place::new();
    let out = place.out("run");
    let mut setup = place.setup("run");
    setup.run.max_steps = Some(3);
    let summary = run(setup).unwrap();
    assert_eq!((summary.steps, summary.interrupted), (3, false));

    let rows = lines(&out.join("metrics.jsonl"));
    assert_eq!(rows.len(), 3);
    for (i, row) in rows.iter().enumerate() {
        assert_eq!(number(row, "step"), i as f64 + 1.0);
        for key in [
            "epoch",
            "loss",
            "grad_norm",
            "learning_rate",
            "num_tokens",
            "reward",
            "reward_std",
            "frac_reward_zero_std",
            "rewards/random/mean",
            "rewards/random/std",
            "kl",
            "entropy",
            "completions/mean_length",
            "completions/min_length",
            "completions/max_length",
            "completions/clipped_ratio",
            "completions/mean_terminated_length",
            "clip_ratio/low_mean",
            "clip_ratio/low_min",
            "clip_ratio/high_mean",
            "clip_ratio/high_max",
            "clip_ratio/region_mean",
            "sampling/sampling_logp_difference/mean",
            "sampling/sampling_logp_difference/max",
            "grpo/policy_seq_log_prob",
            "grpo/kl_div",
            "grpo/total_reward",
            "grpo/advantage",
            "grpo/total_loss",
            "step_time",
            "time/rollout",
            "time/backward",
            "time/optimizer",
            "time/records",
        ] {
            assert!(number(row, key).is_finite(), "{key}");
        }
        assert!(number(row, "sampling/sampling_logp_difference/max") <= 1e-4);
        // One optimizer step per rollout is on-policy.
        assert_eq!(number(row, "clip_ratio/region_mean"), 0.0);
        let factor = 1.0 - i as f64 / 3.0;
        assert!((number(row, "learning_rate") - 1e-3 * factor).abs() < 1e-12);
        assert_eq!(number(row, "data/skipped"), 0.0);
    }
    // The policy starts as its own reference, whose numbers decoding rounds in another way, and advantages of a group sum to 0.
    assert!(number(&rows[0], "kl") < 1e-9, "{}", rows[0]);
    assert!(number(&rows[0], "loss").abs() < 1e-6);
    assert!(number(&rows[1], "kl") > 0.0);

    let completions = lines(&out.join("rollouts/step-000001.jsonl"));
    assert_eq!(completions.len(), 6);
    let mean = completions.iter().map(|line| number(line, "reward")).sum::<f64>() / 6.0;
    assert!((mean - number(&rows[0], "reward")).abs() < 1e-12);

    let mut expected: BTreeSet<String> = names(&checkpoint(NAME));
    expected.extend(
        ["metrics.jsonl", "events.jsonl", "skipped.jsonl", "rollouts", "config.yaml", "README.md", ".lock"]
            .map(String::from),
    );
    assert_eq!(names(&out), expected);
    assert_eq!(std::fs::read_to_string(out.join("config.yaml")).unwrap(), "settings: of this test\n");
    let (before, after) =
        (tensors(&checkpoint(NAME).join("model.safetensors")), tensors(&out.join("model.safetensors")));
    assert!(after.keys().eq(before.keys()));
    for (name, data) in &after {
        assert!(*data != before[name], "{name} has not moved");
    }
    omnigrpo_testkit::load(&out, WeightDtype::Auto).unwrap();
}

/// Keeps what it is told.
struct Told(Arc<Mutex<Vec<Tracked>>>);

impl Tracker for Told {
    fn name(&self) -> &'static str {
        "told"
    }

    fn take(&mut self, event: &Tracked) -> Result<(), String> {
        self.0.lock().unwrap().push(event.clone());
        Ok(())
    }
}

#[test]
fn numbers_of_tokens_are_written_and_trackers_told() {
    let place = Place::new();
    let told = Arc::new(Mutex::new(Vec::new()));
    let with_numbers = || {
        let mut setup = place.setup("run");
        (setup.run.num_iterations, setup.run.records.logging_steps, setup.run.save.when) =
            (2, 2, SaveWhen::Steps(2));
        (setup.algorithm.token_stats, setup.run.records.debug_log) =
            (true, Some(DebugLog::new(place.out("debug.txt"))));
        setup
    };
    let mut setup = with_numbers();
    setup.run.max_steps = Some(4);
    setup.run.records.grpo_logging_steps = 2;
    let keeps = Arc::clone(&told);
    setup.trackers =
        Box::new(|| Trackers::start(vec![Box::new(Told(keeps))], &Console::plain(std::io::sink())));
    run(setup).unwrap();

    let out = place.out("run");
    assert_eq!(names(&out.join("tokens")).len(), 4);
    let of = |step: u64| lines(&out.join(format!("tokens/step-{step:06}.jsonl")));
    let list = |row: &Value, name: &str| -> Option<Vec<f64>> {
        Some(row.get(name)?.as_array()?.iter().map(|x| x.as_f64().unwrap()).collect())
    };
    for step in [1, 2] {
        let rollouts = lines(&out.join("rollouts/step-000001.jsonl"));
        let tokens = of(step);
        assert_eq!(tokens.len(), rollouts.len());
        for row in &tokens {
            let same = |other: &&Value| ["group", "sample"].iter().all(|name| other[*name] == row[*name]);
            let rollout = rollouts.iter().find(same).unwrap();
            let text: String =
                row["tokens"].as_array().unwrap().iter().map(|t| t.as_str().unwrap()).collect();
            assert!(text.starts_with(rollout["completion"].as_str().unwrap()), "{text:?}");
            let length = rollout["length"].as_u64().unwrap() as usize;
            let before = ["sampled_logprobs", "old_logprobs"];
            let (is, is_not) = if step == 1 { (before[0], before[1]) } else { (before[1], before[0]) };
            assert!(list(row, is_not).is_none(), "{is_not}");
            let [now, before, entropies, reference] =
                ["logprobs", is, "entropies", "reference_logprobs"].map(|n| list(row, n).unwrap());
            assert!([&now, &before, &entropies, &reference].iter().all(|all| all.len() == length));
            // The first update sees the weights that sampled, which are also the reference's; the second has moved on.
            let far = |other: &[f64]| now.iter().zip(other).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            match step {
                1 => assert!(far(&before) < 2e-3 && far(&reference) < 2e-3),
                _ => assert!(far(&before) > 0.0),
            }
        }
    }
    // Two windows of two steps, their `grpo/` metrics, and completions of the rollout at step 3 are none of a window's.
    let told = told.lock().unwrap();
    let windows: Vec<(u64, f64)> = told
        .iter()
        .filter_map(|event| match event {
            Tracked::Metrics { step, metrics, .. } => {
                let reward = metrics.iter().find(|(name, _)| name == "reward")?.1?;
                Some((*step, reward))
            }
            Tracked::Completions { .. } => None,
        })
        .collect();
    let rows = lines(&out.join("metrics.jsonl"));
    let mean = |a: usize| (number(&rows[a], "reward") + number(&rows[a + 1], "reward")) / 2.0;
    assert_eq!(windows, [(2, mean(0)), (4, mean(2))]);
    let debug = std::fs::read_to_string(place.out("debug_random.txt")).unwrap();
    assert_eq!(debug.matches(" Random reward: ").count(), 2 * 2 * 3, "every completion of both rollouts");

    // Logs after the checkpoint are written again.
    std::fs::remove_dir_all(out.join("checkpoint-4")).unwrap();
    let before = of(4);
    let mut setup = with_numbers();
    setup.run.max_steps = Some(4);
    setup.run.records.grpo_logging_steps = 2;
    run(setup).unwrap();
    assert_eq!(of(4), before);
}

#[test]
fn what_is_frozen_stays_to_the_bit() {
    let place = Place::new();
    let mut setup = place.setup("run");
    setup.run.max_steps = Some(2);
    setup.selection = Selection { projector: true, ..Selection::NONE };
    run(setup).unwrap();
    let (before, after) = (
        tensors(&checkpoint(NAME).join("model.safetensors")),
        tensors(&place.out("run").join("model.safetensors")),
    );
    for (name, data) in &after {
        assert_eq!(*data != before[name], name.starts_with("visual.merger."), "{name}");
    }
}

/// Six updates in one go, and the same from the checkpoint after the third.
fn resume_is_exact(place: &Place, change: impl Fn(&mut TrainSetup), what: &str) {
    let new = |run: &str| {
        let mut setup = place.setup(run);
        setup.run.save.when = SaveWhen::Steps(3);
        change(&mut setup);
        setup
    };
    run(new("whole")).unwrap();
    let whole = place.out("whole");
    assert_eq!(checkpoints(&whole), ["checkpoint-3", "checkpoint-6"], "{what}");

    resumes_from(place, 3, "part", new, what);
}

/// Resumes a copy of the run `whole` from a step's checkpoint, and compares the ends of both.
fn resumes_from(place: &Place, step: usize, name: &str, new: impl Fn(&str) -> TrainSetup, what: &str) {
    resumes_by(place, step, name, || run(new(name)).unwrap(), what);
}

fn resumes_by(place: &Place, step: usize, name: &str, run: impl FnOnce() -> RunSummary, what: &str) {
    // The copy looks like a run that was killed in the step after the next: it has later rows and no later checkpoint.
    let (whole, part) = (place.out("whole"), place.out(name));
    let from = format!("checkpoint-{step}");
    omnigrpo_testkit::copy_dir(&whole.join(&from), &part.join(&from));
    let metrics = std::fs::read_to_string(whole.join("metrics.jsonl")).unwrap();
    let mut cut: String = metrics.lines().take(step + 1).map(|line| format!("{line}\n")).collect();
    cut.push_str(&metrics.lines().nth(step + 1).unwrap()[..40]);
    std::fs::write(part.join("metrics.jsonl"), cut).unwrap();
    std::fs::copy(whole.join("skipped.jsonl"), part.join("skipped.jsonl")).unwrap();
    let summary = run();
    assert_eq!((summary.steps, summary.steps_here), (6, 6 - step as u64), "{what}");

    assert_eq!(timeless(&part), timeless(&whole), "{what}, from step {step}");
    assert_eq!(lines(&part.join("skipped.jsonl")), lines(&whole.join("skipped.jsonl")), "{what}");
    // A run with adapters saves only these and the weights that are trained as a whole.
    let weights = |folder: &str| -> Vec<String> {
        let files = names(&whole.join(folder)).into_iter().filter(|name| name.ends_with("model.safetensors"));
        files.map(|name| format!("{folder}{name}")).collect()
    };
    let files =
        [weights(""), weights("checkpoint-6/"), vec!["checkpoint-6/optimizer.safetensors".to_owned()]];
    assert!(files.iter().all(|files| !files.is_empty()), "{what}");
    for file in files.concat() {
        let same = raw_tensors(&part.join(&file)) == raw_tensors(&whole.join(&file));
        assert!(same, "{what}: {file} differs from step {step}");
    }
    let state = |dir: &Path| -> Value {
        serde_json::from_slice(&std::fs::read(dir.join("checkpoint-6/trainer_state.json")).unwrap()).unwrap()
    };
    assert_eq!(state(&part), state(&whole), "{what}, from step {step}");
    let moved = weights("checkpoint-6/").into_iter().any(|file| {
        let before = file.replace("checkpoint-6", &format!("checkpoint-{step}"));
        raw_tensors(&whole.join(before)) != raw_tensors(&whole.join(file))
    });
    assert!(moved, "{what}: nothing has moved");
}

#[test]
fn resuming_is_exact() {
    resume_is_exact(&Place::new(), |_| {}, "plain");
}

#[test]
fn resuming_remembers_broken_rows() {
    let place = with_a_broken_row();
    resume_is_exact(&place, |_| {}, "a broken row");
    assert_eq!(number(timeless(&place.out("part")).last().unwrap(), "data/skipped"), 1.0);
}

#[test]
fn resuming_in_the_middle_of_a_rollout_is_exact() {
    for (name, recall) in [(NAME, true), ("qwen3_5", true), ("qwen3_5", false)] {
        resume_is_exact(
            &Place::new(),
            |setup| {
                run_model(setup, name);
                // Updates 1-2, 3-4 and 5-6 share a rollout each; the checkpoint is between 3 and 4.
                setup.run.num_iterations = 2;
                (setup.algorithm.recompute, setup.algorithm.recall) = (true, recall);
            },
            &format!("{name}, two updates per rollout"),
        );
    }
}

/// The reference has the numbers of the policy, to the last bit, until an update moves the policy. This holds for prompts and turns
/// with and without pictures, in one stream and in several. A recalled rollout has the numbers of decoding, which sums in another order.
#[test]
fn a_reference_begins_with_the_bits_of_the_policy() {
    type Change = fn(&mut TrainSetup);
    let changes: [(&str, Change); 4] = [
        ("one stream", |_| {}),
        ("a recalled rollout", |s| s.algorithm.recall = true),
        ("several streams", |s| s.algorithm.max_stream_tokens = Some(24)),
        ("turns", |s| drop(turns::interact(s, None))),
    ];
    for name in [NAME, "qwen3_5"] {
        let place = Place::new();
        for (what, change) in changes {
            let mut setup = place.setup(what);
            run_model(&mut setup, name);
            setup.algorithm.recall = false;
            (setup.run.max_steps, setup.run.prompts_per_step) = (Some(2), 6);
            change(&mut setup);
            let most = if setup.algorithm.recall { 1e-9 } else { 0.0 };
            run(setup).unwrap();
            let rows = lines(&place.out(what).join("metrics.jsonl"));
            assert!((0.0..=most).contains(&number(&rows[0], "kl")), "{name}, {what}: {}", rows[0]);
            assert!(number(&rows[1], "kl") > 1e-9, "{name}, {what}: {}", rows[1]);
        }
    }
}

/// Groups without variance need no log-probabilities for their loss, but the metrics of the updates to come do.
#[test]
fn resuming_in_the_middle_of_a_rollout_without_variance_is_exact() {
    for everywhere in [true, false] {
        resume_is_exact(
            &Place::new(),
            move |setup| {
                setup.run.num_iterations = 2;
                setup.algorithm.loss.beta = 0.0;
                setup.algorithm.max_stream_tokens = Some(1);
                let equal = move |input: &RewardInput| {
                    let same = everywhere && input.key.step > 0 || input.prompt.contains("colour");
                    if same { 0.5 } else { input.key.sample as f64 }
                };
                setup.rewards = reward(equal);
            },
            "two updates per rollout without variance",
        );
    }
}

/// The record of the rollout replaces a pass that would add nothing: metrics are those of the pass, except for rounding.
#[test]
fn what_was_drawn_counts_like_a_pass() {
    let place = Place::new();
    let train = |name: &str, beta: f64| {
        let mut setup = place.setup(name);
        (setup.run.max_steps, setup.algorithm.loss.beta) = (Some(1), beta);
        setup.algorithm.max_stream_tokens = Some(1);
        setup.algorithm.sampling.temperature = 0.7;
        setup.rewards =
            reward(|input| if input.prompt.contains("colour") { 0.5 } else { input.key.sample as f64 });
        run(setup).unwrap();
        let weights = tensors(&place.out(name).join("model.safetensors"));
        (lines(&place.out(name).join("metrics.jsonl")).remove(0), weights)
    };
    let (drawn, ran) = (train("drawn", 0.0), train("ran", 1e-300));
    assert_eq!(number(&drawn.0, "frac_reward_zero_std"), 0.5);
    assert!(drawn.1 == ran.1, "weights differ");
    for key in ["entropy", "grpo/policy_seq_log_prob", "loss", "clip_ratio/region_mean", "grad_norm"] {
        let (a, b) = (number(&drawn.0, key), number(&ran.0, key));
        assert!((a - b).abs() <= 1e-5 * b.abs(), "{key}: {a} for {b}");
    }
    assert_eq!(number(&drawn.0, "params_without_grad"), 0.0);
    assert!(number(&drawn.0, "num_tokens") < number(&ran.0, "num_tokens"));
}

/// Where a rollout takes a row twice, both groups are drawn and scored by random numbers of their own.
#[test]
fn a_row_drawn_twice_is_sampled_twice() {
    let place = Place::new();
    let mut setup = place.setup("run");
    setup.rows = vec![0, 4];
    (setup.run.prompts_per_step, setup.run.max_steps) = (4, Some(1));
    run(setup).unwrap();
    let rows = lines(&place.out("run").join("rollouts/step-000001.jsonl"));
    assert_eq!(rows.len(), 12);
    for id in ["colour-0", "sum-0"] {
        let own: Vec<&Value> = rows.iter().filter(|row| row["id"] == id).collect();
        let of = |key: &str, group: usize| {
            own[3 * group..3 * group + 3].iter().map(|r| &r[key]).collect::<Vec<_>>()
        };
        assert_eq!(own.len(), 6);
        assert_ne!(of("completion", 0), of("completion", 1), "{id}");
        assert_ne!(of("reward", 0), of("reward", 1), "{id}");
    }
    // The first time is as if it were the only one.
    let mut setup = place.setup("once");
    setup.rows = vec![0, 4];
    setup.run.max_steps = Some(1);
    run(setup).unwrap();
    let once = lines(&place.out("once").join("rollouts/step-000001.jsonl"));
    for (once, twice) in once.iter().zip(&rows) {
        assert_eq!((&once["completion"], &once["reward"]), (&twice["completion"], &twice["reward"]));
    }
}

/// The gap to the distribution that was sampled from is a metric of its own.
#[test]
fn the_gap_to_the_sampling_distribution_is_logged() {
    let place = Place::new();
    let gap = |name: &str, temperature: f32, top_k: usize| {
        let mut setup = place.setup(name);
        setup.run.max_steps = Some(1);
        let sampling = &mut setup.algorithm.sampling;
        (sampling.temperature, sampling.logprob_temperature, sampling.top_k) =
            (temperature, Some(1.0), top_k);
        run(setup).unwrap();
        let row = lines(&place.out(name).join("metrics.jsonl")).remove(0);
        assert!(number(&row, "sampling/sampling_logp_difference/max") < 1e-4);
        number(&row, "sampling/distribution_logp_difference/mean")
    };
    assert!(gap("same", 1.0, 0) < 1e-5);
    // Five tokens at three times the temperature are far from all of them.
    let apart = gap("apart", 3.0, 5);
    assert!((0.3..5.0).contains(&apart), "{apart}");
}

#[test]
fn resuming_with_bf16_weights_is_exact() {
    resume_is_exact(
        &Place::new(),
        |setup| {
            setup.model =
                omnigrpo_testkit::load(&checkpoint("qwen2_5_vl_tied_bf16"), WeightDtype::Auto).unwrap();
            setup.optimizer.learning_rate = 1e-4;
        },
        "bf16 weights with masters",
    );
}

#[test]
fn resuming_with_few_bits_is_exact() {
    resume_is_exact(
        &Place::new(),
        |setup| {
            setup.model =
                omnigrpo_testkit::load(&checkpoint("qwen2_5_vl_tied_bf16"), WeightDtype::Auto).unwrap();
            setup.optimizer = in_few_bits();
        },
        "8-bit moments, bf16 gradients and random rounding",
    );
}

/// Returns settings with which a bf16 weight and its state take 6 bytes.
fn in_few_bits() -> AdamWConfig {
    AdamWConfig {
        learning_rate: 1e-4,
        pure_bf16: true,
        stochastic_rounding: true,
        optim: Optim::AdamW8bit,
        grad_dtype: GradDtype::Bfloat16,
        ..optimizer()
    }
}

/// Updates that rounding to nearest would cancel move a weight in the mean, and two parts of an update refuse gradients in bf16.
#[test]
fn small_updates_count_with_random_rounding() {
    const WEIGHT: &str = "model.embed_tokens.weight";
    let place = Place::new();
    let start = checkpoint("qwen2_5_vl_tied_bf16");
    let before = raw_tensors(&start.join("model.safetensors"))[WEIGHT].1.clone();
    let train = |name: &str, optimizer: AdamWConfig| {
        let mut setup = place.setup(name);
        setup.model = omnigrpo_testkit::load(&start, WeightDtype::Auto).unwrap();
        setup.optimizer = AdamWConfig { learning_rate: 1e-7, weight_decay: 0.0, ..optimizer };
        run(setup).unwrap();
        let after = raw_tensors(&place.out(name).join("model.safetensors"))[WEIGHT].1.clone();
        after.chunks_exact(2).zip(before.chunks_exact(2)).filter(|(a, b)| a != b).count()
    };
    let nearest = train("nearest", AdamWConfig { stochastic_rounding: false, ..in_few_bits() });
    let random = train("random", in_few_bits());
    assert!(nearest * 10 < random, "{nearest} weights moved when rounded to nearest, {random} at random");

    let mut setup = place.setup("parts");
    setup.optimizer = in_few_bits();
    setup.algorithm.split.settings.leaves = Some(2);
    let error = told(&run(setup).unwrap_err());
    assert!(error.contains("grad_dtype") && error.contains("bfloat16"), "{error}");
}

/// At a small rate a bf16 weight moves only through its f32 master.
#[test]
fn small_updates_of_bf16_weights_add_up_in_their_masters() {
    const WEIGHT: &str = "model.layers.0.input_layernorm.weight";
    let place = Place::new();
    let start = checkpoint("qwen2_5_vl_tied_bf16");
    let train = |name: &str, pure_bf16: bool| {
        let mut setup = place.setup(name);
        setup.model = omnigrpo_testkit::load(&start, WeightDtype::Auto).unwrap();
        setup.optimizer = AdamWConfig { learning_rate: 1e-5, weight_decay: 0.0, pure_bf16, ..optimizer() };
        setup.run.schedule.kind = omnigrpo_train::ScheduleKind::Constant;
        setup.run.save.when = SaveWhen::Steps(6);
        run(setup).unwrap();
        tensors(&place.out(name).join("checkpoint-6/optimizer.safetensors"))
    };
    let state = train("masters", false);
    let first = omnigrpo_testkit::load(&start, WeightDtype::Float32).unwrap();
    let norm = first.params().iter().find(|p| p.name() == WEIGHT).unwrap();
    // Six updates of at most about 1e-5 each.
    let moved = omnigrpo_testkit::max_diff(&state[&format!("{WEIGHT}.master")], &norm.read().f32());
    assert!((1e-5..=6.5e-5).contains(&moved), "{moved}");

    let state = train("pure", true);
    assert!(state.keys().all(|key| !key.ends_with(".master")));
    // Weights of a norm are near 1, where bf16 numbers are at least 2^-9 apart: no update gets there.
    let saved = raw_tensors(&place.out("pure").join("model.safetensors"));
    assert!(saved[WEIGHT] == raw_tensors(&start.join("model.safetensors"))[WEIGHT]);
    assert_eq!(saved[WEIGHT].0, "BF16");
}

/// A step of a model that is large enough for its work to be split.
#[test]
fn a_step_does_not_depend_on_threads() {
    let within = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let dir = TempDir::new().unwrap();
            let setup = setup::setup(NAME, &golden("replay/rows_ids.jsonl"), &golden(""), dir.path());
            let model = omnigrpo_testkit::larger_model(NAME);
            Selection::ALL.apply(&model).unwrap();
            let reference = model.reference(ReferencePlace::Memory(model.device())).unwrap();
            let mut adamw = AdamW::new(optimizer(), model.params());
            let mut timer = PhaseTimer::start(Instant::now());
            let norms: Vec<u64> = (0..2)
                .map(|_| {
                    let rows = prepared(&setup);
                    let mut rollouts =
                        replay(&model, &setup.prompts, &setup.algorithm, rows, &mut timer).unwrap();
                    let (algorithm, timer) = (&setup.algorithm, &mut timer);
                    let reference = Some(&reference);
                    update((&model, reference), &mut adamw, AT, algorithm, &mut rollouts, timer)
                        .unwrap()
                        .grad_norm
                        .to_bits()
                })
                .collect();
            (norms, omnigrpo_testkit::weight_bits(&model))
        })
    };
    assert!(within(1) == within(2));
}

#[test]
fn a_run_that_is_asked_to_stop_resumes_where_it_was() {
    let place = Place::new();
    run(place.setup("whole")).unwrap();

    let stop = Arc::new(AtomicBool::new(false));
    let mut setup = place.setup("part");
    // The signal comes while the second rollout is scored.
    let (flag, calls) = (Arc::clone(&stop), AtomicU64::new(0));
    let random = omnigrpo_rewards::build(&["random".to_owned()], &Default::default()).unwrap();
    struct Signal {
        inner: RewardSet,
        flag: Arc<AtomicBool>,
        calls: AtomicU64,
    }
    impl Reward for Signal {
        fn name(&self) -> &str {
            "random"
        }
        fn range(&self) -> (f64, f64) {
            self.inner.range()
        }
        fn score(&self, batch: &[RewardInput<'_>]) -> Result<Vec<Option<f64>>, RewardError> {
            if self.calls.fetch_add(1, Ordering::Relaxed) == 1 {
                self.flag.store(true, Ordering::Relaxed);
            }
            Ok(self.inner.score(batch)?.values.remove(0))
        }
    }
    setup.rewards = RewardSet::new(vec![Box::new(Signal { inner: random, flag, calls })], &[]).unwrap();
    let summary = train(setup, &Console::plain(std::io::sink()), &stop).unwrap().summary;
    assert_eq!((summary.steps, summary.interrupted), (2, true));
    assert_eq!(checkpoints(&place.out("part")), ["checkpoint-2"]);
    assert!(!place.out("part").join("model.safetensors").exists());

    run(place.setup("part")).unwrap();
    assert_eq!(timeless(&place.out("part")), timeless(&place.out("whole")));
    let weights = |run: &str| raw_tensors(&place.out(run).join("model.safetensors"));
    assert!(weights("part") == weights("whole"));
}

#[test]
fn the_newest_checkpoints_are_kept() {
    let place = Place::new();
    let mut setup = place.setup("run");
    setup.run.max_steps = Some(5);
    setup.run.save.when = SaveWhen::Steps(1);
    setup.run.save.limit = Some(2);
    run(setup).unwrap();
    assert_eq!(checkpoints(&place.out("run")), ["checkpoint-4", "checkpoint-5"]);
}

#[test]
fn a_half_written_checkpoint_is_not_resumed_from() {
    let place = Place::new();
    let new = |steps: u64| {
        let mut setup = place.setup("run");
        setup.run.max_steps = Some(steps);
        setup.run.save.when = SaveWhen::Steps(2);
        setup.run.schedule.kind = omnigrpo_train::ScheduleKind::Constant;
        setup
    };
    run(new(2)).unwrap();
    // Killed while checkpoint-4 was written: its temporary directory, or a directory without state, remains.
    let out = place.out("run");
    omnigrpo_testkit::copy_dir(&out.join("checkpoint-2"), &out.join("tmp-checkpoint-4"));
    std::fs::create_dir(out.join("checkpoint-3")).unwrap();
    std::fs::write(out.join("checkpoint-3/model.safetensors"), b"half").unwrap();
    let summary = run(new(4)).unwrap();
    assert_eq!(summary.steps, 4);
    assert_eq!(timeless(&out).len(), 4);
    assert!(out.join("checkpoint-4/trainer_state.json").is_file());
    assert!(!out.join("tmp-checkpoint-4").exists());
}

#[test]
fn a_damaged_checkpoint_is_an_error_not_a_crash() {
    let place = Place::new();
    let new = || {
        let mut setup = place.setup("run");
        (setup.run.num_iterations, setup.run.save.when) = (2, SaveWhen::Steps(1));
        setup
    };
    let mut first = new();
    first.run.max_steps = Some(1);
    run(first).unwrap();
    let out = place.out("run/checkpoint-1");
    let refused = |what: &str| {
        let error = run(new()).unwrap_err();
        assert!(!matches!(error, TrainError::Io { .. }), "{what}: {error}");
        assert!(error.to_string().contains("checkpoint-1"), "{what}: {error}");
    };

    let path = out.join("trainer_state.json");
    let whole = std::fs::read(&path).unwrap();
    let state: Value = serde_json::from_slice(&whole).unwrap();
    let write = |state: &Value| {
        std::fs::write(&path, state.to_string()).unwrap();
        resume::sign(&out);
    };
    for key in ["old", "ids", "texts", "truncated", "reward_totals", "reward_values"] {
        let mut cut = state.clone();
        cut["buffer"][key].as_array_mut().unwrap().pop().unwrap();
        write(&cut);
        refused(key);
    }
    let mut cut = state.clone();
    cut["buffer"]["old"][0][0].as_array_mut().unwrap().pop().unwrap();
    write(&cut);
    refused("an old log-probability");
    std::fs::write(&path, &whole[..whole.len() / 2]).unwrap();
    resume::sign(&out);
    refused("half a state");
    std::fs::write(&path, &whole).unwrap();
    resume::sign(&out);

    for file in ["optimizer.safetensors", "model.safetensors"] {
        let whole = std::fs::read(out.join(file)).unwrap();
        std::fs::write(out.join(file), &whole[..whole.len() - 7]).unwrap();
        refused(file);
        std::fs::write(out.join(file), &whole).unwrap();
    }
    assert_eq!(run(new()).unwrap().steps, 6);
}

#[test]
fn checkpoints_of_other_settings_end_the_run_or_are_set_aside() {
    let place = Place::new();
    let new = |beta: f64| {
        let mut setup = place.setup("run");
        setup.run.max_steps = Some(2);
        setup.run.save.when = SaveWhen::Steps(1);
        setup.run.resume.fingerprint.insert("beta".into(), json!(beta));
        setup
    };
    run(new(0.04)).unwrap();
    let out = place.out("run");
    // With equal settings, nothing is left to do.
    assert_eq!(run(new(0.04)).unwrap().steps, 2);
    assert!(!out.join("superseded-1").exists());

    // Naming a checkpoint of other settings is an error that says which.
    let mut named = new(0.1);
    named.run.resume.from = ResumeFrom::Path(out.join("checkpoint-1"));
    let message = told(&run(named).unwrap_err());
    assert!(message.contains("beta: 0.04 → 0.1"), "{message}");

    // So is resuming from the newest one. Nothing is moved.
    let message = told(&run(new(0.1)).unwrap_err());
    assert!(
        message.contains("beta: 0.04 → 0.1") && message.contains("start from the beginning"),
        "{message}"
    );
    assert!(!out.join("superseded-1").exists());
    // A program that trains again starts from the beginning.
    let mut again = new(0.1);
    again.run.resume.repeat_complete = true;
    run(again).unwrap();
    assert_eq!(checkpoints(&out.join("superseded-1")), ["checkpoint-1", "checkpoint-2"]);
    let mut start = new(0.1);
    start.run.resume.from = ResumeFrom::Start;
    run(start).unwrap();
    assert_eq!(checkpoints(&out.join("superseded-2")), ["checkpoint-1", "checkpoint-2"]);
    let steps: Vec<f64> = lines(&out.join("metrics.jsonl")).iter().map(|row| number(row, "step")).collect();
    assert_eq!(steps, [1.0, 2.0]);
}

/// One picture is no picture.
fn with_a_broken_row() -> Place {
    let place = Place::new();
    std::fs::write(place.dir.path().join("2.png"), b"\x89PNG\r\n\x1a\nnothing").unwrap();
    place
}

#[test]
fn a_broken_row_is_skipped_replaced_and_recorded() {
    let place = with_a_broken_row();
    let mut setup = place.setup("run");
    setup.run.max_steps = Some(4);
    run(setup).unwrap();
    let out = place.out("run");
    let skipped = lines(&out.join("skipped.jsonl"));
    assert_eq!(skipped.len(), 1, "{skipped:?}");
    assert_eq!(skipped[0]["id"], "colour-2");
    assert!(skipped[0]["reason"].as_str().unwrap().contains("2.png"), "{skipped:?}");
    // The next row in order takes its place in the same step.
    let step = number(&skipped[0], "step") as u64;
    let drawn = lines(&out.join(format!("rollouts/step-{step:06}.jsonl")));
    let replacement = &skipped[0]["replaced_by"];
    assert!(drawn.iter().any(|line| line["id"] == *replacement), "{skipped:?}");
    let found = number(&skipped[0], "step");
    let rows = lines(&out.join("metrics.jsonl"));
    assert_eq!(rows.len(), 4);
    for row in &rows {
        let expected = if number(row, "step") >= found { 1.0 } else { 0.0 };
        assert_eq!(number(row, "data/skipped"), expected);
    }
    // Every step has two prompts, never the broken one.
    for step in 1..=4 {
        let completions = lines(&out.join(format!("rollouts/step-{step:06}.jsonl")));
        assert_eq!(completions.len(), 6);
        assert!(completions.iter().all(|line| line["id"] != "colour-2"));
    }
}

#[test]
fn a_broken_row_stops_a_strict_run() {
    let place = with_a_broken_row();
    let mut setup = place.setup("strict");
    setup.run.rows.skip.strict = true;
    let message = told(&run(setup).unwrap_err());
    assert!(message.contains("colour-2") && message.contains("2.png"), "{message}");
    assert_eq!(lines(&place.out("strict").join("skipped.jsonl")).len(), 1);

    let mut setup = place.setup("share");
    setup.run.rows.skip.max_share = 0.05;
    let message = told(&run(setup).unwrap_err());
    assert!(
        message.contains("1 of 6 rows cannot be used") && message.contains("SkipPolicy::max_share"),
        "{message}"
    );

    // Known beforehand, it is never drawn and does not count against the limit of the run.
    let mut setup = place.setup("known");
    setup.run.rows.skip.strict = true;
    setup.run.rows.bad = vec![(2, "colour-2".into(), "not a PNG".into())];
    run(setup).unwrap();
    let skipped = lines(&place.out("known").join("skipped.jsonl"));
    assert_eq!((skipped.len(), &skipped[0]["step"]), (1, &json!(0)));
}

#[test]
fn no_usable_row_is_an_error() {
    let place = Place::new();
    let mut setup = place.setup("run");
    setup.run.rows.bad = (0..6).map(|row| (row, format!("row {row}"), "bad".to_owned())).collect();
    let message = told(&run(setup).unwrap_err());
    assert!(message.contains("no usable training row"), "{message}");
}

#[test]
fn a_loss_that_is_not_finite_stops_and_saves_the_rows() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("run");
    let mut setup = setup::setup(NAME, &golden("replay/rows_ids.jsonl"), &golden(""), &out);
    (setup.run.rows.replay, setup.run.prompts_per_step) = (true, 3);
    let norm = setup.model.params().iter().find(|p| p.name() == "model.norm.weight").unwrap();
    norm.store(&vec![f32::NAN; norm.len()]).unwrap();
    let error = run(setup).unwrap_err();
    assert!(matches!(error, TrainError::NonFiniteLoss { step: 1, .. }), "{error}");
    let saved = lines(&out.join("nonfinite-step-1.jsonl"));
    let ids: Vec<&str> = saved.iter().map(|line| line["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["image", "image", "image", "text", "text", "text", "video", "video", "video"]);
    assert!(error.to_string().contains("nonfinite-step-1.jsonl"), "{error}");
    assert!(!out.join("model.safetensors").exists());
    assert_eq!(lines(&out.join("metrics.jsonl")), Vec::<Value>::new());
}

fn prepared(setup: &TrainSetup) -> Vec<PreparedRow> {
    setup
        .rows
        .iter()
        .map(|&row| {
            let sample = setup.dataset.get(row).unwrap();
            let prompt = Arc::new(setup.prompts.build(&sample).unwrap());
            PreparedRow { sample, prompt, teacher: None, epoch: 0 }
        })
        .collect()
}

#[test]
fn a_gradient_that_is_not_finite_leaves_the_weights() {
    let dir = TempDir::new().unwrap();
    let mut setup = setup::setup(NAME, &golden("replay/rows_ids.jsonl"), &golden(""), dir.path());
    // Finite in f64, infinite in f32.
    setup.algorithm.alpha = 1e300;
    Selection::ALL.apply(&setup.model).unwrap();
    let before = omnigrpo_testkit::weight_bits(&setup.model);
    let mut adamw = AdamW::new(optimizer(), setup.model.params());
    let mut timer = PhaseTimer::start(Instant::now());
    let rows = prepared(&setup);
    let mut rollouts = replay(&setup.model, &setup.prompts, &setup.algorithm, rows, &mut timer).unwrap();
    let reference = setup.model.reference(ReferencePlace::Memory(setup.model.device())).unwrap();
    let result =
        update((&setup.model, Some(&reference)), &mut adamw, AT, &setup.algorithm, &mut rollouts, &mut timer);
    assert!(result.is_err());
    assert!(omnigrpo_testkit::weight_bits(&setup.model) == before);
    assert_eq!(adamw.state().count(), 0);
}

/// The KL term of a step is that of reference log-probabilities computed under the row's own medium.
#[test]
fn the_reference_sees_the_medium() {
    let selections = [(true, false, false), (true, true, false), (true, true, true), (false, true, false)];
    let mut seen = BTreeMap::new();
    for (llm, projector, towers) in selections {
        for image in ["shapes.png", "noise.png"] {
            let dir = TempDir::new().unwrap();
            let text = std::fs::read_to_string(golden("replay/rows_ids.jsonl")).unwrap();
            let row = text.lines().next().unwrap().replace("shapes.png", image);
            let row = row.replace("\"id\"", "\"min_pixels\": 3136, \"max_pixels\": 3136, \"id\"");
            let file = dir.path().join("rows.jsonl");
            std::fs::write(&file, format!("{row}\n")).unwrap();
            let setup = setup::setup(NAME, &file, &golden(""), dir.path());
            let model = &setup.model;
            Selection { llm, projector, towers, instruction: false, gate: None, patterns: Vec::new() }
                .apply(model)
                .unwrap();
            let reference = model.reference(ReferencePlace::Memory(model.device())).unwrap();
            for param in model.params().iter().filter(|p| p.trainable() && p.shape().len() == 2) {
                param.update(|w| w.iter_mut().for_each(|x| *x *= 1.05)).unwrap();
            }
            let rows = prepared(&setup);
            let prompt = Arc::clone(&rows[0].prompt);
            let mut timer = PhaseTimer::start(Instant::now());
            let mut rollouts = replay(model, &setup.prompts, &setup.algorithm, rows, &mut timer).unwrap();
            let completions: Vec<Vec<u32>> =
                rollouts.completions().map(|c| c.completion.ids.clone()).collect();
            let groups = [GroupStream {
                prompt: &prompt,
                completions: completions.iter().map(Vec::as_slice).collect(),
            }];
            let stream = PackedStream::new(&groups).unwrap();
            let score = |model: &Model| {
                let features = vec![model.encode_prompt(&prompt).unwrap()];
                model.score(&stream, &features, 1.0).unwrap().0
            };
            let (policy, fixed) = (score(model), score(&reference));
            let mut at = 0;
            let token_means = completions.iter().map(|c| {
                let span = at..at + c.len();
                at = span.end;
                let k3 = |t: usize| {
                    let x = f64::from(fixed[t]) - f64::from(policy[t]);
                    x.exp() - x - 1.0
                };
                span.clone().map(k3).sum::<f64>() / span.len() as f64
            });
            let expected = token_means.sum::<f64>() / 3.0;

            let mut adamw = AdamW::new(optimizer(), model.params());
            let outcome = update(
                (model, Some(&reference)),
                &mut adamw,
                AT,
                &setup.algorithm,
                &mut rollouts,
                &mut timer,
            )
            .unwrap();
            let metrics: BTreeMap<String, Option<f64>> = outcome.sums.metrics().into_iter().collect();
            let kl = metrics["kl"].unwrap();
            let what = format!("llm {llm}, projector {projector}, towers {towers}, {image}");
            assert!(expected > 1e-4, "{what}: {expected}");
            assert!((kl - expected).abs() <= 1e-4 * expected, "{what}: kl {kl}, expected {expected}");
            seen.insert((llm, projector, towers, image), fixed);
        }
    }
    // Another image, other reference log-probabilities; the reference does not depend on what is trained.
    for (llm, projector, towers) in selections {
        let of = |image| &seen[&(llm, projector, towers, image)];
        assert!(omnigrpo_testkit::max_diff(of("shapes.png"), of("noise.png")) > 1e-3);
        assert!(
            omnigrpo_testkit::max_diff(of("shapes.png"), &seen[&(true, false, false, "shapes.png")]) == 0.0
        );
    }
}

/// Recorded log-probabilities are the old ones: with the policy's own lowered or raised by a half, every ratio is
/// e^0.5 or e^-0.5 and the clipped loss can be written down.
#[test]
fn recorded_log_probabilities_make_the_ratio() {
    let text = std::fs::read_to_string(golden("replay/rows_ids.jsonl")).unwrap();
    let mut row: Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("rows.jsonl");
    std::fs::write(&file, format!("{row}\n")).unwrap();
    let setup = setup::setup(NAME, &file, &golden(""), dir.path());
    let prompt = Arc::clone(&prepared(&setup)[0].prompt);
    let completions: Vec<Vec<u32>> = serde_json::from_value(row["completion_ids"].clone()).unwrap();
    let groups =
        [GroupStream { prompt: &prompt, completions: completions.iter().map(Vec::as_slice).collect() }];
    let features = vec![setup.model.encode_prompt(&prompt).unwrap()];
    let (now, _) = setup.model.score(&PackedStream::new(&groups).unwrap(), &features, 1.0).unwrap();
    for shift in [0.5f64, -0.5] {
        let mut rest = now.as_slice();
        let old: Vec<Vec<f64>> = completions
            .iter()
            .map(|c| {
                let (head, tail) = rest.split_at(c.len());
                rest = tail;
                head.iter().map(|&x| f64::from(x) - shift).collect()
            })
            .collect();
        row["logprobs"] = json!(old);
        std::fs::write(&file, format!("{row}\n")).unwrap();
        let out = dir.path().join(format!("run{shift}"));
        let mut setup = setup::setup(NAME, &file, &golden(""), &out);
        (setup.run.rows.replay, setup.run.prompts_per_step, setup.run.max_steps) = (true, 1, Some(1));
        let advantages = [1.120_681_733_399_243_2, -0.800_486_952_428_030_9, -0.320_194_780_971_212_4];
        run(setup).unwrap();
        let metrics = lines(&out.join("metrics.jsonl")).remove(0);
        let ratio = shift.exp();
        let expected =
            -advantages.iter().map(|a: &f64| (ratio * a).min(ratio.clamp(0.8, 1.2) * a)).sum::<f64>() / 3.0;
        let loss = number(&metrics, "policy_loss");
        assert!((loss - expected).abs() < 1e-6, "shift {shift}: {loss}, expected {expected}");
        // Ratios above 1.2 are clipped where the advantage is positive, those below 0.8 where it is negative.
        let clipped = (number(&metrics, "clip_ratio/low_mean"), number(&metrics, "clip_ratio/high_mean"));
        let tokens: Vec<f64> = completions.iter().map(|c| c.len() as f64).collect();
        let (above, all) = (tokens[0], tokens.iter().sum::<f64>());
        let want = if shift > 0.0 { (0.0, above / all) } else { ((all - above) / all, 0.0) };
        assert!((clipped.0 - want.0).abs() < 1e-12 && (clipped.1 - want.1).abs() < 1e-12, "{clipped:?}");
    }
}

#[test]
fn later_updates_of_a_rollout_compare_with_the_first() {
    let place = Place::new();
    let mut setup = place.setup("run");
    (setup.run.num_iterations, setup.run.max_steps) = (2, Some(4));
    run(setup).unwrap();
    let rows = lines(&place.out("run").join("metrics.jsonl"));
    for (i, row) in rows.iter().enumerate() {
        let loss = number(row, "policy_loss").abs();
        // Ratios are 1 at first, and advantages sum to 0; then the policy has moved.
        assert_eq!(loss < 1e-6, i % 2 == 0, "step {}: {loss}", i + 1);
        assert_eq!(row.get("sampling/sampling_logp_difference/max").is_some(), i % 2 == 0);
    }
    // A rollout serves two updates.
    assert_eq!(number(&rows[0], "reward"), number(&rows[1], "reward"));
    assert_ne!(number(&rows[1], "reward"), number(&rows[2], "reward"));
    let logged = ["step-000001.jsonl", "step-000003.jsonl"].map(String::from);
    assert_eq!(names(&place.out("run").join("rollouts")), BTreeSet::from(logged));
}

#[test]
fn without_beta_there_is_no_reference_and_no_kl() {
    let place = Place::new();
    let mut setup = place.setup("run");
    setup.run.max_steps = Some(2);
    (setup.algorithm.loss.beta, setup.algorithm.loss.kl) = (0.0, Kl::Off);
    run(setup).unwrap();
    for row in lines(&place.out("run").join("metrics.jsonl")) {
        assert!(row.get("kl").is_none_or(Value::is_null), "{row}");
        assert!(number(&row, "grad_norm") > 0.0);
    }
}

#[test]
fn groups_without_variance_do_not_move_the_policy() {
    let place = Place::new();
    let mut setup = place.setup("run");
    setup.run.max_steps = Some(1);
    setup.optimizer.weight_decay = 0.0;
    setup.algorithm.loss.beta = 0.0;
    setup.rewards = reward(|_| 0.5);
    run(setup).unwrap();
    let row = &lines(&place.out("run").join("metrics.jsonl"))[0];
    assert_eq!(number(row, "frac_reward_zero_std"), 1.0);
    assert_eq!((number(row, "grad_norm"), number(row, "reward"), number(row, "loss")), (0.0, 0.5, 0.0));
    let weights = |dir: &Path| tensors(&dir.join("model.safetensors"));
    assert!(weights(&place.out("run")) == weights(&checkpoint(NAME)));

    // Beside a group with variance it counts as completions of loss 0.
    let both = |name: &str, scored: fn(&str) -> bool| {
        let mut setup = place.setup(name);
        setup.run.max_steps = Some(1);
        // A stream per group.
        setup.algorithm.max_stream_tokens = Some(1);
        setup.algorithm.loss.beta = 0.0;
        setup.rewards = reward(move |input| if scored(input.prompt) { input.key.sample as f64 } else { 0.5 });
        run(setup).unwrap();
        lines(&place.out(name).join("metrics.jsonl")).remove(0)
    };
    let (half, whole) = (both("half", |prompt| prompt.contains("What is")), both("all", |_| true));
    let first = lines(&place.out("half").join("rollouts/step-000001.jsonl"));
    let text = first.iter().filter(|line| line["id"].as_str().unwrap().starts_with("sum")).count();
    assert_eq!(text, 3, "one of the two drawn rows should be text; choose another data_seed");
    assert!((2.0 * number(&half, "advantage_abs") - number(&whole, "advantage_abs")).abs() < 1e-12);
    let d = number(&half, "grpo/policy_seq_log_prob") - number(&whole, "grpo/policy_seq_log_prob");
    assert!(d.abs() <= 1e-4, "{d}");
    assert!(number(&half, "num_tokens") < number(&whole, "num_tokens"));
}

#[test]
fn a_reward_that_can_be_earned_rises() {
    let place = Place::new();
    let mut setup = place.setup("run");
    setup.run.max_steps = Some(30);
    setup.run.prompts_per_step = 4;
    setup.algorithm = algorithm(8, 8);
    setup.algorithm.max_live = 64;
    setup.optimizer.learning_rate = 3e-3;
    // The share of tokens with an even id: about a half by chance.
    setup.rewards = reward(|input| {
        let even = input.completion_ids.iter().filter(|&&id| id % 2 == 0).count();
        even as f64 / input.completion_ids.len() as f64
    });
    run(setup).unwrap();
    let rewards: Vec<f64> =
        lines(&place.out("run").join("metrics.jsonl")).iter().map(|row| number(row, "reward")).collect();
    let mean = |part: &[f64]| part.iter().sum::<f64>() / part.len() as f64;
    let (first, last) = (mean(&rewards[..5]), mean(&rewards[25..]));
    assert!(last > first + 0.2, "{first} → {last}");
}

/// An observer sees every rollout before the update that learns from it, every update with the numbers of
/// `metrics.jsonl`, every evaluation. Its `Break` leaves a checkpoint that another run resumes from.
#[test]
fn an_observer_sees_the_run_and_can_end_it() {
    #[derive(Clone, Default)]
    struct Seen(Arc<Mutex<Vec<String>>>, Option<u64>);
    impl Observer for Seen {
        fn rollout(&mut self, step: u64, rollouts: &Rollouts) {
            let completions: usize = rollouts.groups.iter().map(|group| group.completions.len()).sum();
            self.0.lock().unwrap().push(format!("rollout {step} {completions}"));
        }
        fn step(&mut self, step: u64, metrics: &[Metric]) -> ControlFlow<()> {
            let reward = metrics.iter().find(|(name, _)| name == "reward").and_then(|(_, value)| *value);
            self.0.lock().unwrap().push(format!("step {step} {}", reward.unwrap()));
            if self.1 == Some(step) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        }
        fn evaluation(&mut self, step: u64, evaluation: &omnigrpo_train::Evaluation) {
            self.0.lock().unwrap().push(format!("evaluation {step} {}", evaluation.rows.len()));
        }
    }
    let place = Place::new();
    let start = |ends_at: Option<u64>| {
        let mut setup = place.setup("run");
        setup.run.max_steps = Some(3);
        setup.run.num_iterations = 2;
        setup.eval = Some(greedy_eval(&setup));
        let seen = Seen(Arc::default(), ends_at);
        setup.observer = Box::new(seen.clone());
        let summary = run(setup).unwrap();
        let told = seen.0.lock().unwrap().clone();
        (summary, told)
    };
    let (summary, told) = start(Some(2));
    assert_eq!((summary.steps, summary.interrupted), (2, true));
    let rows = lines(&place.out("run").join("metrics.jsonl"));
    let step = |step: usize| format!("step {step} {}", number(&rows[step - 1], "reward"));
    assert_eq!(told, ["rollout 0 6".to_owned(), step(1), step(2)]);
    let (summary, told) = start(None);
    assert_eq!((summary.steps, summary.steps_here, summary.interrupted), (3, 1, false));
    let rows = lines(&place.out("run").join("metrics.jsonl"));
    let last = format!("step 3 {}", number(&rows[2], "reward"));
    assert_eq!(told, ["rollout 2 6".to_owned(), last, "evaluation 3 3".to_owned()]);
}

/// A checkpoint that an observer reads outlasts the limit while it does.
#[test]
fn a_checkpoint_that_is_read_is_not_removed() {
    #[derive(Default)]
    struct Reader(Option<u64>, Arc<Mutex<Vec<Vec<u64>>>>);
    impl Observer for Reader {
        fn saved(&mut self, step: u64, checkpoint: &Path) {
            let root = checkpoint.parent().unwrap();
            let there = omnigrpo_train::checkpoint::list(root).unwrap();
            self.1.lock().unwrap().push(there.into_iter().map(|(step, _)| step).collect());
            // The first is read until the third is there.
            self.0 = (step < 3).then_some(1);
        }
        fn reads(&self) -> Option<u64> {
            self.0
        }
    }
    let place = Place::new();
    let mut setup = place.setup("run");
    setup.run.max_steps = Some(4);
    setup.run.save.when = SaveWhen::Steps(1);
    setup.run.save.limit = Some(1);
    let seen = Arc::default();
    setup.observer = Box::new(Reader(None, Arc::clone(&seen)));
    run(setup).unwrap();
    assert_eq!(*seen.lock().unwrap(), [vec![1], vec![1, 2], vec![1, 3], vec![4]]);
}

/// Three rows, one greedy completion each.
fn greedy_eval(setup: &TrainSetup) -> EvalPlan {
    EvalPlan {
        interaction: None,
        prompts: Arc::clone(&setup.prompts),
        dataset: Arc::clone(&setup.dataset),
        rows: vec![0, 1, 4],
        options: EvalOptions {
            sampling: SamplingParams {
                temperature: 0.0,
                max_completion_length: 8,
                ..SamplingParams::default()
            },
            batch_rows: 2,
            max_live: 8,
            ..EvalOptions::default()
        },
    }
}

#[test]
fn evaluation_is_recorded_and_decides_the_best_checkpoint() {
    let place = Place::new();
    let mut setup = place.setup("run");
    setup.eval = Some(greedy_eval(&setup));
    // Every evaluation is worse than the one before.
    let calls = AtomicU64::new(0);
    setup.rewards = reward(move |_| -(calls.fetch_add(1, Ordering::Relaxed) as f64));
    (setup.run.eval.when, setup.run.eval.on_start, setup.run.save.when) =
        (EvalWhen::Steps(2), true, SaveWhen::Best);
    setup.run.max_steps = Some(5);
    let summary = run(setup).unwrap();
    let rows = lines(&place.out("run").join("metrics.jsonl"));
    let evaluated: Vec<f64> =
        rows.iter().filter(|row| row.get("eval_reward").is_some()).map(|row| number(row, "step")).collect();
    assert_eq!(evaluated, [0.0, 2.0, 4.0, 5.0]);
    let before = summary.before.unwrap().metric("eval_reward").unwrap();
    let after = summary.after.unwrap().metric("eval_reward").unwrap();
    // The first three calls score 0, -1, -2.
    assert_eq!(before, -1.0);
    assert!(after < before);
    // Step 2 is the first that can be saved; it stays the best.
    assert_eq!(checkpoints(&place.out("run")), ["checkpoint-2"]);
    assert_eq!(lines(&place.out("run").join("eval/step-000002.jsonl")).len(), 3);
}

#[test]
fn imitation_lowers_the_answers_negative_log_likelihood() {
    let place = Place::new();
    let mut setup = place.setup("run");
    setup.run.objective = Objective::Imitate;
    setup.run.prompts_per_step = 6;
    setup.run.max_steps = Some(8);
    setup.run.schedule.kind = omnigrpo_train::ScheduleKind::Constant;

    // The first step must report minus the mean log-probability of the answers' tokens.
    let (mut sum, mut count) = (0.0, 0);
    let builder = prompts(&checkpoint(NAME), 8);
    for row in 0..6 {
        let sample = setup.dataset.get(row).unwrap();
        let example = builder.build_sft(&sample, 0).unwrap();
        assert_eq!(example.target.last(), Some(&298));
        let groups = [GroupStream { prompt: &example.prompt, completions: vec![&example.target] }];
        let features = vec![setup.model.encode_prompt(&example.prompt).unwrap()];
        let (logp, _) = setup.model.score(&PackedStream::new(&groups).unwrap(), &features, 1.0).unwrap();
        sum -= logp.iter().map(|&x| f64::from(x)).sum::<f64>();
        count += logp.len();
    }
    let expected = sum / f64::from(u32::try_from(count).unwrap());
    run(setup).unwrap();
    let losses: Vec<f64> =
        lines(&place.out("run").join("metrics.jsonl")).iter().map(|row| number(row, "loss")).collect();
    assert!((losses[0] - expected).abs() <= 1e-5 * expected, "{} for {expected}", losses[0]);
    assert!(losses[7] < 0.7 * losses[0], "{losses:?}");
}

/// A rollout and the update after it; the number of media.
fn one_update(setup: &TrainSetup, reference: &Model) -> u64 {
    let mut adamw = AdamW::new(optimizer(), setup.model.params());
    let mut timer = PhaseTimer::start(Instant::now());
    let (model, prompts, rows) = (&setup.model, &setup.prompts, prepared(setup));
    let media: usize = rows.iter().map(|row| row.prompt.media.len()).sum();
    let (rewards, algorithm) = (&setup.rewards, &setup.algorithm);
    let collector = Collector { model, prompts, shuffled: None, rewards, interaction: None, algorithm };
    let mut rollouts = collector.collect(rows, 0, &mut |_| Ok(Vec::new()), &mut timer).unwrap();
    update((model, Some(reference)), &mut adamw, AT, &setup.algorithm, &mut rollouts, &mut timer).unwrap();
    media as u64
}

/// A trained tower sees a medium once for the rollout, whose blocks the backward pass takes over unless it is to save memory,
/// and once as the reference, also where a group is cut into several streams; a frozen one once in all.
#[test]
fn a_medium_goes_through_the_tower_once_per_pass() {
    let place = Place::new();
    for (towers, recompute, policy_runs, reference_runs) in
        [(true, false, 1, 1), (true, true, 2, 1), (false, false, 1, 0)]
    {
        let mut setup = place.setup("towers");
        // A prompt with one completion at a time.
        setup.algorithm.max_stream_tokens = Some(16);
        setup.algorithm.sampling.min_completion_length = 8;
        setup.algorithm.recompute = recompute;
        Selection { towers, ..Selection::ALL }.apply(&setup.model).unwrap();
        let reference = setup.model.reference(ReferencePlace::Memory(setup.model.device())).unwrap();
        let media = one_update(&setup, &reference);
        assert!(media > 0);
        let runs = (setup.model.tower_runs(), reference.tower_runs());
        assert_eq!(runs, (policy_runs * media, reference_runs * media), "towers {towers}");
    }
}

/// The first update of a rollout differentiates what the rollout computed. Its gradient is that of a forward pass, which a rollout
/// of more than one stream, a gradient over micro-batches and a second update run.
#[test]
fn a_rollout_is_differentiated_where_it_fits() {
    let place = Place::new();
    let norms = |name: &str, change: &dyn Fn(&mut TrainSetup)| {
        [false, true].map(|recall| {
            let name = format!("{name}-{recall}");
            let mut setup = place.setup(&name);
            setup.run.max_steps = Some(1);
            change(&mut setup);
            setup.algorithm.recall = recall;
            run(setup).unwrap();
            number(lines(&place.out(&name).join("metrics.jsonl")).last().unwrap(), "grad_norm")
        })
    };
    let plain = |_: &mut TrainSetup| {};
    let recompute = |setup: &mut TrainSetup| setup.algorithm.recompute = true;
    // One token has nothing that was decoded; a second update has weights that did not sample.
    let short = |setup: &mut TrainSetup| {
        setup.algorithm.sampling.max_completion_length = 1;
        setup.algorithm.sampling.min_completion_length = 0;
    };
    let twice = |setup: &mut TrainSetup| (setup.run.max_steps, setup.run.num_iterations) = (Some(2), 2);
    for (name, change) in [
        ("kept", &plain as &dyn Fn(&mut TrainSetup)),
        ("recomputed", &recompute),
        ("short", &short),
        ("twice", &twice),
    ] {
        let [passed, recalled] = norms(name, change);
        assert!((recalled / passed - 1.0).abs() < 1e-4, "{name}: {passed} and {recalled}");
        // A prompt runs through the same kernels either way.
        assert!(name == "short" || recalled != passed, "{name}: nothing was recalled");
    }
    let streams = |setup: &mut TrainSetup| setup.algorithm.max_stream_tokens = Some(16);
    let micro = |setup: &mut TrainSetup| setup.algorithm.prompts_per_micro_batch = 1;
    for (name, change) in [("streams", &streams as &dyn Fn(&mut TrainSetup)), ("micro", &micro)] {
        let [passed, recalled] = norms(name, change);
        assert_eq!(recalled, passed, "{name}");
    }
}

/// The activations that a tower kept from the rollout give the same update as running it again, to the bit.
#[test]
fn a_kept_tower_changes_nothing() {
    let place = Place::new();
    let weights = |recompute: bool| {
        let mut setup = place.setup("kept");
        setup.algorithm.recompute = recompute;
        setup.algorithm.recall = false;
        Selection::ALL.apply(&setup.model).unwrap();
        let before = values(&setup.model);
        let reference = setup.model.reference(ReferencePlace::Memory(setup.model.device())).unwrap();
        let media = one_update(&setup, &reference);
        assert_eq!(setup.model.tower_runs(), if recompute { 2 * media } else { media });
        let after = values(&setup.model);
        assert!(before.iter().zip(&after).any(|(a, b)| a.0.contains("visual.blocks") && a != b));
        after
    };
    assert!(weights(false) == weights(true));
}

/// The weights by name, as bits.
fn values(model: &Model) -> Vec<(String, Vec<u32>)> {
    let of = |param: &Arc<omnigrpo_ops::Param>| {
        let bits = param.read().f32().iter().map(|x| x.to_bits()).collect();
        (param.name().to_owned(), bits)
    };
    model.params().iter().map(of).collect()
}

/// Two and a half epochs of six rows are fifteen prompts: the last step takes the three that four steps of four leave.
#[test]
fn a_run_ends_where_its_epochs_end() {
    let place = Place::new();
    for (objective, last) in [(Objective::Reinforce, 9), (Objective::Imitate, 0)] {
        let name = format!("{objective:?}");
        let mut setup = place.setup(&name);
        setup.run.objective = objective;
        (setup.run.max_steps, setup.run.num_epochs, setup.run.prompts_per_step) = (None, 2.5, 4);
        assert_eq!(run(setup).unwrap().steps, 4);
        let rows = lines(&place.out(&name).join("metrics.jsonl"));
        let epochs: Vec<f64> = rows.iter().map(|row| number(row, "epoch")).collect();
        for (got, want) in epochs.iter().zip([4.0 / 6.0, 8.0 / 6.0, 2.0, 2.5]) {
            assert!((got - want).abs() < 1e-12, "{epochs:?}");
        }
        assert_eq!(lines(&place.out(&name).join("rollouts/step-000004.jsonl")).len(), last);
    }
}

/// An epoch is over with the last update of the rollout that took its last rows, also for a run that resumes before it.
#[test]
fn an_epoch_ends_with_the_last_update_of_its_rows() {
    let place = Place::new();
    let new = |name: &str| {
        let mut setup = place.setup(name);
        setup.eval = Some(EvalPlan {
            interaction: None,
            prompts: Arc::clone(&setup.prompts),
            dataset: Arc::clone(&setup.dataset),
            rows: vec![4],
            options: EvalOptions {
                sampling: SamplingParams { max_completion_length: 4, ..SamplingParams::default() },
                batch_rows: 2,
                max_live: 8,
                ..EvalOptions::default()
            },
        });
        (setup.run.prompts_per_step, setup.run.num_iterations, setup.run.max_steps) = (6, 3, Some(9));
        (setup.run.eval.when, setup.run.save.when) = (EvalWhen::Epoch, SaveWhen::Steps(4));
        setup
    };
    let evaluated = |name: &str| -> Vec<f64> {
        let rows = lines(&place.out(name).join("metrics.jsonl"));
        rows.iter().filter(|row| row.get("eval_reward").is_some()).map(|row| number(row, "step")).collect()
    };
    run(new("whole")).unwrap();
    assert_eq!(evaluated("whole"), [3.0, 6.0, 9.0]);
    let (from, to) = (place.out("whole"), place.out("part"));
    omnigrpo_testkit::copy_dir(&from.join("checkpoint-4"), &to.join("checkpoint-4"));
    std::fs::copy(from.join("metrics.jsonl"), to.join("metrics.jsonl")).unwrap();
    run(new("part")).unwrap();
    assert_eq!(evaluated("part"), [3.0, 6.0, 9.0]);
    assert_eq!(timeless(&to), timeless(&from));
}

/// Clips that draw their number of frames draw anew in each epoch, and a run that resumes draws the same.
#[test]
fn frames_are_drawn_anew_in_every_epoch() {
    let place = Place::new();
    let row = |i: usize| {
        std::fs::copy(golden("media/clip.gif"), place.dir.path().join(format!("{i}.gif"))).unwrap();
        let meta = json!({"frame_cnts": [4, 4], "min_frames": 1, "max_frames": 4, "dynamic_sample": true});
        json!({"id": format!("clip {i}"), "video": format!("{i}.gif"), "problem": "<video>Which way?",
            "solution": "right", "min_pixels": 3136, "max_pixels": 12544, "meta": meta})
    };
    std::fs::write(&place.file, (0..4).map(|i| format!("{}\n", row(i))).collect::<String>()).unwrap();
    let builder = || {
        let from = omnigrpo_models::Checkpoint::open(&checkpoint(NAME)).unwrap();
        let mut settings = prompts(&checkpoint(NAME), 8).settings().clone();
        settings.media.rule = omnigrpo_models::FrameRule::Segments;
        settings.media.base_interval_secs = 1.0;
        settings.media.dynamic_sample = true;
        Arc::new(omnigrpo_models::PromptBuilder::open(&from, settings).unwrap())
    };
    let setup = place.setup("rows");
    let order = Order::new(setup.rows, 1, true, BTreeSet::new());
    let mut source = RowSource::new(setup.dataset, order, builder(), None, setup.run.rows.skip);
    let mut tokens: BTreeMap<String, BTreeSet<usize>> = BTreeMap::new();
    for epoch in 0..6 {
        for row in source.draw(4).unwrap() {
            assert_eq!(row.epoch, epoch);
            tokens.entry(row.sample.id).or_default().insert(row.prompt.ids.len());
        }
    }
    assert!(tokens.values().all(|lengths| lengths.len() > 1), "{tokens:?}");

    resume_is_exact(
        &place,
        |setup| {
            (setup.run.num_iterations, setup.run.prompts_per_step) = (2, 3);
            setup.prompts = builder();
        },
        "clips that draw their number of frames",
    );
}

/// Returns the console's text of a run.
fn said(setup: TrainSetup) -> String {
    #[derive(Clone, Default)]
    struct Shared(Arc<std::sync::Mutex<Vec<u8>>>);
    impl std::io::Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let out = Shared::default();
    train(setup, &Console::plain(out.clone()), &AtomicBool::new(false)).unwrap();
    let bytes = out.0.lock().unwrap().clone();
    String::from_utf8(bytes).unwrap()
}

#[test]
fn a_run_warns_of_groups_without_variance_and_of_weights_that_nothing_reaches() {
    let place = Place::new();
    let new = |name: &str, rows: Vec<u64>, varied: u64| {
        let mut setup = place.setup(name);
        setup.rows = rows;
        setup.run.max_steps = Some(20);
        setup.rewards = reward(move |input| {
            let varies = input.key.step % 10 < varied;
            if varies { input.key.sample as f64 } else { 0.5 }
        });
        setup
    };
    let text = said(new("flat", vec![4, 5], 1));
    assert_eq!(text.matches("% of the groups have no variance").count(), 1, "{text}");
    assert_eq!(text.matches("warning: no row of the first epoch reached visual.").count(), 1, "{text}");
    // A run that ends within its first epoch says so as well.
    let mut short = new("short", vec![4, 5], 9);
    short.run.max_steps = Some(1);
    short.run.prompts_per_step = 1;
    let text = said(short);
    assert_eq!(text.matches("warning: no step reached visual.").count(), 1, "{text}");
    // With pictures in the first epoch, and a fifth of the groups with variance.
    let text = said(new("varied", vec![0, 4], 2));
    assert!(!text.contains("no row of the first epoch"), "{text}");
}

/// Rows made ahead on another thread are the rows that would have been made, in the same order, with the same skips.
#[test]
fn rows_made_ahead_change_nothing() {
    let place = with_a_broken_row();
    let source = || {
        let setup = place.setup("ahead");
        let order = Order::new(setup.rows, 1, true, BTreeSet::new());
        RowSource::new(
            setup.dataset,
            order,
            setup.prompts,
            Some(Arc::new(setup.rewards)),
            setup.run.rows.skip,
        )
    };
    let (mut plain, mut ahead) = (source(), source());
    for round in 0..6 {
        let expected = plain.draw(2).unwrap();
        let drawn = ahead.draw(2).unwrap();
        let ids = |rows: &[PreparedRow]| rows.iter().map(|r| r.sample.id.clone()).collect::<Vec<_>>();
        assert_eq!(ids(&drawn), ids(&expected), "round {round}");
        assert!(drawn.iter().zip(&expected).all(|(a, b)| a.prompt == b.prompt));
        assert_eq!(ahead.take_skipped(), plain.take_skipped());
        assert_eq!(ahead.order().state(), plain.order().state());
        let before = ahead.order().state().clone();
        ahead.prepare_ahead(2, Making::Prompt);
        assert_eq!(*ahead.order().state(), before, "what is made ahead is not drawn yet");
    }
    assert_eq!(plain.num_skipped(), 1);
    assert!(ahead.take_ahead_time() > std::time::Duration::ZERO);
}

/// Media that are kept from one epoch to the next, in the step and in evaluations, are those that decoding gives.
#[test]
fn kept_media_change_nothing_but_how_often_they_are_decoded() {
    let place = Place::new();
    let run_with = |name: &str, max_bytes: u64| {
        let mut setup = place.setup(name);
        setup.prompts.media_store().set_max_bytes(max_bytes);
        let prompts = Arc::clone(&setup.prompts);
        setup.eval = Some(EvalPlan::new(Arc::clone(&prompts), Arc::clone(&setup.dataset)));
        setup.run.max_steps = Some(12);
        setup.run.eval.when = EvalWhen::Steps(6);
        run(setup).unwrap();
        let out = place.out(name);
        (prompts.media_store().usage(), timeless(&out), tensors(&out.join("model.safetensors")), out)
    };
    let (off, kept) = (run_with("off", 0), run_with("kept", 1 << 30));
    assert_eq!((&kept.1, &kept.2), (&off.1, &off.2));
    let rollouts = |out: &Path| {
        let dir = out.join("rollouts");
        let mut rows: Vec<Value> = names(&dir).iter().flat_map(|name| lines(&dir.join(name))).collect();
        assert_eq!(rows.len(), 12 * 2 * 3);
        rows.iter_mut().for_each(|row| drop(row.as_object_mut().unwrap().remove("timestamp")));
        rows
    };
    assert_eq!(rollouts(&kept.3), rollouts(&off.3));
    assert_eq!((off.0.asked, off.0.bytes), (0, 0));
    let told = lines(&kept.3.join("metrics.jsonl"));
    let last = told.iter().rfind(|row| row.get("memory/media_found").is_some()).unwrap();
    assert_eq!(number(last, "memory/media_store_mb"), kept.0.bytes as f64 / 1e6);
    // Each picture is decoded once and read in every epoch and evaluation after that.
    assert!(kept.0.found * 2 > kept.0.asked, "{:?}", kept.0);
}
