//! Three AdamW steps of GRPO, equal to PyTorch: losses, log-probabilities and every weight. Data and scripts:
//! `models/tests/golden/README.md`.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

mod setup;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use omnigrpo_grpo::Aggregation;
use omnigrpo_guard::told;
use omnigrpo_models::{Checkpoint, LoadOptions, Model, ReferencePlace, WeightDtype};
use omnigrpo_observe::PhaseTimer;
use omnigrpo_ops::{Device, Numbers, Param};
use omnigrpo_testkit::{Golden, golden, max_diff, norm, sketch};
use omnigrpo_train::{
    AdamW, Divided, Moments, PreparedRow, ResumeFrom, Rollouts, ScheduleKind, Selection, StepOutcome,
    decayed_names, replay,
};
use serde_json::Value;
use setup::{algorithm, checkpoint, dataset, number, optimizer, prompts, tensors};

/// The first update, at the full rate.
const AT: omnigrpo_train::UpdateAt = omnigrpo_train::UpdateAt { step: 0, learning_rate_factor: 1.0 };

fn update(
    model: &Model,
    reference: &Model,
    adamw: &mut AdamW,
    algorithm: &Divided,
    rollouts: &mut Rollouts,
) -> StepOutcome {
    omnigrpo_train::update((model, Some(reference)), adamw, AT, algorithm, rollouts, &mut timer()).unwrap()
}

const CHECKPOINTS: [&str; 9] = [
    "qwen2_5_vl_tied",
    "qwen2_vl_untied",
    "qwen3_vl",
    "qwen3_5_untied",
    "internvl_original",
    "internvl3_5_original",
    "aria",
    "smolvlm",
    "omni",
];

/// The rows with completions as text, and as ids of the tokenizer of the Qwen-VL checkpoints.
const TEXT: &str = "replay/rows.jsonl";
const IDS: &str = "replay/rows_ids.jsonl";

fn rows_of(name: &str) -> &'static str {
    if name.starts_with("qwen") { IDS } else { TEXT }
}

struct Expected {
    json: Value,
    tensors: Golden,
}

impl Expected {
    fn read(name: &str) -> Self {
        let text = std::fs::read(golden(&format!("replay/{name}.json"))).unwrap();
        let json: Value = serde_json::from_slice(&text).unwrap();
        let hyper = &json["hyper"];
        // The helpers of these tests assume these settings.
        for (key, value) in [
            ("learning_rate", 1e-3),
            ("weight_decay", 0.1),
            ("max_grad_norm", 1.0),
            ("beta", 0.04),
            ("num_generations", 3.0),
        ] {
            assert_eq!(number(hyper, key), value);
        }
        Self { json, tensors: Golden::read(&format!("replay/{name}.safetensors")) }
    }

    fn numbers(&self, row: usize, key: &str) -> Vec<f64> {
        self.json["rows"][row][key].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
    }

    fn check_step(&self, index: usize, loss: f64, kl: f64, grad_norm: f64, what: &str) {
        let step = &self.json["steps"][index];
        for (key, got) in [("loss", loss), ("kl", kl), ("grad_norm", grad_norm)] {
            let want = number(step, key);
            // The first loss is exactly 0: advantages of a group sum to 0 and the policy is the reference.
            let bound = if index == 0 { 1e-6 + 1e-4 * want } else { 1e-4 * want.abs() };
            assert!(
                (got - want).abs() <= bound,
                "{what}, step {index}: {key} is {got}, expected {want} ± {bound}"
            );
        }
    }

    fn check_weights(
        &self,
        before: &BTreeMap<String, Vec<f32>>,
        after: &BTreeMap<String, Vec<f32>>,
        what: &str,
    ) {
        let mut checked = 0;
        for (name, after) in after {
            let update: Vec<f32> = after.iter().zip(&before[name]).map(|(a, b)| a - b).collect();
            checked += 1;
            if self.json["rounding"].as_array().is_some_and(|all| all.iter().any(|n| *n == name.as_str())) {
                // AdamW's steps are no longer than the rate, whatever the gradient.
                assert!(norm(&update) <= 3.5e-3 * (update.len() as f64).sqrt(), "{what}: {name}");
                continue;
            }
            let want = &self.tensors.f[&format!("delta_sketch.{name}")];
            let bound = 2e-2 * f64::from(want[0]);
            for (i, (a, b)) in sketch(&update).iter().zip(want).enumerate() {
                let bound = if i == 0 { bound } else { 4.0 * bound };
                assert!(
                    (a - f64::from(*b)).abs() <= bound,
                    "{what}: {name}, sketch {i} of the update: {a} for {b}"
                );
            }
            if let Some(want) = self.tensors.f.get(&format!("param.{name}")) {
                let delta: Vec<f32> = after.iter().zip(want).map(|(a, b)| a - b).collect();
                assert!(norm(&delta) <= bound, "{what}: {name}: ‖Δ‖ = {} > {bound}", norm(&delta));
            }
        }
        let wanted = self.tensors.f.keys().filter(|k| k.starts_with("delta_sketch.")).count();
        assert_eq!(checked, wanted, "{what}");
    }
}

fn weights(model: &Model) -> BTreeMap<String, Vec<f32>> {
    let copy = |p: &Arc<omnigrpo_ops::Param>| (p.name().to_owned(), p.read().f32().into_owned());
    model.params().iter().map(copy).collect()
}

fn timer() -> PhaseTimer {
    PhaseTimer::start(Instant::now())
}

fn prepared(name: &str, file: &str) -> (omnigrpo_models::PromptBuilder, Vec<PreparedRow>) {
    let builder = prompts(&checkpoint(name), 32);
    let rows = dataset(&golden(file), &golden(""));
    let rows = (0..rows.len())
        .map(|row| {
            let sample = rows.get(row).unwrap();
            let prompt = Arc::new(builder.build(&sample).unwrap());
            PreparedRow { sample, prompt, teacher: None, epoch: 0 }
        })
        .collect();
    (builder, rows)
}

/// Three steps of a checkpoint on these devices.
fn check_steps(name: &str, file: &str, device: Device, reference_on: Device) {
    let what = format!("{name}, {file}, on {device} with a reference on {reference_on}");
    let expected = Expected::read(name);
    let options = LoadOptions { device, ..LoadOptions::default() };
    let model = Model::load(&Checkpoint::open(&checkpoint(name)).unwrap(), &options).unwrap();
    Selection::ALL.apply(&model).unwrap();
    let reference = model.reference(ReferencePlace::Memory(reference_on)).unwrap();
    let before = weights(&model);
    let mut adamw = AdamW::new(optimizer(), model.params());
    let algorithm = algorithm(3, 32);
    let (builder, rows) = prepared(name, file);
    for index in 0..3 {
        let mut rollouts: Rollouts =
            replay(&model, &builder, &algorithm, rows.clone(), &mut timer()).unwrap();
        for (r, row) in expected.json["rows"].as_array().unwrap().iter().enumerate() {
            let ids: Vec<f64> = rows[r].prompt.ids.iter().map(|&id| f64::from(id)).collect();
            assert_eq!(ids, expected.numbers(r, "prompt_ids"), "{what}: {}", row["id"]);
            let completions: Vec<&[u32]> =
                rollouts.groups[r].completions.iter().map(|c| c.completion.ids.as_slice()).collect();
            assert_eq!(serde_json::json!(completions), row["completion_ids"], "{what}");
            let advantages = rollouts.groups[r].completions.iter().map(|c| c.advantage);
            for (a, b) in advantages.zip(expected.numbers(r, "advantages")) {
                assert!((a - b).abs() <= 1e-6, "{what}: advantage {a} for {b}");
            }
        }
        let outcome = update(&model, &reference, &mut adamw, &algorithm, &mut rollouts);
        let metrics: BTreeMap<String, Option<f64>> = outcome.sums.metrics().into_iter().collect();
        let value = |key: &str| metrics[key].unwrap();
        expected.check_step(index, value("loss"), value("kl"), outcome.grad_norm, &what);
        // Weights that a checkpoint carries and no feature goes through.
        let unused = expected.tensors.f.iter().filter(|(k, v)| k.starts_with("delta_sketch.") && v[0] == 0.0);
        assert_eq!(outcome.params_without_grad, unused.count(), "{what}");
        // The update leaves the log-probabilities before it for further updates.
        let old: Vec<f32> = rollouts.completions().flat_map(|c| c.old.clone().unwrap()).collect();
        let want = &expected.tensors.f[&format!("step{index}.logp")];
        let d = max_diff(&old, want);
        let bound = if index == 0 { 1e-4 } else { 5e-3 };
        assert!(d <= bound, "{what}, step {index}: log-probabilities differ by {d}");
    }
    expected.check_weights(&before, &weights(&model), &what);
}

#[test]
fn steps_equal_pytorch() {
    for name in CHECKPOINTS {
        for file in [TEXT, IDS].into_iter().take(if rows_of(name) == IDS { 2 } else { 1 }) {
            check_steps(name, file, Device::Cpu, Device::Cpu);
        }
    }
}

/// The whole step runs on any device, and its reference on another.
#[test]
fn steps_on_every_pair_of_devices_equal_pytorch() {
    let devices = Device::all();
    for &device in &devices {
        for &reference_on in devices.iter().filter(|&&on| on != device) {
            check_steps("qwen2_5_vl_tied", IDS, device, reference_on);
        }
    }
}

/// Padding that another trainer recorded is no part of a completion: `[5, 6, E, 7, E]` counts as `[5, 6, E]`.
#[test]
fn what_follows_a_stop_token_does_not_count() {
    let name = "qwen2_5_vl_tied";
    let model = omnigrpo_testkit::load(&checkpoint(name), WeightDtype::Auto).unwrap();
    let (builder, mut given) = prepared(name, IDS);
    let stop = builder.stops().ids[0];
    for (row, group) in given.iter_mut().zip([[5, 6], [stop, 7], [5, 7]]) {
        for (i, completion) in row.sample.completions.as_mut().unwrap().iter_mut().enumerate() {
            // The first and last row stop at their third token, the second at its first; one completion never stops.
            let ids = [group[0], group[1], stop, 7, stop];
            let ids = if i == 1 { vec![5, 6, 7] } else { ids.to_vec() };
            completion.logprobs = Some(ids.iter().map(|&id| -f64::from(id)).collect());
            completion.completion_ids = Some(ids);
        }
    }
    let rollouts = replay(&model, &builder, &algorithm(3, 32), given, &mut timer()).unwrap();
    let ids: Vec<Vec<Vec<u32>>> = rollouts
        .groups
        .iter()
        .map(|group| group.completions.iter().map(|c| c.completion.ids.clone()).collect())
        .collect();
    let expected = |stopped: &[u32]| [stopped.to_vec(), vec![5, 6, 7], stopped.to_vec()];
    assert_eq!(ids[0], expected(&[5, 6, stop]));
    assert_eq!(ids[1], expected(&[stop]));
    assert_eq!(ids[2], expected(&[5, 7, stop]));
    for (ids, scored) in ids.iter().flatten().zip(rollouts.completions()) {
        assert_eq!(scored.old.as_ref().unwrap(), &ids.iter().map(|&id| -(id as f32)).collect::<Vec<f32>>());
    }
}

#[test]
fn a_replay_run_equals_pytorch() {
    for name in CHECKPOINTS {
        let expected = Expected::read(name);
        let dir = tempfile::TempDir::new().unwrap();
        let out = dir.path().join("run");
        let mut setup = setup::setup(name, &golden(rows_of(name)), &golden(""), &out);
        setup.run.rows.replay = true;
        setup.run.prompts_per_step = 3;
        setup.run.max_steps = Some(3);
        setup.run.schedule.kind = ScheduleKind::Constant;
        setup.run.resume.from = ResumeFrom::Start;
        let before = weights(&setup.model);
        let summary = setup::run(setup).unwrap();
        assert_eq!(summary.steps, 3);
        let rows = setup::lines(&out.join("metrics.jsonl"));
        assert_eq!(rows.len(), 3);
        for (index, row) in rows.iter().enumerate() {
            assert_eq!(number(row, "step"), index as f64 + 1.0);
            expected.check_step(
                index,
                number(row, "loss"),
                number(row, "kl"),
                number(row, "grad_norm"),
                name,
            );
        }
        // Saved copies may contain tensors that are no weights of the network.
        let mut after = tensors(&out.join("model.safetensors"));
        after.retain(|name, _| before.contains_key(name));
        expected.check_weights(&before, &after, name);
    }
}

#[test]
fn the_same_weights_decay_as_in_transformers() {
    for name in CHECKPOINTS {
        let expected = Expected::read(name);
        let model = omnigrpo_testkit::load(&checkpoint(name), WeightDtype::Auto).unwrap();
        let decayed = decayed_names(model.params());
        let spared: BTreeSet<&str> =
            model.params().iter().map(|p| p.name()).filter(|n| !decayed.contains(*n)).collect();
        let wanted: BTreeSet<&str> =
            expected.json["no_decay"].as_array().unwrap().iter().map(|n| n.as_str().unwrap()).collect();
        assert_eq!(spared, wanted, "{name}");
    }
}

/// The gradient of the loss itself, not only what the optimizer makes of it.
#[test]
fn the_gradient_of_a_step_equals_pytorch() {
    for name in ["internvl_original", "internvl3_5_original"] {
        gradient_of(name);
    }
}

fn gradient_of(name: &str) {
    let expected = Expected::read(name);
    let model = omnigrpo_testkit::load(&checkpoint(name), WeightDtype::Auto).unwrap();
    Selection::ALL.apply(&model).unwrap();
    let reference = model.reference(ReferencePlace::Memory(model.device())).unwrap();
    // The first moment after one unclipped update is a tenth of the gradient.
    let config = omnigrpo_train::AdamWConfig { max_grad_norm: 0.0, ..optimizer() };
    let mut adamw = AdamW::new(config, model.params());
    let algorithm = algorithm(3, 32);
    let (builder, rows) = prepared(name, TEXT);
    let mut rollouts = replay(&model, &builder, &algorithm, rows, &mut timer()).unwrap();
    update(&model, &reference, &mut adamw, &algorithm, &mut rollouts);
    let golden = &expected.tensors.f;
    let wanted: BTreeMap<&str, &Vec<f32>> =
        golden.iter().filter_map(|(k, v)| Some((k.strip_prefix("step0.sketch.")?, v))).collect();
    let squares: f64 = wanted.values().map(|s| f64::from(s[0]).powi(2)).sum();
    let rms = (squares / wanted.len() as f64).sqrt();
    assert_eq!(adamw.state().count(), wanted.len());
    for (weight, state) in adamw.state() {
        let weight = weight.name();
        let gradient: Vec<f32> = state.m().iter().map(|m| m * 10.0).collect();
        let want = wanted[weight];
        let bound = 1e-3 * f64::from(want[0]) + 1e-6 * rms;
        for (i, (a, b)) in sketch(&gradient).iter().zip(want).enumerate() {
            let bound = if i == 0 { bound } else { 4.0 * bound };
            assert!((a - f64::from(*b)).abs() <= bound, "{weight}, sketch {i}: {a} for {b} ± {bound}");
        }
    }
}

/// Rows for two steps of two groups each, with rewards: in the second step one group has no variance, and the pictures are
/// in that group alone.
fn rows_without_variance() -> Vec<Vec<PreparedRow>> {
    let (_, rows) = prepared("qwen2_5_vl_tied", IDS);
    let with = |row: usize, rewards: [f64; 3]| {
        let mut row = rows[row].clone();
        row.sample.rewards = Some(omnigrpo_data::RecordedRewards::Total(rewards.to_vec()));
        row
    };
    vec![
        vec![with(1, [1.0, 0.0, 0.0]), with(0, [0.0, 1.0, 0.5])],
        vec![with(1, [1.0, 0.0, 0.0]), with(0, [1.0, 1.0, 1.0])],
        vec![with(1, [0.5, 0.5, 0.5]), with(2, [1.0, 1.0, 1.0])],
    ]
}

/// Metrics of each update, and weights and optimizer at the end.
struct Trained {
    metrics: Vec<BTreeMap<String, Option<f64>>>,
    grad_norms: Vec<f64>,
    without_grad: Vec<usize>,
    /// Updates, moments and master of each weight.
    moments: BTreeMap<String, (u64, Numbers)>,
    weights: BTreeMap<String, Vec<f32>>,
}

/// Runs these steps, with two updates each.
fn trained(steps: &[Vec<PreparedRow>], change: impl Fn(&mut Divided)) -> Trained {
    let name = "qwen2_5_vl_tied";
    let model = omnigrpo_testkit::load(&checkpoint(name), WeightDtype::Auto).unwrap();
    Selection::ALL.apply(&model).unwrap();
    let mut algorithm = algorithm(3, 32);
    algorithm.loss.beta = 0.0;
    change(&mut algorithm);
    let reference = model.reference(ReferencePlace::Memory(model.device())).unwrap();
    let mut adamw = AdamW::new(optimizer(), model.params());
    let builder = prompts(&checkpoint(name), 32);
    let (mut metrics, mut grad_norms, mut without_grad) = (Vec::new(), Vec::new(), Vec::new());
    for rows in steps {
        let mut rollouts = replay(&model, &builder, &algorithm, rows.clone(), &mut timer()).unwrap();
        for _ in 0..2 {
            let outcome = update(&model, &reference, &mut adamw, &algorithm, &mut rollouts);
            metrics.push(outcome.sums.metrics().into_iter().collect());
            grad_norms.push(outcome.grad_norm);
            without_grad.push(outcome.params_without_grad);
        }
    }
    let numbers = |param: &Param, m: &Moments| Numbers {
        m: m.m().into_owned(),
        v: m.v().into_owned(),
        master: m.master(param).into_owned(),
    };
    let state = adamw.state().map(|(param, m)| (param.name().to_owned(), (m.step, numbers(param, m))));
    let moments = state.collect();
    Trained { metrics, grad_norms, without_grad, moments, weights: weights(&model) }
}

/// A stream that adds nothing to the loss is not carried back, and nothing shows it: a KL term too small for f32 makes it
/// run, with a gradient of zeros, and everything is equal to the bit.
#[test]
fn groups_without_variance_count_as_if_they_had_run() {
    let steps = rows_without_variance();
    for max_stream_tokens in [4096, 40] {
        let run = |beta: f64| {
            trained(&steps, |algorithm| {
                algorithm.loss.beta = beta;
                algorithm.max_stream_tokens = Some(max_stream_tokens);
            })
        };
        let (skipped, ran) = (run(0.0), run(1e-300));
        assert!(skipped.weights == ran.weights, "{max_stream_tokens}: weights differ");
        assert!(skipped.moments == ran.moments, "{max_stream_tokens}: optimizers differ");
        assert_eq!(skipped.grad_norms, ran.grad_norms);
        assert_eq!((&skipped.without_grad, skipped.grad_norms[4]), (&vec![0; 6], 0.0));
        for (a, b) in skipped.metrics.iter().zip(&ran.metrics) {
            // Without a KL term there is none to report.
            for (key, value) in a.iter().filter(|(key, _)| *key != "grpo/kl_div") {
                let (a, b) = (value.unwrap_or(0.0), b[key].unwrap_or(0.0));
                assert!((a - b).abs() < 1e-290, "{max_stream_tokens}: {key} is {a}, expected {b}");
            }
        }
        // Momentum and decay go on where no group has variance: every weight has had six updates.
        assert!(skipped.moments.values().all(|(step, _)| *step == 6));
    }
    // Only what media reach is left alone in a step without any.
    let text: Vec<Vec<PreparedRow>> = steps.iter().map(|rows| vec![rows[0].clone()]).collect();
    let tower = |name: &String| name.starts_with("visual.");
    let all = trained(&text, |_| ());
    let towers = all.weights.keys().filter(|name| tower(name)).count();
    assert_eq!(all.without_grad, [towers; 6]);
    assert!(!all.moments.keys().any(tower));
}

/// Which groups share a stream does not decide what is skipped.
#[test]
fn packing_does_not_change_a_step_with_groups_without_variance() {
    let steps = rows_without_variance();
    let run = |max_stream_tokens: usize, micro: usize| {
        trained(&steps, |algorithm| {
            algorithm.max_stream_tokens = Some(max_stream_tokens);
            algorithm.prompts_per_micro_batch = micro;
        })
    };
    let whole = run(4096, 64);
    for (tokens, micro) in [(40, 64), (4096, 1), (1, 64)] {
        let parts = run(tokens, micro);
        let what = format!("{tokens} tokens, {micro} prompts");
        let close = |a: f64, b: f64| (a - b).abs() <= 1e-3 * b.abs() + 1e-6;
        for (a, b) in parts.metrics.iter().zip(&whole.metrics) {
            for (key, value) in a {
                let (a, b) = (value.unwrap_or(0.0), b[key].unwrap_or(0.0));
                assert!(close(a, b), "{what}: {key} is {a}, expected {b}");
            }
        }
        let first: omnigrpo_testkit::Gradients =
            parts.moments.iter().map(|(n, (_, s))| (n.clone(), s.m.clone())).collect();
        let want: omnigrpo_testkit::Gradients =
            whole.moments.iter().map(|(n, (_, s))| (n.clone(), s.m.clone())).collect();
        omnigrpo_testkit::assert_close(&first, &want, 1e-2, &what);
    }
}

/// Completions cut at the limit and left out of the loss may be those of a group without variance.
#[test]
fn masked_completions_of_groups_without_variance_are_not_counted() {
    let mut steps = rows_without_variance();
    for row in steps.iter_mut().flatten() {
        for completion in row.sample.completions.as_mut().unwrap() {
            completion.finish_reason = Some("length".into());
        }
    }
    for aggregation in [Aggregation::SequenceMean, Aggregation::TokenMeanGlobal] {
        let trained = trained(&steps, |algorithm| {
            algorithm.loss.mask_truncated_completions = true;
            algorithm.loss.aggregation = aggregation;
            algorithm.max_stream_tokens = Some(40);
        });
        assert_eq!(trained.grad_norms, [0.0; 6]);
        assert!(trained.metrics.iter().all(|m| m["loss"] == Some(0.0) && !m.contains_key("entropy")));
    }
}

/// Log-probabilities that some rows of a step have and others lack.
#[test]
fn given_log_probabilities_are_never_dropped() {
    let name = "qwen2_5_vl_tied";
    let model = omnigrpo_testkit::load(&checkpoint(name), WeightDtype::Auto).unwrap();
    let (builder, rows) = prepared(name, IDS);
    let given = |with: &[usize]| {
        let mut rows = rows.clone();
        for &row in with {
            for completion in rows[row].sample.completions.as_mut().unwrap() {
                let length = completion.completion_ids.as_ref().unwrap().len();
                completion.logprobs = Some(vec![-1.0; length]);
            }
        }
        replay(&model, &builder, &algorithm(3, 32), rows, &mut timer())
            .map(|rollouts| rollouts.completions().map(|c| c.old.is_some()).collect::<Vec<bool>>())
    };
    assert_eq!(given(&[]).unwrap(), [false; 9]);
    assert_eq!(given(&[0, 1, 2]).unwrap(), [true; 9]);
    for (with, named) in [(vec![0], "text"), (vec![0, 1], "video"), (vec![1], "text"), (vec![2], "video")] {
        let message = told(&given(&with).unwrap_err());
        assert!(message.contains(&format!("row {named}: expected `logprobs`")), "{with:?}: {message}");
    }
}

/// However a step is cut into micro-batches and streams, its gradient is the same.
#[test]
fn accumulated_equals_one_batch() {
    for name in CHECKPOINTS {
        let (builder, rows) = prepared(name, rows_of(name));
        let gradients = |prompts_per_micro_batch: usize, max_stream_tokens: usize| {
            let model = omnigrpo_testkit::load(&checkpoint(name), WeightDtype::Auto).unwrap();
            Selection::ALL.apply(&model).unwrap();
            let reference = model.reference(ReferencePlace::Memory(model.device())).unwrap();
            // Away from the reference, so that the KL term has a gradient.
            for param in model.params().iter().filter(|p| p.name().ends_with("down_proj.weight")) {
                param.update(|w| w.iter_mut().for_each(|x| *x *= 1.2)).unwrap();
            }
            // The first moment after one unclipped update is a tenth of the gradient.
            let config = omnigrpo_train::AdamWConfig { max_grad_norm: 0.0, ..optimizer() };
            let mut adamw = AdamW::new(config, model.params());
            let mut algorithm = algorithm(3, 32);
            algorithm.prompts_per_micro_batch = prompts_per_micro_batch;
            algorithm.max_stream_tokens = Some(max_stream_tokens);
            let mut rollouts = replay(&model, &builder, &algorithm, rows.clone(), &mut timer()).unwrap();
            let outcome = update(&model, &reference, &mut adamw, &algorithm, &mut rollouts);
            let metrics: BTreeMap<String, Option<f64>> = outcome.sums.metrics().into_iter().collect();
            let moments: omnigrpo_testkit::Gradients =
                adamw.state().map(|(param, s)| (param.name().to_owned(), s.m().into_owned())).collect();
            (metrics["loss"].unwrap(), metrics["kl"].unwrap(), outcome.grad_norm, moments)
        };
        let whole = gradients(3, 4096);
        assert!(whole.1 > 1e-3, "{name}: the policy should differ from its reference");
        for (micro, tokens) in [(1, 4096), (2, 4096), (3, 80), (3, 1), (1, 60)] {
            let parts = gradients(micro, tokens);
            let what = format!("{name}: {micro} prompts per micro-batch, {tokens} tokens per stream");
            for (a, b) in [(parts.0, whole.0), (parts.1, whole.1), (parts.2, whole.2)] {
                assert!((a - b).abs() <= 1e-5 * b.abs(), "{what}: {a} for {b}");
            }
            omnigrpo_testkit::assert_close(&parts.3, &whole.3, 5e-5, &what);
        }
    }
}
