//! `train` and `sft`.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context as _, Result};
use omnigrpo_data::{Dataset, split};
use omnigrpo_guard::told;
use omnigrpo_models::{Model, PromptBuilder, source_digest};
use omnigrpo_observe::{DebugLog, Error as LogError, RunLock};
use omnigrpo_ops::{Device, ParamDtype};
use omnigrpo_ranks::Ranks;
use omnigrpo_rewards::{Corpus, RewardSet, answer_reward};
use omnigrpo_rollout::SamplingParams;
use omnigrpo_train::{
    Algorithm, EvalOptions, EvalPlan, MAX_LIVE, Objective, Observer, ResumeFrom, RunPlan, RunSummary, Split,
    TrainSetup,
};
use serde_json::{Map, Value};

use super::data::Checked;
use super::memory::Longest;
use super::notify::{Event, Notifier};
use super::push::Pusher;
use super::{Context, data, memory, plan, print, profile, resume, setup, watch};
use crate::cli::ranks::{LEAVES, leaves, together};
use crate::settings::Settings;
use crate::settings::deepspeed;
use crate::settings::explain::{self, print_config};
use crate::settings::flags::Kind;
use crate::settings::names::BatchUnit;
use crate::settings::problem::Problem;
use crate::settings::values::Resolved;
use crate::settings::wording::worded;

/// Runs GRPO training.
pub fn train(resolved: &Resolved, context: &Context) -> Result<()> {
    start(resolved, context, Objective::Reinforce)
}

/// Runs supervised fine-tuning.
pub fn sft(resolved: &Resolved, context: &Context) -> Result<()> {
    start(resolved, context, Objective::Imitate)
}

fn start(resolved: &Resolved, context: &Context, objective: Objective) -> Result<()> {
    let settings = &resolved.settings;
    if settings.io.dry_run {
        let prepared = prepare(settings, context, objective, &settings.env.check_cache())?;
        return plan::show(resolved, context, &prepared);
    }
    let Some(output_dir) = &settings.io.output_dir else {
        return Err(Problem::usage("no run directory is given").expected("`--output_dir DIR`").into());
    };
    let real = |path: &Path| std::fs::canonicalize(path).ok();
    // This check runs before anything is written.
    let start = settings.model.name.as_deref().map(Path::new);
    if start.is_some_and(|start| start.is_dir() && real(start) == real(output_dir)) {
        return Err(Problem::usage("the run directory is the model's directory")
            .got(output_dir.display().to_string())
            .expected(
                "another directory: the trained model is written there and must not replace the original",
            )
            .at("--output_dir")
            .into());
    }
    let (ranks, first) = (&context.ranks, context.ranks.is_first());
    let pusher = together(ranks, if first { Pusher::before(settings, context) } else { Ok(None) })?;
    let notifier =
        || -> Result<_> { Ok(Some(Notifier::new(settings, output_dir, &host(), &context.console)?)) };
    let notifier = together(ranks, if first { notifier() } else { Ok(None) })?;
    let lock = together(ranks, if first { take(output_dir).map(Some) } else { Ok(None) })?;
    let lock = lock.unwrap_or_else(|| RunLock::of_first_rank(output_dir));
    let mut observers: Vec<Box<dyn Observer>> = Vec::new();
    observers.extend(notifier.clone().map(|notifier| Box::new(notifier) as Box<dyn Observer>));
    observers.extend(pusher.as_ref().map(Pusher::observer));
    let outcome = run(resolved, context, objective, lock, Box::new(observers));
    let (mut event, mut how) = (event(&outcome), ending(&outcome));
    let step = outcome.as_ref().ok().map(|summary| summary.steps);
    let result = outcome.and_then(|summary| {
        finish(&summary, resolved, first)?;
        // The push is last, so that the model is written and reported even if the push fails.
        pusher.map_or(Ok(()), |pusher| pusher.last(summary.steps))
    });
    if let (Event::Done, Err(error)) = (event, &result) {
        (event, how) = (Event::Failed, error.to_string());
    }
    if let Some(notifier) = notifier {
        notifier.end(event, &how, step);
    }
    result
}

/// Returns the kind of end of a run, for its message.
fn event(outcome: &Result<RunSummary>) -> Event {
    match outcome {
        Err(_) | Ok(RunSummary { collapsed: Some(_), .. }) => Event::Failed,
        Ok(RunSummary { interrupted: true, .. }) => Event::Stopped,
        Ok(_) => Event::Done,
    }
}

/// Locks the run directory for this process.
pub fn take(output_dir: &Path) -> Result<RunLock> {
    let now = jiff::Timestamp::now().round(jiff::Unit::Second).unwrap_or_default();
    let holder = format!("process {} on {} since {now}", std::process::id(), host());
    RunLock::acquire(output_dir, &holder).map_err(|error| match error {
        LogError::Locked { path, holder } => Problem::failure("the run directory is in use")
            .at(path.display().to_string())
            .got(holder)
            .expected("one process per run directory, without a launcher that starts several")
            .help("wait for that process, stop it, or choose another --output_dir")
            .into(),
        error => unwritable(output_dir, &error),
    })
}

fn unwritable(output_dir: &Path, error: &LogError) -> anyhow::Error {
    Problem::failure("the run directory cannot be written")
        .at(output_dir.display().to_string())
        .got(told(error))
        .expected("a writable directory, or a name where one can be created")
        .help("choose another --output_dir")
        .into()
}

/// Returns the name of this machine, which identifies the holder of a lock on a shared file system.
fn host() -> String {
    let mut name = [0u8; 256];
    // SAFETY: the call may write up to the length of the buffer minus one byte; the last byte stays 0.
    let failed = unsafe { libc::gethostname(name.as_mut_ptr().cast(), name.len() - 1) } != 0;
    let end = name.iter().position(|&byte| byte == 0).unwrap_or(0);
    if failed { "this host".to_owned() } else { String::from_utf8_lossy(&name[..end]).into_owned() }
}

/// Prints the report, on the first rank. A stopped run is an error with its own exit code.
pub fn finish(summary: &RunSummary, resolved: &Resolved, first: bool) -> Result<()> {
    if first {
        print(&format!("{}", summary.report))?;
    }
    if !summary.interrupted {
        return Ok(());
    }
    let again = match resolved.settings.run.resume {
        ResumeFrom::Newest | ResumeFrom::Must => {
            "start it again to resume from the checkpoint that was just written"
        }
        _ => {
            "start it again with --resume_from_checkpoint auto to resume from the checkpoint that was just written"
        }
    };
    if let Some(collapse) = &summary.collapsed {
        return Err(Problem::failure("the run collapsed and was stopped")
            .got(worded(collapse))
            .expected("a run that keeps learning")
            .help(
                "change that setting; then start from an earlier checkpoint with `--resume_from_checkpoint DIR \
                 --allow_changed_settings`, or from the beginning with `--resume_from_checkpoint never`; to continue \
                 with unchanged settings, repeat the command without --stop_on_collapse",
            )
            .into());
    }
    Err(match &summary.machine {
        Some(how) => Problem::stopped("the machine failed, so the run was stopped before its end")
            .got(how.as_str())
            .expected("a working machine: no row was skipped or lost because of the failure")
            .help(format!("fix the machine, then {again}")),
        None => Problem::stopped("the run was stopped before its end").help(again),
    }
    .into())
}

/// Builds everything from the settings and trains. Console output, including errors, also goes to the run's log.
pub fn run(
    resolved: &Resolved,
    context: &Context,
    objective: Objective,
    lock: RunLock,
    observer: Box<dyn Observer>,
) -> Result<RunSummary> {
    let rank = context.ranks.rank();
    if let Some(path) = &resolved.settings.io.log_file {
        let path = if rank == 0 { path.clone() } else { path.with_extension(format!("rank-{rank}.txt")) };
        context.console.log_to(&path).map_err(|e| unwritable(lock.root(), &e))?;
    }
    for note in &resolved.notes {
        context.console.log(note);
    }
    if !lock.is_exclusive() {
        context.console.line(
            "warning: this file system has no locks, so a second run in the same directory would not be detected",
        );
    }
    let page = if rank == 0 { watch::beside(&resolved.settings, lock.root(), context) } else { Ok(None) };
    let page = together(&context.ranks, page)?;
    let outcome = run_logged(resolved, context, objective, lock, observer);
    if let Some(page) = &page {
        page.end(&ending(&outcome));
        let dir = resolved.settings.io.output_dir.as_deref().unwrap_or(Path::new("RUN_DIR"));
        context.console.line(&format!("`omnigrpo watch {}` shows the page again", dir.display()));
    }
    outcome
}

/// Returns a sentence about how a run ended.
fn ending(outcome: &Result<RunSummary>) -> String {
    match outcome {
        Err(error) => format!("it failed: {error}"),
        Ok(RunSummary { collapsed: Some(collapse), steps, .. }) => {
            format!("stopped after step {steps}: {}", worded(collapse))
        }
        Ok(RunSummary { machine: Some(how), steps, .. }) => format!("stopped after step {steps}: {how}"),
        Ok(RunSummary { interrupted: true, steps, .. }) => format!("stopped after step {steps}"),
        Ok(RunSummary { steps, .. }) => format!("all {steps} steps are done"),
    }
}

/// Parts of a run other than its model.
pub struct Prepared {
    pub objective: Objective,
    pub devices: [Device; 2],
    prompts: Arc<PromptBuilder>,
    shuffled: Option<Arc<PromptBuilder>>,
    dataset: Arc<Dataset>,
    rows: Vec<u64>,
    rewards: RewardSet,
    /// Memory of reward models, bytes.
    pub reward_bytes: u64,
    corpus: Option<Corpus>,
    pub eval: Option<EvalPlan>,
    bad_rows: Vec<(u64, String, String)>,
    pub longest: Longest,
    /// Outlines of rows as steps draw them.
    pub typical: Longest,
    /// Mean memory of a row's decoded media, bytes, of training and of held-out rows; `None` if the rows were not checked.
    row_media_bytes: Option<f64>,
    eval_media_bytes: Option<f64>,
}

impl Prepared {
    /// Returns the number of rows that can be drawn.
    pub fn usable_rows(&self) -> usize {
        let bad: HashSet<u64> = self.bad_rows.iter().map(|(row, ..)| *row).collect();
        self.rows.iter().filter(|row| !bad.contains(row)).count()
    }

    /// Returns an upper bound of the bytes of all decoded media of a run: the sum found by the check, times the number of
    /// versions that may be stored.
    pub fn media_bytes(&self, run: &RunPlan) -> u64 {
        let rows = self.rows.len() as u64;
        let by_epochs = (rows as f64 * run.num_epochs).ceil() as u64;
        let draws =
            run.max_steps.map_or(by_epochs, |steps| steps.saturating_mul(run.prompts_per_step as u64));
        let orders = 1 + u64::from(self.shuffled.is_some());
        let kept = kept_rows([rows, draws], self.longest.versions(), orders);
        let mean = self.row_media_bytes.unwrap_or(self.longest.media_bytes() as f64);
        let evaluated = self.eval.as_ref().map_or(0, |plan| plan.rows.len());
        let held_out = self.eval_media_bytes.unwrap_or(self.longest.media_bytes() as f64);
        (kept as f64 * mean + evaluated as f64 * held_out) as u64
    }
}

/// Returns the maximum number of stored media, given the rows and the draws. A row with `meta.dynamic_sample` may be drawn with
/// another number of frames, out of `versions`, in each pass, and each of these in several orders.
fn kept_rows([rows, draws]: [u64; 2], versions: u64, orders: u64) -> u64 {
    let drawn = rows.min(draws);
    let each = versions.min(draws.div_ceil(drawn.max(1)));
    each.saturating_mul(orders).saturating_mul(drawn)
}

/// Opens and checks everything except the model.
fn prepare(settings: &Settings, context: &Context, objective: Objective, cache: &Path) -> Result<Prepared> {
    environment(context);
    let devices = [context.device()?, context.reference_device()?];
    if devices[0] == Device::Cpu && settings.optimizer.offload {
        context.console.line("`offload_optimizer` has no effect: the model is on the CPU");
    }
    let checkpoint = context.checkpoint()?;
    setup::check_router(settings, checkpoint)?;
    if let Some(path) = &settings.io.deepspeed {
        context.console.line(&format!("{}:", path.display()));
        for line in deepspeed::read(path, settings, devices[0] != Device::Cpu)? {
            context.console.line(&format!("  {line}"));
        }
    }
    let prompts = Arc::new(setup::prompts(settings, checkpoint, true)?);
    let dataset = setup::train_data(settings)?;
    let held_out = setup::eval_data(settings)?;
    let ratio = settings.data.val_split_ratio;
    let (rows, eval_rows) = match &held_out {
        Some(held_out) => ((0..dataset.len()).collect(), (0..held_out.len()).collect()),
        None if ratio > 0.0 => split(dataset.len(), ratio, settings.run.data_seed),
        None => ((0..dataset.len()).collect::<Vec<u64>>(), Vec::new()),
    };
    let corpus = setup::corpus(settings, &dataset, rows.iter().copied());
    let before = memory::resident();
    let rewards = setup::rewards(settings, corpus.as_ref())?;
    // A smaller increase of memory cannot come from a model.
    let reward_bytes =
        Some(memory::resident().saturating_sub(before)).filter(|&bytes| bytes > 16 << 20).unwrap_or(0);
    let shuffled = if settings.rewards.temporal_order_bonus {
        if answer_reward(&rewards).is_none() {
            return Err(Problem::usage(
                "no reward compares answers, so no answer can depend on the order of frames",
            )
            .at("--temporal_order_bonus")
            .got(format!("`reward_funcs` {}", omnigrpo_rewards::redacted(&settings.rewards.funcs.join(", "))))
            .expected("`accuracy` or one of its rules in `reward_funcs`")
            .into());
        }
        Some(Arc::new(setup::shuffled_prompts(settings, checkpoint)?))
    } else {
        None
    };

    let eval_prompts = match eval_rows.is_empty() {
        true => None,
        false => Some(Arc::new(setup::prompts(settings, checkpoint, false)?)),
    };
    let scored = objective == Objective::Reinforce && !settings.run.replay;
    let mut eval_media_bytes = None;
    let Checked { bad: bad_rows, longest, row_media_bytes } = if settings.data.skip_check {
        if scored && let Some(problem) = data::ask_unchecked(&dataset, &rows, &rewards) {
            return Err(problem.into());
        }
        // Without a check of the rows, the longest ones are unknown.
        let longest = rows.iter().copied().take(memory::PREPARED).collect();
        Checked { bad: Vec::new(), longest, row_media_bytes: None }
    } else {
        // If the held-out rows are a split of `dataset`, they were checked with it.
        if let (Some(held_out), Some(prompts)) = (&held_out, &eval_prompts) {
            eval_media_bytes = Some(data::check_held_out(settings, context, held_out, prompts, cache)?);
        }
        let asked = scored.then_some(&rewards);
        data::check_before(settings, context, &dataset, &prompts, cache, asked)?
    };
    let bad: HashSet<u64> = bad_rows.iter().map(|(row, ..)| *row).collect();
    // The first rank scores for all.
    if scored && context.ranks.is_first() {
        let usable = rows.iter().copied().filter(|row| !bad.contains(row));
        setup::probe_rewards(&rewards, &dataset, usable, &prompts)?;
    }
    let eval_dataset = held_out.unwrap_or_else(|| Arc::clone(&dataset));
    if let Some(problem) = data::ask_before_evaluation(context, &eval_dataset, &eval_rows, &rewards) {
        context.console.line(&format!("in evaluations: {problem}"));
    }
    if !scored && context.ranks.is_first() {
        setup::probe_rewards(&rewards, &eval_dataset, eval_rows.iter().copied(), &prompts)?;
    }
    if scored || !eval_rows.is_empty() {
        rewards_read_all(settings, &rewards)?;
    }
    if let (true, Some(prompts)) = (settings.data.skip_check, &eval_prompts) {
        any_usable(&eval_dataset, &eval_rows, prompts, &rewards)?;
    }
    let eval = eval_prompts.map(|prompts| EvalPlan {
        prompts,
        dataset: eval_dataset,
        rows: eval_rows,
        options: eval_options(settings),
    });
    let longest = Longest::prepare(&prompts, &dataset, &longest, objective);
    let usable: Vec<u64> = rows.iter().copied().filter(|row| !bad.contains(row)).collect();
    let some = usable.len().min(memory::TYPICAL);
    let typical: Vec<u64> = (0..some).map(|at| usable[at * usable.len() / some]).collect();
    let typical = Longest::prepare(&prompts, &dataset, &typical, objective);
    Ok(Prepared {
        objective,
        devices,
        prompts,
        shuffled,
        dataset,
        rows,
        rewards,
        reward_bytes,
        corpus,
        eval,
        bad_rows,
        longest,
        typical,
        row_media_bytes,
        eval_media_bytes: eval_media_bytes.or(row_media_bytes),
    })
}

/// Returns an error if a reward cannot read the longest possible completion after its longest prompt. Such completions would get
/// no score.
fn rewards_read_all(settings: &Settings, rewards: &RewardSet) -> Result<()> {
    let longest = settings.algorithm.sampling.max_completion_length;
    let Some((name, limit)) = rewards.too_short_for(longest).into_iter().next() else { return Ok(()) };
    let lower = match limit.room() {
        0 => String::new(),
        room => format!("lower --max_completion_length to {room}, "),
    };
    Err(Problem::usage("a reward cannot read the longest completions")
        .got(format!(
            "`{name}` in --reward_funcs reads at most {} tokens; the longest prompt has {} of them and --max_completion_length \
             {longest} allows {longest} more",
            limit.most, limit.longest_prompt
        ))
        .expected("prompt and completion within the limit; a token of the policy counts as one token of the reward model")
        .help(format!("{lower}leave out the longest prompts, or use a reward model with a higher limit"))
        .into())
}

/// Returns an error if no evaluation row can be used. Without this check, the first evaluation would report that hours later.
/// Reads rows until one can be used, which is usually the first.
fn any_usable(dataset: &Dataset, rows: &[u64], prompts: &PromptBuilder, rewards: &RewardSet) -> Result<()> {
    let mut first = None;
    for &row in rows {
        match omnigrpo_train::prepare(dataset, prompts, Some(rewards), row, 0)? {
            Ok(_) => return Ok(()),
            Err(why) => drop(first.get_or_insert((row, why))),
        }
    }
    let Some((row, why)) = first else { return Ok(()) };
    Err(Problem::failure("no evaluation row can be used")
        .got(format!("{} unusable rows; row {row} (id {}): {}", rows.len(), why.id, why.reason))
        .expected("at least one row to evaluate on")
        .help("`omnigrpo data check` lists all of them; to train without evaluations, remove --eval_file and --val_split_ratio")
        .into())
}

fn run_logged(
    resolved: &Resolved,
    context: &Context,
    objective: Objective,
    lock: RunLock,
    observer: Box<dyn Observer>,
) -> Result<RunSummary> {
    let settings = &resolved.settings;
    let ranks = &context.ranks;
    let prepared = || {
        find_checkpoint(settings, lock.root())?;
        let prepared = prepare(settings, context, objective, &lock.root().join(".cache"))?;
        plan::foresee(resolved, context.checkpoint()?, &prepared)?;
        Ok(prepared)
    };
    // The first rank fills the caches of downloads and checks, which the others then read.
    let own = together(ranks, if ranks.is_first() { prepared().map(Some) } else { Ok(None) })?;
    let prepared = together(ranks, own.map_or_else(prepared, Ok))?;
    let checkpoint = context.checkpoint()?;
    let Prepared {
        devices, prompts, shuffled, dataset, rows, rewards, corpus, eval, bad_rows, longest, ..
    } = prepared;
    // If kept, it would hold its decoded media during the complete run.
    drop(longest);
    let model = together(ranks, setup::trained_model(settings, checkpoint, devices[0]))?;
    let leaves = together(ranks, leaves(settings, ranks, lock.root()))?;
    let selection = setup::selection(settings, checkpoint.family());
    let bad: HashSet<u64> = bad_rows.iter().map(|(row, ..)| *row).collect();
    let usable = rows.iter().filter(|row| !bad.contains(row)).count();
    if let Some(name) = &settings.run.run_name {
        context.console.line(&format!("run {name}"));
    }
    describe(context, &model, &dataset, usable, &prompts);
    context.console.line(&step_takes(settings, objective, ranks));
    install_signals(context)?;
    let files = [("config.yaml", print_config(resolved).into_bytes())]
        .into_iter()
        .chain(corpus.map(|corpus| (Corpus::FILE, corpus.kept())));
    let run = RunPlan {
        objective,
        debug_log: settings.env.debug_log.clone().map(DebugLog::new),
        files: files.collect(),
        fingerprint: together(ranks, fingerprint(resolved, &model, &dataset, leaves))?,
        bad_rows,
        command: Some(explain::command(resolved)),
        curves: Some(omnigrpo_watch::curves),
        ..settings.run.clone()
    };
    let setup = TrainSetup {
        model,
        prompts,
        shuffled,
        dataset,
        rows,
        eval,
        rewards,
        algorithm: Algorithm {
            split: Split::new(ranks.clone(), leaves, settings.algorithm.split.sum),
            ..settings.algorithm.clone()
        },
        optimizer: settings.optimizer.clone(),
        selection,
        reference_device: devices[1],
        run,
        observer,
        trackers: watch::trackers(resolved, lock.root(), context),
        lock,
    };
    profile::enable(settings.log.profile);
    let summary = omnigrpo_train::train(setup, &context.console, &context.stop)?;
    if settings.log.profile && ranks.is_first() {
        print(&profile::table(&profile::take(), summary.steps_here))?;
    }
    Ok(summary)
}

/// Returns an error if the requested checkpoint is missing, before the model is loaded.
fn find_checkpoint(settings: &Settings, output_dir: &Path) -> Result<(), Problem> {
    let list = || {
        let found = omnigrpo_train::checkpoint::list(output_dir);
        found.map_err(|error| Problem::from_error(&error))
    };
    let absent = |place: &Path, found: Vec<(u64, PathBuf)>| {
        let found: Vec<String> = found.iter().map(|(_, path)| path.display().to_string()).collect();
        Problem::failure("no checkpoint to resume from was found")
            .at(place.display().to_string())
            .got(if found.is_empty() { "none in the run directory".into() } else { found.join(", ") })
            .expected("a directory `checkpoint-N` with `trainer_state.json`")
            .help("`--resume_from_checkpoint auto` starts from the beginning if there is none")
    };
    match &settings.run.resume {
        ResumeFrom::Must if list()?.is_empty() => Err(absent(output_dir, Vec::new())),
        ResumeFrom::Path(path) if !path.is_dir() => Err(absent(path, list()?)),
        _ => Ok(()),
    }
}

/// Returns the options of evaluations during training: greedy for one completion per row, sampled as in training for several.
fn eval_options(settings: &Settings) -> EvalOptions {
    let mut options = settings.eval.clone();
    let sampling = settings.algorithm.sampling.clone();
    options.sampling = match options.num_generations {
        1 => SamplingParams {
            max_completion_length: sampling.max_completion_length,
            seed: sampling.seed,
            ..SamplingParams::greedy()
        },
        _ => sampling,
    };
    EvalOptions { batch_rows: MAX_LIVE, ..options }
}

/// Returns every setting that must not change when a run resumes, and digests of the models, the dataset and the files of
/// rewards.
fn fingerprint(
    resolved: &Resolved,
    model: &Model,
    dataset: &Dataset,
    leaves: usize,
) -> Result<Map<String, Value>> {
    let mut out = Map::new();
    for (flag, value) in resolved.values.binding(resolved.verb) {
        let is_path = matches!(flag.kind, Kind::Path | Kind::Paths(_));
        out.insert(flag.name.to_owned(), if is_path { real_paths(value) } else { value });
    }
    // A step has as many prompts on another number of processes with as many more or fewer batches.
    if let Some(batches) = out.get_mut("gradient_accumulation_steps") {
        *batches = (resolved.settings.batch.accumulation * resolved.settings.env.processes.max(1)).into();
    }
    if leaves > 1 {
        out.insert(LEAVES.into(), leaves.into());
    }
    let mut sources = vec![("the model", model.dir().to_owned())];
    sources.extend(resolved.settings.model.adapter.clone().map(|dir| ("the adapter", dir)));
    for companion in model.family().format().companions() {
        sources.extend(companion.dir.map(|dir| (companion.option, dir)));
    }
    for (name, dir) in sources {
        let digest = source_digest(&dir)?;
        // Random weights need no digest, because the seed determines them.
        if let (Some(weights), None) = (digest.weights, resolved.settings.model.init_weights) {
            out.insert(format!("weights of {name}"), weights.into());
        }
        out.insert(format!("files of {name}"), digest.files.into());
    }
    out.extend(resume::inputs(&resolved.settings, dataset)?);
    out.extend(products(model));
    Ok(out)
}

/// Returns the way in which the CPU multiplies with weights other than f32, if it affects results.
fn products(model: &Model) -> Map<String, Value> {
    let mut out = Map::new();
    let params =
        || model.params().iter().filter(|_| model.device() == Device::Cpu).map(|param| param.dtype());
    if params().any(|dtype| dtype != ParamDtype::F32) {
        out.insert("path of bf16 products".into(), omnigrpo_kernels::paths::path().name().into());
    }
    if params().any(|dtype| matches!(dtype, ParamDtype::Quantised(_))) {
        let inputs = if omnigrpo_kernels::quant::rounds_inputs() { "bytes" } else { "float32" };
        out.insert("activations of products with few bits".into(), inputs.into());
    }
    out
}

/// Replaces paths by their real paths, so that different spellings compare equal.
fn real_paths(value: Value) -> Value {
    match value {
        Value::String(path) => {
            let real = std::fs::canonicalize(&path).map(|real| real.display().to_string());
            real.unwrap_or(path).into()
        }
        Value::Array(paths) => paths.into_iter().map(real_paths).collect(),
        other => other,
    }
}

/// Writes the first line of the log, about the program and the machine.
fn environment(context: &Context) {
    let threads = rayon::current_num_threads();
    context.console.line(&format!(
        "omnigrpo {} on {} thread{}, {}-{}",
        env!("CARGO_PKG_VERSION"),
        threads,
        if threads == 1 { "" } else { "s" },
        std::env::consts::OS,
        std::env::consts::ARCH,
    ));
}

/// Writes the next lines of the log, about the model and the data.
fn describe(context: &Context, model: &Model, dataset: &Dataset, rows: usize, prompts: &PromptBuilder) {
    let console = &context.console;
    console.line(&format!("model {} ({})", model.dir().display(), prompts.family().name()));
    console.line(&format!("training on {rows} of {} rows", dataset.len()));
}

fn step_takes(settings: &Settings, objective: Objective, ranks: &Ranks) -> String {
    let one = one_process_takes(settings, objective);
    if ranks.size() == 1 { one } else { format!("{one}, on {} ranks ({})", ranks.size(), ranks.engine()) }
}

fn one_process_takes(settings: &Settings, objective: Objective) -> String {
    let prompts = settings.run.prompts_per_step;
    let plural = if prompts == 1 { "" } else { "s" };
    let each = match settings.algorithm.num_generations {
        1 => "1 completion".to_owned(),
        each => format!("{each} completions"),
    };
    match (objective, settings.batch.unit) {
        (Objective::Imitate, _) => format!("a step takes {prompts} answer{plural}"),
        (Objective::Reinforce, BatchUnit::Prompts) => {
            format!("a step takes {prompts} prompt{plural} of {each}")
        }
        (Objective::Reinforce, BatchUnit::Completions) => {
            format!(
                "a step takes {prompts} prompt{plural} of {each}, as the source: its batch of {} counts completions",
                prompts * settings.algorithm.num_generations
            )
        }
    }
}

/// Installs signal handlers. Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 end the run after the current step, with a checkpoint. The
/// program confirms them immediately. A second signal of the first three kinds ends the process immediately, with the exit code
/// that shells use for that signal. SIGUSR1 is a scheduler's warning before SIGTERM, so it counts neither as the first nor as the
/// second signal.
fn install_signals(context: &Context) -> Result<()> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
    let unable = "signals cannot be handled";
    context.stop.store(false, Ordering::Relaxed);
    let told = Arc::new(AtomicBool::new(false));
    // A run under `nohup` survives its terminal.
    let handled: Vec<i32> =
        [SIGINT, SIGTERM, SIGUSR1, SIGHUP].into_iter().filter(|&s| s != SIGHUP || !is_ignored(s)).collect();
    for &signal in &handled {
        signal_hook::flag::register(signal, Arc::clone(&context.stop)).context(unable)?;
        if signal != SIGUSR1 {
            // Handlers run in the order of their registration, so this one acts only if an earlier signal has set the flag.
            signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&told))
                .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&told)))
                .context(unable)?;
        }
    }
    let mut signals = signal_hook::iterator::Signals::new(&handled).context(unable)?;
    let console = context.console.clone();
    // This thread runs until the process ends. Signals also work without it.
    let answer = move || {
        for signal in &mut signals {
            let what = match console.activity().step() {
                Some(step) => format!("finishing step {step}, then saving"),
                None => "finishing the current work".to_owned(),
            };
            let more = if signal == SIGUSR1 { "" } else { "; press Ctrl-C again to stop now" };
            console.line(&format!("{what}{more}"));
        }
    };
    let _ = std::thread::Builder::new().name("signals".to_owned()).spawn(answer);
    Ok(())
}

/// Returns true if the process was started with a signal ignored, as by `nohup`.
fn is_ignored(signal: i32) -> bool {
    // SAFETY: with a null action, the call only reads the current action and writes it to a value of its type.
    unsafe {
        let mut action = std::mem::zeroed::<libc::sigaction>();
        libc::sigaction(signal, std::ptr::null(), &mut action) == 0 && action.sa_sigaction == libc::SIG_IGN
    }
}

#[cfg(test)]
mod tests {
    use super::kept_rows;

    #[test]
    fn media_are_kept_for_what_is_drawn() {
        for (of, versions, orders, kept) in [
            ([10, 4], 1, 1, 4),
            ([10, 30], 1, 1, 10),
            // Three passes use three of five numbers of frames, or both of two.
            ([10, 30], 5, 1, 30),
            ([10, 30], 2, 1, 20),
            ([10, 30], 2, 2, 40),
            ([10, u64::MAX], 7, 1, 70),
            ([0, 0], 3, 2, 0),
        ] {
            assert_eq!(kept_rows(of, versions, orders), kept, "{of:?}, {versions}, {orders}");
        }
    }
}
