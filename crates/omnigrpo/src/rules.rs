//! Settings that contradict each other, and settings without effect in a run.

use omnigrpo_grpo::{AdvantageKind, Kl, Surrogate};

use crate::explain::nearest;
use crate::flags::Verb::{self, Demo, Eval, Export, Generate, Sft, Train, Watch};
use crate::problem::Problem;
use crate::settings::{
    EvalStrategy, FrameSampling, LrScheduler, MultiObjective, Resume, SaveStrategy, Settings, TorchDtype,
    Tracker,
};
use crate::values::Value;

/// A setting and the case in which nothing reads it.
///
/// Given by flag or file with a value other than its default it is an error then: the user expects something that
/// will not happen. From a preset it is dropped.
pub struct Idle {
    /// The setting.
    pub flag: &'static str,
    /// The verbs it concerns.
    pub verbs: &'static [Verb],
    /// Why it has no effect, if it has none.
    pub when: fn(&Settings) -> Option<&'static str>,
    /// Another setting overrides it in `transformers`, whose scripts give both: a note instead of an error.
    pub overridden: bool,
}

const fn idle(flag: &'static str, when: fn(&Settings) -> Option<&'static str>) -> Idle {
    idle_in(Verb::ALL, flag, when)
}

const fn overridden(flag: &'static str, when: fn(&Settings) -> Option<&'static str>) -> Idle {
    Idle { overridden: true, ..idle(flag, when) }
}

const fn idle_in(
    verbs: &'static [Verb],
    flag: &'static str,
    when: fn(&Settings) -> Option<&'static str>,
) -> Idle {
    Idle { flag, verbs, when, overridden: false }
}

/// Two settings that say the same thing in two ways, and when they do. Where one comes from a stronger source, the other
/// goes back to its default: a preset must not forbid the other way.
pub type Rivals = (&'static str, &'static str, fn(&Value, &Value) -> bool);

/// Every such pair.
pub const RIVALS: &[Rivals] = &[
    ("tune_mm_vision", "freeze_vision_modules", |tune, freeze| tune == freeze),
    ("advantage", "scale_rewards", |_, _| true),
    ("output_dir", "exp_name", |_, _| true),
    ("max_steps", "num_train_epochs", |steps, _| *steps != Value::Int(-1)),
    ("warmup_steps", "warmup_ratio", |steps, _| *steps != Value::Int(0)),
    ("nframes", "fps", |_, _| true),
];

fn no_clip(s: &Settings) -> Option<&'static str> {
    match s.loss.plan.surrogate {
        Surrogate::Clip { .. } | Surrogate::Cispo { .. } => None,
        Surrogate::Ratio => Some("the recipe of `loss_type` does not clip the ratio"),
        Surrogate::Sapo { .. } => Some("the recipe of `loss_type` has a smooth gate and no clip"),
        Surrogate::LogProb => Some("the recipe of `loss_type` has no ratio and no clip"),
    }
}

fn no_lower_clip(s: &Settings) -> Option<&'static str> {
    let capped = matches!(s.loss.plan.surrogate, Surrogate::Cispo { .. });
    no_clip(s).or_else(|| capped.then_some("the recipe of `loss_type` caps the ratio from above only"))
}

fn no_kl(s: &Settings) -> Option<&'static str> {
    (s.loss.plan.beta == 0.0).then_some("`beta` is 0, so there is no KL term")
}

fn greedy(s: &Settings) -> Option<&'static str> {
    (s.rollout.temperature == 0.0).then_some("`temperature` 0 takes the most likely token")
}

fn not_sampled(s: &Settings) -> Option<&'static str> {
    s.rollout.replay.as_ref().map(|_| "with `replay` nothing is sampled")
}

fn no_eval_rows(s: &Settings) -> Option<&'static str> {
    (!s.data.has_eval_rows())
        .then_some("there is no evaluation data: give `eval_file`, `eval_dataset_use` or `val_split_ratio`")
}

/// `sft`, and `train` with recorded rewards, score completions in evaluations only.
fn only_evaluated(s: &Settings) -> Option<&'static str> {
    no_eval_rows(s).map(|_| "completions are scored in evaluations only, and there is no evaluation data")
}

fn replayed(s: &Settings) -> Option<&'static str> {
    s.rollout.replay.as_ref().and_then(|_| only_evaluated(s))
}

fn no_reward(s: &Settings, name: &str) -> bool {
    !s.rewards.reward_funcs.iter().any(|f| f == name)
}

fn no_clip_score(s: &Settings) -> Option<&'static str> {
    let none = no_reward(s, "explanation").then_some("`reward_funcs` has no explanation");
    none.or_else(|| (s.rewards.explanation_clip_weight == 0.0).then_some("`explanation_clip_weight` is 0"))
}

fn no_bertscore(s: &Settings) -> Option<&'static str> {
    no_reward(s, "bertscore").then_some("`reward_funcs` has no bertscore")
}

/// Every such setting.
pub const IDLE: &[Idle] = &[
    idle("image", |s| s.io.prompt.is_none().then_some("there is no `prompt`")),
    idle("video", |s| s.io.prompt.is_none().then_some("there is no `prompt`")),
    idle("audio", |s| s.io.prompt.is_none().then_some("there is no `prompt`")),
    idle("input", |s| s.io.prompt.is_some().then_some("`prompt` asks a single question")),
    idle("pure_bf16", |s| (s.model.torch_dtype == TorchDtype::Float32).then_some("`torch_dtype` is float32")),
    idle("dataset_use", |s| {
        (!s.data.train_file.is_empty() || !s.data.data_file_paths.is_empty())
            .then_some("the training data are given as files")
    }),
    idle("data_file_paths", |s| {
        (!s.data.train_file.is_empty()).then_some("`train_file` gives the training data")
    }),
    idle("dataset_registry", |s| {
        (s.data.dataset_use.is_empty() && s.data.eval_dataset_use.is_empty())
            .then_some("neither `dataset_use` nor `eval_dataset_use` names a dataset")
    }),
    idle("eval_dataset_use", |s| {
        (!s.data.eval_file.is_empty()).then_some("`eval_file` gives the evaluation data")
    }),
    idle("val_split_ratio", |s| {
        (!s.data.eval_file.is_empty() || !s.data.eval_dataset_use.is_empty())
            .then_some("the evaluation data are given")
    }),
    idle("max_skipped", |s| s.data.strict_media.then_some("`strict_media` stops at the first bad row")),
    idle("fps", |s| {
        (s.media.frame_sampling != FrameSampling::QwenVlUtils)
            .then_some("only `frame_sampling qwen_vl_utils` reads it")
            .or_else(|| s.media.nframes.map(|_| "`nframes` gives the number of frames"))
    }),
    idle("nframes", |s| {
        (s.media.frame_sampling != FrameSampling::QwenVlUtils)
            .then_some("only `frame_sampling qwen_vl_utils` reads it")
    }),
    idle("base_interval", |s| {
        (s.media.frame_sampling == FrameSampling::QwenVlUtils).then_some("`frame_sampling` is qwen_vl_utils")
    }),
    idle("total_pixels", |s| {
        (s.media.frame_sampling != FrameSampling::QwenVlUtils)
            .then_some("only `frame_sampling qwen_vl_utils` reads it")
    }),
    idle("format_reward_weight", |s| no_reward(s, "format").then_some("`reward_funcs` has no format")),
    idle("accuracy_reward_weight", |s| no_reward(s, "accuracy").then_some("`reward_funcs` has no accuracy")),
    idle("format_mode", |s| no_reward(s, "format").then_some("`reward_funcs` has no format")),
    idle("accuracy_mode", |s| {
        let none = ["accuracy", "length", "cosine"].iter().all(|name| no_reward(s, name));
        none.then_some("`reward_funcs` has no accuracy, and no length or cosine, which go by it")
    }),
    idle("clip_model", no_clip_score),
    idle("clip_text_model", |s| {
        no_clip_score(s).or_else(|| s.rewards.clip_model.is_none().then_some("there is no `clip_model`"))
    }),
    idle("explanation_clip_weight", |s| {
        no_reward(s, "explanation").then_some("`reward_funcs` has no explanation")
    }),
    idle("bertscore_model", no_bertscore),
    idle("bertscore_layer", no_bertscore),
    idle("bertscore_idf", no_bertscore),
    idle("bertscore_baseline", no_bertscore),
    idle("prometheus_port", |s| {
        (!reports_to(s, Tracker::Prometheus)).then_some("`report_to` has no prometheus")
    }),
    idle_in(&[Watch], "dashboard_port", |s| s.log.tui.then_some("`tui` shows no page")),
    idle_in(&[Train, Sft, Demo], "dashboard_port", |s| {
        (!s.log.dashboard).then_some("`dashboard` is off, so there is no page")
    }),
    idle("top_p", |s| greedy(s).or_else(|| not_sampled(s))),
    idle("top_k", |s| greedy(s).or_else(|| not_sampled(s))),
    idle("min_p", |s| greedy(s).or_else(|| not_sampled(s))),
    idle("repetition_penalty", not_sampled),
    idle("min_completion_length", not_sampled),
    idle("stop_strings", not_sampled),
    idle("epsilon", no_lower_clip),
    idle("epsilon_high", no_clip),
    idle("delta", no_lower_clip),
    idle("kl", no_kl),
    idle("use_bias_correction_kl", |s| {
        no_kl(s).or_else(|| (s.loss.plan.kl == Kl::K1).then_some("`kl k1_seq` has no ratio to correct"))
    }),
    idle("advantage", each_reward_alone),
    idle("scale_rewards", each_reward_alone),
    idle("importance_sampling_level", |s| {
        matches!(s.loss.plan.surrogate, Surrogate::LogProb)
            .then_some("the recipe of `loss_type` has no ratio")
    }),
    overridden("warmup_ratio", |s| (s.optim.warmup_steps > 0).then_some("`warmup_steps` overrides it")),
    idle("warmup_ratio", flat),
    idle("warmup_steps", flat),
    idle("mm_projector_lr", |s| {
        (!s.optim.tune_mm_mlp && llm_adapters(s)).then_some("nothing of the projector is trained")
    }),
    idle("vision_tower_lr", |s| {
        (!s.optim.tune_mm_vision && llm_adapters(s)).then_some("nothing of the vision tower is trained")
    }),
    idle("trainable_patterns", |s| {
        let whole = s.optim.tune_mm_llm || s.optim.tune_mm_mlp || s.optim.tune_mm_vision;
        (!whole)
            .then_some("no part is trained whole: turn on `tune_mm_llm`, `tune_mm_mlp` or `tune_mm_vision`")
    }),
    idle("lora_r", no_new_adapter),
    idle("lora_alpha", no_new_adapter),
    idle("lora_dropout", no_new_adapter),
    idle("lora_target_modules", no_new_adapter),
    idle("use_rslora", no_new_adapter),
    overridden("num_train_epochs", |s| s.run.max_steps.map(|_| "`max_steps` overrides it")),
    idle("save_steps", |s| {
        (s.run.save_strategy != SaveStrategy::Steps).then_some("`save_strategy` is not steps")
    }),
    idle("save_total_limit", never_saves),
    idle("save_only_model", never_saves),
    idle("allow_changed_settings", |s| {
        (s.run.resume_from_checkpoint == Resume::Never).then_some("`resume_from_checkpoint` is never")
    }),
    idle("eval_steps", |s| {
        no_eval_rows(s).or_else(|| {
            (s.eval.eval_strategy != EvalStrategy::Steps).then_some("`eval_strategy` is not steps")
        })
    }),
    idle("eval_on_start", no_eval_rows),
    idle("eval_strategy", |s| no_eval_rows(s).filter(|_| s.eval.eval_strategy != EvalStrategy::No)),
    idle("num_generations_eval", no_eval_rows),
    idle("metric_for_best_model", no_eval_rows),
    idle_in(&[Train, Sft], "category_column", no_eval_rows),
    idle_in(&[Train, Sft], "accuracy_threshold", no_eval_rows),
    idle_in(&[Train, Sft], "label_set", no_eval_rows),
    idle_in(&[Generate], "batch_size", |s| s.io.prompt.is_some().then_some("`prompt` is one question")),
    idle_in(&[Generate], "output", |s| {
        s.io.prompt.is_some().then_some("the answer to `prompt` goes to the terminal")
    }),
    idle_in(&[Train], "reward_funcs", replayed),
    idle_in(&[Sft], "reward_funcs", only_evaluated),
    idle_in(&[Train], "reward_weights", replayed),
    idle_in(&[Sft], "reward_weights", only_evaluated),
    idle_in(&[Train], "format_mode", replayed),
    idle_in(&[Sft], "format_mode", only_evaluated),
    idle_in(&[Train], "accuracy_mode", replayed),
    idle_in(&[Sft], "accuracy_mode", only_evaluated),
    idle_in(&[Train], "answer_policy", replayed),
    idle_in(&[Sft], "answer_policy", only_evaluated),
    idle("temporal_order_bonus", not_sampled),
    idle_in(&[Train], "compat", replayed),
    idle_in(&[Sft], "compat", only_evaluated),
    idle_in(&[Train], "reward_timeout_secs", replayed),
    idle_in(&[Sft], "reward_timeout_secs", only_evaluated),
    idle_in(&[Train], "reward_workers", replayed),
    idle_in(&[Sft], "reward_workers", only_evaluated),
    idle("judge_prompt", |s| {
        let none = !s.rewards.reward_funcs.iter().any(|spec| spec.contains("judge:http"));
        none.then_some("`reward_funcs` has no `judge:…`")
    }),
    idle("reward_python", |s| {
        let none = !s.rewards.reward_funcs.iter().any(|spec| spec.contains(".py:"));
        (none && !reports_to(s, Tracker::Wandb))
            .then_some("`reward_funcs` has no `FILE.py:FUNCTION`, and `report_to` no wandb")
    }),
    idle_in(&[Train], "judge_model", replayed),
    idle_in(&[Sft], "judge_model", only_evaluated),
    idle_in(&[Train], "clip_model", replayed),
    idle_in(&[Sft], "clip_model", only_evaluated),
    idle_in(&[Train], "bertscore_model", replayed),
    idle_in(&[Sft], "bertscore_model", only_evaluated),
];

/// Whether a tracker is told the numbers.
fn reports_to(s: &Settings, tracker: Tracker) -> bool {
    s.log.report_to.contains(&tracker) || s.log.report_to.contains(&Tracker::All)
}

fn never_saves(s: &Settings) -> Option<&'static str> {
    (s.run.save_strategy == SaveStrategy::No && s.run.save_minutes.is_none())
        .then_some("`save_strategy` is no")
}

fn no_new_adapter(s: &Settings) -> Option<&'static str> {
    if s.model.adapter_name_or_path.is_some() {
        return Some("the adapter of `adapter_name_or_path` has its own");
    }
    (!s.optim.use_peft).then_some("`use_peft` is false")
}

/// Whether no adapter can be outside of the language model.
fn llm_adapters(s: &Settings) -> bool {
    !s.optim.use_peft
        || s.model.adapter_name_or_path.is_none() && s.optim.lora_target_modules == ["all-linear"]
}

fn each_reward_alone(s: &Settings) -> Option<&'static str> {
    (s.rewards.multi_objective_aggregation == MultiObjective::NormalizeThenSum)
        .then_some("`multi_objective_aggregation normalize_then_sum` normalises each reward by itself")
}

fn flat(s: &Settings) -> Option<&'static str> {
    (s.optim.lr_scheduler_type == LrScheduler::Constant)
        .then_some("`lr_scheduler_type` is constant; use constant_with_warmup")
}

/// Whether every advantage is 0, since no completion has another of its question beside it.
fn lone_completions(s: &Settings) -> bool {
    s.rollout.num_generations == 1
        && (s.loss.advantage != AdvantageKind::GroupStdClamped
            || s.rewards.multi_objective_aggregation == MultiObjective::NormalizeThenSum)
}

/// What can be run and is hardly meant.
pub fn doubts(verb: Verb, s: &Settings) -> Option<String> {
    if !matches!(verb, Train | Demo) || s.rollout.num_generations != 1 {
        return None;
    }
    let advice = "`--num_generations 8` is the default";
    Some(if lone_completions(s) {
        let rest = match (s.loss.plan.beta != 0.0, s.loss.plan.entropy_coef != 0.0) {
            (true, false) => "the KL term",
            (false, _) => "the entropy term",
            (true, true) => "the KL and entropy terms",
        };
        format!(
            "`num_generations` 1: a completion is compared with the others of its question, and there are none; every \
             advantage is 0, and only {rest} is trained on. {advice}"
        )
    } else {
        format!(
            "`num_generations` 1: no question has two completions to compare, so `advantage` group_std_clamped compares \
             each with those of the other questions of its step. {advice}"
        )
    })
}

/// A contradiction between settings.
struct Rule {
    /// The verbs it concerns.
    verbs: &'static [Verb],
    /// What is wrong; nothing where the settings agree.
    check: fn(&Settings) -> Vec<Problem>,
}

const fn rule(check: fn(&Settings) -> Vec<Problem>) -> Rule {
    rule_in(Verb::ALL, check)
}

const fn rule_in(verbs: &'static [Verb], check: fn(&Settings) -> Vec<Problem>) -> Rule {
    Rule { verbs, check }
}

fn when(wrong: bool, problem: impl FnOnce() -> Problem) -> Vec<Problem> {
    wrong.then(problem).into_iter().collect()
}

/// Every contradiction, in the order they are told.
const RULES: &[Rule] = &[
    rule_in(&[Train, Demo], |s| {
        when(lone_completions(s) && s.loss.plan.beta == 0.0 && s.loss.plan.entropy_coef == 0.0, || {
            Problem::usage(
                "a group of one completion has nothing to compare with, and nothing else is trained on",
            )
            .got("`num_generations` 1 and `beta` 0")
            .expected("`--num_generations` 2 or more")
            .help("8 is the default")
        })
    }),
    rule_in(&[Train, Demo], |s| {
        when(s.rollout.temperature == 0.0 && s.rollout.replay.is_none(), || {
            Problem::usage("at temperature 0 all completions of a group are equal, so nothing is learnt")
                .got("`temperature` 0")
                .expected("`--temperature` above 0")
        })
    }),
    rule_in(&[Eval, Generate], |s| {
        when(s.rollout.num_generations > 1 && s.rollout.temperature == 0.0, || {
            Problem::usage("at temperature 0 all completions of a prompt are equal")
                .got(format!("`num_generations` {} and `temperature` 0", s.rollout.num_generations))
                .expected("one completion, or `--temperature` above 0")
        })
    }),
    rule(|s| {
        let (min, max) = (s.rollout.min_completion_length, s.rollout.max_completion_length);
        when(min > max, || {
            Problem::usage("the shortest completion is longer than the longest")
                .got(format!("`min_completion_length` {min}, `max_completion_length` {max}"))
                .expected("the minimum at most the maximum")
        })
    }),
    rule(|s| {
        when(s.rewards.reward_funcs.is_empty(), || {
            Problem::usage("no reward")
                .got("an empty `reward_funcs`")
                .expected("at least one; `rewards list` shows them")
        })
    }),
    rule(|s| {
        let (weights, rewards) = (&s.rewards.reward_weights, &s.rewards.reward_funcs);
        when(weights.len() != rewards.len(), || {
            Problem::usage("`reward_weights` and `reward_funcs` differ in number")
                .got(format!(
                    "{} weights for {} rewards ({})",
                    weights.len(),
                    rewards.len(),
                    rewards.join(", ")
                ))
                .expected("one weight per reward, in the same order")
        })
    }),
    rule(wrong_loss),
    rule(|s| unknown_rewards(&s.rewards.reward_funcs)),
    rule(|s| {
        let (min, max) = (s.media.video_min_frames, s.media.video_max_frames);
        when(min > max, || {
            Problem::usage("the fewest frames are more than the most")
                .got(format!("`video_min_frames` {min}, `video_max_frames` {max}"))
                .expected("the minimum at most the maximum")
        })
    }),
    rule(|s| crossed(["min_pixels", "max_pixels"], s.media.min_pixels, s.media.max_pixels)),
    rule(|s| {
        let names = ["video_min_frame_pixels", "video_max_frame_pixels"];
        crossed(names, s.media.video_min_frame_pixels, s.media.video_max_frame_pixels)
    }),
    rule(|s| {
        let (files, folders) = (s.data.data_file_paths.len(), s.data.image_folders.len());
        when(files != folders && files > 0, || {
            Problem::usage("`data_file_paths` and `image_folders` differ in number")
                .got(format!("{files} files and {folders} folders"))
                .expected("one image folder per file, in the same order")
                .help("`--train_file` takes any number of folders")
        })
    }),
    rule_in(&[Export], |s| {
        when(!s.model.merge && s.model.layout.is_none(), || {
            Problem::usage("nothing to change")
                .got("neither an adapter nor another form")
                .expected("`--adapter_name_or_path DIR --merge` or `--layout hf`")
        })
    }),
    rule_in(&[Export], |s| {
        when(s.model.merge && s.model.adapter_name_or_path.is_none(), || {
            Problem::usage("`merge` without an adapter").expected("`--adapter_name_or_path DIR`")
        })
    }),
    rule_in(&[Export], |s| {
        when(!s.model.merge && s.model.adapter_name_or_path.is_some(), || {
            Problem::usage("an adapter is exported merged or not at all").expected("`--merge`")
        })
    }),
    rule(|s| {
        when(s.model.load_in_8bit && s.model.load_in_4bit, || {
            Problem::usage("weights can not be held in 8 and in 4 bits")
                .got("`load_in_8bit` and `load_in_4bit` both true")
                .expected("one of them")
        })
    }),
    rule_in(&[Train, Sft], |s| {
        when((s.model.load_in_8bit || s.model.load_in_4bit) && !s.optim.use_peft, || {
            Problem::usage("quantised weights can not be trained")
                .got("`load_in_8bit` or `load_in_4bit` without adapters")
                .expected("`--use_peft`")
                .help("without it, leave the weights in the checkpoint's precision")
        })
    }),
    rule(|s| {
        let o = &s.optim;
        let some = o.tune_mm_llm || o.tune_mm_mlp || o.tune_mm_vision || o.tune_bert || o.use_peft;
        when(!some, || {
            Problem::usage("nothing to train")
                .got("`tune_mm_llm`, `tune_mm_mlp`, `tune_mm_vision` and `tune_bert` all false")
                .expected("at least one of them true")
        })
    }),
    rule(|s| {
        when(s.optim.freeze_vision_modules && s.optim.tune_mm_vision, || {
            Problem::usage("the vision tower can not be both frozen and trained")
                .got("`freeze_vision_modules` and `tune_mm_vision` both true")
                .expected("one of them")
        })
    }),
    rule(|s| {
        when(s.eval.eval_strategy == EvalStrategy::Steps && s.eval.eval_steps.is_none(), || {
            Problem::usage("`eval_strategy steps` without a number of steps").expected("`--eval_steps N`")
        })
    }),
    rule(|s| {
        when(s.run.save_strategy == SaveStrategy::Best && s.eval.eval_strategy == EvalStrategy::No, || {
            Problem::usage("`save_strategy best` needs evaluations to compare")
                .expected("evaluation data and `--eval_steps N` or `--eval_strategy epoch`")
        })
    }),
];

/// What cannot be run at all: every contradiction.
pub fn check(verb: Verb, s: &Settings) -> Vec<Problem> {
    RULES.iter().filter(|rule| rule.verbs.contains(&verb)).flat_map(|rule| (rule.check)(s)).collect()
}

fn wrong_loss(s: &Settings) -> Vec<Problem> {
    let problem = |error| match error {
        omnigrpo_grpo::Error::Setting { setting, value, expected } => {
            Problem::usage(format!("wrong value for `{setting}`")).got(value.to_string()).expected(expected)
        }
        other => Problem::usage(other.to_string()),
    };
    s.loss.plan.validate().err().map(problem).into_iter().collect()
}

/// A lower bound above its upper bound.
fn crossed([low, high]: [&str; 2], min: Option<u64>, max: Option<u64>) -> Vec<Problem> {
    let Some((min, max)) = min.zip(max) else { return Vec::new() };
    when(min > max, || {
        Problem::usage(format!("`{low}` is above `{high}`"))
            .got(format!("{min} and {max}"))
            .expected("the minimum at most the maximum")
    })
}

/// Names without a colon are built in; programs and addresses show what they are when they are called.
fn unknown_rewards(specs: &[String]) -> Vec<Problem> {
    let scorers = omnigrpo_scorers::table();
    let names =
        || omnigrpo_rewards::table().iter().map(|row| row.name).chain(scorers.iter().map(|row| row.name));
    let unknown = specs.iter().filter(|spec| !spec.contains(':') && names().all(|name| name != *spec));
    let problem = |spec: &String| {
        let problem = Problem::usage("unknown reward").got(format!("`{spec}`")).expected(format!(
            "{}, `cmd:PROGRAM`, `FILE.py:FUNCTION` or `http://…`",
            names().collect::<Vec<_>>().join(", ")
        ));
        match nearest(spec, names()) {
            _ if spec.ends_with(".py") => {
                problem.help(format!("name one function of the file: `{spec}:FUNCTION`"))
            }
            Some(name) => problem.help(format!("did you mean `{name}`?")),
            None => problem,
        }
    };
    unknown.map(problem).collect()
}
