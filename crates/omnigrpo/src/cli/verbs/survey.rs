//! Warnings about rows before training: rewards that apply to no row, tags that no question requests.

use omnigrpo_data::Dataset;
use omnigrpo_train::Surveyed;

use crate::settings::Settings;
use crate::settings::problem::Problem;

/// Columns in which other programs store the ground truth. This program does not read them as ground truth.
const TRUTH_COLUMNS: [&str; 12] = [
    "groundtruth",
    "gt",
    "labels",
    "target",
    "targets",
    "gold",
    "reward_model",
    "response",
    "output",
    "solutions",
    "correct_answer",
    "final_answer",
];
/// Maximum number of columns to list.
const LISTED: usize = 20;

/// Returns warnings about the checked rows, one per line.
pub fn warnings(seen: &Surveyed, settings: &Settings) -> Vec<String> {
    let mut lines = Vec::new();
    for (name, applies) in &seen.applies {
        let Some(applies) = applies.filter(|&applies| (1..seen.rows).contains(&applies)) else {
            continue;
        };
        let missing = seen.rows - applies;
        lines.push(format!(
            "the reward `{name}` does not apply to {missing} of {} rows: they have no ground truth that it can read, and \
             earn nothing from it",
            seen.rows
        ));
    }
    let system = settings.prompts.render.system.as_deref().unwrap_or_default();
    let wants_tags = seen.applies.iter().any(|(name, _)| name == "format");
    if wants_tags && seen.rows > 0 && seen.tags_asked_for == 0 && !system.contains("<answer") {
        lines.push(
            "no question asks for the tags that the reward `format` wants, so it stays 0 unless the model writes them \
             anyway; `--question_template default` asks for them"
                .to_owned(),
        );
    }
    lines
}

/// Reports a reward that applies to no row of the dataset.
pub fn idle(seen: &Surveyed, dataset: &Dataset) -> Option<Problem> {
    let name = seen.idle()?;
    let problem = Problem::failure(format!("the reward `{name}` applies to no row"));
    if seen.without_solution < seen.rows {
        return Some(
            problem
                .got(format!("{} rows with a ground truth that the reward cannot read", seen.rows))
                .expected("a ground truth of the right kind; `rewards list` shows what each reward compares")
                .help("choose another reward, or correct the rows"),
        );
    }
    let mut columns = dataset.columns_seen();
    let near = columns.iter().find(|name| TRUTH_COLUMNS.contains(&name.to_lowercase().as_str())).cloned();
    if columns.len() > LISTED {
        columns.truncate(LISTED);
        columns.push("…".to_owned());
    }
    Some(
        problem
            .got(format!("{} rows with the columns {}", seen.rows, columns.join(", ")))
            .expected("a ground truth in the column `solution` or `answer`, or a final assistant turn")
            .help(match near {
                Some(name) => format!("if it is in `{name}`, add `--solution_column {name}`"),
                None => "`--solution_column NAME` names its column; or leave the reward out".to_owned(),
            }),
    )
}
