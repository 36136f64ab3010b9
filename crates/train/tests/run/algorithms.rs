//! Rules that decide which completions are learned from, and against which others.

use std::collections::BTreeSet;

use omnigrpo_data::{Curriculum, Lessons};
use omnigrpo_grpo::{Correction, CorrectionKind};
use omnigrpo_train::SyncReference;

use super::*;

/// Three of the six rows earn the same with every completion: those with a picture.
fn by_picture(input: &RewardInput) -> f64 {
    if input.prompt.contains("colour") { 0.5 } else { input.key.sample as f64 }
}

pub(super) fn metric(dir: &Path, key: &str) -> Vec<f64> {
    lines(&dir.join("metrics.jsonl")).iter().map(|row| number(row, key)).collect()
}

/// The ids of the rows of a rollout, group by group.
fn ids(dir: &Path, step: u64) -> Vec<String> {
    let rows = lines(&dir.join(format!("rollouts/step-{step:06}.jsonl")));
    rows.iter().step_by(3).map(|row| row["id"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn groups_that_teach_nothing_give_their_places_to_others() {
    let place = Place::new();
    let new = |name: &str, times: usize| {
        let mut setup = place.setup(name);
        setup.algorithm.max_resample_times = times;
        setup.rewards = reward(by_picture);
        setup
    };
    run(new("plain", 0)).unwrap();
    run(new("dynamic", 16)).unwrap();
    let (plain, dynamic) = (place.out("plain"), place.out("dynamic"));
    assert!(metric(&plain, "frac_reward_zero_std").iter().any(|&share| share > 0.0));
    assert_eq!(metric(&dynamic, "frac_reward_zero_std"), [0.0; 6]);
    assert!(metric(&dynamic, "sampling/resampled_prompts").iter().sum::<f64>() > 0.0);
    for step in 1..=6 {
        assert!(ids(&dynamic, step).iter().all(|id| id.starts_with("sum-")), "step {step}");
        // The rewards stand beside the completions that earned them.
        for row in lines(&dynamic.join(format!("rollouts/step-{step:06}.jsonl"))) {
            assert_eq!(row["reward"].as_f64(), row["rewards"]["by"].as_f64());
            assert_eq!(row["reward"].as_f64().unwrap().fract(), 0.0, "0.5 is earned with a picture alone");
        }
    }
    // A bound on the rounds: where nothing teaches, the run goes on.
    let mut hopeless = new("hopeless", 2);
    hopeless.rewards = reward(|_| 0.25);
    run(hopeless).unwrap();
    assert_eq!(metric(&place.out("hopeless"), "frac_reward_zero_std"), [1.0; 6]);
    assert_eq!(metric(&place.out("hopeless"), "sampling/resampled_prompts"), [0.0; 6]);

    resume_is_exact(
        &Place::new(),
        |setup| {
            setup.algorithm.max_resample_times = 3;
            setup.run.num_iterations = 2;
            setup.rewards = reward(by_picture);
        },
        "dynamic sampling",
    );
}

#[test]
fn steps_share_a_generation() {
    let place = Place::new();
    let new = |name: &str| {
        let mut setup = place.setup(name);
        (setup.run.steps_per_generation, setup.algorithm.token_stats) = (3, true);
        setup
    };
    run(new("run")).unwrap();
    let out = place.out("run");
    // Two generations of three steps with two prompts each.
    assert_eq!(
        names(&out.join("rollouts")),
        ["step-000001.jsonl", "step-000004.jsonl"].map(str::to_owned).into()
    );
    let drawn = ids(&out, 1);
    assert_eq!(drawn.iter().collect::<BTreeSet<_>>().len(), 6, "all rows once");
    for step in 1..=3_u64 {
        let tokens = lines(&out.join(format!("tokens/step-{step:06}.jsonl")));
        let groups: BTreeSet<u64> = tokens.iter().map(|row| row["group"].as_u64().unwrap()).collect();
        assert_eq!(groups, BTreeSet::from([2 * step - 2, 2 * step - 1]), "each step has prompts of its own");
        for row in &tokens {
            let list = |name: &str| -> Vec<f64> {
                row[name].as_array().into_iter().flatten().map(|x| x.as_f64().unwrap()).collect()
            };
            let far = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            if step > 1 {
                // The weights have moved; what sampled stays what the ratio compares with.
                let (now, old) = (list("logprobs"), list("old_logprobs"));
                assert_eq!(now.len(), old.len());
                assert!(far(&now, &old) > 0.0, "step {step}");
                assert!(
                    far(&old, &list("reference_logprobs")) < 1e-4,
                    "the first generation is the reference's"
                );
            }
        }
    }
    // One generation of all prompts, taken whole, makes the same first step as two parts would of its first prompts.
    let (ends, whole) = (metric(&out, "epoch"), place.out("whole"));
    assert_eq!(ends, [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]);
    let mut plain = place.setup("whole");
    plain.run.max_steps = Some(1);
    // The first of several updates runs its own forward pass.
    plain.algorithm.recall = false;
    run(plain).unwrap();
    assert_eq!(ids(&whole, 1), drawn[..2]);
    assert_eq!(metric(&whole, "loss")[0], metric(&out, "loss")[0]);
    assert_eq!(metric(&whole, "grad_norm")[0], metric(&out, "grad_norm")[0]);

    for recompute in [false, true] {
        resume_is_exact(
            &Place::new(),
            move |setup| {
                (setup.run.steps_per_generation, setup.run.num_iterations) = (2, 2);
                setup.algorithm.recompute = recompute;
                setup.algorithm.loss.top_entropy = 0.5;
                setup.algorithm.loss.correction =
                    Correction { kind: CorrectionKind::TokenTruncate, max: 1.5, min: Some(0.5) };
            },
            "steps of a generation",
        );
    }
    // Epochs that do not fill a generation: 2 steps of 2 prompts, then 1.
    let mut short = new("short");
    (short.run.max_steps, short.run.prompts_per_step, short.run.steps_per_generation) = (None, 2, 2);
    assert_eq!(run(short).unwrap().steps, 3);
    assert_eq!(lines(&place.out("short").join("rollouts/step-000003.jsonl")).len(), 6);
}

#[test]
fn the_reference_follows_the_policy() {
    let place = Place::new();
    let new = |name: &str, sync: Option<SyncReference>| {
        let mut setup = place.setup(name);
        setup.run.sync_reference = sync;
        setup.optimizer.learning_rate = 1e-2;
        setup
    };
    let kl = |name: &str| metric(&place.out(name), "kl");
    run(new("still", None)).unwrap();
    run(new("all", Some(SyncReference { every: 2, mixup: 1.0 }))).unwrap();
    run(new("half", Some(SyncReference { every: 2, mixup: 0.5 }))).unwrap();
    let (still, all, half) = (kl("still"), kl("all"), kl("half"));
    // Steps 3 and 5 begin with a reference that is the policy, and 4 and 6 with one that is not.
    assert!(all[2] < 1e-9 && all[4] < 1e-9, "{all:?}");
    assert!(all[3] > 1e-7 && still[2] > 1e-7, "{all:?} {still:?}");
    assert!(half[2] < still[2] && half[2] > all[2], "{half:?} {still:?}");
    assert_eq!(all[..2], still[..2]);
    resume_is_exact(
        &Place::new(),
        |setup| setup.run.sync_reference = Some(SyncReference { every: 2, mixup: 0.5 }),
        "a reference that moved before the checkpoint",
    );
}

#[test]
fn a_pass_learns_from_what_rows_earned_before() {
    let place = Place::new();
    let new = |name: &str, lessons: Lessons| {
        let mut setup = place.setup(name);
        setup.run.rows.lessons = lessons;
        setup.rewards = reward(|input| {
            let level = if input.prompt.contains("colour") { 1.0 } else { 0.0 };
            level + input.key.sample as f64 / 10.0
        });
        setup
    };
    run(new("hard", Lessons { high: Some(0.5), ..Lessons::default() })).unwrap();
    let later: Vec<String> = (4..=6).flat_map(|step| ids(&place.out("hard"), step)).collect();
    assert!(later.iter().all(|id| id.starts_with("sum-")), "{later:?}");
    let easy = Lessons { curriculum: Curriculum::EasyFirst, ..Lessons::default() };
    run(new("easy", easy)).unwrap();
    let later: Vec<bool> =
        (4..=6).flat_map(|step| ids(&place.out("easy"), step)).map(|id| id.starts_with("sum-")).collect();
    assert_eq!(later, [false, false, false, false, true, true]);
    resume_is_exact(
        &Place::new(),
        move |setup| {
            setup.run.rows.lessons = Lessons { low: Some(0.1), ..easy };
            setup.rewards = reward(|input| input.prompt.len() as f64 / 100.0 + input.key.sample as f64);
            setup.run.prompts_per_step = 3;
        },
        "lessons of a pass",
    );
}

/// In f32 decoding and training see the same policy but for rounding: the weights are 1.
#[test]
fn a_correction_has_little_to_do_in_f32() {
    let place = Place::new();
    let train = |name: &str, kind| {
        let mut setup = place.setup(name);
        setup.algorithm.loss.correction = Correction { kind, ..Correction::OFF };
        run(setup).unwrap();
        lines(&place.out(name).join("metrics.jsonl")).remove(0)
    };
    let plain = train("plain", CorrectionKind::Off);
    for kind in [CorrectionKind::TokenMask, CorrectionKind::SequenceTruncate] {
        let row = train(&format!("{kind:?}"), kind);
        for end in ["min", "mean", "max"] {
            let weight = number(&row, &format!("sampling/importance_sampling_ratio/{end}"));
            assert!((weight - 1.0).abs() < 1e-3, "{kind:?} {end}: {weight}");
        }
        let (a, b) = (number(&row, "grad_norm"), number(&plain, "grad_norm"));
        assert!((a - b).abs() < 1e-2 * b, "{kind:?}: {a} for {b}");
    }
    assert!(plain.get("sampling/importance_sampling_ratio/mean").is_none());
}
