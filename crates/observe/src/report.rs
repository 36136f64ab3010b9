//! Tables at the end of a run: evaluation before and after, time per phase, and the reward curve.

use comfy_table::{Cell, CellAlignment, Table, TableComponent, presets};

/// A number before and after training.
#[derive(Debug, Clone, PartialEq)]
pub struct BeforeAfter {
    /// Name of the number.
    pub name: String,
    /// Value before the first step; `None` if it was not measured.
    pub before: Option<f64>,
    /// Value after the last step; `None` if it was not measured.
    pub after: Option<f64>,
}

/// Closing report of a run; empty parts are left out. `Display` renders it without colour.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Report {
    /// Evaluation results before and after training.
    pub before_after: Vec<BeforeAfter>,
    /// Mean time per step of each phase, in order, in seconds.
    pub phase_secs: Vec<(String, f64)>,
    /// Mean time per step, in seconds. It exceeds the sum of the phases by the time outside of any phase.
    pub step_secs: f64,
    /// Mean time per step that other threads spend reading rows and decoding media ahead, in seconds.
    pub ahead_secs: f64,
    /// Mean reward of each step.
    pub rewards: Vec<f64>,
    /// Directory of the run's files.
    pub run_dir: String,
}

/// Width of the reward curve in columns.
const CURVE_WIDTH: usize = 40;

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if !self.before_after.is_empty() {
            let mut table = table(&["", "before", "after", "change"]);
            for row in &self.before_after {
                let number = |value: Option<f64>| value.map_or("-".to_owned(), |v| format!("{v:.3}"));
                let change = row.before.zip(row.after).map(|(before, after)| after - before);
                let change = change.map_or("-".to_owned(), |v| format!("{v:+.3}"));
                table.add_row([row.name.clone(), number(row.before), number(row.after), change]);
            }
            writeln!(f, "{}\n", table.trim_fmt())?;
        }
        if !self.phase_secs.is_empty() {
            let mut table = table(&["phase", "s/step", "share"]);
            let rest = self.step_secs - self.phase_secs.iter().map(|(_, secs)| secs).sum::<f64>();
            // Clocks differ by microseconds; a row for such a difference would carry no information.
            let other = (rest > 0.005 * self.step_secs).then(|| ("other".to_owned(), rest));
            let total = ("step".to_owned(), self.step_secs);
            for (name, secs) in self.phase_secs.iter().cloned().chain(other).chain([total]) {
                table.add_row([name, format!("{secs:.3}"), share(secs, self.step_secs)]);
            }
            writeln!(f, "{}\n", table.trim_fmt())?;
        }
        if self.ahead_secs > 0.0 {
            let (secs, part) = (self.ahead_secs, share(self.ahead_secs, self.step_secs));
            writeln!(
                f,
                "reading rows ahead took {secs:.3} s/step on other threads, {part} of the step time\n"
            )?;
        }
        if let (Some(first), Some(last)) = (self.rewards.first(), self.rewards.last()) {
            writeln!(f, "reward {first:.3} {} {last:.3}", sparkline(&self.rewards, CURVE_WIDTH))?;
        }
        if !self.run_dir.is_empty() {
            writeln!(f, "run directory: {}", self.run_dir)?;
        }
        Ok(())
    }
}

fn share(secs: f64, total: f64) -> String {
    if total > 0.0 { format!("{:.0} %", 100.0 * secs / total) } else { "-".to_owned() }
}

fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_HORIZONTAL_ONLY);
    for between_rows in [
        TableComponent::HorizontalLines,
        TableComponent::LeftBorderIntersections,
        TableComponent::MiddleIntersections,
        TableComponent::RightBorderIntersections,
    ] {
        table.remove_style(between_rows);
    }
    table.set_header(header.iter().enumerate().map(|(i, text)| {
        let alignment = if i == 0 { CellAlignment::Left } else { CellAlignment::Right };
        Cell::new(text).set_alignment(alignment)
    }));
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// Draws a curve on one line of at most `width` characters, scaled from the smallest to the largest value. If there are more values
/// than columns, neighbouring values are averaged. Values that are not finite become blanks; a flat curve is drawn in the middle.
pub fn sparkline(values: &[f64], width: usize) -> String {
    const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let columns = values.len().min(width);
    let means: Vec<f64> = (0..columns)
        .map(|column| {
            let bucket = &values[column * values.len() / columns..(column + 1) * values.len() / columns];
            let finite: Vec<f64> = bucket.iter().copied().filter(|v| v.is_finite()).collect();
            finite.iter().sum::<f64>() / finite.len() as f64
        })
        .collect();
    let shown = || means.iter().copied().filter(|v| v.is_finite());
    let low = shown().fold(f64::INFINITY, f64::min);
    let range = shown().fold(f64::NEG_INFINITY, f64::max) - low;
    let bar = |value: f64| match value {
        value if !value.is_finite() => ' ',
        // `range` can overflow to infinity for extreme values; such curves are drawn flat.
        value if range > 0.0 && range.is_finite() => {
            BARS[((value - low) / range * (BARS.len() - 1) as f64).round() as usize]
        }
        _ => BARS[3],
    };
    means.iter().map(|value| bar(*value)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_shows_gain_phases_and_curve() {
        let row = |name: &str, before, after| BeforeAfter { name: name.to_owned(), before, after };
        let report = Report {
            before_after: vec![
                row("accuracy", Some(0.41), Some(0.7725)),
                row("colour", Some(0.5), Some(0.48)),
                row("motion", None, Some(0.9)),
            ],
            phase_secs: vec![("rollout".into(), 0.61), ("reward".into(), 0.0042), ("update".into(), 0.32)],
            step_secs: 1.0,
            ahead_secs: 0.02,
            rewards: (0..100).map(|step| f64::from(step) / 100.0).collect(),
            run_dir: "runs/demo".into(),
        };
        insta::assert_snapshot!(report, @r"
        ────────────────────────────────────
                    before   after   change
        ════════════════════════════════════
         accuracy    0.410   0.772   +0.362
         colour      0.500   0.480   -0.020
         motion          -   0.900        -
        ────────────────────────────────────

        ──────────────────────────
         phase     s/step   share
        ══════════════════════════
         rollout    0.610    61 %
         reward     0.004     0 %
         update     0.320    32 %
         other      0.066     7 %
         step       1.000   100 %
        ──────────────────────────

        reading rows ahead took 0.020 s/step on other threads, 2 % of the step time

        reward 0.000 ▁▁▁▂▂▂▂▂▂▃▃▃▃▃▄▄▄▄▄▄▅▅▅▅▅▅▆▆▆▆▆▇▇▇▇▇▇███ 0.990
        run directory: runs/demo
        ");
    }

    #[test]
    fn an_empty_report_says_nothing() {
        assert_eq!(Report::default().to_string(), "");
    }

    #[test]
    fn sparkline_scales_averages_and_survives_odd_values() {
        assert_eq!(sparkline(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], 8), "▁▂▃▄▅▆▇█");
        // Pairs average to 1 and 5, the two ends of the range.
        assert_eq!(sparkline(&[0.0, 2.0, 4.0, 6.0], 2), "▁█");
        assert_eq!(sparkline(&[0.0, f64::NAN, 1.0], 8), "▁ █");
        assert_eq!(sparkline(&[0.5; 3], 8), "▄▄▄");
        assert_eq!(sparkline(&[f64::MAX, f64::MIN], 8), "▄▄");
        assert_eq!(sparkline(&[], 8), "");
        assert_eq!(sparkline(&[1.0], 0), "");
    }
}
