//! `rewards list`, `rewards run` and `rewards try`.

use std::sync::Arc;

use anyhow::{Context as _, Result};
use omnigrpo_data::{Dataset, Sample};
use omnigrpo_guard::told;
use omnigrpo_observe::{escape_line, fit, stdout_columns, wrap};
use omnigrpo_rewards::{EvalRow, Measures, RewardError, RewardSet, answer_reward, summarize};
use omnigrpo_rollout::{Completion, FinishReason};
use omnigrpo_train::TrainError;
use serde_json::json;

use super::infer::with_columns;
use super::print;
use crate::settings::problem::Problem;
use crate::settings::{Keep, Settings};
use omnigrpo_session::evaluation::{self, sampled};
use omnigrpo_session::files;
use omnigrpo_session::{Session, setup};

/// Returns the name, the description and the source of every reward.
fn documented() -> impl Iterator<Item = (&'static str, String, &'static str)> {
    let rewards = omnigrpo_rewards::table().iter().map(|row| (row.name, (row.doc)(), row.source));
    let scorers = omnigrpo_scorers::table().iter().map(|row| (row.name, (row.doc)(), row.source));
    rewards.chain(scorers)
}

/// Prints the table of rewards.
pub fn list() -> Result<()> {
    let mut out = String::new();
    let columns = stdout_columns().unwrap_or(80);
    let rows: Vec<_> = documented().collect();
    let width = rows.iter().map(|row| row.0.len()).max().unwrap_or(0);
    for (mut name, doc, source) in rows {
        // Continuation lines are indented by two columns, so they are narrower.
        for line in wrap(&format!("{doc} [{source}]"), columns.saturating_sub(width + 2)).lines() {
            let gap = if name.is_empty() { "" } else { "  " };
            out.push_str(&format!("{name:width$}{gap}{line}\n"));
            name = "";
        }
    }
    let others = "A reward can also be the directory or hub name of a reward model, `FILE.py:FUNCTION`, `cmd:PROGRAM …`, `http(s)://ADDRESS`, `judge:http(s)://ADDRESS` and `rubric:FILE@http(s)://ADDRESS`: see docs/rewards.md.";
    out.push_str(&format!("\n{}\n", wrap(others, columns)));
    print(&out)
}

/// Scores rows that contain completions and summarises them as an evaluation.
pub fn run(settings: &Settings, session: &Session) -> Result<()> {
    let (Some(input), Some(output)) = (&settings.io.input, &settings.io.output) else {
        return Err(Problem::usage("nothing to score")
            .expected("`rewards run --input rows.jsonl --output out.jsonl`")
            .into());
    };
    files::can_write(output)?;
    // Missing media are allowed here, because a reward that reads media reports the files that it cannot open.
    let dataset = setup::input_rows(settings, input, true)?;
    files::keep_inputs(output, [input.as_path()].into_iter().chain(dataset.files()))?;
    let keep = settings.io.keep;
    // Only this reward reads what the template opens.
    let prompts = match settings.model.name.as_ref().filter(|_| !settings.lacks_reward("format")) {
        Some(_) => Some(session.prompts(settings, &setup::checkpoint(settings)?, false)?),
        None => None,
    };
    let corpus = setup::corpus(settings, &dataset, 0..dataset.len());
    let rewards = session.rewards(settings, corpus.as_ref(), prompts.as_ref())?;
    let measures = settings.eval.measures.clone();
    let right = answer_reward(&rewards).map(|(name, best)| (name, measures.accuracy_threshold * best - 1e-9));
    if keep == Some(Keep::Passed) && right.is_none() {
        return Err(Problem::usage("no reward compares answers, so it is unknown which answers are correct")
            .at("--keep")
            .got(format!("`reward_funcs` {}", settings.rewards.funcs.join(", ")))
            .expected("`accuracy` or one of its rules in `reward_funcs`, or else `best` or a number")
            .into());
    }
    probe(&rewards, &dataset)?;
    let (lines, rows) = score_all(settings, session, &dataset, &rewards, right)?;
    if keep.is_some() {
        let all: usize = rows.iter().map(|row| row.completions.len()).sum();
        session.console.line(&format!("kept {} of {all} completions of {} rows", lines.len(), rows.len()));
    }
    files::write_lines(output, &lines)?;
    for name in rewards.names() {
        let is_null =
            |row: &EvalRow| row.rewards.get(name).is_none_or(|scores| scores.iter().all(Option::is_none));
        if !rows.is_empty() && rows.iter().all(is_null) {
            let doc = documented()
                .find(|row| row.0 == name)
                .map_or_else(String::new, |(_, doc, _)| format!("; it is the {doc}"));
            session.console.warning(&format!(
                "the reward `{name}` applies to no row, so all of its scores are null{doc}"
            ));
        }
    }
    let summary = summarize(&rows, &rewards, &measures)?;
    evaluation::write_summary(output, &summary)?;
    print(&super::summary::tables(&summary))?;
    files::all_rows(dataset.len() - rows.len() as u64, dataset.len())
}

/// Scores all rows. Returns the lines to write and the rows that have scores. `right` is that of [`kept`].
fn score_all(
    settings: &Settings,
    session: &Session,
    dataset: &Dataset,
    rewards: &RewardSet,
    right: Option<(&str, f64)>,
) -> Result<(Vec<String>, Vec<EvalRow>)> {
    let (keep, eval) = (settings.io.keep, &settings.eval);
    let (seed, category) = (settings.algorithm.seed, eval.category.as_deref());
    let mut progress = session.console.progress("scoring", dataset.len());
    let (mut lines, mut rows) = (Vec::new(), Vec::new());
    let all: Vec<u64> = (0..dataset.len()).collect();
    for numbers in all.chunks(BATCH_ROWS) {
        let read: Vec<_> = numbers.iter().map(|&row| read_row(dataset, row)).collect();
        let good: Vec<Scored<'_>> = read.iter().flatten().map(|(s, c)| (s, c.as_slice())).collect();
        let mut scored = score_rows(&good, rewards, seed, category, &eval.measures)?.into_iter();
        for (&number, read) in numbers.iter().zip(&read) {
            let row = match read {
                Ok((sample, _)) => {
                    scored.next().context("a row was not scored").flatten().map(|row| (sample, row))
                }
                Err(error) => Err(anyhow::anyhow!("{}", told(error.as_ref()))),
            };
            match row {
                Ok((sample, row)) => {
                    lines.extend(lines_of(dataset, sample, &row, keep, right));
                    rows.push(row);
                }
                Err(error) if keep.is_none() => {
                    let id = dataset.id(number);
                    lines.push(json!({ "id": id, "error": told(error.as_ref()) }).to_string());
                }
                Err(error) => {
                    let (id, error) = (dataset.id(number), told(error.as_ref()));
                    session.console.warning(&format!("row {number} (id {id}): {error}"));
                }
            }
        }
        progress.advance(numbers.len() as u64);
    }
    Ok((lines, rows))
}

/// Returns the lines of a scored row: one with all scores, or one for each completion to keep.
fn lines_of(
    dataset: &Dataset,
    sample: &Sample,
    row: &EvalRow,
    keep: Option<Keep>,
    right: Option<(&str, f64)>,
) -> Vec<String> {
    let Some(keep) = keep else {
        let scores = json!({ "id": row.id, "rewards": row.rewards, "reward": row.reward });
        let recorded = ["completions", "completion_ids", "completion_turns", "logprobs"];
        return vec![with_columns(dataset, sample, &recorded, scores).to_string()];
    };
    let line = |index: usize| {
        let answer = sample.completions.as_deref().map(|all| all[index].answer());
        let made = json!({ "id": row.id, "completion": answer, "reward": row.reward[index] });
        with_columns(dataset, sample, &[], made).to_string()
    };
    kept(row, keep, right).map(line).collect()
}

/// Returns the indices of the completions of a row to keep. `right` is the name of the reward that compares answers, and its
/// threshold.
fn kept(row: &EvalRow, keep: Keep, right: Option<(&str, f64)>) -> impl Iterator<Item = usize> {
    let scores: &[Option<f64>] = match (keep, right) {
        (Keep::Passed, Some((name, _))) => row.rewards.get(name).map_or(&[], Vec::as_slice),
        _ => &row.reward,
    };
    let from = match (keep, right) {
        (Keep::Best, _) => scores.iter().copied().flatten().fold(f64::NEG_INFINITY, f64::max),
        (Keep::Passed, Some((_, from))) | (Keep::From(from), _) => from,
        (Keep::Passed, None) => f64::INFINITY,
    };
    let good = scores.iter().enumerate().filter(move |(_, score)| score.is_some_and(|score| score >= from));
    let most = if keep == Keep::Best { 1 } else { scores.len() };
    good.map(|(index, _)| index).take(most).collect::<Vec<_>>().into_iter()
}

/// Number of rows that are scored together, so that requests to a program or an address are full and spread over its workers.
const BATCH_ROWS: usize = 64;

type Scored<'a> = (&'a Sample, &'a [Completion]);

fn read_row(dataset: &Dataset, row: u64) -> Result<(Sample, Vec<Completion>)> {
    let sample = dataset.get(row)?;
    let recorded = sample.completions.as_ref().context("the row has no `completions`")?;
    anyhow::ensure!(
        recorded.iter().all(|c| c.text.is_some()),
        "a completion has token ids and no text, which rewards read; `score` writes both"
    );
    let completions = recorded.iter().map(Completion::of_record).collect();
    Ok((sample, completions))
}

/// Scores the first readable row, so that a reward that cannot be started or reached fails the command immediately instead of
/// failing at each row.
fn probe(rewards: &RewardSet, dataset: &Dataset) -> Result<()> {
    let Some((sample, completions)) = (0..dataset.len()).find_map(|row| read_row(dataset, row).ok()) else {
        return Ok(());
    };
    omnigrpo_train::probe(rewards, &sample, &completions).map(drop).map_err(|error| {
        let help = "the reward had to score the completions of one row before the others; nothing is written";
        Problem::of(&error).at("--reward_funcs").help(help).into()
    })
}

/// Number of consecutive rows with the same failure after which an external reward counts as unavailable.
const GIVEN_UP_AFTER: usize = 3;

/// Scores rows together. If that fails, scores each row alone, so that an error is attributed to its row. If a reward no longer
/// answers, the command fails.
fn score_rows(
    rows: &[Scored<'_>],
    rewards: &RewardSet,
    seed: u64,
    category: Option<&str>,
    measures: &Measures,
) -> Result<Vec<Result<EvalRow>>> {
    Ok(match omnigrpo_train::score(rewards, rows, seed, 0) {
        Ok(scores) => {
            let mut from = 0;
            let each = |(sample, completions): &Scored<'_>| {
                let span = from..from + completions.len();
                from = span.end;
                let texts = completions.iter().map(|c| c.text.clone()).collect();
                Ok(omnigrpo_train::eval_row(sample, texts, &scores, span, category, measures))
            };
            rows.iter().map(each).collect()
        }
        Err(error) if rows.len() == 1 => vec![Err(error.into())],
        Err(_) => {
            let mut all = Vec::with_capacity(rows.len());
            let mut refusals: Vec<String> = Vec::new();
            for row in rows.chunks(1) {
                let one = score_rows(row, rewards, seed, category, measures)?;
                let refusal = one.iter().find_map(|row| refusal(row.as_ref().err()?));
                refusals.retain(|earlier| Some(earlier) == refusal.as_ref());
                refusals.extend(refusal);
                if refusals.len() == GIVEN_UP_AFTER {
                    return Err(Problem::failure(format!(
                        "{GIVEN_UP_AFTER} consecutive rows failed in the same way"
                    ))
                    .at("--reward_funcs")
                    .got(refusals.swap_remove(0))
                    .help("no more rows are scored, and nothing is written")
                    .into());
                }
                all.extend(one);
            }
            all
        }
    })
}

/// Returns the message of a program or address that gave no score, without the part that names the row.
fn refusal(error: &anyhow::Error) -> Option<String> {
    let reward = match error.downcast_ref::<TrainError>()? {
        TrainError::Reward(error) => error,
        TrainError::Unscored { source, .. } => source,
        _ => return None,
    };
    match reward {
        RewardError::External { reward, what, .. } => Some(format!("`{reward}`: {what}")),
        RewardError::TimedOut { reward, limit, .. } => {
            Some(format!("`{reward}`: no answer within {limit:?}"))
        }
        _ => None,
    }
}

/// Names of the completions that are made up, in their order.
const MADE_UP: [&str; 4] =
    ["the solution in tags", "the solution alone", "an empty text", "the solution of another row"];

/// A row that is tried, and its completions with a name each, where they have one.
struct Tried {
    sample: Sample,
    completions: Vec<(Option<&'static str>, Completion)>,
}

/// Shows what rewards give to a few completions: those of a model, recorded ones, or made-up ones.
pub fn try_out(settings: &Settings, session: &Session) -> Result<()> {
    let has_rows = !settings.data.train_file.is_empty() || !settings.data.dataset_use.is_empty();
    let dataset = match &settings.io.input {
        Some(input) => setup::input_rows(settings, input, true)?,
        None if has_rows => setup::train_data(settings)?,
        None => {
            return Err(Problem::usage("there are no rows to try the rewards on")
                .expected("`--train_file rows.jsonl`, or `--input` with rows that have completions, such as a run directory")
                .into());
        }
    };
    let prompts = match settings.model.name {
        Some(_) => Some(session.prompts(settings, session.checkpoint()?, false)?),
        None => None,
    };
    let corpus = setup::corpus(settings, &dataset, 0..dataset.len());
    let rewards = session.rewards(settings, corpus.as_ref(), prompts.as_ref())?;
    let first = settings.io.row.min(dataset.len());
    let rows: Vec<u64> = (first..dataset.len()).take(settings.io.num_rows as usize).collect();
    let tried = match (&settings.io.input, prompts) {
        (Some(_), _) => recorded(settings, &dataset, &rows)?,
        (None, Some(prompts)) => of_model(settings, session, &dataset, &rows, &prompts)?,
        (None, None) => rows.iter().map(|&row| made_up(&dataset, row)).collect::<Result<Vec<_>>>()?,
    };
    let (mut out, mut all) = (String::new(), Vec::new());
    for Tried { sample, completions } in &tried {
        let texts: Vec<Completion> = completions.iter().map(|(_, completion)| completion.clone()).collect();
        let scores = omnigrpo_train::score(&rewards, &[(sample, &texts)], settings.algorithm.seed, 0);
        let scores = scores.map_err(|error| Problem::of(&error).at(format!("row {}", sample.id)))?;
        let question = sample.question();
        let solution = sample.solution.as_deref().unwrap_or("none");
        out.push_str(&format!(
            "row {}: {}\n  solution: {}\n",
            sample.id,
            line(question.trim()),
            line(solution)
        ));
        for (at, (name, completion)) in completions.iter().enumerate() {
            let values = scores.names.iter().zip(&scores.values);
            let values: Vec<String> =
                values.map(|(name, own)| format!("{name} {}", number(own[at]))).collect();
            let total = if scores.names.len() > 1 {
                format!(", total {}", number(scores.total[at]))
            } else {
                String::new()
            };
            let name = name.map(|name| format!("{name}: ")).unwrap_or_default();
            out.push_str(&format!("  {}{total}  {name}{}\n", values.join(", "), line(&completion.text)));
        }
        out.push('\n');
        all.push(scores);
    }
    out.push_str(&summed(&all, &rewards));
    print(&out)
}

/// Summarises each reward: its least and greatest value, and what follows from a single one.
fn summed(all: &[omnigrpo_rewards::RewardMatrix], rewards: &RewardSet) -> String {
    let mut out = String::new();
    for (at, name) in rewards.names().into_iter().enumerate() {
        let given: Vec<f64> =
            all.iter().flat_map(|scores| scores.values[at].iter().copied().flatten()).collect();
        let least = given.iter().copied().fold(f64::INFINITY, f64::min);
        let most = given.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let varied = all.iter().filter(|scores| {
            let mut own = scores.values[at].iter().flatten();
            let first = own.next();
            own.any(|value| Some(value) != first)
        });
        let (count, varied) = (given.len(), varied.count());
        out.push_str(&match () {
            () if given.is_empty() => format!("{name}: no number for any completion; it applies to none of these rows\n"),
            () if least == most => format!(
                "{name}: {least} for all {count} completions. Training learns nothing from equal rewards: compare the texts with the \
                 solutions above\n"
            ),
            () => format!("{name}: from {least} to {most} over {count} completions; {varied} of {} rows vary\n", all.len()),
        });
    }
    out
}

fn number(value: Option<f64>) -> String {
    value.map_or("-".to_owned(), |value| format!("{}", (value * 1e4).round() / 1e4))
}

/// Shortens a text to a line.
fn line(text: &str) -> String {
    const COLUMNS: usize = 120;
    fit(&escape_line(text), COLUMNS).into_owned()
}

/// Returns the recorded completions of rows, as many as a run samples for a prompt.
fn recorded(settings: &Settings, dataset: &Dataset, rows: &[u64]) -> Result<Vec<Tried>> {
    let read = |&row: &u64| {
        let (sample, completions) = read_row(dataset, row)?;
        let most = settings.algorithm.num_generations;
        Ok(Tried { sample, completions: completions.into_iter().take(most).map(|own| (None, own)).collect() })
    };
    rows.iter().map(read).collect()
}

/// Samples completions of rows from the model.
fn of_model(
    settings: &Settings,
    session: &Session,
    dataset: &Arc<Dataset>,
    rows: &[u64],
    prompts: &omnigrpo_models::PromptBuilder,
) -> Result<Vec<Tried>> {
    let model = setup::model(settings, session.checkpoint()?, session.device()?)?;
    let mut tried = Vec::new();
    let mut unusable = None;
    omnigrpo_train::generate(
        &model,
        prompts,
        (dataset, rows),
        (&sampled(settings), session.interaction(settings)?.as_ref()),
        &mut |_| (),
        &mut |done| {
            unusable = unusable.take().or(done.unusable.first().map(|(_, own)| own.reason.clone()));
            tried.extend(done.rows.iter().zip(done.completions).map(|(row, completions)| Tried {
                sample: row.sample.clone(),
                completions: completions.iter().map(|own| (None, own.clone())).collect(),
            }));
            Ok(())
        },
    )?;
    match unusable {
        Some(reason) => Err(Problem::failure("a row cannot be used").got(reason).into()),
        None => Ok(tried),
    }
}

/// Makes up completions of a row: its solution in two forms, an empty text, and the solution of the next row with another one.
fn made_up(dataset: &Dataset, row: u64) -> Result<Tried> {
    let sample = dataset.get(row)?;
    let answer = |solution: &str| {
        let inside = solution.split_once("<answer>").and_then(|(_, rest)| rest.split_once("</answer>"));
        inside.map_or(solution, |(inside, _)| inside).trim().to_owned()
    };
    let solution = sample
        .solution
        .as_deref()
        .map(answer)
        .context("the row has no solution; name its column with `--solution_column`")?;
    let others =
        (1..dataset.len().min(1000)).filter_map(|by| dataset.get((row + by) % dataset.len()).ok()?.solution);
    let wrong = others.map(|other| answer(&other)).find(|other| *other != solution);
    let texts = [format!("<think></think><answer>{solution}</answer>"), solution, String::new()];
    let texts =
        texts.into_iter().chain(wrong.map(|wrong| format!("<think></think><answer>{wrong}</answer>")));
    let made = |text: String| Completion::recorded(Vec::new(), FinishReason::Stop, text);
    let completions = MADE_UP.into_iter().map(Some).zip(texts.map(made)).collect();
    Ok(Tried { sample, completions })
}
