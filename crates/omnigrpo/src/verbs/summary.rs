//! The numbers of an evaluation, on the terminal and in a file.

use std::path::Path;

use anyhow::Result;
use omnigrpo_rewards::{MEASURES, Summary};

use super::infer::write_lines;

/// Writes the numbers beside the rows: `<output>.summary.json` without the output's own ending.
pub fn write(output: &Path, summary: &Summary) -> Result<()> {
    write_lines(&output.with_extension("summary.json"), &[format!("{:#}", summary.to_json())])
}

/// Metrics, then the tables by category, by label and of explanations.
pub fn tables(summary: &Summary) -> String {
    let mut out = String::new();
    for (name, value) in &summary.metrics {
        let Some(value) = value else { continue };
        // Explanations have a table; what ends in `_reward` repeats a number under another program's name.
        if name.starts_with("eval_explanation/") || name.ends_with("_reward") && name != "eval_reward" {
            continue;
        }
        out.push_str(&format!("{name:<36} {value:.4}"));
        if let (true, Some((low, high))) = (name == "eval_accuracy", summary.accuracy_interval) {
            out.push_str(&format!("  (95 % interval {low:.3} to {high:.3})"));
        }
        out.push('\n');
    }
    categories(summary, &mut out);
    confusion(summary, &mut out);
    explanations(summary, &mut out);
    out
}

fn number(value: Option<f64>) -> String {
    value.map_or("-".to_owned(), |value| format!("{value:.4}"))
}

fn categories(summary: &Summary, out: &mut String) {
    if summary.categories.is_empty() {
        return;
    }
    let width = width("category", summary.categories.iter().map(|category| category.name.as_str()));
    out.push_str(&format!("\n{:<width$} {:>6} {:>10} {:>10}", "category", "rows", "accuracy", "no answer"));
    for name in &summary.reward_names {
        out.push_str(&format!(" {name:>12}"));
    }
    out.push('\n');
    for category in &summary.categories {
        out.push_str(&format!(
            "{:<width$} {:>6} {:>10} {:>10}",
            category.name,
            category.rows,
            number(category.accuracy),
            number(category.parse_fail_rate)
        ));
        for mean in &category.means {
            out.push_str(&format!(" {:>12}", number(*mean)));
        }
        out.push('\n');
    }
}

fn confusion(summary: &Summary, out: &mut String) {
    let Some(confusion) = &summary.confusion else { return };
    let corner = "truth \\ answer";
    let width = width(corner, confusion.labels.iter().map(String::as_str));
    out.push_str(&format!("\n{corner:<width$}"));
    let columns: Vec<&str> = confusion.labels.iter().map(String::as_str).chain(["none", "recall"]).collect();
    for column in &columns {
        out.push_str(&format!(" {column:>9}"));
    }
    out.push('\n');
    for ((label, counts), recall) in confusion.labels.iter().zip(&confusion.counts).zip(confusion.recalls()) {
        out.push_str(&format!("{label:<width$}"));
        for (count, column) in counts.iter().zip(&columns) {
            out.push_str(&format!(" {count:>0$}", column.chars().count().max(9)));
        }
        out.push_str(&format!(" {:>9}\n", number(recall)));
    }
    if confusion.unlabelled > 0 {
        out.push_str(&format!(
            "{} completions whose ground truth is no label are left out\n",
            confusion.unlabelled
        ));
    }
}

fn explanations(summary: &Summary, out: &mut String) {
    let Some(report) = &summary.explanations else { return };
    out.push_str(&format!("\n{:<24}", "explanations, percent"));
    for measure in MEASURES {
        out.push_str(&format!(" {measure:>12}"));
    }
    out.push('\n');
    for ((view, scores), num) in
        report.views().into_iter().zip([report.num_explained, report.num_right, report.num_explained])
    {
        out.push_str(&format!("{:<24}", format!("{view} ({num})")));
        for score in scores {
            out.push_str(&format!(" {:>12}", score.map_or("-".to_owned(), |score| format!("{score:.2}"))));
        }
        out.push('\n');
    }
    if report.unfiltered.iter().any(Option::is_none) {
        out.push_str("BERTScore needs --bertscore_model and the reward bertscore, which may weigh 0\n");
    }
}

fn width<'a>(title: &str, names: impl Iterator<Item = &'a str>) -> usize {
    names.map(|name| name.chars().count()).chain([title.chars().count(), 20]).max().unwrap_or(20)
}
