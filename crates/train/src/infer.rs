//! Completions and log-probabilities of rows, outside of training.

use omnigrpo_data::Dataset;
use omnigrpo_guard::told;
use omnigrpo_models::{GroupStream, Model, PackedStream, Prompt, PromptBuilder};
use omnigrpo_rollout::{Completion, Generator, TokenEvent};

use crate::error::{Result, TrainError};
use crate::evaluate::EvalOptions;
use crate::features::encode_plain;
use crate::rows::{PreparedRow, Ready, Unusable, prepare, prepare_all, requests};
use crate::step::Algorithm;
use crate::streams::pack;

/// Log-probability of each token of completions that are there already, in nats, under softmax(logits / `temperature`).
/// `max_stream_tokens` bounds the tokens of one pass; all completions go through one by default.
///
/// # Errors
/// Completions too long for the model, and a model whose numbers are not finite.
pub fn logprobs(
    model: &Model,
    prompt: &Prompt,
    completions: &[Vec<u32>],
    temperature: f32,
    max_stream_tokens: Option<usize>,
) -> Result<Vec<Vec<f32>>> {
    let (tokens, longest) = (prompt.ids.len(), completions.iter().map(Vec::len).max().unwrap_or(0));
    let positions = model.decoder().config().max_positions;
    if tokens + longest > positions {
        return Err(TrainError::Data {
            what: format!(
                "the prompt has {tokens} tokens with its media and a completion {longest}, the model has {positions} \
                 positions"
            ),
        });
    }
    let features = encode_plain(model, [prompt])?;
    let lengths = completions.iter().map(Vec::len).collect();
    let mut logprobs: Vec<Vec<f32>> = Vec::with_capacity(completions.len());
    for part in pack(&[(tokens, lengths)], max_stream_tokens.unwrap_or(usize::MAX)).into_iter().flatten() {
        let completions: Vec<&[u32]> = completions[part.completions].iter().map(Vec::as_slice).collect();
        let stream = PackedStream::new(&[GroupStream { prompt, completions }])?;
        let (flat, _) = model.score(&stream, &features, temperature)?;
        if !flat.iter().all(|x| x.is_finite()) {
            let what = "the model gives log-probabilities that are no numbers".to_owned();
            return Err(TrainError::Data { what });
        }
        logprobs.extend(stream.each(&flat).map(<[f32]>::to_vec));
    }
    Ok(logprobs)
}

/// A row with the completions that it brings, scored.
#[derive(Debug)]
pub struct Recorded {
    /// The row.
    pub row: PreparedRow,
    /// Token ids of each completion.
    pub ids: Vec<Vec<u32>>,
    /// Log-probability of each token, in nats.
    pub logprobs: Vec<Vec<f32>>,
}

/// Log-probabilities of the completions that rows of a dataset bring, as [`logprobs`]. `each` sees every row, by number, as soon
/// as it is done, or why it cannot be scored.
///
/// # Errors
/// What `each` fails with.
pub fn score_recorded(
    model: &Model,
    prompts: &PromptBuilder,
    (dataset, rows): (&Dataset, &[u64]),
    algorithm: &Algorithm,
    each: &mut dyn FnMut(u64, Result<Recorded, Unusable>) -> Result<()>,
) -> Result<()> {
    let (temperature, max_tokens) = (algorithm.sampling.scoring_temperature(), algorithm.max_stream_tokens);
    for &number in rows {
        let recorded = prepare(dataset, prompts, None, number, 0).and_then(|row| {
            let unusable = |reason: String| Unusable { id: row.sample.id.clone(), reason };
            let completions = row.sample.completions.as_deref();
            let completions = completions.ok_or_else(|| unusable("the row has no `completions`".into()))?;
            let ids: Result<Vec<_>, _> = completions.iter().map(|c| prompts.recorded_ids(c)).collect();
            let ids = ids.map_err(|e| unusable(told(&e)))?;
            let logprobs = logprobs(model, &row.prompt, &ids, temperature, max_tokens);
            let logprobs = logprobs.map_err(|e| unusable(told(&e)))?;
            Ok(Recorded { row, ids, logprobs })
        });
        each(number, recorded)?;
    }
    Ok(())
}

/// Some rows and what was sampled for them.
#[derive(Debug)]
pub struct Generated<'a> {
    /// Rows that could be used.
    pub rows: &'a [PreparedRow],
    /// Their completions.
    pub completions: &'a [Vec<Completion>],
    /// Rows that could not, by number.
    pub unusable: &'a [(u64, Unusable)],
}

/// Samples completions for rows of a dataset, `options.batch_rows` at a time. `token` sees each token as it is drawn, `each`
/// every batch as soon as it is done.
///
/// # Errors
/// As the generator, and what `each` fails with.
pub fn generate(
    model: &Model,
    prompts: &PromptBuilder,
    (dataset, rows): (&Dataset, &[u64]),
    options: &EvalOptions,
    token: &mut dyn FnMut(TokenEvent),
    each: &mut dyn FnMut(Generated<'_>) -> Result<()>,
) -> Result<()> {
    let generator = Generator::new(model, prompts, &options.sampling, options.max_live);
    for batch in rows.chunks(options.batch_rows.max(1)) {
        let Ready { rows, features, unusable } = prepare_all(model, prompts, dataset, None, batch);
        let requests = requests(&rows, &features, options.num_generations, 0);
        let completions = generator.generate(&requests, &mut *token)?;
        each(Generated { rows: &rows, completions: &completions, unusable: &unusable })?;
    }
    Ok(())
}
