//! Estimators compared with the functions of TRL, verl and the program of MaxRL themselves on random cases (`data/peers_golden.py`): clipping is active, lengths
//! differ, one completion may be empty, and the batch is one half of an optimizer step.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

use std::collections::BTreeMap;

use omnigrpo_grpo::{
    AdvantageKind, Batch, Correction, CorrectionKind, Covariance, LossPlan, Normalizer, PolicyShift,
    Surrogate, advantage::advantages, chosen_tokens, evaluate, recipe,
};

/// Completions, completions of a prompt, and most tokens of a completion.
const ROWS: usize = 6;
const GROUP: usize = 3;
const MOST: usize = 5;

/// The inputs of a case, from the same generator as in Python.
struct Case {
    lengths: Vec<usize>,
    rewards: Vec<f64>,
    advantages: Vec<f64>,
    logp: Vec<f64>,
    old: Vec<f64>,
    sampler: Vec<f64>,
    teacher: Vec<f64>,
}

impl Case {
    fn new(seed: usize) -> Self {
        let mut state = seed as u64;
        // SplitMix64.
        let mut u = || {
            state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let z = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            ((z ^ (z >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
        };
        let length = |row, u: &mut dyn FnMut() -> f64| match row == 0 && seed.is_multiple_of(4) {
            true => 0,
            false => 1 + (u() * MOST as f64) as usize,
        };
        let lengths: Vec<usize> = (0..ROWS).map(|row| length(row, &mut u)).collect();
        let rewards = (0..ROWS).map(|_| (u() * 4.0).round_ties_even() / 4.0).collect();
        let advantages = (0..ROWS).map(|_| (u() - 0.5) * 3.0).collect();
        let none = Vec::new;
        let (logp, old, sampler, teacher) = (none(), none(), none(), none());
        let mut case = Self { lengths, rewards, advantages, logp, old, sampler, teacher };
        for _ in 0..case.lengths.iter().sum() {
            let logp = -3.0 * u();
            let old = logp + (u() - 0.5) * 1.6;
            case.logp.push(logp);
            case.old.push(old);
            case.sampler.push(old + (u() - 0.5) * 0.8);
        }
        case.teacher = case.old.iter().map(|old| old + (u() - 0.5) * 2.0).collect();
        case
    }

    /// Returns the advantage of each token's completion.
    fn token_advantages(&self) -> Vec<f64> {
        let each = self.advantages.iter().zip(&self.lengths);
        each.flat_map(|(advantage, length)| vec![*advantage; *length]).collect()
    }

    /// Loss and gradient. `parts` is the number of equal parts of the optimizer step, of which this is one.
    fn evaluate(&self, plan: &LossPlan, parts: usize) -> Vec<f64> {
        let chosen = chosen_tokens(plan.covariance, &self.token_advantages(), &self.logp, |_| 0.0).unwrap();
        self.evaluate_chosen(plan, parts, chosen)
    }

    fn evaluate_chosen(&self, plan: &LossPlan, parts: usize, chosen: Option<Vec<bool>>) -> Vec<f64> {
        let truncated = vec![false; ROWS];
        let one = Normalizer::for_step(plan, &self.lengths, &truncated, 8).unwrap();
        let normalizer = Normalizer { completions: parts * ROWS, tokens: parts * one.tokens, ..one };
        let batch = Batch {
            lengths: &self.lengths,
            logp: &self.logp,
            old: Some(&self.old),
            sampler: Some(&self.sampler),
            reference: Some(&self.teacher),
            teacher: None,
            entropy: None,
            kept: None,
            chosen: chosen.as_deref(),
            advantages: &self.advantages,
            truncated: &truncated,
        };
        let out = evaluate(&batch, plan, &normalizer).unwrap();
        [vec![out.loss], out.dlogp].concat()
    }
}

fn golden() -> BTreeMap<String, Vec<Vec<Option<f64>>>> {
    serde_json::from_str(include_str!("data/peers_golden.json")).unwrap()
}

/// verl adds 1e-8 to the number of tokens, and inputs have ten digits.
const CLOSE: f64 = 2e-8;

fn assert_equal(name: &str, seed: usize, got: &[f64], want: &[Option<f64>]) {
    assert_eq!(got.len(), want.len(), "{name}, case {seed}");
    for (at, (got, want)) in got.iter().zip(want).enumerate() {
        let Some(want) = want else { continue };
        assert!(
            (got - want).abs() <= CLOSE * want.abs().max(1.0),
            "{name}, case {seed}, {at}: {got}, peer {want}"
        );
    }
}

#[test]
fn losses_and_gradients_equal_those_of_trl_and_verl() {
    let golden = golden();
    let plan = |name: &str| recipe(name).unwrap().loss;
    let capped = Correction { kind: CorrectionKind::TokenTruncate, max: 1.2, min: None };
    let gmpo = LossPlan { surrogate: Surrogate::GeometricMean { low: 0.4, high: 0.3 }, ..plan("gmpo") };
    let clip = Surrogate::Clip { low: 0.2, high: 0.28, delta: None };
    let dppo = |divergence, bound| LossPlan {
        surrogate: Surrogate::Dppo { divergence, low: bound, high: 2.0 * bound, cap: 1.4 },
        ..plan("dppo_tv")
    };
    let cases = [
        ("luspo", LossPlan { surrogate: clip, ..plan("luspo") }, 2),
        ("vespo", plan("vespo"), 2),
        ("vespo_corrected", LossPlan { correction: capped, ..plan("vespo") }, 2),
        (
            "off_policy_mask",
            LossPlan { surrogate: clip, beta: 0.0, off_policy_threshold: Some(0.1), ..plan("grpo") },
            2,
        ),
        ("distillation", LossPlan { surrogate: clip, beta: 0.0, distillation: 0.7, ..plan("grpo") }, 2),
        ("rloo", LossPlan { surrogate: clip, ..plan("rloo") }, 1),
        ("dppo_tv", dppo(PolicyShift::TotalVariation, 0.1), 2),
        ("dppo_kl", dppo(PolicyShift::Kl, 0.02), 2),
        ("kl_cov", LossPlan { covariance: Covariance::Kl { share: 0.3, coef: 0.7 }, ..plan("kl_cov") }, 2),
        ("gmpo", gmpo, 2),
        ("gmpo_corrected", LossPlan { correction: capped, ..gmpo }, 1),
    ];
    for (name, plan, parts) in cases {
        assert_eq!(golden[name].len(), 200);
        for (seed, want) in golden[name].iter().enumerate() {
            let mut case = Case::new(seed);
            if name.starts_with("dppo") {
                // The divergence is defined for probabilities of at most 1.
                case.old.iter_mut().for_each(|old| *old = old.min(-1e-3));
            }
            let mut got = case.evaluate(&plan, parts);
            // An empty completion has a ratio of 1 there and adds a constant to the loss. Here it adds nothing.
            if case.lengths[0] == 0 && (["rloo", "gmpo"].contains(&name)) {
                got[0] -= case.advantages[0] / (parts * ROWS) as f64;
            }
            assert_equal(name, seed, &got, want);
        }
    }
}

/// verl chooses at random, so its choice is part of the golden numbers. It leaves out tokens that the ratio has clipped, which have no
/// gradient either way.
#[test]
fn clip_cov_equals_that_of_verl() {
    let covariance = Covariance::Clip { share: 0.3, low: 0.05, high: 1.0 };
    let clip = Surrogate::Clip { low: 0.2, high: 0.28, delta: None };
    let plan = LossPlan { surrogate: clip, covariance, ..recipe("clip_cov").unwrap().loss };
    let golden = &golden()["clip_cov"];
    assert_eq!(golden.len(), 200);
    let (mut both, mut fewer) = (0, 0);
    for (seed, all) in golden.iter().enumerate() {
        let case = Case::new(seed);
        let tokens = case.logp.len();
        let (want, left_out) = all.split_at(1 + tokens);
        let verl: Vec<bool> = left_out.iter().map(|own| *own == Some(1.0)).collect();
        assert_equal("clip_cov", seed, &case.evaluate_chosen(&plan, 2, Some(verl.clone())), want);

        let advantages = case.token_advantages();
        let clipped: Vec<bool> = (0..tokens)
            .map(|t| {
                let ratio = (case.logp[t] - case.old[t]).exp();
                ratio < 0.8 && advantages[t] < 0.0 || ratio > 1.28 && advantages[t] > 0.0
            })
            .collect();
        // With verl's order, the same tokens are chosen.
        let draw = |t: usize| if verl[t] { 0.0 } else { 1.0 + f64::from(u8::from(clipped[t])) };
        let own = chosen_tokens(covariance, &advantages, &case.logp, draw).unwrap().unwrap();
        assert!(own.iter().filter(|own| **own).count() <= (tokens * 3 / 10).max(1));
        for t in 0..tokens {
            assert_eq!(own[t] && !clipped[t], verl[t], "case {seed}, token {t}");
        }
        both += usize::from(verl.iter().filter(|own| **own).count() >= 2);
        fewer += usize::from(verl.iter().any(|own| *own) && clipped.iter().any(|own| *own));
    }
    assert!(both > 20 && fewer > 100, "{both} {fewer}");
}

#[test]
fn advantages_equal_those_of_verl_and_maxrl() {
    let golden = golden();
    let names = [
        ("rloo", AdvantageKind::LeaveOneOut),
        ("grpo_passk", AdvantageKind::PassAtK),
        ("maxrl", AdvantageKind::MaxRl),
        ("reinforce_plus_plus", AdvantageKind::Whitened),
        ("reinforce_plus_plus_baseline", AdvantageKind::GroupCenterWhitened),
    ];
    for (name, kind) in names {
        let name = format!("advantages/{name}");
        assert_eq!(golden[&name].len(), 200);
        for (seed, want) in golden[&name].iter().enumerate() {
            let case = Case::new(seed);
            let rewards: Vec<Option<f64>> = case.rewards.iter().copied().map(Some).collect();
            let got = advantages(&rewards, GROUP, kind, 1.0, &case.lengths).unwrap();
            assert_equal(&name, seed, &got.values, want);
        }
    }
}
