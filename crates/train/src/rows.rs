//! Drawing of rows and building of their prompts. An unusable row is skipped and does not end the run.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use omnigrpo_data::{Dataset, MediumSource, Order, RowError, Sample};
use omnigrpo_guard::{Fault, WAITS, fault, retried, told};
use omnigrpo_models::{Features, MediumInput, MediumShape, Model, ModelError, Prompt, PromptBuilder};
use omnigrpo_rewards::RewardSet;
use omnigrpo_rollout::Request;
use omnigrpo_text::MediumKind;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::{MAX_SHARE, Result, STRICT, TrainError};
use crate::features::encode_plain;
use crate::imitate::{ExampleSize, StepExample};
use crate::scoring;
use crate::split::Split;

/// Treatment of unusable rows.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SkipPolicy {
    /// True to stop at the first unusable row.
    pub strict: bool,
    /// Maximum share of skipped rows; the run stops above it.
    pub max_share: f64,
}

impl Default for SkipPolicy {
    /// Returns a policy that skips at most one row in twenty, so that a broken dataset does not pass for a small one.
    fn default() -> Self {
        Self { strict: false, max_share: 0.05 }
    }
}

impl SkipPolicy {
    /// Returns true if `skipped` of `total` rows may be skipped.
    pub fn tolerates(&self, skipped: u64, total: u64) -> bool {
        let max_share = if self.strict { 0.0 } else { self.max_share };
        skipped as f64 <= max_share * total as f64
    }
}

/// Row that was skipped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SkippedRow {
    /// Index of the row in the dataset.
    pub row: u64,
    /// Id of the row.
    pub id: String,
    /// Reason for skipping the row.
    pub reason: String,
    /// Id of the row that replaced it; `None` without a replacement.
    pub replaced_by: Option<String>,
}

impl std::fmt::Display for SkippedRow {
    /// Formats the row for the console.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "skipped row {} (id {}): {}", self.row, self.id, self.reason)
    }
}

/// Row with its prompt.
#[derive(Clone, Debug)]
pub struct PreparedRow {
    /// Row of the dataset.
    pub sample: Sample,
    /// Prompt with decoded media.
    pub prompt: Arc<Prompt>,
    /// Prompt of a teacher that reads more than the policy ([`PromptBuilder::for_teacher`]).
    pub teacher: Option<Arc<Prompt>>,
    /// Pass over the data that drew the row, from 0.
    pub epoch: u64,
}

impl PreparedRow {
    /// Decodes the media of a row and renders its prompt for the given pass over the data.
    pub fn new(prompts: &PromptBuilder, sample: Sample, epoch: u64) -> omnigrpo_models::Result<Self> {
        let prompt = prompts.build_in(&sample, epoch)?;
        Self::of(prompts, sample, prompt, epoch)
    }

    /// Builds a row whose media have the right size but no content ([`PromptBuilder::outline`]).
    ///
    /// # Errors
    /// Returns an error if [`PromptBuilder::outline`] does.
    pub fn outline(prompts: &PromptBuilder, sample: Sample) -> omnigrpo_models::Result<Self> {
        let prompt = prompts.outline(&sample)?;
        Self::of(prompts, sample, prompt, 0)
    }

    fn of(
        prompts: &PromptBuilder,
        sample: Sample,
        prompt: Prompt,
        epoch: u64,
    ) -> omnigrpo_models::Result<Self> {
        let teacher = prompts.for_teacher(&sample, &prompt)?.map(Arc::new);
        Ok(Self { sample, prompt: Arc::new(prompt), teacher, epoch })
    }

    /// Adds the media of turns that an environment added to completions of the row ([`AddedTurn::media`]).
    ///
    /// [`AddedTurn::media`]: omnigrpo_models::AddedTurn::media
    pub(crate) fn add_media(&mut self, media: impl IntoIterator<Item = Arc<MediumInput>>) {
        let mut media = media.into_iter().peekable();
        if media.peek().is_some() {
            Arc::make_mut(&mut self.prompt).media.extend(media);
        }
    }

    /// Returns false if another rank has decoded the row. Its prompt then has ids and text, and its media have no content.
    pub(crate) fn is_here(&self) -> bool {
        self.prompt.positions.len() == self.prompt.ids.len()
    }
}

/// Data of a prepared row that every rank needs.
#[derive(Serialize, Deserialize)]
struct Sent {
    ids: Vec<u32>,
    text: String,
    /// Kind and frame times of each medium.
    media: Vec<(MediumKind, Vec<f64>)>,
}

impl Sent {
    fn of(row: &PreparedRow) -> Self {
        let Prompt { ids, text, media, .. } = &*row.prompt;
        let media = media.iter().map(|medium| (medium.kind, medium.frame_times_secs.clone()));
        Self { ids: ids.clone(), text: text.clone(), media: media.collect() }
    }

    /// Returns the row that another rank has decoded.
    fn row(self, sample: Sample, epoch: u64) -> PreparedRow {
        let medium = |(kind, frame_times_secs)| {
            Arc::new(MediumInput {
                kind,
                shape: MediumShape::Mel { mels: 0, frames: 0, heard: 0 },
                data: Vec::new(),
                seconds_per_grid: 0.0,
                frame_times_secs,
                of_clip: None,
            })
        };
        let prompt = Prompt {
            ids: self.ids,
            spans: Vec::new(),
            positions: Vec::new(),
            next_position: 0,
            media: self.media.into_iter().map(medium).collect(),
            instruction: Vec::new(),
            text: self.text,
        };
        PreparedRow { sample, prompt: Arc::new(prompt), teacher: None, epoch }
    }
}

/// Unusable row of a dataset.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unusable {
    /// Id of the row.
    pub id: String,
    /// Reason why the row is unusable.
    pub reason: String,
}

/// Result of preparing a row. An outer error is a failure of the machine and does not concern the row.
type Attempt<T> = Result<Result<T, Unusable>>;

/// Reads a row of a dataset, adds the opening of an environment and passes it to `build`. With `rewards`, a row that they cannot
/// score counts as unusable. If the machine fails, the attempt is repeated after a pause; an environment is asked once.
fn attempted<T>(
    dataset: &Dataset,
    prompts: &PromptBuilder,
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
    let applicable = || -> Attempt<Sample> {
        let sample = match read()? {
            Ok(sample) => sample,
            Err(error) => return Ok(Err(Unusable { id: dataset.id(row), reason: reason(&error) })),
        };
        match rewards.map(|rewards| scoring::applies(rewards, &sample)) {
            Some(Err(why)) if fault(&*why, Fault::Row) == Fault::Machine => Err(machine(&sample.id, why)),
            Some(Err(why)) => Ok(Err(Unusable { id: sample.id, reason: told(&*why) })),
            _ => Ok(Ok(sample)),
        }
    };
    let mut sample = match retried(&WAITS, applicable)? {
        Ok(sample) => sample,
        Err(unusable) => return Ok(Err(unusable)),
    };
    let id = sample.id.clone();
    match prompts.add_opening(&mut sample) {
        Ok(()) => {}
        Err(source) if matches!(source.downcast_ref(), Some(ModelError::SaysTooMuch { .. })) => {
            return Ok(Err(Unusable { id, reason: told(&*source) }));
        }
        Err(source) => return Err(TrainError::Environment { row, id, source }),
    }
    retried(&WAITS, || match build(sample.clone()) {
        Ok(made) => Ok(Ok(made)),
        Err(error) if fault(&error, Fault::Row) == Fault::Machine => Err(machine(&id, error.into())),
        Err(error) => {
            // Reading the row again shows whether the directory of its media has disappeared since.
            drop(read()?);
            Ok(Err(Unusable { id: id.clone(), reason: told(&error) }))
        }
    })
}

/// Reads a row of a dataset and builds its prompt. Training, evaluation, generation, scoring and memory estimates all use this
/// function. With `rewards`, a row that they cannot score counts as unusable. The next steps are [`encode`](crate::encode), which
/// computes the features of the media, and [`requests`], which builds requests for a generator from prompts and features.
///
/// # Errors
/// Returns [`TrainError::Machine`] if the machine failed repeatedly, and [`TrainError::Environment`] if an environment cannot open
/// the row. The inner error gives the reason why the row is unusable.
pub fn prepare(
    dataset: &Dataset,
    prompts: &PromptBuilder,
    rewards: Option<&RewardSet>,
    row: u64,
    epoch: u64,
) -> Result<Result<PreparedRow, Unusable>> {
    attempted(dataset, prompts, rewards, row, |sample| PreparedRow::new(prompts, sample, epoch))
}

/// Returns the error for a row of the dataset that only another rank can read.
pub(crate) fn unreadable(row: u64, error: &RowError) -> TrainError {
    TrainError::Data {
        what: format!(
            "row {row} was read by another rank, but cannot be read by this one: {}; give all ranks the same files",
            reason(error)
        ),
    }
}

/// Prepares rows over ranks: each rank those that it owns, by calling `make` with row and pass over the data. Returns the result of
/// every row on all ranks.
///
/// # Errors
/// Returns an error on all ranks if the machine fails on one of them, or if one cannot read the dataset.
pub(crate) fn prepare_split(
    split: &Split,
    dataset: &Dataset,
    rows: &[(u64, u64)],
    owners: &[usize],
    make: impl FnMut((u64, u64)) -> Attempt<PreparedRow>,
) -> Result<Vec<Result<PreparedRow, Unusable>>> {
    make_split(split, rows, owners, make, Sent::of, |(row, epoch), sent: Sent| {
        let sample = dataset.get(row).map_err(|error| unreadable(row, &error))?;
        Ok(sent.row(sample, epoch))
    })
}

/// Makes something of rows over ranks: each rank of those that it owns, by calling `make`. `send` returns what the other ranks need of
/// it, and `receive` what they have instead.
///
/// # Errors
/// Returns an error on all ranks if `make` or `receive` fails on one of them.
fn make_split<T, S: Serialize + DeserializeOwned>(
    split: &Split,
    rows: &[(u64, u64)],
    owners: &[usize],
    mut make: impl FnMut((u64, u64)) -> Attempt<T>,
    send: impl Fn(&T) -> S,
    receive: impl Fn((u64, u64), S) -> Result<T>,
) -> Result<Vec<Result<T, Unusable>>> {
    let mut here = HashMap::new();
    let mut own = Vec::new();
    let each = rows.iter().zip(owners).enumerate().filter(|(_, (_, owner))| **owner == split.ranks.rank());
    let done = each.map(|(place, (at, _))| (place, *at)).try_for_each(|(place, at)| {
        let made = make(at)?;
        own.push((place, made.as_ref().map(&send).map_err(Unusable::clone)));
        here.insert(place, made);
        Ok(())
    });
    let sent = split.collect(rows.len(), done.map(|()| own))?;
    let row = |(place, sent): (usize, Result<S, Unusable>)| match (here.remove(&place), sent) {
        (Some(made), _) => Ok(made),
        (None, Err(unusable)) => Ok(Err(unusable)),
        (None, Ok(sent)) => receive(rows[place], sent).map(Ok),
    };
    split.agree(sent.into_iter().enumerate().map(row).collect())
}

/// Rows that are ready for a generator, and unusable rows.
#[derive(Default)]
pub(crate) struct Ready {
    pub(crate) rows: Vec<PreparedRow>,
    /// Features of each row's media.
    pub(crate) features: Vec<Vec<Features>>,
    /// Unusable rows with their row numbers.
    pub(crate) unusable: Vec<(u64, Unusable)>,
}

/// Prepares rows, including the features of their media.
///
/// # Errors
/// Returns an error if the machine fails or if the dataset was changed while in use.
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

/// Builds requests for `num_samples` completions of each row. If a row occurs more than once, the numbers of its samples
/// continue, so that each sample gets different random numbers.
pub fn requests<'a>(
    rows: &'a [PreparedRow],
    features: &'a [Vec<Features>],
    num_samples: usize,
    rollout: u64,
) -> Vec<Request<'a>> {
    let before = occurrences(rows.iter().map(|row| row.sample.row));
    let each = rows.iter().zip(features).zip(before);
    each.map(|((row, features), before)| Request {
        prompt: &row.prompt,
        features,
        num_samples,
        rollout,
        row: row.sample.row,
        first_sample: before * num_samples as u32,
        sample: Some(&row.sample),
    })
    .collect()
}

/// Returns for each row the number of its earlier occurrences in the list. The sample numbers of a repeated row continue, so that
/// its completions get different random numbers.
pub(crate) fn occurrences(rows: impl IntoIterator<Item = u64>) -> Vec<u32> {
    let mut seen = HashMap::new();
    let mut count = |row| {
        let next = seen.entry(row).or_insert(0);
        *next += 1;
        *next - 1
    };
    rows.into_iter().map(&mut count).collect()
}

/// Prepared form of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Making {
    /// Prompt for sampling.
    Prompt,
    /// Supervised example.
    Example,
}

enum Made {
    Prompt(Box<PreparedRow>),
    Example(Box<StepExample<'static>>),
}

impl Made {
    /// Returns false if another rank has decoded the row.
    fn is_here(&self) -> bool {
        match self {
            Self::Prompt(row) => row.is_here(),
            Self::Example(example) => example.here().is_some(),
        }
    }
}

/// Prepared form of a row as every rank needs it.
#[derive(Serialize, Deserialize)]
enum SentForm {
    Prompt(Sent),
    Example(ExampleSize),
}

/// Source of prepared rows in order. An unusable row is replaced by the next one.
///
/// While a step computes, [`Self::prepare_ahead`] reads and decodes the rows of the next step on another thread. This does not
/// change the result: the thread prepares the same rows as [`Self::draw`] would, the order advances only when rows are drawn, and
/// an unusable row is skipped only when it is drawn. Rows that the thread could not prepare because the machine failed, or
/// because the thread itself could not start, are prepared when they are drawn.
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
    /// Division over ranks, and prompts of a micro-batch.
    split: (Split, usize),
}

/// Id and prepared form of a row, or the reason why it is unusable.
type Outcome = Result<(String, Made), Unusable>;

/// Outcome for each row and epoch.
type MadeRows = HashMap<(u64, u64), Outcome>;

struct Ahead {
    making: Making,
    thread: JoinHandle<(MadeRows, Duration)>,
}

/// Prepares a row in the requested form and returns it with its id.
fn make(
    dataset: &Dataset,
    prompts: &PromptBuilder,
    rewards: Option<&RewardSet>,
    (row, epoch): (u64, u64),
    making: Making,
) -> Attempt<(String, Made)> {
    attempted(dataset, prompts, rewards, row, |sample| {
        Ok(match making {
            Making::Prompt => {
                let row = PreparedRow::new(prompts, sample, epoch)?;
                (row.sample.id.clone(), Made::Prompt(Box::new(row)))
            }
            Making::Example => {
                let example = prompts.build_sft(&sample, epoch)?;
                (sample.id, Made::Example(Box::new(example.into())))
            }
        })
    })
}

/// Decodes the media of a row that another rank has prepared, to train on it here.
///
/// # Errors
/// Returns an error if the row is unusable on this rank only.
pub(crate) fn bring_here(prompts: &PromptBuilder, row: &mut PreparedRow) -> Result<()> {
    if !row.is_here() {
        *row = retried(&WAITS, || PreparedRow::new(prompts, row.sample.clone(), row.epoch)).map_err(|error| {
            let (row, why) = (row.sample.row, told(&error));
            TrainError::Data {
                what: format!("row {row} was read by another rank, but not by this one: {why}; give all ranks the same files"),
            }
        })?;
    }
    Ok(())
}

impl RowSource {
    /// Creates a source over an order of the dataset's rows. `rewards` are the rewards that will score their completions.
    pub fn new(
        dataset: Arc<Dataset>,
        order: Order,
        prompts: Arc<PromptBuilder>,
        rewards: Option<Arc<RewardSet>>,
        policy: SkipPolicy,
    ) -> Self {
        let total = (order.num_usable() + order.state().skipped.len()) as u64;
        let (fresh, ahead, ahead_time, split) = (Vec::new(), None, Duration::ZERO, (Split::default(), 1));
        Self { dataset, order, prompts, rewards, policy, total, fresh, ahead, ahead_time, split }
    }

    /// Lets each rank decode the rows that it trains on. `micro` is the number of prompts of a micro-batch. All ranks draw the same
    /// rows.
    pub(crate) fn over(self, split: &Split, micro: usize) -> Self {
        Self { split: (split.clone(), micro), ..self }
    }

    /// Returns the next `count` rows of the order with their passes over the data, without drawing them. There are fewer if the
    /// order ends.
    fn next(&self, count: usize) -> Vec<(u64, u64)> {
        let mut order = self.order.clone();
        (0..count).map_while(|_| Some((order.draw().ok()?, order.state().epoch))).collect()
    }

    /// Starts preparing the next `count` rows on another thread.
    pub fn prepare_ahead(&mut self, count: usize, making: Making) {
        let (split, micro) = &self.split;
        let owned = self.next(count).into_iter().zip(split.owners(count, *micro));
        let rows: Vec<(u64, u64)> =
            owned.filter(|(_, owner)| *owner == split.ranks.rank()).map(|(row, _)| row).collect();
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

    /// Returns the time that other threads have spent since the last call on rows that were drawn.
    pub fn take_ahead_time(&mut self) -> Duration {
        std::mem::take(&mut self.ahead_time)
    }

    /// Returns the order, for checkpoints.
    pub fn order(&self) -> &Order {
        &self.order
    }

    /// Returns the order, for resuming.
    pub(crate) fn order_mut(&mut self) -> &mut Order {
        &mut self.order
    }

    /// Returns the number of rows skipped so far.
    pub fn num_skipped(&self) -> usize {
        self.order.state().skipped.len()
    }

    /// Draws the next `count` rows with their prompts.
    ///
    /// # Errors
    /// Returns an error if no usable row is left, or if more rows were skipped than the policy allows. Also returns an error if the
    /// dataset was changed while in use or the machine fails. After a failure of the machine, the caller must restore the order.
    pub fn draw(&mut self, count: usize) -> Result<Vec<PreparedRow>> {
        let each = |made| if let Made::Prompt(row) = made { Some(*row) } else { None };
        Ok(self.draw_made(count, Making::Prompt)?.into_iter().filter_map(each).collect())
    }

    /// Draws the next `count` rows as supervised examples.
    pub(crate) fn draw_sft(&mut self, count: usize) -> Result<Vec<StepExample<'static>>> {
        let each = |made| if let Made::Example(example) = made { Some(*example) } else { None };
        Ok(self.draw_made(count, Making::Example)?.into_iter().filter_map(each).collect())
    }

    fn draw_made(&mut self, count: usize, making: Making) -> Result<Vec<Made>> {
        let mut ready = HashMap::new();
        if let Some(ahead) = self.ahead.take()
            && ahead.making == making
            // If the thread panicked, its rows are prepared here, so that the panic occurs again on this thread.
            && let Ok((made, time)) = ahead.thread.join()
        {
            ready = made;
            self.ahead_time += time;
        }
        let mut out = Vec::with_capacity(count);
        // Rows skipped from here on are replaced by the next usable row.
        let mut waiting = self.fresh.len();
        while out.len() < count {
            for (row, made) in self.make_next(count, out.len(), making, &mut ready)? {
                match made {
                    Ok((id, value)) => {
                        out.push(value);
                        self.fresh[waiting..].iter_mut().for_each(|row| row.replaced_by = Some(id.clone()));
                        waiting = self.fresh.len();
                    }
                    Err(Unusable { id, reason }) => self.skip(row, &id, &reason)?,
                }
            }
        }
        Ok(out)
    }

    /// Draws and prepares the next rows: one row, or several over ranks. An unusable row is the last one, because it changes the
    /// order of the following rows.
    fn make_next(
        &mut self,
        count: usize,
        done: usize,
        making: Making,
        ready: &mut MadeRows,
    ) -> Result<Vec<(u64, Outcome)>> {
        let (dataset, prompts) = (Arc::clone(&self.dataset), Arc::clone(&self.prompts));
        let rewards = self.rewards.clone();
        let mut attempt = |at| -> Attempt<(String, Made)> {
            let made = match ready.remove(&at) {
                Some(made) => made,
                None => make(&dataset, &prompts, rewards.as_deref(), at, making)?,
            };
            // A change of the dataset file is not the fault of the row.
            dataset.unchanged()?;
            Ok(made)
        };
        let (split, micro) = &self.split;
        if split.ranks.size() == 1 {
            let row = self.order.draw()?;
            return Ok(vec![(row, attempt((row, self.order.state().epoch))?)]);
        }
        let rows = self.next(count - done);
        let owners = split.owners(count, *micro);
        let send = |(id, made): &(String, Made)| {
            let form = match made {
                Made::Prompt(row) => SentForm::Prompt(Sent::of(row)),
                Made::Example(example) => SentForm::Example(example.size()),
            };
            (id.clone(), form)
        };
        let receive = |(row, epoch), (id, form): (String, SentForm)| {
            let made = match form {
                SentForm::Prompt(sent) => {
                    let sample = dataset.get(row).map_err(|error| unreadable(row, &error))?;
                    Made::Prompt(Box::new(sent.row(sample, epoch)))
                }
                SentForm::Example(size) => Made::Example(Box::new(StepExample::Elsewhere(size))),
            };
            Ok((id, made))
        };
        let prepared = make_split(split, &rows, &owners[done..], &mut attempt, send, receive)?;
        let mut made = Vec::with_capacity(rows.len());
        let mut rest = rows.into_iter().zip(prepared);
        // An empty order returns its error here.
        loop {
            let row = self.order.draw()?;
            let Some((_, own)) = rest.next() else { break };
            let unusable = own.is_err();
            made.push((row, own));
            if unusable || rest.len() == 0 {
                break;
            }
        }
        let here = rest.filter_map(|(at, own)| Some((at, own.ok().filter(|(_, made)| made.is_here())?)));
        ready.extend(here.map(|(at, own)| (at, Ok(own))));
        Ok(made)
    }

    /// Returns the rows skipped since the last call, even if drawing returned an error.
    pub fn take_skipped(&mut self) -> Vec<SkippedRow> {
        std::mem::take(&mut self.fresh)
    }

    fn skip(&mut self, row: u64, id: &str, reason: &str) -> Result<()> {
        self.order.skip(row);
        self.fresh.push(SkippedRow { row, id: id.to_owned(), reason: reason.to_owned(), replaced_by: None });
        if self.policy.strict {
            return Err(TrainError::Data {
                what: format!(
                    "row {row} ({id}) cannot be used: {reason}; without {STRICT} it would be skipped"
                ),
            });
        }
        check_share(self.num_skipped() as u64, self.total, self.policy.max_share)
    }
}

/// Returns the file, the line and the problem of a row that cannot be read. The caller adds the row's index.
fn reason(error: &RowError) -> String {
    format!("{}:{}: {}", error.file.display(), error.line, told(&error.problem))
}

/// Returns an error if the share of skipped rows is too large.
pub(crate) fn check_share(skipped: u64, total: u64, max_share: f64) -> Result<()> {
    if !(SkipPolicy { strict: false, max_share }).tolerates(skipped, total) {
        return Err(TrainError::Data {
            what: format!(
                "{skipped} of {total} rows cannot be used, more than {MAX_SHARE} ({max_share}) allows; the rows and \
                 reasons are in skipped.jsonl of the run directory"
            ),
        });
    }
    Ok(())
}

/// Returns the paths of a sample's media files, for rewards and records.
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
