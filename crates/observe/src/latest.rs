//! Table of runs with the numbers of their last steps, redrawn after every step.

use std::collections::{BTreeMap, VecDeque};

use crate::{Metric, columns, sparkline};

/// Number of steps that a curve covers.
const COURSE_STEPS: usize = 400;
/// Width of a curve in characters.
const COURSE_COLUMNS: usize = 14;

/// Metrics of a run's last step, and the history of its loss, of its reward and of the mean of each reward.
#[derive(Clone, Debug, Default)]
pub struct Latest {
    courses: BTreeMap<String, VecDeque<f64>>,
    metrics: Vec<Metric>,
}

impl Latest {
    /// Adds the metrics of another step.
    pub fn add(&mut self, metrics: Vec<Metric>) {
        for (name, value) in metrics.iter().filter(|(name, _)| has_course(name)) {
            let course = self.courses.entry(name.clone()).or_default();
            course.push_back(value.unwrap_or(f64::NAN));
            course.drain(..course.len().saturating_sub(COURSE_STEPS));
        }
        self.metrics = metrics;
    }

    /// Returns the metrics of the last step.
    pub fn metrics(&self) -> &[Metric] {
        &self.metrics
    }

    /// Formats a table of at most `width` columns with the mean, the standard deviation and the history of each reward. It is empty
    /// without rewards.
    pub fn rewards_table(&self, width: usize) -> String {
        let cell = |name: &str| self.value(name).map_or("-".to_owned(), |value| format!("{value:.3}"));
        let row = |(name, _): &Metric| {
            let reward = reward_name(name)?;
            let spread = format!("rewards/{reward}/std");
            Some(vec![reward.to_owned(), cell(name), cell(&spread), self.course(name)])
        };
        let rows: Vec<_> = self.metrics.iter().filter_map(row).collect();
        if rows.is_empty() {
            String::new()
        } else {
            columns(&["reward", "mean", "std", "course"], &rows, width)
        }
    }

    /// Draws the history of a metric; empty without one.
    fn course(&self, name: &str) -> String {
        let values: Vec<f64> = self.courses.get(name).into_iter().flatten().copied().collect();
        sparkline(&values, COURSE_COLUMNS)
    }

    fn has(&self, name: &str) -> bool {
        self.metrics.iter().any(|(own, _)| own == name)
    }

    fn value(&self, name: &str) -> Option<f64> {
        self.metrics.iter().find(|(own, _)| own == name).and_then(|(_, value)| *value)
    }
}

/// Returns the name of a reward if the metric is its mean.
fn reward_name(metric: &str) -> Option<&str> {
    metric.strip_prefix("rewards/")?.strip_suffix("/mean")
}

fn has_course(metric: &str) -> bool {
    matches!(metric, "reward" | "loss") || reward_name(metric).is_some()
}

/// Formats a table of at most `width` columns with one row per run: the caller's cells and header first, then the numbers of the
/// last step. A number that no run reports gets no column. The table is empty before the first step of any run.
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
                row.push(latest.course(if latest.has(name) { name } else { "loss" }));
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
    fn each_reward_has_a_row() {
        let step = |accuracy, format| {
            [
                ("rewards/accuracy/mean", accuracy),
                ("rewards/accuracy/std", Some(0.5)),
                ("rewards/format/mean", format),
            ]
        };
        let latest = of(&[&step(Some(0.0), Some(1.0)), &step(Some(0.25), None)]);
        assert_eq!(
            latest.rewards_table(80),
            "reward     mean    std  course\naccuracy  0.250  0.500      ▁█\nformat        -      -      ▄\n"
        );
        assert_eq!(Latest::default().rewards_table(80), "");
    }

    #[test]
    fn only_the_last_steps_are_kept() {
        let mut latest = Latest::default();
        (0..1000).for_each(|step| latest.add(vec![("reward".to_owned(), Some(f64::from(step)))]));
        let course = &latest.courses["reward"];
        assert_eq!((course.len(), course[0]), (COURSE_STEPS, 600.0));
        assert_eq!(latest.metrics(), [("reward".to_owned(), Some(999.0))]);
    }
}
