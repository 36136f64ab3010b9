//! Checks of rows before there is a completion: rows that cannot be used, rows that the rewards cannot score, rewards
//! that apply to no row.

use std::path::Path;
use std::sync::{Mutex, PoisonError};

use omnigrpo_data::{Cause, CheckOptions, Dataset, Measure, MediumInfo, MediumRef, Report, Sample, check};
use omnigrpo_models::{Limits, PromptBuilder, probe_medium};
use omnigrpo_rewards::RewardSet;
use omnigrpo_text::Part;

use crate::error::Result;
use crate::scoring;

/// Settings of a check of every row.
pub struct RowCheck<'a> {
    /// Makes prompts, whose length is estimated from headers of media; without it lengths are 0.
    pub prompts: Option<&'a PromptBuilder>,
    /// Limits of one medium.
    pub limits: &'a Limits,
    /// Asks rewards.
    pub survey: Option<&'a Survey<'a>>,
    /// How many of the longest prompts are listed.
    pub num_longest: usize,
    /// Keeps what headers of media said, for the next check.
    pub cache_dir: Option<&'a Path>,
    /// Called with the rows done and all of them, from several threads.
    pub progress: &'a (dyn Fn(u64, u64) + Sync),
}

impl RowCheck<'_> {
    /// Reads every row and the header of every medium, on all threads. Problems of rows are in the report.
    ///
    /// # Errors
    /// Threads that cannot be started, a cache that cannot be written, a machine that goes on failing.
    pub fn run(&self, dataset: &Dataset) -> Result<Report> {
        let probe = |medium: &MediumRef| Ok(probe_medium(medium, self.limits)?);
        let estimate = |sample: &Sample, headers: &[MediumInfo]| -> Result<Measure, Cause> {
            self.survey.map_or(Ok(()), |survey| survey.ask(sample))?;
            let Some(prompts) = self.prompts else { return Ok(Measure::default()) };
            let (prompt, plans) = prompts.plan(sample, headers)?;
            let numbers: usize =
                plans.iter().map(|plan| prompts.family().processor().numbers(&plan.shape)).sum();
            Ok(Measure {
                num_tokens: prompt.ids.len() as u64,
                media_tokens: plans.iter().map(|plan| plan.tokens as u64).sum(),
                media_bytes: 4 * numbers as u64,
            })
        };
        Ok(check(
            dataset,
            &CheckOptions {
                probe: &probe,
                estimate: &estimate,
                num_longest: self.num_longest,
                num_threads: rayon::current_num_threads(),
                cache_dir: self.cache_dir,
                progress: self.progress,
            },
        )?)
    }
}

/// Asks rewards about rows, from several threads.
pub struct Survey<'a> {
    rewards: &'a RewardSet,
    seen: Mutex<Surveyed>,
}

/// Answers of rewards about the rows that they were asked about.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Surveyed {
    /// Rows.
    pub rows: u64,
    /// Rows without a ground truth.
    pub without_solution: u64,
    /// Rows whose question speaks of `<answer>`.
    pub tags_asked_for: u64,
    /// For each reward its name and the rows that it applies to; `None` where only a score can tell.
    pub applies: Vec<(String, Option<u64>)>,
}

impl Surveyed {
    /// The first reward that applies to no row.
    #[must_use]
    pub fn idle(&self) -> Option<&str> {
        let idle = self.applies.iter().find(|(_, rows)| *rows == Some(0) && self.rows > 0);
        idle.map(|(name, _)| name.as_str())
    }
}

impl<'a> Survey<'a> {
    /// A survey of these rewards.
    #[must_use]
    pub fn new(rewards: &'a RewardSet) -> Self {
        let applies = rewards.names().into_iter().map(|name| (name.to_owned(), Some(0))).collect();
        Self { rewards, seen: Mutex::new(Surveyed { applies, ..Surveyed::default() }) }
    }

    /// Asks about a row.
    ///
    /// # Errors
    /// Why no completion of the row can be scored.
    pub fn ask(&self, sample: &Sample) -> Result<(), Cause> {
        let applies = scoring::applies(self.rewards, sample)?;
        let says = |part: &Part| matches!(part, Part::Text(text) if text.contains("<answer"));
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.rows += 1;
        seen.without_solution += u64::from(sample.solution.is_none());
        seen.tags_asked_for += u64::from(sample.turns.iter().flat_map(|turn| &turn.parts).any(says));
        for ((_, count), applies) in seen.applies.iter_mut().zip(applies) {
            *count = count.zip(applies).map(|(count, applies)| count + u64::from(applies));
        }
        Ok(())
    }

    /// Returns the answers so far.
    #[must_use]
    pub fn seen(&self) -> Surveyed {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Asks about rows until each reward applies to one of them, and says which reward never does. A row that cannot be read or
    /// scored is met when it is drawn.
    #[must_use]
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
    use omnigrpo_data::ReadOptions;
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
        let rows = Dataset::from_rows("rows", rows, folder.path(), &ReadOptions::default()).unwrap();
        let rewards = build(&["accuracy", "format"], &RewardOptions::default()).unwrap();
        let survey = Survey::new(&rewards);
        let checked = RowCheck {
            prompts: None,
            limits: &Limits::default(),
            survey: Some(&survey),
            num_longest: 1,
            cache_dir: None,
            progress: &|_, _| {},
        };
        let report = checked.run(&rows).unwrap();
        assert_eq!(report.bad_rows().collect::<Vec<_>>(), [1]);
        assert!(report.problems[0].what.contains("missing.png"), "{}", report.problems[0].what);
        let seen = survey.seen();
        assert_eq!((seen.rows, seen.without_solution, seen.tags_asked_for), (2, 2, 1));
        assert_eq!(seen.applies, [("accuracy".to_owned(), Some(0)), ("format".to_owned(), Some(2))]);
        assert_eq!(seen.idle(), Some("accuracy"));
        let again = Survey::new(&rewards).ask_until_none_is_idle(&rows, &[0, 2]);
        assert_eq!(again, seen);
    }
}
