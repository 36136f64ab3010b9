//! Events of a run with the line of `log.txt` that reports each of them.

use serde_json::{Value, json};

use crate::Error;
use crate::index::Indices;
use crate::run::Run;

/// Largest number of characters of a line in a response.
const SHOWN_CHARS: usize = 400;
/// Largest number of events in a response. Earlier events are left out.
const MAX_MARKS: usize = 2000;

/// Beginnings of the lines that report an event, with its kind.
const KINDS: [(&str, &str); 6] = [
    ("saved ", "checkpoint"),
    ("evaluation at step ", "evaluation"),
    ("resuming from ", "resumption"),
    ("warning: ", "warning"),
    ("stopped after step ", "stop"),
    ("finishing step ", "stop"),
];

#[derive(Clone, Debug, PartialEq, Eq)]
struct Mark {
    kind: &'static str,
    /// Step of the event; `None` if the line does not name it.
    step: Option<u64>,
    text: String,
}

/// Events of all runs.
#[derive(Debug, Default)]
pub(crate) struct Marks(Indices<Mark>);

impl Marks {
    /// Returns the events of a run, in the order of the log. An event whose line names no step gets that of the line before.
    pub(crate) fn of(&self, run: &Run) -> Result<Value, Error> {
        let path = run.dir.join("log.txt");
        if !path.exists() {
            return Ok(json!([]));
        }
        let found = self.0.of(run, &path, |line| mark(&String::from_utf8_lossy(line)))?;
        let mut step = 0;
        let mut marks = Vec::new();
        for entry in found.iter() {
            step = entry.brief.step.unwrap_or(step);
            if entry.brief.kind != "step" {
                marks.push(json!({ "kind": entry.brief.kind, "step": step, "text": entry.brief.text }));
            }
        }
        let surplus = marks.len().saturating_sub(MAX_MARKS);
        Ok(Value::Array(marks.split_off(surplus)))
    }
}

/// Returns the event that a line reports, after the time at its beginning. A line that only tells the step is kept as the kind `step`.
fn mark(line: &str) -> Option<Mark> {
    let (time, rest) = line.split_once(' ')?;
    let text = if time.ends_with('Z') { rest.trim_end() } else { line.trim_end() };
    let told = KINDS.iter().find(|(start, _)| text.starts_with(start));
    let number = |after: &str| {
        let rest = &text[text.find(after)? + after.len()..];
        let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        rest[..digits].parse().ok()
    };
    let step = number("checkpoint-").filter(|_| text.starts_with("saved "));
    let step = step.or_else(|| number("at step ")).or_else(|| number("step "));
    match told {
        Some((_, kind)) => Some(Mark { kind, step, text: text.chars().take(SHOWN_CHARS).collect() }),
        None if text.starts_with("step ") && step.is_some() => {
            Some(Mark { kind: "step", step, text: String::new() })
        }
        None => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_have_their_step_and_their_line() {
        let directory = tempfile::tempdir().unwrap();
        let run = Run { dir: std::fs::canonicalize(directory.path()).unwrap() };
        assert_eq!(Marks::default().of(&run).unwrap(), json!([]));
        let log = "2026-01-01T00:00:00Z demo of 7 steps\n\
            2026-01-01T00:00:01Z step 10/40 | reward 0.5\n\
            2026-01-01T00:00:01Z warning: the policy ran away\n\
            2026-01-01T00:00:02Z saved runs/x/checkpoint-20\n\
            2026-01-01T00:00:03Z evaluation at step 21: reward 0.5\n\
            2026-01-01T00:00:04Z resuming from runs/x/checkpoint-20 at step 20 of 40\n";
        std::fs::write(run.dir.join("log.txt"), log).unwrap();
        let found = Marks::default().of(&run).unwrap();
        let told: Vec<(&str, u64)> = found
            .as_array()
            .unwrap()
            .iter()
            .map(|own| (own["kind"].as_str().unwrap(), own["step"].as_u64().unwrap()))
            .collect();
        assert_eq!(told, [("warning", 10), ("checkpoint", 20), ("evaluation", 21), ("resumption", 20)]);
        assert_eq!(found[1]["text"], "saved runs/x/checkpoint-20");
    }
}
