//! Catalogue of the completions of a run: their numbers without their texts, for questions that span steps.
//!
//! A catalogue reads each file of `rollouts/` once. A request reads new files for a limited time and answers with what is known
//! by then, so a long run is indexed over several short requests. A completion takes 16 bytes and 4 more for each reward. The
//! catalogues of all runs together hold at most [`MAX_COMPLETIONS`].

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use omnigrpo_observe::FinishReason;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::Error;
use crate::index::{Followed, Lines, Recent};
use crate::rollouts::{category, category_column, has_answer};
use crate::run::{MAX_STEPS, Run};
use crate::stamp::Stamp;

/// Largest number of completions in the catalogues of all runs.
const MAX_COMPLETIONS: usize = 4 << 20;
/// Largest number of completions of a step. The rest of a file is ignored.
const MAX_STEP_COMPLETIONS: usize = 1 << 18;
/// Largest number of rewards. Later names are ignored.
const MAX_REWARDS: usize = 64;
/// Longest name of a reward, in bytes. Rewards with longer names are ignored.
const MAX_REWARD_BYTES: usize = 256;
/// Largest total size of [`Names`], in bytes. Later names count as one, [`OTHER`].
const MAX_NAMES_BYTES: usize = 64 << 20;
/// Stands for the names that exceed the bound.
const OTHER: &str = "…";
/// Largest number of groups in a response.
const MAX_GROUPS: usize = 50_000;
/// Time for which a request reads new files.
const READ_TIME: Duration = Duration::from_millis(100);
/// Largest number of bins along an axis.
const MAX_BINS: usize = 100;
/// Number of step ranges of a distribution.
const MAX_RANGES: usize = 200;

/// Catalogues of all runs.
pub(crate) type Catalogues = Recent<Catalogue>;

/// Numbers of a completion. A reward that does not apply is NaN.
#[derive(Clone, Copy, Debug)]
struct Completion {
    reward: f32,
    advantage: f32,
    length: u32,
    cut: bool,
    parsed: bool,
}

/// Completions of a prompt in a step.
#[derive(Debug)]
struct Group {
    step: u64,
    group: u32,
    id: u32,
    /// Index of the category; `None` without one.
    category: Option<u32>,
    /// Index of the first completion.
    first: usize,
}

/// A file that was read, and what was known before it.
#[derive(Debug)]
struct Read {
    step: u64,
    stamp: Stamp,
    groups: usize,
    completions: usize,
}

/// Texts that occur often, each stored once.
#[derive(Debug, Default)]
struct Names {
    all: Vec<String>,
    places: HashMap<String, u32>,
    bytes: usize,
}

impl Names {
    fn place(&mut self, name: &str) -> u32 {
        if let Some(&place) = self.places.get(name) {
            return place;
        }
        if self.bytes + name.len() > MAX_NAMES_BYTES && name != OTHER {
            return self.place(OTHER);
        }
        // A short name takes more than its bytes.
        self.bytes += name.len() + 64;
        let place = self.all.len() as u32;
        self.all.push(name.to_owned());
        self.places.insert(name.to_owned(), place);
        place
    }
}

/// Numbers of all completions of a run, by step, group and sample.
#[derive(Debug, Default)]
pub(crate) struct Catalogue {
    /// Number that changes if known groups change, as when a run resumes from an earlier step.
    generation: u64,
    files: Vec<Read>,
    /// Directory of `rollouts/` and its last file when everything in it had been read.
    seen: Option<(Stamp, Stamp)>,
    groups: Vec<Group>,
    completions: Vec<Completion>,
    /// Unweighted values of each reward, one for each completion.
    rewards: BTreeMap<String, Vec<f32>>,
    ids: Names,
    categories: Names,
    /// True if completions were left out, because the run has more than a catalogue may hold.
    is_capped: bool,
    num_steps: usize,
}

/// Record of a completion without the prompt.
#[derive(Deserialize)]
struct Record<'a> {
    #[serde(borrow)]
    id: Cow<'a, str>,
    group: u32,
    sample: u32,
    #[serde(borrow)]
    completion: Cow<'a, str>,
    #[serde(borrow)]
    rewards: BTreeMap<Cow<'a, str>, Option<f32>>,
    reward: Option<f32>,
    advantage: f32,
    length: u32,
    finish_reason: FinishReason,
    #[serde(default)]
    row: Option<Map<String, Value>>,
}

/// Number of a completion that a question is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Measure {
    /// Weighted total of the rewards.
    Reward,
    /// Number of tokens.
    Length,
    Advantage,
    /// Unweighted value of the reward with this name.
    Named(String),
}

impl<'de> Deserialize<'de> for Measure {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let name = String::deserialize(from)?;
        Ok(match name.as_str() {
            "reward" => Self::Reward,
            "length" => Self::Length,
            "advantage" => Self::Advantage,
            _ => Self::Named(name.strip_prefix("rewards/").unwrap_or(&name).to_owned()),
        })
    }
}

/// Request for groups.
#[derive(Debug, Deserialize)]
pub(crate) struct Asked {
    measure: Measure,
    /// Smallest value with which a completion passes. Default: the largest value in the run; none passes if all are equal and not
    /// above 0.
    least: Option<f32>,
    #[serde(default)]
    generation: u64,
    #[serde(default)]
    from: usize,
}

/// Request for the distribution of a measure over the steps.
#[derive(Debug, Deserialize)]
pub(crate) struct Spread {
    measure: Measure,
    bins: Option<usize>,
    ranges: Option<usize>,
}

/// Request for two measures of the same completions.
#[derive(Debug, Deserialize)]
pub(crate) struct Joint {
    x: Measure,
    y: Measure,
    bins: Option<usize>,
    from: Option<u64>,
    until: Option<u64>,
}

/// Groups by column.
#[derive(Debug, Default, Serialize)]
struct Columns {
    step: Vec<u64>,
    group: Vec<u32>,
    id: Vec<u32>,
    category: Vec<Option<u32>>,
    completions: Vec<usize>,
    mean: Vec<Option<f64>>,
    min: Vec<Option<f64>>,
    max: Vec<Option<f64>>,
    /// Share of the completions that pass.
    pass: Vec<Option<f64>>,
    length: Vec<Option<f64>>,
    cut: Vec<usize>,
    unparsed: Vec<usize>,
}

impl Followed for Catalogue {
    const MOST: usize = MAX_COMPLETIONS;

    fn size(&self) -> usize {
        self.completions.len()
    }

    fn read(&mut self, run: &Run) -> Result<(), Error> {
        self.read_for(READ_TIME, run)
    }
}

impl Catalogue {
    /// Reads files that are new or have changed, for a limited time. At least one file is read.
    fn read_for(&mut self, time: Duration, run: &Run) -> Result<(), Error> {
        let started = Instant::now();
        let directory = run.dir.join("rollouts");
        let stamp = |path: &std::path::Path| std::fs::metadata(path).ok().map(|meta| Stamp::of(&meta));
        let last = |files: &[Read]| stamp(&run.step_file("rollouts", files.last()?.step));
        let now = stamp(&directory).zip(last(&self.files));
        if now.is_some() && now == self.seen {
            return Ok(());
        }
        let (steps, has_more) = run.last_steps("rollouts", MAX_STEPS)?;
        self.num_steps = steps.len();
        let mut files = self.files.iter().zip(&steps);
        let same = |(file, step): &(&Read, &u64)| {
            file.step == **step && stamp(&run.step_file("rollouts", **step)) == Some(file.stamp)
        };
        let kept = files.by_ref().take_while(same).count();
        self.forget(kept);
        self.is_capped |= has_more;
        let column = category_column(run);
        for (at, &step) in steps.iter().enumerate().skip(kept) {
            if self.is_full() {
                self.is_capped = true;
                break;
            }
            if at > kept && started.elapsed() > time {
                return Ok(());
            }
            self.add(run, step, column.as_deref(), MAX_STEP_COMPLETIONS)?;
        }
        self.seen = stamp(&directory).zip(last(&self.files)).filter(|_| self.files.len() == steps.len());
        Ok(())
    }

    fn is_full(&self) -> bool {
        self.completions.len() >= MAX_COMPLETIONS
    }

    /// Keeps only the first `kept` files.
    fn forget(&mut self, kept: usize) {
        let Some(first) = self.files.get(kept) else { return };
        self.groups.truncate(first.groups);
        self.completions.truncate(first.completions);
        self.rewards.values_mut().for_each(|values| values.truncate(first.completions));
        self.files.truncate(kept);
        self.generation += 1;
        self.is_capped = false;
    }

    /// Reads the first `most` completions of a step. Lines that are no records are skipped.
    fn add(&mut self, run: &Run, step: u64, column: Option<&str>, most: usize) -> Result<(), Error> {
        let path = run.step_file("rollouts", step);
        let file = run.open(&path)?;
        let stamp = Stamp::of(&file.metadata().map_err(Error::io("look at", &path))?);
        self.files.push(Read { step, stamp, groups: self.groups.len(), completions: self.completions.len() });
        let mut lines = Lines::new(file);
        let mut found = Vec::new();
        while let Some((_, line)) = lines.next().map_err(Error::io("read", &path))? {
            if found.len() == most {
                self.is_capped = true;
                break;
            }
            let line = String::from_utf8_lossy(line);
            let Ok(record) = serde_json::from_str::<Record>(&line) else { continue };
            let completion = Completion {
                reward: record.reward.unwrap_or(f32::NAN),
                advantage: record.advantage,
                length: record.length,
                cut: record.finish_reason == FinishReason::Length,
                parsed: has_answer(&record.completion),
            };
            let of_row = record.row.as_ref().and_then(|row| category(row, column));
            let of_row = of_row.map(|name| self.categories.place(&name));
            let id = self.ids.place(&record.id);
            let rewards: Vec<(String, f32)> = record
                .rewards
                .into_iter()
                .filter(|(name, _)| name.len() <= MAX_REWARD_BYTES)
                .take(MAX_REWARDS)
                .map(|(name, value)| (name.into_owned(), value.unwrap_or(f32::NAN)))
                .collect();
            found.push((record.group, record.sample, id, of_row, completion, rewards));
        }
        found.sort_by_key(|(group, sample, ..)| (*group, *sample));
        for (at, (group, _, id, category, completion, rewards)) in found.iter().enumerate() {
            if at == 0 || found[at - 1].0 != *group {
                let first = self.completions.len();
                self.groups.push(Group { step, group: *group, id: *id, category: *category, first });
            }
            if let (Some(own), Some(category)) = (self.groups.last_mut(), category) {
                own.category = Some(*category);
            }
            self.completions.push(*completion);
            for (name, value) in rewards {
                if !self.rewards.contains_key(name) && self.rewards.len() < MAX_REWARDS {
                    self.rewards.insert(name.clone(), Vec::new());
                }
                if let Some(values) = self.rewards.get_mut(name) {
                    values.resize(self.completions.len() - 1, f32::NAN);
                    values.push(*value);
                }
            }
        }
        let count = self.completions.len();
        self.rewards.values_mut().for_each(|values| values.resize(count, f32::NAN));
        Ok(())
    }

    /// Returns the value of a completion, unless it has none.
    fn value(&self, measure: &Measure, at: usize) -> Option<f32> {
        let own = self.completions.get(at)?;
        let value = match measure {
            Measure::Reward => own.reward,
            Measure::Length => own.length as f32,
            Measure::Advantage => own.advantage,
            Measure::Named(name) => *self.rewards.get(name)?.get(at)?,
        };
        value.is_finite().then_some(value)
    }

    fn known(&self, measure: &Measure) -> Result<(), Error> {
        match measure {
            Measure::Named(name) if !self.rewards.contains_key(name) && !self.groups.is_empty() => {
                Err(Error::missing(format!("the run has no reward {name}")))
            }
            _ => Ok(()),
        }
    }

    /// Returns the progress of the catalogue and the names in it.
    fn about(&self) -> Map<String, Value> {
        let steps = self.files.len();
        let about = json!({
            "generation": self.generation,
            "steps": steps,
            "all_steps": self.num_steps,
            "done": steps == self.num_steps || self.is_full(),
            "capped": self.is_capped,
            "completions": self.completions.len(),
            "rewards": self.rewards.keys().collect::<Vec<_>>(),
        });
        match about {
            Value::Object(about) => about,
            _ => Map::new(),
        }
    }

    /// Returns groups from an index as columns. Names of ids and categories are complete in each response.
    pub(crate) fn groups(&self, asked: &Asked) -> Result<Value, Error> {
        self.known(&asked.measure)?;
        let values = || (0..self.completions.len()).filter_map(|at| self.value(&asked.measure, at));
        let [low, high] = [f32::min, f32::max].map(|of| values().reduce(of));
        // Where all values are equal and none is above 0, nothing tells success from failure.
        let least = asked.least.or(high.filter(|high| *high > 0.0 || low < Some(*high)));
        let from = if asked.generation == self.generation { asked.from } else { 0 };
        let mut columns = Columns::default();
        let ends = self.groups.iter().skip(1).map(|group| group.first).chain([self.completions.len()]);
        for (group, end) in self.groups.iter().zip(ends).skip(from).take(MAX_GROUPS) {
            let own = || (group.first..end).filter_map(|at| self.value(&asked.measure, at));
            let completions = self.completions.get(group.first..end).unwrap_or_default();
            let scored = own().count();
            let mean = |sum: f64, count: usize| (count > 0).then(|| rounded(sum / count as f64));
            columns.step.push(group.step);
            columns.group.push(group.group);
            columns.id.push(group.id);
            columns.category.push(group.category);
            columns.completions.push(completions.len());
            columns.mean.push(mean(own().map(f64::from).sum(), scored));
            columns.min.push(own().reduce(f32::min).map(|own| rounded(own.into())));
            columns.max.push(own().reduce(f32::max).map(|own| rounded(own.into())));
            let passed = own().filter(|own| least.is_some_and(|least| *own >= least)).count();
            columns.pass.push(mean(passed as f64, scored));
            let tokens: f64 = completions.iter().map(|own| f64::from(own.length)).sum();
            columns.length.push(mean(tokens, completions.len()));
            columns.cut.push(completions.iter().filter(|own| own.cut).count());
            columns.unparsed.push(completions.iter().filter(|own| !own.parsed).count());
        }
        let mut out = self.about();
        let next = from + columns.step.len();
        out.insert("from".into(), from.into());
        out.insert("next".into(), next.into());
        out.insert("groups".into(), self.groups.len().into());
        out.insert("least".into(), least.map(f64::from).map(rounded).into());
        out.insert("ids".into(), json!(self.ids.all));
        out.insert("categories".into(), json!(self.categories.all));
        out.insert("columns".into(), json!(columns));
        Ok(Value::Object(out))
    }

    /// Returns a histogram of a measure for each of some ranges of steps, with its 10 %, 50 % and 90 % quantiles.
    pub(crate) fn spread(&self, asked: &Spread) -> Result<Value, Error> {
        self.known(&asked.measure)?;
        let axis = self.axis(&asked.measure, 0..self.completions.len(), asked.bins);
        let size = self.files.len().div_ceil(asked.ranges.unwrap_or(MAX_RANGES).clamp(1, MAX_RANGES)).max(1);
        let mut ranges = Vec::new();
        for part in self.files.chunks(size) {
            let (Some(first), Some(last)) = (part.first(), part.last()) else { continue };
            let end = self.files.get(ranges.len() * size + part.len());
            let end = end.map_or(self.completions.len(), |next| next.completions);
            let mut values: Vec<f32> =
                (first.completions..end).filter_map(|at| self.value(&asked.measure, at)).collect();
            values.sort_by(f32::total_cmp);
            let quantile = |share: f64| {
                let at = (share * values.len().saturating_sub(1) as f64).round() as usize;
                values.get(at).map(|own| rounded((*own).into()))
            };
            let quantiles = [0.1, 0.5, 0.9].map(quantile);
            let mut counts = vec![0_u32; axis.bins];
            values.iter().for_each(|own| counts[axis.bin(*own)] += 1);
            ranges.push(json!({
                "from": first.step,
                "until": last.step,
                "counts": counts,
                "none": end - first.completions - values.len(),
                "quantiles": quantiles,
            }));
        }
        let mut out = self.about();
        out.insert("axis".into(), json!(axis));
        out.insert("ranges".into(), Value::Array(ranges));
        Ok(Value::Object(out))
    }

    /// Returns a histogram of two measures, the mean of y for each bin of x, and their correlation with its 95 % interval. The
    /// interval is Fisher's: tanh(artanh r ± 1.96 / √(n − 3)), from R. A. Fisher, "On the probable error of a coefficient of
    /// correlation deduced from a small sample", 1921. It treats completions as independent.
    pub(crate) fn joint(&self, asked: &Joint) -> Result<Value, Error> {
        self.known(&asked.x)?;
        self.known(&asked.y)?;
        let begin = self.files.partition_point(|file| asked.from.is_some_and(|from| file.step < from));
        let end = self.files.partition_point(|file| asked.until.is_none_or(|until| file.step <= until));
        let at = |place: usize| self.files.get(place).map_or(self.completions.len(), |file| file.completions);
        let range = at(begin)..at(end).max(at(begin));
        let pair = |at: usize| Some((self.value(&asked.x, at)?, self.value(&asked.y, at)?));
        let pairs: Vec<(f32, f32)> = range.clone().filter_map(pair).collect();
        let x = self.axis(&asked.x, range.clone(), asked.bins);
        let y = self.axis(&asked.y, range, asked.bins);
        let mut counts = vec![vec![0_u32; y.bins]; x.bins];
        let mut sums = vec![0.0_f64; x.bins];
        for &(a, b) in &pairs {
            counts[x.bin(a)][y.bin(b)] += 1;
            sums[x.bin(a)] += f64::from(b);
        }
        let means: Vec<Option<f64>> = counts
            .iter()
            .zip(sums)
            .map(|(own, sum)| {
                let count: u32 = own.iter().sum();
                (count > 0).then(|| rounded(sum / f64::from(count)))
            })
            .collect();
        let r = correlation(&pairs);
        let interval = r.filter(|_| pairs.len() > 3).map(|r| {
            let half = 1.96 / ((pairs.len() - 3) as f64).sqrt();
            [-half, half].map(|by| rounded((r.clamp(-0.999_999, 0.999_999).atanh() + by).tanh()))
        });
        let mut out = self.about();
        out.insert("x".into(), json!(x));
        out.insert("y".into(), json!(y));
        out.insert("counts".into(), json!(counts));
        out.insert("means".into(), json!(means));
        out.insert("pairs".into(), pairs.len().into());
        out.insert("r".into(), r.map(rounded).into());
        out.insert("interval".into(), json!(interval));
        Ok(Value::Object(out))
    }

    fn axis(&self, measure: &Measure, range: std::ops::Range<usize>, bins: Option<usize>) -> Axis {
        let values = || range.clone().filter_map(|at| self.value(measure, at));
        let low = values().reduce(f32::min).unwrap_or(0.0);
        let high = values().reduce(f32::max).unwrap_or(0.0);
        // Bins of whole numbers have whole widths. Otherwise some bins would hold more numbers than others.
        let is_whole = values().all(|own| own.fract() == 0.0);
        let bins = bins.unwrap_or(24).clamp(1, MAX_BINS);
        let (from, to) = (f64::from(low), f64::from(high));
        if is_whole {
            let width = ((to - from + 1.0) / bins as f64).ceil().max(1.0);
            let bins = ((to - from + 1.0) / width).ceil().max(1.0);
            let high = from - 0.5 + width * bins;
            return Axis { low: from - 0.5, high, bins: bins as usize, whole: true };
        }
        Axis { low: from, high: to, bins: if high > low { bins } else { 1 }, whole: false }
    }
}

/// Equal bins from `low` to `high`.
#[derive(Clone, Copy, Debug, Serialize)]
struct Axis {
    low: f64,
    high: f64,
    bins: usize,
    /// True if all values are whole numbers. Then the bins begin and end between two of them.
    whole: bool,
}

impl Axis {
    fn bin(&self, value: f32) -> usize {
        let share = (f64::from(value) - self.low) / (self.high - self.low);
        // The last bin includes its upper edge. Without a range, there is one bin.
        ((share * self.bins as f64).max(0.0) as usize).min(self.bins - 1)
    }
}

/// Returns the correlation of pairs (Pearson); `None` if one side does not vary.
fn correlation(pairs: &[(f32, f32)]) -> Option<f64> {
    let count = pairs.len() as f64;
    let mean = |of: fn(&(f32, f32)) -> f32| pairs.iter().map(|own| f64::from(of(own))).sum::<f64>() / count;
    let (mx, my) = (mean(|own| own.0), mean(|own| own.1));
    let (mut xx, mut yy, mut xy) = (0.0, 0.0, 0.0);
    for &(x, y) in pairs {
        let (dx, dy) = (f64::from(x) - mx, f64::from(y) - my);
        xx += dx * dx;
        yy += dy * dy;
        xy += dx * dy;
    }
    (xx > 0.0 && yy > 0.0).then(|| xy / (xx * yy).sqrt())
}

/// Rounds to four decimals, which is enough to draw and keeps responses short.
fn rounded(value: f64) -> f64 {
    (value * 1e4).round() / 1e4
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn line(id: &str, group: u32, sample: u32, accuracy: f64, length: u32) -> String {
        let row = if sample == 0 { json!({ "type": "shape" }) } else { Value::Null };
        let own = json!({
            "step": 1, "epoch": 0.0, "id": id, "group": group, "sample": sample, "prompt": "?", "solution": null, "media": [],
            "completion": "<answer>x</answer>", "rewards": { "accuracy": accuracy, "format": null }, "reward": 2.0 * accuracy,
            "advantage": accuracy - 0.5, "length": length, "finish_reason": if length == 9 { "length" } else { "stop" }, "row": row,
        });
        format!("{own}\n")
    }

    /// Row id, group, sample, accuracy and length of completions.
    type Completions<'a> = &'a [(&'a str, u32, u32, f64, u32)];

    fn run(steps: &[(u64, Completions)]) -> (tempfile::TempDir, Run) {
        let directory = tempfile::tempdir().unwrap();
        let run = Run { dir: fs::canonicalize(directory.path()).unwrap() };
        fs::create_dir(run.dir.join("rollouts")).unwrap();
        for (step, lines) in steps {
            let text: String = lines.iter().map(|own| line(own.0, own.1, own.2, own.3, own.4)).collect();
            fs::write(run.step_file("rollouts", *step), text + "{\"no\": record\n").unwrap();
        }
        (directory, run)
    }

    fn asked<T: serde::de::DeserializeOwned>(query: &str) -> T {
        serde_urlencoded::from_str(query).unwrap()
    }

    const TWO: &[(u64, Completions)] = &[
        (1, &[("a", 0, 1, 1.0, 4), ("a", 0, 0, 0.0, 2), ("b", 1, 0, 0.0, 9), ("b", 1, 1, 0.0, 5)]),
        (3, &[("a", 0, 0, 1.0, 3), ("a", 0, 1, 1.0, 5)]),
    ];

    #[test]
    fn groups_have_their_numbers() {
        let (_directory, run) = run(TWO);
        let all = Catalogues::default();
        let found = all.with(&run, |own| own.groups(&asked("measure=rewards/accuracy"))).unwrap();
        let columns = &found["columns"];
        assert_eq!(columns["step"], json!([1, 1, 3]));
        assert_eq!(columns["id"], json!([0, 1, 0]));
        assert_eq!((&found["ids"], &found["categories"]), (&json!(["a", "b"]), &json!(["shape"])));
        assert_eq!(columns["mean"], json!([0.5, 0.0, 1.0]));
        assert_eq!(columns["pass"], json!([0.5, 0.0, 1.0]));
        assert_eq!((&columns["min"], &columns["max"]), (&json!([0.0, 0.0, 1.0]), &json!([1.0, 0.0, 1.0])));
        assert_eq!(columns["length"], json!([3.0, 7.0, 4.0]));
        assert_eq!(columns["cut"], json!([0, 1, 0]));
        assert_eq!((&found["least"], &found["done"], &found["next"]), (&json!(1.0), &json!(true), &json!(3)));
        assert_eq!(found["rewards"], json!(["accuracy", "format"]));
        // A lower threshold lets all pass, and a reward that applies nowhere has no numbers.
        let found = all.with(&run, |own| own.groups(&asked("measure=reward&least=0&from=2"))).unwrap();
        assert_eq!((&found["columns"]["pass"], &found["columns"]["mean"]), (&json!([1.0]), &json!([2.0])));
        let found = all.with(&run, |own| own.groups(&asked("measure=rewards/format"))).unwrap();
        assert_eq!(found["columns"]["mean"], json!([null, null, null]));
        let error = all.with(&run, |own| own.groups(&asked("measure=rewards/none"))).unwrap_err();
        assert_eq!(error.to_string(), "the run has no reward none");
    }

    #[test]
    fn new_steps_are_added_and_a_step_that_is_written_again_replaces_the_rest() {
        let (_directory, run) = run(TWO);
        let all = Catalogues::default();
        let groups = |query: &str| all.with(&run, |own| own.groups(&asked(query))).unwrap();
        assert_eq!(groups("measure=reward")["generation"], 0);
        fs::write(run.step_file("rollouts", 4), line("c", 0, 0, 1.0, 1)).unwrap();
        let found = groups("measure=reward&from=3");
        assert_eq!((&found["columns"]["step"], &found["generation"]), (&json!([4]), &json!(0)));
        fs::remove_file(run.step_file("rollouts", 4)).unwrap();
        fs::write(run.step_file("rollouts", 3), line("d", 0, 0, 0.0, 1)).unwrap();
        let found = groups("measure=reward&from=4");
        assert_eq!((&found["generation"], &found["from"]), (&json!(1), &json!(0)), "the page begins again");
        assert_eq!(found["columns"]["step"], json!([1, 1, 3]));
        assert_eq!(found["columns"]["mean"], json!([1.0, 0.0, 0.0]));
    }

    #[test]
    fn a_catalogue_grows_over_short_requests() {
        let (_directory, run) = run(TWO);
        let mut own = Catalogue::default();
        own.read_for(Duration::ZERO, &run).unwrap();
        assert_eq!((own.files.len(), &own.about()["done"]), (1, &json!(false)));
        own.read_for(Duration::ZERO, &run).unwrap();
        assert_eq!((own.completions.len(), &own.about()["done"]), (6, &json!(true)));
    }

    #[test]
    fn measures_are_counted_in_bins() {
        let (_directory, run) = run(TWO);
        let all = Catalogues::default();
        // The lengths 2 to 9 in 4 bins of 2 numbers each.
        let found = all.with(&run, |own| own.spread(&asked("measure=length&bins=4"))).unwrap();
        assert_eq!(found["axis"], json!({ "low": 1.5, "high": 9.5, "bins": 4, "whole": true }));
        assert_eq!(found["ranges"][0]["counts"], json!([1, 2, 0, 1]));
        assert_eq!(found["ranges"][0]["quantiles"], json!([2.0, 5.0, 9.0]));
        assert_eq!(
            (&found["ranges"][1]["from"], &found["ranges"][1]["counts"]),
            (&json!(3), &json!([1, 1, 0, 0]))
        );
        let found = all.with(&run, |own| own.spread(&asked("measure=length&bins=4&ranges=1"))).unwrap();
        assert_eq!(found["ranges"][0]["counts"], json!([2, 3, 0, 1]));
        let found = all.with(&run, |own| own.spread(&asked("measure=rewards/format"))).unwrap();
        assert_eq!(found["ranges"][0]["none"], 4);
        // Advantages of -0.5 and 0.5.
        let found = all.with(&run, |own| own.spread(&asked("measure=advantage&bins=2&ranges=1"))).unwrap();
        assert_eq!(found["axis"], json!({ "low": -0.5, "high": 0.5, "bins": 2, "whole": false }));
        assert_eq!(found["ranges"][0]["counts"], json!([3, 3]));
    }

    #[test]
    fn two_measures_are_correlated() {
        let (_directory, run) = run(TWO);
        let all = Catalogues::default();
        let found = all
            .with(&run, |own| own.joint(&asked("x=length&y=rewards/accuracy&bins=4&from=1&until=1")))
            .unwrap();
        // Lengths 2, 4, 9, 5 with mean 5, and values 0, 1, 0, 0 with mean 1/4: xy = -1, xx = 26, yy = 3/4.
        assert_eq!((&found["pairs"], &found["r"]), (&json!(4), &json!(rounded(-1.0 / 19.5_f64.sqrt()))));
        // artanh(-0.22646) = -0.23046, plus and minus 1.96: tanh(-2.19046) and tanh(1.72954).
        assert_eq!(found["interval"], json!([-0.9753, 0.939]));
        assert_eq!(found["means"], json!([0.0, 0.5, null, 0.0]));
        assert_eq!(found["counts"][1], json!([1, 1]));
        let found = all.with(&run, |own| own.joint(&asked("x=reward&y=rewards/accuracy"))).unwrap();
        assert_eq!((&found["r"], &found["pairs"]), (&json!(1.0), &json!(6)));
    }

    #[test]
    fn a_hostile_file_cannot_grow_the_catalogue() {
        let (_directory, run) = run(TWO);
        let mut own = Catalogue::default();
        own.add(&run, 1, None, 3).unwrap();
        assert_eq!((own.completions.len(), own.groups.len(), own.is_capped), (3, 2, true));
        assert_eq!(own.about()["capped"], json!(true));
        // Rewards by name and by step.
        let mut text = String::new();
        for sample in 0..2 {
            let mut record: Value = serde_json::from_str(&line("a", 0, sample, 1.0, 4)).unwrap();
            let names = (0..100).map(|at| (format!("{sample}-{at:03}"), json!(1.0)));
            let long = ("x".repeat(MAX_REWARD_BYTES + 1), json!(1.0));
            record["rewards"] = Value::Object(std::iter::once(long).chain(names).collect());
            text += &format!("{record}\n");
        }
        fs::write(run.step_file("rollouts", 1), text).unwrap();
        let mut own = Catalogue::default();
        own.add(&run, 1, None, MAX_STEP_COMPLETIONS).unwrap();
        assert_eq!(own.rewards.len(), MAX_REWARDS);
        assert!(own.rewards.iter().all(|(name, values)| name.len() < 10 && values.len() == 2));
        assert!(!own.is_capped);
    }

    #[test]
    fn names_have_a_bound() {
        let mut names = Names::default();
        let name = |at: usize| format!("{at:02}{}", "x".repeat(1 << 20));
        let places: Vec<u32> = (0..70).map(|at| names.place(&name(at))).collect();
        let known = places.iter().position(|&place| names.all[place as usize] == OTHER).unwrap();
        assert!((60..64).contains(&known), "{known}");
        assert!(places[known..].iter().all(|place| *place == places[known]));
        assert_eq!(
            (names.all.len(), names.place(&name(5)), names.place(&name(99))),
            (known + 1, 5, places[known])
        );
    }
}
