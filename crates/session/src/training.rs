//! A run from settings: its directory, its log, its page, and everything that is checked before it starts.

use std::path::Path;
use std::sync::Arc;

use anyhow::Result;
use omnigrpo_data::{Dataset, split};
use omnigrpo_guard::told;
use omnigrpo_models::{FrozenWeights, SharedDigests};
use omnigrpo_observe::{DebugLog, Error as LogError, Event, RunLock, now};
use omnigrpo_ops::Device;
use omnigrpo_ranks::Ranks;
use omnigrpo_rollout::SamplingParams;
use omnigrpo_train::{
    CardPlan, Curves, Divided, EvalOptions, EvalPlan, MAX_LIVE, Objective, Observer, Offload, Output, Policy,
    Prepared, RecordPlan, ResumePlan, Run, RunPlan, RunSummary, Trained, room,
};

use crate::forecast::{self, Planned};
use crate::notify::Notifier;
use crate::push::Pusher;
use crate::ranks::{connect_gpus, in_order, leaves, saved, together};
use crate::{Session, follow, profile, setup};
use omnigrpo_settings::flags::find;
use omnigrpo_settings::values::{Given, Origin, Raw};
use omnigrpo_settings::{
    BatchUnit, Problem, Resolved, Settings, binding, build, command, print_config, read_deepspeed,
};

/// Predicts the memory and the time of a run.
pub fn planned(resolved: &Resolved, session: &Session, objective: Objective) -> Result<Planned> {
    let prepared = prepare(resolved, session, objective, None)?;
    forecast::plan(resolved, session, objective, &prepared)
}

/// Locks the run directory, trains, reports, and pushes the trained model if the settings request it.
pub fn once(
    resolved: &Resolved,
    session: &Session,
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
    let (ranks, first) = (&session.ranks, session.ranks.is_first());
    let opened = || -> Result<_> {
        let pusher = Pusher::before(settings, session)?;
        let notifier = Notifier::new(settings, output_dir, &host(), &session.console)?;
        Ok((pusher, Some(notifier), Some(take(output_dir)?)))
    };
    let (pusher, notifier, lock) = together(ranks, if first { opened() } else { Ok((None, None, None)) })?;
    let lock = lock.unwrap_or_else(|| RunLock::of_first_rank(output_dir));
    let mut observers: Vec<Box<dyn Observer>> = vec![session.observer()];
    observers.extend(notifier.clone().map(|notifier| Box::new(notifier) as Box<dyn Observer>));
    observers.extend(pusher.as_ref().map(Pusher::observer));
    let outcome = run(resolved, session, objective, lock, Box::new(observers));
    let mut end = end_of(&outcome);
    let step = outcome.as_ref().ok().map(|trained| trained.summary.steps);
    let result = outcome.and_then(|trained| {
        report(&trained.summary)?;
        // The push is last, so that the model is written and reported even if the push fails.
        let pusher = pusher.filter(|_| !trained.summary.interrupted);
        pusher.map_or(Ok(()), |pusher| pusher.last(session, trained.summary.steps)).map(|()| trained)
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
    session: &Session,
    objective: Objective,
) -> Result<(Resolved, Prepared)> {
    let prepared = |resolved: &Resolved| prepare(resolved, session, objective, Some(output_dir));
    if let Some((own, notes)) = of_checkpoint(resolved, output_dir)? {
        notes.iter().for_each(|note| session.console.line(note));
        let prepared = prepared(&own)?;
        if prepared.resumes_from().is_some() {
            return Ok((own, prepared));
        }
        session
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

/// Builds everything from the settings and trains. Console output, including errors, also goes to the run's log.
pub fn run(
    resolved: &Resolved,
    session: &Session,
    objective: Objective,
    lock: RunLock,
    observer: Box<dyn Observer>,
) -> Result<Trained> {
    let rank = session.ranks.rank();
    if let Some(path) = &resolved.settings.io.log_file {
        let path = if rank == 0 { path.clone() } else { path.with_extension(format!("rank-{rank}.txt")) };
        session.console.log_to(&path).map_err(|e| unwritable(lock.root(), &e))?;
    }
    for note in &resolved.notes {
        session.console.log(note);
    }
    if !lock.is_exclusive() {
        session.console.warning(
            "this file system has no locks, so a second run in the same directory would not be detected",
        );
    }
    let page = if rank == 0 { follow::beside(&resolved.settings, lock.root(), session) } else { Ok(None) };
    let (page, ready) = match page {
        Ok(page) => (page, Ok(())),
        Err(error) => (None, Err(error)),
    };
    let outcome = run_logged(resolved, session, objective, lock, observer, ready);
    if let Some(page) = &page {
        let steps = outcome.as_ref().map_or(0, |trained| trained.summary.steps);
        page.end(&end_of(&outcome).line(steps));
        let dir = resolved.settings.io.output_dir.as_deref().unwrap_or(Path::new("RUN_DIR"));
        session.console.notice(&format!("`omnigrpo watch {}` shows the page again", dir.display()));
    }
    outcome
}

/// Runs with the log of the run. `ready` is the result of this rank's preparation.
fn run_logged(
    resolved: &Resolved,
    session: &Session,
    objective: Objective,
    lock: RunLock,
    observer: Box<dyn Observer>,
    ready: Result<()>,
) -> Result<Trained> {
    let settings = &resolved.settings;
    let ranks = &session.ranks;
    let prepared = || {
        let (resolved, prepared) = prepare_in(lock.root(), resolved, session, objective)?;
        forecast::refuse(&resolved, session, &prepared)?;
        Ok((resolved, prepared))
    };
    // The first rank fills the caches of downloads and checks, which the others then read.
    let (resolved, prepared) = in_order(ranks, ready, prepared)?;
    connect_gpus(session, settings, session.device()?)?;
    session.starts()?;
    profile::enable(settings.log.profile);
    let trackers = follow::trackers(&resolved, lock.root(), session);
    let (signals, curves) = (session.functions.signals.clone(), Some(omnigrpo_watch::curves as Curves));
    let output = Output { lock, observer, trackers, signals, curves };
    let trained = prepared.train(output, &session.console, &session.stop)?;
    if settings.log.profile && ranks.is_first() {
        session.print(&profile::table(&profile::take(), trained.summary.steps_here))?;
    }
    Ok(trained)
}

/// Opens everything that a run needs except its model, and checks it. Without an `output_dir`, the run is only planned.
pub fn prepare(
    resolved: &Resolved,
    session: &Session,
    objective: Objective,
    output_dir: Option<&Path>,
) -> Result<Prepared> {
    let settings = &resolved.settings;
    environment(session);
    let (device, reference_device) = (session.device()?, session.reference_device()?);
    let checkpoint = session.checkpoint()?;
    remark(settings, session, device, objective)?;
    let dataset = setup::train_data(settings)?;
    let (rows, eval) = held_out(settings, session, &dataset)?;
    let corpus = setup::corpus(settings, &dataset, rows.iter().copied());
    let prompts = Arc::new(session.prompts(settings, checkpoint, true)?);
    let before = room::resident();
    let digests = (session.ranks.size() > 1).then(SharedDigests::default);
    // Only the first rank scores.
    let is_outline = !session.ranks.is_first();
    let weights = FrozenWeights { is_outline, digests: digests.clone(), ..FrozenWeights::default() };
    let rewards = setup::rewards(settings, corpus.as_ref(), Some(&prompts), (&session.functions, weights))?;
    // A smaller increase of memory cannot come from a model.
    let reward_bytes = Some(room::resident().saturating_sub(before)).filter(|&bytes| bytes > 16 << 20);
    let shuffled = match settings.rewards.temporal_order_bonus {
        true => {
            let interaction = session.interaction(settings)?;
            Some(Arc::new(setup::prompts(settings, checkpoint, (true, true), interaction)?))
        }
        false => None,
    };
    let leaves = output_dir.map_or(Ok(1), |dir| leaves(settings, &session.ranks, dir))?;
    let model = Policy::Planned(Box::new(setup::model_plan(settings, checkpoint, device)));
    let inputs = Run {
        shuffled,
        rows,
        eval,
        interaction: session.interaction(settings)?,
        corpus,
        reward_bytes: reward_bytes.unwrap_or(0),
        reward_weights: digests.map(|digests| digests.all()).unwrap_or_default(),
        reference_model: setup::reference_plan(settings, reference_device)?
            .map(|plan| Policy::Planned(Box::new(plan))),
        reference_device,
        gpu_memory: settings.model.gpu_memory,
        ..Run::new(model, prompts, dataset, rewards)
    };
    let code = session.functions.digests.iter();
    let plan = build::Plan {
        algorithm: divided(settings, session, leaves),
        optimizer: settings.optimizer.clone(),
        selection: setup::selection(settings, checkpoint.family()),
        run: run_plan(resolved, session, objective),
        check_rows: !settings.data.skip_check,
        reward_files: setup::reward_files(settings),
        media_bytes: setup::media_bytes(settings),
        settings: (&resolved.values, settings, resolved.verb),
        code: code.map(|(name, digest)| (format!("code of {name}"), digest.as_str().into())).collect(),
    };
    let run = build::run(inputs, plan, output_dir);
    Ok(run.prepare(&session.console)?)
}

/// Prints remarks on settings that have no effect, and on what files of other trainers set.
fn remark(settings: &Settings, session: &Session, device: Device, objective: Objective) -> Result<()> {
    if device == Device::Cpu && settings.optimizer.offload == Offload::Cpu {
        session.console.line("`offload_optimizer` has no effect: the model is on the CPU");
    }
    if let Some(path) = &settings.io.deepspeed {
        session.console.line(&format!("{}:", path.display()));
        for line in read_deepspeed(path, settings, device != Device::Cpu)? {
            session.console.line(&format!("  {line}"));
        }
    }
    if objective == Objective::Reinforce && settings.batch.unit == BatchUnit::Completions {
        let batch = settings.run.prompts_per_step * settings.algorithm.num_generations;
        session.console.line(&format!("a batch of {batch} counts completions, as the source"));
    }
    Ok(())
}

/// Returns the algorithm, divided over the ranks of this run or of the planned one.
fn divided(settings: &Settings, session: &Session, leaves: usize) -> Divided {
    let mut algorithm = settings.algorithm.clone();
    algorithm.split.leaves = Some(leaves);
    let (ranks, local) = match settings.io.dry_run {
        true => {
            let ranks = Ranks::planned(settings.env.processes.max(1));
            (ranks, settings.ranks.nproc_per_node.unwrap_or(1))
        }
        false => (session.ranks.clone(), session.local_ranks),
    };
    Divided::new(algorithm, ranks, local)
}

/// Returns the plan of the settings, with the contents that only the program knows.
fn run_plan(resolved: &Resolved, session: &Session, objective: Objective) -> RunPlan {
    let Settings { run, env, .. } = &resolved.settings;
    RunPlan {
        objective,
        resume: ResumePlan { repeat_complete: session.functions.repeat_complete, ..run.resume.clone() },
        records: RecordPlan {
            debug_log: env.debug_log.clone().map(DebugLog::new),
            files: vec![("config.yaml", print_config(resolved).into_bytes())],
            ..run.records.clone()
        },
        card: CardPlan { command: Some(command(resolved)), ..run.card.clone() },
        ..run.clone()
    }
}

/// Returns the rows to train on, and the evaluation on other rows, if there are any.
fn held_out(
    settings: &Settings,
    session: &Session,
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
        prompts: Arc::new(session.prompts(settings, session.checkpoint()?, false)?),
        interaction: session.interaction(settings)?,
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

/// Writes the first line of the log, about the program and the machine.
fn environment(session: &Session) {
    let threads = rayon::current_num_threads();
    session.console.line(&format!(
        "omnigrpo {} on {} thread{}, {}-{}",
        omnigrpo_observe::version(),
        threads,
        if threads == 1 { "" } else { "s" },
        std::env::consts::OS,
        std::env::consts::ARCH,
    ));
}
