//! What the rewards say about rows before there is a completion: rows that they cannot score, rewards that apply to no
//! row, tags that nobody asks for.

use std::sync::{Mutex, PoisonError};

use omnigrpo_data::{Dataset, Sample};
use omnigrpo_rewards::RewardSet;
use omnigrpo_text::Part;

use crate::problem::Problem;
use crate::settings::Settings;

/// Columns that other programs keep the ground truth in, and that are not read as one.
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
/// Columns that are listed.
const LISTED: usize = 20;

/// Asks about rows, from several threads.
pub struct Survey<'a> {
    rewards: &'a RewardSet,
    seen: Mutex<Seen>,
}

#[derive(Default)]
struct Seen {
    rows: u64,
    without_solution: u64,
    /// Rows whose question speaks of `<answer>`.
    tags_asked_for: u64,
    /// For each reward the rows it applies to; `None` where only a score can tell.
    applies: Vec<Option<u64>>,
}

impl<'a> Survey<'a> {
    /// Of these rewards.
    pub fn new(rewards: &'a RewardSet) -> Self {
        let seen = Seen { applies: vec![Some(0); rewards.names().len()], ..Seen::default() };
        Self { rewards, seen: Mutex::new(seen) }
    }

    /// Asks about a row; the error is why no completion of it can be scored.
    pub fn ask(&self, sample: &Sample) -> Result<(), String> {
        let applies = omnigrpo_train::applies(self.rewards, sample)?;
        let says = |part: &Part| matches!(part, Part::Text(text) if text.contains("<answer"));
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.rows += 1;
        seen.without_solution += u64::from(sample.solution.is_none());
        seen.tags_asked_for += u64::from(sample.turns.iter().flat_map(|turn| &turn.parts).any(says));
        for (count, applies) in seen.applies.iter_mut().zip(applies) {
            *count = count.zip(applies).map(|(count, applies)| count + u64::from(applies));
        }
        Ok(())
    }

    /// What to say about the rows that were asked about, a line each.
    pub fn warnings(&self, settings: &Settings) -> Vec<String> {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let mut lines = Vec::new();
        for (name, applies) in self.rewards.names().into_iter().zip(&seen.applies) {
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
        let wants_tags = self.rewards.names().contains(&"format");
        if wants_tags && seen.rows > 0 && seen.tags_asked_for == 0 && !system.contains("<answer") {
            lines.push(
                "no question asks for the tags that the reward `format` wants, so it stays 0 unless the model writes them \
                 anyway; `--question_template default` asks for them"
                    .to_owned(),
            );
        }
        lines
    }

    /// A reward that applies to no row of the dataset.
    pub fn idle(&self, dataset: &Dataset) -> Option<Problem> {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let nowhere = |applies: &Option<u64>| *applies == Some(0) && seen.rows > 0;
        let name = self.rewards.names()[seen.applies.iter().position(nowhere)?];
        let problem = Problem::failure(format!("the reward `{name}` applies to no row"));
        if seen.without_solution < seen.rows {
            return Some(
                problem
                    .got(format!("{} rows whose ground truth it cannot read", seen.rows))
                    .expected("a ground truth of its kind; `rewards list` says what each reward compares")
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
                    Some(name) => format!("is it in `{name}`? `--solution_column {name}` says so"),
                    None => "`--solution_column NAME` names its column; or leave the reward out".to_owned(),
                }),
        )
    }
}
