//! The evaluation of a model on rows.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, Result};
use omnigrpo_data::Dataset;
use omnigrpo_models::{Checkpoint, FrozenWeights, Model};
use omnigrpo_observe::Partial;
use omnigrpo_rewards::{RewardSet, Summary};
use omnigrpo_settings::values::Resolved;
use omnigrpo_settings::{Problem, Settings};
use omnigrpo_train::{Batch, EvalOptions, EvalPlan, Evaluation, Judged, Split, evaluate_split, room};

use crate::files::{can_write, keep_inputs, write_lines};
use crate::ranks::{in_order, together};
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

/// Loads the model of a command that only reads it. Several ranks compare their inputs first.
pub fn model_of_ranks(settings: &Settings, session: &Session, dataset: &Dataset) -> Result<Model> {
    let ranks = &session.ranks;
    let plan = || -> Result<_> { Ok(setup::model_plan(settings, session.checkpoint()?, session.device()?)) };
    let plan = together(ranks, plan())?;
    if ranks.size() > 1 {
        let own = omnigrpo_train::described(&plan, dataset, &setup::reward_files(settings));
        omnigrpo_train::check_ranks(ranks, "their inputs", own)?;
    }
    together(ranks, plan.load_to_read().map_err(Into::into))
}

/// Rows, prompts and rewards of an evaluation.
struct Opened {
    plan: EvalPlan,
    rewards: RewardSet,
}

/// Opens everything that an evaluation needs except its model, and checks it.
fn open(settings: &Settings, session: &Session) -> Result<Opened> {
    let dataset = setup::eval_data(settings)?
        .ok_or_else(|| Problem::usage("no rows to evaluate").expected("`--eval_file FILE`"))?;
    let is_first = session.ranks.is_first();
    if let Some(output) = settings.io.output.as_ref().filter(|_| is_first) {
        can_write(output)?;
        keep_inputs(output, settings.data.eval_file.iter().map(PathBuf::as_path).chain(dataset.files()))?;
    }
    let checkpoint = session.checkpoint()?;
    let prompts = session.prompts(settings, checkpoint, false)?;
    let corpus = setup::corpus(settings, &dataset, 0..dataset.len());
    let corpus = corpus.map(|corpus| corpus.or_kept(checkpoint.dir())).transpose()?;
    // The first rank scores for all.
    let weights = FrozenWeights { is_outline: !is_first, ..FrozenWeights::default() };
    let rewards = setup::rewards(settings, corpus.as_ref(), Some(&prompts), (&session.functions, weights))?;
    let rows: Vec<u64> = (0..dataset.len()).collect();
    if let Some(problem) =
        omnigrpo_train::checks::ask_before_evaluation(&session.console, &dataset, &rows, &rewards)
    {
        return Err(Problem::from(problem).into());
    }
    let options = sampled(settings);
    if is_first {
        let (rows, each) = (rows.iter().copied(), options.num_generations);
        omnigrpo_train::checks::probe_rewards(&rewards, &dataset, rows, &prompts, each, &session.console)?;
    }
    let interaction = session.interaction(settings)?;
    Ok(Opened { plan: EvalPlan { prompts: Arc::new(prompts), rows, dataset, interaction, options }, rewards })
}

/// Evaluates a model, and writes the results to `--output` if it is given. Over ranks, the first one has the results and writes them; the
/// others have the metrics.
pub fn evaluation(resolved: &Resolved, session: &Session) -> Result<Evaluation> {
    let (settings, ranks) = (&resolved.settings, &session.ranks);
    // The first rank fills the caches of downloads, which the others then read.
    let Opened { plan, rewards } = in_order(ranks, Ok(()), || open(settings, session))?;
    let model = model_of_ranks(settings, session, &plan.dataset)?;
    keep_media(settings, model.checkpoint());
    let output = settings.io.output.as_deref().filter(|_| ranks.is_first());
    let opened = || -> Result<_> {
        let Some(output) = output else { return Ok((None, BTreeMap::new())) };
        let partial = resume::open(resolved, session, output, model.dir(), &plan.dataset)?;
        let read = |(&row, text): (&u64, &String)| -> Result<_> { Ok((row, serde_json::from_str(text)?)) };
        let done: Result<BTreeMap<u64, Judged>> = partial.done().iter().map(read).collect();
        Ok((Some(partial), done.context("a row of an interrupted evaluation")?))
    };
    let (mut partial, done) = together(ranks, opened())?;
    let mut progress = session.console.progress("evaluating", plan.rows.len() as u64);
    progress.advance(done.len() as u64);
    let split = Split::over(ranks.clone());
    let mut each = |batch: Batch<'_>| {
        progress.advance(batch.num_rows);
        Ok(partial.as_mut().map_or(Ok(()), |partial| partial.add_json(batch.judged))?)
    };
    let evaluation = evaluate_split(&split, &model, &rewards, &plan, done, &mut each, |_| Ok(()))?;
    drop(progress);
    for row in &evaluation.skipped {
        session.console.line(&row.to_string());
    }
    let written = || -> Result<()> {
        if let Some(output) = output {
            let lines: Vec<String> =
                evaluation.rows.iter().map(serde_json::to_string).collect::<Result<_, _>>()?;
            write_lines(output, &lines)?;
            write_summary(output, &evaluation.summary)?;
        }
        Ok(partial.map_or(Ok(()), Partial::remove)?)
    };
    together(ranks, written())?;
    Ok(evaluation)
}

/// Writes the results to `<output>.summary.json`, in the directory of the output and without its extension.
pub fn write_summary(output: &Path, summary: &Summary) -> Result<()> {
    write_lines(&output.with_extension("summary.json"), &[format!("{:#}", summary.to_json())])
}
