//! Output of an evaluation's results, on the terminal and to a file.

use omnigrpo_observe::{columns, is_alias, stdout_columns};
use omnigrpo_rewards::{MEASURES, Summary};

/// Returns the metrics, followed by tables by category, by label and of explanations.
pub fn tables(summary: &Summary) -> String {
    let mut out = String::new();
    for (name, value) in &summary.metrics {
        let Some(value) = value else { continue };
        // Explanations have their own table.
        if name.starts_with("eval_explanation/") || is_alias(name) {
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

fn width() -> usize {
    stdout_columns().unwrap_or(80)
}

fn categories(summary: &Summary, out: &mut String) {
    if summary.categories.is_empty() {
        return;
    }
    let names: Vec<String> = summary.reward_names.iter().map(|name| format!("mean {name}")).collect();
    let own = ["category", "rows", "right", "no tag"];
    let header: Vec<&str> = own.into_iter().chain(names.iter().map(String::as_str)).collect();
    let rows: Vec<Vec<String>> = summary
        .categories
        .iter()
        .map(|category| {
            let own = [
                category.name.clone(),
                category.rows.to_string(),
                number(category.accuracy),
                number(category.parse_fail_rate),
            ];
            own.into_iter().chain(category.means.iter().copied().map(number)).collect()
        })
        .collect();
    out.push_str(&format!("\n{}", columns(&header, &rows, width())));
}

fn confusion(summary: &Summary, out: &mut String) {
    let Some(confusion) = &summary.confusion else { return };
    let labels = confusion.labels.iter().map(String::as_str);
    let header: Vec<&str> = ["truth \\ answer"].into_iter().chain(labels).chain(["none", "recall"]).collect();
    let each = confusion.labels.iter().zip(&confusion.counts).zip(confusion.recalls());
    let rows: Vec<Vec<String>> = each
        .map(|((label, counts), recall)| {
            let counts = counts.iter().map(ToString::to_string);
            std::iter::once(label.clone()).chain(counts).chain([number(recall)]).collect()
        })
        .collect();
    out.push_str(&format!("\n{}", columns(&header, &rows, width())));
    if confusion.unlabelled > 0 {
        out.push_str(&format!(
            "{} completions whose ground truth is no label are left out\n",
            confusion.unlabelled
        ));
    }
}

fn explanations(summary: &Summary, out: &mut String) {
    let Some(report) = &summary.explanations else { return };
    let header: Vec<&str> = ["explanations, percent"].into_iter().chain(MEASURES.iter().copied()).collect();
    let nums = [report.num_explained, report.num_right, report.num_explained];
    let rows: Vec<Vec<String>> = report
        .views()
        .into_iter()
        .zip(nums)
        .map(|((view, scores), num)| {
            let scores =
                scores.iter().map(|score| score.map_or("-".to_owned(), |score| format!("{score:.2}")));
            std::iter::once(format!("{view} ({num})")).chain(scores).collect()
        })
        .collect();
    out.push_str(&format!("\n{}", columns(&header, &rows, width())));
    if report.unfiltered.iter().any(Option::is_none) {
        out.push_str("BERTScore needs --bertscore_model and the reward bertscore, whose weight may be 0\n");
    }
}
