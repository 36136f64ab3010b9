//! `init`: looks at a checkpoint, rows and this machine, and writes a file of settings that `train` accepts as it stands.

use std::io::{IsTerminal as _, Write as _};
use std::path::Path;

use anyhow::{Context as _, Result};
use omnigrpo_data::{Dataset, Sample, split};
use omnigrpo_models::{FAMILIES, FamilyRow, PromptBuilder};
use omnigrpo_rewards::{AccuracyMode, suitable_rule};
use omnigrpo_text::MediumKind;
use omnigrpo_train::{EvalWhen, Objective, Prepared, room};

use super::print;
use crate::cli::draft::{Draft, one_line};
use crate::settings::{Given, Origin, Problem, Resolved, Settings, Verb};
use omnigrpo_session::forecast::Wait;
use omnigrpo_session::{Session, family, forecast, setup};

/// Name of the written file if the user gives none.
const FILE: &str = "omnigrpo.yaml";
/// Name of the file with which editors complete settings. It is written beside the settings.
const SCHEMA: &str = "omnigrpo.schema.json";
/// Number of rows that are read.
const ROWS: u64 = 512;
/// Smallest number of rows from which some are held out for evaluations.
const SPLIT_FROM: u64 = 40;
/// Number of held-out rows that tell a gain from chance, and the largest number.
const HELD_OUT: [u64; 2] = [50, 200];
/// Time after which a run should show its first result, in seconds.
const PATIENCE: f64 = 3600.0;
/// Smallest number of pixels of a picture that is chosen for the sake of time: 128 tokens of 28 × 28.
const FEWEST_PIXELS: usize = 128 * PATCH;
/// Pixels of a token of most models.
const PATCH: usize = 784;
/// Number of steps to the first result.
const FIRST_STEPS: u64 = 20;
/// Settings for a plan alone, which the written file does not have.
const PLANNING: [&str; 4] = ["gpu_memory", "gpu_rates", "nnodes", "dry_run"];
/// Largest number of prompts in a step.
const PROMPTS: u64 = 8;
/// Smallest number of steps from which one pass over the rows suffices.
const STEPS: u64 = 100;
/// Tokens for the thinking before an answer.
const THINKING: usize = 256;
/// Largest number of tokens of a completion. It is also at most a quarter of the model's positions, so that prompts have room.
const LONG_COMPLETION: usize = 4096;
/// Longest prompt for which no smaller media are chosen, in tokens.
const LONG_PROMPT: usize = 4096;

/// Writes a file of settings for a run.
pub fn init(resolved: &Resolved, session: &Session) -> Result<()> {
    let output = resolved.settings.io.output.as_deref().unwrap_or(Path::new(FILE));
    check_new(output)?;
    let mut draft = drafted(resolved)?;
    let environment = || resolved.settings.env.clone();
    let given = draft.names();
    let base = draft.resolve(environment())?;
    let base = with_plan(base, resolved)?;
    let session = session.with(&base.settings);
    let checkpoint = session.checkpoint()?;
    let dataset = setup::train_data(&base.settings)?;
    let prompts = session.prompts(&base.settings, checkpoint, false)?;
    let positions = checkpoint.family().architecture().decoder_config().max_positions;
    let mut rows = Rows::look(&dataset, &prompts, positions)?;
    rows.check_sound(checkpoint.family().row())?;
    rows.choose(&mut draft, &base.settings)?;

    // The chosen settings must not contradict those of the user.
    let prepare = |draft: &Draft| -> Result<(Resolved, Prepared)> {
        let full = family::without_idle(&draft.resolve(environment())?, &session)?;
        let full = with_plan(full, resolved)?;
        let prepared = omnigrpo_session::training::prepare(&full, &session, Objective::Reinforce, None)?;
        Ok((full, prepared))
    };
    let (mut full, mut prepared) = prepare(&draft)?;
    let tokens = prepared.longest().prompt_tokens();
    if tokens > LONG_PROMPT {
        for (name, value) in forecast::shortening_flags(&full, &session, &prepared).concat() {
            draft.choose(name, &value, format!("the longest prompt has {tokens} tokens without it"));
        }
        (full, prepared) = prepare(&draft)?;
    }
    let first_steps = match full.settings.run.eval.when {
        EvalWhen::Steps(steps) => steps,
        _ => FIRST_STEPS,
    };
    let (mut speed, machine) = forecast::speed(&full.settings, &prepared)?;
    let levers = rows.levers(&given, &forecast::shortening_flags(&full, &session, &prepared));
    let quicker = quicken(levers, |flags| {
        forecast::wait(&full, &session, &prepared, (flags, first_steps), &mut speed)
    })?;
    for (name, value) in &quicker {
        draft.set(name, value, "so that the first result comes within an hour");
    }
    if !quicker.is_empty() {
        (full, prepared) = prepare(&draft)?;
    }
    let (flags, memory) = forecast::fit(&full, &session, &prepared, &given)?;
    let limit = prepared.forecast().limit;
    let place = limit.map_or("memory", |(_, place)| place);
    for (name, value) in &flags {
        draft.set(name, value, format!("so that the run fits into {place}"));
    }
    let wait = forecast::wait(&full, &session, &prepared, (&flags, first_steps), &mut speed)?;
    let time = wait.map(|wait| told(wait, &machine));
    if draft.resolve(environment())?.settings.model.use_peft {
        draft.choose("learning_rate", "1.0e-5", "usual for adapters");
    }

    let holds_out = rows.holds_out;
    let file = output.display();
    let source = (checkpoint.family().name(), dataset.len(), rows);
    let takes = (memory.total(), limit);
    let text = head(&file.to_string(), source, takes, time.as_deref()) + &draft.text();
    std::fs::write(output, text).with_context(|| format!("writing {file}"))?;
    write_schema(&output.with_file_name(SCHEMA))?;
    print(&format!("{file}\n"))?;
    if let Some(time) = time {
        session.console.line(&time);
    }
    if !holds_out {
        session.console.line(&none_held_out());
    }
    session.console.line(&format!("look at it, then run: omnigrpo train --config {file}"));
    Ok(())
}

/// Refuses a file that exists.
fn check_new(file: &Path) -> Result<()> {
    if !file.exists() {
        return Ok(());
    }
    Err(Problem::usage("the file exists already")
        .at(file.display().to_string())
        .expected("a new file, because `init` never overwrites one")
        .help("give another name with `--output`")
        .into())
}

/// Returns the line about fewer rows than are divided.
fn none_held_out() -> String {
    format!(
        "No row is held out, because there are fewer than {SPLIT_FROM}, so nothing shows what is learned about other questions: add \
         rows, or name others with `--eval_file`."
    )
}

/// Returns a draft with the settings that the user gives.
fn drafted(resolved: &Resolved) -> Result<Draft> {
    let mut draft = Draft::default();
    for Given { flag, value, origin } in resolved.values.given() {
        let by_user = matches!(origin, Origin::Flag | Origin::Config(_));
        let is_of_run = flag.is_of(Verb::Train) && !flag.command_line_only && !PLANNING.contains(&flag.name);
        if by_user && is_of_run {
            draft.put(flag.name, value, vec!["given".to_owned()]);
        }
    }
    ask(&mut draft)?;
    Ok(draft)
}

/// Returns the settings of a draft with those of a plan, which say what machine the run is for.
fn with_plan(mut draft: Resolved, resolved: &Resolved) -> Result<Resolved> {
    for Given { flag, value, origin } in resolved.values.given() {
        if PLANNING.contains(&flag.name) {
            draft.values.set(Given { flag, value, origin });
        }
    }
    draft.settings = Settings::from_values(&draft.values, draft.settings.env.clone())?;
    Ok(draft)
}

/// Returns the fewest of the flags, which make a run quicker and less good in this order, with which its first result comes in time. If all
/// of them do not suffice, returns those that make it quicker.
fn quicken(
    levers: forecast::Flags,
    mut wait: impl FnMut(&[(&'static str, String)]) -> Result<Option<Wait>>,
) -> Result<forecast::Flags> {
    let mut flags = forecast::Flags::new();
    let Some(mut time) = wait(&flags)? else { return Ok(flags) };
    for (name, value) in levers {
        if time.first <= PATIENCE {
            break;
        }
        let mut more = flags.clone();
        more.retain(|(own, _)| *own != name);
        more.push((name, value));
        if let Some(quicker) = wait(&more)?.filter(|own| own.first < 0.97 * time.first) {
            (flags, time) = (more, quicker);
        }
    }
    for at in (0..flags.len()).rev().filter(|_| time.first <= PATIENCE) {
        let mut fewer = flags.clone();
        fewer.remove(at);
        if wait(&fewer)?.is_some_and(|own| own.first <= PATIENCE) {
            flags = fewer;
        }
    }
    Ok(flags)
}

/// Says when a run shows its first result, and how long it takes.
fn told(wait: Wait, machine: &str) -> String {
    let Wait { first_steps, first, steps, whole } = wait;
    let late = match first > PATIENCE {
        true => "; a smaller model, fewer pixels or a GPU would show it sooner",
        false => "",
    };
    format!(
        "the first result, after {first_steps} steps, takes about {}{late}; the whole run, {steps} steps, about {}, on {machine}",
        forecast::duration(first),
        forecast::duration(whole)
    )
}

/// Writes the schema of settings, if it is missing.
fn write_schema(path: &Path) -> Result<()> {
    if path.exists() {
        return Ok(());
    }
    let text = format!("{:#}\n", crate::settings::schema());
    std::fs::write(path, text).with_context(|| format!("writing {}", path.display()))
}

/// Returns the comments at the start of the file: its model and rows, and the memory of the run with its limit.
fn head(
    file: &str,
    (family, num_rows, rows): (&str, u64, Rows),
    (total, limit): (u64, Option<(u64, &str)>),
    time: Option<&str>,
) -> String {
    let time = time.map_or_else(String::new, |time| {
        let time = one_line(time);
        let mut words = time.chars();
        let first: String = words.next().map(|own| own.to_uppercase().collect()).unwrap_or_default();
        format!("# {first}{}.\n", words.as_str())
    });
    let none_held_out = if rows.holds_out { String::new() } else { format!("# {}\n", none_held_out()) };
    let limit = limit
        .map_or("memory".to_owned(), |(free, place)| format!("the free {} of {place}", room::size(free)));
    format!(
        "# yaml-language-server: $schema={SCHEMA}\n# omnigrpo train --config {file}\n# Written by `omnigrpo init` for a {family} \
         and {} of {num_rows} rows: {}.\n# The run takes {} of {limit}. `omnigrpo plan --config {file}` shows the parts, and the \
         time.\n{time}{none_held_out}# `omnigrpo help SETTING` describes a setting.\n",
        rows.num_read,
        rows.described(),
        room::size(total),
    )
}

/// Asks for the checkpoint and the rows if they are not given and somebody can answer.
fn ask(draft: &mut Draft) -> Result<()> {
    let answers = std::io::stdin().is_terminal() && std::io::stderr().is_terminal();
    let has_rows = ["train_file", "dataset_use", "data_file_paths"].iter().any(|name| draft.has(name));
    for (name, has, question) in [
        (
            "model_name_or_path",
            draft.has("model_name_or_path"),
            "checkpoint (a directory, or a name on the hub): ",
        ),
        ("train_file", has_rows, "file of training rows: "),
    ] {
        if has {
            continue;
        }
        if !answers {
            return Err(Problem::usage(format!("`init` needs `--{name}`"))
                .expected("a checkpoint and rows, as `train` takes them")
                .into());
        }
        let mut err = std::io::stderr();
        err.write_all(question.as_bytes()).and_then(|()| err.flush())?;
        let mut line = String::new();
        std::io::stdin().read_line(&mut line)?;
        match line.trim() {
            "" => return Err(Problem::usage(format!("`init` needs `--{name}`")).into()),
            text => draft.set(name, text, "given"),
        }
    }
    Ok(())
}

/// Common properties of rows of a dataset.
struct Rows {
    /// Number of all rows.
    num_rows: u64,
    /// Number of rows to train on.
    num_trained: u64,
    /// True if some rows are held out, or others are given.
    holds_out: bool,
    /// Number of rows that were read.
    num_read: usize,
    /// Rule that suits each ground truth, with the number of rows.
    rules: Vec<(AccuracyMode, usize)>,
    /// Number of questions that ask for answer tags.
    with_tags: usize,
    /// Number of questions that ask for a boxed answer.
    with_box: usize,
    /// Number of rows with sound.
    with_sound: usize,
    /// Number of tokens of the longest ground truth.
    longest_answer: usize,
    columns: Vec<String>,
    /// Number of positions of the model.
    positions: usize,
}

impl Rows {
    /// Reads rows that are spread evenly over a dataset.
    fn look(dataset: &Dataset, prompts: &PromptBuilder, positions: usize) -> Result<Self> {
        let num_rows = dataset.len();
        let read = num_rows.min(ROWS);
        let samples: Vec<Sample> =
            (0..read).filter_map(|at| dataset.get(at * num_rows / read.max(1)).ok()).collect();
        let mut rows = Self {
            num_rows,
            num_trained: num_rows,
            holds_out: false,
            num_read: samples.len(),
            rules: Vec::new(),
            with_tags: 0,
            with_box: 0,
            with_sound: 0,
            longest_answer: 0,
            columns: dataset.columns_seen(),
            positions,
        };
        for sample in &samples {
            let question = sample.question();
            rows.with_tags +=
                usize::from(sample.turns.iter().flat_map(|turn| &turn.parts).any(asks_for_tags));
            rows.with_box += usize::from(question.contains("\\boxed"));
            rows.with_sound += usize::from(sample.media.iter().any(|m| m.kind == MediumKind::Audio));
            let Some(solution) = &sample.solution else { continue };
            let Some(rule) = suitable_rule(&question, solution) else { continue };
            match rows.rules.iter_mut().find(|(known, _)| *known == rule) {
                Some((_, count)) => *count += 1,
                None => rows.rules.push((rule, 1)),
            }
            rows.longest_answer = rows.longest_answer.max(prompts.tokenizer().encode_text(solution)?.len());
        }
        rows.rules.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        Ok(rows)
    }

    /// Returns true for at least half of the rows.
    fn is_usual(&self, count: usize) -> bool {
        self.num_read > 0 && 2 * count >= self.num_read
    }

    /// Describes the ground truths, and says how many rows have sound.
    fn described(&self) -> String {
        let one = |(rule, count): &(AccuracyMode, usize)| format!("{count} {}", kind(*rule));
        let rules = match self.rules.is_empty() {
            true => "no ground truths".to_owned(),
            false => self.rules.iter().map(one).collect::<Vec<_>>().join(", "),
        };
        match self.with_sound {
            0 => rules,
            count => format!("{rules}; {count} with sound"),
        }
    }

    /// Checks that the model hears if there are rows with sound.
    fn check_sound(&self, family: &FamilyRow) -> Result<()> {
        if self.with_sound == 0 || family.hears() {
            return Ok(());
        }
        let hearing = FAMILIES.iter().filter(|row| row.hears());
        let hearing: Vec<_> =
            hearing.map(|row| format!("{} (such as {})", row.name, row.published)).collect();
        let (count, read) = (self.with_sound, self.num_read);
        Err(Problem::failure(format!("rows have sound, which {} does not hear", family.name))
            .got(format!("{count} of {read} rows with sound"))
            .expected(format!("a model of a family that hears: {}", hearing.join(", ")))
            .help(
                "name such a model with `--model_name_or_path`, or leave sound and `<audio>` out of the rows",
            )
            .into())
    }

    /// Adds the settings that follow from the rows.
    fn choose(&mut self, draft: &mut Draft, given: &Settings) -> Result<()> {
        let compares = !draft.has("reward_funcs") || !given.lacks_reward("accuracy");
        if self.rules.is_empty() && compares {
            return Err(Problem::failure("no row has a ground truth")
                .got(format!("{} rows with the columns {}", self.num_read, self.columns.join(", ")))
                .expected("a column `solution` or `answer`, or a final assistant turn")
                .help("name the column with `--solution_column`, or give a reward of your own with `--reward_funcs`")
                .into());
        }
        self.choose_rewards(draft, compares);
        let held_out = given.data.has_eval_rows() || given.data.val_split_ratio > 0.0;
        let splits = !held_out && self.num_rows >= SPLIT_FROM;
        self.holds_out = held_out || splits;
        let [enough, most] = HELD_OUT;
        // Some of the held-out rows may be bad. Training keeps three quarters of few rows.
        let spare = (enough as f64 * given.run.rows.skip.max_share).ceil() as u64;
        let rows = (self.num_rows / 20).clamp(enough + spare, most).min(self.num_rows / 4);
        let share = if splits { rows as f64 / self.num_rows as f64 } else { given.data.val_split_ratio };
        self.num_trained = split(self.num_rows, share, 0).0.len() as u64;
        self.choose_length(draft);
        if splits {
            let why = match rows < enough {
                false => format!("{rows} rows are held out to measure what is learned"),
                true => format!(
                    "only {rows} rows are held out, so a gain below {:.0} points may be chance: add rows",
                    // The difference of two shares of one half.
                    100.0 * 1.96 * (0.5 / rows as f64).sqrt()
                ),
            };
            draft.choose("val_split_ratio", &format!("{share:.6}"), why);
        }
        if held_out || draft.has("val_split_ratio") {
            draft.choose("eval_on_start", "true", "measures the model before training, for comparison");
            let steps = self.num_steps(given);
            let every = (steps / 10).max(FIRST_STEPS);
            if !draft.has("eval_strategy") {
                draft.choose("eval_steps", &every.to_string(), "steps between evaluations; the first result");
            }
        }
        draft.choose("save_steps", "50", "a checkpoint to resume from");
        draft.choose("output_dir", "runs/first", "files of the run; `omnigrpo watch` shows them");
        Ok(())
    }

    /// Adds the template of questions and the rewards. `compares` is true if a reward compares answers.
    fn choose_rewards(&self, draft: &mut Draft, compares: bool) {
        let boxed = self.is_usual(self.with_box) && !self.is_usual(self.with_tags);
        let boxes = self.rules.first().is_some_and(|(rule, _)| *rule == AccuracyMode::Iou);
        let (template, why) = match () {
            () if self.is_usual(self.with_tags) => ("none", "the questions ask for the tags themselves"),
            () if boxed => ("none", "the questions ask for \\boxed answers"),
            () if boxes => ("rec", "asks for tags, and for boxes as JSON"),
            () => ("default", "asks for <think> and <answer> tags"),
        };
        draft.choose("question_template", template, why);
        match boxed {
            true => draft.choose("reward_funcs", "accuracy", "correct answers"),
            false => draft.choose("reward_funcs", "accuracy,format", "correct answers, in the tags"),
        }
        if compares {
            let (rule, why) = self.rule();
            draft.choose("accuracy_mode", rule.name(), why);
        }
    }

    /// Returns the length of completions with room for so many tokens of thinking.
    fn room(&self, thinking: usize) -> usize {
        let room = (thinking + 2 * self.longest_answer).next_multiple_of(64);
        room.min(LONG_COMPLETION).min(self.positions / 4).max(1)
    }

    /// Returns the number of steps that [`Self::choose_length`] chooses, or of those that are given.
    fn num_steps(&self, given: &Settings) -> u64 {
        given.run.max_steps.unwrap_or((self.num_trained / self.num_trained.clamp(1, PROMPTS)).max(STEPS))
    }

    /// Returns flags that make a run quicker, the least harmful first. Those with the same name replace each other. `media` makes media
    /// smaller. What the user gave stays.
    fn levers(&self, given: &[&str], media: &[forecast::Flags]) -> forecast::Flags {
        let length = |thinking| ("max_completion_length", self.room(thinking).to_string());
        let prompts =
            |count: u64| ("per_device_train_batch_size", self.num_trained.clamp(1, count).to_string());
        let mut levers = vec![length(THINKING / 2), prompts(PROMPTS / 2)];
        levers.extend(media.concat());
        levers.extend([length(THINKING / 4), prompts(PROMPTS / 4), ("num_generations", "4".to_owned())]);
        levers.push(length(THINKING / 8));
        for (name, pixels) in media.concat().into_iter().filter(|(name, _)| name.ends_with("pixels")) {
            let Ok(pixels) = pixels.parse::<usize>() else { continue };
            let smaller = [2, 4, 8].map(|by| pixels / by / PATCH * PATCH);
            let smaller = smaller.into_iter().filter(|pixels| *pixels >= FEWEST_PIXELS);
            levers.extend(smaller.map(|pixels| (name, pixels.to_string())));
        }
        levers.retain(|(name, _)| !given.contains(name));
        levers
    }

    /// Adds the lengths of completions and of the run.
    fn choose_length(&self, draft: &mut Draft) {
        let why = format!("room for thinking, and for the longest answer (tokens: {})", self.longest_answer);
        draft.choose("max_completion_length", &self.room(THINKING).to_string(), why);

        let prompts = self.num_trained.clamp(1, PROMPTS);
        let why = "prompts of a step; each gets `num_generations` completions";
        draft.choose("per_device_train_batch_size", &prompts.to_string(), why);
        draft.choose("gradient_accumulation_steps", "1", "an optimizer step after each batch");
        draft.choose("num_generations", "8", "completions per prompt, which are compared with each other");
        if self.num_trained / prompts < STEPS {
            let why = format!(
                "the rows are used several times (steps of one pass: {})",
                self.num_trained.div_ceil(prompts)
            );
            draft.choose("max_steps", &STEPS.to_string(), why);
        } else {
            draft.choose("num_train_epochs", "1", format!("{} steps", self.num_trained / prompts));
        }
    }

    /// Returns the rule that suits the rows, and the reason.
    fn rule(&self) -> (AccuracyMode, String) {
        let count = |rule| self.rules.iter().find(|(known, _)| *known == rule).map_or(0, |(_, count)| *count);
        match self.rules[..] {
            [(rule, _)] => (rule, format!("the ground truths are {}", kind(rule))),
            _ if self.is_usual(count(AccuracyMode::McqIou)) => {
                (AccuracyMode::McqIou, "part of the labels earns part of the reward".to_owned())
            }
            _ if self.is_usual(count(AccuracyMode::Fuzzy)) => {
                (AccuracyMode::Fuzzy, "similar texts earn part of the reward".to_owned())
            }
            _ => (AccuracyMode::Auto, "each row by the form of its ground truth".to_owned()),
        }
    }
}

fn asks_for_tags(part: &omnigrpo_text::Part) -> bool {
    matches!(part, omnigrpo_text::Part::Text(text) if text.contains("<answer>"))
}

fn kind(rule: AccuracyMode) -> &'static str {
    match rule {
        AccuracyMode::McqExact => "labels of choices",
        AccuracyMode::McqIou => "sets of labels",
        AccuracyMode::Math => "numbers or formulas",
        AccuracyMode::YesNo => "yes or no",
        AccuracyMode::Iou => "boxes",
        AccuracyMode::OdAp => "lists of boxes",
        AccuracyMode::Fuzzy => "sentences",
        _ => "words",
    }
}
