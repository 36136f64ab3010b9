//! The verdict on a run: whether it learned and, if not, why. It is computed from the files of the run directory alone, so the page,
//! the report, the terminal and `diagnose` say the same.
//!
//! The result that counts is that of held-out rows: the share of right answers or, without a reward that judges answers, the mean
//! reward, before the first and after the last step. Without two evaluations, it is the mean reward of the first and the last steps.
//! A result has changed if the difference exceeds 1.96 standard errors for held-out rows, and 3 for steps, whose rows differ. The
//! problems come from the rules that the run has applied to its own metrics.

use std::path::{Path, PathBuf};

use omnigrpo_observe::{EnvironmentTurn, Rollout, RunLock, TrainingProblem, escape_line, fit, names};
use serde::Serialize;
use serde_json::Value;

use crate::Error;
use crate::course::{Course, End, Happened, Intervals, SPAN};
use crate::index::{Lines, Recent};
use crate::media;
use crate::rollouts::question;
use crate::run::{Run, unquoted};

/// Number of held-out rows below which an interval is too wide to tell much.
const FEW_ROWS: f64 = 50.0;
/// Smallest number of steps after which their rewards are compared.
const FEWEST_STEPS: usize = 10;
/// Largest number of completions among which the nearest to its solution is sought.
const MAX_SEARCHED: usize = 4096;
/// Largest number of characters of a text.
const SHOWN_CHARS: usize = 600;
/// Largest width of a text on the terminal, in columns.
const SHOWN_COLUMNS: usize = 110;

/// Kind of a verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Nothing can be said yet.
    TooEarly,
    /// The result is better, and the run goes on.
    Learning,
    /// The result is better.
    Learned,
    /// The result has not changed by more than chance, or a problem keeps the run from learning.
    NotLearned,
    /// The result is worse.
    Worse,
}

/// Part of a run whose result it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Measure {
    /// Share of right answers to held-out rows.
    Accuracy,
    /// Mean reward of held-out rows.
    Reward,
    /// Mean reward of the rows of the first or the last steps.
    TrainingReward,
}

/// A result with its 95 % interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Measured {
    /// Step of an evaluation, or the last of the steps.
    pub step: u64,
    /// The result.
    pub value: f64,
    /// Ends of the interval: Wilson's for shares, otherwise the normal approximation; `None` if it is not known.
    pub interval: Option<(f64, f64)>,
    /// Number of held-out rows, or of steps.
    pub rows: f64,
}

impl Measured {
    fn squared_error(&self) -> f64 {
        match self.interval {
            Some((low, high)) => ((high - low) / (2.0 * 1.96)).powi(2),
            // The deviation of numbers between 0 and 1 has this bound.
            None => self.value * (1.0 - self.value).max(0.0) / self.rows.max(1.0),
        }
    }
}

/// A completion that shows the problem.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Example {
    /// Step of the record.
    pub step: u64,
    /// Index of the prompt within the step.
    pub group: usize,
    /// Index of the completion within its group.
    pub sample: usize,
    /// Id of the row.
    pub id: String,
    /// End of the question.
    pub question: String,
    /// Solution of the row.
    pub solution: Option<String>,
    /// The completion.
    pub completion: String,
    /// Reward of the completion.
    pub reward: Option<f64>,
    /// True if the completion was chosen because it is the nearest to its solution; false if it has the highest reward.
    pub is_nearest: bool,
    /// Index of the first picture or clip among the media of the prompt.
    pub picture: Option<usize>,
    /// File names of the media of the prompt.
    pub media: Vec<String>,
}

/// Verdict on a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Verdict {
    /// Kind of the verdict.
    pub kind: Kind,
    /// State of the run: `running`, `finished`, `stopped`, `failed` or `ended`.
    pub state: &'static str,
    /// Last step that is complete.
    pub step: u64,
    /// Number of steps of the run, if it is known.
    pub num_steps: Option<u64>,
    /// The verdict in one sentence.
    pub sentence: String,
    /// Advice in whole sentences.
    pub next: String,
    /// Command to run next.
    pub command: Option<String>,
    /// Kind of the results; `None` without results.
    pub measure: Option<Measure>,
    /// Result before training.
    pub before: Option<Measured>,
    /// Result after training, or the last one.
    pub after: Option<Measured>,
    /// First step from which the rewards of training do not rise any more.
    pub nothing_new_from: Option<u64>,
    /// Names of the rules whose problems last.
    pub problems: Vec<String>,
    /// Remarks on the numbers.
    pub remarks: Vec<String>,
    /// A completion that shows the problem.
    pub example: Option<Example>,
}

/// Verdicts on runs, with what they are computed from.
#[derive(Debug, Default)]
pub(crate) struct Verdicts(Recent<Course>);

impl Verdicts {
    /// Returns the verdict on a run.
    pub(crate) fn of(&self, run: &Run) -> Result<Verdict, Error> {
        let happened = Happened::of(run)?;
        self.0.with(run, |course| Judged { run, course, happened: &happened }.verdict())
    }
}

/// Returns the verdict on the run in a directory.
///
/// # Errors
/// Returns an error if the directory contains no run, or files that cannot be read.
pub fn verdict(directory: &Path) -> Result<Verdict, Error> {
    let dir = std::fs::canonicalize(directory).map_err(Error::io("open", directory))?;
    Verdicts::default().of(&Run { dir })
}

/// Returns the names of the runs in directories, each with the verdict on it. A directory is a run or contains runs.
///
/// # Errors
/// Returns an error if a directory contains no run, or files that cannot be read.
pub fn verdicts(directories: &[PathBuf]) -> Result<Vec<(String, Verdict)>, Error> {
    let runs = Run::find(directories)?;
    let all = Verdicts::default();
    Run::names(&runs).into_iter().zip(&runs).map(|(name, run)| Ok((name, all.of(run)?))).collect()
}

/// How a result has changed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Change {
    Better,
    Worse,
    Chance,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Results {
    pub(crate) measure: Measure,
    /// True if the values are shares of the rows.
    pub(crate) is_share: bool,
    pub(crate) before: Measured,
    pub(crate) after: Measured,
}

/// Verdict without its details.
#[derive(Debug)]
pub(crate) struct Judgement<'a> {
    pub(crate) kind: Kind,
    pub(crate) results: Option<Results>,
    sentence: String,
    next: String,
    nothing_new_from: Option<u64>,
    /// Problem that is the verdict.
    problem: Option<&'a TrainingProblem>,
}

impl Results {
    fn change(&self) -> Change {
        let errors = if self.measure == Measure::TrainingReward { 3.0 } else { 1.96 };
        let chance = errors * (self.before.squared_error() + self.after.squared_error()).sqrt() + 1e-9;
        match self.after.value - self.before.value {
            gain if gain > chance => Change::Better,
            gain if gain < -chance => Change::Worse,
            _ => Change::Chance,
        }
    }

    /// Names the result and both values, the second with its interval.
    fn told(&self) -> String {
        let name = match self.measure {
            Measure::TrainingReward => "the mean reward of training",
            Measure::Reward if !self.is_share => "held-out reward",
            _ => "held out",
        };
        let number = |value: f64| {
            if self.is_share { format!("{:.0} %", 100.0 * value) } else { format!("{value:.2}") }
        };
        let interval = self.after.interval.map(|(low, high)| match self.is_share {
            true => format!(" (95 % interval {:.0} to {:.0} %)", 100.0 * low, 100.0 * high),
            false => format!(" (95 % interval {low:.2} to {high:.2})"),
        });
        let (before, after) = (number(self.before.value), number(self.after.value));
        format!("{name} {before} → {after}{}", interval.unwrap_or_default())
    }
}

/// Run whose files were read for a verdict.
pub(crate) struct Judged<'a> {
    pub(crate) run: &'a Run,
    pub(crate) course: &'a Course,
    pub(crate) happened: &'a Happened,
}

impl<'a> Judged<'a> {
    /// Returns the verdict without its details. If the course has a gap, it says nothing about the steps within.
    pub(crate) fn judgement(&self) -> Judgement<'a> {
        let (course, happened) = (self.course, self.happened);
        let results = self.held_out().or_else(|| self.trained());
        let change = results.as_ref().map(Results::change);
        let nothing_new_from = if course.has_gap { None } else { nothing_new_from(course.rewards()) };
        let state = self.state();
        let is_solved = happened.lasting.iter().any(|own| own.good);
        let problem = happened.lasting.iter().find(|own| !own.good && is_grave(&own.rule, change));
        let goes_on = state == "running";
        let (kind, sentence, next) = match (problem, &results, change) {
            (Some(problem), _, _) => self.of_problem(problem),
            (None, Some(results), Some(Change::Better)) => {
                let told = results.told();
                let partly = happened.lasting.iter().find(|own| LEARNS_A_PART.contains(&own.rule.as_str()));
                let partly = partly.filter(|_| results.measure != Measure::Accuracy);
                let stays = partly
                    .map(|problem| format!("; {}: {}", problem.title, problem.what))
                    .unwrap_or_default();
                let ended = nothing_new_from
                    .map(|step| format!(", nothing new from step {step} on"))
                    .unwrap_or_default();
                let kind = if goes_on && nothing_new_from.is_none() && !is_solved {
                    Kind::Learning
                } else {
                    Kind::Learned
                };
                let word = if kind == Kind::Learning { "Learning" } else { "Learned" };
                let word = if partly.is_some() { format!("{word} in part") } else { word.to_owned() };
                let advice = partly.map(|problem| format!("{}.", problem.advice));
                let next = match () {
                    () if advice.is_some() => advice.as_deref().unwrap_or_default(),
                    () if is_solved || nothing_new_from.is_some() => "Take harder rows, or stop.",
                    () if goes_on => "Let it go on: the reward still rises.",
                    () if state == "finished" => "The reward still rises at the end: more steps may help.",
                    () => "Repeat the command to resume: the reward still rises.",
                };
                (kind, format!("{word}: {told}{ended}{stays}."), next.to_owned())
            }
            (None, Some(results), Some(Change::Worse)) => {
                let next = "Go back to an earlier checkpoint with a lower learning rate, or keep the model that you began with.";
                (Kind::Worse, format!("Worse than before: {}.", results.told()), next.to_owned())
            }
            (None, Some(results), _) if is_solved => {
                let sentence =
                    format!("Nothing to learn: every completion had the best reward; {}.", results.told());
                (Kind::Learned, sentence, "Take harder rows, or stop.".to_owned())
            }
            (None, Some(results), _) if !goes_on => {
                let next = match results.measure {
                    Measure::TrainingReward => {
                        "Take more steps or a higher learning rate, and hold rows out (`val_split_ratio`), so that the result can be judged."
                    }
                    _ => {
                        "Take more steps, a higher learning rate, or more held-out rows: few of them hide a small gain."
                    }
                };
                let sentence = format!("Not learned so far: {}, which may be chance.", results.told());
                (Kind::NotLearned, sentence, next.to_owned())
            }
            (None, results, _) => {
                let told = results.as_ref().map(|own| format!(": {}", own.told())).unwrap_or_default();
                let sentence = match (goes_on, course.rewards().len()) {
                    (_, 0) => "Too early to say: no step with rewards is complete.".to_owned(),
                    (true, _) => format!("Too early to say after step {}{told}.", course.step),
                    (false, steps) => format!("Too few steps to judge: {steps}."),
                };
                let next = match state {
                    "running" => "Let it go on.",
                    "failed" => "Remove the cause of the failure, and repeat the command to resume.",
                    _ => "Repeat the command to resume, with more steps.",
                };
                (Kind::TooEarly, sentence, next.to_owned())
            }
        };
        Judgement { kind, results, sentence, next, nothing_new_from, problem }
    }

    fn verdict(&self) -> Result<Verdict, Error> {
        let (course, happened) = (self.course, self.happened);
        let Judgement { kind, results, sentence, next, nothing_new_from, problem } = self.judgement();
        let mut remarks = Vec::new();
        if let Some(results) = results.as_ref().filter(|own| own.measure != Measure::TrainingReward)
            && results.after.rows < FEW_ROWS
        {
            remarks.push(format!(
                "Only {:.0} rows are held out, so the interval is wide. Hold out at least {FEW_ROWS:.0}.",
                results.after.rows
            ));
        }
        if let End::Failed(why) = &happened.end {
            remarks.push(format!("The run failed: {}", cut(why)));
        }
        let rule = problem.map(|own| own.rule.as_str());
        let example = match rule {
            Some(rule) if SHOWS_BEST.contains(&rule) => self.example(false)?,
            Some(rule) if SHOWS_NEAREST.contains(&rule) => self.example(true)?,
            _ => None,
        };
        Ok(Verdict {
            kind,
            state: self.state(),
            step: course.step,
            num_steps: happened.num_steps,
            sentence,
            next,
            command: rule.and_then(|rule| self.command(rule)),
            measure: results.as_ref().map(|own| own.measure),
            before: results.as_ref().map(|own| own.before),
            after: results.as_ref().map(|own| own.after),
            nothing_new_from,
            problems: happened.lasting.iter().filter(|own| !own.good).map(|own| own.rule.clone()).collect(),
            remarks,
            example,
        })
    }

    pub(crate) fn state(&self) -> &'static str {
        match (&self.happened.end, RunLock::is_held(&self.run.dir)) {
            (End::Finished, _) => "finished",
            (End::Stopped, _) => "stopped",
            (End::Failed(_), _) => "failed",
            (End::None, Some(false)) => "ended",
            (End::None, _) => "running",
        }
    }

    fn of_problem(&self, problem: &TrainingProblem) -> (Kind, String, String) {
        let course = self.course;
        let told = match (problem.rule.as_str(), course.ranges.is_empty()) {
            ("dead_reward", false) if course.completions > 0.0 => {
                let each =
                    course.ranges.iter().map(|(name, (least, _))| format!("reward `{name}` was {least}"));
                format!(
                    "{} for all {} completions",
                    each.collect::<Vec<_>>().join(" and "),
                    thousands(course.completions)
                )
            }
            _ if problem.what.is_empty() => problem.text.clone(),
            _ => format!("{}: {}", problem.title, problem.what),
        };
        let kind = if COLLAPSES.contains(&problem.rule.as_str()) { Kind::Worse } else { Kind::NotLearned };
        let word = if kind == Kind::Worse { "Worse than before" } else { "Not learned" };
        let next = if problem.advice.is_empty() { String::new() } else { format!("{}.", problem.advice) };
        (kind, format!("{word}: {told}."), next)
    }

    /// Returns the results of the first and the last evaluation.
    fn held_out(&self) -> Option<Results> {
        let all = &self.course.evaluations;
        let (first, last) = (all.first()?, all.last()?);
        if first.0 == last.0 {
            return None;
        }
        let both = |name: &str| first.1.contains_key(name) && last.1.contains_key(name);
        let measure = if both("eval_accuracy") { Measure::Accuracy } else { Measure::Reward };
        let is_zero = |all: &serde_json::Map<String, Value>| {
            all.get("eval_reward").and_then(Value::as_f64) == Some(0.0)
        };
        let by_name =
            |name: &&String| name.starts_with("eval_rewards/") && name.ends_with("/mean") && both(name);
        // With rewards of weight 0, beside a teacher, the first one stands for the total.
        let named = first.1.keys().find(by_name).filter(|_| is_zero(&first.1) && is_zero(&last.1));
        let mut is_share = named.is_none();
        let mut measured = |(step, metrics): &(u64, serde_json::Map<String, Value>)| {
            let number = |name: &str| metrics.get(name).and_then(Value::as_f64);
            let intervals = Intervals::of(self.run, *step);
            let (value, interval) = match measure {
                Measure::Accuracy => (number("eval_accuracy")?, intervals.accuracy_interval),
                _ if named.is_some() => (number(named?)?, None),
                _ => {
                    is_share &= intervals.reward_is_share;
                    (number("eval_reward")?, intervals.reward_interval)
                }
            };
            Some(Measured { step: *step, value, interval, rows: number("eval_rows")? })
        };
        let (before, after) = (measured(first)?, measured(last)?);
        Some(Results { measure, is_share, before, after })
    }

    /// Returns the mean rewards of the first and the last steps.
    fn trained(&self) -> Option<Results> {
        let rewards = self.course.rewards();
        let span = (rewards.len() / 3).min(SPAN);
        if rewards.len() < FEWEST_STEPS || span < 2 {
            return None;
        }
        let measured = |part: &[(u64, f64)]| {
            let (mean, error) = mean_and_error(part.iter().map(|own| own.1));
            let interval = Some((mean - 1.96 * error, mean + 1.96 * error));
            Some(Measured { step: part.last()?.0, value: mean, interval, rows: part.len() as f64 })
        };
        let before = measured(&rewards[..span])?;
        let after = measured(&rewards[rewards.len() - span..])?;
        Some(Results { measure: Measure::TrainingReward, is_share: false, before, after })
    }

    /// Returns the completion of the last step that is the nearest to its solution, or the one with the highest reward.
    fn example(&self, nearest: bool) -> Result<Option<Example>, Error> {
        let Some(step) = self.run.steps(names::ROLLOUTS)?.pop() else { return Ok(None) };
        let path = self.run.step_file(names::ROLLOUTS, step);
        let mut lines = Lines::new(self.run.open(&path)?);
        let mut found: Option<(f64, Rollout)> = None;
        for _ in 0..MAX_SEARCHED {
            let Some((_, line)) = lines.next().map_err(Error::io("read", &path))? else { break };
            let Ok(record) = serde_json::from_slice::<Rollout>(line) else { continue };
            let rank = match nearest {
                true => solution_of(&record).map_or(0.0, |solution| likeness(&record.completion, &solution)),
                false => record.reward.unwrap_or(f64::NEG_INFINITY),
            };
            if found.as_ref().is_none_or(|(best, _)| rank > *best) {
                found = Some((rank, record));
            }
        }
        Ok(found.map(|(_, record)| {
            let of_turns = |turn: &EnvironmentTurn| turn.media.clone();
            let media: Vec<String> =
                record.media.iter().cloned().chain(record.turns.iter().flat_map(of_turns)).collect();
            let name = |path: &String| {
                let name = Path::new(path).file_name();
                name.map_or_else(String::new, |name| cut(&name.to_string_lossy()))
            };
            Example {
                step,
                group: record.group,
                sample: record.sample,
                id: cut(&record.id),
                question: question(&record),
                solution: solution_of(&record).map(|text| cut(&text)),
                completion: cut(&record.completion),
                reward: record.reward,
                is_nearest: nearest,
                picture: media::first_picture(&record.media),
                media: media.iter().map(name).collect(),
            }
        }))
    }

    /// Returns the command that tries the remedy of a problem.
    fn command(&self, rule: &str) -> Option<String> {
        let settings = self.run.settings();
        let value =
            |name: &str| Some(unquoted(&settings.iter().find(|own| own.name == name)?.value).to_owned());
        let dir = quoted(&self.run.dir.display().to_string());
        if TRIES_REWARDS.contains(&rule) {
            let specs = value("reward_funcs")?;
            let specs = specs
                .strip_prefix('[')?
                .strip_suffix(']')?
                .split(',')
                .map(|spec| unquoted(spec.trim()).to_owned());
            // Addresses and commands may contain commas, and secrets are not in the file.
            let specs: Vec<String> =
                specs.filter(|spec| !spec.is_empty()).map(|spec| quoted(&spec)).collect();
            return Some(format!("omnigrpo rewards try {} --input {dir}", specs.join(" ")));
        }
        if rule == "flat" || COLLAPSES.contains(&rule) {
            let rate: f64 = value("learning_rate")?.parse().ok()?;
            let rate = if rule == "flat" { 10.0 * rate } else { rate / 3.0 };
            return Some(format!(
                "omnigrpo train --config {dir}/config.yaml --learning_rate {rate:.0e} --output_dir {dir}-2"
            ));
        }
        None
    }
}

/// Rules that end a run's hope of a better result.
const COLLAPSES: [&str; 2] = ["ran_away", "entropy_collapsed"];
/// Rules whose problem the completion with the highest reward shows.
const SHOWS_BEST: [&str; 1] = ["hacked"];
/// Rules whose problem the completion nearest to its solution shows.
const SHOWS_NEAREST: [&str; 5] =
    ["dead_reward", "hopeless", "reward_never_fires", "format_only", "flat_reward"];
/// Rules whose remedy begins with a look at what the rewards give.
const TRIES_REWARDS: [&str; 6] =
    ["dead_reward", "hopeless", "reward_never_fires", "format_only", "flat_reward", "hacked"];

/// Rules about rewards that stay where they are while others rise. A rise of their sum is then not the whole result.
const LEARNS_A_PART: [&str; 2] = ["reward_never_fires", "format_only"];

/// Returns true if a problem is the verdict, whatever the result. The others are only remarks on a run that learned.
fn is_grave(rule: &str, change: Option<Change>) -> bool {
    let always = ["dead_reward", "ran_away", "entropy_collapsed", "hacked"];
    always.contains(&rule) || change != Some(Change::Better)
}

/// Returns the first step from which the rewards do not rise any more: it begins the first window of a fifth of the steps whose mean has
/// nine tenths of the rise from the first window to the last. `None` if there are few steps, or if the reward never rose by more than two
/// standard errors, or rises to the end.
fn nothing_new_from(rewards: &[(u64, f64)]) -> Option<u64> {
    let span = (rewards.len() / 5).max(FEWEST_STEPS);
    if rewards.len() < 3 * span {
        return None;
    }
    let level = |from: usize| mean_and_error(rewards[from..from + span].iter().map(|own| own.1));
    let (first, first_error) = level(0);
    let (last, last_error) = level(rewards.len() - span);
    if last - first <= 2.0 * (first_error * first_error + last_error * last_error).sqrt() {
        return None;
    }
    let from = (0..=rewards.len() - span).find(|&from| level(from).0 >= first + 0.9 * (last - first))?;
    // A later rise would be hidden in so few steps.
    (from + 3 * span / 2 <= rewards.len()).then(|| rewards[from].0)
}

/// Returns the mean of numbers and its standard error.
fn mean_and_error(values: impl Iterator<Item = f64> + Clone) -> (f64, f64) {
    let count = values.clone().count() as f64;
    let mean = values.clone().sum::<f64>() / count;
    let squares: f64 = values.map(|value| (value - mean).powi(2)).sum();
    (mean, (squares / (count - 1.0).max(1.0) / count).sqrt())
}

fn solution_of(record: &Rollout) -> Option<String> {
    let solution = record.solution.as_ref()?;
    Some(solution.as_str().map_or_else(|| solution.to_string(), str::to_owned))
}

/// Returns how alike the answers in two texts are, from 0 to 1: the share of common pairs of letters (Dice), ignoring case.
fn likeness(completion: &str, solution: &str) -> f64 {
    let answer = |text: &str| {
        let inside = text
            .split_once("<answer>")
            .map_or(text, |(_, rest)| rest.split("</answer>").next().unwrap_or(rest));
        inside.trim().chars().take(SHOWN_CHARS).collect::<String>().to_lowercase()
    };
    let (a, b) = (answer(completion), answer(solution));
    // Equal answers are nearer than any others.
    if a == b { 1.0 } else { 0.99 * strsim::sorensen_dice(&a, &b) }
}

fn cut(text: &str) -> String {
    match text.char_indices().nth(SHOWN_CHARS) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text.to_owned(),
    }
}

fn thousands(number: f64) -> String {
    let digits = format!("{number:.0}");
    let mut out = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at) % 3 == 0 {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// Returns a word of a command as a shell reads it. A word with a zero byte, which no command can have, becomes empty.
fn quoted(word: &str) -> String {
    shlex::try_quote(word).map_or_else(|_| "''".to_owned(), std::borrow::Cow::into_owned)
}

impl std::fmt::Display for Verdict {
    /// Writes the verdict for a terminal, one line for each part.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let line = |text: &str| fit(&escape_line(text), SHOWN_COLUMNS).into_owned();
        writeln!(f, "{}", escape_line(&self.sentence))?;
        if let Some(example) = &self.example {
            let media = if example.media.is_empty() {
                String::new()
            } else {
                format!(" ({})", example.media.join(", "))
            };
            writeln!(f, "  row {}: {}", line(&format!("{}{media}", example.id)), line(&example.question))?;
            let name = if example.is_nearest { "nearest completion" } else { "best-paid completion" };
            // Three digits at most: a reward of 0 and 1 stays as it is.
            let rounded = |reward: f64| (1000.0 * reward).round() / 1000.0;
            let reward =
                example.reward.map(|reward| format!(", reward {}", rounded(reward))).unwrap_or_default();
            writeln!(f, "  {name}{reward}: {}", line(&example.completion))?;
            if let Some(solution) = &example.solution {
                writeln!(f, "  its solution: {}", line(solution))?;
            }
        }
        for remark in &self.remarks {
            writeln!(f, "{}", escape_line(remark))?;
        }
        if !self.next.is_empty() {
            writeln!(f, "Next: {}", escape_line(&self.next))?;
        }
        if let Some(command) = &self.command {
            writeln!(f, "  {}", escape_line(command))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use omnigrpo_observe::{Event, EventRecord};
    use serde_json::json;

    use super::*;

    /// Writes the files of a run: rewards of its steps, evaluations with their interval, and events.
    fn run(
        rewards: impl IntoIterator<Item = f64>,
        evaluations: &[(u64, f64, (f64, f64))],
        events: &[Event],
    ) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        fs::create_dir_all(root.join("eval")).unwrap();
        fs::create_dir_all(root.join("rollouts")).unwrap();
        let mut metrics = String::new();
        let evaluation = |step: u64| evaluations.iter().find(|own| own.0 == step);
        let line = |own: &(u64, f64, (f64, f64))| {
            let summary = json!({ "eval_reward": own.1, "reward_interval": own.2, "reward_is_share": true });
            fs::write(root.join(format!("eval/step-{:06}.summary.json", own.0)), summary.to_string())
                .unwrap();
            format!("{}\n", json!({ "step": own.0, "eval_rows": 180, "eval_reward": own.1 }))
        };
        metrics += &evaluation(0).map(line).unwrap_or_default();
        for (at, reward) in rewards.into_iter().enumerate() {
            let step = at as u64 + 1;
            let row = json!({
                "step": step, "reward": reward, "completions/count": 64, "rewards/exact/min": 0.0,
                "rewards/exact/max": f64::from(u8::from(reward > 0.0)),
            });
            metrics += &format!("{row}\n");
            metrics += &evaluation(step).map(line).unwrap_or_default();
        }
        fs::write(root.join("metrics.jsonl"), metrics).unwrap();
        let started = Event::Started { num_steps: 60 };
        let record = |event: &Event| {
            let record = EventRecord { step: 0, time: String::new(), event: event.clone() };
            format!("{}\n", serde_json::to_string(&record).unwrap())
        };
        let all: String = std::iter::once(&started).chain(events).map(record).collect();
        fs::write(root.join("events.jsonl"), all).unwrap();
        directory
    }

    fn problem(rule: &str) -> Event {
        Event::Problem(TrainingProblem {
            rule: rule.to_owned(),
            begins: true,
            since: 1,
            text: "t".to_owned(),
            title: "a title".to_owned(),
            what: "numbers".to_owned(),
            advice: "Change this".to_owned(),
            ..TrainingProblem::default()
        })
    }

    /// Rewards that rise until a step and then stay, with a small change from step to step.
    fn rising(until: usize, steps: usize) -> impl Iterator<Item = f64> {
        (1..=steps).map(move |step| {
            0.1 + 0.7 * step.min(until) as f64 / until as f64 + 0.05 * f64::from(u8::from(step % 2 == 0))
        })
    }

    #[test]
    fn a_run_that_learned_is_told_with_its_interval() {
        let evaluations = [(0, 0.31, (0.25, 0.38)), (60, 0.92, (0.87, 0.95))];
        let directory = run(rising(20, 60), &evaluations, &[Event::Finished]);
        let verdict = verdict(directory.path()).unwrap();
        assert_eq!(
            (verdict.kind, verdict.state, verdict.measure),
            (Kind::Learned, "finished", Some(Measure::Reward))
        );
        let from = verdict.nothing_new_from.unwrap();
        assert!((15..=22).contains(&from), "{from}");
        let text = format!(
            "Learned: held out 31 % → 92 % (95 % interval 87 to 95 %), nothing new from step {from} on.\nNext: Take harder rows, or stop.\n"
        );
        assert_eq!(verdict.to_string(), text);
        // Problems of the way are no verdict on a run that learned.
        let directory = run(rising(20, 60), &evaluations, &[problem("no_variance"), Event::Finished]);
        assert_eq!(super::verdict(directory.path()).unwrap().kind, Kind::Learned);
        // Unless a reward stays where it is while the sum rises.
        let directory = run(rising(20, 60), &evaluations, &[problem("format_only"), Event::Finished]);
        let partly = super::verdict(directory.path()).unwrap();
        assert!(partly.sentence.starts_with("Learned in part: held out 31 % → 92 %"), "{partly}");
        assert!(
            partly.sentence.ends_with("; a title: numbers.") && partly.next == "Change this.",
            "{partly}"
        );
        // The reward rises to the end.
        let directory = run(rising(60, 60), &evaluations, &[Event::Finished]);
        let verdict = super::verdict(directory.path()).unwrap();
        assert_eq!((verdict.kind, verdict.nothing_new_from), (Kind::Learned, None));
        assert!(verdict.next.contains("more steps"), "{}", verdict.next);
    }

    #[test]
    fn changes_by_chance_and_for_the_worse_are_no_learning() {
        let of = |evaluations: &[(u64, f64, (f64, f64))], rewards: Vec<f64>, events: &[Event]| {
            let directory = run(rewards, evaluations, events);
            verdict(directory.path()).unwrap()
        };
        let flat: Vec<f64> = (0..60).map(|step| 0.3 + 0.02 * f64::from(step % 3)).collect();
        let chance =
            of(&[(0, 0.31, (0.25, 0.38)), (60, 0.33, (0.27, 0.40))], flat.clone(), &[Event::Finished]);
        assert_eq!(chance.kind, Kind::NotLearned);
        assert!(
            chance.sentence.contains("held out 31 % → 33 % (95 % interval 27 to 40 %), which may be chance"),
            "{chance}"
        );
        let worse =
            of(&[(0, 0.61, (0.55, 0.68)), (60, 0.33, (0.27, 0.40))], flat.clone(), &[Event::Finished]);
        assert_eq!(worse.kind, Kind::Worse);
        // Without held-out rows, by the steps.
        let trained = of(&[], rising(20, 60).collect(), &[Event::Finished]);
        assert_eq!((trained.kind, trained.measure), (Kind::Learned, Some(Measure::TrainingReward)));
        assert_eq!(of(&[], flat.clone(), &[Event::Finished]).kind, Kind::NotLearned);
        assert_eq!(of(&[], flat[..4].to_vec(), &[]).kind, Kind::TooEarly);
        assert_eq!(of(&[], Vec::new(), &[]).kind, Kind::TooEarly);
        // A problem that lasts explains it, one that ended does not.
        let why = of(&[], flat.clone(), &[problem("flat"), Event::Finished]);
        assert_eq!((why.kind, why.sentence.as_str()), (Kind::NotLearned, "Not learned: a title: numbers."));
        assert_eq!((why.next.as_str(), why.problems), ("Change this.", vec!["flat".to_owned()]));
        let ended = Event::Problem(TrainingProblem { rule: "flat".into(), ..TrainingProblem::default() });
        let why = of(&[], flat, &[problem("flat"), ended, Event::Finished]);
        assert!(why.problems.is_empty() && why.sentence.starts_with("Not learned so far"), "{why}");
    }

    #[test]
    fn with_rewards_of_weight_0_the_first_of_them_is_the_result() {
        let directory = run([0.0; 0], &[], &[Event::Finished]);
        let evaluation = |step: u64, exact: f64| json!({ "step": step, "eval_rows": 180.0, "eval_reward": 0.0, "eval_rewards/exact/mean": exact });
        let steps: Vec<Value> = (1..=60)
            .map(|step| {
                let exact = (0.02 * f64::from(step)).min(0.7);
                json!({ "step": step, "reward": 0.0, "rewards/exact/mean": exact, "rewards/exact/std": 0.1 })
            })
            .collect();
        let write = |rows: Vec<Value>| {
            let text: String = rows.iter().map(|row| format!("{row}\n")).collect();
            fs::write(directory.path().join("metrics.jsonl"), text).unwrap();
            verdict(directory.path()).unwrap()
        };
        let trained = write(steps.clone());
        assert_eq!((trained.kind, trained.measure), (Kind::Learned, Some(Measure::TrainingReward)));
        let held_out = write([vec![evaluation(0, 0.31)], steps, vec![evaluation(60, 0.74)]].concat());
        assert_eq!(held_out.kind, Kind::Learned);
        assert!(
            held_out.sentence.starts_with("Learned: held-out reward 0.31 → 0.74, nothing new from"),
            "{held_out}"
        );
        let constant = write(vec![evaluation(0, 0.31), evaluation(60, 0.31)]);
        assert_eq!(constant.kind, Kind::NotLearned);
    }

    #[test]
    fn a_dead_reward_is_shown_with_the_nearest_completion_and_a_command() {
        let directory = run([0.0; 40], &[], &[problem("dead_reward"), Event::Finished]);
        let root = directory.path();
        fs::write(
            root.join("config.yaml"),
            "reward_funcs: [\"my rew.py:exact\"]   # flag\nlearning_rate: 0.000001  # default\n",
        )
        .unwrap();
        let line = |sample: usize, completion: &str| {
            let record = json!({
                "step": 40, "timestamp": "", "epoch": 0.5, "id": "train:7", "group": 0, "sample": sample,
                "prompt": "<|im_start|>user\nWhich colour?<|im_end|>", "completion": completion, "solution": "Dark red",
                "rewards": { "exact": 0.0 }, "reward": 0.0, "advantage": 0.0, "length": 3, "media": [], "finish_reason": "stop",
            });
            format!("{record}\n")
        };
        let lines = [line(0, "blue"), line(1, "<answer>dark red</answer>"), line(2, "dark"), line(3, "")];
        fs::write(root.join("rollouts/step-000040.jsonl"), lines.concat()).unwrap();
        let verdict = verdict(root).unwrap();
        assert_eq!(verdict.kind, Kind::NotLearned);
        let real = fs::canonicalize(root).unwrap();
        let text = format!(
            "Not learned: reward `exact` was 0 for all 2,560 completions.\n  row train:7: Which colour?\n  \
             nearest completion, reward 0: <answer>dark red</answer>\n  its solution: Dark red\nNext: Change this.\n  \
             omnigrpo rewards try 'my rew.py:exact' --input {}\n",
            real.display()
        );
        assert_eq!(verdict.to_string(), text);
        let example = verdict.example.unwrap();
        assert_eq!((example.step, example.group, example.sample, example.is_nearest), (40, 0, 1, true));
    }

    #[test]
    fn texts_are_compared_by_pairs_of_letters() {
        assert_eq!(likeness("<think>x</think><answer> Red </answer>", "red"), 1.0);
        assert!(likeness("dark red", "red") > likeness("blue", "red"));
        assert!(likeness("", "red") < 0.01 && likeness("red.", "red") < 1.0);
        assert_eq!(
            (thousands(2560.0), thousands(999.0), thousands(1_234_567.0)),
            ("2,560".into(), "999".into(), "1,234,567".into())
        );
        for word in ["a b'c", "rew.py:f", "$(x) \"y\"", ""] {
            assert_eq!(shlex::split(&quoted(word)), Some(vec![word.to_owned()]));
        }
    }

    #[test]
    fn a_run_without_files_of_its_own_is_too_early() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(verdict(directory.path()).unwrap().kind, Kind::TooEarly);
        fs::write(directory.path().join("metrics.jsonl"), "not json\n{\"step\":1}\n[1]\n{\"step\":2,\"rew")
            .unwrap();
        fs::write(directory.path().join("events.jsonl"), "nothing\n{}\n").unwrap();
        assert_eq!(verdict(directory.path()).unwrap().kind, Kind::TooEarly);
        let failed = run([], &[], &[Event::Failed { why: "the reward applies to no row".to_owned() }]);
        let own = verdict(failed.path()).unwrap();
        assert!(
            own.kind == Kind::TooEarly && own.next.starts_with("Remove the cause of the failure"),
            "{}",
            own.next
        );
    }
}
