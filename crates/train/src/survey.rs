//! Checks of rows before sampling: unusable rows, rows that the rewards cannot score, and rewards that apply to no row.

use std::path::Path;
use std::sync::{Mutex, PoisonError};

use omnigrpo_data::{Cause, CheckOptions, Dataset, Measure, MediumInfo, MediumRef, Report, Sample, check};
use omnigrpo_models::{MediaSettings, PromptBuilder, probe_medium};
use omnigrpo_observe::Console;
use omnigrpo_rewards::RewardSet;
use omnigrpo_text::Part;

use crate::error::Result;
use crate::plan::Objective;
use crate::scoring;

/// Settings of a check of every row.
pub struct RowCheck<'a> {
    /// Builder of prompts, whose length is estimated from the media headers. Without it, lengths are 0.
    pub prompts: Option<&'a PromptBuilder>,
    /// Objective for which a row is measured: its prompt alone, or a supervised example.
    pub objective: Objective,
    /// Settings for reading media.
    pub media: &'a MediaSettings,
    /// Survey of the rewards.
    pub survey: Option<&'a Survey<'a>>,
    /// Number of the longest prompts to list.
    pub num_longest: usize,
    /// Directory that caches the contents of media headers for the next check.
    pub cache_dir: Option<&'a Path>,
    /// Console that shows the progress.
    pub console: &'a Console,
}

impl RowCheck<'_> {
    /// Reads every row and the header of every medium, on all threads. The report lists the problems of rows.
    ///
    /// # Errors
    /// Returns an error if threads cannot be started, the cache cannot be written, or the machine fails repeatedly.
    pub fn run(&self, dataset: &Dataset) -> Result<Report> {
        let probe = |medium: &MediumRef| Ok(probe_medium(medium, &self.media.limits)?);
        let estimate = |sample: &Sample, headers: &[MediumInfo]| -> Result<Measure, Cause> {
            self.survey.map_or(Ok(()), |survey| survey.ask(sample))?;
            let Some(prompts) = self.prompts else { return Ok(Measure::default()) };
            let (tokens, plans) = match self.objective {
                Objective::Imitate => prompts.plan_sft(sample, headers)?,
                Objective::Reinforce => {
                    let (prompt, plans) = prompts.plan(sample, headers)?;
                    // The longest rows are those of the policy, whose pass keeps its activations. The teacher's prompt has to fit too.
                    prompts.plan_for_teacher(sample, &plans)?;
                    (prompt.ids.len(), plans)
                }
            };
            let numbers: usize =
                plans.iter().map(|plan| prompts.family().processor().numbers(&plan.shape)).sum();
            Ok(Measure {
                num_tokens: tokens as u64,
                media_tokens: plans.iter().map(|plan| plan.tokens as u64).sum(),
                media_bytes: 4 * numbers as u64,
            })
        };
        let bar = Mutex::new((self.console.progress("checking rows", dataset.len()), 0));
        let progress = |done: u64, _all: u64| {
            let mut bar = bar.lock().unwrap_or_else(PoisonError::into_inner);
            if done > bar.1 {
                let more = done - bar.1;
                bar.0.advance(more);
                bar.1 = done;
            }
        };
        Ok(check(
            dataset,
            &CheckOptions {
                probe: &probe,
                estimate: &estimate,
                num_longest: self.num_longest,
                num_threads: rayon::current_num_threads(),
                cache_dir: self.cache_dir,
                progress: &progress,
            },
        )?)
    }
}

/// Counter of the rows to which each reward applies. Several threads may use it.
pub struct Survey<'a> {
    rewards: &'a RewardSet,
    seen: Mutex<Surveyed>,
}

/// Results of a survey.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Surveyed {
    /// Number of rows surveyed.
    pub rows: u64,
    /// Number of rows without a ground truth.
    pub without_solution: u64,
    /// Number of rows whose question mentions `<answer>`.
    pub tags_asked_for: u64,
    /// Number of rows whose `prompt` is a text that the chat template makes a turn of.
    pub templated_texts: u64,
    /// Name of each reward and the number of rows to which it applies; `None` if this depends on the completion.
    pub applies: Vec<(String, Option<u64>)>,
}

impl Surveyed {
    /// Returns the first reward that applies to no row.
    pub fn idle(&self) -> Option<&str> {
        let idle = self.applies.iter().find(|(_, rows)| *rows == Some(0) && self.rows > 0);
        idle.map(|(name, _)| name.as_str())
    }
}

impl<'a> Survey<'a> {
    /// Creates a survey of these rewards.
    pub fn new(rewards: &'a RewardSet) -> Self {
        let applies = rewards.names().into_iter().map(|name| (name.to_owned(), Some(0))).collect();
        Self { rewards, seen: Mutex::new(Surveyed { applies, ..Surveyed::default() }) }
    }

    /// Surveys one row.
    ///
    /// # Errors
    /// Returns an error if no completion of the row can be scored.
    pub fn ask(&self, sample: &Sample) -> Result<(), Cause> {
        let applies = scoring::applies(self.rewards, sample)?;
        let says = |part: &Part| matches!(part, Part::Text(text) if text.contains("<answer"));
        let is_templated = !sample.is_text
            && sample.media.is_empty()
            && sample.columns.get("prompt").is_some_and(serde_json::Value::is_string);
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.rows += 1;
        seen.without_solution += u64::from(sample.solution.is_none());
        seen.tags_asked_for += u64::from(sample.turns.iter().flat_map(|turn| &turn.parts).any(says));
        seen.templated_texts += u64::from(is_templated);
        for ((_, count), applies) in seen.applies.iter_mut().zip(applies) {
            *count = count.zip(applies).map(|(count, applies)| count + u64::from(applies));
        }
        Ok(())
    }

    /// Returns the results so far.
    pub fn seen(&self) -> Surveyed {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Surveys rows until each reward applies to at least one of them, or until no row is left. Rows that cannot be read or
    /// scored are ignored here and reported when they are drawn.
    pub fn ask_until_none_is_idle(&self, dataset: &Dataset, rows: &[u64]) -> Surveyed {
        for some in rows.chunks(256) {
            some.iter().filter_map(|&row| dataset.get(row).ok()).for_each(|sample| drop(self.ask(&sample)));
            if self.seen().idle().is_none() {
                break;
            }
        }
        self.seen()
    }
}

#[cfg(test)]
mod tests {
    use omnigrpo_data::RowReader;
    use omnigrpo_rewards::{RewardOptions, build};
    use serde_json::json;

    use super::*;

    #[test]
    fn a_check_tells_rows_that_cannot_be_used_and_rewards_that_apply_to_none() {
        let rows = [
            json!({ "prompt": "1 + 1? Answer in <answer> tags." }),
            json!({ "prompt": "<image>What?", "image": "missing.png", "solution": "x" }),
            json!({ "prompt": "2 + 2?" }),
        ];
        let folder = tempfile::tempdir().unwrap();
        let rows = RowReader::new("rows").media_in(folder.path()).dataset(rows).unwrap();
        let rewards = build(&["accuracy", "format"], &RewardOptions::default()).unwrap();
        let survey = Survey::new(&rewards);
        let checked = RowCheck {
            prompts: None,
            objective: Objective::Reinforce,
            media: &MediaSettings::default(),
            survey: Some(&survey),
            num_longest: 1,
            cache_dir: None,
            console: &Console::plain(std::io::sink()),
        };
        let report = checked.run(&rows).unwrap();
        assert_eq!(report.bad_rows().collect::<Vec<_>>(), [1]);
        assert!(report.problems[0].what.contains("missing.png"), "{}", report.problems[0].what);
        let seen = survey.seen();
        assert_eq!((seen.rows, seen.without_solution, seen.tags_asked_for), (2, 2, 1));
        assert_eq!(seen.templated_texts, 2);
        assert_eq!(seen.applies, [("accuracy".to_owned(), Some(0)), ("format".to_owned(), Some(2))]);
        assert_eq!(seen.idle(), Some("accuracy"));
        let again = Survey::new(&rewards).ask_until_none_is_idle(&rows, &[0, 2]);
        assert_eq!(again, seen);
    }
}
