//! Drawing rows and making prompts of them; a row that cannot be used costs itself, not the run.

use std::path::PathBuf;
use std::sync::Arc;

use omnigrpo_data::{Dataset, MediumSource, Order, Sample};
use omnigrpo_models::{Prompt, PromptBuilder, SftExample};

use crate::error::{Result, TrainError};

/// What to do about rows that cannot be used.
#[derive(Clone, Debug)]
pub struct SkipPolicy {
    /// Stop at the first one.
    pub strict: bool,
    /// Stop when more than this share of all rows is skipped.
    pub max_share: f64,
}

/// A row that could not be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SkippedRow {
    /// Index in the dataset.
    pub row: u64,
    /// Its id.
    pub id: String,
    /// Why.
    pub reason: String,
}

/// A row with its prompt.
#[derive(Clone, Debug)]
pub struct PreparedRow {
    /// The row.
    pub sample: Sample,
    /// Its prompt, media decoded.
    pub prompt: Arc<Prompt>,
}

/// Draws prepared rows in order; where one cannot be used the next takes its place.
pub struct RowSource {
    dataset: Arc<Dataset>,
    order: Order,
    prompts: Arc<PromptBuilder>,
    policy: SkipPolicy,
    total: u64,
    fresh: Vec<SkippedRow>,
}

impl RowSource {
    /// A source over an order of the dataset's rows.
    #[must_use]
    pub fn new(dataset: Arc<Dataset>, order: Order, prompts: Arc<PromptBuilder>, policy: SkipPolicy) -> Self {
        let total = (order.num_usable() + order.state().skipped.len()) as u64;
        Self { dataset, order, prompts, policy, total, fresh: Vec::new() }
    }

    /// The order, for checkpoints.
    pub fn order(&self) -> &Order {
        &self.order
    }

    /// The order, for resuming.
    pub fn order_mut(&mut self) -> &mut Order {
        &mut self.order
    }

    /// Rows skipped so far.
    #[must_use]
    pub fn num_skipped(&self) -> usize {
        self.order.state().skipped.len()
    }

    /// The next `count` rows with their prompts.
    ///
    /// # Errors
    /// No usable row left, or more skipped rows than the policy allows.
    pub fn draw(&mut self, count: usize) -> Result<Vec<PreparedRow>> {
        self.draw_with(count, |prompts, sample| {
            let prompt = prompts.build(&sample).map_err(|e| (sample.id.clone(), e.to_string()))?;
            Ok(PreparedRow { sample, prompt: Arc::new(prompt) })
        })
    }

    /// The next `count` rows as supervised examples.
    ///
    /// # Errors
    /// As [`Self::draw`].
    pub fn draw_sft(&mut self, count: usize) -> Result<Vec<SftExample>> {
        self.draw_with(count, |prompts, sample| {
            prompts.build_sft(&sample).map_err(|e| (sample.id, e.to_string()))
        })
    }

    fn draw_with<T>(
        &mut self,
        count: usize,
        make: impl Fn(&PromptBuilder, Sample) -> std::result::Result<T, (String, String)>,
    ) -> Result<Vec<T>> {
        let mut out = Vec::with_capacity(count);
        while out.len() < count {
            let row = self.order.draw().map_err(|e| TrainError::Data { what: e.to_string() })?;
            let made = match self.dataset.get(row) {
                Ok(sample) => make(&self.prompts, sample),
                Err(e) => Err((self.dataset.id(row), e.to_string())),
            };
            match made {
                Ok(value) => out.push(value),
                Err((id, reason)) => self.skip(row, &id, &reason)?,
            }
        }
        Ok(out)
    }

    /// Rows skipped since the last call, also after an error.
    pub fn take_skipped(&mut self) -> Vec<SkippedRow> {
        std::mem::take(&mut self.fresh)
    }

    fn skip(&mut self, row: u64, id: &str, reason: &str) -> Result<()> {
        self.order.skip(row);
        self.fresh.push(SkippedRow { row, id: id.to_owned(), reason: reason.to_owned() });
        if self.policy.strict {
            return Err(TrainError::Data {
                what: format!(
                    "row {row} ({id}) cannot be used: {reason}; without strict_media it would be skipped"
                ),
            });
        }
        check_share(self.num_skipped() as u64, self.total, self.policy.max_share)
    }
}

/// Whether the share of skipped rows is still within bounds.
pub(crate) fn check_share(skipped: u64, total: u64, max_share: f64) -> Result<()> {
    if skipped as f64 > max_share * total as f64 {
        return Err(TrainError::Data {
            what: format!(
                "{skipped} of {total} rows cannot be used, more than max_skipped ({max_share}) allows; the rows and \
                 reasons are in skipped.jsonl of the run directory"
            ),
        });
    }
    Ok(())
}

/// Files of a sample's media, for rewards and records.
#[must_use]
pub fn media_paths(sample: &Sample) -> Vec<PathBuf> {
    sample
        .media
        .iter()
        .flat_map(|m| match &m.source {
            MediumSource::Path(path) => vec![path.clone()],
            MediumSource::Frames(frames) => frames.clone(),
            MediumSource::Url(url) => vec![PathBuf::from(url)],
        })
        .collect()
}
