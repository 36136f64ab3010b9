//! Conversion of rewards to advantages. An advantage measures how much better a completion is than the others of its prompt.
//!
//! Sources: DeepSeekMath (arXiv 2402.03300) eq. 3 and TRL 1.16 `GRPOTrainer` for [`AdvantageKind::GroupStd`],
//! [`AdvantageKind::Batch`], [`AdvantageKind::GroupCenter`] and [`normalize_then_sum`] (GDPO); the Qwen2.5-VL video trainer for
//! [`AdvantageKind::GroupStdClamped`].
//!
//! A reward of `None` means "not scorable": means and deviations exclude the row, and its advantage is 0.
//!
//! Differences from TRL:
//! - Rewards that are equal up to rounding count as equal: a deviation of at most `1e-8 * max(1, max|R|)` is zero, and such a
//!   group gets advantages of exactly 0. A weighted sum that cancels leaves a residue around 1e-17, whose normalised value would
//!   be noise.
//! - A group with a single scorable row has a deviation of 0, so its advantage is 0. TRL computes NaN and replaces it by 0. A
//!   group of one completion also gets 0; its sample deviation is NaN in torch.

use serde::{Deserialize, Serialize};

use crate::Error;

/// Constant added to a standard deviation before dividing by it, following TRL.
const STD_EPSILON: f64 = 1e-4;
/// Constant added to a standard deviation by [`AdvantageKind::PassAtK`], following verl.
const PASS_EPSILON: f64 = 1e-6;
/// Constant added to a mean by [`AdvantageKind::MaxRl`], following the paper's program.
const MEAN_EPSILON: f64 = 1e-6;
/// Constant added to a variance by [`AdvantageKind::Whitened`], following verl.
const WHITEN_EPSILON: f64 = 1e-8;
/// Lower bound of the population deviation in [`AdvantageKind::GroupStdClamped`].
const STD_CLAMP: f64 = 0.01;
/// Multiple of `max(1, max|R|)` below which a deviation is attributed to rounding.
const ZERO_STD: f64 = 1e-8;

/// Largest accepted reward; larger ones could make squares and sums infinite.
const MAX_REWARD: f64 = 1e100;

/// Formula that converts the rewards of a group to advantages. `R` is a row's reward; all deviations are over scorable
/// rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AdvantageKind {
    /// `(R - mean_group) / (std_group + 1e-4)`, sample deviation (n - 1). TRL `scale_rewards = group`.
    #[default]
    GroupStd,
    /// `(R - mean_group) / (std_batch + 1e-4)`, sample deviation over all rows. TRL `scale_rewards = batch`.
    Batch,
    /// `R - mean_group`. TRL `scale_rewards = none`, Dr. GRPO.
    GroupCenter,
    /// `(R - mean_group) / max(std_group, 0.01)`, population deviation (n). If every group's deviation is below 0.01,
    /// mean and deviation of the complete batch are used instead; a group of equal rewards can then have a non-zero
    /// advantage.
    GroupStdClamped,
    /// `R` minus the mean reward that the rest of its group has: `(R - mean_group) n / (n - 1)` (RLOO, arXiv 2402.14740).
    LeaveOneOut,
    /// `(R - m) / sqrt(v + 1e-8)`, with mean and sample variance over all tokens of the batch, each with its row's reward
    /// (REINFORCE++, arXiv 2501.03262; verl `reinforce_plus_plus` with `gamma` 1).
    Whitened,
    /// [`Self::Whitened`] of `R - mean_group` (verl `reinforce_plus_plus_baseline`).
    GroupCenterWhitened,
    /// `(R - second) / (std_group + 1e-6)` for the first best row of a group, with the second largest reward; 0 for all others
    /// (arXiv 2503.19595, verl `grpo_passk`).
    PassAtK,
    /// `(R - mean_group) / (mean_group + 1e-6)`: an estimate of the gradient of the log-probability that a completion is right, so hard
    /// prompts count more (MaxRL, arXiv 2602.02710; its program's `maxrl`). It is defined for rewards of at least 0, best 0 and 1. As in
    /// prime-rl, and unlike the paper's program, a group whose mean is not above 0 has advantages of 0: a negative divisor would
    /// reverse them.
    MaxRl,
}

/// Advantages of a batch of groups, with the statistics they are computed from.
#[derive(Debug, Clone, PartialEq)]
pub struct Advantages {
    /// Advantage of each row, prompt-major; 0 for rows that are not scorable.
    pub values: Vec<f64>,
    /// Mean reward of each group over its scorable rows; `None` if it has none.
    pub group_mean: Vec<Option<f64>>,
    /// Deviation of the rewards of each group: sample (n - 1), or population for [`AdvantageKind::GroupStdClamped`]; 0
    /// with fewer than two scorable rows.
    pub group_std: Vec<f64>,
    /// One flag per group; true if all its rewards are equal.
    pub zero_std: Vec<bool>,
}

/// Computes advantages from one total reward per row.
///
/// # Shapes
/// `rewards`: `[prompts * group_size]`, prompt-major; `alpha` multiplies every advantage (`grpo_alpha`; 1 leaves them unchanged).
/// `lengths`: `[prompts * group_size]`, the tokens of each row, which kinds with a mean over tokens read.
///
/// # Errors
/// Returns an error if the group size is 0, or if the number of rows is not a multiple of it or of another number than the lengths. Also
/// returns an error if a reward is NaN, infinite or beyond 1e100, or if `alpha` is not finite.
pub fn advantages(
    rewards: &[Option<f64>],
    group_size: usize,
    kind: AdvantageKind,
    alpha: f64,
    lengths: &[usize],
) -> Result<Advantages, Error> {
    check_groups("advantage", rewards.len(), group_size)?;
    if lengths.len() != rewards.len() {
        let (got, expected) = (lengths.len(), rewards.len());
        return Err(Error::Length { what: "lengths", got, expected, per: "one per reward" });
    }
    check_finite("reward", rewards.iter().copied())?;
    if !alpha.is_finite() {
        return Err(Error::Setting { setting: "alpha", value: alpha, expected: "a finite number" });
    }

    let ddof = if kind == AdvantageKind::GroupStdClamped { 0 } else { 1 };
    let groups: Vec<Spread> = rewards.chunks(group_size).map(|group| Spread::of(group, ddof)).collect();
    let batch = Spread::of(rewards, ddof);
    let whole_batch = kind == AdvantageKind::GroupStdClamped && groups.iter().all(|g| g.std < STD_CLAMP);

    let mut values = Vec::with_capacity(rewards.len());
    for (rows, group) in rewards.chunks(group_size).zip(&groups) {
        let base = if whole_batch { &batch } else { group };
        let count = rows.iter().flatten().count() as f64;
        let scale = match kind {
            AdvantageKind::LeaveOneOut => (count - 1.0) / count,
            AdvantageKind::PassAtK => {
                values.extend(best(rows).into_iter().map(|lead| alpha * lead / (group.std + PASS_EPSILON)));
                continue;
            }
            AdvantageKind::Whitened | AdvantageKind::GroupCenterWhitened => {
                let center = if kind == AdvantageKind::Whitened { Some(0.0) } else { base.mean };
                values.extend(
                    rows.iter().map(|reward| reward.zip(center).map_or(0.0, |(reward, mean)| reward - mean)),
                );
                continue;
            }
            AdvantageKind::MaxRl => match base.mean {
                Some(mean) if mean > 0.0 => mean + MEAN_EPSILON,
                _ => f64::INFINITY,
            },
            AdvantageKind::GroupStd => group.std + STD_EPSILON,
            AdvantageKind::Batch => batch.std + STD_EPSILON,
            AdvantageKind::GroupCenter => 1.0,
            AdvantageKind::GroupStdClamped => base.std.max(STD_CLAMP),
        };
        values.extend(rows.iter().map(|reward| match (reward, base.mean) {
            (Some(reward), Some(mean)) if base.std > 0.0 => alpha * (reward - mean) / scale,
            _ => 0.0,
        }));
    }
    if matches!(kind, AdvantageKind::Whitened | AdvantageKind::GroupCenterWhitened) {
        whiten(&mut values, rewards, lengths, alpha);
    }
    Ok(with_groups(values, &groups))
}

/// Returns the lead of the first best row of a group over the second best reward, and 0 for the others.
fn best(rows: &[Option<f64>]) -> Vec<f64> {
    let mut lead = vec![0.0; rows.len()];
    let scored = || rows.iter().enumerate().filter_map(|(row, reward)| Some((row, (*reward)?)));
    // The first of equal rewards.
    let first = scored().reduce(|best, next| if next.1 > best.1 { next } else { best });
    if let Some((row, most)) = first {
        let others = scored().filter(|(other, _)| *other != row).map(|(_, reward)| reward);
        lead[row] = others.reduce(f64::max).map_or(0.0, |second| most - second);
    }
    lead
}

/// Subtracts the mean over all tokens and divides by their deviation, for scorable rows.
fn whiten(values: &mut [f64], rewards: &[Option<f64>], lengths: &[usize], alpha: f64) {
    let tokens = |row: usize| if rewards[row].is_some() { lengths[row] as f64 } else { 0.0 };
    let count: f64 = (0..values.len()).map(tokens).sum();
    let mean = (0..values.len()).map(|row| tokens(row) * values[row]).sum::<f64>() / count;
    let squares: f64 = (0..values.len()).map(|row| tokens(row) * (values[row] - mean).powi(2)).sum();
    let scale = (squares / (count - 1.0) + WHITEN_EPSILON).sqrt();
    for (row, value) in values.iter_mut().enumerate() {
        let is_noise = squares <= count * (ZERO_STD * mean.abs().max(1.0)).powi(2);
        *value =
            if count < 2.0 || is_noise || tokens(row) == 0.0 { 0.0 } else { alpha * (*value - mean) / scale };
    }
}

/// Returns the total reward of each row, `sum_k weights[k] * values[k][row]`, without the rewards that are `None`. A row whose
/// rewards are all `None` has no total. TRL `sum_then_normalize`.
///
/// # Shapes
/// `values`: one slice of `[rows]` per reward function; `weights`: one per reward function.
///
/// # Errors
/// Returns an error if lengths differ, or if a value or weight is NaN, infinite or beyond 1e100.
pub fn weighted_sum(values: &[Vec<Option<f64>>], weights: &[f64]) -> Result<Vec<Option<f64>>, Error> {
    let rows = check_matrix(values, weights)?;
    Ok((0..rows).map(|row| sum_row(values, weights, row)).collect())
}

/// Computes advantages from several rewards. Each reward is normalised before the rewards are added (GDPO, TRL
/// `normalize_then_sum`): `z_k = (r_k - mean_group r_k) / (std_group r_k + 1e-4)`, `S = sum_k w_k z_k`, `A = alpha * (S -
/// mean_batch S) / (std_batch S + 1e-4)`.
///
/// The fields `group_mean`, `group_std` and `zero_std` of the result describe `S`. The shapes are those of [`weighted_sum`].
///
/// # Errors
/// Returns the same errors as [`weighted_sum`] and [`advantages`].
pub fn normalize_then_sum(
    values: &[Vec<Option<f64>>],
    weights: &[f64],
    group_size: usize,
    alpha: f64,
) -> Result<Advantages, Error> {
    let rows = check_matrix(values, weights)?;
    check_groups("advantage", rows, group_size)?;
    let mut normalized = Vec::with_capacity(values.len());
    for column in values {
        let z = advantages(column, group_size, AdvantageKind::GroupStd, 1.0, &vec![1; column.len()])?.values;
        normalized.push(column.iter().zip(z).map(|(r, z)| r.map(|_| z)).collect::<Vec<_>>());
    }
    let sums: Vec<Option<f64>> = (0..rows).map(|row| sum_row(&normalized, weights, row)).collect();
    let batch = Spread::of(&sums, 1);
    let groups: Vec<Spread> = sums.chunks(group_size).map(|group| Spread::of(group, 1)).collect();
    // Normalised rewards of a group add up to 0. A group whose sums are equal therefore has sums of 0, and so is the mean of the
    // batch; what rounding leaves of it would be noise.
    let values: Vec<f64> = sums
        .iter()
        .enumerate()
        .map(|(row, sum)| match (sum, batch.mean) {
            (Some(sum), Some(mean)) if groups[row / group_size].std > 0.0 => {
                alpha * (sum - mean) / (batch.std + STD_EPSILON)
            }
            _ => 0.0,
        })
        .collect();
    Ok(with_groups(values, &groups))
}

fn with_groups(values: Vec<f64>, groups: &[Spread]) -> Advantages {
    Advantages {
        values,
        group_mean: groups.iter().map(|g| g.mean).collect(),
        group_std: groups.iter().map(|g| g.std).collect(),
        zero_std: groups.iter().map(|g| g.std == 0.0).collect(),
    }
}

fn sum_row(values: &[Vec<Option<f64>>], weights: &[f64], row: usize) -> Option<f64> {
    let mut total = None;
    for (column, weight) in values.iter().zip(weights) {
        if let Some(value) = column[row] {
            total = Some(total.unwrap_or(0.0) + weight * value);
        }
    }
    total
}

/// Mean and deviation of the scorable rows of a slice.
struct Spread {
    mean: Option<f64>,
    /// Deviation; 0 if it can be attributed to rounding.
    std: f64,
}

impl Spread {
    fn of(rewards: &[Option<f64>], ddof: usize) -> Self {
        let scored: Vec<f64> = rewards.iter().flatten().copied().collect();
        if scored.is_empty() {
            return Self { mean: None, std: 0.0 };
        }
        let count = scored.len() as f64;
        let mean = scored.iter().sum::<f64>() / count;
        if scored.len() < 2 {
            return Self { mean: Some(mean), std: 0.0 };
        }
        let squares: f64 = scored.iter().map(|r| (r - mean).powi(2)).sum();
        let std = (squares / (count - ddof as f64)).sqrt();
        let largest = scored.iter().fold(1.0_f64, |max, r| max.max(r.abs()));
        Self { mean: Some(mean), std: if std <= ZERO_STD * largest { 0.0 } else { std } }
    }
}

fn check_groups(what: &'static str, rows: usize, group_size: usize) -> Result<(), Error> {
    if group_size == 0 {
        return Err(Error::EmptyGroups);
    }
    if !rows.is_multiple_of(group_size) {
        return Err(Error::PartialGroup { what, rows, group_size });
    }
    Ok(())
}

fn check_finite(what: &str, values: impl Iterator<Item = Option<f64>>) -> Result<(), Error> {
    for (row, value) in values.enumerate() {
        match value {
            Some(value) if value.is_nan() || value.abs() > MAX_REWARD => {
                return Err(Error::NonFiniteReward { what: what.to_owned(), row, value });
            }
            _ => {}
        }
    }
    Ok(())
}

fn check_matrix(values: &[Vec<Option<f64>>], weights: &[f64]) -> Result<usize, Error> {
    if values.len() != weights.len() {
        return Err(Error::Length {
            what: "reward weights",
            got: weights.len(),
            expected: values.len(),
            per: "one per reward function",
        });
    }
    let rows = values.first().map_or(0, Vec::len);
    for (k, column) in values.iter().enumerate() {
        if column.len() != rows {
            return Err(Error::Length {
                what: "rewards of one function",
                got: column.len(),
                expected: rows,
                per: "one per completion",
            });
        }
        check_finite(&format!("reward {k}"), column.iter().copied())?;
    }
    check_finite("reward weight", weights.iter().map(|w| Some(*w)))?;
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use AdvantageKind::{Batch, GroupCenter, GroupStd, GroupStdClamped, LeaveOneOut, MaxRl};

    fn some(rewards: &[f64]) -> Vec<Option<f64>> {
        rewards.iter().map(|r| Some(*r)).collect()
    }

    fn values(rewards: &[f64], group_size: usize, kind: AdvantageKind) -> Vec<f64> {
        advantages(&some(rewards), group_size, kind, 1.0, &vec![3; rewards.len()]).unwrap().values
    }

    fn assert_close(got: &[f64], expected: &[f64], tolerance: f64) {
        assert_eq!(got.len(), expected.len());
        for (got, expected) in got.iter().zip(expected) {
            assert!((got - expected).abs() <= tolerance, "got {got}, expected {expected}");
        }
    }

    /// Rewards, then the advantages of TRL, the clamped and the centred ones. The reference rounds to five decimals.
    const GOLDEN: [[[f64; 4]; 4]; 5] = [
        [
            [1.0, 0.0, 0.0, 1.0],
            [0.86588, -0.86588, -0.86588, 0.86588],
            [1.0, -1.0, -1.0, 1.0],
            [0.5, -0.5, -0.5, 0.5],
        ],
        [
            [2.0, 1.0, 0.0, 0.0],
            [1.30545, 0.26109, -0.78327, -0.78327],
            [1.50756, 0.30151, -0.90453, -0.90453],
            [1.25, 0.25, -0.75, -0.75],
        ],
        [[1.0; 4], [0.0; 4], [0.0; 4], [0.0; 4]],
        [
            [0.3, 0.3, 0.3, 0.31],
            [-0.4902, -0.4902, -0.4902, 1.47059],
            [-0.25, -0.25, -0.25, 0.75],
            [-0.0025, -0.0025, -0.0025, 0.0075],
        ],
        [
            [3.0, 1.5, 0.0, 2.5],
            [0.94484, -0.18897, -1.32278, 0.5669],
            [1.09109, -0.21822, -1.52753, 0.65465],
            [1.25, -0.25, -1.75, 0.75],
        ],
    ];

    #[test]
    fn golden_numbers_to_the_printed_digits() {
        for [rewards, trl, clamped, centred] in &GOLDEN {
            assert_close(&values(rewards, 4, GroupStd), trl, 5.01e-6);
            assert_close(&values(rewards, 4, GroupStdClamped), clamped, 5.01e-6);
            assert_close(&values(rewards, 4, GroupCenter), centred, 5.01e-6);
        }
    }

    #[test]
    fn groups_are_consecutive_rows_and_batch_scale_keeps_the_group_mean() {
        // Groups [0, 2] and [10, 14] have means of 1 and 12. The sample deviation over all four rows is sqrt(131 / 3) ...
        let rewards = [0.0, 2.0, 10.0, 14.0];
        let all = (rewards.iter().map(|r| (r - 6.5_f64).powi(2)).sum::<f64>() / 3.0).sqrt();
        let expected: Vec<f64> = [-1.0, 1.0, -2.0, 2.0].iter().map(|d| d / (all + 1e-4)).collect();
        assert_close(&values(&rewards, 2, Batch), &expected, 1e-15);
        assert_close(&values(&rewards, 2, GroupCenter), &[-1.0, 1.0, -2.0, 2.0], 0.0);
        let result = advantages(&some(&rewards), 2, GroupStd, 1.0, &vec![3; rewards.len()]).unwrap();
        assert_eq!(result.group_mean, [Some(1.0), Some(12.0)]);
        assert_close(&result.group_std, &[2_f64.sqrt(), 8_f64.sqrt()], 1e-15);
        assert_eq!(result.zero_std, [false, false]);
    }

    #[test]
    fn clamped_falls_back_to_the_batch_only_if_no_group_differs() {
        // Both groups are constant: the batch mean is 0.5, the population deviation 0.5.
        assert_close(&values(&[1.0, 1.0, 0.0, 0.0], 2, GroupStdClamped), &[1.0, 1.0, -1.0, -1.0], 1e-15);
        // One group differs, so the constant group stays at 0.
        assert_close(&values(&[1.0, 1.0, 0.0, 1.0], 2, GroupStdClamped), &[0.0, 0.0, -1.0, 1.0], 1e-15);
    }

    #[test]
    fn alpha_multiplies_and_survives_normalisation() {
        let half = advantages(&some(&[1.0, 0.0, 0.0, 1.0]), 4, GroupStd, 0.5, &[3; 4]).unwrap();
        assert_close(&half.values, &[0.43294, -0.43294, -0.43294, 0.43294], 5.01e-6);
    }

    #[test]
    fn maxrl_divides_by_the_mean_of_a_group() {
        // One of four is right: 1 / p - 1 for it, -1 for the others. A mean that is not positive has no advantages.
        let rewards = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, -1.0, 0.5, 0.0, 0.0];
        let mut expected = vec![0.0; 12];
        expected[0] = 0.75 / (0.25 + 1e-6);
        expected[1..4].fill(-0.25 / (0.25 + 1e-6));
        expected[4..7].fill(0.25 / (0.75 + 1e-6));
        expected[7] = -0.75 / (0.75 + 1e-6);
        assert_close(&values(&rewards, 4, AdvantageKind::MaxRl), &expected, 1e-15);
    }

    #[test]
    fn rows_without_a_reward_are_left_out() {
        let rewards = [Some(1.0), None, Some(3.0), None, None, None, None, Some(5.0)];
        for kind in [GroupStd, Batch, GroupCenter, GroupStdClamped, LeaveOneOut, MaxRl] {
            let got = advantages(&rewards, 4, kind, 1.0, &vec![3; rewards.len()]).unwrap();
            assert_eq!(got.values[1], 0.0);
            assert_eq!(
                got.values[4..],
                [0.0; 4],
                "{kind:?}: a single scorable row has nothing to compare with"
            );
            assert!(got.values[0] < 0.0 && got.values[0] == -got.values[2]);
            assert_eq!(got.group_mean, [Some(2.0), Some(5.0)]);
            assert_eq!(got.zero_std, [false, true]);
        }
        let got = advantages(&rewards, 4, GroupStd, 1.0, &vec![3; rewards.len()]).unwrap();
        assert_close(&[got.values[2]], &[1.0 / (2_f64.sqrt() + 1e-4)], 1e-15);
        let none = advantages(&[None; 4], 2, Batch, 1.0, &[3; 4]).unwrap();
        assert_eq!((none.values, none.group_mean), (vec![0.0; 4], vec![None; 2]));
    }

    #[test]
    fn a_completion_without_others_has_nothing_to_compare_with() {
        for kind in [GroupStd, Batch, GroupCenter] {
            assert_eq!(values(&[1.0, 0.0, 0.5], 1, kind), [0.0; 3], "{kind:?}");
        }
        assert_eq!(normalize_then_sum(&[some(&[1.0, 0.0])], &[1.0], 1, 1.0).unwrap().values, [0.0; 2]);
        // The fallback uses the complete batch, with mean 0.5 and deviation 0.5. A batch of one row has no deviation.
        assert_eq!(values(&[1.0, 0.0], 1, GroupStdClamped), [1.0, -1.0]);
        assert_eq!(values(&[1.0], 1, GroupStdClamped), [0.0]);
    }

    #[test]
    fn a_residue_of_cancelling_rewards_is_no_signal() {
        // 0.1 + 0.2 - 0.3 is 5.6e-17 in one order of summation and 2.8e-17 in another.
        let residue = [0.1 + 0.2 - 0.3, 0.2 - 0.3 + 0.1, 0.0, 0.1 - 0.3 + 0.2];
        assert!(residue.iter().any(|r| *r != residue[0]));
        for kind in [GroupStd, Batch, GroupCenter, GroupStdClamped] {
            assert_eq!(values(&residue, 4, kind), [0.0; 4], "{kind:?}");
        }
        let large = [1e9, 1e9 + 1e-6, 1e9, 1e9];
        let got = advantages(&some(&large), 4, GroupStd, 1.0, &vec![3; large.len()]).unwrap();
        assert_eq!((got.values, got.zero_std), (vec![0.0; 4], vec![true]));
    }

    #[test]
    fn weighted_sum_skips_missing_rewards() {
        let accuracy = vec![Some(1.0), None, None];
        let format = vec![Some(0.5), Some(1.0), None];
        let got = weighted_sum(&[accuracy, format], &[0.7, 0.3]).unwrap();
        assert_close(&[got[0].unwrap(), got[1].unwrap()], &[0.85, 0.3], 1e-15);
        assert_eq!(got[2], None);
    }

    #[test]
    fn normalising_first_gives_rare_rewards_their_weight() {
        // TRL's formula by hand, with groups of 2 and two rewards of very different ranges.
        let big = some(&[0.0, 100.0, 0.0, 0.0]);
        let small = some(&[0.1, 0.0, 0.0, 0.1]);
        let z_big = 50.0 / (5000_f64.sqrt() + 1e-4);
        let z_small = 0.05 / (0.005_f64.sqrt() + 1e-4);
        let s = [-z_big + 2.0 * z_small, z_big - 2.0 * z_small, -2.0 * z_small, 2.0 * z_small];
        let std = (s.iter().map(|x| x * x).sum::<f64>() / 3.0).sqrt();
        let expected: Vec<f64> = s.iter().map(|x| 0.5 * x / (std + 1e-4)).collect();
        let got = normalize_then_sum(&[big, small], &[1.0, 2.0], 2, 0.5).unwrap();
        assert_close(&got.values, &expected, 1e-14);
        assert_eq!(got.zero_std, [false, false]);
    }

    #[test]
    fn equal_rewards_of_a_group_give_exactly_zero() {
        // The mean of the batch's sums is a residue of rounding, not 0.
        let first = some(&[0.1, 0.7, 0.9, 1.0, 1.0, 1.0, 0.3, 0.2, 0.4]);
        let second = some(&[0.3, 0.2, 0.1, 0.1, 0.1, 0.1, 0.5, 0.6, 0.8]);
        let got = normalize_then_sum(&[first.clone(), second.clone()], &[0.3, 0.7], 3, 1.0).unwrap();
        assert_eq!((&got.values[3..6], &got.zero_std[..]), (&[0.0; 3][..], &[false, true, false][..]));
        assert!(got.values[..3].iter().chain(&got.values[6..]).all(|a| a.abs() > 1e-3));
        let total = weighted_sum(&[first, second], &[0.3, 0.7]).unwrap();
        for kind in [GroupStd, Batch, GroupCenter, GroupStdClamped] {
            assert_eq!(
                advantages(&total, 3, kind, 1.0, &vec![3; total.len()]).unwrap().values[3..6],
                [0.0; 3],
                "{kind:?}"
            );
        }
    }

    #[test]
    fn bad_input_is_named() {
        assert_eq!(advantages(&some(&[1.0]), 0, GroupStd, 1.0, &[3]), Err(Error::EmptyGroups));
        assert_eq!(normalize_then_sum(&[some(&[1.0])], &[1.0], 0, 1.0), Err(Error::EmptyGroups));
        assert_eq!(advantages(&some(&[1.0]), 1, GroupStd, 0.0, &[3]).unwrap().values, [0.0]);
        assert!(matches!(
            advantages(&some(&[1.0; 5]), 2, GroupStd, 1.0, &[3; 5]),
            Err(Error::PartialGroup { rows: 5, .. })
        ));
        let error = advantages(&some(&[1.0, f64::NAN]), 2, GroupStd, 1.0, &[3; 2]).unwrap_err();
        assert!(error.to_string().contains("reward: got NaN at row 1"), "{error}");
        assert!(
            advantages(&some(&[f64::MAX, -f64::MAX]), 2, GroupStd, 1.0, &[3; 2]).is_err(),
            "its square overflows"
        );
        assert!(matches!(weighted_sum(&[some(&[1.0])], &[]), Err(Error::Length { .. })));
        assert!(matches!(weighted_sum(&[some(&[1.0]), vec![]], &[1.0, 1.0]), Err(Error::Length { .. })));
    }
}
