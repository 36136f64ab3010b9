//! `train` and `sft`.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context as _, Result};
use omnigrpo_data::{Dataset, split};
use omnigrpo_guard::told;
use omnigrpo_models::{FrozenWeights, SharedDigests};
use omnigrpo_observe::{AskedBy, DebugLog, Error as LogError, Event, RunLock, now};
use omnigrpo_ops::Device;
use omnigrpo_ranks::Ranks;
use omnigrpo_rollout::SamplingParams;
use omnigrpo_train::{
    CardPlan, Curves, Divided, EvalOptions, EvalPlan, MAX_LIVE, Objective, Observer, Offload, Output, Policy,
    Prepared, RecordPlan, ResumeFrom, ResumePlan, Run, RunPlan, RunSummary, Trained, room,
};
use serde_json::{Map, Value};

use super::notify::Notifier;
use super::plan::{self, Planned};
use super::push::Pusher;
use super::{Context, print, profile, setup, watch};
use crate::cli::ranks::{connect_gpus, in_order, leaves, saved, together};
use crate::settings::flags::find;
use crate::settings::values::{Given, Origin, Raw};
use crate::settings::{
    BatchUnit, Problem, Resolved, Settings, binding, command, print_config, read_deepspeed,
};

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
        return plan::show(planned(resolved, context, objective)?, settings, context);
    }
    once(resolved, context, objective, |summary| finish(summary, resolved, context.ranks.is_first()))
        .map(drop)
}

/// Predicts the memory and the time of a run.
pub fn planned(resolved: &Resolved, context: &Context, objective: Objective) -> Result<Planned> {
    let prepared = prepare(resolved, context, objective, None)?;
    plan::plan(resolved, context, objective, &prepared)
}

/// Locks the run directory, trains, reports, and pushes the trained model if the settings request it.
pub fn once(
    resolved: &Resolved,
    context: &Context,
    objective: Objective,
    report: impl FnOnce(&RunSummary) -> Result<()>,
) -> Result<Trained> {
    let settings = &resolved.settings;
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
    let opened = || -> Result<_> {
        let pusher = Pusher::before(settings, context)?;
        let notifier = Notifier::new(settings, output_dir, &host(), &context.console)?;
        Ok((pusher, Some(notifier), Some(take(output_dir)?)))
    };
    let (pusher, notifier, lock) = together(ranks, if first { opened() } else { Ok((None, None, None)) })?;
    let lock = lock.unwrap_or_else(|| RunLock::of_first_rank(output_dir));
    let mut observers: Vec<Box<dyn Observer>> = vec![context.observer()];
    observers.extend(notifier.clone().map(|notifier| Box::new(notifier) as Box<dyn Observer>));
    observers.extend(pusher.as_ref().map(Pusher::observer));
    let outcome = run(resolved, context, objective, lock, Box::new(observers));
    let mut end = end_of(&outcome);
    let step = outcome.as_ref().ok().map(|trained| trained.summary.steps);
    let result = outcome.and_then(|trained| {
        report(&trained.summary)?;
        // The push is last, so that the model is written and reported even if the push fails.
        let pusher = pusher.filter(|_| !trained.summary.interrupted);
        pusher.map_or(Ok(()), |pusher| pusher.last(trained.summary.steps)).map(|()| trained)
    });
    if let (Event::Finished, Err(error)) = (&end, &result) {
        end = Event::Failed { why: error.to_string() };
    }
    if let Some(notifier) = notifier {
        notifier.end(&end, step);
    }
    result
}

/// Settings of a run that resumes a checkpoint, where a default has changed since then and the user gives no value; and notes about them.
fn of_checkpoint(resolved: &Resolved, output_dir: &Path) -> Result<Option<(Resolved, Vec<String>)>> {
    let Some(saved) = saved(&resolved.settings, output_dir).filter(|saved| !saved.model_only) else {
        return Ok(None);
    };
    let (mut own, mut notes) = (resolved.clone(), Vec::new());
    for changed in &binding::EARLIER {
        let (Some(flag), now) = (find(changed.name), resolved.values.lookup(changed.name)) else { continue };
        let is_users = now.is_some_and(|(_, origin)| origin.is_users());
        if is_users || (flag.idle)(&resolved.settings, resolved.verb).is_some() {
            continue;
        }
        let named = saved.fingerprint.get(changed.name);
        let kept = named.map_or_else(
            || changed.default.to_owned(),
            |value| value.as_str().map_or_else(|| value.to_string(), str::to_owned),
        );
        let given = Given::read(flag, &Raw::Arguments(vec![kept.clone()]), Origin::Flag)?;
        if now.is_some_and(|(value, _)| *value == given.value) {
            continue;
        }
        let why =
            if named.is_some() { "the run resumes from a checkpoint with this setting" } else { changed.why };
        notes.push(format!("using --{} {kept}: {why}", changed.name));
        (flag.place.set)(&mut own.settings, &given.value)?;
        own.values.set(given);
    }
    own.settings.rewards.scorers.orientation = own.settings.prompts.media.orientation;
    Ok((!notes.is_empty()).then_some((own, notes)))
}

/// Prepares a run in a directory and returns the settings that it has. If it resumes, it keeps the earlier defaults of its checkpoint; a
/// run that starts from the beginning, in a directory with checkpoints as well, has today's.
fn prepare_in(
    output_dir: &Path,
    resolved: &Resolved,
    context: &Context,
    objective: Objective,
) -> Result<(Resolved, Prepared)> {
    let prepared = |resolved: &Resolved| prepare(resolved, context, objective, Some(output_dir));
    if let Some((own, notes)) = of_checkpoint(resolved, output_dir)? {
        notes.iter().for_each(|note| context.console.line(note));
        let prepared = prepared(&own)?;
        if prepared.resumes_from().is_some() {
            return Ok((own, prepared));
        }
        context
            .console
            .line("the run does not resume from that checkpoint, so it has the defaults of this version");
    }
    Ok((resolved.clone(), prepared(resolved)?))
}

/// Returns the event with which a run ended.
fn end_of(outcome: &Result<Trained>) -> Event {
    match outcome {
        Ok(trained) => trained.summary.end(),
        Err(error) => Event::Failed { why: error.to_string() },
    }
}

/// Locks the run directory for this process.
pub fn take(output_dir: &Path) -> Result<RunLock> {
    let holder = format!("process {} on {} since {}", std::process::id(), host(), now());
    RunLock::acquire(output_dir, &holder).map_err(|error| match error {
        LogError::Locked { path, holder } => Problem::failure("the run directory is in use")
            .at(path.display().to_string())
            .got(holder)
            .expected("one run per run directory")
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

/// Prints the report and the verdict, on the first rank. A stopped run is an error with its own exit code.
pub fn finish(summary: &RunSummary, resolved: &Resolved, first: bool) -> Result<()> {
    if first {
        print(&format!("{}", summary.report))?;
        print(&verdict(Path::new(&summary.report.run_dir)))?;
    }
    if !summary.interrupted {
        return if first {
            print(&next_commands(Path::new(&summary.report.run_dir), &resolved.settings))
        } else {
            Ok(())
        };
    }
    let again = match resolved.settings.run.resume.from {
        ResumeFrom::Newest | ResumeFrom::Must => {
            "start it again to resume from the checkpoint that was just written"
        }
        _ => {
            "start it again with --resume_from_checkpoint auto to resume from the checkpoint that was just written"
        }
    };
    if let Some(collapse) = &summary.collapsed {
        return Err(Problem::failure("the run collapsed and was stopped")
            .got(collapse)
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

/// Returns the verdict on a run that has ended; nothing if its files cannot be read, or if it has no rewards.
fn verdict(directory: &Path) -> String {
    let verdict = omnigrpo_watch::verdict(directory).ok();
    let verdict = verdict.filter(|own| own.kind != omnigrpo_watch::Kind::TooEarly);
    verdict.map(|verdict| format!("\n{verdict}")).unwrap_or_default()
}

/// Builds everything from the settings and trains. Console output, including errors, also goes to the run's log.
pub fn run(
    resolved: &Resolved,
    context: &Context,
    objective: Objective,
    lock: RunLock,
    observer: Box<dyn Observer>,
) -> Result<Trained> {
    let rank = context.ranks.rank();
    if let Some(path) = &resolved.settings.io.log_file {
        let path = if rank == 0 { path.clone() } else { path.with_extension(format!("rank-{rank}.txt")) };
        context.console.log_to(&path).map_err(|e| unwritable(lock.root(), &e))?;
    }
    for note in &resolved.notes {
        context.console.log(note);
    }
    if !lock.is_exclusive() {
        context.console.warning(
            "this file system has no locks, so a second run in the same directory would not be detected",
        );
    }
    let page = if rank == 0 { watch::beside(&resolved.settings, lock.root(), context) } else { Ok(None) };
    let (page, ready) = match page {
        Ok(page) => (page, Ok(())),
        Err(error) => (None, Err(error)),
    };
    let outcome = run_logged(resolved, context, objective, lock, observer, ready);
    if let Some(page) = &page {
        let steps = outcome.as_ref().map_or(0, |trained| trained.summary.steps);
        page.end(&end_of(&outcome).line(steps));
        let dir = resolved.settings.io.output_dir.as_deref().unwrap_or(Path::new("RUN_DIR"));
        context.console.notice(&format!("`omnigrpo watch {}` shows the page again", dir.display()));
    }
    outcome
}

/// Runs with the log of the run. `ready` is the result of this rank's preparation.
fn run_logged(
    resolved: &Resolved,
    context: &Context,
    objective: Objective,
    lock: RunLock,
    observer: Box<dyn Observer>,
    ready: Result<()>,
) -> Result<Trained> {
    let settings = &resolved.settings;
    let ranks = &context.ranks;
    let prepared = || {
        let (resolved, prepared) = prepare_in(lock.root(), resolved, context, objective)?;
        plan::refuse(&resolved, context, &prepared)?;
        Ok((resolved, prepared))
    };
    // The first rank fills the caches of downloads and checks, which the others then read.
    let (resolved, prepared) = in_order(ranks, ready, prepared)?;
    connect_gpus(context, settings, context.device()?)?;
    if !context.is_called() {
        install_signals(context)?;
    }
    profile::enable(settings.log.profile);
    let trackers = watch::trackers(&resolved, lock.root(), context);
    let (signals, curves) = (context.functions.signals.clone(), Some(omnigrpo_watch::curves as Curves));
    let output = Output { lock, observer, trackers, signals, curves };
    let trained = prepared.train(output, &context.console, &context.stop)?;
    if settings.log.profile && ranks.is_first() {
        context.print(&profile::table(&profile::take(), trained.summary.steps_here))?;
    }
    Ok(trained)
}

/// Opens everything that a run needs except its model, and checks it. Without an `output_dir`, the run is only planned.
pub fn prepare(
    resolved: &Resolved,
    context: &Context,
    objective: Objective,
    output_dir: Option<&Path>,
) -> Result<Prepared> {
    let settings = &resolved.settings;
    environment(context);
    let (device, reference_device) = (context.device()?, context.reference_device()?);
    let checkpoint = context.checkpoint()?;
    remark(settings, context, device, objective)?;
    let dataset = setup::train_data(settings)?;
    let (rows, eval) = held_out(settings, context, &dataset)?;
    let corpus = setup::corpus(settings, &dataset, rows.iter().copied());
    let prompts = Arc::new(context.prompts(settings, checkpoint, true)?);
    let before = room::resident();
    let digests = (context.ranks.size() > 1).then(SharedDigests::default);
    // Only the first rank scores.
    let is_outline = !context.ranks.is_first();
    let weights = FrozenWeights { is_outline, digests: digests.clone(), ..FrozenWeights::default() };
    let rewards = setup::rewards(settings, corpus.as_ref(), Some(&prompts), (&context.functions, weights))?;
    // A smaller increase of memory cannot come from a model.
    let reward_bytes = Some(room::resident().saturating_sub(before)).filter(|&bytes| bytes > 16 << 20);
    let shuffled = match settings.rewards.temporal_order_bonus {
        true => {
            let interaction = context.interaction(settings)?;
            Some(Arc::new(setup::prompts(settings, checkpoint, (true, true), interaction)?))
        }
        false => None,
    };
    let leaves = output_dir.map_or(Ok(1), |dir| leaves(settings, &context.ranks, dir))?;
    let model = Policy::Planned(Box::new(setup::model_plan(settings, checkpoint, device)));
    let run = Run {
        shuffled,
        rows,
        eval,
        interaction: context.interaction(settings)?,
        corpus,
        reward_bytes: reward_bytes.unwrap_or(0),
        reward_files: setup::reward_files(settings),
        reward_weights: digests.map(|digests| digests.all()).unwrap_or_default(),
        algorithm: divided(settings, context, leaves),
        optimizer: settings.optimizer.clone(),
        selection: setup::selection(settings, checkpoint.family()),
        reference_model: setup::reference_plan(settings, reference_device)?
            .map(|plan| Policy::Planned(Box::new(plan))),
        reference_device,
        plan: run_plan(resolved, context, objective, leaves),
        check_rows: !settings.data.skip_check,
        cache_dir: Some(output_dir.map_or_else(|| settings.env.check_cache(), |dir| dir.join(".cache"))),
        media_bytes: setup::media_bytes(settings),
        gpu_memory: settings.model.gpu_memory,
        output_dir: output_dir.map(Path::to_owned),
        ..Run::new(model, prompts, dataset, rewards)
    };
    Ok(run.prepare(&context.console)?)
}

/// Prints remarks on settings that have no effect, and on what files of other trainers set.
fn remark(settings: &Settings, context: &Context, device: Device, objective: Objective) -> Result<()> {
    if device == Device::Cpu && settings.optimizer.offload == Offload::Cpu {
        context.console.line("`offload_optimizer` has no effect: the model is on the CPU");
    }
    if let Some(path) = &settings.io.deepspeed {
        context.console.line(&format!("{}:", path.display()));
        for line in read_deepspeed(path, settings, device != Device::Cpu)? {
            context.console.line(&format!("  {line}"));
        }
    }
    if objective == Objective::Reinforce && settings.batch.unit == BatchUnit::Completions {
        let batch = settings.run.prompts_per_step * settings.algorithm.num_generations;
        context.console.line(&format!("a batch of {batch} counts completions, as the source"));
    }
    Ok(())
}

/// Returns the algorithm, divided over the ranks of this run or of the planned one.
fn divided(settings: &Settings, context: &Context, leaves: usize) -> Divided {
    let mut algorithm = settings.algorithm.clone();
    algorithm.split.leaves = Some(leaves);
    let (ranks, local) = match settings.io.dry_run {
        true => {
            let ranks = Ranks::planned(settings.env.processes.max(1));
            (ranks, settings.ranks.nproc_per_node.unwrap_or(1))
        }
        false => (context.ranks.clone(), context.local_ranks),
    };
    Divided::new(algorithm, ranks, local)
}

/// Returns the plan of the settings, with the contents that only the program knows.
fn run_plan(resolved: &Resolved, context: &Context, objective: Objective, leaves: usize) -> RunPlan {
    let Settings { run, env, .. } = &resolved.settings;
    RunPlan {
        objective,
        resume: ResumePlan {
            fingerprint: fingerprint(resolved, context, leaves),
            repeat_complete: context.functions.repeat_complete,
            before: binding::earlier(resolved.verb),
            free: binding::free(resolved.verb),
            ..run.resume.clone()
        },
        records: RecordPlan {
            debug_log: env.debug_log.clone().map(DebugLog::new),
            files: vec![("config.yaml", print_config(resolved).into_bytes())],
            ..run.records.clone()
        },
        card: CardPlan {
            command: Some(command(resolved)),
            settings: binding::shaping(&resolved.values, &resolved.settings, resolved.verb),
            ..run.card.clone()
        },
        ..run.clone()
    }
}

/// Returns what the user gave that must not change when the run resumes.
fn fingerprint(resolved: &Resolved, context: &Context, leaves: usize) -> Map<String, Value> {
    let Resolved { values, settings, verb, .. } = resolved;
    let code = context.functions.digests.iter();
    let code = code.map(|(name, digest)| (format!("code of {name}"), digest.as_str().into()));
    binding::binding(values, settings, *verb, leaves).into_iter().chain(code).collect()
}

/// Returns the rows to train on, and the evaluation on other rows, if there are any.
fn held_out(
    settings: &Settings,
    context: &Context,
    dataset: &Arc<Dataset>,
) -> Result<(Vec<u64>, Option<EvalPlan>)> {
    let (all, ratio) = (0..dataset.len(), settings.data.val_split_ratio);
    let held_out = setup::eval_data(settings)?;
    let (rows, eval_rows) = match &held_out {
        Some(held_out) => (all.collect(), (0..held_out.len()).collect()),
        None if ratio > 0.0 => split(dataset.len(), ratio, settings.run.rows.seed),
        None => (all.collect::<Vec<u64>>(), Vec::new()),
    };
    if eval_rows.is_empty() {
        return Ok((rows, None));
    }
    let eval = EvalPlan {
        prompts: Arc::new(context.prompts(settings, context.checkpoint()?, false)?),
        interaction: context.interaction(settings)?,
        dataset: held_out.unwrap_or_else(|| Arc::clone(dataset)),
        rows: eval_rows,
        options: eval_options(settings),
    };
    Ok((rows, Some(eval)))
}

/// Returns the options of evaluations during training: greedy for one completion per row, sampled as in training for several.
fn eval_options(settings: &Settings) -> EvalOptions {
    let mut options = settings.eval.clone();
    let sampling = settings.algorithm.sampling.clone();
    options.sampling = match options.num_generations {
        1 => SamplingParams {
            max_completion_length: sampling.max_completion_length,
            seed: sampling.seed,
            turns: sampling.turns,
            ..SamplingParams::greedy()
        },
        _ => sampling,
    };
    EvalOptions { batch_rows: MAX_LIVE, ..options }
}

/// Returns the commands that show, ask and serve what a run has trained; empty if it wrote no model.
fn next_commands(dir: &Path, settings: &Settings) -> String {
    let word =
        |text: &str| shlex::try_quote(text).map_or_else(|_| "''".to_owned(), std::borrow::Cow::into_owned);
    let own = word(&dir.display().to_string());
    let is_adapter = dir.join("adapter_config.json").is_file();
    if !is_adapter && !dir.join("config.json").is_file() {
        return String::new();
    }
    let base = settings.model.name.as_deref().map(word).unwrap_or_default();
    let (model, served) = match is_adapter {
        true => {
            (format!("{base} --adapter_name_or_path {own}"), format!("{base} --adapter_name_or_path {own}"))
        }
        false => (own.clone(), own.clone()),
    };
    format!(
        "\nomnigrpo watch {own}\nomnigrpo generate --model_name_or_path {model} --prompt TEXT\nomnigrpo serve {served}\n"
    )
}

/// Writes the first line of the log, about the program and the machine.
fn environment(context: &Context) {
    let threads = rayon::current_num_threads();
    context.console.line(&format!(
        "omnigrpo {} on {} thread{}, {}-{}",
        omnigrpo_observe::version(),
        threads,
        if threads == 1 { "" } else { "s" },
        std::env::consts::OS,
        std::env::consts::ARCH,
    ));
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
            let asked_by = if signal == SIGUSR1 { AskedBy::Scheduler } else { AskedBy::Interrupt };
            let within_step = console.activity().step().is_some();
            console.event(None, &Event::Stopping { asked_by, within_step });
        }
    };
    let _ = std::thread::Builder::new().name("signals".to_owned()).spawn(answer);
    Ok(())
}

/// Returns true if the process was started with a signal ignored, as by `nohup`.
pub fn is_ignored(signal: i32) -> bool {
    // SAFETY: with a null action, the call only reads the current action and writes it to a value of its type.
    unsafe {
        let mut action = std::mem::zeroed::<libc::sigaction>();
        libc::sigaction(signal, std::ptr::null(), &mut action) == 0 && action.sa_sigaction == libc::SIG_IGN
    }
}
