//! Detection of training problems from the metrics that a run logs.
//!
//! [`RULES`] is a single table. A rule reads the last steps and the best values of the steps before them, and decides when its
//! problem begins and ends. Only the first matching rule is reported if it explains the others. For example, a policy that ran
//! away also truncates its completions and earns no reward.

use std::collections::VecDeque;

use omnigrpo_grpo::metric;
use omnigrpo_guard::Setting;
use omnigrpo_observe::{Metric, TrainingProblem};

use crate::error::{
    BETA, CORRECTION, CURRICULUM, ENTROPY_COEF, HIGH, LEARNING_RATE, MAX_COMPLETION_LENGTH, MAX_STEPS,
    NUM_GENERATIONS, REWARDS, TEMPERATURE,
};

/// A problem that is visible in the metrics.
#[derive(Debug)]
pub struct Rule {
    /// Name of the rule in `events.jsonl`.
    pub name: &'static str,
    /// Short description of the problem, used as the start of the message.
    pub title: &'static str,
    /// Condition of the rule in one line, for the reference documentation.
    pub doc: &'static str,
    /// Condition as a formula, with the symbols of the reference documentation.
    pub formula: &'static str,
    /// Number of steps that the rule reads; 1 if it reads all steps since the first one. The problem ends after the same number of steps
    /// without it.
    pub window: usize,
    /// First setting to change.
    pub setting: Setting,
    /// Function that returns advice in whole sentences, including the name of the setting.
    pub advice: fn() -> String,
    /// True if continuing the run is pointless.
    pub collapse: bool,
    /// True if the rule finds no problem, but the aim of the run.
    pub good: bool,
    /// True if the rule judges by rewards, so that it is silent for a policy with a teacher.
    by_rewards: bool,
    /// True if later rules would only report consequences of this problem.
    explains: bool,
    sign: fn(&Seen<'_>) -> Option<String>,
}

/// All rules, ordered so that causes come before consequences.
pub const RULES: &[Rule] = &[
    Rule {
        name: "large_gap",
        title: "the rollout and training disagree",
        doc: "the log-probabilities of the rollout and of training differ by more than 0.02 nats on average, and no correction is on",
        formula: "median(gap) > 0.02",
        window: 3,
        setting: CORRECTION,
        advice: || {
            format!(
                "The loss takes both for the same policy. Set {CORRECTION}, which weighs each token or completion by the \
                 difference"
            )
        },
        collapse: false,
        good: false,
        by_rewards: false,
        explains: false,
        sign: |seen| {
            let gap = seen.median(|step| step.gap)?;
            let most = seen.most(|step| step.largest_gap).unwrap_or(gap);
            (gap > LARGE_GAP && !seen.aims.corrected).then(|| {
                format!(
                    "their log-probabilities differ by {gap:.3} nats on average and {most:.2} at most; up to {LARGE_GAP} is ordinary"
                )
            })
        },
    },
    Rule {
        name: "dead_reward",
        title: "every completion has the same reward",
        doc: "all completions since step 1, at least 64, have one and the same reward, which is not the best that the rewards state, \
              and which rows of an evaluation do not differ from",
        formula: "min(r) = max(r) since step 1 ∧ N ≥ 64 ∧ ¬(level(r) > 0.999 of a stated range) ∧ r = every evaluation's mean",
        window: 1,
        setting: REWARDS,
        advice: || {
            format!(
                "Nothing is learned from equal rewards. Compare a completion with its solution in `rollouts/`: either the reward does \
                 not read the answers, or the rows are too hard. Change {REWARDS}, or take easier rows"
            )
        },
        collapse: false,
        good: false,
        by_rewards: true,
        explains: true,
        sign: dead_reward,
    },
    Rule {
        name: "ran_away",
        title: "the policy ran away",
        doc: "the mean reward fell by half a standard deviation and more than by chance, and KL, gradient norm, clip ratio, cut-off \
              completions or groups without variance jumped; or KL is above 5 nats. KL, if measured, is 0.001 nats or more from 0",
        formula: "mean(r) < m − 3·max(s, σ/3)/√5 ∧ median(r) < max(r) − σ/2 ∧ (median(kl) > 1 ∨ median(g) > 20·median(g₀) ∨ median(clip) > 0.5 ∨ jump(cut) ∨ jump(z)) ∧ ¬(abs(median(kl)) < 0.001); or median(kl) > 5",
        window: 5,
        setting: LEARNING_RATE,
        advice: || format!("Lower {LEARNING_RATE}, or raise {BETA}"),
        collapse: true,
        good: false,
        by_rewards: false,
        explains: true,
        sign: ran_away,
    },
    Rule {
        name: "cut_off",
        title: "all completions are cut off",
        doc: "at least 95 % of the completions reach the length limit, and the mean reward is in the lower four fifths of its range",
        formula: "mean(cut) ≥ 0.95 ∧ level(r) < 0.8",
        window: 5,
        setting: MAX_COMPLETION_LENGTH,
        advice: || {
            format!(
                "An answer that is cut off often earns nothing. Raise {MAX_COMPLETION_LENGTH}, or ask for shorter answers"
            )
        },
        collapse: false,
        good: false,
        by_rewards: false,
        explains: true,
        sign: |seen| {
            let share = seen.mean(|step| step.cut_off)?;
            let length = seen.mean(|step| step.length)?;
            let earns = seen.mean(|step| step.reward).and_then(|reward| seen.level(reward));
            (share >= 0.95 && earns.is_none_or(|level| level < 0.8)).then(|| {
                format!(
                    "{:.0} % of them reach the length limit, at {length:.0} tokens on average",
                    100.0 * share
                )
            })
        },
    },
    Rule {
        name: "solved",
        title: "every completion has the best reward",
        doc: "no group has variance and the mean reward is the best that the rewards state or, without a stated range, that was seen",
        formula: "mean(z) ≥ 0.999 ∧ level(r) > 0.999",
        window: 10,
        setting: MAX_STEPS,
        advice: || {
            format!(
                "Nothing is left to learn from these rows. Lower {MAX_STEPS}, or take harder rows ({HIGH} leaves out those that \
                 are solved)"
            )
        },
        collapse: false,
        good: true,
        by_rewards: true,
        explains: true,
        sign: |seen| {
            let reward = seen.alike(0.999)?;
            let known = if seen.aims.states_best() { "" } else { ", the best that was seen," };
            (seen.level(reward)? > 0.999)
                .then(|| format!("the mean reward is {reward:.3}{known} and no group has variance"))
        },
    },
    Rule {
        name: "hopeless",
        title: "no completion earns any reward",
        doc: "no group has variance and the mean reward is the lowest that the rewards state or, without a stated range, that was seen",
        formula: "mean(z) ≥ 0.999 ∧ level(r) < 0.001",
        window: 10,
        setting: REWARDS,
        advice: || {
            format!(
                "The rows are too hard, or the rewards never apply: compare completions and solutions in `rollouts/`, then change \
                 {REWARDS} or take easier rows"
            )
        },
        collapse: false,
        good: false,
        by_rewards: true,
        explains: true,
        sign: |seen| {
            let reward = seen.alike(0.999)?;
            (seen.level(reward)? < 0.001)
                .then(|| format!("the mean reward is {reward:.3} and no group has variance"))
        },
    },
    Rule {
        name: "reward_never_fires",
        title: "a reward never fires",
        doc: "one of several rewards gave every completion its lowest value",
        formula: "rᵢ = lowᵢ for all completions",
        window: 20,
        setting: REWARDS,
        advice: || {
            format!(
                "Look at completions in `rollouts/`: the answers are not in the form that it reads, or the rows are too hard. \
                 Correct {REWARDS}, or leave that reward out"
            )
        },
        collapse: false,
        good: false,
        by_rewards: true,
        explains: false,
        sign: never_fires,
    },
    Rule {
        name: "entropy_collapsed",
        title: "the entropy collapsed",
        doc: "the mean entropy is below 0.01 nats and a twentieth of its best, nine out of ten groups have no variance, and the mean \
              reward is in the lower four fifths of its range",
        formula: "mean(H) < 0.01 ∧ mean(H) < max(H)/20 ∧ mean(z) ≥ 0.9 ∧ level(r) < 0.8",
        window: 10,
        setting: TEMPERATURE,
        advice: || {
            format!(
                "The completions of a prompt are all the same, and not the best ones. Raise {TEMPERATURE} or {ENTROPY_COEF}, or \
                 lower {LEARNING_RATE}"
            )
        },
        collapse: true,
        good: false,
        by_rewards: false,
        explains: true,
        sign: |seen| {
            let entropy = seen.mean(|step| step.entropy)?;
            let best = seen.before.entropy?;
            let reward = seen.alike(0.9).and(seen.median(|step| step.reward))?;
            // If the best possible reward is unknown, this reward may be the best.
            let learned = seen.level(reward)? >= 0.8;
            (entropy < 0.01 && entropy < 0.05 * best && !learned)
                .then(|| format!("it is {entropy:.4} nats, from {best:.3}, at a mean reward of {reward:.3}"))
        },
    },
    Rule {
        name: "no_variance",
        title: "the completions of a prompt all earn the same",
        doc: "nine out of ten groups have no variance, and the mean reward is in the lower four fifths of its range",
        formula: "mean(z) ≥ 0.9 ∧ level(r) < 0.8",
        window: 10,
        setting: CURRICULUM,
        advice: || {
            format!(
                "Nothing is learned from such groups: each row is too easy or too hard. Let {CURRICULUM} choose rows, raise \
                 {NUM_GENERATIONS} or {TEMPERATURE}"
            )
        },
        collapse: false,
        good: false,
        by_rewards: true,
        explains: true,
        sign: |seen| {
            let reward = seen.alike(0.9).and(seen.median(|step| step.reward))?;
            let learned = seen.level(reward).is_some_and(|level| level >= 0.8);
            let share = seen.mean(|step| step.without_variance)?;
            (!learned).then(|| {
                format!(
                    "{:.0} % of the groups have no variance, at a mean reward of {reward:.3}",
                    100.0 * share
                )
            })
        },
    },
    Rule {
        name: "hacked",
        title: "the reward rises without the aim",
        doc: "the mean reward rises while the held-out result falls below its best by more than chance. Or it rises and no held-out accuracy does, \
              reward and length move together within the prompts, and the completions become half as long again",
        formula: "rises(r) ∧ (best(e) − e > 2.58·SE ∨ mean(corr) ≥ 0.9 ∧ mean(len) ≥ 1.5·len₀ ∧ ¬rises(e))",
        window: 20,
        setting: REWARDS,
        advice: || {
            format!(
                "The model has found something that earns reward and does not help. Read the completions with the highest rewards, and \
                 change {REWARDS} so that these no longer earn it; or raise {BETA}, or stop at the best evaluation"
            )
        },
        collapse: false,
        good: false,
        by_rewards: true,
        explains: false,
        sign: hacked,
    },
    Rule {
        name: "format_only",
        title: "only one of the rewards is learned",
        doc: "one reward has risen to 90 % of its range or more, by at least 30 % of it since the first 5 steps. Another one, below 80 % of its \
              range, has not risen in 200 steps or more, and a rise by a tenth of its range would be seen",
        formula: "level(rᵢ) ≥ 0.9 ∧ level(rᵢ) − level(rᵢ in the first 5 steps) ≥ 0.3 ∧ level(rⱼ) < 0.8 ∧ flat(rⱼ) ∧ n ≥ 200",
        window: 40,
        setting: REWARDS,
        advice: || {
            format!(
                "The model earns the easy reward, such as that for the form, and not the other. Look at completions and solutions in \
                 `rollouts/`. Correct the reward in {REWARDS} that stays, take easier rows, or teach the answers with `sft` first"
            )
        },
        collapse: false,
        good: false,
        by_rewards: true,
        explains: true,
        sign: format_only,
    },
    Rule {
        name: "flat",
        title: "the model has hardly moved",
        doc: "the groups vary, and the mean reward has not risen since the start. A rise by a tenth of its range would be seen. KL is below \
              0.001 nats; if it is not measured, after 200 steps or more",
        formula: "mean(z) < 0.9 ∧ level(r) < 0.8 ∧ flat(r) ∧ (median(kl) < 0.001 ∨ kl unknown ∧ n ≥ 200)",
        window: 40,
        setting: LEARNING_RATE,
        advice: || {
            format!(
                "Raise {LEARNING_RATE}, ten times as high for a first try. If the reward then stays where it is, {REWARDS} or the rows \
                 are the cause"
            )
        },
        collapse: false,
        good: false,
        by_rewards: true,
        explains: false,
        sign: |seen| {
            let kl = seen.median(|step| step.kl);
            let moved = match kl {
                Some(kl) if kl >= HARDLY_MOVED => return None,
                Some(kl) => format!("KL is {kl:.1e} nats"),
                None => format!("KL is not measured while {BETA} is 0"),
            };
            // A schedule lowers it, and the advice is about the setting.
            let rate = seen.history.learning_rate;
            let rate = rate.map(|rate| format!(", the learning rate {rate:.1e}")).unwrap_or_default();
            // Without KL, it is unknown whether the policy moves.
            let fewest = if kl.is_some() { 0 } else { FLAT_FROM };
            flat(seen, fewest).map(|told| format!("{told}, {moved}{rate}"))
        },
    },
    Rule {
        name: "flat_reward",
        title: "the model moves and the reward does not",
        doc: "as `flat`, with a KL of at least 0.001 nats, after 200 steps or more",
        formula: "mean(z) < 0.9 ∧ level(r) < 0.8 ∧ flat(r) ∧ median(kl) ≥ 0.001 ∧ n ≥ 200",
        window: 40,
        setting: REWARDS,
        advice: || {
            format!(
                "The learning rate is high enough. Either {REWARDS} gives much to chance, or the rows are too hard: compare completions \
                 of one prompt in `rollouts/`; more of them ({NUM_GENERATIONS}) make the comparison of a group more reliable"
            )
        },
        collapse: false,
        good: false,
        by_rewards: true,
        explains: false,
        sign: |seen| {
            let kl = seen.median(|step| step.kl).filter(|&kl| kl >= HARDLY_MOVED)?;
            flat(seen, FLAT_FROM).map(|told| format!("{told}, KL is {kl:.4} nats"))
        },
    },
];

/// Largest number of steps that any rule reads.
const LONGEST: usize = 40;
/// KL below which a policy has hardly moved, in nats.
const HARDLY_MOVED: f64 = 0.001;
/// Number of completions that must share a reward until it counts as dead.
const DEAD_FROM: f64 = 64.0;
/// Number of first and of last steps that are compared.
const SPAN: usize = 20;
/// Number of steps after which a reward that does not rise is reported although the policy moves. Slow learning is not seen in fewer.
const FLAT_FROM: usize = 200;
/// Share of the range by which a reward would be seen to rise, if it is called flat.
const SEEN_TO_RISE: f64 = 0.1;
/// Largest ordinary mean difference of log-probabilities between rollout and training, in nats.
const LARGE_GAP: f64 = 0.02;
/// Number of first gradient norms with which later ones are compared.
const FIRST_NORMS: usize = 50;

fn ran_away(seen: &Seen<'_>) -> Option<String> {
    let before = seen.before;
    // There is nothing to compare with before the first step.
    before.reward?;
    // A policy that is still at its reference did not run away: with few prompts, its rewards and gradients jump by chance.
    if seen.median(|step| step.kl).is_some_and(|kl| kl.abs() < HARDLY_MOVED) {
        return None;
    }
    let mut signs = Vec::new();
    let kl = seen.median(|step| step.kl).filter(|&kl| kl > 1.0);
    signs.extend(kl.map(|kl| format!("KL is {kl:.1} nats")));
    let norm = seen
        .median(|step| step.grad_norm)
        .zip(median(&mut before.norms.clone()))
        .filter(|(now, then)| *now > 20.0 * then);
    signs.extend(norm.map(|(now, then)| format!("the gradient norm is {now:.3}, from {then:.3}")));
    let clipped = seen.median(|step| step.ratio_clipped).filter(|&share| share > 0.5);
    signs.extend(clipped.map(|share| format!("{:.0} % of the ratios are clipped", 100.0 * share)));
    let jumped =
        |now: Option<f64>, then: Option<f64>| now.zip(then).filter(|(now, then)| *now >= 0.9 && *then < 0.5);
    let cut_off = jumped(seen.mean(|step| step.cut_off), before.cut_off);
    signs.extend(cut_off.map(|(share, _)| format!("{:.0} % of the completions are cut off", 100.0 * share)));
    let alike = jumped(seen.mean(|step| step.without_variance), before.without_variance);
    signs.extend(alike.map(|(share, _)| format!("{:.0} % of the groups have no variance", 100.0 * share)));
    let fell = || {
        let (now, best) = (seen.mean(|step| step.reward)?, before.reward?);
        let (mean, deviation) = before.rewards.mean_and_deviation();
        // Mean rewards of steps with few prompts vary by chance. The deviation of few steps is too small by chance itself.
        let deviation = deviation.max(before.reward_std.unwrap_or(0.0) / 3.0);
        let by_chance = 3.0 * deviation / (seen.steps.len() as f64).sqrt();
        let mostly = seen.median(|step| step.reward)?;
        let fell = now < mean - by_chance && mostly < best - 0.5 * before.reward_std?.max(1e-6);
        fell.then(|| format!("the mean reward fell from {best:.3} to {now:.3}"))
    };
    let fell = fell();
    if signs.is_empty() || fell.is_none() && kl.is_none_or(|kl| kl < 5.0) {
        return None;
    }
    Some(fell.into_iter().chain(signs).collect::<Vec<_>>().join(", "))
}

fn dead_reward(seen: &Seen<'_>) -> Option<String> {
    let history = seen.history;
    let (low, high) = history.range?;
    let is_known = history.is_whole && history.completions >= DEAD_FROM;
    if low != high
        || !is_known
        || seen.aims.states_best() && seen.level(low).is_some_and(|level| level > 0.999)
    {
        return None;
    }
    // Rows that are held out may show that the reward works.
    if history.evaluations.iter().any(|held| held.reward.is_some_and(|reward| (reward - low).abs() > 1e-9)) {
        return None;
    }
    let value = |(at, (name, _)): (usize, &(String, (f64, f64)))| {
        let (least, most) = history.ranges.get(at).copied().flatten()?;
        (least == most).then(|| format!("`{name}` gave {least}"))
    };
    let each: Vec<String> = seen.aims.rewards.iter().enumerate().filter_map(value).collect();
    let each = if each.is_empty() { format!("the rewards gave {low}") } else { each.join(" and ") };
    Some(format!("{each} to all {:.0} completions", history.completions))
}

fn hacked(seen: &Seen<'_>) -> Option<String> {
    let history = seen.history;
    let (first, last) = history.total.ends(SPAN)?;
    if !last.exceeds(&first, 3.0) {
        return None;
    }
    let rose = format!("the mean reward rose from {:.3} to {:.3}", first.mean, last.mean);
    if let Some((best, now)) = history.fall(seen) {
        return Some(format!(
            "{rose}, and the held-out {} fell from {:.3} at step {} to {:.3} at step {}",
            now.name(),
            best.value()?,
            best.at,
            now.value()?,
            now.at
        ));
    }
    let mut answered = history.evaluations.iter().filter_map(|held| held.accuracy);
    let (before, after) = (answered.clone().next(), answered.next_back());
    if before.zip(after).is_some_and(|(before, after)| after > before) {
        return None;
    }
    let correlation = seen.mean(|step| step.length_correlation).filter(|own| *own >= 0.9)?;
    let (short, long) = history.lengths.ends(SPAN)?;
    (long.mean >= 1.5 * short.mean).then(|| {
        format!(
            "{rose} with the length, from {:.0} to {:.0} tokens; within a prompt, reward and length have a correlation of \
             {correlation:.2}",
            short.mean, long.mean
        )
    })
}

fn format_only(seen: &Seen<'_>) -> Option<String> {
    if seen.history.total.sums.len() < FLAT_FROM {
        return None;
    }
    let names = seen.aims.rewards.iter().map(|(name, _)| name);
    let all: Vec<(&String, &Series, (f64, f64))> = names
        .zip(&seen.history.rewards)
        .enumerate()
        .filter_map(|(at, (name, series))| Some((name, series, seen.range_of(at)?)))
        .collect();
    let level = |mean: f64, (low, high): (f64, f64)| (mean - low) / (high - low);
    let learned = all.iter().find_map(|(name, series, range)| {
        let now = series.last(seen.steps.len())?;
        let start = series.first(LEARNED_FROM)?;
        let is_learned =
            level(now.mean, *range) >= 0.9 && level(now.mean - start.mean + range.0, *range) >= 0.3;
        is_learned.then(|| format!("`{name}` rose from {:.2} to {:.2}", start.mean, now.mean))
    })?;
    let stays = all.iter().find_map(|(name, series, range)| {
        let (start, now) = series.flat(range.1 - range.0)?;
        (level(now, *range) < 0.8).then(|| format!("`{name}` stays where it is, from {start:.2} to {now:.2}"))
    })?;
    Some(format!("{learned}, and {stays}"))
}

/// Number of first steps that tell where a reward began that is then learned.
const LEARNED_FROM: usize = 5;

/// Describes a mean reward that has not risen since the start although groups vary, after `fewest` steps or more.
fn flat(seen: &Seen<'_>, fewest: usize) -> Option<String> {
    let width = seen.range()?.1 - seen.range()?.0;
    let alike = seen.mean(|step| step.without_variance)?;
    let (start, now) = seen.history.total.flat(width).filter(|_| alike < 0.9)?;
    if seen.history.total.sums.len() < fewest {
        return None;
    }
    (seen.level(now)? < 0.8).then(|| {
        let varied = 100.0 * (1.0 - alike);
        format!("the mean reward stays where it is, from {start:.3} to {now:.3}, although {varied:.0} % of the groups vary")
    })
}

fn never_fires(seen: &Seen<'_>) -> Option<String> {
    let silent: Vec<String> = seen
        .aims
        .rewards
        .iter()
        .enumerate()
        .filter_map(|(at, (name, (least, best)))| {
            // For a reward without a minimum, 0 counts as the lowest value.
            let least = if least.is_finite() { *least } else { 0.0 };
            let is_silent = |step: &&Step| step.rewards.get(at).copied().flatten() == Some((least, 0.0));
            (least < *best && seen.steps.iter().all(is_silent))
                .then(|| format!("`{name}` gave every completion {least}"))
        })
        .collect();
    (!silent.is_empty() && seen.aims.rewards.len() > 1).then(|| silent.join(" and "))
}

/// Range of the rewards of a run, and whether its loss corrects the gap.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Aims {
    /// Minimum and maximum of the weighted sum.
    pub range: Option<(f64, f64)>,
    /// Name, minimum and maximum of each reward.
    pub rewards: Vec<(String, (f64, f64))>,
    /// True if the loss corrects the difference between rollout and training.
    pub corrected: bool,
    /// True if a teacher trains the policy, with rewards or without. Nothing follows from rewards alone then.
    pub taught: bool,
}

impl Aims {
    /// Returns true if the rewards state their best value.
    fn states_best(&self) -> bool {
        self.range.is_some_and(|(_, best)| best.is_finite())
    }
}

/// Completes a stated range, which may have infinite ends, with what was seen. `None` if nothing lies between its ends.
fn completed(stated: Option<(f64, f64)>, seen: Option<(f64, f64)>) -> Option<(f64, f64)> {
    let end = |stated: Option<f64>, seen: Option<f64>| stated.filter(|end| end.is_finite()).or(seen);
    let low = end(stated.map(|own| own.0), seen.map(|own| own.0))?;
    let high = end(stated.map(|own| own.1), seen.map(|own| own.1))?;
    (high > low).then_some((low, high))
}

/// Numbers of a step that the rules read.
#[derive(Clone, Debug, Default)]
struct Step {
    at: u64,
    reward: Option<f64>,
    reward_std: Option<f64>,
    without_variance: Option<f64>,
    kl: Option<f64>,
    entropy: Option<f64>,
    grad_norm: Option<f64>,
    ratio_clipped: Option<f64>,
    cut_off: Option<f64>,
    length: Option<f64>,
    length_correlation: Option<f64>,
    learning_rate: Option<f64>,
    gap: Option<f64>,
    largest_gap: Option<f64>,
    /// Mean and standard deviation of each reward.
    rewards: Vec<Option<(f64, f64)>>,
}

impl Step {
    fn of(at: u64, metrics: &[Metric], aims: &Aims) -> Self {
        let get = |name: &str| metrics.iter().find(|(own, _)| own == name).and_then(|(_, value)| *value);
        let reward =
            |name: &str| Some((get(&format!("rewards/{name}/mean"))?, get(&format!("rewards/{name}/std"))?));
        Self {
            at,
            reward: get(metric::REWARD),
            reward_std: get(metric::REWARD_STD),
            without_variance: get(metric::ZERO_STD),
            // A KL that is NaN counts as infinite, so that it is reported.
            kl: get(metric::KL).map(|kl| if kl.is_nan() { f64::INFINITY } else { kl }),
            entropy: get(metric::ENTROPY),
            grad_norm: get(metric::GRAD_NORM),
            ratio_clipped: get(metric::CLIP_RATIO),
            cut_off: get(metric::CLIPPED),
            length: get(metric::MEAN_LENGTH),
            length_correlation: get(metric::LENGTH_CORRELATION),
            learning_rate: get(metric::LEARNING_RATE),
            gap: get("sampling/sampling_logp_difference/mean"),
            largest_gap: get("sampling/sampling_logp_difference/max"),
            rewards: aims.rewards.iter().map(|(name, _)| reward(name)).collect(),
        }
    }
}

/// Best values of the steps before a window.
#[derive(Clone, Debug, Default)]
struct Before {
    reward: Option<f64>,
    reward_std: Option<f64>,
    entropy: Option<f64>,
    cut_off: Option<f64>,
    without_variance: Option<f64>,
    rewards: Moments,
    /// First gradient norms other than 0.
    norms: Vec<f64>,
}

impl Before {
    fn add(&mut self, step: &Step) {
        keep(&mut self.reward, step.reward, f64::max);
        step.reward.into_iter().for_each(|reward| self.rewards.add(reward));
        keep(&mut self.reward_std, step.reward_std, f64::max);
        keep(&mut self.entropy, step.entropy, f64::max);
        keep(&mut self.cut_off, step.cut_off, f64::min);
        keep(&mut self.without_variance, step.without_variance, f64::min);
        if let Some(norm) = step.grad_norm.filter(|&norm| norm > 0.0 && self.norms.len() < FIRST_NORMS) {
            self.norms.push(norm);
        }
    }
}

/// Running mean and spread of a sequence of numbers (Welford).
#[derive(Clone, Copy, Debug, Default)]
struct Moments {
    count: f64,
    mean: f64,
    squares: f64,
}

impl Moments {
    fn add(&mut self, value: f64) {
        self.count += 1.0;
        let by = value - self.mean;
        self.mean += by / self.count;
        self.squares += by * (value - self.mean);
    }

    fn mean_and_deviation(&self) -> (f64, f64) {
        (self.mean, (self.squares / self.count.max(1.0)).sqrt())
    }
}

/// Mean of some steps, and the squared standard error of that mean.
#[derive(Clone, Copy, Debug)]
struct Level {
    mean: f64,
    squared_error: f64,
}

impl Level {
    /// Returns true if this mean is above another one by more than `errors` standard errors.
    fn exceeds(&self, other: &Self, errors: f64) -> bool {
        self.mean - other.mean > errors * (self.squared_error + other.squared_error).sqrt() + 1e-9
    }
}

/// A number of each step, as running sums, so that the mean of any steps is known at once.
#[derive(Clone, Debug, Default)]
struct Series {
    sums: Vec<f64>,
    squares: Vec<f64>,
    /// True if the number has ever been above its start by more than chance.
    has_risen: bool,
}

impl Series {
    fn add(&mut self, value: Option<f64>) {
        let Some(value) = value.filter(|value| value.is_finite()) else { return };
        let last = |sums: &[f64]| sums.last().copied().unwrap_or(0.0);
        self.sums.push(last(&self.sums) + value);
        self.squares.push(last(&self.squares) + value * value);
        self.has_risen |= self.ends(SPAN).is_some_and(|(first, now)| now.exceeds(&first, 3.0));
    }

    fn of(&self, from: usize, until: usize) -> Option<Level> {
        let count = until.checked_sub(from).filter(|&count| count > 1)? as f64;
        let part = |sums: &[f64]| Some(sums.get(until - 1)? - from.checked_sub(1).map_or(0.0, |at| sums[at]));
        let (sum, squares) = (part(&self.sums)?, part(&self.squares)?);
        let mean = sum / count;
        let variance = ((squares - sum * mean) / (count - 1.0)).max(0.0);
        Some(Level { mean, squared_error: variance / count })
    }

    fn first(&self, count: usize) -> Option<Level> {
        self.of(0, count)
    }

    fn last(&self, count: usize) -> Option<Level> {
        self.of(self.sums.len().checked_sub(count)?, self.sums.len())
    }

    /// Returns the first and the last steps, `count` each, which do not overlap.
    fn ends(&self, count: usize) -> Option<(Level, Level)> {
        if self.sums.len() < 2 * count { None } else { self.first(count).zip(self.last(count)) }
    }

    /// Returns the means of the first and the last third if the number has not risen, and if a rise of a tenth of `width` would have
    /// been seen.
    fn flat(&self, width: f64) -> Option<(f64, f64)> {
        let (first, last) = self.ends(self.sums.len() / 3).filter(|_| !self.has_risen)?;
        let error = (first.squared_error + last.squared_error).sqrt();
        let gain = last.mean - first.mean;
        // A mean that fell is another problem.
        let is_flat = gain.abs() <= 3.0 * error + 1e-9 && gain + 2.0 * error < SEEN_TO_RISE * width;
        is_flat.then_some((first.mean, last.mean))
    }
}

/// Result of an evaluation.
#[derive(Clone, Debug)]
struct Held {
    at: u64,
    rows: f64,
    accuracy: Option<f64>,
    reward: Option<f64>,
}

impl Held {
    /// Returns the share of right answers or, without a reward that judges answers, the mean reward.
    fn value(&self) -> Option<f64> {
        self.accuracy.or(self.reward)
    }

    fn name(&self) -> &'static str {
        if self.accuracy.is_some() { "accuracy" } else { "reward" }
    }

    /// Returns a bound of the squared standard error of the value, for numbers within a range.
    fn squared_error(&self, (low, high): (f64, f64)) -> Option<f64> {
        let value = self.value()?.clamp(low, high);
        (self.rows > 0.0).then(|| (value - low) * (high - value) / self.rows)
    }
}

/// Everything since the start that rules compare with.
#[derive(Clone, Debug, Default)]
struct History {
    /// True if the first step of the run is known.
    is_whole: bool,
    has_gap: bool,
    completions: f64,
    /// Smallest and largest total, and those of each reward.
    range: Option<(f64, f64)>,
    ranges: Vec<Option<(f64, f64)>>,
    total: Series,
    rewards: Vec<Series>,
    lengths: Series,
    /// Largest learning rate.
    learning_rate: Option<f64>,
    evaluations: Vec<Held>,
}

impl History {
    fn add(&mut self, step: &Step, metrics: &[Metric], aims: &Aims) {
        if self.total.sums.is_empty() && self.lengths.sums.is_empty() {
            self.is_whole = step.at <= 1;
            self.ranges = vec![None; aims.rewards.len()];
            self.rewards = vec![Series::default(); aims.rewards.len()];
        }
        let get = |name: &str| metrics.iter().find(|(own, _)| own == name).and_then(|(_, value)| *value);
        // A step that reuses a rollout has no gap, and counts its completions again.
        self.has_gap |= step.gap.is_some();
        if step.gap.is_some() || !self.has_gap {
            self.completions += get(metric::COUNT).unwrap_or(0.0);
        }
        let ends = |least: Option<f64>, most: Option<f64>, mean: Option<(f64, f64)>| {
            // Older programs recorded no extremes. A deviation is within them.
            least.zip(most).or(mean.map(|(mean, std)| (mean - std, mean + std)))
        };
        let widen = |range: &mut Option<(f64, f64)>, own: Option<(f64, f64)>| {
            let wider = range.zip(own).map(|(a, b)| (a.0.min(b.0), a.1.max(b.1)));
            *range = wider.or(*range).or(own);
        };
        let total = ends(get(metric::REWARD_MIN), get(metric::REWARD_MAX), step.reward.zip(step.reward_std));
        widen(&mut self.range, total);
        self.total.add(step.reward);
        self.lengths.add(step.length);
        keep(&mut self.learning_rate, step.learning_rate, f64::max);
        for (at, (name, _)) in aims.rewards.iter().enumerate() {
            let (least, most) = (get(&format!("rewards/{name}/min")), get(&format!("rewards/{name}/max")));
            widen(&mut self.ranges[at], ends(least, most, step.rewards[at]));
            self.rewards[at].add(step.rewards[at].map(|(mean, _)| mean));
        }
    }

    /// Returns the best and the last evaluation if the last one is worse by more than chance (99 %).
    fn fall(&self, seen: &Seen<'_>) -> Option<(&Held, &Held)> {
        let now = self.evaluations.last()?;
        let same = self.evaluations.iter().filter(|held| held.accuracy.is_some() == now.accuracy.is_some());
        let best =
            same.max_by(|a, b| a.value().unwrap_or(f64::MIN).total_cmp(&b.value().unwrap_or(f64::MIN)))?;
        let range = if now.accuracy.is_some() { (0.0, 1.0) } else { seen.range()? };
        let error = (best.squared_error(range)? + now.squared_error(range)?).sqrt();
        (best.value()? - now.value()? > 2.58 * error).then_some((best, now))
    }
}

/// Updates `kept` with `new`. If both have a value, `choose` selects one.
fn keep(kept: &mut Option<f64>, new: Option<f64>, choose: fn(f64, f64) -> f64) {
    *kept = kept.zip(new).map(|(a, b)| choose(a, b)).or(*kept).or(new);
}

fn median(values: &mut [f64]) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

/// Input of a rule.
struct Seen<'a> {
    /// Last steps, as many as the rule reads.
    steps: Vec<&'a Step>,
    before: &'a Before,
    history: &'a History,
    aims: &'a Aims,
}

impl Seen<'_> {
    /// Returns the values of the steps that have one; `None` if no step does. A step that reuses a rollout has no gap.
    fn all(&self, of: fn(&Step) -> Option<f64>) -> Option<Vec<f64>> {
        let all: Vec<f64> = self.steps.iter().filter_map(|step| of(step)).collect();
        (!all.is_empty()).then_some(all)
    }

    fn mean(&self, of: fn(&Step) -> Option<f64>) -> Option<f64> {
        let all = self.all(of)?;
        Some(all.iter().sum::<f64>() / all.len() as f64)
    }

    fn median(&self, of: fn(&Step) -> Option<f64>) -> Option<f64> {
        median(&mut self.all(of)?)
    }

    fn most(&self, of: fn(&Step) -> Option<f64>) -> Option<f64> {
        self.all(of)?.into_iter().reduce(f64::max)
    }

    /// Returns the mean reward if at least `share` of the groups have no variance.
    fn alike(&self, share: f64) -> Option<f64> {
        let alike = self.mean(|step| step.without_variance)? >= share;
        self.mean(|step| step.reward).filter(|_| alike)
    }

    /// Returns the range of the total reward: the stated one or, where it has no bounds, the one that was seen.
    fn range(&self) -> Option<(f64, f64)> {
        completed(self.aims.range, self.history.range)
    }

    /// Returns the range of a reward by its index, as [`Self::range`].
    fn range_of(&self, at: usize) -> Option<(f64, f64)> {
        let (_, stated) = self.aims.rewards.get(at)?;
        completed(Some(*stated), self.history.ranges.get(at).copied().flatten())
    }

    /// Scales a total reward to its range: 0 is the minimum and 1 the maximum; `None` if no two rewards differ.
    fn level(&self, reward: f64) -> Option<f64> {
        let (least, best) = self.range()?;
        Some((reward - least) / (best - least))
    }
}

/// A problem that has begun and not ended.
#[derive(Debug)]
struct Lasting {
    since: u64,
    /// Number of steps since the rule last applied.
    calm: usize,
}

/// Health of a run.
#[derive(Debug)]
pub struct Health {
    aims: Aims,
    last: VecDeque<Step>,
    /// Best values of the steps that are no longer in any window.
    before: Before,
    history: History,
    lasting: Vec<Option<Lasting>>,
}

impl Health {
    /// Creates the state of a run before its first step.
    pub fn new(aims: Aims) -> Self {
        Self {
            aims,
            last: VecDeque::new(),
            before: Before::default(),
            history: History::default(),
            lasting: RULES.iter().map(|_| None).collect(),
        }
    }

    /// Adds the metrics of a step and returns the problems that begin or end with it.
    pub fn add(&mut self, step: u64, metrics: &[Metric]) -> Vec<TrainingProblem> {
        let own = Step::of(step, metrics, &self.aims);
        self.history.add(&own, metrics, &self.aims);
        self.last.push_back(own);
        let told = self.judge(step, |_| true);
        let ruined = self.collapse();
        if self.last.len() > LONGEST
            && let Some(oldest) = self.last.pop_front()
            && ruined.is_none_or(|(_, since)| oldest.at < since)
        {
            self.before.add(&oldest);
        }
        told
    }

    /// Adds the metrics of an evaluation after a step and returns the problems that begin with it.
    pub fn evaluated(&mut self, step: u64, metrics: &[Metric]) -> Vec<TrainingProblem> {
        let get = |name: &str| metrics.iter().find(|(own, _)| own == name).and_then(|(_, value)| *value);
        let (accuracy, reward) = (get("eval_accuracy"), get("eval_reward"));
        let rows = get("eval_rows").unwrap_or(0.0);
        self.history.evaluations.push(Held { at: step, rows, accuracy, reward });
        if self.last.is_empty() { Vec::new() } else { self.judge(step, |rule| rule.name == "hacked") }
    }

    /// Applies rules to what is known after a step.
    fn judge(&mut self, step: u64, applies: impl Fn(&Rule) -> bool) -> Vec<TrainingProblem> {
        // After a collapse, a run is compared with the steps before it.
        let ruined = self.collapse();
        let is_sound = |step: &Step| ruined.is_none_or(|(_, since)| step.at < since);
        let mut told = Vec::new();
        let mut explained = false;
        for (rule, lasting) in RULES.iter().zip(&mut self.lasting) {
            if explained {
                // An explained rule is not evaluated, so its state does not change.
                continue;
            }
            explained = rule.explains && lasting.is_some();
            if !applies(rule) || self.aims.taught && rule.by_rewards {
                continue;
            }
            let sign = self.last.len().checked_sub(rule.window).and_then(|from| {
                let mut before = self.before.clone();
                self.last.range(..from).filter(|step| is_sound(step)).for_each(|step| before.add(step));
                let steps = self.last.range(from..).collect();
                (rule.sign)(&Seen { steps, before: &before, history: &self.history, aims: &self.aims })
            });
            let problem = |begins, since, text| TrainingProblem {
                rule: rule.name.to_owned(),
                begins,
                good: rule.good,
                since,
                text,
                ..TrainingProblem::default()
            };
            match (lasting.as_mut(), sign) {
                (None, Some(sign)) => {
                    let since =
                        if rule.window == 1 { 1 } else { (step + 1).saturating_sub(rule.window as u64) };
                    let (title, advice) = (rule.title.to_owned(), (rule.advice)());
                    let text = format!("{title} (steps {since} to {step}): {sign}. {advice}");
                    let what = sign;
                    told.push(TrainingProblem { title, what, advice, ..problem(true, since, text) });
                    *lasting = Some(Lasting { since, calm: 0 });
                }
                (Some(own), Some(_)) => own.calm = 0,
                (Some(own), None) => {
                    own.calm += 1;
                    if own.calm >= rule.window {
                        let since = own.since;
                        let text =
                            format!("no longer from step {step} on: {} (since step {since})", rule.title);
                        told.push(problem(false, since, text));
                        *lasting = None;
                    }
                }
                (None, None) => {}
            }
            explained = rule.explains && lasting.is_some();
        }
        told
    }

    /// Returns the ongoing collapse and its first step.
    pub fn collapse(&self) -> Option<(&'static Rule, u64)> {
        let mut all = RULES.iter().zip(&self.lasting).filter(|(rule, _)| rule.collapse);
        all.find_map(|(rule, lasting)| Some((rule, lasting.as_ref()?.since)))
    }

    /// Returns the first step of the oldest ongoing problem.
    pub fn since(&self) -> Option<u64> {
        let problems = RULES.iter().zip(&self.lasting).filter(|(rule, _)| !rule.good);
        problems.filter_map(|(_, lasting)| Some(lasting.as_ref()?.since)).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(
        health: &mut Health,
        steps: std::ops::RangeInclusive<u64>,
        metrics: &[(&str, f64)],
    ) -> Vec<(u64, TrainingProblem)> {
        let metrics: Vec<Metric> =
            metrics.iter().map(|(name, value)| ((*name).to_owned(), Some(*value))).collect();
        steps.flat_map(|step| health.add(step, &metrics).into_iter().map(move |own| (step, own))).collect()
    }

    #[test]
    fn rules_name_their_setting_and_no_name_comes_twice() {
        for (at, rule) in RULES.iter().enumerate() {
            assert!((rule.advice)().contains(&rule.setting.to_string()), "{}", rule.name);
            assert!(
                rule.window <= LONGEST && !rule.doc.is_empty() && !rule.formula.is_empty(),
                "{}",
                rule.name
            );
            assert!(RULES[..at].iter().all(|other| other.name != rule.name), "{}", rule.name);
        }
    }

    /// A run that a teacher trains alone has a reward of 0 in every group.
    #[test]
    fn with_a_teacher_equal_rewards_mean_nothing() {
        let metrics = [
            ("reward", 0.0),
            ("reward/min", 0.0),
            ("reward/max", 0.0),
            ("frac_reward_zero_std", 1.0),
            ("completions/count", 64.0),
        ];
        let begun = |taught: bool| {
            let mut health = Health::new(Aims { taught, ..Aims::default() });
            told(&mut health, 1..=30, &metrics).len()
        };
        assert!(begun(false) > 0 && begun(true) == 0);
    }

    /// Gap of a run whose rollouts use 4-bit weights of a model with outliers.
    #[test]
    fn a_gap_is_told_once_and_its_end_too() {
        let gap = |mean: f64| {
            [
                ("sampling/sampling_logp_difference/mean", mean),
                ("sampling/sampling_logp_difference/max", 1.25),
            ]
        };
        let mut health = Health::new(Aims::default());
        assert_eq!(told(&mut health, 1..=2, &gap(0.0312)), []);
        let begins = told(&mut health, 3..=9, &gap(0.0312));
        assert_eq!(begins.len(), 1);
        let (step, begin) = &begins[0];
        assert_eq!((*step, begin.since, begin.begins), (3, 1, true));
        let text = "the rollout and training disagree (steps 1 to 3): their log-probabilities differ by 0.031 nats on average \
                    and 1.25 at most; up to 0.02 is ordinary. The loss takes both for the same policy. Set \
                    Algorithm::loss.correction.kind, which weighs each token or completion by the difference";
        assert_eq!(begin.text, text);
        assert_eq!(health.since(), Some(1));
        // The median of three steps is below the bound from the second step on.
        let ends = told(&mut health, 10..=20, &gap(0.001));
        assert_eq!(ends.len(), 1);
        let (step, end) = &ends[0];
        assert_eq!((*step, end.begins, end.rule.as_str()), (13, false, "large_gap"));
        assert_eq!(end.text, "no longer from step 13 on: the rollout and training disagree (since step 1)");
        assert_eq!((health.since(), health.collapse().is_none()), (None, true));
        let mut corrected = Health::new(Aims { corrected: true, ..Aims::default() });
        assert_eq!(told(&mut corrected, 1..=9, &gap(0.5)), []);
    }

    #[test]
    fn what_a_collapse_causes_is_not_told_and_it_ends_when_the_reward_is_back() {
        let step = |reward: f64, kl: f64, cut: f64| {
            [
                ("reward", reward),
                ("reward_std", 0.4),
                ("kl", kl),
                ("completions/clipped_ratio", cut),
                ("completions/mean_length", 7.0),
                ("frac_reward_zero_std", cut),
            ]
        };
        let mut health = Health::new(Aims { range: Some((0.0, 1.0)), ..Aims::default() });
        // A run with a learning rate of 0.5 logs one good step.
        assert_eq!(told(&mut health, 1..=1, &step(0.375, 0.0, 0.0)), []);
        let begins = told(&mut health, 2..=60, &step(0.0, 16.8, 1.0));
        let found: Vec<_> = begins.iter().map(|(step, own)| (*step, own.rule.as_str())).collect();
        assert_eq!(found, [(6, "ran_away")], "neither that all are cut off nor that none earns anything");
        assert!(begins[0].1.text.contains(
            "the mean reward fell from 0.375 to 0.000, KL is 16.8 nats, 100 % of the completions are cut off"
        ));
        assert_eq!(health.collapse().map(|(rule, since)| (rule.name, since)), Some(("ran_away", 2)));
        let ends = told(&mut health, 61..=80, &step(0.4, 0.1, 0.0));
        assert_eq!(
            ends.iter().map(|(_, own)| (own.begins, own.rule.as_str())).collect::<Vec<_>>(),
            [(false, "ran_away")]
        );
    }

    /// Metrics of a step of 64 completions with one reward `own` without a stated range.
    fn own(mean: f64, (least, most): (f64, f64), more: &[(&str, f64)]) -> Vec<Metric> {
        let std = if least == most { 0.0 } else { 0.4 };
        let zero = f64::from(least == most);
        let all = [
            ("completions/count", 64.0),
            ("completions/mean_length", 20.0),
            ("completions/clipped_ratio", 0.0),
            ("reward", mean),
            ("reward_std", std),
            ("reward/min", least),
            ("reward/max", most),
            ("frac_reward_zero_std", zero),
            ("rewards/own/mean", mean),
            ("rewards/own/std", std),
            ("rewards/own/min", least),
            ("rewards/own/max", most),
        ];
        let kept = all.iter().filter(|(name, _)| more.iter().all(|(own, _)| own != name));
        kept.chain(more).map(|(name, value)| ((*name).to_owned(), Some(*value))).collect()
    }

    fn without_range() -> Health {
        let unknown = (f64::NEG_INFINITY, f64::INFINITY);
        let (range, rewards) = (Some(unknown), vec![("own".to_owned(), unknown)]);
        Health::new(Aims { range, rewards, ..Aims::default() })
    }

    /// Returns the step, the rule and whether it begins of all that a series tells.
    fn series(health: &mut Health, steps: impl IntoIterator<Item = Vec<Metric>>) -> Vec<(u64, String, bool)> {
        let each = (1..).zip(steps).flat_map(|(step, metrics)| {
            health.add(step, &metrics).into_iter().map(move |own| (step, own.rule, own.begins))
        });
        each.collect()
    }

    /// A number between -0.5 and 0.5 that looks random.
    fn noise(at: u64) -> f64 {
        (at.wrapping_mul(2_654_435_761) % 1000) as f64 / 1000.0 - 0.5
    }

    fn begin(step: u64, rule: &str) -> (u64, String, bool) {
        (step, rule.to_owned(), true)
    }

    #[test]
    fn a_reward_with_one_value_is_dead_after_the_first_step() {
        let dead = || (0..30).map(|_| own(0.0, (0.0, 0.0), &[]));
        let mut health = without_range();
        let first = health.add(1, &own(0.0, (0.0, 0.0), &[]));
        assert_eq!(first.len(), 1);
        let text =
            "every completion has the same reward (steps 1 to 1): `own` gave 0 to all 64 completions. ";
        assert!(first[0].text.starts_with(text), "{}", first[0].text);
        assert_eq!(
            series(&mut without_range(), dead()),
            [begin(1, "dead_reward")],
            "and it explains the rest"
        );
        // A single completion with another reward is enough to live.
        let sparse =
            (1..=30).map(|step| own(0.01, (0.0, f64::from(step == 2)), &[("frac_reward_zero_std", 0.875)]));
        assert_eq!(
            series(&mut without_range(), sparse)[..2],
            [begin(1, "dead_reward"), (2, "dead_reward".into(), false)]
        );
        // Few completions prove nothing.
        let few = (0..3).map(|_| own(0.0, (0.0, 0.0), &[("completions/count", 4.0)]));
        assert_eq!(series(&mut without_range(), few), []);
        // Held-out rows have shown that the reward works.
        let mut health = without_range();
        health.evaluated(0, &[("eval_reward".into(), Some(0.25)), ("eval_rows".into(), Some(40.0))]);
        assert_eq!(series(&mut health, dead().take(5)), []);
        // The best value is no dead one, where it is stated.
        let unit = (0.0, 1.0);
        let aims = Aims { range: Some(unit), rewards: vec![("own".into(), unit)], ..Aims::default() };
        let best = series(&mut Health::new(aims.clone()), (0..12).map(|_| own(1.0, (1.0, 1.0), &[])));
        assert_eq!(best, [begin(10, "solved")]);
        let half = series(&mut Health::new(aims), (0..12).map(|_| own(0.5, (0.5, 0.5), &[])));
        assert_eq!(half, [begin(1, "dead_reward")]);
    }

    #[test]
    fn a_reward_that_states_no_range_is_solved_at_the_best_that_was_seen() {
        let learned = (1..=60).map(|step| match step {
            1..=30 => own(step as f64 / 31.0, (0.0, 1.0), &[("frac_reward_zero_std", 0.3)]),
            _ => own(1.0, (1.0, 1.0), &[]),
        });
        let mut health = without_range();
        let mut told = Vec::new();
        for (step, metrics) in (1..).zip(learned) {
            told.extend(health.add(step, &metrics).into_iter().map(|own| (step, own)));
        }
        assert_eq!(told.len(), 1, "{told:?}");
        let (step, solved) = &told[0];
        assert_eq!((*step, solved.rule.as_str(), solved.good), (40, "solved", true));
        assert!(
            solved.text.contains("1.000, the best that was seen, and no group has variance"),
            "{}",
            solved.text
        );
        assert_eq!(health.since(), None, "no checkpoint is kept for it");
        // The same at the lowest value that was seen.
        let lost = (1..=60).map(|step| match step {
            1..=5 => own(0.05, (0.0, 1.0), &[("frac_reward_zero_std", 0.5), ("reward_std", 0.2)]),
            _ => own(0.0, (0.0, 0.0), &[]),
        });
        let told = series(&mut without_range(), lost);
        assert_eq!(told, [begin(13, "no_variance"), begin(15, "hopeless")]);
    }

    fn steps_of(steps: u64, mean: impl Fn(u64) -> f64, more: &[(&str, f64)]) -> Vec<Vec<Metric>> {
        let more = |_: u64| -> Vec<(&str, f64)> {
            [("frac_reward_zero_std", 0.4)].iter().chain(more).copied().collect()
        };
        (1..=steps).map(|step| own(mean(step) + 0.1 * noise(step), (0.0, 1.0), &more(step))).collect()
    }

    #[test]
    fn a_flat_reward_is_told_with_its_cause() {
        let stays = |kl: f64| steps_of(240, |_| 0.2, &[("kl", kl), ("learning_rate", 1e-6)]);
        let told = series(&mut without_range(), stays(5.6e-6));
        assert_eq!(told, [begin(40, "flat")]);
        assert_eq!(series(&mut without_range(), stays(0.05)), [begin(200, "flat_reward")]);
        assert_eq!(
            series(&mut without_range(), steps_of(240, |_| 0.2, &[])),
            [begin(200, "flat")],
            "KL is not measured"
        );
        let mut health = without_range();
        let text =
            (1..).zip(stays(5.6e-6)).find_map(|(step, own)| health.add(step, &own).pop()).unwrap().text;
        for part in [
            "although 60 % of the groups vary, KL is 5.6e-6 nats, the learning rate 1.0e-6",
            "Raise AdamWConfig::learning_rate",
        ] {
            assert!(text.contains(part), "{text}");
        }
        // The rate of the settings is named, which the schedule has lowered since.
        let mut health = without_range();
        let decayed = stays(5.6e-6).into_iter().zip(0..).map(|(mut metrics, at)| {
            metrics.retain(|(name, _)| name != "learning_rate");
            metrics.push(("learning_rate".into(), Some(1e-6 * (1.0 - f64::from(at) / 60.0))));
            metrics
        });
        let text = (1..).zip(decayed).find_map(|(step, own)| health.add(step, &own).pop()).unwrap().text;
        assert!(text.contains("the learning rate 1.0e-6"), "{text}");
        // Slow learning, a reward that is high from the start, groups without variance, noise in which a rise would be hidden.
        assert_eq!(
            series(&mut without_range(), steps_of(240, |step| 0.2 + 0.002 * step as f64, &[("kl", 1e-5)])),
            []
        );
        assert_eq!(series(&mut without_range(), steps_of(240, |_| 0.9, &[("kl", 1e-5)])), []);
        let noisy = steps_of(240, |step| 0.4 + 0.8 * noise(step), &[("kl", 1e-5)]);
        assert_eq!(series(&mut without_range(), noisy.into_iter().take(60)), []);
        // A reward that rose early and then stays is not flat.
        let early =
            steps_of(240, |step| if step < 15 { 0.1 + step as f64 / 30.0 } else { 0.6 }, &[("kl", 1e-5)]);
        assert_eq!(series(&mut without_range(), early), []);
    }

    #[test]
    fn a_reward_that_rises_without_the_aim_is_hacked() {
        let rising = |more: &[(&str, f64)]| steps_of(100, |step| 0.2 + 0.006 * step as f64, more);
        let held = |accuracy: f64| -> Vec<Metric> {
            vec![
                ("eval_accuracy".into(), Some(accuracy)),
                ("eval_reward".into(), Some(0.9)),
                ("eval_rows".into(), Some(200.0)),
            ]
        };
        let run = |evaluations: [f64; 3]| {
            let mut health = without_range();
            let mut told: Vec<_> = health.evaluated(0, &held(evaluations[0]));
            for (step, metrics) in (1..).zip(rising(&[])) {
                told.extend(health.add(step, &metrics));
                if step % 50 == 0 {
                    told.extend(health.evaluated(step, &held(evaluations[step as usize / 50])));
                }
            }
            told
        };
        let told = run([0.6, 0.65, 0.4]);
        assert_eq!(told.len(), 1, "{told:?}");
        let text = &told[0].text;
        assert!(
            told[0].rule == "hacked"
                && text.contains("the held-out accuracy fell from 0.650 at step 50 to 0.400 at step 100"),
            "{text}"
        );
        assert_eq!(run([0.6, 0.65, 0.62]), [], "by chance");
        assert_eq!(run([0.3, 0.5, 0.8]), []);
        // Reward and length.
        let longer = |correlation: f64, growth: f64| {
            let all = rising(&[("reward/length_correlation", correlation)]).into_iter().zip(1..);
            all.map(move |(mut metrics, step)| {
                metrics.retain(|(name, _)| name != "completions/mean_length");
                metrics.push(("completions/mean_length".into(), Some(20.0 + growth * f64::from(step))));
                metrics
            })
        };
        let told = series(&mut without_range(), longer(0.95, 0.5));
        assert_eq!(told.iter().map(|own| own.1.as_str()).collect::<Vec<_>>(), ["hacked"], "{told:?}");
        assert_eq!(series(&mut without_range(), longer(0.5, 0.5)), []);
        assert_eq!(series(&mut without_range(), longer(0.95, 0.01)), []);
        let mut health = without_range();
        health.evaluated(0, &held(0.2));
        health.evaluated(1, &held(0.5));
        assert_eq!(series(&mut health, longer(0.95, 0.5)), [], "the longer answers are right");
    }

    #[test]
    fn a_format_that_is_learned_alone_is_told() {
        let aims = || {
            let unit = (0.0, 1.0);
            let rewards = vec![("accuracy".to_owned(), unit), ("format".to_owned(), unit)];
            Aims { range: Some((0.0, 2.0)), rewards, ..Aims::default() }
        };
        let run = |accuracy: fn(u64) -> f64, format: fn(u64) -> f64| {
            let steps = (1..=240).map(|step: u64| {
                let (accuracy, format) = (accuracy(step) + 0.1 * noise(step), format(step));
                let all = [
                    ("reward", accuracy + format),
                    ("reward_std", 0.5),
                    ("frac_reward_zero_std", 0.4),
                    ("rewards/accuracy/mean", accuracy),
                    ("rewards/accuracy/std", 0.4),
                    ("rewards/format/mean", format),
                    ("rewards/format/std", 0.1),
                ];
                all.map(|(name, value)| (name.to_owned(), Some(value))).to_vec()
            });
            series(&mut Health::new(aims()), steps)
        };
        let formed = |step: u64| (0.1 + step as f64 / 20.0).min(0.98);
        let told = run(|_| 0.2, formed);
        assert_eq!(told.iter().map(|own| own.1.as_str()).collect::<Vec<_>>(), ["format_only"], "{told:?}");
        assert_eq!(run(|step| 0.2 + 0.003 * step as f64, formed), []);
        assert_eq!(run(|_| 0.9, formed), [], "the answers were right from the start");
        assert_eq!(run(|step| 0.2 + 0.003 * step as f64, |_| 0.97), [], "the form was there from the start");
    }

    #[test]
    fn completions_that_are_cut_off_and_earn_are_no_problem() {
        let cut = [("completions/clipped_ratio", 1.0), ("frac_reward_zero_std", 0.4)];
        let told = series(&mut without_range(), (0..20).map(|_| own(0.95, (0.0, 1.0), &cut)));
        assert_eq!(told, []);
        let told = series(&mut without_range(), (0..20).map(|_| own(0.3, (0.0, 1.0), &cut)));
        assert_eq!(told, [begin(5, "cut_off")]);
    }

    /// The mean reward of a step with few prompts jumps.
    #[test]
    fn a_reward_that_falls_by_chance_in_the_first_steps_is_no_collapse() {
        let jumps = [0.6, 0.65, 0.35, 0.4, 0.3, 0.45, 0.35, 0.55, 0.6];
        let all =
            jumps.map(|mean| own(mean, (0.0, 1.0), &[("grad_norm", 0.1), ("frac_reward_zero_std", 0.95)]));
        let told = series(&mut without_range(), all);
        assert!(told.iter().all(|(_, rule, _)| rule != "ran_away"), "{told:?}");
    }

    /// Equal rewards within groups leave gradients of the KL term alone, which grow from nothing.
    #[test]
    fn a_policy_at_its_reference_did_not_run_away() {
        let steps = |kl: f64| {
            let rewards = [0.5, 0.25, 0.0, 0.0, 0.0, 0.0, 0.0];
            let norms = [9e-7, 3e-5, 1e-4, 3e-4, 9e-3, 2e-3, 1e-3];
            rewards
                .into_iter()
                .zip(norms)
                .map(move |(mean, norm)| own(mean, (0.0, 1.0), &[("grad_norm", norm), ("kl", kl)]))
        };
        let ran_away =
            |kl| series(&mut without_range(), steps(kl)).iter().any(|(_, rule, _)| rule == "ran_away");
        assert!(!ran_away(1e-5) && ran_away(0.5));
    }

    #[test]
    fn a_single_spike_is_no_collapse() {
        let mut health = Health::new(Aims::default());
        for at in 1..=40 {
            let kl = if at % 10 == 0 { 12.4 } else { 0.1 };
            assert_eq!(told(&mut health, at..=at, &[("reward", 0.9), ("reward_std", 0.3), ("kl", kl)]), []);
        }
    }
}
