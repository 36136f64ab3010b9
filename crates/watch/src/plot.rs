//! Charts of a run as SVG, without a browser: the charts of the page as they are at first.
//!
//! `page/table.js` lists the charts for both. `page/export.js` draws what a reader has chosen on the page, and the same picture as
//! this module as long as nothing is chosen; `tools/watch/check.mjs` compares the two.

use std::sync::LazyLock;

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::assets;

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 400.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 12.0;
const BOTTOM: f64 = 34.0;
/// Height of a row of the legend.
const ROW: f64 = 18.0;
/// Largest number of characters of an entry of the legend.
const LONGEST_LABEL: usize = 60;
/// Largest number of characters of a file's name.
const LONGEST_NAME: usize = 100;
/// Smoothing with which the page begins.
const SMOOTHING: f64 = 0.6;
/// Number of colours of the parts of a chart.
const COLOURS: usize = 9;

/// Row of the table of charts. `{}` stands for any part of a name.
#[derive(Debug, Deserialize)]
struct Chart {
    title: String,
    /// Metrics with their labels.
    lines: Vec<(String, String)>,
    /// Metrics of the lower and the upper edge.
    band: Option<(String, String)>,
    /// Metric that is a distance to both sides.
    spread: Option<String>,
    #[serde(default)]
    stacked: bool,
    /// True if the y axis includes 0.
    #[serde(default)]
    zero: bool,
    #[serde(default)]
    evals: bool,
}

static CHARTS: LazyLock<Vec<Chart>> = LazyLock::new(|| {
    // A test reads the table.
    serde_json::from_str(table()).unwrap_or_default()
});

/// Returns the table of charts as JSON.
fn table() -> &'static str {
    let text = assets::content("table.js");
    let list = text.split_once("CHARTS = ").map_or("", |(_, list)| list);
    list.trim_end().trim_end_matches(';')
}

/// A chart with its numbers.
#[derive(Debug)]
pub(crate) struct Plot {
    pub(crate) title: String,
    x: Vec<f64>,
    lines: Vec<Line>,
    areas: Vec<Area>,
    /// True if the y axis includes 0.
    zero: bool,
    /// True if each point is marked.
    dots: bool,
}

#[derive(Debug)]
struct Line {
    /// Index of the colour.
    colour: usize,
    /// `None` for the plain values behind a smoothed line.
    label: Option<String>,
    values: Vec<f64>,
}

#[derive(Debug)]
struct Area {
    colour: usize,
    opacity: f64,
    low: Vec<f64>,
    high: Vec<f64>,
}

/// Returns the charts for which a run has numbers. `curves` is the answer to the page's request for the metrics of the run.
pub(crate) fn plots(curves: &Value) -> Vec<Plot> {
    CHARTS
        .iter()
        .flat_map(|chart| {
            let columns = Columns::of(&curves[if chart.evals { "evaluations" } else { "steps" }]);
            chart.found(&columns.names()).into_iter().filter_map(move |found| found.plot(&columns))
        })
        .collect()
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

/// Columns of a run: every row, or both ends and the mean of each bucket of rows.
struct Columns<'a> {
    x: Vec<f64>,
    /// Number of steps in a bucket; `None` for rows.
    width: Option<f64>,
    columns: Option<&'a Map<String, Value>>,
}

impl<'a> Columns<'a> {
    fn of(answer: &'a Value) -> Self {
        Self {
            x: numbers(&answer["x"]),
            width: answer["width"].as_f64(),
            columns: answer["columns"].as_object(),
        }
    }

    /// Returns the names of the metrics that have a number.
    fn names(&self) -> Vec<&'a str> {
        let means = |column: &'a Value| if self.width.is_some() { &column["means"] } else { column };
        let has_any = |column: &'a Value| numbers(means(column)).iter().any(|value| value.is_finite());
        let all = self.columns.into_iter().flatten();
        all.filter(|(_, column)| has_any(column)).map(|(name, _)| name.as_str()).collect()
    }

    /// Returns the plain values and the smoothed values of a metric; `None` if the run does not have it.
    fn of_metric(&self, name: &str, weight: f64) -> Option<(Vec<f64>, Vec<f64>)> {
        let column = self.columns?.get(name)?;
        let Some(width) = self.width else {
            let values = numbers(column);
            let smooth = smoothed(&values, weight);
            return Some((values, smooth));
        };
        // A bucket stands for many steps, so its weight is that of all of them.
        let means = smoothed(&numbers(&column["means"]), weight.powf(width));
        Some((numbers(&column["ends"]), means.into_iter().flat_map(|mean| [mean; 2]).collect()))
    }
}

impl Chart {
    /// Returns the charts of this row for the metrics that a run has.
    fn found(&self, names: &[&str]) -> Vec<Self> {
        let mut found = Vec::new();
        for (pattern, label) in &self.lines {
            for name in names {
                let Some(part) = filled(pattern, name) else { continue };
                found.push((part, ((*name).to_owned(), label.replacen("{}", part, 1))));
            }
        }
        let with = |part: &str, lines: Vec<(String, String)>| Self {
            title: self.title.replacen("{}", part, 1),
            lines,
            band: self.band.clone(),
            spread: self.spread.as_ref().map(|name| name.replacen("{}", part, 1)),
            ..*self
        };
        match self.title.contains("{}") {
            true => found.into_iter().map(|(part, line)| with(part, vec![line])).collect(),
            false if found.is_empty() => Vec::new(),
            false => vec![with("", found.into_iter().map(|(_, line)| line).collect())],
        }
    }

    fn plot(&self, columns: &Columns<'_>) -> Option<Plot> {
        let (mut lines, mut areas) = (Vec::new(), Vec::new());
        if self.stacked {
            let mut low = vec![0.0; columns.x.len()];
            for (at, (name, label)) in self.lines.iter().enumerate() {
                let (_, values) = columns.of_metric(name, SMOOTHING)?;
                let of = |(low, own): (&f64, &f64)| low + if own.is_finite() { *own } else { 0.0 };
                let high: Vec<f64> = low.iter().zip(&values).map(of).collect();
                lines.push(Line { colour: at, label: Some(label.clone()), values: high.clone() });
                areas.push(Area { colour: at, opacity: 0.4, low, high: high.clone() });
                low = high;
            }
        } else {
            let weight = if self.evals { 0.0 } else { SMOOTHING };
            for (at, (name, label)) in self.lines.iter().enumerate() {
                let (plain, values) = columns.of_metric(name, weight)?;
                if at == 0 {
                    areas.extend(self.area(columns, &values, weight));
                }
                if weight > 0.0 {
                    lines.push(Line { colour: at, label: None, values: plain });
                }
                lines.push(Line { colour: at, label: Some(label.clone()), values });
            }
        }
        let zero = self.zero || self.stacked;
        Some(Plot { title: self.title.clone(), x: columns.x.clone(), lines, areas, zero, dots: self.evals })
    }

    /// Returns the area between the edges of the first line, if it has edges.
    fn area(&self, columns: &Columns<'_>, values: &[f64], weight: f64) -> Option<Area> {
        let smooth = |name: &str| Some(columns.of_metric(name, weight)?.1);
        let (low, high) = match (&self.band, &self.spread) {
            (Some((low, high)), _) => (smooth(low)?, smooth(high)?),
            (None, Some(name)) => {
                let distance = smooth(name)?;
                let side =
                    |sign: f64| values.iter().zip(&distance).map(|(own, by)| own + sign * by).collect();
                (side(-1.0), side(1.0))
            }
            (None, None) => return None,
        };
        Some(Area { colour: 0, opacity: 0.15, low, high })
    }
}

impl Plot {
    /// Returns the title as the name of a file, without its ending.
    pub(crate) fn file_name(&self) -> String {
        let is_kept = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
        let (mut name, mut in_gap) = (String::new(), false);
        for c in self.title.chars() {
            match is_kept(&c) {
                true => name.push(c.to_ascii_lowercase()),
                false if in_gap => {}
                false => name.push('-'),
            }
            in_gap = !is_kept(&c);
        }
        name.chars().take(LONGEST_NAME).collect()
    }

    /// Returns true if there is more than one point to draw a line through.
    pub(crate) fn has_course(&self) -> bool {
        self.x.len() > 1
    }

    /// Returns the smallest and the largest y, with some room.
    fn y_range(&self) -> (f64, f64) {
        let of_lines = self.lines.iter().flat_map(|line| &line.values);
        let of_areas = self.areas.iter().flat_map(|area| area.low.iter().chain(&area.high));
        let all = of_lines.chain(of_areas).copied().filter(|value| value.is_finite());
        let Some((low, high)) = all.fold(None, |range: Option<(f64, f64)>, own| {
            Some(range.map_or((own, own), |(low, high)| (low.min(own), high.max(own))))
        }) else {
            return (0.0, 1.0);
        };
        let (mut from, mut to) = (if self.zero { low.min(0.0) } else { low }, high);
        // Means of equal numbers differ by rounding, and an axis cannot have ticks for such a small range.
        if to - from <= 1e-6 * from.abs().max(to.abs()) {
            let by = if from == 0.0 { 0.1 } else { from.abs() * 0.1 };
            from -= if self.zero { 0.0 } else { by };
            to += by;
        }
        let space = (to - from) * 0.05;
        (if self.zero && from == 0.0 { 0.0 } else { from - space }, to + space)
    }

    /// Draws the plot.
    pub(crate) fn svg(&self) -> String {
        let colours = Colours::of_page();
        let named: Vec<(&Line, &str)> =
            self.lines.iter().filter_map(|line| Some((line, line.label.as_deref()?))).collect();
        let entries = legend(named.iter().map(|(_, label)| *label));
        let top = entries.last().map_or(ROW, |(_, middle, _)| middle + ROW);
        let x_range = (self.x.first().copied().unwrap_or(0.0), self.x.last().copied().unwrap_or(0.0));
        let y_range = self.y_range();
        let px = |value: f64| place(value, x_range, LEFT, WIDTH - RIGHT);
        let py = |value: f64| place(value, y_range, HEIGHT - BOTTOM, top);
        let points = |values: &[f64]| -> Vec<String> {
            let known = self.x.iter().zip(values).filter(|(_, value)| value.is_finite());
            known.map(|(x, value)| format!("{} {}", px(*x), py(*value))).collect()
        };
        let [ink, grid, paper] = ["ink", "line", "card"].map(|name| colours.named(name));
        let (id, right, bottom) = (self.file_name(), WIDTH - RIGHT, HEIGHT - BOTTOM);
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{HEIGHT}\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
             font-family=\"system-ui, sans-serif\" font-size=\"12\" fill=\"{ink}\">\
             <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"{paper}\"/>\
             <text x=\"{LEFT}\" y=\"20\" font-size=\"15\" font-weight=\"600\">{}</text>\
             <clipPath id=\"{id}\"><rect x=\"{LEFT}\" y=\"{top}\" width=\"{}\" height=\"{}\"/></clipPath>",
            escaped(&self.title),
            right - LEFT,
            bottom - top,
        );
        for tick in ticks(y_range, 5.0) {
            let y = py(tick);
            out += &format!(
                "<path d=\"M{LEFT} {y}H{right}\" stroke=\"{grid}\"/>\
                 <text x=\"{}\" y=\"{y}\" dy=\"4\" text-anchor=\"end\">{}</text>",
                LEFT - 6.0,
                number(tick),
            );
        }
        for tick in ticks(x_range, 7.0) {
            let x = px(tick);
            out += &format!(
                "<path d=\"M{x} {bottom}v4\" stroke=\"{ink}\"/>\
                 <text x=\"{x}\" y=\"{}\" text-anchor=\"middle\">{tick}</text>",
                bottom + 18.0,
            );
        }
        out += &format!(
            "<g clip-path=\"url(#{id})\" fill=\"none\" stroke-width=\"1.75\" stroke-linejoin=\"round\">"
        );
        out += &self.curves(&colours, &points);
        out += "</g>";
        for ((line, _), (x, y, label)) in named.iter().zip(&entries) {
            let colour = colours.of(line.colour);
            out += &format!(
                "<path d=\"M{x} {y}h16\" stroke=\"{colour}\" stroke-width=\"3\"/>\
                 <text x=\"{}\" y=\"{y}\" dy=\"4\">{}</text>",
                x + 20.0,
                escaped(label),
            );
        }
        out += "</svg>\n";
        out
    }

    /// Draws the areas and the lines. `points` returns the places of values.
    fn curves(&self, colours: &Colours, points: &dyn Fn(&[f64]) -> Vec<String>) -> String {
        let mut out = String::new();
        for area in &self.areas {
            let outline: Vec<String> =
                points(&area.high).into_iter().chain(points(&area.low).into_iter().rev()).collect();
            if !outline.is_empty() {
                let (colour, opacity) = (colours.of(area.colour), area.opacity);
                let path = path(&outline);
                out += &format!("<path d=\"{path}Z\" fill=\"{colour}\" fill-opacity=\"{opacity}\"/>");
            }
        }
        for line in &self.lines {
            let (all, colour) = (points(&line.values), colours.of(line.colour));
            let faint = if line.label.is_none() { " stroke-opacity=\"0.33\" stroke-width=\"1\"" } else { "" };
            out += &format!("<path d=\"{}\" stroke=\"{colour}\"{faint}/>", path(&all));
            for (x, y) in all.iter().filter(|_| self.dots).filter_map(|point| point.split_once(' ')) {
                out += &format!("<circle cx=\"{x}\" cy=\"{y}\" r=\"2.5\" fill=\"{colour}\"/>");
            }
        }
        out
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
        if x > LEFT && x + width > WIDTH - RIGHT {
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

fn path(points: &[String]) -> String {
    points
        .iter()
        .enumerate()
        .map(|(at, point)| format!("{}{point}", if at == 0 { 'M' } else { 'L' }))
        .collect()
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

/// Colours of the page on a light background.
struct Colours(&'static str);

impl Colours {
    fn of_page() -> Self {
        let text = assets::content("colours.css");
        Self(text.split_once('}').map_or(text, |(light, _)| light))
    }

    fn named(&self, name: &str) -> &'static str {
        let start = format!("--{name}: ");
        let value = self.0.split_once(start.as_str()).map_or("", |(_, rest)| rest);
        value.split_once(';').map_or(value, |(value, _)| value)
    }

    fn of(&self, at: usize) -> &'static str {
        self.named(&format!("run-{}", at % COLOURS))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Returns the answer about a run with these columns.
    fn steps(columns: Value) -> Value {
        let rows = columns.as_object().unwrap().values().map(|own| own.as_array().unwrap().len()).max();
        let x: Vec<usize> = (1..=rows.unwrap()).collect();
        json!({ "steps": { "x": x, "columns": columns }, "evaluations": { "x": [], "columns": {} } })
    }

    #[test]
    fn the_documentation_lists_every_chart() {
        let table: Vec<Map<String, Value>> = serde_json::from_str(table()).unwrap();
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
        assert_eq!(plots[0].lines[1].values, [0.0, 0.625]);
        assert_eq!((&plots[0].areas[0].low[0], &plots[0].areas[0].high[0]), (&-0.5, &0.5));
        assert!(plots[1].areas.is_empty());
        let stack = &plots[3];
        assert_eq!(stack.areas.len(), 2);
        // The rollout has 1 and (0.24 * 1 + 0.4 * 3) / 0.64 = 2.25, and the loss lies on top of it.
        assert_eq!(
            (stack.areas[1].low.as_slice(), &stack.areas[1].high),
            (&[1.0, 2.25][..], &vec![2.0, 3.25])
        );
        assert_eq!(stack.y_range(), (0.0, 3.25 * 1.05));
    }

    #[test]
    fn a_bucket_is_drawn_by_its_ends() {
        let column = json!({ "ends": [1, 5, 2, 0], "means": [3, 1] });
        let answer = json!({ "x": [0, 1, 2, 3], "width": 2.0, "columns": { "kl": column } });
        let (plain, smooth) = Columns::of(&answer).of_metric("kl", 0.6).unwrap();
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
        let (top, bottom) = (56.0, HEIGHT - BOTTOM);
        let room = (bottom - top) / 1.1 * 0.05;
        let line = format!("<path d=\"M64.00 {:.2}L628.00 {:.2}\"", bottom - room, top + room);
        assert!(svg.contains(&line), "{line} is not in {svg}");
        assert!(
            svg.contains(">reward</text>") && svg.contains(">0.6</text>") && svg.contains(">10</text>"),
            "{svg}"
        );
        assert_eq!(svg.matches("<circle ").count(), 2);
        assert!(
            svg.contains("stroke=\"#2f6fde\"") && svg.contains("fill=\"#1c2026\""),
            "colours of the page: {svg}"
        );
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
