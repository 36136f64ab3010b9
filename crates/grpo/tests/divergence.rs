//! Divergences from a teacher compared with the functions of TRL themselves (`data/divergence_golden.py`), and with central differences.
#![allow(clippy::unwrap_used, missing_docs)]

use omnigrpo_grpo::{
    Batch, Divergence, Error, LossPlan, Normalizer, RECIPES, TeacherTokens, evaluate, metric,
};

const TOKENS: usize = 4;
const VOCAB: usize = 12;
const BETAS: [f64; 5] = [0.0, 0.25, 0.5, 0.9, 1.0];
const TOPS: [usize; 4] = [1, 3, 8, VOCAB];

/// Logits of policy and teacher, `[TOKENS, VOCAB]`, from the same generator as in Python.
fn logits(seed: u64) -> [Vec<f64>; 2] {
    let mut state = seed;
    // SplitMix64.
    let mut u = || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
    };
    [0; 2].map(|_| (0..TOKENS * VOCAB).map(|_| 6.0 * (u() - 0.5)).collect())
}

fn log_softmax(logits: &[f64]) -> Vec<f64> {
    let of_row = |row: &[f64]| {
        let lse = row.iter().map(|z| z.exp()).sum::<f64>().ln();
        row.iter().map(|z| z - lse).collect::<Vec<_>>()
    };
    logits.chunks(VOCAB).flat_map(of_row).collect()
}

/// Indices of the `k` largest numbers of each row.
fn top(rows: &[f64], k: usize) -> Vec<usize> {
    let of_row = |row: &[f64]| {
        let mut ids: Vec<usize> = (0..VOCAB).collect();
        ids.sort_by(|a, b| row[*b].total_cmp(&row[*a]));
        ids.truncate(k);
        ids
    };
    rows.chunks(VOCAB).flat_map(of_row).collect()
}

fn gathered(rows: &[f64], ids: &[usize], k: usize) -> Vec<f64> {
    ids.iter().enumerate().map(|(at, id)| rows[at / k * VOCAB + id]).collect()
}

fn divergence(beta: f64, top_k: usize) -> Divergence {
    match beta {
        0.0 => Divergence::ForwardKl { top_k },
        1.0 => Divergence::ReverseKl { top_k },
        _ => Divergence::Jsd { top_k, beta },
    }
}

fn plan(divergence: Divergence) -> LossPlan {
    LossPlan { beta: 0.0, distillation: 1.0, divergence, ..RECIPES[0].loss }
}

/// Loss of one completion without an advantage, its derivatives by the policy's log-probabilities, and the metric.
fn taught(plan: &LossPlan, k: usize, logp: &[f64], teacher: &[f64]) -> Result<(f64, Vec<f64>, f64), Error> {
    let sampled = vec![-1.0; TOKENS];
    let batch = Batch {
        lengths: &[TOKENS],
        logp: &sampled,
        old: None,
        sampler: None,
        reference: Some(&sampled),
        teacher: Some(TeacherTokens { k, logp, teacher }),
        entropy: None,
        kept: None,
        chosen: None,
        advantages: &[0.0],
        truncated: &[false],
    };
    let normalizer = Normalizer::for_step(plan, &[TOKENS], &[false], 8)?;
    let out = evaluate(&batch, plan, &normalizer)?;
    let of_metric = out.sums.metrics().into_iter().find(|(name, _)| name == metric::TEACHER_DIVERGENCE);
    assert!(out.dlogp.iter().all(|&d| d == 0.0));
    assert_eq!(out.loss, out.teacher_term);
    Ok((out.loss, out.dteacher, of_metric.and_then(|(_, value)| value).unwrap()))
}

#[test]
fn divergences_and_their_gradients_by_logits_equal_those_of_trl() {
    let golden: Vec<Vec<f64>> = serde_json::from_str(include_str!("data/divergence_golden.json")).unwrap();
    let mut cases = golden.iter();
    for seed in 0..20 {
        let [policy, teacher] = logits(seed).map(|rows| log_softmax(&rows));
        for (beta, k) in BETAS.into_iter().flat_map(|beta| TOPS.map(|k| (beta, k))) {
            let ids = top(&teacher, k);
            let [logp, of_teacher] = [&policy, &teacher].map(|rows| gathered(rows, &ids, k));
            let plan = plan(divergence(beta, k));
            let (loss, dlogp, told) = taught(&plan, k, &logp, &of_teacher).unwrap();
            // The head's gradient: dlogp_j (1[token j] - p), as in the kernels.
            let mut dlogits: Vec<f64> = policy.iter().map(|lp| -lp.exp()).collect();
            for (row, d) in dlogits.chunks_mut(VOCAB).zip(dlogp.chunks(k)) {
                let total: f64 = d.iter().sum();
                row.iter_mut().for_each(|p| *p *= total);
            }
            for (at, id) in ids.iter().enumerate() {
                dlogits[at / k * VOCAB + id] += dlogp[at];
            }
            let want = cases.next().unwrap();
            assert!((told - loss).abs() < 1e-12);
            for (got, want) in std::iter::once(loss).chain(dlogits).zip(want) {
                assert!((got - want).abs() < 1e-9, "case {seed}, beta {beta}, {k} tokens: {got}, TRL {want}");
            }
        }
    }
    assert!(cases.next().is_none());
}

#[test]
fn gradients_equal_central_differences() {
    let step = 1e-6;
    for (beta, k) in BETAS.into_iter().flat_map(|beta| [1, 5].map(|k| (beta, k))) {
        let [policy, teacher] = logits(91).map(|rows| log_softmax(&rows));
        let ids = top(&teacher, k);
        let [logp, of_teacher] = [&policy, &teacher].map(|rows| gathered(rows, &ids, k));
        let plan = LossPlan { distillation: 0.3, ..plan(divergence(beta, k)) };
        let (_, dlogp, _) = taught(&plan, k, &logp, &of_teacher).unwrap();
        for at in 0..logp.len() {
            let moved = |delta: f64| {
                let mut logp = logp.clone();
                logp[at] += delta;
                taught(&plan, k, &logp, &of_teacher).unwrap().0
            };
            let numeric = (moved(step) - moved(-step)) / (2.0 * step);
            assert!(
                (numeric - dlogp[at]).abs() < 1e-8,
                "beta {beta}, {k} tokens: {} and {numeric}",
                dlogp[at]
            );
        }
    }
}

/// A policy equal to its teacher has nothing to learn, also where its most probable tokens have all the probability. The divergence of
/// others is above 0.
#[test]
fn a_divergence_is_zero_for_equal_distributions_alone() {
    let [policy, teacher] = logits(5).map(|rows| log_softmax(&rows));
    for (beta, k) in BETAS.into_iter().flat_map(|beta| TOPS.map(|k| (beta, k))) {
        let ids = top(&teacher, k);
        let [logp, of_teacher] = [&policy, &teacher].map(|rows| gathered(rows, &ids, k));
        let plan = plan(divergence(beta, k));
        let (none, _, _) = taught(&plan, k, &of_teacher, &of_teacher).unwrap();
        let (some, _, _) = taught(&plan, k, &logp, &of_teacher).unwrap();
        assert!(none.abs() < 1e-12 && some > 1e-3, "beta {beta}, {k} tokens: {none} and {some}");
    }
    // A rest that is lost in rounding is as small as the smallest, and pulls at nothing.
    let sharp = [vec![-1e-9; TOKENS], vec![-1e-8; TOKENS]];
    let (loss, dlogp, _) = taught(&plan(divergence(0.5, 1)), 1, &sharp[0], &sharp[1]).unwrap();
    assert!(loss.abs() < 1e-7 && dlogp.iter().all(|d| d.abs() < 1e-7), "{loss}, {dlogp:?}");
}

#[test]
fn wrong_plans_and_batches_are_refused() {
    let logp = vec![-1.0; TOKENS * 2];
    let refused =
        |plan: LossPlan, k: usize, teacher: &[f64]| taught(&plan, k, &logp, teacher).unwrap_err().to_string();
    let of = |top_k, beta| plan(Divergence::Jsd { top_k, beta });
    assert!(refused(of(0, 0.5), 2, &logp).contains("divergence.top_k is 0, expected at least 1 token"));
    assert!(refused(of(2, 1.5), 2, &logp).contains("divergence.beta is 1.5"));
    assert!(refused(of(2, 0.5), 2, &logp[1..]).contains("got 7 entries, expected 8"));
    assert!(refused(of(2, 0.5), 3, &logp).contains("got 8 entries, expected 12"));
    let mut broken = logp.clone();
    broken[5] = f64::NEG_INFINITY;
    assert!(refused(of(2, 0.5), 2, &broken).contains("completion 0, token 2 is -inf"));
    assert!(
        refused(plan(Divergence::Sampled), 2, &logp)
            .contains("Batch::teacher needs a divergence over the teacher")
    );
}
