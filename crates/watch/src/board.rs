//! Runs in a few lines of text, for a terminal.

use std::path::PathBuf;
use std::time::Duration;

use omnigrpo_observe::{Metric, columns, sparkline, summary_line};
use serde_json::{Map, Value};

use crate::Error;
use crate::run::Run;

/// Steps that the curve of the reward covers.
const COURSE_STEPS: usize = 400;
/// Characters of that curve.
const COURSE_COLUMNS: usize = 14;
/// Steps whose mean length says how long the rest takes.
const RECENT_STEPS: usize = 20;

/// Runs and what their metrics said last. Only what is new is read.
#[derive(Debug)]
pub struct Board {
    runs: Vec<Shown>,
}

#[derive(Debug)]
struct Shown {
    run: Run,
    total: Option<u64>,
    file: u64,
    next: u64,
    /// Of each step, its number, reward and seconds; the last ones.
    steps: Vec<(u64, Option<f64>, f64)>,
    last: Vec<Metric>,
}

impl Board {
    /// The runs that directories hold.
    ///
    /// # Errors
    /// A directory without a run.
    pub fn open(directories: &[PathBuf]) -> Result<Self, Error> {
        let shown = |run: Run| {
            let settings = run.settings();
            let total = settings.iter().find(|setting| setting.name == "max_steps");
            let total = total.and_then(|setting| setting.value.parse().ok());
            Shown { run, total, file: 0, next: 0, steps: Vec::new(), last: Vec::new() }
        };
        Ok(Self { runs: Run::find(directories)?.into_iter().map(shown).collect() })
    }

    /// Reads what is new, and gives a line for each run that has taken a step since the last time.
    ///
    /// # Errors
    /// Metrics that cannot be read.
    pub fn look(&mut self) -> Result<Vec<String>, Error> {
        let mut lines = Vec::new();
        let several = self.runs.len() > 1;
        for shown in &mut self.runs {
            if shown.read()? {
                let step = shown.steps.last().map_or(0, |step| step.0);
                let line = summary_line(step, shown.total.unwrap_or(step), &shown.last, shown.left());
                lines.push(if several { format!("{}: {line}", shown.run.name) } else { line });
            }
        }
        Ok(lines)
    }

    /// A row per run, in at most `width` columns.
    #[must_use]
    pub fn table(&self, width: usize) -> String {
        let header = ["run", "step", "reward", "course", "kl", "length", "s/step", "left"];
        let row = |shown: &Shown| {
            let last =
                |name: &str| shown.last.iter().find(|(own, _)| own == name).and_then(|(_, value)| *value);
            let number =
                |value: Option<f64>, digits| value.map_or("-".to_owned(), |v| format!("{v:.digits$}"));
            let step = shown.steps.last().map_or(0, |step| step.0);
            let total = shown.total.map_or(String::new(), |total| format!("/{total}"));
            let rewards: Vec<f64> = shown.steps.iter().map(|step| step.1.unwrap_or(f64::NAN)).collect();
            vec![
                shown.run.name.clone(),
                format!("{step}{total}"),
                number(last("reward"), 3),
                sparkline(&rewards, COURSE_COLUMNS),
                number(last("kl"), 4),
                number(last("completions/mean_length"), 1),
                number(last("step_time"), 2),
                shown.left().map_or("-".to_owned(), omnigrpo_observe::span),
            ]
        };
        columns(&header, &self.runs.iter().map(row).collect::<Vec<_>>(), width)
    }
}

impl Shown {
    /// True if there is another step.
    fn read(&mut self) -> Result<bool, Error> {
        let mut news = false;
        let now = self.run.metrics_now();
        if now.id != self.file || now.bytes < self.next {
            // Another file: what was read of the one before is void.
            (self.file, self.next) = (now.id, 0);
            self.steps.clear();
        }
        loop {
            let slice = self.run.metrics(self.next)?;
            if slice.rows.is_empty() {
                return Ok(news);
            }
            self.next = slice.next;
            for line in slice.rows.split(|&byte| byte == b'\n') {
                let Ok(row) = serde_json::from_slice::<Map<String, Value>>(line) else { continue };
                let Some(step) = row.get("step").and_then(Value::as_u64) else { continue };
                if row.keys().any(|name| name.starts_with("eval_")) {
                    continue;
                }
                let number = |name: &str| row.get(name).and_then(Value::as_f64);
                self.steps.push((step, number("reward"), number("step_time").unwrap_or(0.0)));
                self.last = row.iter().map(|(name, value)| (name.clone(), value.as_f64())).collect();
                news = true;
            }
            let surplus = self.steps.len().saturating_sub(COURSE_STEPS);
            self.steps.drain(..surplus);
        }
    }

    /// How long the rest takes, by the mean of the last steps.
    fn left(&self) -> Option<Duration> {
        let recent = &self.steps[self.steps.len().saturating_sub(RECENT_STEPS)..];
        let left = self.total?.checked_sub(recent.last()?.0).filter(|&left| left > 0)?;
        let mean = recent.iter().map(|step| step.2).sum::<f64>() / recent.len() as f64;
        Duration::try_from_secs_f64(mean * left as f64).ok()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn runs_are_rows_that_fit_and_news_are_lines() {
        let directory = tempfile::tempdir().unwrap();
        let row = |step: u32| {
            format!(
                "{{\"step\":{step},\"reward\":0.{step},\"kl\":0.01,\"completions/mean_length\":7.5,\"step_time\":2.0}}\n"
            )
        };
        for name in ["one", "two"] {
            let dir = directory.path().join(name);
            std::fs::create_dir(&dir).unwrap();
            std::fs::write(dir.join("metrics.jsonl"), [1, 2, 3].map(row).concat()).unwrap();
            std::fs::write(dir.join("config.yaml"), "max_steps: 8   # flag\n").unwrap();
        }
        let mut board = Board::open(&[directory.path().to_owned()]).unwrap();
        let line = "step 3/8 | reward 0.300 | kl 0.0100 | length 7.5 | 2.00 s | eta 10 s";
        assert_eq!(board.look().unwrap(), [format!("one: {line}"), format!("two: {line}")]);
        assert!(board.look().unwrap().is_empty());
        let log = std::fs::OpenOptions::new().append(true).open(directory.path().join("two/metrics.jsonl"));
        log.unwrap().write_all(row(4).as_bytes()).unwrap();
        assert_eq!(
            board.look().unwrap(),
            ["two: step 4/8 | reward 0.400 | kl 0.0100 | length 7.5 | 2.00 s | eta 8 s"]
        );
        let table = board.table(80);
        assert!(
            table.lines().count() == 3 && table.lines().all(|line| line.chars().count() <= 80),
            "{table}"
        );
        assert_eq!(
            table.lines().nth(2).unwrap().split_whitespace().collect::<Vec<_>>(),
            ["two", "4/8", "0.400", "▁▃▆█", "0.0100", "7.5", "2.00", "8", "s"]
        );
        // A run that goes on from a checkpoint replaces the file.
        let path = directory.path().join("two/metrics.jsonl");
        std::fs::write(path.with_extension("new"), [1, 2].map(row).concat()).unwrap();
        std::fs::rename(path.with_extension("new"), &path).unwrap();
        assert!(board.look().unwrap()[0].starts_with("two: step 2/8 | reward 0.200"));
    }
}
