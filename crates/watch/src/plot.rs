//! Charts of a run as SVG, without a browser: the lines of each chart of the page. Ranges, areas and other choices are only on the
//! page, which saves them as pictures too. `page/table.json` lists the charts for both.

use std::sync::LazyLock;

use serde::Deserialize;
use serde_json::Value;

use crate::assets;

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 400.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 628.0;
const BOTTOM: f64 = 366.0;
/// Height of a row of the legend.
const ROW: f64 = 18.0;
/// Largest number of characters of an entry of the legend.
const LONGEST_LABEL: usize = 60;
/// Largest number of characters of a file's name.
const LONGEST_NAME: usize = 100;
/// Smoothing with which the page begins.
const SMOOTHING: f64 = 0.6;
/// Colours of lines, as on the page with a light background.
const COLOURS: [&str; 9] =
    ["#2f6fde", "#c2620f", "#24824b", "#b245b8", "#d24b4b", "#0b8494", "#8a6d1f", "#6b5bd6", "#6f7b88"];

/// Row of the table of charts. `{}` stands for any part of a name.
#[derive(Debug, Deserialize)]
struct Chart {
    title: String,
    /// Metrics with their labels.
    lines: Vec<(String, String)>,
    #[serde(default)]
    evals: bool,
}

// A test reads the table.
static CHARTS: LazyLock<Vec<Chart>> =
    LazyLock::new(|| serde_json::from_str(assets::CHARTS).unwrap_or_default());

/// A chart with its numbers.
#[derive(Debug)]
pub(crate) struct Plot {
    pub(crate) title: String,
    x: Vec<f64>,
    lines: Vec<Line>,
}

#[derive(Debug)]
struct Line {
    label: String,
    values: Vec<f64>,
    smooth: Vec<f64>,
}

/// Returns the charts for which a run has numbers. `curves` is the answer to the page's request for the metrics of the run.
pub(crate) fn plots(curves: &Value) -> Vec<Plot> {
    let of = |chart: &Chart| {
        let answer = &curves[if chart.evals { "evaluations" } else { "steps" }];
        let x = numbers(&answer["x"]);
        let weight = if chart.evals { 0.0 } else { SMOOTHING };
        let all = answer["columns"].as_object().into_iter().flatten();
        let mut found: Vec<Plot> = Vec::new();
        for (pattern, label) in &chart.lines {
            for (name, column) in all.clone() {
                let Some(part) = filled(pattern, name) else { continue };
                let (values, smooth) = values(column, answer["width"].as_f64(), weight);
                if smooth.iter().all(|value| !value.is_finite()) {
                    continue;
                }
                let line = Line { label: label.replacen("{}", part, 1), values, smooth };
                let title = chart.title.replacen("{}", part, 1);
                match found.iter_mut().find(|plot| plot.title == title) {
                    Some(plot) => plot.lines.push(line),
                    None => found.push(Plot { title, x: x.clone(), lines: vec![line] }),
                }
            }
        }
        found
    };
    CHARTS.iter().flat_map(of).collect()
}

/// Returns the plain and the smoothed values of a column: of every row, or both ends and the mean of each bucket of `width` steps.
fn values(column: &Value, width: Option<f64>, weight: f64) -> (Vec<f64>, Vec<f64>) {
    match width {
        None => (numbers(column), smoothed(&numbers(column), weight)),
        // A bucket stands for many steps, so its weight is that of all of them.
        Some(width) => {
            let means = smoothed(&numbers(&column["means"]), weight.powf(width));
            (numbers(&column["ends"]), means.into_iter().flat_map(|mean| [mean; 2]).collect())
        }
    }
}

/// Arranges plots in two columns as one picture; `None` without plots.
pub(crate) fn grid(plots: &[&Plot]) -> Option<String> {
    let (columns, rows) = (plots.len().min(2), plots.len().div_ceil(2));
    let (width, height) = (columns as f64 * WIDTH, rows as f64 * HEIGHT);
    let each = plots.iter().enumerate().map(|(at, plot)| {
        let (x, y) = ((at % 2) as f64 * WIDTH, (at / 2) as f64 * HEIGHT);
        plot.svg().replacen("<svg ", &format!("<svg x=\"{x}\" y=\"{y}\" "), 1)
    });
    let each: String = each.collect();
    (!plots.is_empty()).then(|| {
        format!(
            "<svg width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" xmlns=\"http://www.w3.org/2000/svg\">\n{each}</svg>\n"
        )
    })
}

impl Plot {
    /// Returns the title as the name of a file, without its ending.
    pub(crate) fn file_name(&self) -> String {
        let is_kept = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
        let mut name = String::new();
        for c in self.title.chars() {
            match is_kept(c) {
                true => name.push(c.to_ascii_lowercase()),
                false if name.ends_with('-') => {}
                false => name.push('-'),
            }
        }
        name.chars().take(LONGEST_NAME).collect()
    }

    /// Returns true if there is more than one point to draw a line through.
    pub(crate) fn has_course(&self) -> bool {
        self.x.len() > 1
    }

    /// Returns the smallest and the largest y, with some room.
    fn y_range(&self) -> (f64, f64) {
        let all = self.lines.iter().flat_map(|line| &line.values).copied().filter(|value| value.is_finite());
        let (mut from, mut to) =
            (all.clone().fold(f64::INFINITY, f64::min), all.fold(f64::NEG_INFINITY, f64::max));
        // Means of equal numbers differ by rounding, and an axis cannot have ticks for such a small range.
        if to - from <= 1e-6 * from.abs().max(to.abs()) {
            let by = if from == 0.0 { 0.1 } else { from.abs() * 0.1 };
            (from, to) = (from - by, to + by);
        }
        let space = (to - from) * 0.05;
        (from - space, to + space)
    }

    /// Draws the plot.
    pub(crate) fn svg(&self) -> String {
        let entries = legend(self.lines.iter().map(|line| line.label.as_str()));
        let top = entries.last().map_or(ROW, |(_, middle, _)| middle + ROW);
        let x_range = (self.x.first().copied().unwrap_or(0.0), self.x.last().copied().unwrap_or(0.0));
        let y_range = self.y_range();
        let px = |value: f64| place(value, x_range, LEFT, RIGHT);
        let py = |value: f64| place(value, y_range, BOTTOM, top);
        let path = |values: &[f64]| -> String {
            let known = self.x.iter().zip(values).filter(|(_, value)| value.is_finite());
            let points: Vec<String> = known.map(|(x, value)| format!("{} {}", px(*x), py(*value))).collect();
            if points.is_empty() { String::new() } else { format!("M{}", points.join("L")) }
        };
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{HEIGHT}\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
             font-family=\"system-ui, sans-serif\" font-size=\"12\" fill=\"#1c2026\">\
             <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#ffffff\"/>\
             <text x=\"{LEFT}\" y=\"20\" font-size=\"15\" font-weight=\"600\">{}</text>",
            escaped(&self.title),
        );
        for tick in ticks(y_range, 5.0) {
            let (y, x, text) = (py(tick), LEFT - 6.0, number(tick));
            out += &format!(
                "<path d=\"M{LEFT} {y}H{RIGHT}\" stroke=\"#e1e4ea\"/><text x=\"{x}\" y=\"{y}\" dy=\"4\" text-anchor=\"end\">{text}</text>"
            );
        }
        for tick in ticks(x_range, 7.0) {
            let (x, y) = (px(tick), BOTTOM + 18.0);
            out += &format!(
                "<path d=\"M{x} {BOTTOM}v4\" stroke=\"#1c2026\"/><text x=\"{x}\" y=\"{y}\" text-anchor=\"middle\">{tick}</text>"
            );
        }
        out += "<g fill=\"none\" stroke-width=\"1.75\" stroke-linejoin=\"round\" stroke-linecap=\"round\">";
        for (line, colour) in self.lines.iter().zip(COLOURS.iter().cycle()) {
            let (plain, smooth) = (path(&line.values), path(&line.smooth));
            out += &format!(
                "<path d=\"{plain}\" stroke=\"{colour}\" stroke-opacity=\"0.33\"/><path d=\"{smooth}\" stroke=\"{colour}\"/>"
            );
        }
        out += "</g>";
        for ((x, y, label), colour) in entries.iter().zip(COLOURS.iter().cycle()) {
            let (at, label) = (x + 20.0, escaped(label));
            out += &format!(
                "<path d=\"M{x} {y}h16\" stroke=\"{colour}\" stroke-width=\"3\"/><text x=\"{at}\" y=\"{y}\" dy=\"4\">{label}</text>"
            );
        }
        out + "</svg>\n"
    }
}

/// Returns the part of a name that `{}` of a pattern stands for; `None` if the name does not match.
fn filled<'a>(pattern: &str, name: &'a str) -> Option<&'a str> {
    match pattern.split_once("{}") {
        None => (pattern == name).then_some(""),
        Some((start, end)) => name.strip_prefix(start)?.strip_suffix(end).filter(|part| !part.is_empty()),
    }
}

/// Returns the numbers of a list. What is no number is NaN.
fn numbers(list: &Value) -> Vec<f64> {
    list.as_array().into_iter().flatten().map(|value| value.as_f64().unwrap_or(f64::NAN)).collect()
}

/// Computes exponential means, corrected for the bias towards the first value. Gaps stay gaps.
fn smoothed(values: &[f64], weight: f64) -> Vec<f64> {
    let (mut mean, mut total) = (0.0, 0.0);
    let of = |own: &f64| {
        if !own.is_finite() {
            return f64::NAN;
        }
        mean = weight * mean + (1.0 - weight) * own;
        total = weight * total + (1.0 - weight);
        mean / total
    };
    values.iter().map(of).collect()
}

/// Places the entries of a legend in rows. Returns left edge, middle and label of each.
fn legend<'a>(labels: impl Iterator<Item = &'a str>) -> Vec<(f64, f64, String)> {
    let (mut x, mut row) = (LEFT, 0.0);
    let of = |label: &str| {
        let label: String = label.chars().take(LONGEST_LABEL).collect();
        let width = 34.0 + 7.0 * label.chars().count() as f64;
        if x > LEFT && x + width > RIGHT {
            (x, row) = (LEFT, row + 1.0);
        }
        x += width;
        (x - width, 38.0 + ROW * row, label)
    };
    labels.map(of).collect()
}

/// Returns the place of a value on an axis from `begin` to `end`, in pixels.
fn place(value: f64, (from, to): (f64, f64), begin: f64, end: f64) -> String {
    let range = if to == from { 1.0 } else { to - from };
    format!("{:.2}", begin + ((value - from) / range) * (end - begin))
}

/// Returns about `count` round numbers in a range.
fn ticks((low, high): (f64, f64), count: f64) -> Vec<f64> {
    if low >= high {
        return vec![low];
    }
    let rough = (high - low) / count;
    let size = 10_f64.powf(rough.log10().floor());
    let step = size * [1.0, 2.0, 5.0].into_iter().find(|own| own * size >= rough).unwrap_or(10.0);
    let first = (low / step).ceil();
    let all =
        (0..100).map(|at| (first + f64::from(at)) * step).take_while(|own| *own <= high * (1.0 + 1e-12));
    // The product has rounding errors in its last digits.
    all.filter_map(|own| format!("{own:.11e}").parse().ok()).collect()
}

/// Formats a number like the page.
fn number(value: f64) -> String {
    let size = value.abs();
    if size < 1e-12 {
        return "0".to_owned();
    }
    if !(1e-3..1e6).contains(&size) {
        let text = format!("{value:.2e}");
        return if text.contains("e-") { text } else { text.replacen('e', "e+", 1) };
    }
    let text = if size >= 100.0 { format!("{value:.1}") } else { format!("{value:.3}") };
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn escaped(text: &str) -> String {
    let of = |c: char| match c {
        '&' | '<' | '>' | '"' | '\'' => format!("&#{};", u32::from(c)),
        c => c.to_string(),
    };
    text.chars().map(of).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, json};

    use super::*;

    /// Returns the answer about a run with these columns.
    fn steps(columns: Value) -> Value {
        let rows = columns.as_object().unwrap().values().map(|own| own.as_array().unwrap().len()).max();
        let x: Vec<usize> = (1..=rows.unwrap()).collect();
        json!({ "steps": { "x": x, "columns": columns }, "evaluations": { "x": [], "columns": {} } })
    }

    #[test]
    fn the_documentation_lists_every_chart() {
        let table: Vec<Map<String, Value>> = serde_json::from_str(assets::CHARTS).unwrap();
        assert_eq!(table.len(), CHARTS.len(), "the table of charts cannot be read");
        let known = ["title", "lines", "band", "spread", "stacked", "zero", "evals", "help"];
        let text =
            std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/watch.md")).unwrap();
        for chart in table {
            assert!(chart.keys().all(|name| known.contains(&name.as_str())), "{chart:?}");
            let [title, help] = ["title", "help"].map(|name| chart[name].as_str().unwrap());
            let row = format!("| {title} | {help} |");
            assert!(title.contains("{}") || text.contains(&row), "docs/watch.md has no row {row}");
        }
    }

    #[test]
    fn metrics_become_the_charts_of_the_table() {
        let curves = steps(json!({
            "loss": [1, 2], "rewards/a/mean": [0, 1], "rewards/a/std": [0.5, 0.5], "rewards/b/mean": [1, 1], "kl": [null, null],
            "time/rollout": [1, 3], "time/loss": [1, 1],
        }));
        let plots = plots(&curves);
        let titles: Vec<&str> = plots.iter().map(|plot| plot.title.as_str()).collect();
        assert_eq!(titles, ["Reward: a", "Reward: b", "Loss", "Step time by phase"]);
        // 0.6 * 0.4 * 0 + 0.4 * 1 = 0.4, divided by 1 - 0.6² = 0.64.
        assert_eq!(
            (&plots[0].lines[0].smooth[..], &plots[0].lines[0].values[..]),
            (&[0.0, 0.625][..], &[0.0, 1.0][..])
        );
        let labels: Vec<&str> = plots[3].lines.iter().map(|line| line.label.as_str()).collect();
        assert_eq!((labels, plots[3].y_range()), (vec!["rollout", "loss"], (0.9, 3.1)));
    }

    #[test]
    fn a_bucket_is_drawn_by_its_ends() {
        let column = json!({ "ends": [1, 5, 2, 0], "means": [3, 1] });
        let (plain, smooth) = values(&column, Some(2.0), 0.6);
        assert_eq!(plain, [1.0, 5.0, 2.0, 0.0]);
        // The weight of two steps is 0.36: (0.36 * 0.64 * 3 + 0.64 * 1) / (1 - 0.36²).
        let second = (0.36 * 0.64 * 3.0 + 0.64) / (1.0 - 0.36 * 0.36);
        let near = smooth.iter().zip([3.0, 3.0, second, second]).all(|(own, of)| (own - of).abs() < 1e-12);
        assert!(near, "{smooth:?}");
    }

    #[test]
    fn lines_lie_where_their_numbers_are() {
        let curves = json!({
            "steps": { "x": [], "columns": {} },
            "evaluations": { "x": [0, 10], "columns": { "eval_reward": [0.25, 0.75] } },
        });
        let plot = &plots(&curves)[0];
        let svg = plot.svg();
        // The y axis has room for a twentieth of the range on both sides.
        let (top, bottom) = (56.0, BOTTOM);
        let room = (bottom - top) / 1.1 * 0.05;
        let line = format!("<path d=\"M64.00 {:.2}L628.00 {:.2}\"", bottom - room, top + room);
        assert!(svg.contains(&line), "{line} is not in {svg}");
        assert!(
            svg.contains(">reward</text>") && svg.contains(">0.6</text>") && svg.contains(">10</text>"),
            "{svg}"
        );
        let page = assets::content("colours.css");
        assert!(svg.contains("stroke=\"#2f6fde\""), "{svg}");
        assert!(COLOURS.iter().enumerate().all(|(at, own)| page.contains(&format!("--run-{at}: {own};"))));
    }

    #[test]
    fn plots_stand_side_by_side_in_one_picture() {
        let curves = steps(json!({ "reward": [1, 2], "kl": [1, 2], "loss": [1, 2] }));
        let plots = plots(&curves);
        let svg = grid(&plots.iter().collect::<Vec<_>>()).unwrap();
        assert!(svg.starts_with("<svg width=\"1280\" height=\"800\" viewBox=\"0 0 1280 800\""), "{svg}");
        for place in ["x=\"0\" y=\"0\"", "x=\"640\" y=\"0\"", "x=\"0\" y=\"400\""] {
            assert_eq!(svg.matches(&format!("<svg {place} ")).count(), 1, "{place}");
        }
        assert_eq!((svg.matches("<svg ").count(), svg.matches("</svg>").count()), (4, 4));
        assert!(grid(&[&plots[0]]).unwrap().starts_with("<svg width=\"640\" height=\"400\""));
        assert_eq!(grid(&[]), None);
    }

    #[test]
    fn every_number_can_be_drawn() {
        let ends = [[3e38, -3e38], [1e-44, 2e-44], [5.0, 5.000_000_000_000_001], [0.0, 0.0], [-1e38, -1e38]];
        for [first, last] in ends {
            let plots =
                plots(&steps(json!({ "reward": [first, last], "frac_reward_zero_std": [first, last] })));
            for plot in plots {
                let svg = plot.svg();
                assert!(!svg.contains("NaN") && !svg.contains("inf"), "{first}, {last}: {svg}");
            }
        }
        let single = plots(&steps(json!({ "reward": [3] })))[0].svg();
        assert!(single.contains(">1</text>") && !single.contains("NaN"), "{single}");
    }

    #[test]
    fn text_and_names_of_files_are_safe() {
        let curves = steps(json!({ "rewards/<b>&/../x/mean": [1, 2] }));
        let plot = &plots(&curves)[0];
        assert_eq!(plot.file_name(), "reward-b-..-x");
        assert!(plot.svg().contains("Reward: &#60;b&#62;&#38;/../x"), "{}", plot.svg());
        let long = format!("rewards/{}/mean", "x".repeat(250));
        assert_eq!(plots(&steps(json!({ long: [1] })))[0].file_name().len(), LONGEST_NAME);
    }

    #[test]
    fn numbers_are_written_like_on_the_page() {
        let cases = [
            (0.0, "0"),
            (0.25, "0.25"),
            (12.0, "12"),
            (123.46, "123.5"),
            (1e-4, "1.00e-4"),
            (2.5e7, "2.50e+7"),
            (-0.5, "-0.5"),
        ];
        cases.into_iter().for_each(|(value, expected)| assert_eq!(number(value), expected));
        assert_eq!(ticks((0.0, 1.0), 5.0), [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]);
        assert_eq!(ticks((0.1, 0.7), 5.0), [0.2, 0.4, 0.6]);
        assert_eq!(ticks((3.0, 3.0), 7.0), [3.0]);
    }
}
