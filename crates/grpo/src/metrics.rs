//! Metrics of an optimizer step, computed from sums that can be added over streams, micro-batches and ranks.
//!
//! The names follow TRL 1.16. In addition, the metrics contain the names of trainers built on TRL 0.14 (`completion_length`,
//! `rewards/NAME`, `clip_ratio`), so that curves can be compared, and the Qwen-video trainer's `grpo/*`. Differences from TRL:
//! - `kl` is aggregated like the loss, so `loss = policy + beta * kl` without an entropy bonus; TRL's token mean is
//!   `kl/token_mean`.
//! - `reward_std/group` is the mean of the groups' deviations; `reward_std` is over the batch.
//! - `frac_reward_zero_std` counts groups whose rewards are all equal, regardless of the scale of the advantage.
//! - `grpo/policy_seq_log_prob` is the mean over completions of their summed log-probability, in nats.
//! - `reward/min`, `reward/max`, `rewards/NAME/min`, `rewards/NAME/max` and `completions/count` tell which values were given to how many
//!   completions. `reward/length_correlation` is Pearson's correlation of length and reward within the groups.

use serde::{Deserialize, Serialize};

use crate::Error;
use crate::loss::{Clipped, CorrectionKind, RatioLevel};
use crate::metric;

/// Name and value of a metric; `None` if nothing was measured (written as `null`).
pub type Metric = (String, Option<f64>);

/// Count, mean and spread of a stream of numbers.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Moments {
    pub count: u64,
    /// Mean of the numbers; 0 if there are none.
    pub mean: f64,
    /// Sum of squared differences from the mean.
    pub squares: f64,
}

impl Moments {
    pub fn push(&mut self, value: f64) {
        self.merge(&Self { count: 1, mean: value, squares: 0.0 });
    }

    /// Adds the numbers of another part (Chan, Golub, LeVeque 1979).
    pub fn merge(&mut self, other: &Self) {
        let count = self.count + other.count;
        if other.count == 0 {
            return;
        }
        let difference = other.mean - self.mean;
        let share = other.count as f64 / count as f64;
        self.squares += other.squares + difference * difference * self.count as f64 * share;
        self.mean += difference * share;
        self.count = count;
    }

    /// Returns the mean; `None` without numbers.
    pub fn mean(&self) -> Option<f64> {
        (self.count > 0).then_some(self.mean)
    }

    /// Returns the sample deviation (n - 1); `None` with fewer than two numbers.
    pub fn std(&self) -> Option<f64> {
        (self.count > 1).then(|| (self.squares / (self.count - 1) as f64).sqrt())
    }
}

/// Sum and extremes of completion lengths, in tokens.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
struct Lengths {
    count: u64,
    sum: u64,
    min: Option<u64>,
    max: Option<u64>,
}

impl Lengths {
    fn push(&mut self, length: u64) {
        self.merge(&Self { count: 1, sum: length, min: Some(length), max: Some(length) });
    }

    fn merge(&mut self, other: &Self) {
        self.count += other.count;
        self.sum += other.sum;
        self.min = extreme(self.min, other.min, u64::min);
        self.max = extreme(self.max, other.max, u64::max);
    }
}

fn extreme<T: Copy>(a: Option<T>, b: Option<T>, choose: impl Fn(T, T) -> T) -> Option<T> {
    match (a, b) {
        (Some(a), Some(b)) => Some(choose(a, b)),
        (some, None) | (None, some) => some,
    }
}

/// Statistics of rewards.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
struct Values {
    moments: Moments,
    min: Option<f64>,
    max: Option<f64>,
}

impl Values {
    fn push(&mut self, value: f64) {
        self.moments.push(value);
        self.min = extreme(self.min, Some(value), f64::min);
        self.max = extreme(self.max, Some(value), f64::max);
    }

    fn merge(&mut self, other: &Self) {
        self.moments.merge(&other.moments);
        self.min = extreme(self.min, other.min, f64::min);
        self.max = extreme(self.max, other.max, f64::max);
    }
}

/// Statistics of one reward function.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct RewardSums {
    name: String,
    values: Values,
}

/// Sums of squares and products of the deviations of lengths and rewards from the means of their group.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
struct Together {
    lengths: f64,
    rewards: f64,
    products: f64,
}

impl Together {
    fn add_group(&mut self, lengths: &[usize], totals: &[Option<f64>]) {
        let scored: Vec<(f64, f64)> = lengths
            .iter()
            .zip(totals)
            .filter_map(|(&length, total)| Some((length as f64, (*total)?)))
            .collect();
        let count = scored.len().max(1) as f64;
        let length = scored.iter().map(|own| own.0).sum::<f64>() / count;
        let reward = scored.iter().map(|own| own.1).sum::<f64>() / count;
        for (own_length, own_reward) in scored {
            self.lengths += (own_length - length).powi(2);
            self.rewards += (own_reward - reward).powi(2);
            self.products += (own_length - length) * (own_reward - reward);
        }
    }

    fn merge(&mut self, other: &Self) {
        self.lengths += other.lengths;
        self.rewards += other.rewards;
        self.products += other.products;
    }

    /// Returns the correlation; `None` if the lengths or the rewards do not vary within any group.
    fn correlation(&self) -> Option<f64> {
        let both = self.lengths * self.rewards;
        (both > 0.0).then(|| (self.products / both.sqrt()).clamp(-1.0, 1.0))
    }
}

/// Sums from which the metrics of one optimizer step are computed.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct MetricSums {
    // Sums of the loss.
    loss: Option<f64>,
    policy: f64,
    kl: Option<f64>,
    kl_tokens: u64,
    kl_token_sum: f64,
    divergence_tokens: u64,
    divergence_sum: f64,
    pub(crate) entropy: f64,
    pub(crate) entropy_tokens: u64,
    seq_logp: f64,
    advantage: f64,
    advantage_abs: f64,
    loss_completions: u64,
    clip_units: u64,
    clip_low: f64,
    clip_high: f64,
    clip_low_min: Option<f64>,
    clip_high_max: Option<f64>,
    corrected: Moments,
    corrected_min: Option<f64>,
    corrected_max: Option<f64>,
    /// 1 for each completion that the off-policy mask drops, 0 for each other one.
    left_behind: Moments,
    /// Tokens that the covariance chooses, and all tokens of the same completions.
    chosen_tokens: u64,
    covariance_tokens: u64,
    // Sums of the rollout.
    lengths: Lengths,
    terminated: Lengths,
    // Sums of the rewards.
    rewards: Vec<RewardSums>,
    total: Values,
    together: Together,
    group_std: Moments,
    groups: u64,
    zero_std_groups: u64,
}

impl MetricSums {
    pub(crate) fn add_loss(&mut self, loss: f64, policy: f64, kl: Option<f64>) {
        self.loss = extreme(self.loss, Some(loss), |a, b| a + b);
        self.policy += policy;
        self.kl = extreme(self.kl, kl, |a, b| a + b);
    }

    pub(crate) fn add_completion(&mut self, seq_logp: f64, advantage: f64) {
        self.loss_completions += 1;
        self.seq_logp += seq_logp;
        self.advantage += advantage;
        self.advantage_abs += advantage.abs();
    }

    pub(crate) fn add_kl(&mut self, sum: f64, tokens: usize) {
        self.kl_token_sum += sum;
        self.kl_tokens += tokens as u64;
    }

    pub(crate) fn add_divergence(&mut self, sum: f64, tokens: usize) {
        self.divergence_sum += sum;
        self.divergence_tokens += tokens as u64;
    }

    /// Adds the weights of a completion's tokens. With one weight per completion, only the first is added.
    pub(crate) fn add_corrected(&mut self, kind: CorrectionKind, weights: &[f64]) {
        let whole = matches!(kind, CorrectionKind::SequenceTruncate | CorrectionKind::SequenceMask);
        for &weight in &weights[..if whole { weights.len().min(1) } else { weights.len() }] {
            self.corrected.push(weight);
            self.corrected_min = extreme(self.corrected_min, Some(weight), f64::min);
            self.corrected_max = extreme(self.corrected_max, Some(weight), f64::max);
        }
    }

    pub(crate) fn add_left_behind(&mut self, is_left: bool) {
        self.left_behind.push(f64::from(is_left));
    }

    pub(crate) fn add_chosen(&mut self, chosen: usize, tokens: usize) {
        self.chosen_tokens += chosen as u64;
        self.covariance_tokens += tokens as u64;
    }

    pub(crate) fn add_clipped(&mut self, clipped: &Clipped, level: RatioLevel, tokens: usize) {
        if !clipped.applies || tokens == 0 {
            return;
        }
        let (low, high) = (clipped.low as f64 / tokens as f64, clipped.high as f64 / tokens as f64);
        // With sequence ratios, a completion is one unit, as in TRL.
        let units = if level != RatioLevel::Token { 1 } else { tokens as u64 };
        self.clip_units += units;
        self.clip_low += low * units as f64;
        self.clip_high += high * units as f64;
        self.clip_low_min = extreme(self.clip_low_min, Some(low), f64::min);
        self.clip_high_max = extreme(self.clip_high_max, Some(high), f64::max);
    }

    /// Adds sampled completions.
    ///
    /// # Shapes
    /// `lengths` (in tokens) and `truncated` (true at the length limit) have one entry per completion.
    pub fn add_completions(&mut self, lengths: &[usize], truncated: &[bool]) -> Result<(), Error> {
        same_length("truncated", truncated.len(), lengths.len())?;
        for (length, truncated) in lengths.iter().zip(truncated) {
            self.lengths.push(*length as u64);
            if !truncated {
                self.terminated.push(*length as u64);
            }
        }
        Ok(())
    }

    /// Adds the rewards of complete groups: the unweighted values of each function, the totals, and the `zero_std` of their
    /// advantages.
    ///
    /// # Shapes
    /// `functions`: name and `[rows]` values per reward function; `totals`: `[rows]`, prompt-major; `lengths`: `[rows]`, in tokens;
    /// `zero_std`: `[groups]`.
    pub fn add_rewards(
        &mut self,
        functions: &[(&str, &[Option<f64>])],
        totals: &[Option<f64>],
        lengths: &[usize],
        zero_std: &[bool],
    ) -> Result<(), Error> {
        same_length("lengths", lengths.len(), totals.len())?;
        for (_, values) in functions {
            same_length("rewards of one function", values.len(), totals.len())?;
        }
        let groups = zero_std.len();
        if groups == 0 {
            return Ok(());
        }
        if !totals.len().is_multiple_of(groups) {
            let group_size = totals.len().div_ceil(groups);
            return Err(Error::PartialGroup { what: "reward metrics", rows: totals.len(), group_size });
        }
        for (name, values) in functions {
            let sums = self.reward_sums(name);
            values.iter().flatten().for_each(|value| sums.push(*value));
        }
        totals.iter().flatten().for_each(|total| self.total.push(*total));
        let size = (totals.len() / groups).max(1);
        for (group, lengths) in totals.chunks(size).zip(lengths.chunks(size)) {
            self.together.add_group(lengths, group);
            let mut moments = Moments::default();
            group.iter().flatten().for_each(|total| moments.push(*total));
            if let Some(std) = moments.std() {
                self.group_std.push(std);
            }
        }
        self.groups += groups as u64;
        self.zero_std_groups += zero_std.iter().filter(|zero| **zero).count() as u64;
        Ok(())
    }

    fn reward_sums(&mut self, name: &str) -> &mut Values {
        let at = self.rewards.iter().position(|r| r.name == name).unwrap_or_else(|| {
            self.rewards.push(RewardSums { name: name.to_owned(), values: Values::default() });
            self.rewards.len() - 1
        });
        &mut self.rewards[at].values
    }

    /// Adds the sums of another part of the same optimizer step.
    pub fn merge(&mut self, other: &Self) {
        self.loss = extreme(self.loss, other.loss, |a, b| a + b);
        self.policy += other.policy;
        self.kl = extreme(self.kl, other.kl, |a, b| a + b);
        self.kl_tokens += other.kl_tokens;
        self.kl_token_sum += other.kl_token_sum;
        self.divergence_tokens += other.divergence_tokens;
        self.divergence_sum += other.divergence_sum;
        self.entropy += other.entropy;
        self.entropy_tokens += other.entropy_tokens;
        self.seq_logp += other.seq_logp;
        self.advantage += other.advantage;
        self.advantage_abs += other.advantage_abs;
        self.loss_completions += other.loss_completions;
        self.clip_units += other.clip_units;
        self.clip_low += other.clip_low;
        self.clip_high += other.clip_high;
        self.clip_low_min = extreme(self.clip_low_min, other.clip_low_min, f64::min);
        self.clip_high_max = extreme(self.clip_high_max, other.clip_high_max, f64::max);
        self.corrected.merge(&other.corrected);
        self.left_behind.merge(&other.left_behind);
        self.chosen_tokens += other.chosen_tokens;
        self.covariance_tokens += other.covariance_tokens;
        self.corrected_min = extreme(self.corrected_min, other.corrected_min, f64::min);
        self.corrected_max = extreme(self.corrected_max, other.corrected_max, f64::max);
        self.lengths.merge(&other.lengths);
        self.terminated.merge(&other.terminated);
        for sums in &other.rewards {
            self.reward_sums(&sums.name).merge(&sums.values);
        }
        self.total.merge(&other.total);
        self.together.merge(&other.together);
        self.group_std.merge(&other.group_std);
        self.groups += other.groups;
        self.zero_std_groups += other.zero_std_groups;
    }

    /// Returns the mean total reward over scorable completions.
    pub fn reward(&self) -> Option<f64> {
        self.total.moments.mean()
    }

    /// Returns the metrics in a fixed order. Parts to which nothing was added (rewards, completions, loss) are left out.
    pub fn metrics(&self) -> Vec<Metric> {
        let mut out: Vec<Metric> = Vec::new();
        let mut put = |name: &str, value: Option<f64>| out.push((name.to_owned(), value));
        if self.loss.is_some() {
            self.of_loss(&mut put);
        }
        if self.lengths.count > 0 {
            self.of_lengths(&mut put);
        }
        if self.groups > 0 {
            self.of_rewards(&mut put);
        }
        if self.loss.is_some() && self.groups > 0 {
            put("grpo/policy_seq_log_prob", mean(self.seq_logp, self.loss_completions));
            put("grpo/kl_div", self.kl);
            put("grpo/format_reward", self.reward_named("format"));
            put("grpo/accuracy_reward", self.reward_named("accuracy"));
            put("grpo/total_reward", self.total.moments.mean());
            put("grpo/advantage", mean(self.advantage, self.loss_completions));
            put("grpo/total_loss", self.loss);
        }
        out
    }

    fn of_loss(&self, put: &mut dyn FnMut(&str, Option<f64>)) {
        put(metric::LOSS, self.loss);
        put("policy_loss", Some(self.policy));
        if self.kl.is_some() {
            put(metric::KL, self.kl);
            put("kl/token_mean", mean(self.kl_token_sum, self.kl_tokens));
        }
        if self.divergence_tokens > 0 {
            put(metric::TEACHER_DIVERGENCE, mean(self.divergence_sum, self.divergence_tokens));
        }
        if self.entropy_tokens > 0 {
            put(metric::ENTROPY, mean(self.entropy, self.entropy_tokens));
        }
        if self.clip_units > 0 {
            put("clip_ratio/low_mean", mean(self.clip_low, self.clip_units));
            put("clip_ratio/low_min", self.clip_low_min);
            put("clip_ratio/high_mean", mean(self.clip_high, self.clip_units));
            put("clip_ratio/high_max", self.clip_high_max);
            // A ratio cannot be both below and above the range, so the two counts can be added.
            let region = mean(self.clip_low + self.clip_high, self.clip_units);
            put(metric::CLIP_RATIO, region);
            put("clip_ratio", region);
        }
        if self.corrected.count > 0 {
            put("sampling/importance_sampling_ratio/min", self.corrected_min);
            put("sampling/importance_sampling_ratio/mean", self.corrected.mean());
            put("sampling/importance_sampling_ratio/max", self.corrected_max);
        }
        if self.left_behind.count > 0 {
            put("off_policy_mask/dropped_ratio", self.left_behind.mean());
        }
        if self.covariance_tokens > 0 {
            put("covariance/chosen_ratio", mean(self.chosen_tokens as f64, self.covariance_tokens));
        }
        put("advantage_abs", mean(self.advantage_abs, self.loss_completions));
    }

    fn of_lengths(&self, put: &mut dyn FnMut(&str, Option<f64>)) {
        for (infix, lengths) in [("length", &self.lengths), ("terminated_length", &self.terminated)] {
            // TRL reports 0 if no completion terminated.
            let some = |value: Option<f64>| Some(value.unwrap_or(0.0));
            put(&format!("completions/mean_{infix}"), some(mean(lengths.sum as f64, lengths.count)));
            put(&format!("completions/min_{infix}"), some(lengths.min.map(|n| n as f64)));
            put(&format!("completions/max_{infix}"), some(lengths.max.map(|n| n as f64)));
        }
        put("completion_length", mean(self.lengths.sum as f64, self.lengths.count));
        let clipped = self.lengths.count - self.terminated.count;
        put(metric::CLIPPED, mean(clipped as f64, self.lengths.count));
        put(metric::COUNT, Some(self.lengths.count as f64));
    }

    fn of_rewards(&self, put: &mut dyn FnMut(&str, Option<f64>)) {
        put(metric::REWARD, self.total.moments.mean());
        put(metric::REWARD_STD, self.total.moments.std());
        put(metric::REWARD_MIN, self.total.min);
        put(metric::REWARD_MAX, self.total.max);
        put(metric::LENGTH_CORRELATION, self.together.correlation());
        put("reward_std/group", self.group_std.mean());
        put(metric::ZERO_STD, mean(self.zero_std_groups as f64, self.groups));
        for sums in &self.rewards {
            let Values { moments, min, max } = sums.values;
            let mean = moments.mean();
            let own = [("", mean), ("/mean", mean), ("/std", moments.std()), ("/min", min), ("/max", max)];
            own.into_iter().for_each(|(end, value)| put(&format!("rewards/{}{end}", sums.name), value));
        }
    }

    /// Returns the mean of the reward function `name`, or else of the first function whose name starts with `name`
    /// (`format_graded`).
    fn reward_named(&self, name: &str) -> Option<f64> {
        let exact = self.rewards.iter().find(|r| r.name == name);
        exact
            .or_else(|| self.rewards.iter().find(|r| r.name.starts_with(name)))
            .and_then(|r| r.values.moments.mean())
    }
}

fn mean(sum: f64, count: u64) -> Option<f64> {
    (count > 0).then(|| sum / count as f64)
}

fn same_length(what: &'static str, got: usize, expected: usize) -> Result<(), Error> {
    if got == expected {
        Ok(())
    } else {
        Err(Error::Length { what, got, expected, per: "one per completion" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::advantage::{AdvantageKind, advantages, weighted_sum};

    fn get(sums: &MetricSums, name: &str) -> Option<f64> {
        sums.metrics().into_iter().find(|(key, _)| key == name).unwrap_or_else(|| panic!("no {name}")).1
    }

    fn record(sums: &mut MetricSums, accuracy: &[Option<f64>], format: &[Option<f64>]) {
        let totals = weighted_sum(&[accuracy.to_vec(), format.to_vec()], &[1.0, 0.5]).unwrap();
        let lengths: Vec<usize> = (1..=totals.len()).collect();
        let advantages = advantages(&totals, 2, AdvantageKind::GroupStd, 1.0, &lengths).unwrap();
        let functions = [("accuracy", accuracy), ("format_graded", format)];
        sums.add_rewards(&functions, &totals, &lengths, &advantages.zero_std).unwrap();
    }

    #[test]
    fn reward_metrics_by_hand() {
        // Totals 1.5, 0.5 | 0.5, 0.5: the mean is 0.75, the deviation 0.5, the group deviations are 1/sqrt 2 and 0.
        let mut sums = MetricSums::default();
        record(
            &mut sums,
            &[Some(1.0), Some(0.0), None, Some(0.0)],
            &[Some(1.0), Some(1.0), Some(1.0), Some(1.0)],
        );
        assert_eq!(get(&sums, "reward"), Some(0.75));
        assert!((get(&sums, "reward_std").unwrap() - 0.5).abs() < 1e-15);
        assert!((get(&sums, "reward_std/group").unwrap() - 0.5_f64.sqrt() / 2.0).abs() < 1e-15);
        assert_eq!(get(&sums, "frac_reward_zero_std"), Some(0.5));
        assert!((get(&sums, "rewards/accuracy/mean").unwrap() - 1.0 / 3.0).abs() < 1e-15);
        assert!((get(&sums, "rewards/accuracy/std").unwrap() - (1_f64 / 3.0).sqrt()).abs() < 1e-15);
        assert_eq!(get(&sums, "rewards/format_graded/std"), Some(0.0));
        assert_eq!(get(&sums, "rewards/accuracy"), get(&sums, "rewards/accuracy/mean"));
        assert_eq!((get(&sums, "reward/min"), get(&sums, "reward/max")), (Some(0.5), Some(1.5)));
        let of = |name: &str| {
            (get(&sums, &format!("rewards/{name}/min")), get(&sums, &format!("rewards/{name}/max")))
        };
        assert_eq!(of("accuracy"), (Some(0.0), Some(1.0)));
        assert_eq!(of("format_graded"), (Some(1.0), Some(1.0)));
        // Lengths 1, 2 | 3, 4: deviations ±1/2 in both groups; rewards ±1/2 and 0. -1/2 / sqrt(1 · 1/2).
        let correlation = get(&sums, "reward/length_correlation").unwrap();
        assert!((correlation + 0.5_f64.sqrt()).abs() < 1e-15, "{correlation}");

        sums.add_loss(0.25, 0.2, Some(0.5));
        assert_eq!(get(&sums, "grpo/format_reward"), Some(1.0));
        assert_eq!(get(&sums, "grpo/total_reward"), Some(0.75));
        assert_eq!(get(&sums, "grpo/kl_div"), Some(0.5));
        assert_eq!(get(&sums, "grpo/total_loss"), Some(0.25));
    }

    #[test]
    fn rewards_that_never_apply_are_null() {
        let mut sums = MetricSums::default();
        record(&mut sums, &[None; 2], &[None; 2]);
        assert_eq!(get(&sums, "reward"), None);
        assert_eq!(get(&sums, "rewards/accuracy/mean"), None);
        assert_eq!(get(&sums, "frac_reward_zero_std"), Some(1.0));
        assert_eq!((get(&sums, "reward/min"), get(&sums, "reward/length_correlation")), (None, None));
    }

    #[test]
    fn completion_metrics_by_hand() {
        let mut sums = MetricSums::default();
        sums.add_completions(&[4, 8, 6], &[false, true, false]).unwrap();
        for (name, expected) in [
            ("mean_length", 6.0),
            ("min_length", 4.0),
            ("max_length", 8.0),
            ("mean_terminated_length", 5.0),
            ("min_terminated_length", 4.0),
            ("max_terminated_length", 6.0),
            ("clipped_ratio", 1.0 / 3.0),
        ] {
            assert_eq!(get(&sums, &format!("completions/{name}")), Some(expected), "{name}");
        }
        assert_eq!(get(&sums, "completion_length"), Some(6.0));
        assert_eq!(get(&sums, "completions/count"), Some(3.0));
        let mut all_cut = MetricSums::default();
        all_cut.add_completions(&[8], &[true]).unwrap();
        assert_eq!(get(&all_cut, "completions/mean_terminated_length"), Some(0.0));
        assert!(all_cut.add_completions(&[8], &[]).is_err());
    }

    #[test]
    fn merged_parts_equal_the_whole() {
        let accuracy = [Some(1.0), Some(0.0), None, Some(0.25), Some(1.0), Some(1.0)];
        let format = [Some(1.0), None, None, Some(0.5), Some(0.0), Some(1.0)];
        let mut whole = MetricSums::default();
        record(&mut whole, &accuracy, &format);
        whole.add_completions(&[1, 2, 3, 4, 5, 6], &[false, true, false, false, true, true]).unwrap();
        let mut parts = MetricSums::default();
        for group in 0..3 {
            let rows = 2 * group..2 * group + 2;
            let mut part = MetricSums::default();
            record(&mut part, &accuracy[rows.clone()], &format[rows.clone()]);
            let cut = [false, true, false, false, true, true];
            part.add_completions(&[1, 2, 3, 4, 5, 6][rows.clone()], &cut[rows]).unwrap();
            parts.merge(&part);
        }
        let (whole, parts) = (whole.metrics(), parts.metrics());
        assert_eq!(whole.len(), parts.len());
        for ((name, a), (other, b)) in whole.iter().zip(&parts) {
            assert_eq!(name, other);
            assert_eq!(a.is_some(), b.is_some(), "{name}");
            assert!((a.unwrap_or(0.0) - b.unwrap_or(0.0)).abs() < 1e-15, "{name}: {a:?} {b:?}");
        }
    }
}
