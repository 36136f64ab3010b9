//! Settings in pairs: an interrupted run ends as the one that was not, whatever is set together. The tokens of the entropy gate and
//! the reference of a generation, which are decided once. Copied data, which are the same data.

use omnigrpo_data::{Curriculum, Lessons};
use omnigrpo_grpo::{Covariance, LossPlan, recipe};
use omnigrpo_train::SyncReference;

use super::algorithms::metric;
use super::ranks::adapters;
use super::turns::interact;
use super::*;

fn plan(name: &str) -> LossPlan {
    recipe(name).unwrap().loss
}

pub(crate) type Setting = (&'static str, fn(&mut TrainSetup));

pub(crate) const SETTINGS: [Setting; 8] = [
    ("moving reference", |s| s.run.sync_reference = Some(SyncReference { every: 1, mixup: 0.5 })),
    ("several iterations", |s| s.run.num_iterations = 2),
    ("several steps of a generation", |s| s.run.steps_per_generation = 2),
    ("entropy gate", |s| (s.algorithm.loss.top_entropy, s.algorithm.loss.entropy_coef) = (0.3, 0.05)),
    ("dynamic sampling", |s| s.algorithm.max_resample_times = 2),
    ("curriculum", |s| {
        s.run.rows.lessons =
            Lessons { low: Some(0.1), curriculum: Curriculum::HardFirst, ..Lessons::default() };
    }),
    ("recall off", |s| s.algorithm.recall = false),
    ("several streams", |s| s.algorithm.max_stream_tokens = Some(24)),
];

/// Six steps in one go, and the same from two of the checkpoints after the first, the second and the third. With several iterations or
/// steps of a generation the third is in the middle of one; with both, so are the first and the second.
#[test]
fn every_pair_of_settings_resumes_to_the_bit() {
    let mut ends = BTreeMap::new();
    for (i, (a, first)) in SETTINGS.into_iter().enumerate() {
        for (b, second) in SETTINGS.into_iter().skip(i + 1) {
            let (what, place) = (format!("{a} with {b}"), Place::new());
            let new = |name: &str| {
                let mut setup = place.setup(name);
                (setup.run.save.when, setup.run.max_steps) = (SaveWhen::Steps(1), Some(6));
                // One row of six teaches nothing.
                setup.rewards = reward(|input| match input.prompt.contains("What is 0") {
                    true => 0.5,
                    false => input.key.sample as f64 + input.prompt.len() as f64 / 100.0,
                });
                first(&mut setup);
                second(&mut setup);
                setup
            };
            run(new("whole")).unwrap();
            for step in [1 + i % 2, 3] {
                resumes_from(&place, step, &format!("part-{step}"), new, &what);
            }
            let end = timeless(&place.out("whole")).pop().unwrap();
            ends.insert(what, [number(&end, "loss"), number(&end, "grad_norm")].map(f64::to_bits));
        }
    }
    // Each setting does something: no two pairs end alike, but for those that differ in one that changes bits alone, if any.
    assert_eq!(ends.len(), 28);
    let different: BTreeSet<_> = ends.values().collect();
    assert!(different.len() > 20, "{ends:?}");
}

/// A rollout of two updates for each of its two parts, which all have pictures, is resumed after every step. What encodes a medium
/// is trained, so a part needs features of the weights before its update, also if another part has changed them since the checkpoint.
#[test]
fn features_of_a_resumed_rollout_are_those_of_the_weights() {
    let trained: [Setting; 4] = [
        ("a trained tower", |s| s.selection.towers = true),
        ("a trained tower alone", |s| (s.selection.towers, s.selection.projector) = (true, false)),
        ("adapters and a trained projector", |s| {
            adapters(s);
            s.selection.projector = true;
        }),
        ("turns", |s| {
            interact(s, None);
            s.algorithm.num_generations = 4;
        }),
    ];
    for (what, change) in trained {
        let place = Place::new();
        let new = |name: &str| {
            let mut setup = place.setup(name);
            // The other rows have no picture.
            setup.rows = (0..4).collect();
            (setup.run.num_iterations, setup.run.steps_per_generation) = (2, 2);
            (setup.run.save.when, setup.run.max_steps) = (SaveWhen::Steps(1), Some(6));
            change(&mut setup);
            setup
        };
        run(new("whole")).unwrap();
        for step in 1..5 {
            resumes_from(&place, step, &format!("part-{step}"), new, what);
        }
    }
}

#[test]
fn settings_that_exclude_each_other_are_refused() {
    let place = Place::new();
    let moving = SETTINGS[0].1;
    type Case = (&'static str, fn(&mut TrainSetup), &'static str);
    let cases: [Case; 2] = [
        (
            "a moving reference with adapters",
            adapters,
            "RunPlan::sync_reference: \"true\": unsupported with adapters: the reference is then the model without them",
        ),
        (
            "a moving reference with a gate that keeps nothing",
            |s| s.algorithm.loss.top_entropy = 0.0,
            "top_entropy is 0",
        ),
    ];
    for (what, change, expected) in cases {
        let mut setup = place.setup(what);
        moving(&mut setup);
        change(&mut setup);
        let message = told(&run(setup).unwrap_err());
        assert!(message.contains(expected), "{what}: {message}");
    }
}

/// Flags of the gate in the order of the rollout, as an update wrote them.
fn kept(dir: &Path, step: u64) -> Vec<bool> {
    let rows = lines(&dir.join(format!("tokens/step-{step:06}.jsonl")));
    let flags = rows.iter().flat_map(|row| row["kept"].as_array().unwrap().iter());
    flags.map(|flag| flag.as_bool().unwrap()).collect()
}

/// One prompt with two completions of three tokens: the bound of the gate is the entropy of a token, which rounding moves.
#[test]
fn the_gate_and_its_gradient_do_not_depend_on_how_streams_are_cut() {
    let place = Place::new();
    let with = |name: &str, seed: u64, change: fn(&mut TrainSetup)| {
        let mut setup = place.setup(name);
        (setup.run.max_steps, setup.run.prompts_per_step, setup.run.rows.seed) = (Some(1), 1, seed);
        let algorithm = &mut setup.algorithm;
        (algorithm.num_generations, algorithm.token_stats) = (2, true);
        (algorithm.seed, algorithm.sampling.seed) = (seed, seed);
        (algorithm.sampling.min_completion_length, algorithm.sampling.max_completion_length) = (3, 3);
        (algorithm.loss.beta, algorithm.loss.top_entropy) = (0.0, 0.2);
        // The step is the gradient.
        setup.optimizer = AdamWConfig {
            learning_rate: 1.0,
            beta1: 0.0,
            epsilon: 1.0,
            weight_decay: 0.0,
            max_grad_norm: 0.0,
            ..AdamWConfig::default()
        };
        change(&mut setup);
        run(setup).unwrap();
        (kept(&place.out(name), 1), tensors(&place.out(name).join("model.safetensors")))
    };
    let before = tensors(&checkpoint(NAME).join("model.safetensors"));
    for seed in 0..6 {
        let (flags, plain) = with(&format!("plain-{seed}"), seed, |_| {});
        // 6 - ⌈0.8 · 5⌉.
        assert_eq!((flags.len(), flags.iter().filter(|kept| **kept).count()), (6, 2), "seed {seed}");
        let changes: [Setting; 4] = [
            ("streams", |s| s.algorithm.max_stream_tokens = Some(1)),
            ("recall off", |s| s.algorithm.recall = false),
            ("recomputed", |s| s.algorithm.recompute = true),
            ("both", |s| (s.algorithm.max_stream_tokens, s.algorithm.recompute) = (Some(1), true)),
        ];
        for (what, change) in changes {
            let (again, other) = with(&format!("{what}-{seed}"), seed, change);
            assert_eq!(again, flags, "seed {seed}, {what}");
            let (mut difference, mut norm) = (0.0, 0.0);
            for (name, before) in &before {
                for ((a, b), start) in plain[name].iter().zip(&other[name]).zip(before) {
                    difference += f64::from(a - b).powi(2);
                    norm += f64::from(a - start).powi(2);
                }
            }
            let (difference, norm) = (difference.sqrt(), norm.sqrt());
            assert!(norm > 0.0 && difference <= 5e-5 * norm, "seed {seed}, {what}: {difference} of {norm}");
        }
    }
}

/// Later updates have other weights and other entropies; the tokens stay those of the rollout. The bonus is divided by as many.
#[test]
fn the_gate_of_a_rollout_stays() {
    let place = Place::new();
    let mut setup = place.setup("run");
    (setup.run.max_steps, setup.run.num_iterations, setup.optimizer.learning_rate) = (Some(4), 4, 1e-2);
    setup.algorithm.token_stats = true;
    (setup.algorithm.loss.top_entropy, setup.algorithm.loss.entropy_coef) = (0.2, 0.05);
    run(setup).unwrap();
    let out = place.out("run");
    let first = kept(&out, 1);
    let asked = first.len() - (0.8 * (first.len() - 1) as f64 - 1e-9).ceil() as usize;
    assert_eq!(first.iter().filter(|kept| **kept).count(), asked);
    let entropies = |step: u64| -> Vec<f64> {
        let rows = lines(&out.join(format!("tokens/step-{step:06}.jsonl")));
        let each = rows.iter().flat_map(|row| row["entropies"].as_array().unwrap().iter());
        each.map(|h| h.as_f64().unwrap()).collect()
    };
    // They are the highest of the rollout, to the rounding of the file.
    let split = |wanted: bool| entropies(1).into_iter().zip(&first).filter(move |(_, kept)| **kept == wanted);
    let lowest = split(true).map(|(h, _)| h).fold(f64::INFINITY, f64::min);
    assert!(split(false).all(|(h, _)| h <= lowest + 2e-4));
    for step in 2..=4 {
        assert_eq!(kept(&out, step), first, "step {step}");
        assert_ne!(entropies(step), entropies(1), "step {step}");
    }
}

/// Recorded completions come without entropies: the weights of the first pass say them once.
#[test]
fn recorded_completions_have_a_gate() {
    let dir = TempDir::new().unwrap();
    let with = |name: &str, change: fn(&mut TrainSetup)| {
        let out = dir.path().join(name);
        let mut setup = setup::setup(NAME, &golden("replay/rows_ids.jsonl"), &golden(""), &out);
        (setup.run.rows.replay, setup.run.prompts_per_step, setup.run.num_iterations) = (true, 2, 2);
        (setup.run.max_steps, setup.run.steps_per_generation) = (Some(2), 1);
        (setup.algorithm.token_stats, setup.algorithm.loss.top_entropy) = (true, 0.3);
        change(&mut setup);
        run(setup).unwrap();
        let norm = number(&lines(&out.join("metrics.jsonl"))[0], "grad_norm");
        let flags = kept(&out, 1);
        assert_eq!(kept(&out, 2), flags, "{name}");
        let asked = flags.len() - (0.7 * (flags.len() - 1) as f64 - 1e-9).ceil() as usize;
        assert_eq!(flags.iter().filter(|kept| **kept).count(), asked, "{name}");
        (flags, norm)
    };
    let (flags, norm) = with("whole", |_| {});
    let (again, cut) = with("cut", |s| s.algorithm.max_stream_tokens = Some(1));
    assert_eq!(again, flags);
    assert!((cut / norm - 1.0).abs() < 5e-5, "{cut} for {norm}");
}

/// The tokens of a covariance are chosen once per rollout: a resumed run has the bits of the whole one, in the middle of a rollout too.
/// How streams are cut does not move the choice, and a random one depends on the seed.
#[test]
fn tokens_of_a_covariance_stay_with_their_rollout() {
    let clip = |s: &mut TrainSetup| {
        s.algorithm.loss = LossPlan {
            covariance: Covariance::Clip { share: 0.25, low: -50.0, high: 50.0 },
            ..plan("clip_cov")
        };
    };
    let kl = |s: &mut TrainSetup| {
        s.algorithm.loss =
            LossPlan { covariance: Covariance::Kl { share: 0.25, coef: 5.0 }, ..plan("kl_cov") };
    };
    let changes: [Setting; 2] = [("clip_cov", clip), ("kl_cov", kl)];
    for (what, change) in changes {
        let place = Place::new();
        let new = |name: &str| {
            let mut setup = place.setup(name);
            (setup.run.num_iterations, setup.run.steps_per_generation) = (2, 2);
            (setup.run.save.when, setup.run.max_steps) = (SaveWhen::Steps(1), Some(6));
            setup.optimizer.learning_rate = 1e-2;
            // The seed of the algorithm must not change the rewards.
            setup.rewards = reward(|input| input.key.sample as f64 + input.prompt.len() as f64 / 100.0);
            change(&mut setup);
            setup
        };
        run(new("whole")).unwrap();
        for step in [1, 2, 3] {
            resumes_from(&place, step, &format!("part-{step}"), new, what);
        }
        let shares = metric(&place.out("whole"), "covariance/chosen_ratio");
        assert!(shares.iter().all(|share| *share > 0.1 && *share <= 0.25), "{what}: {shares:?}");
        // Two updates of the first part alternate with two of the second.
        assert_eq!(shares[..2], shares[2..4], "{what}");

        let norms = |name: &str, change: fn(&mut TrainSetup)| {
            let mut setup = new(name);
            change(&mut setup);
            run(setup).unwrap();
            metric(&place.out(name), "grad_norm")
        };
        let (whole, cut) =
            (norms("again", |_| {}), norms("cut", |s| s.algorithm.max_stream_tokens = Some(1)));
        assert_eq!(whole, metric(&place.out("whole"), "grad_norm"));
        // Later steps start from weights that differ by rounding.
        assert!((cut[0] / whole[0] - 1.0).abs() < 5e-5, "{what}: {cut:?} {whole:?}");
        let seeded = norms("seeded", |s| s.algorithm.seed += 1);
        assert_eq!(seeded[0] == whole[0], what == "kl_cov", "{what}: {seeded:?} {whole:?}");
        if what == "kl_cov" {
            // The penalty is 0 in the first update of a rollout, and not in its second.
            let free =
                norms("free", |s| s.algorithm.loss.covariance = Covariance::Kl { share: 0.25, coef: 0.0 });
            let differs: Vec<bool> = free.iter().zip(&whole).map(|(a, b)| a != b).collect();
            assert_eq!(differs[..2], [false, true], "{free:?} {whole:?}");
            // Completions without an advantage pay as well, in a stream of their own or with others.
            let few = |s: &mut TrainSetup| {
                s.run.steps_per_generation = 1;
                s.algorithm.loss.covariance = Covariance::Kl { share: 1.0, coef: 5.0 };
                s.rewards = reward(|input| if input.key.row == 0 { input.key.sample as f64 } else { 0.0 });
            };
            let mut setup = new("few");
            few(&mut setup);
            run(setup).unwrap();
            let mut setup = new("few_cut");
            few(&mut setup);
            setup.algorithm.max_stream_tokens = Some(1);
            run(setup).unwrap();
            let [whole, cut] = ["few", "few_cut"].map(|name| metric(&place.out(name), "grad_norm"));
            assert!((cut[1] / whole[1] - 1.0).abs() < 1e-3, "{cut:?} {whole:?}");
        }
    }
}

/// Recorded completions have the log-probabilities of their file, or else those of the weights before the first update.
#[test]
fn recorded_completions_have_tokens_of_a_covariance() {
    let dir = TempDir::new().unwrap();
    let with = |name: &str, covariance: Covariance| {
        let out = dir.path().join(name);
        let mut setup = setup::setup(NAME, &golden("replay/rows_ids.jsonl"), &golden(""), &out);
        (setup.run.rows.replay, setup.run.prompts_per_step, setup.run.num_iterations) = (true, 2, 2);
        (setup.run.max_steps, setup.run.steps_per_generation) = (Some(2), 1);
        setup.algorithm.loss = LossPlan { covariance, ..plan("clip_cov") };
        run(setup).unwrap();
        (metric(&out, "covariance/chosen_ratio"), metric(&out, "grad_norm"))
    };
    let (shares, norms) = with("some", Covariance::Clip { share: 0.5, low: -50.0, high: 50.0 });
    assert!(shares[0] > 0.3 && shares[0] <= 0.5 && shares[0] == shares[1], "{shares:?}");
    let (shares, others) = with("none", Covariance::Clip { share: 0.5, low: 1e6, high: 2e6 });
    assert_eq!(shares, [0.0, 0.0]);
    assert!(norms[0] != others[0], "{norms:?} {others:?}");
}

/// The reference of a generation is the one that was there when it was sampled, for all of its steps and iterations, although it
/// becomes the policy after every update.
#[test]
fn a_generation_keeps_the_reference_it_was_sampled_under() {
    for (steps, iterations) in [(3, 1), (1, 3), (2, 2)] {
        let place = Place::new();
        let mut setup = place.setup("run");
        (setup.run.steps_per_generation, setup.run.num_iterations) = (steps, iterations);
        setup.run.max_steps = Some(2 * (steps * iterations) as u64);
        setup.run.sync_reference = Some(SyncReference { every: 1, mixup: 1.0 });
        (setup.algorithm.token_stats, setup.optimizer.learning_rate) = (true, 1e-2);
        run(setup).unwrap();
        let list = |row: &Value, name: &str| -> Vec<f64> {
            row[name].as_array().into_iter().flatten().map(|x| x.as_f64().unwrap()).collect()
        };
        let far = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        let updates = (steps * iterations) as u64;
        for step in 1..=2 * updates {
            let rows = lines(&place.out("run").join(format!("tokens/step-{step:06}.jsonl")));
            let (mut moved, mut apart) = (0.0_f64, 0.0_f64);
            for row in &rows {
                let (old, reference) = (list(row, "old_logprobs"), list(row, "reference_logprobs"));
                let old = if old.is_empty() { list(row, "logprobs") } else { old };
                apart = apart.max(far(&old, &reference));
                moved = moved.max(far(&old, &list(row, "logprobs")));
            }
            let what = format!("{steps} steps, {iterations} iterations, step {step}");
            // What sampled had just become the reference.
            assert!(apart < 2e-4, "{what}: {apart}");
            assert_eq!(moved > 1e-3, (step - 1) % updates != 0, "{what}: {moved}");
        }
    }
}

/// Frames that are drawn and shuffled are those of row and medium: a copy of the data in another folder gives the same bits, and a
/// run resumes with it.
#[test]
fn a_copy_of_the_data_gives_the_same_bits() {
    let (place, copy) = (Place::new(), TempDir::new().unwrap());
    let row = |i: usize| {
        let meta = json!({"frame_cnts": [4, 4], "min_frames": 1, "max_frames": 4, "dynamic_sample": true});
        json!({"id": format!("clip {i}"), "video": [format!("{i}.gif"), "0.gif"], "solution": "right",
            "problem": "<video><video>Which way?", "min_pixels": 3136, "max_pixels": 6272, "meta": [meta, meta]})
    };
    let text: String = (0..4).map(|i| format!("{}\n", row(i))).collect();
    let elsewhere = copy.path().join("another/name");
    std::fs::create_dir_all(&elsewhere).unwrap();
    for folder in [place.dir.path(), &elsewhere] {
        (0..4).for_each(|i| {
            std::fs::copy(golden("media/clip.gif"), folder.join(format!("{i}.gif"))).unwrap();
        });
        std::fs::write(folder.join("rows.jsonl"), &text).unwrap();
    }
    let builder = |shuffle_frames: bool| {
        let from = omnigrpo_models::Checkpoint::open(&checkpoint(NAME)).unwrap();
        let mut settings = prompts(&checkpoint(NAME), 8).settings().clone();
        settings.media.rule = omnigrpo_models::FrameRule::Segments;
        (settings.media.dynamic_sample, settings.media.shuffle_frames) = (true, shuffle_frames);
        Arc::new(omnigrpo_models::PromptBuilder::open(&from, settings).unwrap())
    };
    let copied = || setup::dataset(&elsewhere.join("rows.jsonl"), &elsewhere);
    let original = setup::dataset(&place.file, place.dir.path());
    let shuffled = builder(true);
    let mut lengths = BTreeSet::new();
    for (row, epoch) in (0..4).flat_map(|row| (0..4).map(move |epoch| (row, epoch))) {
        let of = |data: &omnigrpo_data::Dataset| shuffled.build_in(&data.get(row).unwrap(), epoch).unwrap();
        let (a, b) = (of(&original), of(&copied()));
        assert!(a == b, "row {row}, epoch {epoch}");
        lengths.insert(a.ids.len());
    }
    assert!(lengths.len() > 1, "nothing was drawn");
    let new = |name: &str| {
        let mut setup = place.setup(name);
        (setup.run.save.when, setup.run.num_iterations, setup.prompts) =
            (SaveWhen::Steps(1), 2, builder(false));
        if name == "part" {
            setup.dataset = Arc::new(copied());
        }
        setup
    };
    run(new("whole")).unwrap();
    resumes_from(&place, 3, "part", new, "copied data");
}
