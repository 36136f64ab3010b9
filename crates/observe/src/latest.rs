//! Table of runs with the numbers of their last steps, redrawn after every step.

use std::collections::VecDeque;

use crate::{Metric, columns, sparkline};

/// Number of steps that the curve covers.
const COURSE_STEPS: usize = 400;
/// Width of the curve in characters.
const COURSE_COLUMNS: usize = 14;

/// Metrics of a run's last step, and the history of its reward, or of the loss if there are no rewards.
#[derive(Clone, Debug, Default)]
pub struct Latest {
    course: VecDeque<f64>,
    metrics: Vec<Metric>,
}

impl Latest {
    /// Adds the metrics of another step.
    pub fn add(&mut self, metrics: Vec<Metric>) {
        self.metrics = metrics;
        let shown = if self.has("reward") { "reward" } else { "loss" };
        self.course.push_back(self.value(shown).unwrap_or(f64::NAN));
        self.course.drain(..self.course.len().saturating_sub(COURSE_STEPS));
    }

    /// Returns the metrics of the last step.
    #[must_use]
    pub fn metrics(&self) -> &[Metric] {
        &self.metrics
    }

    fn has(&self, name: &str) -> bool {
        self.metrics.iter().any(|(own, _)| own == name)
    }

    fn value(&self, name: &str) -> Option<f64> {
        self.metrics.iter().find(|(own, _)| own == name).and_then(|(_, value)| *value)
    }
}

/// Formats a table of at most `width` columns with one row per run: the caller's cells and header first, then the numbers of the
/// last step. A number that no run reports gets no column. The table is empty before the first step of any run.
#[must_use]
pub fn latest_table(header: &[&str], runs: &[(Vec<String>, &Latest)], width: usize) -> String {
    const NUMBERS: [(&str, &str, usize); 5] = [
        ("reward", "reward", 3),
        ("loss", "loss", 4),
        ("kl", "kl", 4),
        ("length", "completions/mean_length", 1),
        ("s/step", "step_time", 2),
    ];
    let rewarded = runs.iter().any(|(_, latest)| latest.has("reward"));
    // The loss of GRPO stays near 0 whatever the model learns.
    let is_shown = |name: &str| (name != "loss" || !rewarded) && runs.iter().any(|(_, own)| own.has(name));
    let mut header = header.to_vec();
    let mut rows: Vec<Vec<String>> = runs.iter().map(|(cells, _)| cells.clone()).collect();
    for (title, name, digits) in NUMBERS.into_iter().filter(|(_, name, _)| is_shown(name)) {
        header.push(title);
        let is_course = matches!(title, "reward" | "loss");
        if is_course {
            header.push("course");
        }
        for (row, (_, latest)) in rows.iter_mut().zip(runs) {
            row.push(latest.value(name).map_or("-".to_owned(), |value| format!("{value:.digits$}")));
            if is_course {
                let course: Vec<f64> = latest.course.iter().copied().collect();
                row.push(sparkline(&course, COURSE_COLUMNS));
            }
        }
    }
    if header.is_empty() { String::new() } else { columns(&header, &rows, width) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(steps: &[&[(&str, Option<f64>)]]) -> Latest {
        let mut latest = Latest::default();
        for step in steps {
            latest.add(step.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect());
        }
        latest
    }

    #[test]
    fn a_row_has_the_last_numbers_and_the_course() {
        let rewarded = of(&[
            &[("reward", Some(0.1))],
            &[("reward", None)],
            &[("loss", Some(0.0)), ("reward", Some(0.25)), ("kl", None), ("step_time", Some(1.5))],
        ]);
        let name = vec!["mine".to_owned()];
        let table = latest_table(&["run"], &[(name.clone(), &rewarded)], 80);
        assert_eq!(table, "run   reward  course  kl  s/step\nmine   0.250     ▁ █   -    1.50\n");
        let imitation = of(&[&[("loss", Some(2.0))], &[("loss", Some(1.0))]]);
        assert_eq!(latest_table(&[], &[(Vec::new(), &imitation)], 80), "loss    course\n1.0000      █▁\n");
        assert_eq!(latest_table(&[], &[(Vec::new(), &Latest::default())], 80), "");
        let both = latest_table(&["run"], &[(name.clone(), &rewarded), (name, &imitation)], 80);
        assert!(both.ends_with("mine       -      █▁   -       -\n"), "{both}");
    }

    #[test]
    fn only_the_last_steps_are_kept() {
        let mut latest = Latest::default();
        (0..1000).for_each(|step| latest.add(vec![("reward".to_owned(), Some(f64::from(step)))]));
        assert_eq!((latest.course.len(), latest.course[0]), (COURSE_STEPS, 600.0));
        assert_eq!(latest.metrics(), [("reward".to_owned(), Some(999.0))]);
    }
}
