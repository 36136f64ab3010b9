//! Summary of runs in a few lines of text, for a terminal.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::time::Duration;

use omnigrpo_observe::{Latest, latest_table, summary_line};
use serde_json::{Map, Value};

use crate::Error;
use crate::run::Run;

/// Number of recent steps whose mean duration estimates the remaining time.
const RECENT_STEPS: usize = 20;

/// Runs and their latest metrics. Each update reads only the new rows.
#[derive(Debug)]
pub struct Board {
    runs: Vec<Shown>,
}

#[derive(Debug)]
struct Shown {
    name: String,
    run: Run,
    total: Option<u64>,
    file: u64,
    next: u64,
    /// Last step that was read.
    step: u64,
    /// Durations of the recent steps, in seconds.
    recent: VecDeque<f64>,
    latest: Latest,
}

impl Board {
    /// Opens the runs found in `directories`.
    ///
    /// # Errors
    /// Returns an error if a directory contains no run.
    pub fn open(directories: &[PathBuf]) -> Result<Self, Error> {
        let runs = Run::find(directories)?;
        let names = Run::names(&runs);
        let shown = |(run, name): (Run, String)| {
            let settings = run.settings();
            let total = settings.iter().find(|setting| setting.name == "max_steps");
            let total = total.and_then(|setting| setting.value.parse().ok());
            Shown {
                name,
                run,
                total,
                file: 0,
                next: 0,
                step: 0,
                recent: VecDeque::new(),
                latest: Latest::default(),
            }
        };
        Ok(Self { runs: runs.into_iter().zip(names).map(shown).collect() })
    }

    /// Reads the new rows and returns one line for each run with a new step since the last call.
    ///
    /// # Errors
    /// Returns an error if the metrics cannot be read.
    pub fn look(&mut self) -> Result<Vec<String>, Error> {
        let mut lines = Vec::new();
        let several = self.runs.len() > 1;
        for shown in &mut self.runs {
            if shown.read()? {
                let total = shown.total.unwrap_or(shown.step);
                let line = summary_line(shown.step, total, shown.latest.metrics(), shown.left());
                lines.push(if several { format!("{}: {line}", shown.name) } else { line });
            }
        }
        Ok(lines)
    }

    /// Formats a table of at most `width` columns, with one row per run.
    #[must_use]
    pub fn table(&self, width: usize) -> String {
        let row = |shown: &Shown| {
            let total = shown.total.map_or(String::new(), |total| format!("/{total}"));
            let left = shown.left().map_or("-".to_owned(), omnigrpo_observe::span);
            vec![shown.name.clone(), format!("{}{total}", shown.step), left]
        };
        let rows: Vec<_> = self.runs.iter().map(|shown| (row(shown), &shown.latest)).collect();
        latest_table(&["run", "step", "left"], &rows, width)
    }
}

impl Shown {
    /// Reads the new rows. Returns true if there is a new step.
    fn read(&mut self) -> Result<bool, Error> {
        let mut news = false;
        let now = self.run.metrics_now();
        if now.id != self.file || now.bytes < self.next {
            // The file has been replaced, so everything read before is invalid.
            (self.file, self.next, self.step) = (now.id, 0, 0);
            (self.recent, self.latest) = (VecDeque::new(), Latest::default());
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
                self.step = step;
                self.recent.push_back(row.get("step_time").and_then(Value::as_f64).unwrap_or(0.0));
                self.recent.drain(..self.recent.len().saturating_sub(RECENT_STEPS));
                self.latest.add(row.iter().map(|(name, value)| (name.clone(), value.as_f64())).collect());
                news = true;
            }
        }
    }

    /// Estimates the remaining time from the mean duration of the recent steps.
    fn left(&self) -> Option<Duration> {
        let left = self.total?.checked_sub(self.step).filter(|&left| left > 0)?;
        let mean = self.recent.iter().sum::<f64>() / self.recent.len() as f64;
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
            ["two", "4/8", "8", "s", "0.400", "▁▃▆█", "0.0100", "7.5", "2.00"]
        );
        // A resumed run replaces the file.
        let path = directory.path().join("two/metrics.jsonl");
        std::fs::write(path.with_extension("new"), [1, 2].map(row).concat()).unwrap();
        std::fs::rename(path.with_extension("new"), &path).unwrap();
        assert!(board.look().unwrap()[0].starts_with("two: step 2/8 | reward 0.200"));
    }
}
