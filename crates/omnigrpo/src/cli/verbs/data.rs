//! `data check`, `data show`, `data convert`.

use std::path::Path;

use anyhow::Result;
use omnigrpo_data::{Dataset, Report};
use omnigrpo_models::PromptBuilder;
use omnigrpo_train::checks::{self, LONGEST};
use omnigrpo_train::{Longest, Objective, RowCheck, Survey, room};

use super::print;
use crate::settings::{Problem, Resolved, Settings};
use omnigrpo_session::{Session, forecast, setup};

/// Names of the kinds of rows in messages.
const TRAINING: &str = "rows";
const EVALUATION: &str = "evaluation rows";

/// Reads every row and medium header. Fails if any row cannot be used.
pub fn check(resolved: &Resolved, session: &Session) -> Result<()> {
    let settings = &resolved.settings;
    let held_out = setup::eval_data(settings)?.map(|rows| (EVALUATION, rows));
    let trained = match setup::train_data(settings) {
        Ok(rows) => Some((TRAINING, rows)),
        Err(_) if held_out.is_some() && !settings.data.has_train_rows() => None,
        Err(error) => return Err(error),
    };
    let prompts = match &settings.model.name {
        Some(_) => Some(session.prompts(settings, session.checkpoint()?, false)?),
        None => None,
    };
    let cache = settings.env.check_cache();
    let (mut bad, mut rows, mut help, mut refused) = (0, 0, None, None);
    for (which, dataset) in trained.into_iter().chain(held_out) {
        let rewards = setup::text_rewards(settings, &dataset)?;
        let survey = rewards.as_ref().map(Survey::new);
        let check = RowCheck {
            prompts: prompts.as_ref(),
            objective: Objective::Reinforce,
            media: &settings.prompts.media,
            survey: survey.as_ref(),
            num_longest: LONGEST,
            cache_dir: Some(&cache),
            console: &session.console,
        };
        let report = check.run(&dataset)?;
        let media = &settings.prompts.media;
        let mut out = checks::describe(which, &report, &dataset, media.orientation, prompts.is_some());
        if let Some(prompts) = &prompts {
            out.push_str(&media_cost(resolved, session, prompts, &dataset, &report)?);
        }
        if let Some(survey) = &survey {
            // Rows for supervised training may lack a ground truth.
            let idle = checks::idle(&survey.seen(), &dataset)
                .map(|refusal| Problem::from(refusal).to_string().replacen("error: ", "warning: ", 1));
            let system = settings.prompts.render.system.as_deref();
            for line in checks::warnings(&survey.seen(), system).into_iter().chain(idle) {
                out.push_str(&format!("{line}\n"));
            }
        }
        let allowed = settings.run.rows.text_only;
        let (lines, refusal) = checks::unread_media(&dataset, which, allowed);
        lines.iter().for_each(|line| out.push_str(&format!("warning: {line}\n")));
        let sees = prompts.as_ref().is_some_and(|prompts| !prompts.family().reads_text_only());
        let is_trained = which == TRAINING && sees && !allowed;
        let text_only = || (is_trained && dataset.is_text_only()).then(|| checks::text_only(&dataset, which));
        refused = refused.or_else(|| refusal.or_else(text_only));
        print(&out)?;
        bad += report.counts.bad_rows;
        rows += report.counts.rows;
        help = help.or_else(|| checks::folders_help(&report));
    }
    let refused = refused.map(Problem::from);
    match (bad, refused) {
        (0, None) => return Ok(()),
        (0, Some(problem)) => return Err(problem.into()),
        (_, Some(problem)) => {
            print(&format!("{}\n", problem.to_string().replacen("error: ", "warning: ", 1)))?
        }
        (_, None) => {}
    }
    let skips = || "`train` skips such rows as long as they are fewer than --max_skipped".to_owned();
    Err(Problem::failure(format!("{bad} of {rows} rows cannot be used"))
        .help(help.unwrap_or_else(skips))
        .into())
}

/// Returns lines about the longest prompt if media take up most of it: their cost, and the settings that change it.
fn media_cost(
    resolved: &Resolved,
    session: &Session,
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
        room::size(longest.media_bytes())
    );
    let checkpoint = session.checkpoint()?;
    for flags in forecast::media_flags(&resolved.settings, &longest) {
        let Some(settings) = forecast::changed(resolved, &flags) else { continue };
        let Ok(prompts) = session.prompts(&settings, checkpoint, false) else { continue };
        let Some(smaller) = longest.with(&prompts, Objective::Reinforce) else { continue };
        let tokens = smaller.prompt_tokens();
        if tokens < longest.prompt_tokens() {
            let share = tokens as f64 / longest.prompt_tokens() as f64;
            out.push_str(&format!(
                "  `{}` makes that {tokens} tokens: {:.0} % of the time and memory of its prompt\n",
                forecast::typed(&flags),
                100.0 * share
            ));
        }
    }
    Ok(out)
}

/// Prints the prompt of a row in the form that the model receives.
pub fn show(settings: &Settings, session: &Session) -> Result<()> {
    let prompts = session.prompts(settings, session.checkpoint()?, false)?;
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
pub fn convert(settings: &Settings, session: &Session) -> Result<()> {
    let (Some(format), Some(input), Some(output)) =
        (&settings.io.dataset_format, &settings.io.input, &settings.io.output)
    else {
        return Err(Problem::usage("nothing to convert")
            .expected("`data convert FORMAT --input FILE --output FILE`")
            .into());
    };
    omnigrpo_session::files::keep_inputs(output, [input.as_path()])?;
    match format.as_str() {
        "vivqa-x" => {
            let done = omnigrpo_data::convert_vivqa_x(input, output)?;
            session.console.line(&format!(
                "{} rows written to {}, {} items dropped",
                done.num_written,
                output.display(),
                done.dropped.len()
            ));
            Ok(())
        }
        "parquet" => parquet(input, output, session),
        other => Err(Problem::usage("unknown format")
            .got(format!("`{other}`"))
            .expected("vivqa-x, parquet")
            .into()),
    }
}

#[cfg(feature = "parquet")]
fn parquet(input: &Path, output: &Path, session: &Session) -> Result<()> {
    let rows = omnigrpo_data::convert_parquet(input, output)?;
    session.console.line(&format!("{rows} rows written to {}", output.display()));
    Ok(())
}

#[cfg(not(feature = "parquet"))]
fn parquet(input: &Path, _: &Path, _: &Session) -> Result<()> {
    Err(Problem::usage("this program was built without the parquet reader")
        .got(input.display().to_string())
        .help("build it with its default features, or with `--features parquet`")
        .into())
}
