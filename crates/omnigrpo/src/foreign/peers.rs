//! Settings of ms-swift (4.6), Unsloth (2026.10), verl (0.9) and EasyR1, as their launch scripts write them.
//!
//! verl and EasyR1 take `group.name=value` words, which [`dotted`] finds on a command line. Sources:
//! `examples/train/grpo` of ms-swift, `examples/grpo_trainer` of verl, `examples/config.yaml` and the scripts beside it of
//! EasyR1, `FastVisionModel.get_peft_model` of Unsloth.

use super::Fate::{self, Becomes, BecomesAll, Depends, Dropped, Refused};
use super::{IN_PROCESS, ONE_PROCESS, OWN_KERNELS, READ_AHEAD, Row, on};

const WHOLE_ROWS: &str = "a row that is too long is a bad row; `max_prompt_length` sets the limit";
const NO_SPLIT: &str =
    "memory decides how much is computed at a time; `max_stream_tokens` bounds it, with the same result";
const WHERE: &str = "the run directory is `output_dir`";
const ADAPTED: &str = "`lora_target_modules` says which layers get an adapter";
const ONE_MACHINE: &str = "the run is one process on one machine";

/// Rows of the table of settings.
pub(super) const TABLE: &[Row] = &[
    // ms-swift.
    (&["rlhf_type"], |v| match v {
        "grpo" => Dropped("`train` is GRPO"),
        _ => Refused("leave it out: `train` is GRPO, `sft` is supervised"),
    }),
    (&["train_type", "tuner_type"], |v| match v {
        "lora" => Becomes("use_peft", "true".into()),
        "full" => Becomes("use_peft", "false".into()),
        _ => Refused("use lora or full"),
    }),
    (&["dataset"], rows),
    (&["val_dataset"], |v| Becomes("eval_file", v.into())),
    (&["split_dataset_ratio"], |v| Becomes("val_split_ratio", v.into())),
    (&["system"], |v| match v.ends_with(".txt") {
        true => Refused("write the text itself: `system_prompt \"$(cat FILE)\"`"),
        false => Becomes("system_prompt", v.into()),
    }),
    (&["external_plugins"], |_| Dropped("give a function of a file to `reward_funcs` as FILE.py:FUNCTION")),
    (&["lora_rank", "max_lora_rank"], |v| Becomes("lora_r", v.into())),
    (&["target_modules"], |v| Becomes("lora_target_modules", v.into())),
    (&["freeze_vit"], |v| tune("tune_mm_vision", v)),
    (&["freeze_aligner"], |v| tune("tune_mm_mlp", v)),
    (&["freeze_llm"], |v| tune("tune_mm_llm", v)),
    (&["overlong_filter"], |v| Becomes("mask_truncated_completions", v.into())),
    (&["dynamic_sample"], |v| match on(v) {
        Some(true) => Depends("max_resample_times", |_, times| match times {
            Some(_) => Dropped("`max_resample_times` is given"),
            None => Becomes("max_resample_times", "3".into()),
        }),
        _ => Dropped("groups are sampled again with `max_resample_times` alone"),
    }),
    (&["quant_bits"], |v| match v {
        "4" => Becomes("load_in_4bit", "true".into()),
        "8" => Becomes("load_in_8bit", "true".into()),
        _ => Refused("use 4 or 8"),
    }),
    (&["quant_method", "bnb_4bit_*"], |_| Dropped("`load_in_4bit` and `load_in_8bit` have one form each")),
    (&["attn_impl"], |_| Dropped(OWN_KERNELS)),
    (
        &[
            "sleep_level",
            "num_infer_workers",
            "offload_model",
            "gc_collect_after_offload",
            "move_model_batches",
            "use_lmdeploy",
        ],
        |_| Dropped(IN_PROCESS),
    ),
    (&["async_generate"], |v| match on(v) {
        Some(false) => Dropped(IN_PROCESS),
        _ => Refused("leave it out: completions are of the weights they train, never of older ones"),
    }),
    (&["max_length", "truncation_strategy", "max_seq_length"], |_| Dropped(WHOLE_ROWS)),
    (&["dataset_num_proc", "load_from_cache_file", "streaming"], |_| Dropped(READ_AHEAD)),
    (&["sequence_parallel_size", "deepspeed_autotp_size"], |_| Dropped(ONE_PROCESS)),
    (&["add_version", "check_model", "create_checkpoint_symlink", "strict"], |_| Dropped(WHERE)),
    // Unsloth.
    (&["fast_inference", "unsloth_*", "gpu_memory_utilization"], |_| Dropped(IN_PROCESS)),
    (&["use_gradient_checkpointing"], |v| match v {
        "unsloth" => Becomes("gradient_checkpointing", "true".into()),
        v => Becomes("gradient_checkpointing", v.into()),
    }),
    (
        &[
            "finetune_vision_layers",
            "finetune_language_layers",
            "finetune_attention_modules",
            "finetune_mlp_modules",
        ],
        |_| Dropped(ADAPTED),
    ),
    (&["random_state"], |v| Becomes("seed", v.into())),
    // verl and EasyR1: the data.
    (&["easyr1.config"], |_| {
        Dropped("the file is not read; what it sets and this line does not has this program's default")
    }),
    (&["data.train_files"], rows),
    (&["data.val_files"], |v| match listed(v).split_once('@') {
        Some((name, split)) => {
            BecomesAll(vec![("eval_file", name.to_owned()), ("dataset_test_split", split.to_owned())])
        }
        None => Becomes("eval_file", listed(v)),
    }),
    (&["data.prompt_key"], |v| Becomes("prompt_column", v.into())),
    (&["data.answer_key"], |v| Becomes("solution_column", v.into())),
    (&["data.image_key"], |v| Becomes("image_column", v.into())),
    (&["data.video_key"], |v| Becomes("video_column", v.into())),
    (&["data.image_dir"], |v| Becomes("image_folders", v.into())),
    (&["data.max_prompt_length"], |v| Becomes("max_prompt_length", v.into())),
    (&["data.max_response_length"], |v| Becomes("max_completion_length", v.into())),
    (&["data.min_pixels"], |v| Becomes("min_pixels", v.into())),
    (&["data.max_pixels"], |v| Becomes("max_pixels", v.into())),
    (&["data.video_fps"], |v| Becomes("fps", v.into())),
    (&["data.seed"], |v| Becomes("data_seed", v.into())),
    (&["data.filter_overlong_prompts*", "data.truncation"], |_| Dropped(WHOLE_ROWS)),
    (&["data.format_prompt"], |_| Dropped("`question_template` and `system_prompt` word the question")),
    (&["data.train_batch_size"], |_| Depends("actor_rollout_ref.actor.ppo_mini_batch_size", generation)),
    (&["data.rollout_batch_size"], |_| Depends("worker.actor.global_batch_size", generation)),
    (&["actor_rollout_ref.actor.ppo_mini_batch_size", "worker.actor.global_batch_size"], |v| {
        Becomes("gradient_accumulation_steps", v.into())
    }),
    (&["data.*"], |_| Dropped(READ_AHEAD)),
    // The model.
    (&["actor_rollout_ref.model.path", "worker.actor.model.model_path"], |v| {
        Becomes("model_name_or_path", v.into())
    }),
    (
        &[
            "actor_rollout_ref.model.enable_gradient_checkpointing",
            "worker.actor.model.enable_gradient_checkpointing",
        ],
        |v| Becomes("gradient_checkpointing", v.into()),
    ),
    (&["worker.actor.model.freeze_vision_tower", "actor_rollout_ref.actor.freeze_vision_tower"], |v| {
        tune("tune_mm_vision", v)
    }),
    (&["actor_rollout_ref.model.lora_rank", "worker.actor.model.lora.rank"], |v| match v {
        "0" => Dropped("adapters are off"),
        rank => BecomesAll(vec![("use_peft", "true".to_owned()), ("lora_r", rank.to_owned())]),
    }),
    (&["actor_rollout_ref.model.lora_alpha", "worker.actor.model.lora.alpha"], |v| {
        Becomes("lora_alpha", v.into())
    }),
    (&["actor_rollout_ref.model.target_modules", "worker.actor.model.lora.target_modules"], |v| {
        Becomes("lora_target_modules", listed(v))
    }),
    (&["actor_rollout_ref.model.*", "worker.actor.model.*"], |_| Dropped(OWN_KERNELS)),
    // The update.
    (&["actor_rollout_ref.actor.optim.lr", "worker.actor.optim.lr"], |v| Becomes("learning_rate", v.into())),
    (&["actor_rollout_ref.actor.optim.weight_decay", "worker.actor.optim.weight_decay"], |v| {
        Becomes("weight_decay", v.into())
    }),
    (&["actor_rollout_ref.actor.optim.lr_warmup_steps_ratio", "worker.actor.optim.lr_warmup_ratio"], |v| {
        match v.parse() {
            Ok(0.0) => Dropped("the rate starts at its peak"),
            _ => BecomesAll(vec![
                ("warmup_ratio", v.to_owned()),
                ("lr_scheduler_type", "constant_with_warmup".to_owned()),
            ]),
        }
    }),
    (&["actor_rollout_ref.actor.grad_clip", "worker.actor.max_grad_norm"], |v| {
        Becomes("max_grad_norm", v.into())
    }),
    (
        &["actor_rollout_ref.actor.fsdp_config.optimizer_offload", "worker.actor.offload.offload_optimizer"],
        |v| Becomes("offload_optimizer", v.into()),
    ),
    (&["actor_rollout_ref.actor.clip_ratio_low", "worker.actor.clip_ratio_low"], |v| {
        Becomes("epsilon", v.into())
    }),
    (&["actor_rollout_ref.actor.clip_ratio_high", "worker.actor.clip_ratio_high"], |v| {
        Becomes("epsilon_high", v.into())
    }),
    (&["actor_rollout_ref.actor.clip_ratio"], |v| Becomes("epsilon", v.into())),
    (&["actor_rollout_ref.actor.entropy_coeff"], |v| match v.parse() {
        Ok(0.0) => Dropped("no bonus on entropy"),
        _ => Becomes("entropy_coef", v.into()),
    }),
    (&["actor_rollout_ref.actor.use_kl_loss"], |v| match on(v) {
        Some(false) => Becomes("beta", "0".into()),
        _ => Dropped("the KL is part of the loss; `beta` weighs it"),
    }),
    (&["actor_rollout_ref.actor.kl_loss_coef"], |_| {
        Depends("actor_rollout_ref.actor.use_kl_loss", |beta, used| match used.and_then(on) {
            Some(true) => Becomes("beta", beta.into()),
            _ => Dropped("`use_kl_loss` is off"),
        })
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
    (&["actor_rollout_ref.actor.ppo_epochs", "worker.actor.ppo_epochs"], |v| {
        Becomes("num_iterations", v.into())
    }),
    (&["actor_rollout_ref.actor.*", "worker.actor.*"], |_| Dropped(NO_SPLIT)),
    (&["algorithm.adv_estimator"], |v| match v {
        "grpo" => Dropped("advantages are those of the group"),
        _ => Refused("leave it out: advantages are those of the group (`advantage`)"),
    }),
    (&["algorithm.use_kl_in_reward"], |v| match on(v) {
        Some(false) => Dropped("the KL is part of the loss"),
        _ => Refused("leave it out: the KL is part of the loss, with weight `beta`"),
    }),
    (&["algorithm.disable_kl"], |v| match on(v) {
        Some(true) => Becomes("beta", "0".into()),
        _ => Dropped("`beta` weighs the KL"),
    }),
    (&["algorithm.use_kl_loss"], |v| match on(v) {
        Some(true) => Dropped("the KL is part of the loss"),
        _ => Refused("leave it out: the KL is part of the loss, with weight `beta`"),
    }),
    (&["algorithm.online_filtering"], |v| match on(v) {
        Some(true) => Becomes("max_resample_times", "3".into()),
        _ => Dropped("groups are sampled again with `max_resample_times` alone"),
    }),
    // Sampling.
    (&["actor_rollout_ref.rollout.n", "worker.rollout.n"], |v| Becomes("num_generations", v.into())),
    (&["actor_rollout_ref.rollout.temperature", "worker.rollout.temperature"], |v| {
        Becomes("temperature", v.into())
    }),
    (&["actor_rollout_ref.rollout.top_p", "worker.rollout.top_p"], |v| Becomes("top_p", v.into())),
    (&["actor_rollout_ref.rollout.*", "worker.rollout.*"], |_| Dropped(IN_PROCESS)),
    (&["actor_rollout_ref.ref.*", "worker.ref.*"], |_| {
        Dropped("the reference is scored in the same process")
    }),
    // Rewards.
    (&["worker.reward.reward_function", "worker.reward.score_function"], |v| {
        Becomes("reward_funcs", v.into())
    }),
    (&["custom_reward_function.path", "reward.custom_reward_function.path"], |_| {
        Depends("custom_reward_function.name", |path, name| {
            Becomes("reward_funcs", format!("{path}:{}", name.unwrap_or("compute_score")))
        })
    }),
    (&["custom_reward_function.name", "reward.custom_reward_function.name"], |_| {
        Dropped("it goes with custom_reward_function.path")
    }),
    (&["worker.reward.*", "reward_model.*", "critic.*"], |_| Dropped("rewards are those of `reward_funcs`")),
    // The run.
    (&["trainer.total_epochs", "trainer.total_episodes"], |v| Becomes("num_train_epochs", v.into())),
    (&["trainer.max_steps", "trainer.total_training_steps"], |v| Becomes("max_steps", v.into())),
    (&["trainer.experiment_name"], |v| Becomes("run_name", v.into())),
    (&["trainer.default_local_dir", "trainer.save_checkpoint_path"], |v| Becomes("output_dir", v.into())),
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
    (&["trainer.val_before_train"], |v| Becomes("eval_on_start", v.into())),
    (&["trainer.logger"], |v| match v.contains("wandb") {
        true => Becomes("report_to", "wandb".into()),
        false => Dropped("metrics.jsonl has every number"),
    }),
    (&["trainer.n_gpus_per_node", "trainer.nnodes", "trainer.*", "ray_kwargs.*", "ray_init.*"], |_| {
        Dropped(ONE_MACHINE)
    }),
];

/// The name and the value of a `group.name=value` word, as verl and EasyR1 take them.
pub(super) fn dotted(word: &str) -> Option<(&str, &str)> {
    const GROUPS: [&str; 9] = [
        "data",
        "algorithm",
        "worker",
        "trainer",
        "actor_rollout_ref",
        "critic",
        "reward_model",
        "custom_reward_function",
        "reward",
    ];
    let (name, value) = word.split_once('=')?;
    let name = name.trim_start_matches('+');
    if name == "config" {
        return Some(("easyr1.config", value));
    }
    let (group, _) = name.split_once('.')?;
    GROUPS.contains(&group).then_some((name, value))
}

/// Rows by file, by a name of the hub with its split (`NAME@train`), or by a list of these.
fn rows(v: &str) -> Fate {
    let files = listed(v);
    if files.contains('#') {
        return Refused(
            "give the rows themselves: a number of rows behind `#` is unsupported here, use `dataset_use` with `%`",
        );
    }
    match files.split_once('@') {
        Some((name, split)) => {
            BecomesAll(vec![("train_file", name.to_owned()), ("dataset_train_split", split.to_owned())])
        }
        None => Becomes("train_file", files),
    }
}

/// The items of a list in Python's or YAML's form with commas between them; other text as it is.
fn listed(v: &str) -> String {
    let inner = v.trim().trim_start_matches('[').trim_end_matches(']');
    let items = inner.split(',').map(|item| item.trim().trim_matches(['\'', '"']));
    items.collect::<Vec<_>>().join(",")
}

/// The switch that trains a part, from one that freezes it.
fn tune(setting: &'static str, frozen: &str) -> Fate {
    match on(frozen) {
        Some(frozen) => Becomes(setting, (!frozen).to_string()),
        None => Refused("use true or false"),
    }
}

/// Prompts of a generation over prompts of an update are the updates that share it.
fn generation(rollout: &str, update: Option<&str>) -> Fate {
    let (Ok(rollout), Some(Ok(update))) = (rollout.parse::<u64>(), update.map(str::parse::<u64>)) else {
        return Becomes("gradient_accumulation_steps", rollout.into());
    };
    match rollout.checked_div(update) {
        Some(1) => Dropped("each update samples its own completions"),
        Some(times) if times * update == rollout => Becomes("steps_per_generation", times.to_string()),
        _ => Refused("take a multiple of the prompts of an update"),
    }
}
