//! Summary of runs for a terminal: lines for a pipe, and the text of a screen with a view of one run below the table of all.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::time::Duration;

use omnigrpo_observe::{
    Latest, Metric, RunLock, best_and_worst, columns, escape, evaluation_line, fit, is_headline,
    latest_table, span, summary_line, wrap,
};
use serde_json::{Map, Value};

use crate::Error;
use crate::marks::Marks;
use crate::rollouts::Records;
use crate::run::Run;

/// Number of recent steps whose mean duration estimates the remaining time.
const RECENT_STEPS: usize = 20;
/// Number of evaluations in the table: the first one and the last ones.
const EVALUATIONS: usize = 20;

/// Runs and their latest metrics. Each update reads only the new rows.
#[derive(Debug)]
pub struct Board {
    runs: Vec<Shown>,
    records: Records,
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
    /// Step and numbers of each evaluation.
    evaluations: Vec<(u64, Vec<Metric>)>,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Running,
    /// The trained model is written.
    Done,
    /// The run ended before its last step.
    Stopped,
}

/// Part of a run that the screen shows below the table of all runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum View {
    #[default]
    Rewards,
    Evaluations,
    Completions,
    Problems,
}

impl View {
    pub(crate) const ALL: [(Self, &str); 4] = [
        (Self::Rewards, "rewards"),
        (Self::Evaluations, "evaluations"),
        (Self::Completions, "completions"),
        (Self::Problems, "problems"),
    ];
}

/// Selection of the user.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Selection {
    /// Index of the run.
    pub(crate) run: usize,
    pub(crate) view: View,
    /// Number of steps before the last one with completions.
    pub(crate) steps_back: usize,
    /// Index of the prompt within its step.
    pub(crate) prompt: usize,
    /// Number of hidden lines at the top of the view.
    pub(crate) scroll: usize,
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
                evaluations: Vec::new(),
                state: State::Running,
            }
        };
        let runs = runs.into_iter().zip(names).map(shown).collect();
        Ok(Self { runs, records: Records::default() })
    }

    /// Reads the new rows. Returns one line for each run with a new step since the last call, one for each new evaluation, and one
    /// for each run that has ended since then.
    ///
    /// # Errors
    /// Returns an error if the metrics cannot be read.
    pub fn look(&mut self) -> Result<Vec<String>, Error> {
        let mut lines = Vec::new();
        let several = self.runs.len() > 1;
        for shown in &mut self.runs {
            let name = several.then(|| shown.name.clone());
            let mut say = |line: String| {
                lines.push(name.as_ref().map_or_else(|| line.clone(), |name| format!("{name}: {line}")));
            };
            // The state is read first, so that the rows of a run that has ended are complete.
            let state = shown.state_now();
            let evaluated = shown.evaluations.len();
            let has_news = shown.read()?;
            let (before, after): (Vec<_>, Vec<_>) =
                shown.evaluations.iter().skip(evaluated).partition(|(step, _)| *step < shown.step);
            before.into_iter().for_each(|(step, metrics)| say(evaluation_line(*step, metrics)));
            if has_news {
                let total = shown.total.unwrap_or(shown.step);
                say(summary_line(shown.step, total, shown.latest.metrics(), shown.left()));
            }
            after.into_iter().for_each(|(step, metrics)| say(evaluation_line(*step, metrics)));
            let ended = state != State::Running && shown.state == State::Running;
            shown.state = state;
            if ended {
                say(shown.ending());
            }
        }
        Ok(lines)
    }

    /// Returns true if every run has ended.
    pub fn is_over(&self) -> bool {
        self.runs.iter().all(|shown| shown.state != State::Running)
    }

    /// Returns the number of runs.
    pub(crate) fn len(&self) -> usize {
        self.runs.len()
    }

    /// Formats a screen of at most `width` columns: the runs in at most a third of the `height`, then the selected view. The
    /// selection is limited to what exists.
    pub(crate) fn screen(&self, chosen: &mut Selection, width: usize, height: usize) -> Vec<String> {
        // The views need the room that columns below the first ones would take.
        let table = self.table(chosen.run, width, height / 3);
        let mut lines: Vec<String> =
            table.lines().take_while(|line| !line.is_empty()).map(str::to_owned).collect();
        let titles =
            View::ALL.map(
                |(view, title)| if view == chosen.view { format!("[{title}]") } else { format!(" {title} ") },
            );
        lines.extend([String::new(), titles.join(" ").trim_end().to_owned(), String::new()]);
        let body = self.view(chosen, width).unwrap_or_else(|error| error.to_string());
        let body = wrap(&body, width);
        let body: Vec<&str> = body.lines().collect();
        let room = height.saturating_sub(lines.len()).max(1);
        chosen.scroll = chosen.scroll.min(body.len().saturating_sub(room));
        lines.extend(body.iter().skip(chosen.scroll).take(room).map(|line| (*line).to_owned()));
        lines
    }

    /// Formats the table of runs. At most `most` runs around the selected one are shown.
    fn table(&self, chosen: usize, width: usize, most: usize) -> String {
        let row = |(at, shown): (usize, &Shown)| {
            let total = shown.total.map_or(String::new(), |total| format!("/{total}"));
            let left = match shown.state {
                State::Running => shown.left().map_or("-".to_owned(), span),
                State::Done => "done".to_owned(),
                State::Stopped => "stopped".to_owned(),
            };
            let mark = match self.runs.len() {
                1 => "",
                _ if at == chosen => "> ",
                _ => "  ",
            };
            vec![
                format!("{mark}{}", fit(&shown.name, (width / 3).max(12))),
                format!("{}{total}", shown.step),
                left,
            ]
        };
        let most = most.max(1);
        let first = chosen.saturating_sub(most / 2).min(self.runs.len().saturating_sub(most));
        let part = || self.runs.iter().enumerate().skip(first).take(most);
        let rows: Vec<_> = part().map(|(at, shown)| (row((at, shown)), &shown.latest)).collect();
        latest_table(&["run", "step", "left"], &rows, width)
    }

    fn view(&self, chosen: &mut Selection, width: usize) -> Result<String, Error> {
        let Some(shown) = self.runs.get(chosen.run) else { return Ok(String::new()) };
        let (text, without) = match chosen.view {
            View::Rewards => (shown.latest.rewards_table(width), "no step is done yet"),
            View::Evaluations => (shown.evaluations_table(width), "no evaluation is done yet"),
            View::Completions => (self.completions(shown, chosen, width)?, "no completions are recorded yet"),
            View::Problems => (shown.problems()?, "no training problem has occurred"),
        };
        Ok(if text.is_empty() { without.to_owned() } else { text })
    }

    /// Formats the best and the worst completion of a prompt. The prompts are ordered by the spread of their rewards.
    fn completions(&self, shown: &Shown, chosen: &mut Selection, width: usize) -> Result<String, Error> {
        let steps = shown.run.steps("rollouts")?;
        chosen.steps_back = chosen.steps_back.min(steps.len().saturating_sub(1));
        let Some(&step) = steps.iter().rev().nth(chosen.steps_back) else { return Ok(String::new()) };
        let prompts = self.records.prompts(&shown.run, step)?;
        chosen.prompt = chosen.prompt.min(prompts.len().saturating_sub(1));
        let Some((group, question)) = prompts.get(chosen.prompt) else { return Ok(String::new()) };
        let group = self.records.group_records(&shown.run, step, *group)?;
        let mut text = format!(
            "step {step}, prompt {} of {}, {} completions\n",
            chosen.prompt + 1,
            prompts.len(),
            group.len()
        );
        for line in best_and_worst(question, &group, usize::MAX) {
            text.push_str(&format!("\n{}\n", wrap(&line, width)));
        }
        Ok(text)
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
            self.evaluations.clear();
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
                let metrics = row.iter().map(|(name, value)| (name.clone(), value.as_f64()));
                if row.keys().any(|name| name.starts_with("eval_")) {
                    self.evaluations.push((step, metrics.filter(|(name, _)| is_headline(name)).collect()));
                    continue;
                }
                self.step = step;
                self.recent.push_back(row.get("step_time").and_then(Value::as_f64).unwrap_or(0.0));
                self.recent.drain(..self.recent.len().saturating_sub(RECENT_STEPS));
                self.latest.add(metrics.collect());
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

    /// Returns the current state. A run holds the lock of its directory until it ends.
    fn state_now(&self) -> State {
        let is_done = self.run.metrics_now().done;
        match RunLock::is_held(&self.run.dir) {
            Some(true) => State::Running,
            None if !is_done => State::Running,
            _ if is_done => State::Done,
            _ => State::Stopped,
        }
    }

    fn ending(&self) -> String {
        let total = self.total.map_or(String::new(), |total| format!(" of {total}"));
        match self.state {
            State::Done => format!("the run is done after step {}", self.step),
            _ => format!("the run stopped after step {}{total}", self.step),
        }
    }

    /// Formats the evaluations: the first one and the last ones, one per row.
    fn evaluations_table(&self, width: usize) -> String {
        let Some((_, last)) = self.evaluations.last() else { return String::new() };
        let names: Vec<&str> = last.iter().map(|(name, _)| name.as_str()).collect();
        let header: Vec<&str> = std::iter::once("step")
            .chain(names.iter().map(|name| name.trim_start_matches("eval_")))
            .collect();
        let row = |(step, metrics): &(u64, Vec<Metric>)| {
            let value =
                |name: &&str| metrics.iter().find(|(own, _)| own == name).and_then(|(_, value)| *value);
            let cells = names.iter().map(|name| value(name).map_or("-".to_owned(), |v| format!("{v:.3}")));
            std::iter::once(step.to_string()).chain(cells).collect()
        };
        let skipped = self.evaluations.len().saturating_sub(EVALUATIONS).max(1);
        let rows: Vec<Vec<String>> =
            self.evaluations.iter().take(1).chain(self.evaluations.iter().skip(skipped)).map(row).collect();
        columns(&header, &rows, width)
    }

    /// Formats the begin and the end of each training problem.
    fn problems(&self) -> Result<String, Error> {
        let marks = Marks::default().of(&self.run)?;
        let each = marks.iter().filter_map(|mark| Some((mark.step, &mark.problem.as_ref()?.text)));
        Ok(each.map(|(step, text)| format!("step {step}: {}\n", escape(text))).collect())
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
        let mut locks = Vec::new();
        for name in ["one", "two"] {
            let dir = directory.path().join(name);
            locks.push(RunLock::acquire(&dir, "process 1").unwrap());
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
        let table = board.table(9, 80, 24);
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

    #[test]
    fn a_run_is_over_when_nobody_holds_its_lock() {
        let directory = tempfile::tempdir().unwrap();
        let lock = RunLock::acquire(directory.path(), "process 1").unwrap();
        let metrics = concat!(
            "{\"step\":0,\"eval_rows\":3,\"eval_reward\":0.25,\"eval_accuracy\":0.5,\"eval_accuracy_reward\":0.5}\n",
            "{\"step\":1,\"reward\":0.5}\n",
        );
        std::fs::write(directory.path().join("metrics.jsonl"), metrics).unwrap();
        std::fs::write(directory.path().join("config.yaml"), "max_steps: 2   # flag\n").unwrap();
        let mut board = Board::open(&[directory.path().to_owned()]).unwrap();
        let lines =
            ["evaluation at step 0: reward 0.250 | accuracy 0.500", "step 1/2 | reward 0.500 | eta 0 s"];
        assert_eq!(board.look().unwrap(), lines);
        assert!(!board.is_over());
        drop(lock);
        assert_eq!(board.look().unwrap(), ["the run stopped after step 1 of 2"]);
        assert!(board.is_over() && board.look().unwrap().is_empty());
        let table = board.table(0, 80, 9);
        assert!(table.contains("1/2  stopped"), "{table}");
        // The card is written with the model.
        std::fs::write(directory.path().join("README.md"), "").unwrap();
        let mut board = Board::open(&[directory.path().to_owned()]).unwrap();
        assert_eq!(board.look().unwrap()[2], "the run is done after step 1");
    }

    #[test]
    fn few_runs_around_the_selected_one_are_shown() {
        let directory = tempfile::tempdir().unwrap();
        for name in ["a", "b", "c", "d", "e"] {
            std::fs::create_dir(directory.path().join(name)).unwrap();
            std::fs::write(directory.path().join(name).join("metrics.jsonl"), "{\"step\":1,\"loss\":1.0}\n")
                .unwrap();
        }
        let mut board = Board::open(&[directory.path().to_owned()]).unwrap();
        board.look().unwrap();
        let names = |chosen| -> Vec<String> {
            let table = board.table(chosen, 60, 3);
            table.lines().skip(1).map(|line| line[..3].trim().to_owned()).collect()
        };
        assert_eq!(names(0), ["> a", "b", "c"]);
        assert_eq!(names(2), ["b", "> c", "d"]);
        assert_eq!(names(4), ["c", "d", "> e"]);
    }
}
