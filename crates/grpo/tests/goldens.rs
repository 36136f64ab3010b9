//! Losses and gradients compared with torch float64 autograd (`data/loss_golden.py`).
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

use omnigrpo_grpo::{
    Aggregation, Batch, Correction, CorrectionKind, Covariance, Kl, LossPlan, Normalizer, RatioLevel,
    Surrogate, evaluate, top_entropy_tokens,
};
use serde::Deserialize;

#[derive(Deserialize)]
struct Golden {
    lengths: Vec<usize>,
    truncated: Vec<bool>,
    advantages: Vec<f64>,
    max_completion_length: usize,
    logp: Vec<f64>,
    old: Vec<f64>,
    reference: Vec<f64>,
    entropy: Vec<f64>,
    sampler: Vec<f64>,
    gates: Vec<Gate>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Gate {
    entropies: Vec<f64>,
    top: f64,
    kept: Vec<bool>,
}

#[derive(Deserialize)]
struct Case {
    name: String,
    surrogate: String,
    settings: Settings,
    ratio: RatioLevel,
    aggregation: Aggregation,
    kl: Kl,
    beta: f64,
    off_policy: bool,
    mask_truncated: bool,
    top_entropy: f64,
    entropy_coef: f64,
    correction: CorrectionKind,
    correction_max: f64,
    correction_min: Option<f64>,
    loss: f64,
    kl_value: f64,
    dlogp: Vec<f64>,
    dentropy: Vec<f64>,
    /// Mean and minimum below the clip range, mean and maximum above it.
    clip_ratios: Option<[f64; 4]>,
}

#[derive(Deserialize)]
struct Settings {
    low: Option<f64>,
    high: Option<f64>,
    delta: Option<f64>,
    cap: Option<f64>,
    pos: Option<f64>,
    neg: Option<f64>,
}

fn plan(case: &Case) -> LossPlan {
    let s = &case.settings;
    let surrogate = match case.surrogate.as_str() {
        "clip" => Surrogate::Clip { low: s.low.unwrap(), high: s.high.unwrap(), delta: s.delta },
        "ratio" => Surrogate::Ratio,
        "cispo" => Surrogate::Cispo { cap: s.cap.unwrap() },
        "sapo" => Surrogate::Sapo { pos: s.pos.unwrap(), neg: s.neg.unwrap() },
        "log_prob" => Surrogate::LogProb,
        other => panic!("unknown surrogate {other}"),
    };
    LossPlan {
        surrogate,
        ratio: case.ratio,
        aggregation: case.aggregation,
        kl: case.kl,
        beta: case.beta,
        entropy_coef: case.entropy_coef,
        top_entropy: case.top_entropy,
        correction: Correction { kind: case.correction, max: case.correction_max, min: case.correction_min },
        covariance: Covariance::Off,
        off_policy_threshold: None,
        distillation: 0.0,
        divergence: omnigrpo_grpo::Divergence::Sampled,
        mask_truncated_completions: case.mask_truncated,
    }
}

fn assert_close(what: &str, case: &Case, got: &[f64], expected: &[f64]) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let tolerance = 1e-12 * expected.abs().max(1.0);
        let label = format!("{what}[{i}] of {} kl {:?} off-policy {}", case.name, case.kl, case.off_policy);
        assert!((got - expected).abs() <= tolerance, "{label}: got {got}, torch {expected}");
    }
}

#[test]
fn every_loss_and_gradient_equals_torch_autograd() {
    let golden: Golden = serde_json::from_str(include_str!("data/loss_golden.json")).unwrap();
    for case in &golden.cases {
        let plan = plan(case);
        let cut = golden.lengths.iter().zip(&golden.truncated);
        let counts: Vec<bool> =
            cut.flat_map(|(length, cut)| vec![!(*cut && case.mask_truncated); *length]).collect();
        let entropies = golden.entropy.iter().zip(&counts).filter_map(|(h, counts)| counts.then_some(*h));
        let kept = top_entropy_tokens(&entropies.collect::<Vec<f64>>(), case.top_entropy).unwrap();
        let kept_tokens = kept.as_ref().map(|kept| kept.iter().filter(|kept| **kept).count());
        let kept = kept.map(|kept| {
            let mut kept = kept.into_iter();
            counts.iter().map(|counts| *counts && kept.next().unwrap()).collect::<Vec<bool>>()
        });
        let normalizer =
            Normalizer::for_step(&plan, &golden.lengths, &golden.truncated, golden.max_completion_length)
                .unwrap()
                .with_kept_tokens(kept_tokens);
        let batch = Batch {
            lengths: &golden.lengths,
            logp: &golden.logp,
            old: case.off_policy.then_some(&golden.old),
            sampler: Some(&golden.sampler),
            reference: Some(&golden.reference),
            teacher: None,
            entropy: Some(&golden.entropy),
            kept: kept.as_deref(),
            chosen: None,
            advantages: &golden.advantages,
            truncated: &golden.truncated,
        };
        let out = evaluate(&batch, &plan, &normalizer).unwrap();
        assert_close("loss", case, &[out.loss], &[case.loss]);
        assert_close("dlogp", case, &out.dlogp, &case.dlogp);
        let dentropy =
            if case.entropy_coef == 0.0 { vec![0.0; golden.logp.len()] } else { case.dentropy.clone() };
        assert_close("dentropy", case, &out.dentropy, &dentropy);
        let metrics = out.sums.metrics();
        let metric = |key: &str| metrics.iter().find(|(name, _)| name == key).and_then(|(_, value)| *value);
        let clipped = ["low_mean", "low_min", "high_mean", "high_max"];
        let clipped = clipped.map(|name| metric(&format!("clip_ratio/{name}")));
        assert_eq!(clipped[0].is_some(), case.clip_ratios.is_some(), "{}", case.name);
        let expected = case.clip_ratios.unwrap_or_default();
        assert_close("clip_ratio", case, &clipped.map(Option::unwrap_or_default), &expected);
        let kl = metric("kl");
        let expected = (case.beta > 0.0).then_some(case.kl_value);
        assert_eq!(kl.is_some(), expected.is_some());
        assert_close("kl", case, &[kl.unwrap_or(0.0)], &[expected.unwrap_or(0.0)]);
    }
    assert_eq!(golden.cases.len(), 212);
}

#[test]
fn the_entropy_gate_keeps_or_drops_ties_as_trl_does() {
    let golden: Golden = serde_json::from_str(include_str!("data/loss_golden.json")).unwrap();
    for Gate { entropies, top, kept } in &golden.gates {
        let got = top_entropy_tokens(entropies, *top).unwrap();
        assert_eq!(got.as_ref(), Some(kept), "{top} of {entropies:?}");
    }
    assert_eq!(golden.gates.len(), 42);
}
