//! Drawing rows and making prompts of them; a row that cannot be used costs itself, not the run.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use omnigrpo_data::{Dataset, MediumSource, Order, RowError, Sample};
use omnigrpo_guard::{Fault, WAITS, fault, retried, told};
use omnigrpo_models::{Features, Model, Prompt, PromptBuilder, SftExample};
use omnigrpo_rewards::RewardSet;
use omnigrpo_rollout::Request;

use crate::error::{Result, TrainError};
use crate::features::encode_plain;
use crate::scoring;

/// Treatment of rows that cannot be used.
#[derive(Clone, Debug)]
pub struct SkipPolicy {
    /// Stop at the first one.
    pub strict: bool,
    /// Stop when more than this share of all rows is skipped.
    pub max_share: f64,
}

impl Default for SkipPolicy {
    /// At most one row in twenty: a broken dataset should not look like a small one.
    fn default() -> Self {
        Self { strict: false, max_share: 0.05 }
    }
}

impl SkipPolicy {
    /// Whether so many of all rows may be skipped.
    #[must_use]
    pub fn tolerates(&self, skipped: u64, total: u64) -> bool {
        let max_share = if self.strict { 0.0 } else { self.max_share };
        skipped as f64 <= max_share * total as f64
    }
}

/// A row that could not be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SkippedRow {
    /// Index in the dataset.
    pub row: u64,
    /// Id of the row.
    pub id: String,
    /// Why.
    pub reason: String,
    /// Id of the row that took its place; none where no row was drawn for it.
    pub replaced_by: Option<String>,
}

impl std::fmt::Display for SkippedRow {
    /// For the console.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "skipped row {} (id {}): {}", self.row, self.id, self.reason)
    }
}

/// A row with its prompt.
#[derive(Clone, Debug)]
pub struct PreparedRow {
    /// The row.
    pub sample: Sample,
    /// Prompt with decoded media.
    pub prompt: Arc<Prompt>,
    /// The pass over the data that drew it, from 0.
    pub epoch: u64,
}

impl PreparedRow {
    /// Decodes the media of a row and renders its prompt, as in that pass over the data.
    pub fn new(prompts: &PromptBuilder, sample: Sample, epoch: u64) -> omnigrpo_models::Result<Self> {
        let prompt = Arc::new(prompts.build_in(&sample, epoch)?);
        Ok(Self { sample, prompt, epoch })
    }

    /// Makes a row whose media have the right size and no content ([`PromptBuilder::outline`]).
    ///
    /// # Errors
    /// As [`PromptBuilder::outline`].
    pub fn outline(prompts: &PromptBuilder, sample: Sample) -> omnigrpo_models::Result<Self> {
        let prompt = Arc::new(prompts.outline(&sample)?);
        Ok(Self { sample, prompt, epoch: 0 })
    }
}

/// A row of a dataset that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unusable {
    /// Id of the row.
    pub id: String,
    /// Why.
    pub reason: String,
}

/// The outcome of preparing a row. The outer error is the machine's and says nothing about the row.
type Attempt<T> = Result<Result<T, Unusable>>;

/// Reads a row of a dataset and makes something of it. With `rewards` a row that they cannot score is as unusable as one that
/// cannot be read. A failure of the machine is waited for.
fn attempted<T>(
    dataset: &Dataset,
    rewards: Option<&RewardSet>,
    row: u64,
    build: impl Fn(Sample) -> omnigrpo_models::Result<T>,
) -> Attempt<T> {
    let machine =
        |id: &str, source: omnigrpo_data::Cause| TrainError::Machine { row, id: id.to_owned(), source };
    let read = || match dataset.get(row) {
        Err(error) if fault(&error, Fault::Row) == Fault::Machine => {
            Err(machine(&dataset.id(row), error.into()))
        }
        other => Ok(other),
    };
    let attempt = || -> Attempt<T> {
        let sample = match read()? {
            Ok(sample) => sample,
            Err(error) => return Ok(Err(Unusable { id: dataset.id(row), reason: reason(&error) })),
        };
        let id = sample.id.clone();
        if let Some(Err(why)) = rewards.map(|rewards| scoring::applies(rewards, &sample)) {
            return match fault(&*why, Fault::Row) {
                Fault::Machine => Err(machine(&id, why)),
                _ => Ok(Err(Unusable { id, reason: told(&*why) })),
            };
        }
        match build(sample) {
            Ok(made) => Ok(Ok(made)),
            Err(error) if fault(&error, Fault::Row) == Fault::Machine => Err(machine(&id, error.into())),
            Err(error) => {
                // A folder that has gone away since the row was read.
                drop(read()?);
                Ok(Err(Unusable { id, reason: told(&error) }))
            }
        }
    };
    retried(&WAITS, attempt)
}

/// The way from a row of a dataset to its prompt, the same for training, evaluation, generation, scoring and measuring. With
/// `rewards` a row that they cannot score is as unusable as one that cannot be read. [`encode`](crate::encode) goes on to the
/// features of its media, and [`requests`] makes of both what a generator completes.
///
/// # Errors
/// [`TrainError::Machine`] where the machine failed and went on failing; within, why the row cannot be used.
pub fn prepare(
    dataset: &Dataset,
    prompts: &PromptBuilder,
    rewards: Option<&RewardSet>,
    row: u64,
    epoch: u64,
) -> Result<Result<PreparedRow, Unusable>> {
    attempted(dataset, rewards, row, |sample| PreparedRow::new(prompts, sample, epoch))
}

/// Rows that are ready for a generator, and those that cannot be used.
#[derive(Default)]
pub(crate) struct Ready {
    pub(crate) rows: Vec<PreparedRow>,
    /// Features of each row's media.
    pub(crate) features: Vec<Vec<Features>>,
    /// By number.
    pub(crate) unusable: Vec<(u64, Unusable)>,
}

/// Prepares rows up to the features of their media.
///
/// # Errors
/// A failure of the machine, a dataset that was written to while in use.
pub(crate) fn prepare_all(
    model: &Model,
    prompts: &PromptBuilder,
    dataset: &Dataset,
    rewards: Option<&RewardSet>,
    rows: &[u64],
) -> Result<Ready> {
    let mut ready = Ready::default();
    for &row in rows {
        let made = prepare(dataset, prompts, rewards, row, 0)?.and_then(|prepared| {
            let encoded = encode_plain(model, [&*prepared.prompt]);
            let id = || prepared.sample.id.clone();
            encoded.map_err(|e| Unusable { id: id(), reason: told(&e) }).map(|own| (prepared, own))
        });
        match made {
            Ok((prepared, own)) => {
                ready.rows.push(prepared);
                ready.features.extend(own);
            }
            Err(why) => ready.unusable.push((row, why)),
        }
    }
    dataset.unchanged()?;
    Ok(ready)
}

/// Asks for `num_samples` completions of each row. Samples of a row that comes again in the list are numbered on, so that
/// their random numbers are others.
#[must_use]
pub fn requests<'a>(
    rows: &'a [PreparedRow],
    features: &'a [Vec<Features>],
    num_samples: usize,
    rollout: u64,
) -> Vec<Request<'a>> {
    let before = scoring::occurrences(rows.iter().map(|row| row.sample.row));
    let each = rows.iter().zip(features).zip(before);
    each.map(|((row, features), before)| Request {
        prompt: &row.prompt,
        features,
        num_samples,
        rollout,
        row: row.sample.row,
        first_sample: before * num_samples as u32,
    })
    .collect()
}

/// Form of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Making {
    /// A prompt.
    Prompt,
    /// A supervised example.
    Example,
}

enum Made {
    Prompt(PreparedRow),
    Example(SftExample),
}

/// Draws prepared rows in order; where one cannot be used the next takes its place.
///
/// While a step computes, [`Self::prepare_ahead`] has the rows of the next one read and decoded on another thread. That
/// changes no result: the thread only makes what [`Self::draw`] would make of the same rows, the order moves when they
/// are drawn, and a row that failed ahead is skipped when its turn comes. What a failing machine kept it from making, the thread
/// itself included, is made when it is drawn.
pub struct RowSource {
    dataset: Arc<Dataset>,
    order: Order,
    prompts: Arc<PromptBuilder>,
    rewards: Option<Arc<RewardSet>>,
    policy: SkipPolicy,
    total: u64,
    fresh: Vec<SkippedRow>,
    ahead: Option<Ahead>,
    ahead_time: Duration,
}

/// By row and epoch: the row's id and what was made of it, or why it cannot be used.
type MadeRows = HashMap<(u64, u64), Result<(String, Made), Unusable>>;

struct Ahead {
    making: Making,
    thread: JoinHandle<(MadeRows, Duration)>,
}

/// Makes a row into its form, with its id.
fn make(
    dataset: &Dataset,
    prompts: &PromptBuilder,
    rewards: Option<&RewardSet>,
    (row, epoch): (u64, u64),
    making: Making,
) -> Attempt<(String, Made)> {
    attempted(dataset, rewards, row, |sample| {
        Ok(match making {
            Making::Prompt => {
                let row = PreparedRow::new(prompts, sample, epoch)?;
                (row.sample.id.clone(), Made::Prompt(row))
            }
            Making::Example => {
                let example = prompts.build_sft(&sample, epoch)?;
                (sample.id, Made::Example(example))
            }
        })
    })
}

impl RowSource {
    /// A source over an order of the dataset's rows. `rewards` are those that will score completions of them.
    #[must_use]
    pub fn new(
        dataset: Arc<Dataset>,
        order: Order,
        prompts: Arc<PromptBuilder>,
        rewards: Option<Arc<RewardSet>>,
        policy: SkipPolicy,
    ) -> Self {
        let total = (order.num_usable() + order.state().skipped.len()) as u64;
        let (fresh, ahead, ahead_time) = (Vec::new(), None, Duration::ZERO);
        Self { dataset, order, prompts, rewards, policy, total, fresh, ahead, ahead_time }
    }

    /// Begins to make what the next `count` rows become, on another thread.
    pub fn prepare_ahead(&mut self, count: usize, making: Making) {
        let mut order = self.order.clone();
        let rows: Vec<(u64, u64)> =
            (0..count).map_while(|_| Some((order.draw().ok()?, order.state().epoch))).collect();
        let (dataset, prompts) = (Arc::clone(&self.dataset), Arc::clone(&self.prompts));
        let rewards = self.rewards.clone();
        let work = move || {
            let started = Instant::now();
            let each = |row| Some((row, make(&dataset, &prompts, rewards.as_deref(), row, making).ok()?));
            let made = rows.into_iter().map_while(each).collect();
            (made, started.elapsed())
        };
        let thread = std::thread::Builder::new().name("rows ahead".to_owned()).spawn(work);
        self.ahead = thread.ok().map(|thread| Ahead { making, thread });
    }

    /// Time spent on other threads since the last call, for rows that have been drawn.
    pub fn take_ahead_time(&mut self) -> Duration {
        std::mem::take(&mut self.ahead_time)
    }

    /// The order, for checkpoints.
    pub fn order(&self) -> &Order {
        &self.order
    }

    /// The order, for resuming.
    pub(crate) fn order_mut(&mut self) -> &mut Order {
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
    /// No usable row left, more skipped rows than the policy allows, a dataset that was written to while in use, or the machine's
    /// failure, after which the order is to be put back to where it was.
    pub fn draw(&mut self, count: usize) -> Result<Vec<PreparedRow>> {
        let each = |made| if let Made::Prompt(row) = made { Some(row) } else { None };
        Ok(self.draw_made(count, Making::Prompt)?.into_iter().filter_map(each).collect())
    }

    /// The next `count` rows as supervised examples.
    pub(crate) fn draw_sft(&mut self, count: usize) -> Result<Vec<SftExample>> {
        let each = |made| if let Made::Example(example) = made { Some(example) } else { None };
        Ok(self.draw_made(count, Making::Example)?.into_iter().filter_map(each).collect())
    }

    fn draw_made(&mut self, count: usize, making: Making) -> Result<Vec<Made>> {
        let mut ready = HashMap::new();
        if let Some(ahead) = self.ahead.take()
            && ahead.making == making
            // A thread that panicked made nothing: its rows are made here, and the panic comes again in view.
            && let Ok((made, time)) = ahead.thread.join()
        {
            ready = made;
            self.ahead_time += time;
        }
        let mut out = Vec::with_capacity(count);
        // From here on skipped rows wait for the row that takes their place.
        let mut waiting = self.fresh.len();
        while out.len() < count {
            let row = self.order.draw()?;
            let at = (row, self.order.state().epoch);
            let made = match ready.remove(&at) {
                Some(made) => made,
                None => make(&self.dataset, &self.prompts, self.rewards.as_deref(), at, making)?,
            };
            // A file that changes is no fault of the row.
            self.dataset.unchanged()?;
            match made {
                Ok((id, value)) => {
                    out.push(value);
                    self.fresh[waiting..].iter_mut().for_each(|row| row.replaced_by = Some(id.clone()));
                    waiting = self.fresh.len();
                }
                Err(Unusable { id, reason }) => self.skip(row, &id, &reason)?,
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
        self.fresh.push(SkippedRow { row, id: id.to_owned(), reason: reason.to_owned(), replaced_by: None });
        if self.policy.strict {
            return Err(TrainError::Data {
                what: format!(
                    "row {row} ({id}) cannot be used: {reason}; without SkipPolicy::strict it would be skipped"
                ),
            });
        }
        check_share(self.num_skipped() as u64, self.total, self.policy.max_share)
    }
}

/// Returns where and why a row cannot be read; the caller adds its index.
fn reason(error: &RowError) -> String {
    format!("{}:{}: {}", error.file.display(), error.line, told(&error.problem))
}

/// Whether the share of skipped rows is still within bounds.
pub(crate) fn check_share(skipped: u64, total: u64, max_share: f64) -> Result<()> {
    if !(SkipPolicy { strict: false, max_share }).tolerates(skipped, total) {
        return Err(TrainError::Data {
            what: format!(
                "{skipped} of {total} rows cannot be used, more than SkipPolicy::max_share ({max_share}) allows; the rows and \
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
        })
        .collect()
}
