//! Table of runs: a line for each run, from both ends of its files. A long run costs no more than a short one.
//!
//! A line has the same results and the same problems as the [verdict](crate::verdict). The verdict itself reads every step, so the page
//! asks for it when a line is opened.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use omnigrpo_observe::{RunLock, TrainingProblem, names};
use serde::Serialize;

use crate::Error;
use crate::course::{Course, Happened};
use crate::run::{Metrics, Run};
use crate::stamp::Stamp;
use crate::verdict::{Judged, Kind, Measure, Measured};

/// State of the files from which a line is computed. The same state gives the same line.
type Seen = (Metrics, Option<bool>, Option<Stamp>);

/// Lines of all runs.
#[derive(Debug, Default)]
pub(crate) struct Table(Mutex<HashMap<PathBuf, (Seen, Line)>>);

/// Line of a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Line {
    kind: Kind,
    state: &'static str,
    /// Last step that is complete.
    step: u64,
    num_steps: Option<u64>,
    measure: Option<Measure>,
    /// True if the results are shares of the rows.
    is_share: bool,
    before: Option<Measured>,
    after: Option<Measured>,
    /// Time for which the run has run, in seconds, without the pauses before it resumed.
    seconds: f64,
    /// Problems that last.
    problems: Vec<TrainingProblem>,
    /// Message of a run that cannot be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

impl Table {
    /// Returns the line of each run, in order. A run that cannot be read has a line that says so.
    pub(crate) fn of(&self, runs: &[Run]) -> Vec<Line> {
        runs.iter().map(|run| self.line(run)).collect()
    }

    fn line(&self, run: &Run) -> Line {
        let stamp = std::fs::metadata(run.dir.join(names::EVALUATIONS)).ok().map(|meta| Stamp::of(&meta));
        // The age alone changes nothing but the time of a run that goes on, which changes with its next step.
        let metrics = Metrics { age_secs: 0, ..run.metrics_now() };
        let seen = (metrics, RunLock::is_held(&run.dir), stamp);
        let known = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, line)) = known().get(&run.dir).filter(|(own, _)| *own == seen) {
            return line.clone();
        }
        let line = Line::of(run).unwrap_or_else(|error| Line::unreadable(&error));
        known().insert(run.dir.clone(), (seen, line.clone()));
        line
    }
}

impl Line {
    fn of(run: &Run) -> Result<Self, Error> {
        let happened = Happened::of(run)?;
        let course = Course::ends(run)?;
        let judged = Judged { run, course: &course, happened: &happened };
        let judgement = judged.judgement();
        let results = judgement.results.as_ref();
        Ok(Self {
            kind: judgement.kind,
            state: judged.state(),
            step: course.step,
            num_steps: happened.num_steps,
            measure: results.map(|own| own.measure),
            is_share: results.is_some_and(|own| own.is_share),
            before: results.map(|own| own.before),
            after: results.map(|own| own.after),
            seconds: happened.seconds(run),
            problems: happened.lasting.clone(),
            error: None,
        })
    }

    fn unreadable(error: &Error) -> Self {
        Self {
            kind: Kind::TooEarly,
            state: "unreadable",
            step: 0,
            num_steps: None,
            measure: None,
            is_share: false,
            before: None,
            after: None,
            seconds: 0.0,
            problems: Vec::new(),
            error: Some(omnigrpo_guard::told(error).to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::{Value, json};

    use super::*;
    use crate::verdict::verdict;

    /// Writes a run of `steps` steps whose rewards follow `reward`, with events and, for each of `evaluations`, its step and result.
    fn written(
        steps: u64,
        reward: impl Fn(u64) -> f64,
        evaluations: &[(u64, f64)],
        events: &[Value],
    ) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        fs::create_dir_all(root.join("eval")).unwrap();
        let mut metrics = String::new();
        for step in 0..=steps {
            if step > 0 {
                let row = json!({ "step": step, "reward": reward(step), "rewards/own/mean": 0.5 });
                metrics += &format!("{row}\n");
            }
            for (_, own) in evaluations.iter().filter(|own| own.0 == step) {
                metrics += &format!("{}\n", json!({ "step": step, "eval_rows": 100, "eval_reward": own }));
                let summary = json!({
                    "eval_rows": 100, "eval_reward": own, "reward_is_share": true,
                    "reward_interval": [own - 0.05, own + 0.05],
                });
                let name = |end: &str| root.join(format!("eval/step-{step:06}{end}"));
                fs::write(name(".summary.json"), summary.to_string()).unwrap();
                fs::write(name(".jsonl"), "{}\n").unwrap();
            }
        }
        fs::write(root.join("metrics.jsonl"), metrics).unwrap();
        let events: String = events.iter().map(|event| format!("{event}\n")).collect();
        fs::write(root.join("events.jsonl"), events).unwrap();
        directory
    }

    fn line(directory: &tempfile::TempDir) -> (Line, Value) {
        let run = Run { dir: fs::canonicalize(directory.path()).unwrap() };
        let whole = json!(verdict(&run.dir).unwrap());
        (Table::default().of(std::slice::from_ref(&run)).remove(0), whole)
    }

    #[test]
    fn a_line_has_the_results_of_the_verdict_whatever_the_length() {
        let noise = |step: u64| (step as f64 * 12.9898).sin() / 20.0;
        for steps in [9, 10, 25, 59, 60, 61, 79, 80, 81, 200, 5000] {
            for evaluations in [vec![], vec![(0, 0.2), (5, 0.4)], vec![(2, 0.2), (4, 0.9), (steps / 2, 0.4)]]
            {
                let directory = written(steps, |step| step as f64 / 5000.0 + noise(step), &evaluations, &[]);
                let (line, whole) = line(&directory);
                let own = json!(line);
                for name in ["measure", "before", "after", "step", "state"] {
                    assert_eq!(own[name], whole[name], "{name} of {steps} steps with {evaluations:?}");
                }
                assert_eq!(line.is_share, !evaluations.is_empty());
            }
        }
    }

    #[test]
    fn the_time_of_a_run_leaves_out_its_pauses_and_problems_stay() {
        let at = |time: &str, step: u64, rest: Value| {
            let mut event = json!({ "step": step, "time": format!("2026-01-02T{time}Z") });
            event.as_object_mut().unwrap().extend(rest.as_object().unwrap().clone());
            event
        };
        let problem = json!({ "kind": "problem", "rule": "flat", "begins": true, "since": 1, "text": "x", "title": "t" });
        let events = [
            at("03:00:00", 0, json!({ "kind": "started", "num_steps": 50 })),
            at("03:10:00", 10, json!({ "kind": "stopped" })),
            // A pause of twelve hours.
            at("15:00:00", 10, json!({ "kind": "resumed", "checkpoint": "c", "num_steps": 50 })),
            at("15:05:00", 40, problem),
            at("15:30:00", 50, json!({ "kind": "finished" })),
        ];
        let (line, whole) = line(&written(50, |_| 0.25, &[], &events));
        assert_eq!((line.seconds, line.state, line.num_steps), (2400.0, "finished", Some(50)));
        assert_eq!(line.problems[0].title, "t");
        assert_eq!((json!(line.kind), &whole["problems"]), (whole["kind"].clone(), &json!(["flat"])));
    }

    #[test]
    fn a_line_is_computed_again_when_its_run_goes_on() {
        let directory = written(30, |_| 0.5, &[], &[]);
        let run = Run { dir: fs::canonicalize(directory.path()).unwrap() };
        let table = Table::default();
        assert_eq!(table.of(std::slice::from_ref(&run))[0].step, 30);
        let log = fs::OpenOptions::new().append(true).open(run.dir.join("metrics.jsonl"));
        std::io::Write::write_all(&mut log.unwrap(), b"{\"step\":31,\"reward\":1}\n{\"step\":32,").unwrap();
        assert_eq!(table.of(std::slice::from_ref(&run))[0].step, 31);
        fs::write(run.dir.join("events.jsonl"), "{\"step\":0,\"time\":\"x\",\"kind\":\"finished\"}\n")
            .unwrap();
        assert_eq!(table.of(std::slice::from_ref(&run))[0].state, "finished");
        fs::remove_file(run.dir.join("metrics.jsonl")).unwrap();
        assert_eq!(table.of(std::slice::from_ref(&run))[0].step, 0);
    }
}
