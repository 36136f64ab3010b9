//! Rewards to advantages: how much better a completion is than the others of its prompt.
//!
//! Sources: DeepSeekMath (arXiv 2402.03300) eq. 3 and TRL 1.16 `GRPOTrainer` for [`AdvantageKind::GroupStd`],
//! [`AdvantageKind::Batch`], [`AdvantageKind::GroupCenter`] and [`normalize_then_sum`] (GDPO); the Qwen2.5-VL video
//! trainer for [`AdvantageKind::GroupStdClamped`].
//!
//! A reward of `None` means "not scorable": the row takes no part in means and deviations and gets advantage 0.
//!
//! Differences from TRL:
//! - Rewards that are equal up to rounding count as equal: a deviation of at most `1e-8 * max(1, max|R|)` is zero, and
//!   such a group gets advantage exactly 0. A weighted sum that cancels leaves a residue around 1e-17 whose
//!   normalised value would be noise.
//! - A group with a single scorable row gets advantage 0 there, not NaN turned into 0; the result is the same.

use serde::{Deserialize, Serialize};

use crate::Error;

/// Added to a standard deviation before dividing by it, as TRL does.
const STD_EPSILON: f64 = 1e-4;
/// Lower bound of the population deviation in [`AdvantageKind::GroupStdClamped`].
const STD_CLAMP: f64 = 0.01;
/// Deviations up to this multiple of `max(1, max|R|)` are rounding, not information.
const ZERO_STD: f64 = 1e-8;

/// How the rewards of a group become advantages. `R` are a row's reward, all deviations are over scorable rows.
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
    /// `(R - mean_group) / max(std_group, 0.01)`, population deviation (n); if every group's deviation is below
    /// 0.01, mean and deviation of the whole batch are used instead. With that fallback a group of equal rewards can
    /// have a non-zero advantage.
    GroupStdClamped,
}

/// Advantages of a batch of groups, with the statistics they were made from.
#[derive(Debug, Clone, PartialEq)]
pub struct Advantages {
    /// One per row, prompt-major; 0 for rows that are not scorable.
    pub values: Vec<f64>,
    /// Mean reward per group over its scorable rows; `None` if it has none.
    pub group_mean: Vec<Option<f64>>,
    /// Deviation of the rewards per group: sample (n - 1), or population for [`AdvantageKind::GroupStdClamped`];
    /// 0 with fewer than two scorable rows.
    pub group_std: Vec<f64>,
    /// Per group: its rewards do not tell its rows apart.
    pub zero_std: Vec<bool>,
}

/// Advantages from one total reward per row.
///
/// # Shapes
/// `rewards`: `[prompts * group_size]`, prompt-major; `alpha` multiplies every advantage (`grpo_alpha`; 1 leaves them).
///
/// # Errors
/// A group size below 2, a number of rows that is no multiple of it, or a reward that is NaN or infinite.
pub fn advantages(
    rewards: &[Option<f64>],
    group_size: usize,
    kind: AdvantageKind,
    alpha: f64,
) -> Result<Advantages, Error> {
    check_groups("advantage", rewards.len(), group_size)?;
    check_finite("reward", rewards.iter().copied())?;
    if !alpha.is_finite() {
        return Err(Error::Setting { setting: "grpo_alpha", value: alpha, expected: "a finite number" });
    }

    let ddof = if kind == AdvantageKind::GroupStdClamped { 0 } else { 1 };
    let groups: Vec<Spread> = rewards.chunks(group_size).map(|group| Spread::of(group, ddof)).collect();
    let batch = Spread::of(rewards, ddof);
    let whole_batch = kind == AdvantageKind::GroupStdClamped && groups.iter().all(|g| g.std < STD_CLAMP);

    let mut values = Vec::with_capacity(rewards.len());
    for (rows, group) in rewards.chunks(group_size).zip(&groups) {
        let base = if whole_batch { &batch } else { group };
        let scale = match kind {
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
    finish(values, &groups)
}

/// Total reward per row, `sum_k weights[k] * values[k][row]`; rewards that are `None` are left out, and a row for which
/// all are `None` has no total. TRL `sum_then_normalize`.
///
/// # Shapes
/// `values`: one slice of `[rows]` per reward function; `weights`: one per reward function.
///
/// # Errors
/// Unequal lengths, or a value or weight that is NaN or infinite.
pub fn weighted_sum(values: &[Vec<Option<f64>>], weights: &[f64]) -> Result<Vec<Option<f64>>, Error> {
    let rows = check_matrix(values, weights)?;
    Ok((0..rows).map(|row| sum_row(values, weights, row)).collect())
}

/// Advantages from several rewards that are normalised one by one before they are added (GDPO, TRL
/// `normalize_then_sum`): `z_k = (r_k - mean_group r_k) / (std_group r_k + 1e-4)`, `S = sum_k w_k z_k`,
/// `A = alpha * (S - mean_batch S) / (std_batch S + 1e-4)`.
///
/// `group_mean`, `group_std` and `zero_std` of the result describe `S`.
///
/// # Shapes
/// As [`weighted_sum`] and [`advantages`].
///
/// # Errors
/// Those of [`weighted_sum`] and [`advantages`].
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
        let z = advantages(column, group_size, AdvantageKind::GroupStd, 1.0)?.values;
        normalized.push(column.iter().zip(z).map(|(r, z)| r.map(|_| z)).collect::<Vec<_>>());
    }
    let sums: Vec<Option<f64>> = (0..rows).map(|row| sum_row(&normalized, weights, row)).collect();
    let batch = Spread::of(&sums, 1);
    let groups: Vec<Spread> = sums.chunks(group_size).map(|group| Spread::of(group, 1)).collect();
    let values: Vec<f64> = sums
        .iter()
        .map(|sum| match (sum, batch.mean) {
            (Some(sum), Some(mean)) if batch.std > 0.0 => alpha * (sum - mean) / (batch.std + STD_EPSILON),
            _ => 0.0,
        })
        .collect();
    finish(values, &groups)
}

fn finish(values: Vec<f64>, groups: &[Spread]) -> Result<Advantages, Error> {
    // Finite rewards near the end of the f64 range still overflow in a mean or a deviation.
    check_finite("advantage", values.iter().map(|v| Some(*v)))?;
    Ok(Advantages {
        values,
        group_mean: groups.iter().map(|g| g.mean).collect(),
        group_std: groups.iter().map(|g| g.std).collect(),
        zero_std: groups.iter().map(|g| g.std == 0.0).collect(),
    })
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
    /// 0 where rounding alone explains it.
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
    if group_size < 2 {
        return Err(Error::GroupTooSmall { group_size });
    }
    if !rows.is_multiple_of(group_size) {
        return Err(Error::PartialGroup { what, rows, group_size });
    }
    Ok(())
}

fn check_finite(what: &str, values: impl Iterator<Item = Option<f64>>) -> Result<(), Error> {
    for (row, value) in values.enumerate() {
        match value {
            Some(value) if !value.is_finite() => {
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
