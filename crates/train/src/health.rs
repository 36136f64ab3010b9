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
    /// Number of steps that the rule reads. The problem ends after the same number of steps without it.
    pub window: usize,
    /// First setting to change.
    pub setting: Setting,
    /// Function that returns advice in whole sentences, including the name of the setting.
    pub advice: fn() -> String,
    /// True if continuing the run is pointless.
    pub collapse: bool,
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
        window: 3,
        setting: CORRECTION,
        advice: || {
            format!(
                "The loss takes both for the same policy. Set {CORRECTION}, which weighs each token or completion by the \
                 difference"
            )
        },
        collapse: false,
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
        name: "ran_away",
        title: "the policy ran away",
        doc: "the mean reward fell by half a standard deviation and more than by chance, and KL, gradient norm, clip ratio, cut-off \
              completions or groups without variance jumped; or KL is above 5 nats",
        window: 5,
        setting: LEARNING_RATE,
        advice: || format!("Lower {LEARNING_RATE}, or raise {BETA}"),
        collapse: true,
        explains: true,
        sign: ran_away,
    },
    Rule {
        name: "cut_off",
        title: "all completions are cut off",
        doc: "at least 95 % of the completions reach the length limit",
        window: 5,
        setting: MAX_COMPLETION_LENGTH,
        advice: || {
            format!(
                "An answer that is cut off earns nothing. Raise {MAX_COMPLETION_LENGTH}, or ask for shorter answers"
            )
        },
        collapse: false,
        explains: true,
        sign: |seen| {
            let share = seen.mean(|step| step.cut_off)?;
            let length = seen.mean(|step| step.length)?;
            (share >= 0.95).then(|| {
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
        doc: "no group has variance and the mean reward is the best that the rewards can give",
        window: 10,
        setting: MAX_STEPS,
        advice: || {
            format!(
                "Nothing is left to learn from these rows. Lower {MAX_STEPS}, or take harder rows ({HIGH} leaves out those that \
                 are solved)"
            )
        },
        collapse: false,
        explains: true,
        sign: |seen| {
            let reward = seen.alike(0.999)?;
            (seen.level(reward)? > 0.999)
                .then(|| format!("the mean reward is {reward:.3} and no group has variance"))
        },
    },
    Rule {
        name: "hopeless",
        title: "no completion earns any reward",
        doc: "no group has variance and the mean reward is the lowest that the rewards can give",
        window: 10,
        setting: REWARDS,
        advice: || {
            format!(
                "The rows are too hard, or the rewards never apply: compare completions and solutions in `rollouts/`, then change \
                 {REWARDS} or take easier rows"
            )
        },
        collapse: false,
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
        window: 20,
        setting: REWARDS,
        advice: || {
            format!(
                "Look at completions in `rollouts/`: the answers are not in the form that it reads, or the rows are too hard. \
                 Correct {REWARDS}, or leave that reward out"
            )
        },
        collapse: false,
        explains: false,
        sign: never_fires,
    },
    Rule {
        name: "entropy_collapsed",
        title: "the entropy collapsed",
        doc: "the mean entropy is below 0.01 nats and a twentieth of its best, nine out of ten groups have no variance, and the mean \
              reward is in the lower four fifths of its range",
        window: 10,
        setting: TEMPERATURE,
        advice: || {
            format!(
                "The completions of a prompt are all the same, and not the best ones. Raise {TEMPERATURE} or {ENTROPY_COEF}, or \
                 lower {LEARNING_RATE}"
            )
        },
        collapse: true,
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
        window: 10,
        setting: CURRICULUM,
        advice: || {
            format!(
                "Nothing is learned from such groups: each row is too easy or too hard. Let {CURRICULUM} choose rows, raise \
                 {NUM_GENERATIONS} or {TEMPERATURE}"
            )
        },
        collapse: false,
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
];

/// Largest number of steps that any rule reads.
const LONGEST: usize = 20;
/// Largest ordinary mean difference of log-probabilities between rollout and training, in nats.
const LARGE_GAP: f64 = 0.02;
/// Number of first gradient norms with which later ones are compared.
const FIRST_NORMS: usize = 50;

fn ran_away(seen: &Seen<'_>) -> Option<String> {
    let before = seen.before;
    // There is nothing to compare with before the first step.
    before.reward?;
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
        // Mean rewards of steps with few prompts vary by chance.
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

    /// Scales a reward to its range: 0 is the minimum and 1 the maximum; `None` if the range has no bounds.
    fn level(&self, reward: f64) -> Option<f64> {
        let (least, best) = self.aims.range?;
        let width = best - least;
        (width.is_finite() && width > 0.0).then(|| (reward - least) / width)
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
    lasting: Vec<Option<Lasting>>,
}

impl Health {
    /// Creates the state of a run before its first step.
    pub fn new(aims: Aims) -> Self {
        Self {
            aims,
            last: VecDeque::new(),
            before: Before::default(),
            lasting: RULES.iter().map(|_| None).collect(),
        }
    }

    /// Adds the metrics of a step and returns the problems that begin or end with it.
    pub fn add(&mut self, step: u64, metrics: &[Metric]) -> Vec<TrainingProblem> {
        self.last.push_back(Step::of(step, metrics, &self.aims));
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
            let sign = self.last.len().checked_sub(rule.window).and_then(|from| {
                let mut before = self.before.clone();
                self.last.range(..from).filter(|step| is_sound(step)).for_each(|step| before.add(step));
                let steps = self.last.range(from..).collect();
                (rule.sign)(&Seen { steps, before: &before, aims: &self.aims })
            });
            let name = rule.name.to_owned();
            match (lasting.as_mut(), sign) {
                (None, Some(sign)) => {
                    let since = (step + 1).saturating_sub(rule.window as u64);
                    let text =
                        format!("{} (steps {since} to {step}): {sign}. {}", rule.title, (rule.advice)());
                    told.push(TrainingProblem { rule: name, begins: true, since, text });
                    *lasting = Some(Lasting { since, calm: 0 });
                }
                (Some(own), Some(_)) => own.calm = 0,
                (Some(own), None) => {
                    own.calm += 1;
                    if own.calm >= rule.window {
                        let since = own.since;
                        let text = format!("ended at step {step}: {} (since step {since})", rule.title);
                        told.push(TrainingProblem { rule: name, begins: false, since, text });
                        *lasting = None;
                    }
                }
                (None, None) => {}
            }
            explained = rule.explains && lasting.is_some();
        }
        if self.last.len() > LONGEST
            && let Some(oldest) = self.last.pop_front()
            && is_sound(&oldest)
        {
            self.before.add(&oldest);
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
        self.lasting.iter().flatten().map(|own| own.since).min()
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
            assert!(rule.window <= LONGEST && !rule.doc.is_empty(), "{}", rule.name);
            assert!(RULES[..at].iter().all(|other| other.name != rule.name), "{}", rule.name);
        }
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
        assert_eq!(end.text, "ended at step 13: the rollout and training disagree (since step 1)");
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

    #[test]
    fn a_single_spike_is_no_collapse() {
        let mut health = Health::new(Aims::default());
        for at in 1..=40 {
            let kl = if at % 10 == 0 { 12.4 } else { 0.1 };
            assert_eq!(told(&mut health, at..=at, &[("reward", 0.9), ("reward_std", 0.3), ("kl", kl)]), []);
        }
    }
}
