//! `generate`, `score` and `eval`.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use omnigrpo_data::{ColumnNames, Dataset, ReadOptions, RowReader, Sample};
use omnigrpo_models::{ModelError, PromptBuilder};
use omnigrpo_rollout::{Completion, GenerateOptions, Generator, TokenEvent};
use omnigrpo_text::StreamDecoder;
use omnigrpo_train::{
    Keep, PreparedRow, Recorded, Split, TrainError, Unusable, encode, environment_turns, requests,
};
use serde_json::{Value, json};

use super::{print, print_data};
use crate::settings::Settings;
use crate::settings::problem::Problem;
use crate::settings::values::{Origin, Resolved, Value as Setting};
use omnigrpo_session::evaluation::{evaluation, keep_media, model_of_ranks, sampled};
use omnigrpo_session::files::{all_rows, can_write, keep_inputs, write_lines};
use omnigrpo_session::ranks::{in_order, together};
use omnigrpo_session::{Session, profile, resume, setup};

fn input(settings: &Settings) -> Result<Arc<Dataset>> {
    let Some(input) = &settings.io.input else {
        return Err(Problem::usage("no rows are given").expected("`--input rows.jsonl`").into());
    };
    setup::input_rows(settings, input, false)
}

fn output(settings: &Settings) -> Result<&Path> {
    let output = settings
        .io
        .output
        .as_deref()
        .ok_or_else(|| Problem::usage("no output is given").expected("`--output out.jsonl`"))?;
    can_write(output)?;
    Ok(output)
}

/// Computes the log-probabilities of given completions.
pub fn score(settings: &Settings, session: &Session) -> Result<()> {
    let (output, dataset) = (output(settings)?, input(settings)?);
    keep_inputs(output, settings.io.input.as_deref().into_iter().chain(dataset.files()))?;
    let checkpoint = session.checkpoint()?;
    let model = setup::model(settings, checkpoint, session.device()?)?;
    // No room is reserved for new tokens, because the given completions have their own lengths.
    let mut no_new_tokens = settings.clone();
    no_new_tokens.prompts.max_completion_length = 0;
    let prompts = session.prompts(&no_new_tokens, checkpoint, false)?;
    keep_media(settings, checkpoint);
    let mut lines = Vec::new();
    let mut failed = 0;
    // A row takes time by the length of its text.
    let letters = |row| dataset.get(row).map_or(0, |sample| letters(&sample.columns.into()));
    let mut progress = session.console.progress_of("scoring", (0..dataset.len()).map(letters));
    let rows: Vec<u64> = (0..dataset.len()).collect();
    omnigrpo_train::score_recorded(
        &model,
        &prompts,
        (&dataset, &rows),
        &settings.algorithm,
        &mut |_, recorded| {
            lines.push(match recorded {
                Ok(recorded) => {
                    let scored = scored_row(&prompts, &recorded)?;
                    with_columns(&dataset, &recorded.row.sample, &["rewards", "reward"], scored)
                }
                Err(Unusable { id, reason }) => {
                    failed += 1;
                    json!({ "id": id, "error": reason })
                }
            });
            progress.advance(1);
            Ok(())
        },
    )?;
    drop(progress);
    write_lines(output, &lines)?;
    all_rows(failed, dataset.len())
}

/// Returns the number of bytes of all texts in a row.
fn letters(value: &Value) -> u64 {
    match value {
        Value::String(text) => text.len() as u64,
        Value::Array(values) => values.iter().map(letters).sum(),
        Value::Object(fields) => fields.values().map(letters).sum(),
        _ => 1,
    }
}

fn scored_row(prompts: &PromptBuilder, scored: &Recorded) -> Result<Value, TrainError> {
    let Recorded { row: PreparedRow { sample, prompt, .. }, ids, logprobs, turns } = scored;
    let mut completions = Vec::with_capacity(ids.len());
    let each = ids.iter().zip(logprobs).zip(turns).zip(sample.completions.iter().flatten());
    for (((ids, logprobs), turns), recorded) in each {
        let last = turns.last().map_or(0, |turn| turn.tokens().end);
        let mut line = json!({
            "text": prompts.tokenizer().decode(&ids[last..], true).map_err(ModelError::from)?,
            "completion_ids": ids,
            "logprobs": logprobs,
            "finish_reason": recorded.finish_reason,
        });
        if !turns.is_empty() {
            let (ids, turns) = (ids.clone(), turns.clone());
            let read = Completion { ids, turns, ..Completion::of_record(recorded) };
            line["turns"] = json!(environment_turns(&read));
        }
        completions.push(line);
    }
    Ok(json!({ "id": sample.id, "prompt_tokens": prompt.ids.len(), "completions": completions }))
}

/// Returns a line with the row's own columns, the named columns about its completions, and new results. Every command reads such
/// a line as the row with its completions.
pub fn with_columns(dataset: &Dataset, sample: &Sample, recorded: &[&str], made: Value) -> Value {
    let mut line = dataset.portable_row(sample);
    let recorded = recorded.iter().filter_map(|name| sample.columns.get_key_value(*name));
    line.extend(recorded.map(|(name, value)| (name.clone(), value.clone())));
    if let Value::Object(made) = made {
        line.extend(made);
    }
    Value::Object(line)
}

/// Samples completions for rows or for one prompt.
pub fn generate(resolved: &Resolved, session: &Session) -> Result<()> {
    let settings = &resolved.settings;
    profile::enable(settings.log.profile);
    if let Some((Setting::Float(temperature), Origin::Default)) = resolved.values.lookup("temperature") {
        session.console.line(&format!(
            "sampling at temperature {temperature}; `--temperature 0` always takes the most likely token, as `eval` does"
        ));
    }
    match &settings.io.prompt {
        Some(prompt) => generate_one(settings, session, prompt),
        None => generate_rows(resolved, session),
    }?;
    if settings.log.profile && session.ranks.is_first() {
        print(&profile::table(&profile::take(), 1))?;
    }
    Ok(())
}

fn generate_rows(resolved: &Resolved, session: &Session) -> Result<()> {
    let (settings, ranks) = (&resolved.settings, &session.ranks);
    let opened = || -> Result<_> {
        let dataset = input(settings)?;
        let output = match &settings.io.output {
            Some(output) if !ranks.is_first() => output.as_path(),
            _ => output(settings)?,
        };
        if ranks.is_first() {
            keep_inputs(output, settings.io.input.as_deref().into_iter().chain(dataset.files()))?;
        }
        let prompts = session.prompts(settings, session.checkpoint()?, false)?;
        Ok((dataset, output, prompts, session.interaction(settings)?))
    };
    // The first rank fills the caches of downloads, which the others then read.
    let (dataset, output, prompts, interaction) = in_order(ranks, Ok(()), opened)?;
    let model = model_of_ranks(settings, session, &dataset)?;
    keep_media(settings, model.checkpoint());
    let opened = || resume::open(resolved, session, output, model.dir(), &dataset).map(Some);
    let mut partial = together(ranks, if ranks.is_first() { opened() } else { Ok(None) })?;
    let is_done = |row: &u64| partial.as_ref().is_some_and(|partial| partial.done().contains_key(row));
    let rows: Vec<u64> = (0..dataset.len()).filter(|row| !is_done(row)).collect();
    let mut progress = session.console.progress("generating", dataset.len());
    progress.advance(dataset.len() - rows.len() as u64);
    // Results of rows that fail are not stored, because a second attempt may succeed.
    let mut failed: BTreeMap<u64, String> = BTreeMap::new();
    let activity = session.console.activity();
    omnigrpo_train::generate_split(
        &Split::over(ranks.clone()),
        (&model, &prompts),
        (&dataset, &rows),
        (&sampled(settings), interaction.as_ref()),
        &mut |event| activity.token(event.last),
        &|batch| {
            let done = batch.rows.iter().zip(batch.completions).map(|(row, completions)| {
                let made = json!({
                    "id": row.sample.id,
                    "prompt_tokens": row.prompt.ids.len(),
                    "completions": completions.iter().map(completion_line).collect::<Vec<_>>(),
                });
                (row.sample.row, with_columns(&dataset, &row.sample, &[], made).to_string())
            });
            let unusable = batch.unusable.iter();
            let unusable = unusable.map(|(row, Unusable { id, reason })| {
                (*row, json!({ "id": id, "error": reason }).to_string())
            });
            Ok((done.collect::<Vec<_>>(), unusable.collect::<Vec<_>>()))
        },
        &mut |(done, unusable)| {
            progress.advance((done.len() + unusable.len()) as u64);
            failed.extend(unusable);
            Ok(partial.as_mut().map_or(Ok(()), |partial| partial.add(done))?)
        },
    )?;
    drop(progress);
    let written = || -> Result<()> {
        let Some(partial) = partial else { return Ok(()) };
        let lines: BTreeMap<&u64, &String> = partial.done().iter().chain(&failed).collect();
        write_lines(output, lines.into_values())?;
        partial.remove()?;
        all_rows(failed.len() as u64, dataset.len())
    };
    together(ranks, written())
}

fn completion_line(c: &Completion) -> Value {
    let mut line = json!({
        "text": c.text,
        "completion_ids": c.ids,
        "logprobs": c.logprobs,
        "finish_reason": c.finish_reason,
    });
    if !c.turns.is_empty() {
        line["turns"] = json!(environment_turns(c));
    }
    line
}

/// Answers one question on the terminal, streamed.
fn generate_one(settings: &Settings, session: &Session, question: &str) -> Result<()> {
    let absolute = |path: &String| -> Result<String> {
        if ["http://", "https://", "data:"].iter().any(|scheme| path.starts_with(scheme)) {
            return Ok(path.clone());
        }
        let path = std::path::absolute(path).with_context(|| format!("the path {path}"))?;
        Ok(path.to_string_lossy().into_owned())
    };
    let images = settings.io.image.iter().map(absolute).collect::<Result<Vec<_>>>()?;
    let videos = settings.io.video.iter().map(absolute).collect::<Result<Vec<_>>>()?;
    let audios = settings.io.audio.iter().map(absolute).collect::<Result<Vec<_>>>()?;
    let mut row = json!({ "id": "prompt", "prompt": question });
    if !images.is_empty() {
        row["images"] = json!(images);
    }
    // One path is a clip or a directory of frames; several paths are frames or several clips.
    match videos.as_slice() {
        [] => {}
        [video] => row["video"] = json!(video),
        videos => row["video"] = json!(videos),
    }
    if !audios.is_empty() {
        row["audios"] = json!(audios);
    }
    // The row uses the default names of columns.
    let options = ReadOptions { columns: ColumnNames::default(), ..setup::read_options(settings) };
    let folder = std::env::current_dir().context("the working directory")?;
    let sample = RowReader::new("prompt").media_in(&folder).options(options).sample(row)?;
    let checkpoint = session.checkpoint()?;
    let model = setup::model(settings, checkpoint, session.device()?)?;
    let prompts = session.prompts(settings, checkpoint, false)?;
    let row = PreparedRow::new(&prompts, sample, 0)?;
    let (features, _) = encode(&model, Keep::Features, [&*row.prompt])?;
    let algorithm = &settings.algorithm;
    let interaction = session.interaction(settings)?;
    let generator = Generator::new(&model, &prompts, &algorithm.sampling)
        .with_max_live(algorithm.max_live)
        .with_interaction(interaction.as_ref());
    let row = [row];
    let requests = requests(&row, &features, settings.algorithm.num_generations, 0);
    // Several completions are printed at the end, since their tokens are interleaved. So is a completion with stop strings,
    // because its end is known only afterwards.
    let live = settings.algorithm.num_generations == 1 && settings.prompts.stop_strings.is_empty();
    let mut decoder = StreamDecoder::new(true);
    let mut on_token = |event: TokenEvent| {
        if live {
            // The error is ignored here; a failed write fails again at the final newline.
            let _ = print_data(&decoder.push(prompts.tokenizer(), event.id));
            let _ = std::io::stdout().flush();
        }
    };
    let options = GenerateOptions { on_token: Some(&mut on_token), memory: None, experts: false };
    let generated = generator.generate(requests, options)?;
    if live {
        print_data(&decoder.finish())?;
        return print_data("\n");
    }
    for (i, completion) in generated.iter().flat_map(|of| &of.completions).enumerate() {
        print_data(&format!("--- {i}\n{}\n", completion.text))?;
    }
    Ok(())
}

/// Evaluates a model on a dataset.
pub fn eval(resolved: &Resolved, session: &Session) -> Result<()> {
    let evaluation = evaluation(resolved, session)?;
    let judged = || -> Result<()> {
        print(&super::summary::tables(&evaluation.summary))?;
        let (skipped, rows) = (evaluation.skipped.len(), evaluation.rows.len() + evaluation.skipped.len());
        if !resolved.settings.run.rows.skip.tolerates(skipped as u64, rows as u64) {
            return Err(Problem::failure(format!("{skipped} of {rows} rows could not be evaluated"))
                .help("they are listed above; --max_skipped sets the largest tolerated share")
                .into());
        }
        Ok(())
    };
    together(&session.ranks, if session.ranks.is_first() { judged() } else { Ok(()) })
}
