//! Settings of ms-swift (4.6), Unsloth (2026.10), verl (0.9) and EasyR1, in the form used by their launch scripts.
//!
//! verl and EasyR1 use words `group.name=value`, which [`dotted`] splits. Sources: `examples/train/grpo` of ms-swift,
//! `examples/grpo_trainer` of verl, `examples/config.yaml` of EasyR1 and the scripts in the same directory,
//! `FastVisionModel.get_peft_model` of Unsloth.

use super::Fate::{self, Becomes, BecomesAll, Depends, Dropped, Refused};
use super::{COMPLETE, IN_PROCESS, OWN_KERNELS, READ_AHEAD, Row, off, on};

const WHOLE_ROWS: &str = "rows that are too long are skipped; `max_prompt_length` sets the limit";
const NO_SPLIT: &str =
    "the size of a pass follows from memory; `max_stream_tokens` limits it without changing the result";
const WHERE: &str = "the run directory is `output_dir`";
const ADAPTED: &str = "`lora_target_modules` names the layers that get an adapter";
const OTHER_METHOD: &str = "it is for a method other than GRPO";
const OTHER_ADAPTER: &str = "it is for adapters other than LoRA";
const NO_TEACHER: &str = "leave it out: training with a teacher is unsupported";
const NO_TURNS: &str = "leave it out: conversations of several sampled turns are unsupported";
const TEMPLATE: &str = "the checkpoint's chat template formats the prompts";
const IN_CHECKPOINT: &str = "the checkpoint's files set it";
const PARTS: &str = "use the `tune_mm_` settings, and `trainable_patterns` for some weights of a part";
const LENGTHS: &str = "leave it out: the reward uses the constants of its source (`omnigrpo rewards list`)";
const ONE_MACHINE: &str = "a launcher or `nproc_per_node` starts several processes";

const SPLITS: &str =
    "only a single name may have a split; put several names into `dataset_use`, each with its own split";

/// Returns the reward for a function in a file. verl's own name for the function is the default.
fn scored_by(path: &str, name: Option<&str>) -> Fate {
    Becomes("reward_funcs", format!("{path}:{}", name.unwrap_or("compute_score")))
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
    (&["val_dataset"], |v| Becomes("eval_file", v.into())),
    (&["split_dataset_ratio"], |v| Becomes("val_split_ratio", v.into())),
    (&["system"], |v| match v.ends_with(".txt") {
        true => Refused("give the text, not a file: `system_prompt \"$(cat FILE)\"`"),
        false => Becomes("system_prompt", v.into()),
    }),
    (&["external_plugins"], |_| {
        Dropped("put a function from a file into `reward_funcs` as FILE.py:FUNCTION")
    }),
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
        _ => Dropped("groups are replaced only by `max_resample_times`"),
    }),
    (&["quant_bits"], |v| match v {
        "4" => Becomes("load_in_4bit", "true".into()),
        "8" => Becomes("load_in_8bit", "true".into()),
        _ => Refused("use 4 or 8"),
    }),
    (&["quant_method", "bnb_4bit_*"], |_| {
        Dropped("`load_in_4bit` and `load_in_8bit` each have only one format")
    }),
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
        _ => Refused("leave it out: completions are always sampled with the current weights"),
    }),
    (&["max_length", "truncation_strategy", "max_seq_length"], |_| Dropped(WHOLE_ROWS)),
    (&["dataset_num_proc", "load_from_cache_file", "streaming"], |_| Dropped(READ_AHEAD)),
    (&["sequence_parallel_size", "deepspeed_autotp_size"], |_| Dropped(COMPLETE)),
    (&["add_version", "check_model", "create_checkpoint_symlink", "strict"], |_| Dropped(WHERE)),
    (&["ref_model", "ref_adapters", "ref_model_type", "ref_model_revision"], |v| {
        off(v, "leave it out: the reference is the model that training begins with")
    }),
    (
        &[
            "rpo_alpha",
            "ld_alpha",
            "discopop_tau",
            "loss_weights",
            "cpo_alpha",
            "simpo_gamma",
            "desirable_weight",
            "undesirable_weight",
            "center_rewards_coefficient",
            "sft_alpha",
            "lmbda",
            "seq_kd",
            "gkd_logits_topk",
            "num_ppo_epochs",
            "whiten_rewards",
            "kl_coef",
            "cliprange",
            "cliprange_value",
            "vf_coef",
            "gamma",
            "lam",
            "num_mini_batches",
            "local_rollout_forward_batch_size",
            "num_sample_generations",
            "response_length",
            "missing_eos_penalty",
            "mrl_dims",
            "decision_*",
            "num_labels",
            "problem_type",
        ],
        |_| Dropped(OTHER_METHOD),
    ),
    (&["loss_scale", "is_binary_loss_scale"], |_| Dropped("all tokens of a completion have the same weight")),
    (
        &[
            "teacher_model",
            "teacher_adapters",
            "teacher_model_type",
            "teacher_model_revision",
            "teacher_deepspeed",
            "teacher_model_server",
            "offload_teacher_model",
            "teacher_kl_coef",
            "advantage_reweight",
        ],
        |v| off(v, NO_TEACHER),
    ),
    (&["teacher_tag_key", "rlsd_*", "sdar_*"], |_| {
        Dropped("it is for training with a teacher, which is unsupported")
    }),
    (&["chord_sft_dataset"], |v| {
        off(v, "run `sft` first: supervised rows within GRPO (CHORD) are unsupported")
    }),
    (&["chord_*"], |_| Dropped("it is for `chord_sft_dataset`, which is unsupported")),
    // Numbers of the reward `cosine`, which are the same as in TRL.
    (&["cosine_min_len_value_wrong"], |v| given(v, &["-1", "-1.0"])),
    (&["cosine_max_len_value_wrong"], |v| given(v, &["-0.5"])),
    (&["cosine_min_len_value_correct"], |v| given(v, &["1", "1.0"])),
    (&["cosine_max_len_value_correct"], |v| given(v, &["0.5"])),
    (&["cosine_max_len", "soft_max_length"], |_| Dropped("rewards of length use `max_completion_length`")),
    (&["soft_cache_length"], |v| off(v, LENGTHS)),
    (&["repetition_n_grams"], |v| match v {
        "3" => Dropped("the reward `repetition_tokens` counts 3-grams"),
        _ => Refused(LENGTHS),
    }),
    (&["repetition_max_penalty"], |v| given(v, &["-1", "-1.0"])),
    (&["reward_model_plugin"], |v| {
        off(v, "put a function from a file into `reward_funcs` as FILE.py:FUNCTION")
    }),
    (&["reward_adapters", "reward_model_type", "reward_model_revision", "reward_template"], |_| {
        Dropped("the directory of the reward model in `reward_funcs` sets it")
    }),
    (&["multi_turn_scheduler", "max_turns", "use_gym_env", "gym_env"], |v| off(v, NO_TURNS)),
    (&["completion_length_limit_scope"], |_| Dropped("a completion is always one turn")),
    (&["log_entropy", "log_rollout_offpolicy_metrics"], |_| Dropped("it is always logged")),
    (&["tau_pos"], |v| Becomes("sapo_temperature_pos", v.into())),
    (&["tau_neg"], |v| Becomes("sapo_temperature_neg", v.into())),
    (&["advantage_estimator"], |v| match v {
        "grpo" => Dropped("advantages are computed per group"),
        _ => Refused("leave it out: advantages are computed per group (`advantage`)"),
    }),
    (&["kl_in_reward"], |v| off(v, "leave it out: the KL is part of the loss, with weight `beta`")),
    (&["real_tau", "fipo_*"], |_| {
        Dropped("the losses REAL and FIPO are unsupported; `omnigrpo help loss_type` lists the losses")
    }),
    (&["rollout_importance_sampling_mode"], |v| Becomes("importance_sampling_correction", v.into())),
    (&["rollout_importance_sampling_threshold"], |v| Becomes("importance_sampling_clip_max", v.into())),
    (&["stop_words"], |v| match v.trim_start_matches('[').trim_end_matches(']') {
        "" => Dropped("it is off here as well"),
        _ => Becomes("stop_strings", listed(v)),
    }),
    (&["structured_outputs_regex"], |v| off(v, "leave it out: completions are not bound to a grammar")),
    (&["enable_flattened_weight_sync"], |_| Dropped(IN_PROCESS)),
    (&["load_args", "load_data_args", "ignore_args_error", "safe_serialization", "max_shard_size"], |_| {
        Dropped(WHERE)
    }),
    (&["swanlab_*"], |_| Dropped("SwanLab is unsupported; metrics.jsonl has every number")),
    (
        &["freeze_parameters", "freeze_parameters_regex", "freeze_parameters_ratio", "trainable_parameters"],
        |v| off(v, PARTS),
    ),
    (&["trainable_parameters_regex"], |v| Becomes("trainable_patterns", v.into())),
    (&["target_regex"], |v| Becomes("lora_target_modules", v.into())),
    (&["lora_bias", "bias"], |v| match v {
        "none" => Dropped("adapters have no bias"),
        v => off(v, "leave it out: adapters have no bias"),
    }),
    (&["lora_dtype"], |_| Dropped("adapters are trained in float32")),
    (&["lorap_lr_ratio"], |v| off(v, "leave it out: both halves of an adapter have the same learning rate")),
    (
        &[
            "lora_ga_*",
            "fourier_*",
            "boft_*",
            "vera_*",
            "adapter_act",
            "adapter_length",
            "adalora_*",
            "llamapro_*",
            "reft_*",
            "loftq_config",
            "tuner_backend",
            "use_swift_lora",
        ],
        |_| Dropped(OTHER_ADAPTER),
    ),
    (&["use_galore", "lisa_activated_layers"], |v| {
        off(v, "use `use_peft`: every selected weight has its own AdamW state")
    }),
    (&["galore_*", "lisa_*"], |_| Dropped("GaLore and LISA are unsupported")),
    (&["adapters"], |v| Becomes("adapter_name_or_path", listed(v))),
    (&["custom_register_path", "custom_dataset_info"], |v| {
        off(v, "write the rows as JSON lines: no code or registry of ms-swift is read")
    }),
    (&["columns"], |v| off(v, "use `prompt_column`, `solution_column`, `image_column` and `video_column`")),
    (&["disable_auto_column_mapping"], |_| Dropped("`prompt_column` and similar settings name the columns")),
    (&["enable_npu_model_patch", "experts_impl", "use_logits_to_keep"], |_| Dropped(OWN_KERNELS)),
    (&["packing", "packing_length", "packing_num_proc", "packing_strategy"], |_| {
        Dropped("groups are packed without padding")
    }),
    (
        &[
            "lazy_tokenize",
            "cached_dataset",
            "cached_val_dataset",
            "shuffle_buffer_size",
            "val_dataset_shuffle",
        ],
        |_| Dropped(READ_AHEAD),
    ),
    (&["interleave_prob"], |v| off(v, "give shares in `dataset_use`, such as a%50,b")),
    (&["stopping_strategy"], |_| Dropped("each pass draws all rows of all files")),
    (&["use_hf", "download_mode"], |_| Dropped("models and datasets come from the Hugging Face hub")),
    (&["stream", "logprobs", "top_logprobs"], |_| Dropped("the commands `generate` and `score` write them")),
    (&["hqq_axis"], |_| Dropped("`load_in_4bit` and `load_in_8bit` each have only one format")),
    (&["model_author", "model_name"], |v| match v.contains('/') {
        true => Becomes("model_name_or_path", v.into()),
        false => Dropped("rows about the model's identity are not added"),
    }),
    (
        &[
            "template",
            "agent_template",
            "template_backend",
            "norm_bbox",
            "preserve_thinking",
            "add_non_thinking_prefix",
            "disable_ignore_empty_think",
        ],
        |_| Dropped(TEMPLATE),
    ),
    (&["use_chat_template"], |v| match on(v) {
        Some(false) => Refused("leave it out: the checkpoint's chat template formats the prompts"),
        _ => Dropped(TEMPLATE),
    }),
    (&["response_prefix"], |v| off(v, "leave it out: completions begin where the chat template ends")),
    (&["enable_thinking"], |v| match on(v) {
        Some(on) => Becomes("chat_template_kwargs", format!("{{\"enable_thinking\": {on}}}")),
        None => Dropped(TEMPLATE),
    }),
    (&["new_special_tokens"], |v| off(v, "add the tokens to the checkpoint first: its vocabulary is fixed")),
    (&["rope_scaling"], |v| off(v, "write it into config.json of the checkpoint")),
    (&["device_map", "device_map_planner_kwargs", "max_memory"], |_| {
        Dropped("`device` sets where the model runs")
    }),
    (&["max_model_len"], |_| Dropped(WHOLE_ROWS)),
    (&["local_repo_path"], |_| Dropped("code in a checkpoint is never run")),
    (&["init_strategy"], |v| off(v, "use `init_weights` with a seed")),
    (&["vit_gradient_checkpointing", "vit_gradient_checkpointing_kwargs"], |_| {
        Dropped("`gradient_checkpointing` recomputes the blocks of all parts")
    }),
    (&["enable_dft_loss", "enable_channel_loss"], |v| off(v, "leave it out: `loss_type` names the loss")),
    (&["acc_strategy", "eval_metric"], |_| {
        Dropped("an evaluation samples completions and scores them with the rewards")
    }),
    (&["max_epochs"], |v| Becomes("num_train_epochs", v.into())),
    (&["aligner_lr"], |v| Becomes("mm_projector_lr", v.into())),
    (&["vit_lr"], |v| Becomes("vision_tower_lr", v.into())),
    (&["resume_only_model"], |v| {
        off(v, "give the checkpoint to `model_name_or_path`, which begins a new run from it")
    }),
    (&["callbacks", "early_stop_interval"], |v| {
        off(v, "leave it out: callbacks are unsupported; `save_strategy best` keeps the best")
    }),
    (
        &[
            "eval_use_evalscope",
            "eval_dataset",
            "eval_dataset_args",
            "eval_limit",
            "eval_generation_config",
            "extra_eval_args",
        ],
        |v| off(v, "use `eval_file`: benchmarks of EvalScope are unsupported"),
    ),
    (&["use_flash_ckpt", "use_ray", "ray_exp_name", "device_groups"], |_| Dropped(ONE_MACHINE)),
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
    (&["r"], |v| Becomes("lora_r", v.into())),
    (&["full_finetuning"], |v| match on(v) {
        Some(true) => Becomes("use_peft", "false".into()),
        _ => Dropped("`use_peft` trains adapters"),
    }),
    (&["load_in_16bit", "float32_mixed_precision"], |_| {
        Dropped("`torch_dtype` sets the precision of stored weights")
    }),
    (&["load_in_fp8"], |v| off(v, "use `load_in_8bit`")),
    (
        &[
            "model_types",
            "tokenizer_name",
            "auto_model",
            "auto_config",
            "auto_config_from_caller",
            "whisper_language",
            "whisper_task",
            "fix_tokenizer",
            "text_intent",
            "text_only",
            "text_only_decoder",
            "use_exact_model_name",
            "on_model_resolved",
            "ensure_weight_tying",
        ],
        |_| Dropped(IN_CHECKPOINT),
    ),
    (&["supports_sdpa", "return_logits", "fullgraph"], |_| Dropped(OWN_KERNELS)),
    (&["offload_embedding", "offload_layers", "checkpoint_skip_layers", "temporary_location"], |_| {
        Dropped("`omnigrpo plan` names the settings that save memory")
    }),
    (&["float8_kv_cache", "disable_log_stats"], |_| Dropped(IN_PROCESS)),
    (&["finetune_last_n_layers", "layers_to_transform", "layers_pattern"], |v| {
        off(v, "use `lora_target_modules` with a regular expression over whole names")
    }),
    (&["init_lora_weights"], |v| match on(v) {
        Some(true) => Dropped("adapters are initialised as in PEFT"),
        _ => Refused("leave it out: adapters are initialised as in PEFT by default"),
    }),
    (&["qat_scheme"], |v| off(v, "leave it out: training for quantised weights is unsupported")),
    (&["finetune_audio_layers"], |_| Dropped(ADAPTED)),
    (&["resize_model_vocab"], |v| off(v, "add the tokens to the checkpoint first: its vocabulary is fixed")),
    (&["random_state"], |v| Becomes("seed", v.into())),
    // verl and EasyR1: data.
    (&["easyr1.config"], |_| {
        Dropped("the file is not read; settings that are only in it have this program's defaults")
    }),
    (&["data.train_files"], rows),
    (&["data.val_files"], |v| match listed(v).split_once('@') {
        Some((_, rest)) if rest.contains(',') => Refused(SPLITS),
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
    (&["data.format_prompt"], |_| {
        Dropped("`question_template` and `system_prompt` set the wording of the question")
    }),
    (&["data.train_batch_size"], |_| Depends("actor_rollout_ref.actor.ppo_mini_batch_size", generation)),
    (&["data.rollout_batch_size"], |_| Depends("worker.actor.global_batch_size", generation)),
    (&["actor_rollout_ref.actor.ppo_mini_batch_size", "worker.actor.global_batch_size"], |v| {
        Becomes("gradient_accumulation_steps", v.into())
    }),
    (&["data.shuffle"], |v| match on(v) {
        Some(false) => Refused("leave it out: each pass draws the rows in an order set by `data_seed`"),
        _ => Dropped("each pass draws all rows in an order set by `data_seed`"),
    }),
    (&["data.train_max_samples", "data.val_max_samples"], |v| {
        off(v, "give a share in `dataset_use`, such as rows%50")
    }),
    (&["data.custom_cls.path", "data.sampler.class_path", "data.datagen.path"], |v| {
        off(v, "write the rows as JSON lines: no code of datasets is run")
    }),
    (&["data.trust_remote_code"], |_| Dropped("code in a checkpoint is never run")),
    (&["data.tool_config_path", "data.function_tool_path"], |v| off(v, NO_TURNS)),
    (&["data.override_chat_template"], |v| {
        off(v, "write the template into the checkpoint's chat_template.jinja")
    }),
    (&["data.reward_fn_key"], |_| Dropped("a reward gets every column of a row")),
    (&["data.*"], |_| Dropped(READ_AHEAD)),
    // verl and EasyR1: model.
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
    (&["actor_rollout_ref.model.lora_adapter_path"], |v| Becomes("adapter_name_or_path", v.into())),
    (&["actor_rollout_ref.model.exclude_modules", "worker.actor.model.lora.exclude_modules"], |v| {
        off(v, "use `lora_target_modules` with a regular expression over complete names")
    }),
    (&["actor_rollout_ref.model.custom_chat_template"], |v| {
        off(v, "write the template into the checkpoint's chat_template.jinja")
    }),
    (
        &[
            "actor_rollout_ref.model.tokenizer_path",
            "actor_rollout_ref.model.hf_config_path",
            "actor_rollout_ref.model.override_config.*",
            "actor_rollout_ref.model.override_config",
            "actor_rollout_ref.model.trust_remote_code",
            "actor_rollout_ref.model.external_lib",
            "worker.actor.model.tokenizer_path",
            "worker.actor.model.override_config",
            "worker.actor.model.trust_remote_code",
        ],
        |_| Dropped(IN_CHECKPOINT),
    ),
    (&["actor_rollout_ref.model.*", "worker.actor.model.*"], |_| Dropped(OWN_KERNELS)),
    // verl and EasyR1: update.
    // In both, the learning rate stays constant after its warm-up unless another schedule is given.
    (&["actor_rollout_ref.actor.optim.lr", "worker.actor.optim.lr"], |v| {
        BecomesAll(vec![
            ("learning_rate", v.to_owned()),
            ("lr_scheduler_type", "constant_with_warmup".to_owned()),
        ])
    }),
    (&["actor_rollout_ref.actor.optim.weight_decay", "worker.actor.optim.weight_decay"], |v| {
        Becomes("weight_decay", v.into())
    }),
    (&["actor_rollout_ref.actor.optim.lr_warmup_steps_ratio", "worker.actor.optim.lr_warmup_ratio"], |v| {
        match v.parse() {
            Ok(0.0) => Dropped("the rate starts at its peak"),
            _ => Becomes("warmup_ratio", v.to_owned()),
        }
    }),
    (&["actor_rollout_ref.actor.grad_clip", "worker.actor.max_grad_norm"], |v| {
        Becomes("max_grad_norm", v.into())
    }),
    (&["actor_rollout_ref.actor.optim.clip_grad"], |_| Dropped("actor.grad_clip says it")),
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
            _ => Refused("leave it out: the only optimizer is AdamW"),
        }
    }),
    (&["actor_rollout_ref.actor.optim.min_lr_ratio", "worker.actor.optim.min_lr_ratio"], |v| {
        off(v, "leave it out: a falling learning rate ends at 0")
    }),
    (&["actor_rollout_ref.actor.optim.warmup_style"], |v| match v {
        "constant" => Becomes("lr_scheduler_type", "constant_with_warmup".into()),
        v => Becomes("lr_scheduler_type", v.into()),
    }),
    (&["actor_rollout_ref.actor.optim.*", "worker.actor.optim.*"], |_| {
        Dropped("the optimizer is AdamW, and `lr_scheduler_type` sets the schedule of its rate")
    }),
    (&["worker.actor.loss_type"], |v| match v {
        "default" => Dropped("`loss_type` sets the GRPO loss"),
        "gspo" | "cispo" | "sapo" => Becomes("loss_type", v.into()),
        _ => Refused("use `loss_type`: grpo, dapo, gspo, cispo or sapo"),
    }),
    (&["actor_rollout_ref.actor.policy_loss.loss_mode"], |v| match v {
        "vanilla" => Dropped("`loss_type` sets the GRPO loss"),
        "gspo" | "sapo" => Becomes("loss_type", v.into()),
        _ => Refused("use `loss_type`: grpo, dapo, gspo, cispo or sapo"),
    }),
    (&["actor_rollout_ref.actor.clip_ratio_c", "worker.actor.clip_ratio_dual"], |v| {
        Becomes("delta", v.into())
    }),
    (&["actor_rollout_ref.actor.tau_pos", "worker.actor.tau_positive"], |v| {
        Becomes("sapo_temperature_pos", v.into())
    }),
    (&["actor_rollout_ref.actor.tau_neg", "worker.actor.tau_negative"], |v| {
        Becomes("sapo_temperature_neg", v.into())
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
        "grpo" => Dropped("advantages are computed per group"),
        _ => Refused("leave it out: advantages are computed per group (`advantage`)"),
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
    (&["algorithm.online_filtering"], |v| match on(v) {
        Some(true) => Becomes("max_resample_times", "3".into()),
        _ => Dropped("groups are replaced only by `max_resample_times`"),
    }),
    (&["algorithm.filter_groups.enable"], |v| match on(v) {
        Some(true) => Becomes("max_resample_times", "3".into()),
        _ => Dropped("groups are replaced only by `max_resample_times`"),
    }),
    (
        &[
            "algorithm.filter_groups.*",
            "algorithm.filter_key",
            "algorithm.filter_low",
            "algorithm.filter_high",
        ],
        |_| Dropped("`max_resample_times` replaces groups whose rewards are all equal"),
    ),
    (&["algorithm.norm_adv_by_std_in_grpo"], |v| match on(v) {
        Some(false) => Becomes("scale_rewards", "none".into()),
        _ => Dropped("`scale_rewards` group is the default"),
    }),
    (&["algorithm.kl_ctrl.*", "algorithm.kl_type", "algorithm.kl_horizon", "algorithm.kl_target"], |_| {
        Dropped("the KL is part of the loss, with the fixed weight `beta`")
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
    (&["algorithm.rollout_correction.rollout_rs"], |v| {
        off(v, "use `importance_sampling_correction` token_mask or sequence_mask")
    }),
    (&["algorithm.use_pf_ppo"], |v| off(v, "leave it out: rows are not drawn again by their rewards")),
    (&["algorithm.rollout_correction.*"], |_| {
        Dropped("`importance_sampling_correction` corrects for the difference between sampling and training")
    }),
    (&["algorithm.pf_ppo.*"], |_| Dropped(OTHER_METHOD)),
    // verl and EasyR1: sampling.
    (&["actor_rollout_ref.rollout.n", "worker.rollout.n"], |v| Becomes("num_generations", v.into())),
    (&["actor_rollout_ref.rollout.temperature", "worker.rollout.temperature"], |v| {
        Becomes("temperature", v.into())
    }),
    (&["actor_rollout_ref.rollout.top_p", "worker.rollout.top_p"], |v| Becomes("top_p", v.into())),
    (&["actor_rollout_ref.rollout.top_k", "worker.rollout.top_k"], |v| match v {
        "-1" => Becomes("top_k", "0".into()),
        v => Becomes("top_k", v.into()),
    }),
    (&["actor_rollout_ref.rollout.val_kwargs.n"], |v| Becomes("num_generations_eval", v.into())),
    (&["actor_rollout_ref.rollout.multi_turn.enable"], |v| off(v, NO_TURNS)),
    (&["actor_rollout_ref.rollout.*", "worker.rollout.*"], |_| Dropped(IN_PROCESS)),
    (&["actor_rollout_ref.ref.*", "worker.ref.*"], |_| {
        Dropped("the reference is scored in the same process")
    }),
    (&["actor_rollout_ref.*", "worker.hybrid_engine"], |_| Dropped(ONE_MACHINE)),
    // verl and EasyR1: rewards.
    (&["worker.reward.reward_function", "worker.reward.score_function"], |v| {
        Becomes("reward_funcs", v.into())
    }),
    (&["custom_reward_function.path"], |_| Depends("custom_reward_function.name", scored_by)),
    (&["reward.custom_reward_function.path"], |_| Depends("reward.custom_reward_function.name", scored_by)),
    (&["custom_reward_function.name", "reward.custom_reward_function.name"], |_| {
        Dropped("it is used together with custom_reward_function.path")
    }),
    (&["reward.num_workers"], |v| Becomes("reward_workers", v.into())),
    (&["reward.reward_model.enable"], |v| off(v, "give the directory of the reward model to `reward_funcs`")),
    (&["reward.sandbox_fusion.url", "sandbox_fusion.url"], |v| {
        off(v, "call the sandbox in a reward of your own, given to `reward_funcs` as FILE.py:FUNCTION")
    }),
    (
        &["worker.reward.*", "reward_model.*", "reward.*", "sandbox_fusion.*", "custom_reward_function.*"],
        |_| Dropped("`reward_funcs` sets the rewards"),
    ),
    (&["critic.*", "worker.critic.*", "algorithm.gamma", "algorithm.lam"], |_| {
        Dropped("GRPO has no critic: advantages are computed per group")
    }),
    (&["distillation.enabled"], |v| off(v, NO_TEACHER)),
    (&["distillation.*"], |_| Dropped("it is for training with a teacher, which is unsupported")),
    (&["transfer_queue.*", "skip.*"], |_| Dropped(ONE_MACHINE)),
    (&["global_profiler.*"], |_| Dropped("`profile` shows where the time goes")),
    // verl and EasyR1: run.
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
    (&["trainer.resume_mode"], |v| match v {
        "disable" => Becomes("resume_from_checkpoint", "never".into()),
        "resume_path" => Depends("trainer.resume_from_path", |_, path| match path {
            Some(path) => Becomes("resume_from_checkpoint", path.to_owned()),
            None => Refused("give the path to `resume_from_checkpoint`"),
        }),
        _ => Dropped("a run resumes automatically"),
    }),
    (&["trainer.load_checkpoint_path"], |v| Becomes("resume_from_checkpoint", v.into())),
    (&["trainer.find_last_checkpoint"], |v| match on(v) {
        Some(false) => Becomes("resume_from_checkpoint", "never".into()),
        _ => Dropped("a run resumes automatically"),
    }),
    (&["trainer.save_model_only"], |v| Becomes("save_only_model", v.into())),
    (
        &[
            "trainer.project_name",
            "trainer.log_val_generations",
            "trainer.val_generations_to_log",
            "trainer.rollout_data_dir",
            "trainer.validation_data_dir",
        ],
        |_| Dropped("the run directory contains metrics, rollouts and evaluations"),
    ),
    (&["trainer.critic_warmup", "trainer.max_critic_ckpt_to_keep"], |_| Dropped("GRPO has no critic")),
    (&["trainer.max_try_make_batch"], |_| Dropped("`max_resample_times` sets it")),
    (&["trainer.val_only"], |v| off(v, "use `omnigrpo eval`")),
    (&["trainer.n_gpus_per_node", "trainer.nnodes", "trainer.*", "ray_kwargs.*", "ray_init.*"], |_| {
        Dropped(ONE_MACHINE)
    }),
];

/// Splits a word `group.name=value` of verl or EasyR1.
#[cfg(feature = "cli")]
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
        return Refused("a number of rows after `#` is unsupported; use `dataset_use` with `%`");
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
