//! Metrics of a run by column, for charts of any length.
//!
//! `metrics.jsonl` is read once, and then only what is new. A response has every row of a short range. A longer range is divided
//! into buckets with the minimum, the maximum and the mean of each column, so no spike is lost. Numbers are kept with single
//! precision, because they are only drawn.

use std::borrow::Cow;
use std::fmt;
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::{Map, Value, json};

use crate::Error;
use crate::index::{Followed, Lines, Recent};
use crate::run::Run;
use crate::stamp::Stamp;

/// Largest number of rows in a response that has every row.
const MOST_ROWS: usize = 2000;
/// Number of buckets of a longer range.
const BUCKETS: usize = 400;
/// Time for which a request reads new rows.
const READ_TIME: Duration = Duration::from_millis(300);
/// Longest name of a column, in bytes. Columns with longer names are ignored.
const MAX_NAME_BYTES: usize = 256;
/// Largest sizes of a table.
const LIMITS: Limits = Limits { rows: 1 << 20, columns: 1000, cells: 64 << 20 };

/// Largest numbers of rows, columns and values of a table. What comes later is ignored, because anything can write the file.
#[derive(Clone, Copy, Debug)]
struct Limits {
    rows: usize,
    columns: usize,
    cells: usize,
}

/// Columns of all runs.
pub(crate) type AllCurves = Recent<Curves>;

/// Request for the metrics of a run.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Asked {
    generation: u64,
    /// Number of rows that the page has.
    from: usize,
    /// Range of steps.
    low: Option<f64>,
    high: Option<f64>,
    /// Number of buckets of a long range.
    buckets: Option<usize>,
}

impl Recent<Curves> {
    /// Returns the metrics of a run, after reading new rows for a limited time.
    pub(crate) fn of(&self, run: &Run, asked: &Asked) -> Result<Value, Error> {
        self.with(run, |curves| Ok(curves.answer(asked)))
    }
}

/// Metrics of a run.
#[derive(Debug)]
pub(crate) struct Curves {
    /// Number that changes if known rows change.
    generation: u64,
    file: u64,
    /// Offset of the rows that are not read yet.
    next: u64,
    is_done: bool,
    steps: Table,
    evaluations: Table,
    /// Sum of the durations of all rows, in seconds.
    seconds: f64,
}

impl Default for Curves {
    fn default() -> Self {
        // An answer has all rows of evaluations, so their limits are lower.
        let limits = Limits { cells: 1 << 20, rows: 1 << 16, ..LIMITS };
        let evaluations = Table { limits, ..Table::default() };
        let steps = Table::default();
        Self { generation: 0, file: 0, next: 0, is_done: false, steps, evaluations, seconds: 0.0 }
    }
}

/// Rows by column. A missing value is NaN.
#[derive(Debug)]
struct Table {
    limits: Limits,
    /// True if a row or a column was ignored.
    is_capped: bool,
    steps: Vec<f64>,
    seconds: Vec<f64>,
    columns: Vec<(String, Vec<f32>)>,
}

impl Default for Table {
    fn default() -> Self {
        Self { limits: LIMITS, is_capped: false, steps: Vec::new(), seconds: Vec::new(), columns: Vec::new() }
    }
}

impl Followed for Curves {
    const MOST: usize = 512 << 20;

    /// Returns the size of the columns, in bytes.
    fn size(&self) -> usize {
        let of = |table: &Table| table.steps.len() * (16 + 4 * table.columns.len());
        of(&self.steps) + of(&self.evaluations)
    }

    fn read(&mut self, run: &Run) -> Result<(), Error> {
        let started = Instant::now();
        let path = run.dir.join("metrics.jsonl");
        if !path.exists() {
            self.is_done = true;
            return Ok(());
        }
        let file = run.open(&path)?;
        let stamp = Stamp::of(&file.metadata().map_err(Error::io("look at", &path))?);
        if stamp.id != self.file || stamp.bytes < self.next {
            let generation = self.generation + u64::from(self.next > 0);
            *self = Self { generation, file: stamp.id, ..Self::default() };
        }
        self.is_done = false;
        let mut lines = Lines::from(file, self.next).map_err(Error::io("read", &path))?;
        let mut count = 0_usize;
        while let Some((offset, line)) = lines.next().map_err(Error::io("read", &path))? {
            self.add(line);
            self.next = offset + line.len() as u64 + 1;
            count += 1;
            if count.is_multiple_of(64) && started.elapsed() > READ_TIME {
                return Ok(());
            }
        }
        self.is_done = true;
        Ok(())
    }
}

impl Curves {
    /// Adds a row. A line that is not a row with a step is skipped.
    fn add(&mut self, line: &[u8]) {
        let Ok(Row(values)) = serde_json::from_slice::<Row>(line) else { return };
        let of = |name: &str| values.iter().find(|(own, _)| own == name).and_then(|(_, value)| *value);
        let Some(step) = of("step") else { return };
        let is_evaluation = values.iter().any(|(name, _)| name.starts_with("eval_"));
        let time = of("step_time");
        self.seconds += time.unwrap_or(0.0);
        let speed = of("num_tokens").zip(time).map(|(tokens, time)| tokens / time);
        let rest = of("memory/peak_mb").map(|peak| peak - of("memory/media_store_mb").unwrap_or(0.0));
        let table = if is_evaluation { &mut self.evaluations } else { &mut self.steps };
        // A run that resumed from a checkpoint has written this step again.
        if table.forget(step) {
            self.generation += 1;
        }
        if !table.has_room() {
            table.is_capped = true;
            return;
        }
        table.steps.push(step);
        table.seconds.push(self.seconds);
        let derived = [("derived/tokens_per_second", speed), ("derived/memory_rest_mb", rest)];
        let derived = derived.into_iter().filter(|(_, value)| value.is_some());
        let own = values.iter().map(|(name, value)| (&**name, *value)).chain(derived);
        for (at, (name, value)) in own.filter(|(name, _)| *name != "step").enumerate() {
            table.set(at, name, value);
        }
    }

    fn answer(&self, asked: &Asked) -> Value {
        let steps = &self.steps;
        let from = asked.low.map_or(0, |low| steps.steps.partition_point(|step| *step < low));
        let until =
            asked.high.map_or(steps.steps.len(), |high| steps.steps.partition_point(|step| *step <= high));
        let range = from..until.max(from);
        let mut out = Map::new();
        let is_thinned = range.len() > MOST_ROWS;
        let known = if asked.generation == self.generation { asked.from.min(range.len()) } else { 0 };
        out.insert("generation".into(), self.generation.into());
        out.insert("rows".into(), steps.steps.len().into());
        out.insert("done".into(), self.is_done.into());
        out.insert("capped".into(), (steps.is_capped || self.evaluations.is_capped).into());
        out.insert("seconds".into(), self.seconds.into());
        out.insert("evaluations".into(), self.evaluations.rows(0..self.evaluations.steps.len()));
        let mut last: Map<String, Value> = steps
            .columns
            .iter()
            .filter_map(|(name, all)| {
                Some((name.clone(), json!(all.get(steps.steps.len().checked_sub(1)?)?)))
            })
            .collect();
        last.insert("step".into(), json!(steps.steps.last()));
        out.insert("last".into(), Value::Object(last));
        out.insert("thinned".into(), is_thinned.into());
        if is_thinned {
            let buckets = asked.buckets.unwrap_or(BUCKETS).clamp(10, 1000);
            out.insert("steps".into(), steps.buckets(range, buckets));
        } else {
            out.insert("from".into(), known.into());
            out.insert("steps".into(), steps.rows(range.start + known..range.end));
        }
        Value::Object(out)
    }
}

impl Table {
    /// Returns true if the table can have one more row.
    fn has_room(&self) -> bool {
        let rows = self.steps.len() + 1;
        rows <= self.limits.rows && rows * self.columns.len() <= self.limits.cells
    }

    /// Removes the rows from `step` on. Returns true if there were any.
    fn forget(&mut self, step: f64) -> bool {
        let kept = self.steps.iter().rposition(|own| *own < step).map_or(0, |at| at + 1);
        let has_any = kept < self.steps.len();
        self.steps.truncate(kept);
        self.seconds.truncate(kept);
        self.columns.iter_mut().for_each(|(_, all)| all.truncate(kept));
        has_any
    }

    /// Sets a value of the last row. `hint` is the likely index of its column, since rows have their names in the same order.
    fn set(&mut self, hint: usize, name: &str, value: Option<f64>) {
        let rows = self.steps.len();
        let at = match self.columns.get(hint) {
            Some((own, _)) if own == name => hint,
            _ => match self.columns.iter().position(|(own, _)| own == name) {
                Some(at) => at,
                None if self.columns.len() < self.limits.columns
                    && rows * (self.columns.len() + 1) <= self.limits.cells
                    && name.len() <= MAX_NAME_BYTES =>
                {
                    self.columns.push((name.to_owned(), Vec::new()));
                    self.columns.len() - 1
                }
                None => {
                    self.is_capped = true;
                    return;
                }
            },
        };
        let all = &mut self.columns[at].1;
        all.resize(rows - 1, f32::NAN);
        all.push(value.map_or(f32::NAN, |value| value as f32));
    }

    fn part(all: &[f32], range: &std::ops::Range<usize>) -> Vec<f32> {
        range.clone().map(|at| all.get(at).copied().unwrap_or(f32::NAN)).collect()
    }

    /// Returns every row of a range.
    fn rows(&self, range: std::ops::Range<usize>) -> Value {
        let of =
            |(name, all): &(String, Vec<f32>)| (name.clone(), json!(shortened(&Self::part(all, &range))));
        json!({
            "x": &self.steps[range.clone()],
            "seconds": &self.seconds[range.clone()],
            "columns": self.columns.iter().map(of).collect::<Map<String, Value>>(),
        })
    }

    /// Returns a range in buckets of equal widths. Widths are powers of two and buckets begin at multiples of them, so that runs share
    /// their x values except at the ends. `x` has the beginning and the middle of each bucket, and `ends` the minimum and the maximum in the order in
    /// which they occur.
    fn buckets(&self, range: std::ops::Range<usize>, count: usize) -> Value {
        let span = self.steps[range.end - 1] - self.steps[range.start] + 1.0;
        let mut width = 2.0;
        while span / width > count as f64 {
            width *= 2.0;
        }
        let (first, last) = (self.steps[range.start], self.steps[range.end - 1]);
        let place = |at: usize| (self.steps[at] / width).floor();
        let mut parts: Vec<std::ops::Range<usize>> = Vec::new();
        for at in range {
            match parts.last_mut().filter(|part| place(part.start) == place(at)) {
                Some(part) => part.end = at + 1,
                None => parts.push(at..at + 1),
            }
        }
        let x = parts.iter().flat_map(|part| {
            [0.0, 0.5].map(|share| ((place(part.start) + share) * width).clamp(first, last))
        });
        let seconds = parts.iter().flat_map(|part| [part.start, part.end - 1]).map(|at| self.seconds[at]);
        let of = |(name, all): &(String, Vec<f32>)| {
            let (mut ends, mut means) = (Vec::new(), Vec::new());
            for part in &parts {
                let values = Self::part(all, part);
                let known = || values.iter().copied().enumerate().filter(|(_, own)| own.is_finite());
                let low = known().reduce(|a, b| if b.1 < a.1 { b } else { a });
                let high = known().reduce(|a, b| if b.1 > a.1 { b } else { a });
                let (Some(low), Some(high)) = (low, high) else {
                    ends.extend([f32::NAN; 2]);
                    means.push(f32::NAN);
                    continue;
                };
                ends.extend(if low.0 <= high.0 { [low.1, high.1] } else { [high.1, low.1] });
                let sum: f64 = known().map(|(_, own)| f64::from(own)).sum();
                means.push((sum / known().count() as f64) as f32);
            }
            (name.clone(), json!({ "ends": shortened(&ends), "means": shortened(&means) }))
        };
        json!({
            "x": x.collect::<Vec<_>>(),
            "seconds": seconds.collect::<Vec<_>>(),
            "width": width,
            "columns": self.columns.iter().map(of).collect::<Map<String, Value>>(),
        })
    }
}

/// Rounds to six significant digits, so that responses are short. Values that are not finite become `null`.
fn shortened(values: &[f32]) -> Vec<Option<f64>> {
    let short = |value: f32| {
        let value = f64::from(value);
        if value == 0.0 {
            return value;
        }
        // Powers of ten with a positive exponent are exact, so the quotient is the number that six digits stand for.
        let digits = 5 - value.abs().log10().floor() as i32;
        let scale = 10_f64.powi(digits.abs());
        if digits < 0 { (value / scale).round() * scale } else { (value * scale).round() / scale }
    };
    values.iter().map(|value| value.is_finite().then(|| short(*value))).collect()
}

/// Names and numbers of a line. A value that is not a number is `None`.
struct Row<'a>(Vec<(Cow<'a, str>, Option<f64>)>);

impl<'de> Deserialize<'de> for Row<'de> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Names;
        impl<'de> Visitor<'de> for Names {
            type Value = Row<'de>;
            fn expecting(&self, out: &mut fmt::Formatter) -> fmt::Result {
                out.write_str("an object")
            }
            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Row<'de>, M::Error> {
                let mut values = Vec::with_capacity(64);
                while let Some(Name(name)) = map.next_key()? {
                    values.push((
                        name,
                        match map.next_value()? {
                            Number::Known(value) => Some(value),
                            Number::Other(_) => None,
                        },
                    ));
                }
                Ok(Row(values))
            }
        }
        from.deserialize_map(Names)
    }
}

/// Name that borrows from the line, unless it has escapes.
#[derive(Deserialize)]
#[serde(transparent)]
struct Name<'a>(#[serde(borrow)] Cow<'a, str>);

/// A number, or anything else, which counts as missing.
#[derive(Deserialize)]
#[serde(untagged)]
enum Number {
    Known(f64),
    Other(IgnoredAny),
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write as _;

    use super::*;

    fn run(text: &str) -> (tempfile::TempDir, Run) {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("metrics.jsonl"), text).unwrap();
        let run = Run { dir: fs::canonicalize(directory.path()).unwrap() };
        (directory, run)
    }

    fn asked(query: &str) -> Asked {
        serde_urlencoded::from_str(query).unwrap()
    }

    #[test]
    fn rows_come_by_column_and_only_what_is_new() {
        let (directory, run) = run(
            "{\"step\":1,\"kl\":0.1,\"step_time\":2,\"num_tokens\":10}\nnull\n[1]\n{\"step\":\"x\"}\n\
             {\"step\":2,\"kl\":null,\"note\":{\"a\":[1]},\"step_time\":3,\"reward\":0.123456789}\n{\"step\":2,\"eval_reward\":1}\n{\"st",
        );
        let all = AllCurves::default();
        let found = all.of(&run, &Asked::default()).unwrap();
        assert_eq!(
            (&found["rows"], &found["done"], &found["seconds"]),
            (&json!(2), &json!(true), &json!(5.0))
        );
        let columns = &found["steps"]["columns"];
        assert_eq!((&found["steps"]["x"], &columns["kl"]), (&json!([1.0, 2.0]), &json!([0.1, null])));
        assert_eq!(columns["reward"].to_string(), "[null,0.123457]", "six digits");
        assert_eq!(columns["derived/tokens_per_second"], json!([5.0, null]));
        assert_eq!(found["steps"]["seconds"], json!([2.0, 5.0]));
        assert_eq!(found["evaluations"]["columns"]["eval_reward"], json!([1.0]));
        let mut log =
            fs::OpenOptions::new().append(true).open(directory.path().join("metrics.jsonl")).unwrap();
        log.write_all(b"ep\":3,\"kl\":0.5}\n").unwrap();
        let found = all.of(&run, &asked("from=2")).unwrap();
        assert_eq!((&found["from"], &found["steps"]["x"]), (&json!(2), &json!([3.0])));
        assert_eq!(found["steps"]["columns"]["kl"], json!([0.5]));
        // The run resumed after step 1.
        log.write_all(b"{\"step\":2,\"kl\":9}\n").unwrap();
        let found = all.of(&run, &asked("from=3")).unwrap();
        assert_eq!((&found["generation"], &found["from"]), (&json!(1), &json!(0)));
        assert_eq!(found["steps"]["columns"]["kl"], json!([0.1, 9.0]));
        // Another file under the same name.
        fs::write(directory.path().join("metrics.jsonl"), "{\"step\":7}\n").unwrap();
        let found = all.of(&run, &asked("generation=1&from=2")).unwrap();
        assert_eq!((&found["generation"], &found["steps"]["x"]), (&json!(2), &json!([7.0])));
    }

    #[test]
    fn a_long_run_keeps_its_spikes_and_a_range_has_every_row() {
        let kl = |step: u32| if step == 2345 { 1000.0 } else { f64::from(step % 2) };
        let text: String =
            (1..=4000).map(|step| format!("{{\"step\":{step},\"kl\":{}}}\n", kl(step))).collect();
        let (_directory, run) = run(&text);
        let all = AllCurves::default();
        let found = all.of(&run, &asked("buckets=300")).unwrap();
        let steps = &found["steps"];
        assert_eq!((&found["thinned"], &steps["width"]), (&json!(true), &json!(16.0)));
        assert_eq!(steps["x"].as_array().unwrap()[..4], [1.0, 8.0, 16.0, 24.0].map(|own| json!(own)));
        let ends = steps["columns"]["kl"]["ends"].as_array().unwrap();
        // Steps 2336 to 2351: first the least, 0, at step 2336, then the spike. The mean is (7 + 1000) / 16.
        assert_eq!(ends[2 * 146..2 * 147], [json!(0.0), json!(1000.0)]);
        assert_eq!(steps["columns"]["kl"]["means"][146], json!(62.9375));
        assert_eq!(ends[..2], [json!(1.0), json!(0.0)], "in the order in which they occur");
        let found = all.of(&run, &asked("low=2344&high=2346")).unwrap();
        assert_eq!(found["steps"]["columns"]["kl"], json!([0.0, 1000.0, 0.0]));
        assert_eq!(found["last"]["kl"], json!(0.0));
    }

    #[test]
    fn a_hostile_file_cannot_grow_the_tables() {
        let mut curves = Curves::default();
        curves.steps.limits = Limits { rows: 3, columns: 4, cells: 9 };
        let row = |step: usize, names: &[&str]| {
            let mut row: Map<String, Value> =
                names.iter().map(|name| ((*name).to_owned(), json!(1))).collect();
            row.insert("step".into(), step.into());
            Value::Object(row).to_string()
        };
        let long = "x".repeat(MAX_NAME_BYTES + 1);
        curves.add(row(1, &["a", "b", &long]).as_bytes());
        let names =
            |curves: &Curves| curves.steps.columns.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
        assert_eq!(names(&curves), ["a", "b"]);
        let is_capped = |curves: &Curves| curves.answer(&Asked::default())["capped"] == json!(true);
        assert!(is_capped(&curves), "a name that is too long");
        curves.add(row(2, &["a", "b", "c", "d", "e"]).as_bytes());
        // Two rows of four columns have eight values, and three rows of four columns would have more than nine.
        assert_eq!(names(&curves), ["a", "b", "c", "d"]);
        curves.add(row(3, &["a"]).as_bytes());
        assert_eq!(curves.steps.steps, [1.0, 2.0]);
        // A row that is written again replaces its predecessor.
        curves.add(row(2, &["b"]).as_bytes());
        assert_eq!(curves.steps.steps, [1.0, 2.0]);
        let mut few = Curves::default();
        few.steps.limits = Limits { rows: 3, columns: 4, cells: 100 };
        (1..4).for_each(|step| few.add(row(step, &["a"]).as_bytes()));
        assert!(!is_capped(&few));
        (4..6).for_each(|step| few.add(row(step, &["a"]).as_bytes()));
        assert!(is_capped(&few));
        assert_eq!((few.steps.steps.len(), few.steps.columns[0].1.len()), (3, 3));
    }

    #[test]
    fn nested_values_are_no_stack() {
        let mut curves = Curves::default();
        curves.add(format!("{{\"step\": 1, \"a\": {}", "[".repeat(1 << 20)).as_bytes());
        curves.add(br#"{"step": 2, "a": {"b": [1]}, "loss": 3}"#);
        assert_eq!(curves.steps.steps, [2.0]);
        assert_eq!(curves.answer(&Asked::default())["last"]["loss"], json!(3.0));
    }
}
