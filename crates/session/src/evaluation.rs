//! The evaluation of a model on rows.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, Result};
use omnigrpo_models::Checkpoint;
use omnigrpo_observe::Partial;
use omnigrpo_rewards::Summary;
use omnigrpo_settings::values::Resolved;
use omnigrpo_settings::{Problem, Settings};
use omnigrpo_train::{EvalOptions, EvalPlan, Evaluation, evaluate_rest, room};

use crate::files::{can_write, keep_inputs, write_lines};
use crate::{Session, resume, setup};

/// Enables the store of decoded media. Must be called after the models are loaded.
pub fn keep_media(settings: &Settings, checkpoint: &Checkpoint) {
    checkpoint.media_store().set_max_bytes(room::for_media(setup::media_bytes(settings), room::free()));
}

/// Returns the sampling options of these commands.
pub fn sampled(settings: &Settings) -> EvalOptions {
    EvalOptions {
        num_generations: settings.algorithm.num_generations,
        sampling: settings.algorithm.sampling.clone(),
        max_live: settings.algorithm.max_live,
        ..settings.eval.clone()
    }
}

/// Evaluates a model, and writes the results to `--output` if it is given.
pub fn evaluation(resolved: &Resolved, session: &Session) -> Result<Evaluation> {
    let settings = &resolved.settings;
    let dataset = setup::eval_data(settings)?
        .ok_or_else(|| Problem::usage("no rows to evaluate").expected("`--eval_file FILE`"))?;
    if let Some(output) = &settings.io.output {
        can_write(output)?;
        keep_inputs(output, settings.data.eval_file.iter().map(PathBuf::as_path).chain(dataset.files()))?;
    }
    let checkpoint = session.checkpoint()?;
    let model = setup::model(settings, checkpoint, session.device()?)?;
    let prompts = session.prompts(settings, checkpoint, false)?;
    let corpus = setup::corpus(settings, &dataset, 0..dataset.len());
    let corpus = corpus.map(|corpus| corpus.or_kept(model.dir())).transpose()?;
    let rewards = session.rewards(settings, corpus.as_ref(), Some(&prompts))?;
    keep_media(settings, checkpoint);
    let rows: Vec<u64> = (0..dataset.len()).collect();
    if let Some(problem) =
        omnigrpo_train::checks::ask_before_evaluation(&session.console, &dataset, &rows, &rewards)
    {
        return Err(Problem::from(problem).into());
    }
    omnigrpo_train::checks::probe_rewards(
        &rewards,
        &dataset,
        rows.iter().copied(),
        &prompts,
        sampled(settings).num_generations,
        &session.console,
    )?;
    let plan = EvalPlan {
        prompts: Arc::new(prompts),
        rows,
        dataset: Arc::clone(&dataset),
        interaction: session.interaction(settings)?,
        options: sampled(settings),
    };
    let output = settings.io.output.as_deref();
    let mut partial = match output {
        Some(output) => Some(resume::open(resolved, session, output, model.dir(), &dataset)?),
        None => None,
    };
    let mut done = BTreeMap::new();
    for (&row, text) in partial.iter().flat_map(Partial::done) {
        done.insert(row, serde_json::from_str(text).context("a row of an interrupted evaluation")?);
    }
    let mut progress = session.console.progress("evaluating", dataset.len());
    progress.advance(done.len() as u64);
    let evaluation = evaluate_rest(&model, &rewards, &plan, done, &mut |batch| {
        progress.advance(batch.num_rows);
        Ok(partial.as_mut().map_or(Ok(()), |partial| partial.add_json(batch.judged))?)
    })?;
    drop(progress);
    for row in &evaluation.skipped {
        session.console.line(&row.to_string());
    }
    if let Some(output) = output {
        let lines: Vec<String> =
            evaluation.rows.iter().map(serde_json::to_string).collect::<Result<_, _>>()?;
        write_lines(output, &lines)?;
        write_summary(output, &evaluation.summary)?;
    }
    partial.map_or(Ok(()), Partial::remove)?;
    Ok(evaluation)
}

/// Writes the results to `<output>.summary.json`, in the directory of the output and without its extension.
pub fn write_summary(output: &Path, summary: &Summary) -> Result<()> {
    write_lines(&output.with_extension("summary.json"), &[format!("{:#}", summary.to_json())])
}
