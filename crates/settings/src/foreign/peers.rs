//! Settings of ms-swift (4.6), Unsloth (2026.10), verl (0.9) and EasyR1, in the form used by their launch scripts.
//!
//! verl and EasyR1 use words `group.name=value`, which [`dotted`] splits. Sources: `examples/train/grpo` of ms-swift,
//! `examples/grpo_trainer` of verl, `examples/config.yaml` of EasyR1 and the scripts in the same directory,
//! `FastVisionModel.get_peft_model` of Unsloth.

use super::Fate::{self, Becomes, BecomesAll, Depends, Dropped, Lost, Partly, Refused};
use super::{IN_PROCESS, Row, off, on};
use crate::names::{name_of, named};
use omnigrpo_grpo::{AdvantageKind, Recipe};

const TEMPLATE: &str = "the checkpoint's chat template formats the prompts";
const LENGTHS: &str = "leave it out: the reward uses the constants of its source (`omnigrpo rewards list`)";

const EVALUATES: &str =
    "evaluations during training take the most likely token; several completions are sampled as in training";

const SPLITS: &str =
    "only a single name may have a split; put several names into `dataset_use`, each with its own split";

/// Returns the reward for a function in a file. verl's own name for the function is the default.
fn scored_by(path: &str, name: Option<&str>) -> Fate {
    Becomes("reward_funcs", format!("{path}:{}", name.unwrap_or("compute_score")))
}

/// verl's name of the loss.
const LOSS_MODE: &str = "actor_rollout_ref.actor.policy_loss.loss_mode";

/// Keeps a number of one loss of verl if that is the loss.
fn of_mode(name: &'static str, value: &str, is_mode: bool) -> Fate {
    match is_mode {
        true => Becomes(name, value.to_owned()),
        false => Dropped("it belongs to another loss than `loss_mode`"),
    }
}

/// Rows of the table of settings.
pub(super) const TABLE: &[Row] = &[
    // ms-swift.
    (&["rlhf_type"], |v| match v {
        // ms-swift counts batches in completions.
        "grpo" => Becomes("batch_unit", "completions".into()),
        _ => Refused("leave it out: `train` is GRPO, `sft` is supervised"),
    }),
    (&["train_type", "tuner_type"], |v| match v {
        "lora" => Becomes("use_peft", "true".into()),
        "full" => Becomes("use_peft", "false".into()),
        _ => Refused("use lora or full"),
    }),
    (&["dataset"], rows),
    // Names of columns there are `query`, `solution`, `images` and `videos`.
    (&["columns"], |v| {
        let columns =
            serde_json::from_str::<std::collections::BTreeMap<String, String>>(v).unwrap_or_default();
        let setting = |(own, meaning): (&String, &String)| {
            let name = match meaning.as_str() {
                "query" | "prompt" | "problem" | "question" => "prompt_column",
                "solution" | "answer" | "response" => "solution_column",
                "images" | "image" => "image_column",
                "videos" | "video" => "video_column",
                _ => return None,
            };
            Some((name, own.clone()))
        };
        match columns.iter().map(setting).collect::<Option<Vec<_>>>() {
            Some(settings) if !settings.is_empty() => BecomesAll(settings),
            _ => off(v, "use `prompt_column`, `solution_column`, `image_column` and `video_column`"),
        }
    }),
    (&["system"], |v| match v.ends_with(".txt") {
        true => Refused("give the text, not a file: `system_prompt \"$(cat FILE)\"`"),
        false => Becomes("system_prompt", v.into()),
    }),
    (&["freeze_vit"], |_| Depends("tuner_type", |v, tuner| part("tune_mm_vision", v, tuner))),
    (&["freeze_aligner"], |_| Depends("tuner_type", |v, tuner| part("tune_mm_mlp", v, tuner))),
    (&["freeze_llm"], |_| {
        Depends("tuner_type", |v, tuner| match (tuner, on(v)) {
            (Some("lora"), Some(false)) => Dropped("the adapters are in the language model"),
            _ => tune("tune_mm_llm", v),
        })
    }),
    (&["dynamic_sample"], |v| match on(v) {
        Some(true) => Depends("max_resample_times", |_, times| match times {
            Some(_) => Dropped("`max_resample_times` is given"),
            None => Becomes("max_resample_times", "3".into()),
        }),
        _ => Dropped("groups are replaced only by `max_resample_times`"),
    }),
    (&["quant_bits"], |v| match v {
        "4" => Becomes("load_in_4bit", "true".into()),
        "8" => Becomes("load_in_8bit", "true".into()),
        _ => Refused("use 4 or 8"),
    }),
    (&["async_generate"], |v| match on(v) {
        Some(false) => Dropped(IN_PROCESS),
        _ => Refused("leave it out: completions are always sampled with the current weights"),
    }),
    // Numbers of the reward `cosine`, which are the same as in TRL.
    (&["cosine_min_len_value_wrong"], |v| given(v, &["-1", "-1.0"])),
    (&["cosine_max_len_value_wrong"], |v| given(v, &["-0.5"])),
    (&["cosine_min_len_value_correct"], |v| given(v, &["1", "1.0"])),
    (&["cosine_max_len_value_correct"], |v| given(v, &["0.5"])),
    (&["repetition_n_grams"], |v| match v {
        "3" => Dropped("the reward `repetition_tokens` counts 3-grams"),
        _ => Refused(LENGTHS),
    }),
    (&["repetition_max_penalty"], |v| given(v, &["-1", "-1.0"])),
    // The second name is that of verl and EasyR1, the third that of SkyRL.
    (&["advantage_estimator", "algorithm.adv_estimator", "trainer.algorithm.advantage_estimator"], |v| {
        match v {
            "grpo" | "grpo_vectorized" => Dropped("advantages are computed per group"),
            "gdpo" => Refused("use `multi_objective_aggregation` normalize_then_sum"),
            v => named::<AdvantageKind>(v).and_then(name_of).map_or(
                Refused(
                    "use `advantage`: rloo, grpo_passk, reinforce_plus_plus, reinforce_plus_plus_baseline or maxrl",
                ),
                |name| Becomes("advantage", name.into()),
            ),
        }
    }),
    (&["stop_words"], |v| match v.trim_start_matches('[').trim_end_matches(']') {
        "" => Dropped("it is off here as well"),
        _ => Becomes("stop_strings", listed(v)),
    }),
    (&["lora_bias", "bias"], |v| match v {
        "none" => Dropped("adapters have no bias"),
        v => off(v, "leave it out: adapters have no bias"),
    }),
    (&["adapters"], |v| Becomes("adapter_name_or_path", listed(v))),
    (&["model_author", "model_name"], |v| match v.contains('/') {
        true => Becomes("model_name_or_path", v.into()),
        false => Dropped("rows about the model's identity are not added"),
    }),
    (&["use_chat_template"], |v| match on(v) {
        Some(false) => Refused("leave it out: the checkpoint's chat template formats the prompts"),
        _ => Dropped(TEMPLATE),
    }),
    (&["enable_thinking"], |v| match on(v) {
        Some(on) => Becomes("chat_template_kwargs", format!("{{\"enable_thinking\": {on}}}")),
        None => Dropped(TEMPLATE),
    }),
    // Unsloth.
    (&["use_gradient_checkpointing"], |v| match v {
        "unsloth" => Becomes("gradient_checkpointing", "true".into()),
        v => Becomes("gradient_checkpointing", v.into()),
    }),
    (&["full_finetuning"], |v| match on(v) {
        Some(true) => Becomes("use_peft", "false".into()),
        _ => Dropped("`use_peft` trains adapters"),
    }),
    (&["init_lora_weights"], |v| match on(v) {
        Some(true) => Dropped("adapters are initialised as in PEFT"),
        _ => Refused("leave it out: adapters are initialised as in PEFT by default"),
    }),
    // verl and EasyR1: data.
    (&["data.train_files"], rows),
    (&["data.val_files"], |v| match listed(v).split_once('@') {
        Some((_, rest)) if rest.contains(',') => Refused(SPLITS),
        Some((name, split)) => {
            BecomesAll(vec![("eval_file", name.to_owned()), ("dataset_test_split", split.to_owned())])
        }
        None => Becomes("eval_file", listed(v)),
    }),
    (&["data.train_batch_size"], |_| Depends("actor_rollout_ref.actor.ppo_mini_batch_size", generation)),
    (&["data.rollout_batch_size"], |_| Depends("worker.actor.global_batch_size", generation)),
    (&["data.shuffle"], |v| match on(v) {
        Some(false) => Refused("leave it out: each pass draws the rows in an order set by `data_seed`"),
        _ => Dropped("each pass draws all rows in an order set by `data_seed`"),
    }),
    // verl and EasyR1: model.
    (&["worker.actor.model.freeze_vision_tower"], |_| Depends("worker.actor.model.lora.rank", tower)),
    (&["actor_rollout_ref.actor.freeze_vision_tower"], |_| {
        Depends("actor_rollout_ref.model.lora_rank", tower)
    }),
    (&["actor_rollout_ref.model.lora_rank", "worker.actor.model.lora.rank"], |v| match v {
        "0" => Dropped("adapters are off"),
        rank => BecomesAll(vec![("use_peft", "true".to_owned()), ("lora_r", rank.to_owned())]),
    }),
    (&["actor_rollout_ref.model.target_modules", "worker.actor.model.lora.target_modules"], |v| {
        Becomes("lora_target_modules", listed(v))
    }),
    (&["actor_rollout_ref.model.exclude_modules", "worker.actor.model.lora.exclude_modules"], |v| match v {
        ".*visual.*" => Dropped("`lora_target_modules all-linear` are the layers of the language model"),
        v => off(v, "use `lora_target_modules` with a regular expression over complete names"),
    }),
    // verl and EasyR1: update.
    // In both, the learning rate stays constant after its warm-up unless another schedule is given.
    (&["actor_rollout_ref.actor.optim.lr", "worker.actor.optim.lr"], |v| {
        BecomesAll(vec![
            ("learning_rate", v.to_owned()),
            ("lr_scheduler_type", "constant_with_warmup".to_owned()),
        ])
    }),
    (&["actor_rollout_ref.actor.optim.lr_warmup_steps_ratio", "worker.actor.optim.lr_warmup_ratio"], |v| {
        match v.parse() {
            Ok(0.0) => Dropped("the rate starts at its peak"),
            _ => Becomes("warmup_ratio", v.to_owned()),
        }
    }),
    (&["actor_rollout_ref.actor.optim.betas", "worker.actor.optim.betas"], |v| {
        match listed(v).split_once(',') {
            Some((mean, square)) => {
                BecomesAll(vec![("adam_beta1", mean.to_owned()), ("adam_beta2", square.to_owned())])
            }
            None => Refused("give two numbers, such as [0.9,0.999]"),
        }
    }),
    (
        &["actor_rollout_ref.actor.optim.lr_scheduler_type", "worker.actor.optim.lr_scheduler_type"],
        |v| match v {
            "constant" => Becomes("lr_scheduler_type", "constant_with_warmup".into()),
            v => Becomes("lr_scheduler_type", v.into()),
        },
    ),
    (&["actor_rollout_ref.actor.optim.lr_warmup_steps", "worker.actor.optim.lr_warmup_steps"], |v| match v {
        "-1" | "0" => Dropped("the warm-up is set as a share of all steps"),
        v => Becomes("warmup_steps", v.to_owned()),
    }),
    (&["actor_rollout_ref.actor.optim.optimizer", "worker.actor.optim.strategy"], |v| {
        match v.to_ascii_lowercase().as_str() {
            "adamw" | "adamw_bf16" => Dropped("the optimizer is AdamW"),
            "adamw8bit" | "adamw_8bit" => Becomes("optim", "adamw_8bit".into()),
            _ => Refused("leave it out: the only optimizer is AdamW"),
        }
    }),
    (&["actor_rollout_ref.actor.optim.warmup_style"], |v| match v {
        "constant" => Becomes("lr_scheduler_type", "constant_with_warmup".into()),
        v => Becomes("lr_scheduler_type", v.into()),
    }),
    (
        &[
            "worker.actor.loss_type",
            "actor_rollout_ref.actor.policy_loss.loss_mode",
            "trainer.algorithm.policy_loss_type",
        ],
        |v| match v {
            "default" | "vanilla" | "regular" => Dropped("`loss_type` sets the GRPO loss"),
            "dual_clip" => Refused("use `delta`, the bound of the unclipped ratio"),
            // The bounds are verl's own defaults, unless the source names others.
            "dppo_tv" | "dppo_kl" => {
                let bounds =
                    [("epsilon", "0.2"), ("delta", "3")].map(|(name, value)| (name, value.to_owned()));
                BecomesAll([vec![("loss_type", v.to_owned())], bounds.to_vec()].concat())
            }
            "gspo" | "gspo_token" | "sapo" | "cispo" | "geo_mean" | "clip_cov" | "kl_cov" | "dppo" => {
                let name = named::<&'static Recipe>(v).and_then(name_of).unwrap_or(v);
                Becomes("loss_type", name.into())
            }
            _ => Refused("`loss_type` has no such loss; `omnigrpo help loss_type` lists the losses"),
        },
    ),
    (&["actor_rollout_ref.actor.policy_loss.clip_cov_ratio"], |_| {
        Depends(LOSS_MODE, |v, mode| of_mode("clip_cov_ratio", v, mode == Some("clip_cov")))
    }),
    (&["actor_rollout_ref.actor.policy_loss.clip_cov_lb"], |_| {
        Depends(LOSS_MODE, |v, mode| of_mode("clip_cov_lb", v, mode == Some("clip_cov")))
    }),
    (&["actor_rollout_ref.actor.policy_loss.clip_cov_ub"], |_| {
        Depends(LOSS_MODE, |v, mode| of_mode("clip_cov_ub", v, mode == Some("clip_cov")))
    }),
    (&["actor_rollout_ref.actor.policy_loss.kl_cov_ratio"], |_| {
        Depends(LOSS_MODE, |v, mode| of_mode("kl_cov_ratio", v, mode == Some("kl_cov")))
    }),
    (&["actor_rollout_ref.actor.policy_loss.ppo_kl_coef"], |_| {
        Depends(LOSS_MODE, |v, mode| of_mode("ppo_kl_coef", v, mode == Some("kl_cov")))
    }),
    // verl uses the lower bound if both are given.
    (&["actor_rollout_ref.actor.clip_ratio"], |_| {
        Depends("actor_rollout_ref.actor.clip_ratio_low", |v, low| match low {
            Some(_) => Dropped("`clip_ratio_low` is given"),
            None => Becomes("epsilon", v.to_owned()),
        })
    }),
    (&["actor_rollout_ref.actor.entropy_coeff"], |v| match v.parse() {
        Ok(0.0) => Dropped("there is no entropy bonus"),
        _ => Becomes("entropy_coef", v.into()),
    }),
    (&["actor_rollout_ref.actor.use_kl_loss"], |v| match on(v) {
        Some(false) => Becomes("beta", "0".into()),
        _ => Dropped("the KL is part of the loss; `beta` is its weight"),
    }),
    (&["actor_rollout_ref.actor.kl_loss_coef"], |_| {
        Depends("actor_rollout_ref.actor.use_kl_loss", |beta, used| match used.and_then(on) {
            Some(true) => Becomes("beta", beta.into()),
            _ => Dropped("`use_kl_loss` is off"),
        })
    }),
    (&["distillation.enabled"], |_| Dropped("a teacher turns it on")),
    (&["distillation.teacher_models.teacher_model.model_path"], |_| {
        Depends("distillation.enabled", |model, enabled| match enabled.and_then(on) {
            Some(true) => Becomes("teacher_model_name_or_path", model.into()),
            _ => Dropped("`distillation.enabled` is off"),
        })
    }),
    (&["distillation.distillation_loss.distillation_loss_coef"], |_| {
        Depends("distillation.enabled", |weight, enabled| match enabled.and_then(on) {
            Some(true) => Becomes("teacher_coef", weight.into()),
            _ => Dropped("`distillation.enabled` is off"),
        })
    }),
    (&["distillation.distillation_loss.loss_mode"], |_| {
        Depends("distillation.enabled", |mode, enabled| match (mode, enabled.and_then(on)) {
            (_, None | Some(false)) => Dropped("`distillation.enabled` is off"),
            ("k1" | "kl", _) => Becomes("teacher_divergence", "reverse_kl".into()),
            ("forward_kl_topk", _) => Becomes("teacher_divergence", "forward_kl".into()),
            _ => Refused("use k1, which is `teacher_divergence reverse_kl`, or forward_kl_topk"),
        })
    }),
    (&["distillation.distillation_loss.topk"], |_| {
        Depends("distillation.distillation_loss.loss_mode", |k, mode| match mode {
            Some("forward_kl_topk") => Becomes("teacher_top_k", k.into()),
            _ => Dropped("the loss reads the sampled token alone"),
        })
    }),
    (&["distillation.distillation_loss.use_task_rewards"], |v| match on(v) {
        Some(false) => Lost("give `reward_weights 0`, so that the teacher alone trains"),
        _ => Dropped("rewards train beside the teacher"),
    }),
    (&["algorithm.kl_coef"], |_| {
        Depends("algorithm.disable_kl", |beta, disabled| match disabled.and_then(on) {
            Some(true) => Dropped("`disable_kl` is on"),
            _ => Becomes("beta", beta.into()),
        })
    }),
    (&["actor_rollout_ref.actor.kl_loss_type", "algorithm.kl_penalty"], |v| match v {
        "low_var_kl" | "k3" => Becomes("kl", "k3".into()),
        _ => Refused("use low_var_kl, which is the estimator k3"),
    }),
    (&["actor_rollout_ref.actor.loss_agg_mode", "worker.actor.loss_avg_mode"], |v| match v {
        "token_mean" | "token-mean" | "token" => Becomes("loss_agg", "token_mean".into()),
        "seq_mean_token_mean" | "seq-mean-token-mean" | "seq" => Becomes("loss_agg", "seq_mean".into()),
        _ => Refused("use `loss_agg`"),
    }),
    (&["algorithm.use_kl_in_reward"], |v| match on(v) {
        Some(false) => Dropped("the KL is part of the loss"),
        _ => Refused("leave it out: the KL is part of the loss, with weight `beta`"),
    }),
    (&["algorithm.disable_kl"], |v| match on(v) {
        Some(true) => Becomes("beta", "0".into()),
        _ => Dropped("`beta` is the weight of the KL"),
    }),
    (&["algorithm.use_kl_loss"], |v| match on(v) {
        Some(true) => Dropped("the KL is part of the loss"),
        _ => Refused("leave it out: the KL is part of the loss, with weight `beta`"),
    }),
    (&["algorithm.online_filtering"], |_| {
        Depends("trainer.max_try_make_batch", |v, most| resampled(v, most.unwrap_or("20")))
    }),
    (&["algorithm.filter_groups.enable"], |_| {
        Depends("algorithm.filter_groups.max_num_gen_batches", |v, most| resampled(v, most.unwrap_or("0")))
    }),
    (&["algorithm.filter_key", "algorithm.filter_low", "algorithm.filter_high"], |_| {
        Depends("algorithm.online_filtering", |_, filters| match filters.and_then(on) {
            Some(true) => Lost("groups whose rewards are all equal are replaced, whatever their mean"),
            _ => Dropped("`online_filtering` is off"),
        })
    }),
    (&["algorithm.norm_adv_by_std_in_grpo"], |v| match on(v) {
        Some(false) => Becomes("scale_rewards", "none".into()),
        _ => Dropped("`scale_rewards` group is the default"),
    }),
    (&["algorithm.rollout_correction.rollout_is"], |v| match v {
        "token" => Becomes("importance_sampling_correction", "token_truncate".into()),
        "sequence" => Becomes("importance_sampling_correction", "sequence_truncate".into()),
        v => off(v, "use token or sequence"),
    }),
    (&["algorithm.rollout_correction.rollout_is_threshold"], |_| {
        Depends("algorithm.rollout_correction.rollout_is", |most, mode| match mode {
            Some("token" | "sequence") => Becomes("importance_sampling_clip_max", most.into()),
            _ => Dropped("`rollout_is` is off"),
        })
    }),
    // verl and EasyR1: sampling.
    (&["actor_rollout_ref.rollout.top_k", "worker.rollout.top_k"], |v| match v {
        "-1" => Becomes("top_k", "0".into()),
        v => Becomes("top_k", v.into()),
    }),
    // An evaluation takes the most likely token unless it has several completions.
    (&["worker.rollout.val_override_config.n"], |v| match v {
        "1" => Dropped("an evaluation has one completion for each prompt"),
        v => Becomes("num_generations_eval", v.into()),
    }),
    (
        &[
            "worker.rollout.val_override_config.temperature",
            "actor_rollout_ref.rollout.val_kwargs.temperature",
            "actor_rollout_ref.rollout.val_kwargs.do_sample",
        ],
        |v| match v.parse() {
            Ok(0.0) => Dropped("an evaluation takes the most likely token"),
            _ if on(v) == Some(false) => Dropped("an evaluation takes the most likely token"),
            _ => Lost(EVALUATES),
        },
    ),
    (
        &[
            "worker.rollout.val_override_config.top_p",
            "worker.rollout.val_override_config.top_k",
            "actor_rollout_ref.rollout.val_kwargs.top_p",
            "actor_rollout_ref.rollout.val_kwargs.top_k",
        ],
        |v| match v {
            "1" | "1.0" | "-1" | "0" => Dropped("it is off here as well"),
            _ => Lost(EVALUATES),
        },
    ),
    // verl and EasyR1: rewards.
    (&["custom_reward_function.path"], |_| Depends("custom_reward_function.name", scored_by)),
    (&["reward.custom_reward_function.path"], |_| Depends("reward.custom_reward_function.name", scored_by)),
    // verl and EasyR1: run.
    (&["trainer.save_freq"], |v| match v {
        "-1" | "0" => Becomes("save_strategy", "no".into()),
        _ => Becomes("save_steps", v.into()),
    }),
    (&["trainer.test_freq", "trainer.val_freq"], |v| match v {
        "-1" | "0" => Becomes("eval_strategy", "no".into()),
        _ => BecomesAll(vec![("eval_strategy", "steps".to_owned()), ("eval_steps", v.to_owned())]),
    }),
    (&["trainer.save_limit", "trainer.max_actor_ckpt_to_keep"], |v| match v {
        "-1" => Dropped("all checkpoints are kept"),
        _ => Becomes("save_total_limit", v.into()),
    }),
    (&["trainer.logger"], |v| {
        let known: Vec<&str> =
            ["tensorboard", "wandb", "trackio"].into_iter().filter(|name| v.contains(name)).collect();
        match known.is_empty() {
            false => Becomes("report_to", known.join(",")),
            true => Dropped("metrics.jsonl has every number"),
        }
    }),
    (&["trainer.resume_mode"], |v| match v {
        "disable" => Becomes("resume_from_checkpoint", "never".into()),
        "resume_path" => Depends("trainer.resume_from_path", |_, path| match path {
            Some(path) => Becomes("resume_from_checkpoint", path.to_owned()),
            None => Refused("give the path to `resume_from_checkpoint`"),
        }),
        _ => Dropped("a run resumes automatically"),
    }),
    (&["trainer.find_last_checkpoint"], |v| match on(v) {
        Some(false) => Becomes("resume_from_checkpoint", "never".into()),
        _ => Dropped("a run resumes automatically"),
    }),
];

/// Splits a word `group.name=value` of verl or EasyR1.
pub(super) fn dotted(word: &str) -> Option<(&str, &str)> {
    const GROUPS: [&str; 16] = [
        "data",
        "algorithm",
        "worker",
        "trainer",
        "actor_rollout_ref",
        "critic",
        "reward_model",
        "custom_reward_function",
        "reward",
        "distillation",
        "transfer_queue",
        "global_profiler",
        "skip",
        "sandbox_fusion",
        "ray_kwargs",
        "ray_init",
    ];
    let (name, value) = word.split_once('=')?;
    let name = name.trim_start_matches('+');
    if name == "config" {
        return Some(("easyr1.config", value));
    }
    let (group, _) = name.split_once('.')?;
    GROUPS.contains(&group).then_some((name, value))
}

/// Reads rows given as a file, as the name of a dataset on the hub with its split (`NAME@train`), or as a list of these.
fn rows(v: &str) -> Fate {
    let files = listed(v);
    if files.contains('#') {
        let name = |file: &str| file.split('#').next().unwrap_or_default().to_owned();
        let files: Vec<String> = files.split(',').map(name).collect();
        return Partly(
            vec![("train_file", files.join(","))],
            "all rows are used; for a share of them, use `dataset_use` with `%`",
        );
    }
    match files.split_once('@') {
        Some((_, rest)) if rest.contains(',') => Refused(SPLITS),
        Some((name, split)) => {
            BecomesAll(vec![("train_file", name.to_owned()), ("dataset_train_split", split.to_owned())])
        }
        None => Becomes("train_file", files),
    }
}

/// Returns the items of a Python or YAML list, separated by commas. Returns other text unchanged.
fn listed(v: &str) -> String {
    let inner = v.trim().trim_start_matches('[').trim_end_matches(']');
    let items = inner.split(',').map(|item| item.trim().trim_matches(['\'', '"']));
    items.collect::<Vec<_>>().join(",")
}

/// Reads the replacement of groups whose rewards are all equal, with the number of batches that may be sampled for a step.
fn resampled(filters: &str, most: &str) -> Fate {
    const MOST: i64 = 64;
    match (on(filters), most.parse::<i64>()) {
        (Some(true), Ok(most)) if (1..=MOST).contains(&most) => {
            Becomes("max_resample_times", most.to_string())
        }
        // There is no limit.
        (Some(true), _) => Becomes("max_resample_times", MOST.to_string()),
        _ => Dropped("groups are replaced only by `max_resample_times`"),
    }
}

/// Drops a setting of a reward if its value equals the fixed value of this program.
fn given(v: &str, fixed: &[&str]) -> Fate {
    if fixed.contains(&v) { Dropped("the reward uses this value") } else { Refused(LENGTHS) }
}

/// Converts a switch that freezes a part into the setting that trains it.
fn tune(setting: &'static str, frozen: &str) -> Fate {
    match on(frozen) {
        Some(frozen) => Becomes(setting, (!frozen).to_string()),
        None => Refused("use true or false"),
    }
}

/// Converts ms-swift's switch of a part. With adapters, a part that is not frozen gets them too.
fn part(setting: &'static str, frozen: &str, tuner: Option<&str>) -> Fate {
    match (tuner, on(frozen)) {
        (Some("lora"), Some(false)) => {
            Lost("name the layers of this part in `lora_target_modules` besides those of the language model")
        }
        _ => tune(setting, frozen),
    }
}

/// Converts the switch of the tower in verl and EasyR1, beside the rank of adapters.
fn tower(frozen: &str, rank: Option<&str>) -> Fate {
    match rank {
        Some(rank) if rank != "0" => Dropped("only the adapters are trained"),
        _ => tune("tune_mm_vision", frozen),
    }
}

/// Computes the number of updates that share a generation: its prompts divided by the prompts of an update.
fn generation(rollout: &str, update: Option<&str>) -> Fate {
    let (Ok(rollout), Some(Ok(update))) = (rollout.parse::<u64>(), update.map(str::parse::<u64>)) else {
        return Becomes("gradient_accumulation_steps", rollout.into());
    };
    match rollout.checked_div(update) {
        Some(1) => Dropped("each update samples its own completions"),
        Some(times) if times * update == rollout => Becomes("steps_per_generation", times.to_string()),
        _ => Refused("use a multiple of the prompts of an update"),
    }
}
