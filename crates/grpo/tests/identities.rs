//! Finite differences and identities of the losses, on data generated in this file.
#![allow(clippy::unwrap_used, missing_docs)]

use omnigrpo_grpo::{
    Aggregation, Batch, Correction, CorrectionKind, Covariance, CustomTerm, Dual, Error, Kl, LossOutput,
    LossPlan, MetricSums, Normalizer, PolicyShift, PolicyToken, RECIPES, RatioLevel, Surrogate, evaluate,
    recipe, top_entropy_tokens,
};
use proptest::prelude::*;

/// A batch that owns its slices.
#[derive(Debug, Clone)]
struct Data {
    lengths: Vec<usize>,
    logp: Vec<f64>,
    old: Option<Vec<f64>>,
    sampler: Vec<f64>,
    reference: Vec<f64>,
    entropy: Vec<f64>,
    kept: Option<Vec<bool>>,
    chosen: Option<Vec<bool>>,
    advantages: Vec<f64>,
    truncated: Vec<bool>,
}

const MAX_LENGTH: usize = 9;

impl Data {
    /// Generates unstructured numbers from a multiplicative congruential sequence.
    fn new(lengths: &[usize], off_policy: bool, seed: u64) -> Self {
        let mut state = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let mut uniform = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 11) as f64 / (1_u64 << 53) as f64
        };
        let tokens: usize = lengths.iter().sum();
        let logp: Vec<f64> = (0..tokens).map(|_| -3.0 * uniform()).collect();
        let mut near =
            |spread: f64| logp.iter().map(|lp| lp + spread * (uniform() - 0.5)).collect::<Vec<_>>();
        let (old, reference, sampler) = (near(1.2), near(2.0), near(0.5));
        Self {
            lengths: lengths.to_vec(),
            old: off_policy.then_some(old),
            sampler,
            reference,
            entropy: (0..tokens).map(|_| 2.0 * uniform()).collect(),
            kept: None,
            chosen: None,
            advantages: lengths.iter().map(|_| 3.0 * uniform() - 1.5).collect(),
            truncated: lengths.iter().enumerate().map(|(c, _)| c % 3 == 2).collect(),
            logp,
        }
    }

    fn batch(&self) -> Batch<'_> {
        Batch {
            lengths: &self.lengths,
            logp: &self.logp,
            old: self.old.as_deref(),
            sampler: Some(&self.sampler),
            reference: Some(&self.reference),
            teacher: None,
            entropy: Some(&self.entropy),
            kept: self.kept.as_deref(),
            chosen: self.chosen.as_deref(),
            advantages: &self.advantages,
            truncated: &self.truncated,
        }
    }

    fn normalizer(&self, plan: &LossPlan) -> Normalizer {
        let normalizer = Normalizer::for_step(plan, &self.lengths, &self.truncated, MAX_LENGTH).unwrap();
        let counts = self.lengths.iter().zip(&self.truncated);
        let counts = counts.flat_map(|(n, cut)| vec![!(*cut && plan.mask_truncated_completions); *n]);
        let kept =
            self.kept.as_ref().map(|kept| kept.iter().zip(counts).filter(|(kept, counts)| **kept && *counts));
        normalizer.with_kept_tokens(kept.map(Iterator::count))
    }

    /// Returns the same data with an entropy gate.
    fn gated(self, top: f64) -> Self {
        Self { kept: top_entropy_tokens(&self.entropy, top).unwrap(), ..self }
    }

    /// Returns the same data with every other token chosen, if the plan's covariance is on.
    fn chosen(self, plan: &LossPlan) -> Self {
        let every_other = (0..self.logp.len()).map(|t| t % 2 == 0).collect();
        Self { chosen: (plan.covariance != Covariance::Off).then_some(every_other), ..self }
    }

    fn evaluate(&self, plan: &LossPlan) -> LossOutput {
        let data = self.clone().chosen(plan);
        evaluate(&data.batch(), plan, &data.normalizer(plan)).unwrap()
    }

    /// Returns completions `from..to` as a part of the same step.
    fn part(&self, from: usize, to: usize) -> Self {
        let start: usize = self.lengths[..from].iter().sum();
        let end = start + self.lengths[from..to].iter().sum::<usize>();
        Self {
            lengths: self.lengths[from..to].to_vec(),
            logp: self.logp[start..end].to_vec(),
            old: self.old.as_ref().map(|old| old[start..end].to_vec()),
            sampler: self.sampler[start..end].to_vec(),
            reference: self.reference[start..end].to_vec(),
            entropy: self.entropy[start..end].to_vec(),
            kept: self.kept.as_ref().map(|kept| kept[start..end].to_vec()),
            chosen: self.chosen.as_ref().map(|chosen| chosen[start..end].to_vec()),
            advantages: self.advantages[from..to].to_vec(),
            truncated: self.truncated[from..to].to_vec(),
        }
    }
}

fn close(got: f64, expected: f64, tolerance: f64) -> bool {
    (got - expected).abs() <= tolerance * expected.abs().max(1.0)
}

/// Yields every recipe with every KL, one with a teacher, and one with the off-policy mask.
fn plans() -> impl Iterator<Item = (String, LossPlan)> {
    let taught = LossPlan { distillation: 0.7, beta: 0.0, ..RECIPES[0].loss };
    let masked = LossPlan { off_policy_threshold: Some(0.05), ..RECIPES[0].loss };
    let all = RECIPES.iter().flat_map(|row| {
        [(Kl::Off, 0.0), (Kl::K3, 0.3), (Kl::K3Corrected, 0.3), (Kl::K1, 0.3)].map(|(kl, beta)| {
            let plan =
                LossPlan { kl, beta, entropy_coef: 0.02, mask_truncated_completions: true, ..row.loss };
            (format!("{} {kl:?}", row.name), plan)
        })
    });
    all.chain([("a teacher".to_owned(), taught), ("off-policy mask".to_owned(), masked)])
}

/// Returns the value whose derivative is `dlogp`: factors that the formula treats as constants keep their first value.
fn surrogate_value(data: &Data, moved: &Data, plan: &LossPlan, normalizer: &Normalizer) -> f64 {
    let old = data.old.as_ref().unwrap();
    // The weight of a token of a completion: move the log-probabilities under the ratios of the unmoved data.
    let weight: Box<dyn Fn(std::ops::Range<usize>, usize, f64) -> f64> = match plan.surrogate {
        Surrogate::Cispo { cap } => Box::new(move |_, t, _| (data.logp[t] - old[t]).exp().min(cap)),
        Surrogate::Dppo { divergence, low, high, cap } => Box::new(move |_, t, advantage| {
            let (p, q) = (data.logp[t].exp(), old[t].exp());
            let bound = if advantage > 0.0 { high } else { low };
            let distance = match divergence {
                PolicyShift::TotalVariation => (p - q).abs(),
                PolicyShift::Kl => q * (q / p).ln() + (1.0 - q) * ((1.0 - q) / (1.0 - p)).ln(),
            };
            let beyond = (p - q) * advantage > 0.0 && distance > bound;
            if beyond { 0.0 } else { (p / q).min(cap) }
        }),
        Surrogate::Vespo { pos, neg } => Box::new(move |tokens, _, advantage| {
            let [k, lambda] = if advantage >= 0.0 { pos } else { neg };
            let ln_w: f64 = tokens.map(|t| data.logp[t] - old[t]).sum();
            (lambda + k * ln_w - lambda * ln_w.exp()).exp()
        }),
        _ => return evaluate(&moved.batch(), plan, normalizer).unwrap().loss,
    };
    let mut value = 0.0;
    let mut start = 0;
    for (c, &length) in data.lengths.iter().enumerate() {
        if !data.truncated[c] {
            for t in start..start + length {
                let weight = weight(start..start + length, t, data.advantages[c]);
                value -= weight * data.advantages[c] * moved.logp[t];
            }
        }
        start += length;
    }
    value /= normalizer.tokens as f64;
    let without = evaluate(&moved.batch(), plan, normalizer).unwrap();
    value + without.kl_term + without.entropy_term
}

#[test]
fn gradients_equal_central_differences_for_every_recipe_and_kl() {
    let data = Data::new(&[4, 1, 3, 0, 5, 2], true, 3);
    let step = 1e-6;
    for (name, plan) in plans() {
        // The formulas above do not contain the gate.
        let data = match plan.surrogate {
            Surrogate::Cispo { .. } | Surrogate::Vespo { .. } | Surrogate::Dppo { .. } => data.clone(),
            _ => data.clone().gated(0.8),
        };
        let data = data.chosen(&plan);
        let normalizer = data.normalizer(&plan);
        let out = evaluate(&data.batch(), &plan, &normalizer).unwrap();
        for t in 0..data.logp.len() {
            let at = |delta: f64| {
                let mut moved = data.clone();
                moved.logp[t] += delta;
                surrogate_value(&data, &moved, &plan, &normalizer)
            };
            let numeric = (at(step) - at(-step)) / (2.0 * step);
            let exact = out.dlogp[t];
            assert!(
                (numeric - exact).abs() < 2e-8,
                "{name}: dlogp[{t}] is {exact}, differences give {numeric}"
            );

            let at = |delta: f64| {
                let mut moved = data.clone();
                moved.entropy[t] += delta;
                evaluate(&moved.batch(), &plan, &normalizer).unwrap().loss
            };
            let numeric = (at(step) - at(-step)) / (2.0 * step);
            let exact = out.dentropy[t];
            assert!(
                (numeric - exact).abs() < 2e-8,
                "{name}: dentropy[{t}] is {exact}, differences give {numeric}"
            );
        }
    }
}

#[test]
fn a_correction_weights_differences_from_the_sampler() {
    // The differences are d = ln 2, ln 1/4 and 0 in one completion, ln 3/4 and 0 in another: token weights 2, 1/4, 1
    // and 3/4, 1; completion weights 1/2, 3/4.
    let d = [2.0_f64.ln(), 0.25_f64.ln(), 0.0, 0.75_f64.ln(), 0.0];
    let data = Data {
        lengths: vec![3, 2],
        logp: vec![-1.0; 5],
        old: None,
        sampler: d.iter().map(|d| -1.0 - d).collect(),
        reference: vec![-1.0; 5],
        kept: None,
        chosen: None,
        entropy: vec![0.0; 5],
        advantages: vec![3.0, -2.0],
        truncated: vec![false; 2],
    };
    let at = |kind, max, min| {
        let correction = Correction { kind, max, min };
        let out = data.evaluate(&LossPlan {
            correction,
            aggregation: Aggregation::TokenSum,
            ..recipe("grpo").unwrap().loss
        });
        let metrics = out.sums.metrics();
        let get = |name: &str| {
            let name = format!("sampling/importance_sampling_ratio/{name}");
            metrics.iter().find(|(key, _)| *key == name).and_then(|(_, value)| *value)
        };
        (out.dlogp, [get("min"), get("mean"), get("max")])
    };
    // Each token's gradient is minus its weight times the advantage, over two completions.
    let check = |kind, max, min, weights: [f64; 5], seen: [f64; 3]| {
        let (dlogp, metrics) = at(kind, max, min);
        for (t, weight) in weights.into_iter().enumerate() {
            let expected = -weight * if t < 3 { 3.0 } else { -2.0 } / 2.0;
            assert!(close(dlogp[t], expected, 1e-14), "{kind:?} token {t}: {} {expected}", dlogp[t]);
        }
        for (got, expected) in metrics.into_iter().zip(seen) {
            assert!(close(got.unwrap(), expected, 1e-14), "{kind:?}: {got:?} {expected}");
        }
    };
    use CorrectionKind::{Off, SequenceMask, SequenceTruncate, TokenMask, TokenTruncate};
    check(TokenTruncate, 3.0, None, [2.0, 0.25, 1.0, 0.75, 1.0], [0.25, 1.0, 2.0]);
    check(TokenTruncate, 1.5, Some(0.5), [1.5, 0.5, 1.0, 0.75, 1.0], [0.5, 0.95, 1.5]);
    check(TokenMask, 1.5, Some(0.5), [0.0, 0.0, 1.0, 0.75, 1.0], [0.0, 0.55, 1.0]);
    check(SequenceTruncate, 0.6, None, [0.5, 0.5, 0.5, 0.6, 0.6], [0.5, 0.55, 0.6]);
    check(SequenceMask, 3.0, Some(0.6), [0.0, 0.0, 0.0, 0.75, 0.75], [0.0, 0.375, 0.75]);
    let (dlogp, metrics) = at(Off, 3.0, None);
    assert!(dlogp.iter().take(3).all(|d| close(*d, -1.5, 1e-15)));
    assert_eq!(metrics, [None; 3]);

    let plan = |max, min| LossPlan {
        correction: Correction { kind: TokenMask, max, min },
        ..recipe("grpo").unwrap().loss
    };
    for (max, min, setting) in [
        (0.0, None, "correction.max"),
        (2.0, Some(2.0), "correction.min"),
        (2.0, Some(-0.1), "correction.min"),
    ] {
        let error = evaluate(&data.batch(), &plan(max, min), &data.normalizer(&plan(3.0, None))).unwrap_err();
        assert!(matches!(error, Error::Setting { setting: got, .. } if got == setting), "{error}");
    }
    let missing = Batch { sampler: None, ..data.batch() };
    let error = evaluate(&missing, &plan(3.0, None), &data.normalizer(&plan(3.0, None))).unwrap_err();
    assert!(error.to_string().contains("log-probabilities of the sampler"), "{error}");
}

#[test]
fn parts_of_a_step_add_up_to_the_step() {
    let data = Data::new(&[4, 1, 3, 0, 5, 2, 7, 2], true, 11).gated(0.7);
    for (name, plan) in plans() {
        let data = data.clone().chosen(&plan);
        let normalizer = data.normalizer(&plan);
        let whole = evaluate(&data.batch(), &plan, &normalizer).unwrap();
        let mut loss = 0.0;
        let mut dlogp = Vec::new();
        let mut sums = MetricSums::default();
        for (from, to) in [(0, 2), (2, 3), (3, 7), (7, 8)] {
            let part = evaluate(&data.part(from, to).batch(), &plan, &normalizer).unwrap();
            loss += part.loss;
            dlogp.extend(part.dlogp);
            sums.merge(&part.sums);
        }
        assert!(close(loss, whole.loss, 1e-14), "{name}: {loss} {}", whole.loss);
        assert_eq!(
            dlogp, whole.dlogp,
            "{name}: a token's gradient depends on its completion and the step alone"
        );
        for ((key, part), (_, whole)) in sums.metrics().into_iter().zip(whole.sums.metrics()) {
            assert!(close(part.unwrap(), whole.unwrap(), 1e-13), "{name} {key}: {part:?} {whole:?}");
        }
    }
}

#[test]
fn bnpo_is_a_mean_of_micro_batch_means() {
    let plan = recipe("bnpo").unwrap().loss;
    let data = Data::new(&[4, 1, 5, 2], true, 5);
    let step = data.normalizer(&plan);
    let halves = [data.part(0, 2), data.part(2, 4)];
    let alone: f64 = halves.iter().map(|half| half.evaluate(&plan).loss).sum::<f64>() / 2.0;
    let in_step: f64 = halves
        .iter()
        .map(|half| {
            let normalizer = step.for_micro_batch(&plan, &half.lengths, &half.truncated, 2).unwrap();
            evaluate(&half.batch(), &plan, &normalizer).unwrap().loss
        })
        .sum();
    assert!(close(in_step, alone, 1e-14), "{in_step} {alone}");
    assert!(
        !close(in_step, data.evaluate(&plan).loss, 1e-3),
        "unequal halves weigh differently from one batch"
    );
}

#[test]
fn aggregations_agree_on_equal_lengths() {
    // With every completion at the maximum length, all means are equal.
    let data = Data::new(&[MAX_LENGTH; 4], true, 7);
    let grpo = recipe("grpo").unwrap().loss;
    let expected = data.evaluate(&grpo);
    use Aggregation::{ConstantLength, TokenMeanGlobal, TokenMeanLocal, TokenSum};
    for (aggregation, factor) in
        [(TokenMeanLocal, 1.0), (TokenMeanGlobal, 1.0), (ConstantLength, 1.0), (TokenSum, MAX_LENGTH as f64)]
    {
        let out = data.evaluate(&LossPlan { aggregation, ..grpo });
        assert!(close(out.loss, factor * expected.loss, 1e-14), "{aggregation:?}");
        for (got, expected) in out.dlogp.iter().zip(&expected.dlogp) {
            assert!(close(*got, factor * expected, 1e-14), "{aggregation:?}");
        }
    }
}

#[test]
fn on_policy_value_is_minus_the_mean_advantage_and_the_gradient_is_reinforce() {
    let data = Data::new(&[4, 1, 3], false, 9);
    for name in ["grpo", "gspo", "sapo", "clamped_std"] {
        let mut plan = recipe(name).unwrap().loss;
        plan.beta = 0.0;
        let out = data.evaluate(&plan);
        let mean = data.advantages.iter().sum::<f64>() / 3.0;
        // SAPO's gate is 1/2 at ratio 1 and its factor 4 / tau.
        let value = |a: f64| match plan.surrogate {
            Surrogate::Sapo { pos, neg } => 2.0 * a / if a > 0.0 { pos } else { neg },
            _ => a,
        };
        let expected = -data.advantages.iter().map(|a| value(*a)).sum::<f64>() / 3.0;
        assert!(close(out.policy, expected, 1e-15), "{name}");
        if name != "sapo" {
            assert!(close(out.loss, -mean, 1e-15), "{name}");
        }
        let mut start = 0;
        for (c, length) in data.lengths.iter().enumerate() {
            for t in start..start + length {
                assert!(close(out.dlogp[t], -data.advantages[c] / (3 * length) as f64, 1e-15), "{name} {t}");
            }
            start += length;
        }
    }
}

#[test]
fn old_log_probabilities_equal_to_the_current_ones_are_on_policy() {
    let on = Data::new(&[4, 1, 3], false, 13);
    let off = Data { old: Some(on.logp.clone()), ..on.clone() };
    for (name, plan) in plans() {
        let (on, off) = (on.evaluate(&plan), off.evaluate(&plan));
        assert_eq!(on.loss, off.loss, "{name}");
        assert_eq!(on.dlogp, off.dlogp, "{name}");
    }
}

#[test]
fn zero_advantage_leaves_exactly_the_kl_gradient() {
    let mut data = Data::new(&[4, 1, 3], true, 15);
    data.advantages.fill(0.0);
    // The penalty of kl_cov does not depend on the advantage of its token.
    for row in RECIPES.iter().filter(|row| !matches!(row.loss.covariance, Covariance::Kl { .. })) {
        let off = data.evaluate(&LossPlan { kl: Kl::Off, beta: 0.0, ..row.loss });
        assert!(off.dlogp.iter().all(|d| *d == 0.0), "{}", row.name);
        assert_eq!(off.loss, 0.0, "{}", row.name);
        let on = data.evaluate(&LossPlan {
            kl: Kl::K3,
            beta: 0.5,
            aggregation: Aggregation::TokenSum,
            ..row.loss
        });
        for t in 0..data.logp.len() {
            let expected = 0.5 / 3.0 * (1.0 - (data.reference[t] - data.logp[t]).exp());
            assert!(close(on.dlogp[t], expected, 1e-14), "{}", row.name);
        }
    }
}

#[test]
fn documented_sequence_loss_of_one_completion() {
    // One completion, advantage 1, beta 0.04, on-policy: mean over 3 tokens of (-1 + 0.04 k3).
    let data = Data {
        lengths: vec![3],
        logp: vec![-1.0, -2.0, -0.5],
        old: None,
        sampler: vec![-1.0, -2.0, -0.5],
        reference: vec![-1.2, -1.5, -0.5],
        kept: None,
        chosen: None,
        entropy: vec![0.0; 3],
        advantages: vec![1.0],
        truncated: vec![false],
    };
    let plan = recipe("grpo").unwrap().loss;
    let out = data.evaluate(&plan);
    assert!((out.loss - -0.997767).abs() < 5e-7, "{}", out.loss);
    // k3 = 0.018731, 0.148721, 0.
    let k3 = |t: usize| {
        let one = data.part(0, 1);
        let part = Data {
            lengths: vec![1],
            logp: vec![one.logp[t]],
            sampler: vec![one.sampler[t]],
            reference: vec![one.reference[t]],
            entropy: vec![0.0],
            ..one
        };
        part.evaluate(&LossPlan { beta: 1.0, ..plan }).kl_term
    };
    for (t, expected) in [0.018731, 0.148721, 0.0].into_iter().enumerate() {
        assert!((k3(t) - expected).abs() < 5e-7, "token {t}: {}", k3(t));
    }
}

/// PPO's clipped term, written as a function of one token, has the value and gradient of the built-in term, whose
/// gradient is written by hand.
#[test]
fn a_custom_term_has_the_gradient_of_the_built_in_one() {
    let clipped = CustomTerm(|PolicyToken { ratio, advantage, .. }| {
        let (free, bounded) = (ratio * advantage, ratio.clamp(0.8, 1.3) * advantage);
        -free.min(bounded)
    });
    let reinforce = CustomTerm(|token| -token.logp * token.advantage);
    let clip = Surrogate::Clip { low: 0.2, high: 0.3, delta: None };
    for (surrogate, own) in [(clip, clipped), (Surrogate::LogProb, reinforce)] {
        for ratio in [RatioLevel::Token, RatioLevel::Sequence, RatioLevel::Product] {
            let data = Data::new(&[3, 1, 5, 4], true, 11);
            let plan = LossPlan { surrogate, ratio, ..recipe("grpo").unwrap().loss };
            let (known, own) = (data.evaluate(&plan), LossPlan { surrogate: Surrogate::Custom(own), ..plan });
            let own = data.evaluate(&own);
            assert!(close(own.loss, known.loss, 1e-12) && known.policy != 0.0, "{} {}", own.loss, known.loss);
            for (got, expected) in own.dlogp.iter().zip(&known.dlogp) {
                assert!(close(*got, *expected, 1e-12), "{surrogate:?} {ratio:?}: {got} {expected}");
            }
        }
    }
}

#[test]
fn dual_numbers_follow_the_rules_of_derivatives() {
    let term = |r: f64, l: f64| {
        let (r, l) = (Dual::ratio(r), Dual::logp(l));
        let bent = (r * 2.0 - l / r).tanh() + (l * r).exp() / (r + 3.0);
        bent + r.ln() * r.detach() - r.max(Dual::constant(0.5)) * l.min(Dual::constant(-0.1))
    };
    let (r, l, h) = (1.3, -0.7, 1e-6);
    let found = term(r, l);
    let by = |up: Dual, down: Dual| (up.value - down.value) / (2.0 * h);
    // The detached factor moves with the ratio in the difference: it contributes ln r.
    let by_ratio = by(term(r + h, l), term(r - h, l)) - r.ln();
    assert!(close(found.d_ratio, by_ratio, 1e-6), "{} {by_ratio}", found.d_ratio);
    let by_logp = by(term(r, l + h), term(r, l - h));
    assert!(close(found.d_logp, by_logp, 1e-6), "{} {by_logp}", found.d_logp);
}

#[test]
fn clip_stops_the_gradient_only_on_the_side_of_the_advantage() {
    // Ratios 1.5, 1.5, 0.5, 0.5 with advantages +, -, +, -; range [0.8, 1.2].
    let ratio: [f64; 4] = [1.5, 1.5, 0.5, 0.5];
    let data = Data {
        lengths: vec![1; 4],
        logp: ratio.iter().map(|r| r.ln() - 2.0).collect(),
        old: Some(vec![-2.0; 4]),
        sampler: vec![-2.0; 4],
        reference: vec![-2.0; 4],
        kept: None,
        chosen: None,
        entropy: vec![0.0; 4],
        advantages: vec![1.0, -1.0, 1.0, -1.0],
        truncated: vec![false; 4],
    };
    let plan = LossPlan { beta: 0.0, ..recipe("grpo").unwrap().loss };
    let out = data.evaluate(&plan);
    // -min(r A, clip(r) A): -1.2, 1.5, -0.5, 0.8; a quarter each.
    assert!(close(out.loss, (-1.2 + 1.5 - 0.5 + 0.8) / 4.0, 1e-15));
    for (got, expected) in out.dlogp.iter().zip([0.0, 1.5 / 4.0, -0.5 / 4.0, 0.0]) {
        assert!(close(*got, expected, 1e-15), "{:?}", out.dlogp);
    }
    let metric = |name: &str| out.sums.metrics().into_iter().find(|(key, _)| key == name).unwrap().1.unwrap();
    assert_eq!(metric("clip_ratio/high_mean"), 0.25);
    assert_eq!(metric("clip_ratio/low_mean"), 0.25);
    assert_eq!(metric("clip_ratio/region_mean"), 0.5);
    assert_eq!(metric("clip_ratio/high_max"), 1.0);
    assert_eq!(metric("clip_ratio/low_min"), 0.0);

    // delta 1.3 bounds the second: value 1.3, gradient 0.
    let surrogate = Surrogate::Clip { low: 0.2, high: 0.2, delta: Some(1.3) };
    let out = data.evaluate(&LossPlan { surrogate, ..plan });
    assert!(close(out.loss, (-1.2 + 1.3 - 0.5 + 0.8) / 4.0, 1e-15));
    assert_eq!(out.dlogp[1], 0.0);
}

#[test]
fn a_collapsed_token_gives_a_finite_loss_with_consistent_gradient() {
    let mut data = Data::new(&[2, 2], true, 17);
    data.logp[0] = -900.0;
    data.logp[3] = -0.1;
    data.reference[3] = -700.0;
    data.old.as_mut().unwrap()[3] = -800.0;
    for (name, plan) in plans() {
        let plan = LossPlan { mask_truncated_completions: false, ..plan };
        let out = data.evaluate(&plan);
        assert!(out.loss.is_finite() && out.dlogp.iter().all(|d| d.is_finite()), "{name}");
    }
    let k3 = LossPlan { beta: 1.0, ..recipe("grpo").unwrap().loss };
    let mut data = Data::new(&[1], false, 1);
    (data.logp[0], data.reference[0], data.advantages[0]) = (-30.0, -1.0, 0.0);
    let out = data.evaluate(&k3);
    assert!(close(out.loss, 20_f64.exp() - 21.0, 1e-14));
    assert_eq!(out.dlogp, [0.0]);
    (data.logp[0], data.reference[0]) = (-1.0, -41.0);
    let out = data.evaluate(&k3);
    assert!(close(out.loss, 39.0, 1e-14), "no lower clamp: k3 is linear there");
    assert!(close(out.dlogp[0], 1.0, 1e-14));
}

/// The derivative that torch's autograd gives for TRL's `(exp(x) - x - 1) c` is `-x c`, however far the policy is from
/// its reference and from the sampling policy.
#[test]
fn the_corrected_kl_pulls_in_proportion_to_the_distance() {
    let plan = LossPlan { kl: Kl::K3Corrected, beta: 0.5, ..recipe("grpo").unwrap().loss };
    for x in [-40.0, -6.6, 0.0, 4.8, 19.9, 20.1, 22.1, 30.9, 700.0] {
        for old in [None, Some(-0.3), Some(0.7), Some(-25.0), Some(25.0)] {
            let logp = [-750.0];
            let old = old.map(|d: f64| [logp[0] - d]);
            let batch = Batch {
                lengths: &[1],
                logp: &logp,
                old: old.as_ref().map(<[f64; 1]>::as_slice),
                sampler: None,
                reference: Some(&[logp[0] + x]),
                teacher: None,
                entropy: None,
                kept: None,
                chosen: None,
                advantages: &[0.0],
                truncated: &[false],
            };
            let normalizer = Normalizer::for_step(&plan, &[1], &[false], 8).unwrap();
            let out = evaluate(&batch, &plan, &normalizer).unwrap();
            let ratio = old.map_or(1.0, |old| (logp[0] - old[0]).clamp(-20.0, 20.0).exp());
            let expected = -0.5 * x * ratio;
            let rounding = 1e-6 * ratio;
            assert!(
                (out.dlogp[0] - expected).abs() <= rounding,
                "x {x}, old {old:?}: {} for {expected}",
                out.dlogp[0]
            );
        }
    }
}

#[test]
fn empty_and_masked_completions_stay_in_the_mean() {
    let plan = LossPlan { beta: 0.0, mask_truncated_completions: true, ..recipe("grpo").unwrap().loss };
    let mut data = Data::new(&[2, 0, 3], false, 19);
    data.advantages = vec![1.0, 5.0, 7.0];
    data.truncated = vec![false, false, true];
    let out = data.evaluate(&plan);
    assert!(close(out.loss, -1.0 / 3.0, 1e-15));
    assert_eq!(out.dlogp[2..], [0.0; 3]);
    assert_eq!(data.normalizer(&plan).tokens, 2);

    data.truncated = vec![true; 3];
    for row in RECIPES {
        let out =
            data.evaluate(&LossPlan { mask_truncated_completions: true, entropy_coef: 0.1, ..row.loss });
        assert_eq!(out.loss, 0.0, "{}: everything masked must not divide by zero", row.name);
        assert!(out.dlogp.iter().chain(&out.dentropy).all(|d| *d == 0.0), "{}", row.name);
    }
    let empty = Data::new(&[], false, 0);
    assert_eq!(empty.evaluate(&plan).loss, 0.0);
}

#[test]
fn bad_input_is_named() {
    let plan = recipe("grpo").unwrap().loss;
    let data = Data::new(&[2, 0, 3], true, 21);
    let normalizer = data.normalizer(&plan);
    let error = |data: &Data| evaluate(&data.batch(), &plan, &normalizer).unwrap_err();

    let mut bad = data.clone();
    bad.logp[3] = f64::NEG_INFINITY;
    assert_eq!(
        error(&bad),
        Error::NonFinite { what: "logp", completion: 2, token: 1, value: f64::NEG_INFINITY }
    );
    let mut bad = data.clone();
    bad.reference[0] = f64::NAN;
    assert!(error(&bad).to_string().starts_with("loss: reference logp of completion 0, token 0 is NaN"));
    let mut bad = data.clone();
    bad.advantages[1] = f64::NAN;
    assert!(matches!(error(&bad), Error::NonFinite { completion: 1, .. }));
    let mut bad = data.clone();
    bad.logp.pop();
    assert_eq!(error(&bad), Error::Length { what: "logp", got: 4, expected: 5, per: "one per token" });
    let mut bad = data.clone();
    bad.lengths = vec![usize::MAX, 2, 3];
    assert!(matches!(error(&bad), Error::Length { expected: usize::MAX, .. }));

    let missing = Batch { reference: None, ..data.batch() };
    assert!(matches!(evaluate(&missing, &plan, &normalizer), Err(Error::MissingInput { .. })));
    let no_kl = LossPlan { beta: 0.0, ..plan };
    evaluate(&missing, &no_kl, &normalizer).unwrap();
    let bonus = LossPlan { entropy_coef: 0.1, ..plan };
    let missing = Batch { entropy: None, ..data.batch() };
    assert!(matches!(evaluate(&missing, &bonus, &normalizer), Err(Error::MissingInput { .. })));

    let too_small = data.part(0, 1).normalizer(&plan);
    assert!(matches!(evaluate(&data.batch(), &plan, &too_small), Err(Error::Normalizer { .. })));
    for surrogate in [
        Surrogate::Clip { low: 1.2, high: 0.2, delta: None },
        Surrogate::Clip { low: 0.2, high: 0.2, delta: Some(1.1) },
        Surrogate::Cispo { cap: 0.0 },
        Surrogate::Sapo { pos: 1.0, neg: f64::NAN },
        Surrogate::GeometricMean { low: -0.1, high: 0.4 },
        Surrogate::Vespo { pos: [2.0, f64::INFINITY], neg: [3.0, 2.0] },
    ] {
        let error = evaluate(&data.batch(), &LossPlan { surrogate, ..plan }, &normalizer).unwrap_err();
        assert!(matches!(error, Error::Setting { .. }), "{surrogate:?}");
    }
}

#[test]
fn the_entropy_gate_keeps_the_tokens_above_a_linear_quantile() {
    let kept = |entropies: &[f64], top: f64| -> Option<Vec<usize>> {
        let flags = top_entropy_tokens(entropies, top).unwrap();
        flags.map(|flags| (0..flags.len()).filter(|&token| flags[token]).collect())
    };
    // numpy.quantile([0, 1, 2, 3], 0.5) = 1.5; 0.75 quantile = 2.25; 2/3 quantile = 2, which one token equals.
    let entropies = [2.0, 0.0, 3.0, 1.0];
    assert_eq!(kept(&entropies, 0.5), Some(vec![0, 2]));
    assert_eq!(kept(&entropies, 0.25), Some(vec![2]));
    assert_eq!(kept(&entropies, 1.0 / 3.0), Some(vec![0, 2]));
    assert_eq!(kept(&entropies, 1e-6), Some(vec![2]));
    assert_eq!((kept(&entropies, 1.0), kept(&[], 0.5)), (None, Some(vec![])));
    assert!(top_entropy_tokens(&entropies, 0.0).is_err());
    // Equal entropies are kept or dropped as a whole. The median of the first list is 1, the 3/4 quantile of the second 3.25.
    assert_eq!(kept(&[1.0, 5.0, 1.0, 1.0, 0.0], 0.5), Some(vec![0, 1, 2, 3]));
    assert_eq!(kept(&[1.0, 4.0, 1.0, 1.0, 1.0, 5.0], 0.25), Some(vec![1, 5]));
    // Eight tokens reach the quantile of 0.7, although (1 - 0.7) 10 is a little more than 3.
    let rising: Vec<f64> = (0..11).map(f64::from).collect();
    for (top, tokens) in [(0.2, 3), (0.7, 8), (0.9, 10), (0.95, 10), (0.15, 2)] {
        assert_eq!(kept(&rising, top).unwrap(), (11 - tokens..11).collect::<Vec<_>>(), "{top}");
    }
}

/// Three completions of one prompt have the same first entropy. The loss of a group with equal parts is 0 with and without these
/// tokens, and never with some of them.
#[test]
fn the_entropy_gate_treats_completions_of_a_group_alike() {
    let plan = LossPlan { beta: 0.0, ..recipe("dapo").unwrap().loss };
    for top in [0.2, 0.4, 0.5, 0.6, 0.8] {
        let mut data = Data::new(&[2, 2, 2], false, 4);
        (data.advantages, data.entropy) = (vec![1.0, 1.0, -2.0], vec![0.7, 0.1, 0.7, 0.1, 0.7, 0.1]);
        let data = data.gated(top);
        assert_eq!(data.evaluate(&plan).loss, 0.0, "{top}");
    }
}

/// A masked and an empty completion have the ratio 1, so they count as completions within the clip range.
#[test]
fn clip_ratios_of_sequences_count_every_completion() {
    let plan = LossPlan { mask_truncated_completions: true, ..recipe("gspo").unwrap().loss };
    let data = Data {
        lengths: vec![1, 2, 0, 1],
        logp: vec![-1.0, -1.0, -2.0, -1.0],
        old: Some(vec![-2.0, -2.0, -2.0, -1.0]),
        advantages: vec![1.0, 1.0, 1.0, -1.0],
        truncated: vec![false, true, false, false],
        ..Data::new(&[1, 2, 0, 1], true, 3)
    };
    let metrics = data.evaluate(&plan).sums.metrics();
    let metric = |key: &str| metrics.iter().find(|(name, _)| name == key).unwrap().1.unwrap();
    assert_eq!(metric("clip_ratio/high_mean"), 0.25);
    assert_eq!((metric("clip_ratio/high_max"), metric("clip_ratio/low_min")), (1.0, 0.0));
    assert_eq!((metric("clip_ratio/low_mean"), metric("clip_ratio/region_mean")), (0.0, 0.25));
}

/// The gate was decided before, so entropies of the pass change only the bonus, which is divided by the kept tokens.
#[test]
fn the_entropy_gate_ignores_entropies_of_the_pass() {
    let plan = LossPlan { entropy_coef: 0.5, ..recipe("grpo").unwrap().loss };
    let data = Data::new(&[4, 3], true, 5).gated(0.4);
    let tokens = data.kept.as_ref().unwrap().iter().filter(|kept| **kept).count();
    assert_eq!(tokens, 3);
    let before = data.evaluate(&plan);
    let mut moved = data.clone();
    moved.entropy.iter_mut().for_each(|h| *h = 3.0 - *h);
    let after = moved.evaluate(&plan);
    assert_eq!((&after.dlogp, &after.dentropy), (&before.dlogp, &before.dentropy));
    for (d, kept) in after.dentropy.iter().zip(data.kept.as_ref().unwrap()) {
        assert_eq!(*d, if *kept { -0.5 / 3.0 } else { 0.0 });
    }
    let no_number = data.normalizer(&plan).with_kept_tokens(None);
    assert!(matches!(evaluate(&data.batch(), &plan, &no_number), Err(Error::MissingInput { .. })));
    let too_few = data.normalizer(&plan).with_kept_tokens(Some(2));
    assert!(matches!(
        evaluate(&data.batch(), &plan, &too_few),
        Err(Error::Normalizer { unit: "tokens kept", got: 3, expected: 2 })
    ));
}

proptest! {
    #[test]
    fn any_finite_batch_gives_a_finite_loss_or_an_error(
        lengths in prop::collection::vec(0_usize..5, 0..5),
        scale in prop::sample::select(vec![1e-300, 1.0, 50.0, 1e6, 1e300]),
        seed in any::<u64>(),
        row in 0..RECIPES.len(),
        kl in prop::sample::select(vec![Kl::Off, Kl::K3, Kl::K3Corrected, Kl::K1]),
        level in prop::sample::select(vec![RatioLevel::Token, RatioLevel::Sequence, RatioLevel::Product]),
    ) {
        let mut data = Data::new(&lengths, true, seed);
        data.logp.iter_mut().for_each(|x| *x *= scale);
        let plan = LossPlan { kl, ratio: level, beta: 0.1, ..RECIPES[row].loss };
        let normalizer = data.normalizer(&plan);
        if let Ok(out) = evaluate(&data.batch(), &plan, &normalizer) {
            prop_assert!(out.loss.is_finite());
            prop_assert!(out.dlogp.iter().all(|d| d.is_finite()));
        }
    }
}
