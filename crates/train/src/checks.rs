//! Checks before the first step, in words: rows that cannot be used, rewards that cannot score, rewards that do not answer.

use omnigrpo_data::{Dataset, Report, Roots, UnreadMedia, accepted_answers};
use omnigrpo_guard::told;
use omnigrpo_models::{Orientation, PromptBuilder};
use omnigrpo_observe::{Console, escape_line, fit};
use omnigrpo_rewards::{Corpus, RewardSet, references};
use omnigrpo_rollout::Completion;

use crate::error::{
    CONTINUE, EVAL, IMAGE, MAX_COMPLETION_LENGTH, MAX_SHARE, ORIENTATION, REWARDS, Refusal, Result, SOLUTION,
    STRICT, TEMPLATE, TEXT_ONLY, TrainError,
};
use crate::rows::{SkipPolicy, prepare};
use crate::scoring;
use crate::survey::{RowCheck, Survey, Surveyed};

/// Number of longest prompts to find: enough for a large step.
pub const LONGEST: usize = 64;
/// Number of longest prompts whose length is shown.
const SHOWN_LONGEST: usize = 5;
/// Number of problems to print. The file in the run directory has all of them.
const SHOWN: usize = 20;
/// Maximum number of columns to list.
const LISTED: usize = 20;
/// Columns in which other programs store the ground truth. This program does not read them as ground truth.
const TRUTH_COLUMNS: [&str; 12] = [
    "groundtruth",
    "gt",
    "labels",
    "target",
    "targets",
    "gold",
    "reward_model",
    "response",
    "output",
    "solutions",
    "correct_answer",
    "final_answer",
];

/// Returns what a check of rows found, one finding per line. `which` names the rows.
pub fn describe(
    which: &str,
    report: &Report,
    dataset: &Dataset,
    orientation: Orientation,
    with_lengths: bool,
) -> String {
    let c = &report.counts;
    let media: Vec<_> = c.media.iter().map(|(kind, count)| format!("{count} {}", kind.word())).collect();
    let mut out = format!(
        "{} {which}: {}, {} rows of text only, {} without a solution\n",
        c.rows,
        media.join(", "),
        c.text_rows,
        c.without_solution
    );
    for (kind, turned) in c.turned.into_iter().filter(|(_, turned)| *turned > 0) {
        let (all, words) = (c.media[kind], kind.word());
        out.push_str(&match orientation {
            Orientation::Upright => {
                format!("{turned} of {all} {words} are stored sideways; they are turned\n")
            }
            Orientation::Stored => {
                format!("{turned} of {all} {words} are stored sideways; they stay so ({ORIENTATION})\n")
            }
        });
    }
    let from: Vec<_> = report.solutions_from.iter().map(|(from, rows)| format!("{from} ({rows})")).collect();
    if !from.is_empty() {
        out.push_str(&format!("solutions from {}\n", from.join(", ")));
    }
    if c.without_solution > 0 {
        out.push_str(&format!(
            "columns of the rows: {}; {SOLUTION} names the one with the solution\n",
            dataset.columns_seen().join(", ")
        ));
    }
    if with_lengths && !report.longest.is_empty() {
        let longest: Vec<_> = report
            .longest
            .iter()
            .take(SHOWN_LONGEST)
            .map(|p| format!("{} (--row {}, id {})", p.num_tokens, p.row, p.id))
            .collect();
        out.push_str(&format!("longest prompts, in tokens: {}\n", longest.join(", ")));
    }
    for problem in report.problems.iter().take(SHOWN) {
        out.push_str(&format!(
            "bad row {}:{} (--row {}): {}\n",
            problem.file.display(),
            problem.line,
            problem.row,
            problem.what
        ));
    }
    if report.problems.len() > SHOWN {
        out.push_str(&format!("… and {} more bad rows\n", report.problems.len() - SHOWN));
    }
    out
}

/// Returns a line about each column that no reader uses and that looks like media.
fn unread_lines(unread: &[&UnreadMedia]) -> Vec<String> {
    let line = |one: &&UnreadMedia| {
        let UnreadMedia { column, kind, setting, rows, sampled, .. } = one;
        let words = kind.word();
        format!(
            "the column `{column}` looks like {words} in {rows} of {sampled} sampled rows, and nothing reads it; \
             `{setting} {column}` does"
        )
    };
    unread.iter().map(line).collect()
}

/// Looks for columns that no reader uses and that look like media. Returns warnings, and the refusal of rows that lose their media
/// unless that is allowed.
pub fn unread_media(dataset: &Dataset, which: &str, allowed: bool) -> (Vec<String>, Option<Refusal>) {
    let unread = dataset.unread_media();
    let (lost, rare): (Vec<_>, Vec<_>) = unread.iter().partition(|one| one.is_usual() && !allowed);
    let warnings = unread_lines(&rare);
    let refusal = (!lost.is_empty()).then(|| {
        Refusal::failure(format!("{which} have media that are not read"))
            .got(unread_lines(&lost).join("; "))
            .expected("media in columns that the format of the rows has, or that a setting names")
            .help(format!("name the column with that setting, remove it from the rows, or accept rows without it with {TEXT_ONLY}"))
    });
    (warnings, refusal)
}

/// Returns the refusal of rows that are all text, for a model that sees or hears.
pub fn text_only(dataset: &Dataset, which: &str) -> Refusal {
    let mut columns = dataset.columns_seen();
    if columns.len() > LISTED {
        columns.truncate(LISTED);
        columns.push("…".to_owned());
    }
    Refusal::failure(format!("all {which} are text only, but the model sees or hears"))
        .got(format!("{} {which} without media, with the columns {}", dataset.len(), columns.join(", ")))
        .expected("images, videos or sounds in the rows")
        .help(format!(
            "`{IMAGE} NAME` names the column of the images; if the rows are meant to be text, add {TEXT_ONLY}"
        ))
}

/// Returns advice about a folder if no medium of a kind was found, because then the folder is probably wrong, not the rows.
pub fn folders_help(report: &Report) -> Option<String> {
    let c = &report.counts;
    c.media
        .into_iter()
        .find(|(kind, found)| *found == 0 && report.problems.iter().any(|p| p.missing == Some(*kind)))
        .map(|(kind, _)| {
            format!(
                "none of the {kind} files was found: set {} to the folder that the rows' paths are relative to",
                Roots::setting(kind)
            )
        })
}

/// Checks rows and prints what it found. Returns an error if more rows are unusable than the policy tolerates.
pub(crate) fn tolerable(
    which: &str,
    check: &RowCheck<'_>,
    dataset: &Dataset,
    skip: &SkipPolicy,
    console: &Console,
) -> Result<Report> {
    let report = check.run(dataset)?;
    console.line(describe(which, &report, dataset, check.media.orientation, true).trim_end());
    if skip.tolerates(report.counts.bad_rows, report.counts.rows) {
        return Ok(report);
    }
    let listed =
        || "the rows and reasons are listed above; `omnigrpo data check` lists them again".to_owned();
    Err(Refusal::failure(format!("too many {which} cannot be used"))
        .got(format!("{} of {} rows", report.counts.bad_rows, report.counts.rows))
        .expected(match skip.strict {
            true => format!("none, with {STRICT}"),
            false => format!("at most a share of {} ({MAX_SHARE})", skip.max_share),
        })
        .help(folders_help(&report).unwrap_or_else(listed))
        .into())
}

/// Returns the mean memory of the decoded media of a usable row, bytes.
pub(crate) fn mean_media_bytes(report: &Report) -> f64 {
    report.media_bytes as f64 / report.counts.rows.saturating_sub(report.counts.bad_rows).max(1) as f64
}

/// Returns warnings about the checked rows, one per line. `system` is the system turn of the prompts.
pub fn warnings(seen: &Surveyed, system: Option<&str>) -> Vec<String> {
    let mut lines = Vec::new();
    for (name, applies) in &seen.applies {
        let Some(applies) = applies.filter(|&applies| (1..seen.rows).contains(&applies)) else {
            continue;
        };
        let missing = seen.rows - applies;
        lines.push(format!(
            "the reward `{name}` does not apply to {missing} of {} rows: they have no ground truth that it can read, and \
             earn nothing from it",
            seen.rows
        ));
    }
    if seen.templated_texts > 0 {
        lines.push(format!(
            "{} of {} prompts are texts: the chat template makes turns of the user of them, and rewards get messages; \
             `{CONTINUE} true` continues them as they stand, as TRL does",
            seen.templated_texts, seen.rows
        ));
    }
    let wants_tags = seen.applies.iter().any(|(name, _)| name == "format");
    if wants_tags
        && seen.rows > 0
        && seen.tags_asked_for == 0
        && !system.unwrap_or_default().contains("<answer")
    {
        lines.push(format!(
            "no question asks for the tags that the reward `format` wants, so it stays 0 unless the model writes them \
             anyway; `{TEMPLATE} default` asks for them"
        ));
    }
    lines
}

/// Returns the refusal of a reward that applies to no row of the dataset, if there is one.
pub fn idle(seen: &Surveyed, dataset: &Dataset) -> Option<Refusal> {
    let name = seen.idle()?;
    let refusal = Refusal::failure(format!("the reward `{name}` applies to no row"));
    if seen.without_solution < seen.rows {
        return Some(
            refusal
                .got(format!("{} rows with a ground truth that the reward cannot read", seen.rows))
                .expected("a ground truth of the right kind; `omnigrpo rewards list` shows what each reward compares")
                .help("choose another reward, or correct the rows"),
        );
    }
    let mut columns = dataset.columns_seen();
    let near = columns.iter().find(|name| TRUTH_COLUMNS.contains(&name.to_lowercase().as_str())).cloned();
    if columns.len() > LISTED {
        columns.truncate(LISTED);
        columns.push("…".to_owned());
    }
    Some(
        refusal
            .got(format!("{} rows with the columns {}", seen.rows, columns.join(", ")))
            .expected("a ground truth in the column `solution` or `answer`, or a final assistant turn")
            .help(match near {
                Some(name) => format!("if it is in `{name}`, add `{SOLUTION} {name}`"),
                None => format!("`{SOLUTION} NAME` names its column; or leave the reward out"),
            }),
    )
}

/// Checks that the rewards can score the evaluation rows. Prints rows that they cannot score, and returns the refusal of a reward
/// that applies to none.
pub fn ask_before_evaluation(
    console: &Console,
    dataset: &Dataset,
    rows: &[u64],
    rewards: &RewardSet,
) -> Option<Refusal> {
    let survey = Survey::new(rewards);
    let mut bad = 0;
    for &row in rows {
        // A row that cannot be read is reported by the evaluation.
        let Ok(sample) = dataset.get(row) else { continue };
        if let Err(why) = survey.ask(&sample) {
            bad += 1;
            if bad <= SHOWN {
                console.line(&format!("evaluations will skip row {row} ({}): {}", sample.id, told(&*why)));
            }
        }
    }
    if bad > SHOWN {
        console.line(&format!("… and {} more rows", bad - SHOWN));
    }
    idle(&survey.seen(), dataset)
}

/// Scores `num_generations` made-up completions of the first readable row with the external rewards, so that a reward that cannot be
/// started or reached, or that returns a wrong number of values, is reported before hours of sampling. Prints two of the completions
/// with their values: the solution between tags, and the solution alone.
///
/// # Errors
/// Returns the error of the reward.
pub fn probe_rewards(
    rewards: &RewardSet,
    dataset: &Dataset,
    rows: impl IntoIterator<Item = u64>,
    prompts: &PromptBuilder,
    num_generations: usize,
    console: &Console,
) -> Result<()> {
    let Some(sample) = rows.into_iter().find_map(|row| dataset.get(row).ok()) else { return Ok(()) };
    let first = |solution: &str| accepted_answers(solution)?.into_iter().next();
    let accepted = sample.solution.as_deref().and_then(first);
    let solution = accepted.as_deref().or(sample.solution.as_deref()).unwrap_or("nothing");
    let answer = match solution.contains("<answer>") {
        true => solution.to_owned(),
        false => format!("<answer>{solution}</answer>"),
    };
    let made = |number: usize| -> Result<Completion> {
        let text = match number {
            2 => solution.to_owned(),
            _ => format!("<think>Trial {number} before the run.</think>{answer}"),
        };
        Ok(scoring::completion(text.clone(), prompts.completion_ids(&text)?))
    };
    let group = (1..=num_generations.max(1)).map(made).collect::<Result<Vec<_>>>()?;
    let tried = scoring::probe(rewards, &sample, &group).map_err(|error| -> TrainError {
        let mut messages = omnigrpo_guard::messages(&error);
        let causes = messages.split_off(1).join(": ");
        let refusal = Refusal::failure(messages.remove(0)).at(REWARDS).help(
            "the reward had to score the completions of one row before the run, as described in docs/rewards.md; \
             nothing was sampled yet",
        );
        if causes.is_empty() { refusal.into() } else { refusal.got(causes).into() }
    })?;
    for (at, made) in group.iter().enumerate().take(2) {
        let values = tried.iter().filter_map(|(name, values)| Some((name, (*values.get(at)?)?)));
        let values: Vec<String> = values.map(|(name, value)| format!("`{name}` {value}")).collect();
        if !values.is_empty() {
            let text = escape_line(&made.text);
            let (values, id, text) = (values.join(", "), &sample.id, fit(&text, SHOWN_TRIAL));
            console.line(&format!("trial of the rewards on row {id}: {values} for `{text}`"));
        }
    }
    Ok(())
}

/// Largest width of a completion in the lines about the trial, in columns.
const SHOWN_TRIAL: usize = 100;

/// Returns an error if a reward cannot read the longest possible completion after its longest prompt. Such completions would get
/// no score.
pub(crate) fn rewards_read_all(rewards: &RewardSet, longest: usize) -> Result<()> {
    let Some((name, limit)) = rewards.too_short_for(longest).into_iter().next() else { return Ok(()) };
    let lower = match limit.room() {
        0 => String::new(),
        room => format!("lower {MAX_COMPLETION_LENGTH} to {room}, "),
    };
    Err(Refusal::usage("a reward cannot read the longest completions")
        .got(format!(
            "`{name}` in {REWARDS} reads at most {} tokens; the longest prompt has {} of them and \
             {MAX_COMPLETION_LENGTH} {longest} allows {longest} more",
            limit.most, limit.longest_prompt
        ))
        .expected("prompt and completion within the limit; a token of the policy counts as one token of the reward model")
        .help(format!("{lower}leave out the longest prompts, or use a reward model with a higher limit"))
        .into())
}

/// Returns an error if no evaluation row can be used. Without this check, the first evaluation would report that hours later.
/// Reads rows until one can be used, which is usually the first.
pub(crate) fn any_usable(
    dataset: &Dataset,
    rows: &[u64],
    prompts: &PromptBuilder,
    rewards: &RewardSet,
) -> Result<()> {
    let mut first = None;
    for &row in rows {
        match prepare(dataset, prompts, Some(rewards), row, 0)? {
            Ok(_) => return Ok(()),
            Err(why) => drop(first.get_or_insert((row, why))),
        }
    }
    let Some((row, why)) = first else { return Ok(()) };
    Err(Refusal::failure("no evaluation row can be used")
        .got(format!("{} unusable rows; row {row} (id {}): {}", rows.len(), why.id, why.reason))
        .expected("at least one row to evaluate on")
        .help(format!("`omnigrpo data check` lists all of them; to train without evaluations, remove {EVAL}"))
        .into())
}

/// Returns the references of rows, which determine the word weights of some rewards.
pub fn corpus(dataset: &Dataset, rows: impl IntoIterator<Item = u64>, keep_texts: bool) -> Corpus {
    // An unreadable row is skipped here; it is reported when it is used.
    let samples = rows.into_iter().filter_map(|row| dataset.get(row).ok());
    let own = |sample: omnigrpo_data::Sample| {
        let references = references(&sample.columns, sample.solution.as_deref());
        references.into_iter().map(str::to_owned).collect::<Vec<_>>()
    };
    Corpus::of(samples.map(own), keep_texts)
}
