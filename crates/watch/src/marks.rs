//! Events of a run, from `events.jsonl`.

use std::path::Path;

use omnigrpo_observe::{Event, EventRecord, TrainingProblem, names};
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::index::Indices;
use crate::run::Run;

/// Largest number of characters of a text in a response.
const SHOWN_CHARS: usize = 1000;
/// Largest number of events in a response. Earlier events are left out.
const MAX_MARKS: usize = 2000;

/// An event for the page.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Mark {
    /// Name on the page; empty for an event that it does not list.
    kind: &'static str,
    pub(crate) step: u64,
    pub(crate) text: String,
    /// Training problem that begins or ends.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) problem: Option<TrainingProblem>,
    #[serde(skip)]
    time: String,
}

/// Events of all runs.
#[derive(Debug, Default)]
pub(crate) struct Marks(Indices<Mark>);

impl Marks {
    /// Returns the events of a run, in order.
    pub(crate) fn of(&self, run: &Run) -> Result<Vec<Mark>, Error> {
        let events = self.read(run, names::EVENTS, mark)?;
        let mut marks = match events.iter().any(|mark| mark.kind == "start") {
            true => Vec::new(),
            false => self.old(run, events.first().map(|first| first.time.as_str()))?,
        };
        marks.extend(events);
        let surplus = marks.len().saturating_sub(MAX_MARKS);
        Ok(marks.split_off(surplus))
    }

    fn read(&self, run: &Run, name: &str, mark: fn(&[u8]) -> Option<Mark>) -> Result<Vec<Mark>, Error> {
        let path = run.dir.join(Path::new(name));
        if !path.exists() {
            return Ok(Vec::new());
        }
        Ok(self.0.of(run, &path, mark)?.iter().map(|entry| entry.brief.clone()).collect())
    }

    /// Returns the events of a run, or of the part of a run before `until`, that version 0.2.0 has done. It wrote no `events.jsonl`, so
    /// they are found by the first words of their lines in `log.txt`. A line without a step has that of the line before.
    fn old(&self, run: &Run, until: Option<&str>) -> Result<Vec<Mark>, Error> {
        let mut marks = self.read(run, "log.txt", old_line)?;
        marks.retain(|mark| until.is_none_or(|until| mark.time.as_str() < until));
        let mut step = 0;
        for mark in &mut marks {
            if mark.step == UNKNOWN {
                mark.step = step;
            }
            step = mark.step;
        }
        marks.retain(|mark| !mark.text.is_empty());
        marks.extend(self.read(run, names::WARNINGS, old_problem)?);
        Ok(marks)
    }
}

fn mark(line: &[u8]) -> Option<Mark> {
    let EventRecord { step, time, event } = serde_json::from_slice(line).ok()?;
    let kind = match &event {
        Event::Started { .. } => "start",
        Event::Resumed { .. } => "resumption",
        Event::Warning { .. } | Event::Problem(TrainingProblem { begins: true, good: false, .. }) => {
            "warning"
        }
        Event::Checkpoint { .. } => "checkpoint",
        Event::Evaluation { .. } => "evaluation",
        Event::Stopping { .. } | Event::Stopped { .. } | Event::Collapsed { .. } => "stop",
        Event::Failed { .. } => "failure",
        Event::Problem(_) | Event::Finished => "",
    };
    let text = event.line(step).chars().take(SHOWN_CHARS).collect();
    let problem = match event {
        Event::Problem(problem) => Some(problem),
        _ => None,
    };
    Some(Mark { kind, step, text, problem, time })
}

/// Step of a line that names none.
const UNKNOWN: u64 = u64::MAX;

/// Beginnings of the lines of version 0.2.0 that report an event, with its kind.
const OLD_LINES: [(&str, &str); 6] = [
    ("saved ", "checkpoint"),
    ("evaluation at step ", "evaluation"),
    ("resuming from ", "resumption"),
    ("warning: ", "warning"),
    ("stopped after step ", "stop"),
    ("finishing step ", "stop"),
];

/// Returns the event that a line reports, after the time at its beginning. A line that only names a step has no text.
fn old_line(line: &[u8]) -> Option<Mark> {
    let line = String::from_utf8_lossy(line);
    let (time, text) = line.split_once(' ').filter(|(time, _)| time.ends_with('Z'))?;
    let number = |after: &str| -> Option<u64> {
        let rest = &text[text.find(after)? + after.len()..];
        rest[..rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len())].parse().ok()
    };
    let step = number("checkpoint-").filter(|_| text.starts_with("saved "));
    let step = step.or_else(|| number("at step ")).or_else(|| number("step "));
    let (kind, shown) = match OLD_LINES.iter().find(|(start, _)| text.starts_with(start)) {
        Some((_, kind)) => (*kind, SHOWN_CHARS),
        None if text.starts_with("step ") && step.is_some() => ("", 0),
        None => return None,
    };
    let text = text.trim_end().chars().take(shown).collect();
    Some(Mark { kind, step: step.unwrap_or(UNKNOWN), text, problem: None, time: time.to_owned() })
}

/// Returns the problem in a line of `warnings.jsonl`. `log.txt` has its line.
fn old_problem(line: &[u8]) -> Option<Mark> {
    #[derive(Deserialize)]
    struct Row {
        step: u64,
        #[serde(flatten)]
        problem: TrainingProblem,
    }
    let Row { step, problem } = serde_json::from_slice(line).ok()?;
    let text = problem.text.chars().take(SHOWN_CHARS).collect();
    Some(Mark { kind: "", step, text, problem: Some(problem), time: String::new() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(run: &Run) -> Vec<(&'static str, u64)> {
        Marks::default().of(run).unwrap().iter().map(|mark| (mark.kind, mark.step)).collect()
    }

    const OLD: &str = "2026-01-01T00:00:00Z demo of 7 steps\n\
        2026-01-01T00:00:01Z step 10/40 | reward 0.5\n\
        2026-01-01T00:00:01Z warning: the policy ran away\n\
        2026-01-01T00:00:02Z saved runs/x/checkpoint-20\n\
        2026-01-01T00:00:03Z evaluation at step 21: reward 0.5\n\
        2026-01-01T00:00:04Z resuming from runs/x/checkpoint-20 at step 20 of 40\n";
    const PROBLEM: &str = "{\"step\":9,\"rule\":\"ran_away\",\"begins\":true,\"since\":5,\"text\":\"x\"}\n";

    #[test]
    fn events_have_their_step_and_their_line() {
        let directory = tempfile::tempdir().unwrap();
        let run = Run { dir: std::fs::canonicalize(directory.path()).unwrap() };
        assert_eq!(told(&run), []);
        let console = omnigrpo_observe::Console::plain(std::io::sink());
        console.warning("before the start");
        console.record_to(&run.dir.join(names::EVENTS), 0).unwrap();
        console.event(Some(0), &Event::Started { num_steps: 40 });
        console.event(Some(20), &Event::Checkpoint { path: "runs/x/checkpoint-20".into() });
        console.warning("after the checkpoint");
        let problem = |begins| TrainingProblem {
            rule: "r".into(),
            begins,
            since: 3,
            text: "t".into(),
            ..TrainingProblem::default()
        };
        console.event(Some(21), &Event::Problem(problem(true)));
        console.event(Some(30), &Event::Problem(problem(false)));
        console.event(Some(31), &Event::evaluation(&[("eval_reward".into(), Some(0.5)), ("x".into(), None)]));
        console.event(Some(31), &Event::Stopped { why: None });
        // The log is of an earlier run in the same directory.
        std::fs::write(run.dir.join("log.txt"), OLD).unwrap();
        let expected = [
            ("warning", 0),
            ("start", 0),
            ("checkpoint", 20),
            ("warning", 20),
            ("warning", 21),
            ("", 30),
            ("evaluation", 31),
            ("stop", 31),
        ];
        assert_eq!(told(&run), expected);
        let marks = Marks::default().of(&run).unwrap();
        let text = |back: usize| marks[marks.len() - back].text.as_str();
        assert_eq!((text(6), text(2)), ("saved runs/x/checkpoint-20", "evaluation at step 31: reward 0.500"));
        assert_eq!(marks[marks.len() - 4].problem, Some(problem(true)));
    }

    #[test]
    fn runs_of_older_programs_are_read_from_their_log() {
        let directory = tempfile::tempdir().unwrap();
        let run = Run { dir: std::fs::canonicalize(directory.path()).unwrap() };
        std::fs::write(run.dir.join("log.txt"), OLD).unwrap();
        std::fs::write(run.dir.join(names::WARNINGS), PROBLEM).unwrap();
        let old = [("warning", 10), ("checkpoint", 20), ("evaluation", 21), ("resumption", 20), ("", 9)];
        assert_eq!(told(&run), old);
        // The run continues with a program that records events, and logs them too.
        let event = "{\"step\":20,\"time\":\"2026-01-01T00:00:04Z\",\"kind\":\"resumed\",\"checkpoint\":\"c\",\"num_steps\":40}\n";
        std::fs::write(run.dir.join(names::EVENTS), event).unwrap();
        let both = [("warning", 10), ("checkpoint", 20), ("evaluation", 21), ("", 9), ("resumption", 20)];
        assert_eq!(told(&run), both);
    }
}
