//! `train` and `sft`.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use anyhow::{Context as _, Result};
use omnigrpo_data::{Dataset, split};
use omnigrpo_models::{Model, PromptBuilder};
use omnigrpo_rewards::answer_reward;
use omnigrpo_rollout::SamplingParams;
use omnigrpo_train::{
    AdamWConfig, Algorithm, EvalPlan, EvalWhen, Objective, ResumeFrom, RunPlan, RunSummary, SaveWhen,
    ScheduleKind, SkipPolicy, TrainSetup,
};
use serde_json::{Map, Value};

use super::{Context, data, print, profile, setup};
use crate::deepspeed;
use crate::explain::{Problem, print_config};
use crate::settings::{EvalStrategy, LrScheduler, MultiObjective, Resume, SaveStrategy, Settings};
use crate::values::Resolved;

/// GRPO.
pub fn train(resolved: &Resolved, context: &Context) -> Result<()> {
    let summary = run(resolved, context, Objective::Reinforce)?;
    finish(&summary)
}

/// Supervised fine-tuning.
pub fn sft(resolved: &Resolved, context: &Context) -> Result<()> {
    let summary = run(resolved, context, Objective::Imitate)?;
    finish(&summary)
}

fn finish(summary: &RunSummary) -> Result<()> {
    print(&format!("{}", summary.report))?;
    if summary.interrupted {
        return Err(Problem::failure("the run was stopped before its end")
            .help("start it again to go on from the checkpoint that was just written")
            .into());
    }
    Ok(())
}

/// Builds everything from the settings and trains. What is shown goes to the run's log as well, errors included.
pub fn run(resolved: &Resolved, context: &Context, objective: Objective) -> Result<RunSummary> {
    let Some(output_dir) = resolved.settings.run.output_dir.clone() else {
        return Err(Problem::usage("no run directory is given").expected("`--output_dir DIR`").into());
    };
    let unwritable = |e: String| {
        Problem::failure("the run directory cannot be written")
            .at(output_dir.display().to_string())
            .got(e)
            .expected("a directory that can be written to, or a name where one can be made")
            .help("choose another --output_dir")
    };
    std::fs::create_dir_all(&output_dir).map_err(|e| unwritable(e.to_string()))?;
    if let Some(path) = &resolved.settings.run.log_file {
        context.console.log_to(path).map_err(|e| unwritable(e.to_string()))?;
    }
    for note in &resolved.notes {
        context.console.log(note);
    }
    run_logged(resolved, context, objective, output_dir)
}

fn run_logged(
    resolved: &Resolved,
    context: &Context,
    objective: Objective,
    output_dir: PathBuf,
) -> Result<RunSummary> {
    let settings = &resolved.settings;
    environment(context);
    let dir = setup::checkpoint_dir(settings)?;
    if let Some(path) = &settings.run.deepspeed {
        context.console.line(&format!("{}:", path.display()));
        for line in deepspeed::read(path, settings)? {
            context.console.line(&format!("  {line}"));
        }
    }
    if std::fs::canonicalize(&output_dir).ok() == std::fs::canonicalize(&dir).ok() {
        return Err(Problem::usage("the run directory is the model's directory")
            .got(output_dir.display().to_string())
            .expected(
                "a directory of its own: the trained model is written there and must not replace the start",
            )
            .at("--output_dir")
            .into());
    }
    let prompts = Arc::new(setup::prompts(settings, &dir, true)?);
    let dataset = setup::train_data(settings)?;
    let held_out = setup::eval_data(settings)?;
    let ratio = settings.data.val_split_ratio;
    let (rows, eval_rows) = match &held_out {
        Some(held_out) => ((0..dataset.len()).collect(), (0..held_out.len()).collect()),
        None if ratio > 0.0 => split(dataset.len(), ratio, settings.run.data_seed),
        None => ((0..dataset.len()).collect::<Vec<u64>>(), Vec::new()),
    };
    let corpus = setup::Corpus::of(settings, &dataset, rows.iter().copied());
    let rewards = setup::rewards(settings, &corpus)?;
    let shuffled = if settings.rewards.temporal_order_bonus {
        if answer_reward(&rewards).is_none() {
            return Err(Problem::usage("no reward looks at answers, so none can need the order of frames")
                .at("--temporal_order_bonus")
                .got(format!(
                    "`reward_funcs` {}",
                    omnigrpo_rewards::redacted(&settings.rewards.reward_funcs.join(", "))
                ))
                .expected("`accuracy` or one of its rules among them")
                .into());
        }
        Some(Arc::new(setup::shuffled_prompts(settings, &dir)?))
    } else {
        None
    };

    let eval_prompts = match eval_rows.is_empty() {
        true => None,
        false => Some(Arc::new(setup::prompts(settings, &dir, false)?)),
    };
    let scored = objective == Objective::Reinforce && settings.rollout.replay.is_none();
    let bad_rows = if settings.data.skip_data_check {
        Vec::new()
    } else {
        let cache = output_dir.join(".cache");
        // Rows that are split off are among those of `dataset`.
        if let (Some(held_out), Some(prompts)) = (&held_out, &eval_prompts) {
            data::check_held_out(settings, context, held_out, prompts, &cache)?;
        }
        let asked = scored.then_some(&rewards);
        data::check_before(settings, context, &dataset, &prompts, &cache, asked)?
    };
    let bad: HashSet<u64> = bad_rows.iter().map(|(row, ..)| *row).collect();
    if scored {
        let usable = rows.iter().copied().filter(|row| !bad.contains(row));
        setup::probe_rewards(&rewards, &dataset, usable, &prompts)?;
    }
    let eval_dataset = held_out.unwrap_or_else(|| Arc::clone(&dataset));
    if let Some(problem) = data::ask_before_evaluation(context, &eval_dataset, &eval_rows, &rewards) {
        context.console.line(&format!("in evaluations: {problem}"));
    }
    if !scored {
        setup::probe_rewards(&rewards, &eval_dataset, eval_rows.iter().copied(), &prompts)?;
    }
    let eval = eval_prompts.map(|prompts| eval_plan(settings, prompts, eval_dataset, eval_rows));

    let model = setup::trained_model(settings)?;
    let selection = setup::selection(settings, model.family().as_ref());
    let usable = rows.iter().filter(|row| !bad.contains(row)).count();
    if let Some(name) = &settings.log.run_name {
        context.console.line(&format!("run {name}"));
    }
    describe(context, &model, &dataset, usable, &prompts);
    context.console.line(&step_takes(settings, objective));
    install_signals(context)?;
    corpus.save(&output_dir)?;
    let run = run_plan(resolved, objective, output_dir, &model, &dataset, bad_rows);
    let setup = TrainSetup {
        model,
        prompts,
        shuffled,
        dataset,
        rows,
        eval,
        rewards,
        algorithm: algorithm(settings),
        optimizer: optimizer(settings),
        selection,
        run,
    };
    profile::enable(settings.log.profile);
    let summary = omnigrpo_train::train(setup, &context.console, &context.stop)?;
    if settings.log.profile {
        print(&profile::table(&profile::take(), summary.steps_here))?;
    }
    Ok(summary)
}

/// The plan of an evaluation: greedy for one completion a row, sampled as in training for more.
fn eval_plan(
    settings: &Settings,
    prompts: Arc<PromptBuilder>,
    dataset: Arc<Dataset>,
    rows: Vec<u64>,
) -> EvalPlan {
    let num_generations = settings.eval.num_generations_eval;
    let mut sampling = setup::sampling(settings);
    if num_generations == 1 {
        sampling = SamplingParams {
            max_completion_length: sampling.max_completion_length,
            temperature: 0.0,
            seed: sampling.seed,
            ..SamplingParams::default()
        };
    }
    EvalPlan {
        prompts,
        dataset,
        rows,
        num_generations,
        sampling,
        batch_rows: MAX_LIVE,
        max_live: MAX_LIVE,
        category: settings.eval.category_column.clone(),
        measures: setup::measures(settings),
    }
}

/// Completions decoded at once: enough to share a pass over the weights, small enough for the caches of long prompts.
pub const MAX_LIVE: usize = 64;

/// Rows of a packed stream where nothing is given: room for several short groups, or one of a long prompt.
const STREAM_ROWS: usize = 4096;

pub(super) fn algorithm(settings: &Settings) -> Algorithm {
    Algorithm {
        num_generations: settings.rollout.num_generations,
        sampling: setup::sampling(settings),
        max_live: MAX_LIVE,
        advantage: settings.loss.advantage,
        alpha: settings.loss.alpha,
        normalize_then_sum: settings.rewards.multi_objective_aggregation == MultiObjective::NormalizeThenSum,
        loss: settings.loss.plan,
        max_stream_tokens: settings.model.max_stream_tokens.unwrap_or(STREAM_ROWS),
        recompute: settings.model.gradient_checkpointing,
        prompts_per_micro_batch: settings.optim.per_device_train_batch_size,
        seed: settings.run.seed,
    }
}

fn optimizer(settings: &Settings) -> AdamWConfig {
    let o = &settings.optim;
    AdamWConfig {
        learning_rate: o.learning_rate,
        projector_lr: Some(o.mm_projector_lr),
        tower_lr: Some(o.vision_tower_lr),
        beta1: o.adam_beta1,
        beta2: o.adam_beta2,
        epsilon: o.adam_epsilon,
        weight_decay: o.weight_decay,
        max_grad_norm: o.max_grad_norm,
        pure_bf16: settings.model.pure_bf16,
    }
}

fn run_plan(
    resolved: &Resolved,
    objective: Objective,
    output_dir: PathBuf,
    model: &Model,
    dataset: &Dataset,
    bad_rows: Vec<(u64, String, String)>,
) -> RunPlan {
    let settings = &resolved.settings;
    let (run, optim, eval) = (&settings.run, &settings.optim, &settings.eval);
    RunPlan {
        objective,
        output_dir,
        max_steps: run.max_steps,
        num_epochs: run.num_train_epochs,
        prompts_per_step: optim.per_device_train_batch_size * optim.gradient_accumulation_steps,
        num_iterations: settings.loss.num_iterations,
        schedule: match optim.lr_scheduler_type {
            LrScheduler::Constant => ScheduleKind::Constant,
            LrScheduler::ConstantWithWarmup => ScheduleKind::ConstantWithWarmup,
            LrScheduler::Linear => ScheduleKind::Linear,
            LrScheduler::Cosine => ScheduleKind::Cosine,
        },
        warmup_ratio: optim.warmup_ratio,
        warmup_steps: optim.warmup_steps,
        save: match run.save_strategy {
            SaveStrategy::No => SaveWhen::Never,
            SaveStrategy::Steps => SaveWhen::Steps(run.save_steps),
            SaveStrategy::Epoch => SaveWhen::Epoch,
            SaveStrategy::Best => SaveWhen::Best,
        },
        save_limit: run.save_total_limit,
        save_only_model: run.save_only_model,
        resume: match &run.resume_from_checkpoint {
            Resume::Never => ResumeFrom::Start,
            Resume::Auto => ResumeFrom::Newest,
            Resume::From(path) => ResumeFrom::Path(path.clone()),
        },
        eval: match eval.eval_strategy {
            EvalStrategy::No => EvalWhen::Never,
            EvalStrategy::Steps => EvalWhen::Steps(eval.eval_steps.unwrap_or(run.save_steps)),
            EvalStrategy::Epoch => EvalWhen::Epoch,
        },
        eval_on_start: eval.eval_on_start,
        best_metric: eval.metric_for_best_model.clone(),
        logging_steps: settings.log.logging_steps,
        grpo_logging_steps: settings.log.grpo_logging_steps,
        log_completions: settings.log.log_completions,
        run_name: settings.log.run_name.clone(),
        replay: settings.rollout.replay.is_some(),
        skip: SkipPolicy { strict: settings.data.strict_media, max_share: settings.data.max_skipped },
        bad_rows,
        data_seed: run.data_seed,
        fingerprint: fingerprint(resolved, model, dataset),
        config_yaml: print_config(resolved),
    }
}

/// Settings that may differ between a checkpoint and the run that resumes it. A longer run goes on with a learning rate
/// that follows its own length.
const FREE_TO_CHANGE: &[&str] = &[
    "config",
    "preset",
    "print_config",
    "threads",
    "output_dir",
    "exp_name",
    "deepspeed",
    "resume_from_checkpoint",
    "max_steps",
    "num_train_epochs",
    "save_strategy",
    "save_steps",
    "save_total_limit",
    "save_only_model",
    "logging_steps",
    "grpo_logging_steps",
    "gradient_checkpointing",
    "log_completions",
    "profile",
    "eval_strategy",
    "eval_steps",
    "eval_on_start",
    "eval_file",
    "eval_dataset_use",
    "num_generations_eval",
    "metric_for_best_model",
    "category_column",
    "accuracy_threshold",
    "label_set",
    "run_name",
    "skip_data_check",
    "max_skipped",
    "strict_media",
    "reward_timeout_secs",
    "reward_workers",
    "allow_urls",
    "reward_python",
];

/// Every other setting, the base model's directory and the dataset's shape.
fn fingerprint(resolved: &Resolved, model: &Model, dataset: &Dataset) -> Map<String, Value> {
    let mut out = Map::new();
    for (name, value) in resolved.values.plain() {
        if !FREE_TO_CHANGE.contains(&name) {
            out.insert(name.to_owned(), value);
        }
    }
    out.insert("base_model".into(), model.dir().display().to_string().into());
    out.insert("dataset".into(), dataset.fingerprint().to_string().into());
    out
}

/// First in the log: the program and the machine.
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

/// Second: the model and the data.
fn describe(context: &Context, model: &Model, dataset: &Dataset, rows: usize, prompts: &PromptBuilder) {
    let console = &context.console;
    console.line(&format!("model {} ({})", model.dir().display(), prompts.family().name()));
    console.line(&format!("training on {rows} of {} rows", dataset.len()));
}

fn step_takes(settings: &Settings, objective: Objective) -> String {
    let prompts = settings.optim.per_device_train_batch_size * settings.optim.gradient_accumulation_steps;
    let plural = if prompts == 1 { "" } else { "s" };
    match objective {
        Objective::Imitate => format!("a step takes {prompts} answer{plural}"),
        Objective::Reinforce => {
            format!(
                "a step takes {prompts} prompt{plural}, {} completions each",
                settings.rollout.num_generations
            )
        }
    }
}

/// Ctrl-C and SIGTERM end the run after the current step, with a checkpoint, and are answered at once; a second one ends
/// it at once.
fn install_signals(context: &Context) -> Result<()> {
    use signal_hook::consts::{SIGINT, SIGTERM};
    let unable = "signals cannot be handled";
    context.stop.store(false, Ordering::Relaxed);
    // What is registered first acts first: the second signal finds the flag set.
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register_conditional_shutdown(signal, 130, Arc::clone(&context.stop))
            .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&context.stop)))
            .context(unable)?;
    }
    let mut signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM]).context(unable)?;
    let console = context.console.clone();
    // It waits until the process ends.
    std::thread::spawn(move || {
        if signals.forever().next().is_some() {
            let what = match console.activity().step() {
                Some(step) => format!("finishing step {step}, then saving"),
                None => "finishing what is under way".to_owned(),
            };
            console.line(&format!("{what}; press Ctrl-C again to stop now"));
        }
    });
    Ok(())
}
