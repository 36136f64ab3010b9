//! Completions and log-probabilities of rows outside of training.

use omnigrpo_data::Dataset;
use omnigrpo_guard::told;
use omnigrpo_models::{AddedTurn, GroupStream, Model, PackedStream, Prompt, PromptBuilder};
use omnigrpo_rollout::{Completion, GenerateOptions, Generator, Interaction, TokenEvent};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Result, TrainError};
use crate::evaluate::{EvalOptions, in_batches};
use crate::features::encode_plain;
use crate::rows::{PreparedRow, Ready, Unusable, prepare, prepare_all, requests};
use crate::split::Split;
use crate::step::Algorithm;
use crate::streams::pack;

/// Returns the log-probability of each token of existing completions, in nats, under softmax(logits / `temperature`).
/// `max_stream_tokens` limits the tokens of one pass. With `None`, one pass scores all completions.
///
/// ```
/// use omnigrpo_data::RowReader;
/// use omnigrpo_models::{Checkpoint, LoadOptions, Model, PromptBuilder, PromptSettings};
/// use serde_json::json;
///
/// # let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tests/golden/checkpoints/qwen2_vl_untied");
/// let checkpoint = Checkpoint::open(directory.as_ref())?;
/// let model = Model::load(&checkpoint, &LoadOptions::default())?;
/// let prompts = PromptBuilder::open(&checkpoint, PromptSettings::default())?;
/// let row = json!({ "prompt": "Which is larger, 3 or 5?" });
/// let prompt = prompts.build(&RowReader::new("mine").sample(row)?)?;
/// let said = [prompts.completion_ids("5")?, prompts.completion_ids("it is 3")?];
/// let logprobs = omnigrpo_train::logprobs(&model, &prompt, &said, 1.0, None)?;
/// assert_eq!(logprobs[1].len(), said[1].len());
/// assert!(logprobs.concat().iter().all(|&nats| nats < 0.0));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Returns an error if a completion is too long for the model, or if a log-probability is not finite.
pub fn logprobs(
    model: &Model,
    prompt: &Prompt,
    completions: &[Vec<u32>],
    temperature: f32,
    max_stream_tokens: Option<usize>,
) -> Result<Vec<Vec<f32>>> {
    logprobs_with_turns(
        model,
        prompt,
        completions,
        &vec![Vec::new(); completions.len()],
        temperature,
        max_stream_tokens,
    )
}

/// Computes the log-probabilities of the sampled tokens of completions with turns of an environment. The media of the turns follow
/// those of the prompt.
fn logprobs_with_turns(
    model: &Model,
    prompt: &Prompt,
    completions: &[Vec<u32>],
    turns: &[Vec<AddedTurn>],
    temperature: f32,
    max_stream_tokens: Option<usize>,
) -> Result<Vec<Vec<f32>>> {
    let (tokens, longest) = (prompt.ids.len(), completions.iter().map(Vec::len).max().unwrap_or(0));
    let positions = model.decoder().config().max_positions;
    if tokens + longest > positions {
        return Err(TrainError::Data {
            what: format!(
                "the prompt with its media has {tokens} tokens and the longest completion {longest}, but the model \
                 has only {positions} positions"
            ),
        });
    }
    let features = encode_plain(model, [prompt])?;
    let lengths = completions.iter().map(Vec::len).collect();
    let mut logprobs: Vec<Vec<f32>> = Vec::with_capacity(completions.len());
    for part in pack(&[(tokens, lengths)], max_stream_tokens.unwrap_or(usize::MAX)).into_iter().flatten() {
        let (completions, turns) = (&completions[part.completions.clone()], &turns[part.completions]);
        let completions = completions.iter().map(Vec::as_slice).collect();
        let stream = PackedStream::with_turns(&[GroupStream { prompt, completions }], |_, completion| {
            &turns[completion]
        })?;
        let (flat, _) = model.score(&stream, &features, temperature)?;
        if !flat.iter().all(|x| x.is_finite()) {
            let what = "the model returned log-probabilities that are not finite".to_owned();
            return Err(TrainError::Data { what });
        }
        logprobs.extend(stream.each(&flat).map(<[f32]>::to_vec));
    }
    Ok(logprobs)
}

/// Row with its recorded completions and their log-probabilities.
#[derive(Debug)]
pub struct Recorded {
    /// Prepared row.
    pub row: PreparedRow,
    /// Token ids of each completion.
    pub ids: Vec<Vec<u32>>,
    /// Log-probability of each token in nats, except those of an environment.
    pub logprobs: Vec<Vec<f32>>,
    /// Turns of an environment in each completion.
    pub turns: Vec<Vec<AddedTurn>>,
}

/// Computes the log-probabilities of the completions in the rows of a dataset, as [`logprobs`] does. `each` is called for every
/// row, with the row number and either the result or the reason why the row cannot be scored.
///
/// # Errors
/// Returns an error if the machine fails or `each` returns one.
pub fn score_recorded(
    model: &Model,
    prompts: &PromptBuilder,
    (dataset, rows): (&Dataset, &[u64]),
    algorithm: &Algorithm,
    each: &mut dyn FnMut(u64, Result<Recorded, Unusable>) -> Result<()>,
) -> Result<()> {
    let (temperature, max_tokens) = (algorithm.sampling.scoring_temperature(), algorithm.max_stream_tokens);
    for &number in rows {
        let prepared = prepare(dataset, prompts, None, number, 0);
        dataset.unchanged()?;
        let recorded = prepared?.and_then(|mut row| {
            let id = row.sample.id.clone();
            let unusable = |reason: String| Unusable { id: id.clone(), reason };
            let completions = row.sample.completions.as_deref();
            let completions = completions.ok_or_else(|| unusable("the row has no `completions`".into()))?;
            let mut media = row.prompt.media.clone();
            let read = completions.iter().map(|completion| prompts.recorded(completion, &mut media));
            let read: Result<Vec<_>, _> = read.collect();
            let (ids, turns): (Vec<_>, Vec<_>) = read.map_err(|e| unusable(told(&e)))?.into_iter().unzip();
            row.add_media(media.into_iter().skip(row.prompt.media.len()));
            let logprobs = logprobs_with_turns(model, &row.prompt, &ids, &turns, temperature, max_tokens);
            let logprobs = logprobs.map_err(|e| unusable(told(&e)))?;
            Ok(Recorded { row, ids, logprobs, turns })
        });
        each(number, recorded)?;
    }
    Ok(())
}

/// Batch of rows with the completions sampled for them.
#[derive(Debug)]
pub struct GeneratedBatch<'a> {
    /// Usable rows.
    pub rows: &'a [PreparedRow],
    /// Completions of each row.
    pub completions: &'a [Vec<Completion>],
    /// Unusable rows with their row numbers.
    pub unusable: &'a [(u64, Unusable)],
}

/// Samples completions for rows of a dataset, `options.batch_rows` at a time. `token` is called for each token when it is
/// drawn, and `each` for every batch when it is complete.
///
/// ```
/// use omnigrpo_data::RowReader;
/// use omnigrpo_models::{Checkpoint, LoadOptions, Model, PromptBuilder, PromptSettings};
/// use omnigrpo_rollout::SamplingParams;
/// use omnigrpo_train::{EvalOptions, generate};
/// use serde_json::json;
///
/// # let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tests/golden/checkpoints/qwen2_vl_untied");
/// let checkpoint = Checkpoint::open(directory.as_ref())?;
/// let model = Model::load(&checkpoint, &LoadOptions::default())?;
/// let prompts = PromptBuilder::open(&checkpoint, PromptSettings::default())?;
/// let rows = ["Which is larger, 3 or 5?", "And of 2 and 1?"].map(|question| json!({ "prompt": question }));
/// let dataset = RowReader::new("mine").dataset(rows)?;
/// let sampling = SamplingParams { max_completion_length: 4, ..SamplingParams::greedy() };
/// let options = EvalOptions { sampling, num_generations: 2, ..EvalOptions::default() };
/// let mut said = Vec::new();
/// generate(&model, &prompts, (&dataset, &[0, 1]), (&options, None), &mut |_| {}, &mut |batch| {
///     said.extend(batch.completions.iter().flatten().map(|completion| completion.text.clone()));
///     Ok(())
/// })?;
/// assert_eq!(said.len(), 4);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Returns an error if the generator or the machine fails, or if `each` returns one.
pub fn generate(
    model: &Model,
    prompts: &PromptBuilder,
    (dataset, rows): (&Dataset, &[u64]),
    (options, interaction): (&EvalOptions, Option<&Interaction>),
    token: &mut dyn FnMut(TokenEvent),
    each: &mut dyn FnMut(GeneratedBatch<'_>) -> Result<()>,
) -> Result<()> {
    let generator = Generator::new(model, prompts, &options.sampling)
        .with_max_live(options.max_live)
        .with_interaction(interaction);
    for batch in rows.chunks(options.batch_rows.max(1)) {
        let Ready { rows, features, unusable } = prepare_all(model, prompts, dataset, None, batch)?;
        let requests = requests(&rows, &features, options.num_generations, 0);
        let watched = GenerateOptions { on_token: Some(&mut *token), memory: None, experts: false };
        let generated = generator.generate(requests, watched)?;
        let completions: Vec<Vec<Completion>> = generated.into_iter().map(|of| of.completions).collect();
        each(GeneratedBatch { rows: &rows, completions: &completions, unusable: &unusable })?;
    }
    Ok(())
}

/// Samples like [`generate`] over ranks. `make` is called for every batch on the rank that samples it, and `each` for its results on the
/// first rank, in the order of the rows. `rows` are those of the first rank.
///
/// # Errors
/// Returns the same error on all ranks if one of them fails, also in `make` or `each`.
pub fn generate_split<T: Serialize + DeserializeOwned>(
    split: &Split,
    (model, prompts): (&Model, &PromptBuilder),
    (dataset, rows): (&Dataset, &[u64]),
    (options, interaction): (&EvalOptions, Option<&Interaction>),
    token: &mut dyn FnMut(TokenEvent),
    make: &dyn Fn(GeneratedBatch<'_>) -> Result<T>,
    each: &mut dyn FnMut(T) -> Result<()>,
) -> Result<()> {
    if split.ranks.size() == 1 {
        let each = &mut |batch: GeneratedBatch<'_>| each(make(batch)?);
        return generate(model, prompts, (dataset, rows), (options, interaction), token, each);
    }
    let rows = split.by_first(|| Ok(rows.to_vec()))?;
    let mut of_batch = |own: &[u64]| {
        let mut made = Vec::new();
        let each = &mut |batch: GeneratedBatch<'_>| {
            made.push(make(batch)?);
            Ok(())
        };
        generate(model, prompts, (dataset, own), (options, interaction), &mut *token, each)?;
        Ok(made)
    };
    let taken = in_batches(split, &rows, options.batch_rows, &mut of_batch, &mut |made| {
        made.into_iter().try_for_each(&mut *each)
    })?;
    split.agree(taken)
}
