//! `data check`, `data show`, `data convert`.

use std::path::Path;

use anyhow::Result;
use omnigrpo_data::{Dataset, Report};
use omnigrpo_models::PromptBuilder;
use omnigrpo_rewards::RewardSet;
use omnigrpo_text::MediumKind;
use omnigrpo_train::{Objective, RowCheck, Survey};

use super::memory::{self, Longest};
use super::survey::{idle, warnings};
use super::{Context, plan, print, setup};
use crate::settings::Settings;
use crate::settings::problem::Problem;
use crate::settings::values::Resolved;

/// Number of longest prompts whose length is shown.
const SHOWN_LONGEST: usize = 5;
/// Number of longest prompts to find: enough for a large step.
const LONGEST: usize = 64;
/// Number of problems to print. The file in the run directory has all of them.
const SHOWN: usize = 20;

/// Names of the kinds of rows in messages.
const TRAINING: &str = "rows";
const EVALUATION: &str = "evaluation rows";

/// Reads every row and medium header. Fails if any row cannot be used.
pub fn check(resolved: &Resolved, context: &Context) -> Result<()> {
    let settings = &resolved.settings;
    let held_out = setup::eval_data(settings)?.map(|rows| (EVALUATION, rows));
    let trained = match setup::train_data(settings) {
        Ok(rows) => Some((TRAINING, rows)),
        Err(_) if held_out.is_some() && !settings.data.has_train_rows() => None,
        Err(error) => return Err(error),
    };
    let prompts = match &settings.model.name {
        Some(_) => Some(setup::prompts(settings, context.checkpoint()?, false)?),
        None => None,
    };
    let cache = settings.env.check_cache();
    let (mut bad, mut rows, mut help) = (0, 0, None);
    for (which, dataset) in trained.into_iter().chain(held_out) {
        let rewards = setup::text_rewards(settings, &dataset)?;
        let survey = rewards.as_ref().map(Survey::new);
        let report = report(settings, context, &dataset, prompts.as_ref(), Some(&cache), survey.as_ref())?;
        let mut out = describe(which, &report, &dataset, prompts.is_some());
        if let Some(prompts) = &prompts {
            out.push_str(&media_cost(resolved, context, prompts, &dataset, &report)?);
        }
        if let Some(survey) = &survey {
            // Rows for supervised training may lack a ground truth.
            let idle = idle(&survey.seen(), &dataset)
                .map(|problem| problem.to_string().replacen("error: ", "warning: ", 1));
            for line in warnings(&survey.seen(), settings).into_iter().chain(idle) {
                out.push_str(&format!("{line}\n"));
            }
        }
        print(&out)?;
        bad += report.counts.bad_rows;
        rows += report.counts.rows;
        help = help.or_else(|| folders_help(&report));
    }
    if bad == 0 {
        return Ok(());
    }
    let skips = || "`train` skips such rows as long as they are fewer than --max_skipped".to_owned();
    Err(Problem::failure(format!("{bad} of {rows} rows cannot be used"))
        .help(help.unwrap_or_else(skips))
        .into())
}

/// Returns lines about the longest prompt if media take up most of it: their cost, and the settings that change it.
fn media_cost(
    resolved: &Resolved,
    context: &Context,
    prompts: &PromptBuilder,
    dataset: &Dataset,
    report: &Report,
) -> Result<String> {
    /// Minimum number of media tokens that is worth a line.
    const LARGE: u64 = 2048;
    let Some(row) = report.longest.first().filter(|row| row.media_tokens >= LARGE.max(row.num_tokens / 2))
    else {
        return Ok(String::new());
    };
    let longest = Longest::prepare(prompts, dataset, &[row.row], Objective::Reinforce);
    let mut out = format!(
        "row {}: {} of its {} tokens are media, {} decoded\n",
        row.id,
        row.media_tokens,
        row.num_tokens,
        memory::size(longest.media_bytes())
    );
    let checkpoint = context.checkpoint()?;
    for flags in plan::media_flags(&resolved.settings, &longest) {
        let Some(settings) = plan::changed(resolved, &flags) else { continue };
        let Ok(prompts) = setup::prompts(&settings, checkpoint, false) else { continue };
        let Some(smaller) = longest.with(&prompts, Objective::Reinforce) else { continue };
        let tokens = smaller.prompt_tokens();
        if tokens < longest.prompt_tokens() {
            let share = tokens as f64 / longest.prompt_tokens() as f64;
            out.push_str(&format!(
                "  `{}` makes that {tokens} tokens: {:.0} % of the time and memory of its prompt\n",
                plan::typed(&flags),
                100.0 * share
            ));
        }
    }
    Ok(out)
}

/// Result of checking training rows.
#[derive(Default)]
pub struct Checked {
    /// Rows that must never be drawn: index, id and reason.
    pub bad: Vec<(u64, String, String)>,
    /// Rows with the longest prompts, longest first.
    pub longest: Vec<u64>,
    /// Mean memory of the decoded media of a usable row, bytes; `None` if the rows were not checked.
    pub row_media_bytes: Option<f64>,
}

/// Checks training rows. With `rewards`, also checks that the rewards can score each row.
pub fn check_before(
    settings: &Settings,
    context: &Context,
    dataset: &Dataset,
    prompts: &PromptBuilder,
    cache: &Path,
    rewards: Option<&RewardSet>,
) -> Result<Checked> {
    let survey = rewards.map(Survey::new);
    let report = tolerable(TRAINING, settings, context, dataset, prompts, cache, survey.as_ref())?;
    if let Some(survey) = &survey {
        if let Some(problem) = idle(&survey.seen(), dataset) {
            return Err(problem.into());
        }
        warnings(&survey.seen(), settings).iter().for_each(|line| context.console.line(line));
    }
    let bad = |p: omnigrpo_data::Problem| {
        (p.row, dataset.id(p.row), format!("{}:{}: {}", p.file.display(), p.line, p.what))
    };
    let row_media_bytes = Some(mean_media_bytes(&report));
    Ok(Checked {
        bad: report.problems.into_iter().map(bad).collect(),
        longest: report.longest.iter().map(|prompt| prompt.row).collect(),
        row_media_bytes,
    })
}

fn mean_media_bytes(report: &Report) -> f64 {
    report.media_bytes as f64 / report.counts.rows.saturating_sub(report.counts.bad_rows).max(1) as f64
}

/// Checks the rows on which a training run evaluates. Each evaluation skips rows that cannot be used. Returns the mean memory of
/// a row's decoded media, bytes.
pub fn check_held_out(
    settings: &Settings,
    context: &Context,
    dataset: &Dataset,
    prompts: &PromptBuilder,
    cache: &Path,
) -> Result<f64> {
    tolerable(EVALUATION, settings, context, dataset, prompts, cache, None)
        .map(|report| mean_media_bytes(&report))
}

/// Returns the report, or an error if too many rows are unusable.
fn tolerable(
    which: &str,
    settings: &Settings,
    context: &Context,
    dataset: &Dataset,
    prompts: &PromptBuilder,
    cache: &Path,
    survey: Option<&Survey>,
) -> Result<Report> {
    let report = report(settings, context, dataset, Some(prompts), Some(cache), survey)?;
    context.console.line(describe(which, &report, dataset, true).trim_end());
    if !settings.run.skip.tolerates(report.counts.bad_rows, report.counts.rows) {
        let listed =
            || "the rows and reasons are listed above; `omnigrpo data check` lists them again".to_owned();
        return Err(Problem::failure(format!("too many {which} cannot be used"))
            .got(format!("{} of {} rows", report.counts.bad_rows, report.counts.rows))
            .expected(if settings.run.skip.strict {
                "none, with --strict_media".to_owned()
            } else {
                format!("at most a share of {} (--max_skipped)", settings.run.skip.max_share)
            })
            .help(folders_help(&report).unwrap_or_else(listed))
            .into());
    }
    Ok(report)
}

/// Returns advice about a folder if no medium of a kind was found, because then the folder is probably wrong, not the rows.
fn folders_help(report: &Report) -> Option<String> {
    let c = &report.counts;
    [(MediumKind::Image, c.images), (MediumKind::Video, c.videos), (MediumKind::Audio, c.audios)]
        .into_iter()
        .find(|(kind, found)| *found == 0 && report.problems.iter().any(|p| p.missing == Some(*kind)))
        .map(|(kind, _)| {
            format!(
                "none of the {kind} files was found: set --{kind}_folders to the folder that the rows' paths are relative to"
            )
        })
}

/// Reports a reward that applies to none of the rows, for runs that do not check rows. Reads rows until each reward applies to
/// one.
pub fn ask_unchecked(dataset: &Dataset, rows: &[u64], rewards: &RewardSet) -> Option<Problem> {
    idle(&Survey::new(rewards).ask_until_none_is_idle(dataset, rows), dataset)
}

/// Checks that the rewards can score the evaluation rows. Prints rows that they cannot score, and returns a problem for a reward
/// that applies to none.
pub fn ask_before_evaluation(
    context: &Context,
    dataset: &Dataset,
    rows: &[u64],
    rewards: &RewardSet,
) -> Option<Problem> {
    let survey = Survey::new(rewards);
    let mut bad = 0;
    for &row in rows {
        // A row that cannot be read is reported by the evaluation.
        let Ok(sample) = dataset.get(row) else { continue };
        if let Err(why) = survey.ask(&sample) {
            bad += 1;
            if bad <= SHOWN {
                context.console.line(&format!(
                    "evaluations will skip row {row} ({}): {}",
                    sample.id,
                    omnigrpo_guard::told(&*why)
                ));
            }
        }
    }
    if bad > SHOWN {
        context.console.line(&format!("… and {} more rows", bad - SHOWN));
    }
    idle(&survey.seen(), dataset)
}

fn report(
    settings: &Settings,
    context: &Context,
    dataset: &Dataset,
    prompts: Option<&PromptBuilder>,
    cache: Option<&Path>,
    survey: Option<&Survey<'_>>,
) -> Result<Report> {
    let bar = std::sync::Mutex::new((context.console.progress("checking rows", dataset.len()), 0));
    let progress = |done: u64, _all: u64| {
        if let Ok(mut bar) = bar.lock()
            && done > bar.1
        {
            let more = done - bar.1;
            bar.0.advance(more);
            bar.1 = done;
        }
    };
    let limits = &settings.prompts.media.limits;
    let check =
        RowCheck { prompts, limits, survey, num_longest: LONGEST, cache_dir: cache, progress: &progress };
    Ok(check.run(dataset)?)
}

fn describe(which: &str, report: &Report, dataset: &Dataset, with_lengths: bool) -> String {
    let c = &report.counts;
    let mut out = format!(
        "{} {which}: {} images, {} videos, {} sounds, {} rows of text only, {} without a solution\n",
        c.rows, c.images, c.videos, c.audios, c.text_rows, c.without_solution
    );
    let from: Vec<_> = report.solutions_from.iter().map(|(from, rows)| format!("{from} ({rows})")).collect();
    if !from.is_empty() {
        out.push_str(&format!("solutions from {}\n", from.join(", ")));
    }
    if c.without_solution > 0 {
        out.push_str(&format!(
            "columns of the rows: {}; --solution_column names the one with the solution\n",
            dataset.columns_seen().join(", ")
        ));
    }
    if with_lengths && !report.longest.is_empty() {
        let longest: Vec<_> = report
            .longest
            .iter()
            .take(SHOWN_LONGEST)
            .map(|p| format!("{} (row {}, id {})", p.num_tokens, p.row, p.id))
            .collect();
        out.push_str(&format!("longest prompts, in tokens: {}\n", longest.join(", ")));
    }
    for problem in report.problems.iter().take(SHOWN) {
        out.push_str(&format!(
            "bad row {} ({}, line {}): {}\n",
            problem.row,
            problem.file.display(),
            problem.line,
            problem.what
        ));
    }
    if !report.problems.is_empty() || with_lengths && !report.longest.is_empty() {
        out.push_str(
            "rows count from 0, as in `data show --row`; lines, and the ids of rows without one, from 1\n",
        );
    }
    if report.problems.len() > SHOWN {
        out.push_str(&format!("… and {} more bad rows\n", report.problems.len() - SHOWN));
    }
    out
}

/// Prints the prompt of a row in the form that the model receives.
pub fn show(settings: &Settings, context: &Context) -> Result<()> {
    let prompts = setup::prompts(settings, context.checkpoint()?, false)?;
    let dataset = match setup::train_data(settings) {
        Ok(dataset) => dataset,
        Err(error) => setup::eval_data(settings)?.ok_or(error)?,
    };
    for row in settings.io.row..settings.io.row + settings.io.num_rows {
        if row >= dataset.len() {
            return Err(Problem::usage(format!("row {row} does not exist"))
                .expected(format!("0 to {}", dataset.len().saturating_sub(1)))
                .at("--row")
                .into());
        }
        let sample = dataset.get(row)?;
        let prompt = prompts.build(&sample)?;
        let mut out = format!("row {row} ({}), {} tokens\n", sample.id, prompt.ids.len());
        for (i, medium) in prompt.media.iter().enumerate() {
            let tokens: usize = prompt.spans.iter().filter(|s| s.medium == i).map(|s| s.len).sum();
            out.push_str(&format!("  {} {i}: {} tokens, {}", medium.kind, tokens, medium.shape));
            if !medium.frame_times_secs.is_empty() {
                let times: Vec<_> = medium.frame_times_secs.iter().map(|t| format!("{t:.2}")).collect();
                out.push_str(&format!(", frames at {} s", times.join(" ")));
                if medium.seconds_per_grid > 0.0 {
                    out.push_str(&format!(", {:.3} s per time slice", medium.seconds_per_grid));
                }
            }
            out.push('\n');
        }
        out.push_str("prompt\n");
        for line in prompt.text.lines() {
            out.push_str(&format!("  | {line}\n"));
        }
        if let Some(solution) = &sample.solution {
            out.push_str(&format!("solution\n  | {}\n", solution.replace('\n', "\n  | ")));
        }
        print(&out)?;
    }
    Ok(())
}

/// Converts a published dataset to rows.
pub fn convert(settings: &Settings, context: &Context) -> Result<()> {
    let (Some(format), Some(input), Some(output)) =
        (&settings.io.format, &settings.io.input, &settings.io.output)
    else {
        return Err(Problem::usage("nothing to convert")
            .expected("`data convert FORMAT --input FILE --output FILE`")
            .into());
    };
    super::infer::keep_inputs(output, [input.as_path()])?;
    match format.as_str() {
        "vivqa-x" => {
            let done = omnigrpo_data::convert_vivqa_x(input, output)?;
            context.console.line(&format!(
                "{} rows written to {}, {} items dropped",
                done.num_written,
                output.display(),
                done.dropped.len()
            ));
            Ok(())
        }
        "parquet" => parquet(input, output, context),
        other => Err(Problem::usage("unknown format")
            .got(format!("`{other}`"))
            .expected("vivqa-x, parquet")
            .into()),
    }
}

#[cfg(feature = "parquet")]
fn parquet(input: &Path, output: &Path, context: &Context) -> Result<()> {
    let rows = omnigrpo_data::convert_parquet(input, output)?;
    context.console.line(&format!("{rows} rows written to {}", output.display()));
    Ok(())
}

#[cfg(not(feature = "parquet"))]
fn parquet(input: &Path, _: &Path, _: &Context) -> Result<()> {
    Err(Problem::usage("this program was built without the parquet reader")
        .got(input.display().to_string())
        .help("build it with its default features, or with `--features parquet`")
        .into())
}
