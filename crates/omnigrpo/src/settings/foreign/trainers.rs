//! Settings of transformers' `TrainingArguments` (5.23), of TRL's `GRPOConfig`, `ModelConfig` and `ScriptArguments` (1.16), and
//! of the cold start of R1-Omni, other than those in its launch scripts.

use super::Fate::{Becomes, BecomesAll, Dropped, Refused};
use super::{COMPLETE, IN_PROCESS, OWN_KERNELS, READ_AHEAD, Row, off, on};

const ADAMW: &str =
    "leave it out: the only optimizer is AdamW, with `adam_beta1`, `adam_beta2` and `adam_epsilon`";
const EVERY_STEP: &str = "metrics.jsonl has every step; `logging_steps` averages the lines of the console";
const SCORED: &str = "an evaluation samples completions and scores them with the rewards";
const SHOWN: &str = "`rollouts/` has every completion, and `omnigrpo watch` shows them";
const SHUFFLED: &str = "each pass draws all rows in an order set by `data_seed`";
const TURNS: &str = "leave it out: tools and conversations of several sampled turns are unsupported";
const CONFIGURED: &str = "the checkpoint's config.json sets it";

/// Rows of the table of settings.
pub(super) const TABLE: &[Row] = &[
    // transformers.
    (&["lr_scheduler_kwargs"], |v| {
        off(v, "leave it out: `lr_scheduler_type` and the warm-up settings fully define the learning rate")
    }),
    (&["optim_args", "optim_target_modules", "optimizer"], |v| off(v, ADAMW)),
    (
        &[
            "average_tokens_across_devices",
            "log_on_each_node",
            "save_on_each_node",
            "accelerator_config",
            "parallelism_config",
            "fsdp",
            "fsdp_config",
            "ddp_bucket_cap_mb",
            "ddp_broadcast_buffers",
            "ddp_static_graph",
            "ddp_backend",
            "ignore_bias_buffers",
            "zero_hpz_partition_size",
        ],
        |_| Dropped(COMPLETE),
    ),
    (&["label_smoothing_factor", "label_smoothing"], |v| off(v, "leave it out: labels are never smoothed")),
    (&["bf16_full_eval", "fp16_full_eval"], |_| {
        Dropped("an evaluation uses the trained weights in their own precision")
    }),
    (&["activation_checkpointing"], |v| Becomes("gradient_checkpointing", v.into())),
    (&["activation_checkpointing_kwargs"], |_| Dropped("there is only one way to recompute blocks")),
    (
        &["torch_compile_backend", "torch_compile_mode", "liger_kernel_config", "experts_implementation"],
        |_| Dropped(OWN_KERNELS),
    ),
    (&["use_cache"], |_| Dropped("sampling keeps keys and values, training does not")),
    (&["neftune_noise_alpha"], |v| off(v, "leave it out: noise on embeddings is unsupported")),
    (&["torch_empty_cache_steps"], |_| Dropped("memory is freed when it is no longer needed")),
    (&["auto_find_batch_size"], |_| Dropped("`omnigrpo plan` shows what fits")),
    (&["logging_strategy", "logging_first_step", "include_num_input_tokens_seen"], |_| Dropped(EVERY_STEP)),
    (&["logging_nan_inf_filter"], |_| Dropped("a non-finite loss stops the run")),
    (&["log_level", "log_level_replica"], |_| Dropped("the environment variable RUST_LOG sets it")),
    (&["project", "trackio_*"], |_| Dropped("Trackio is unsupported; metrics.jsonl has every number")),
    (&["eval_delay"], |v| off(v, "leave it out: `eval_steps` and `eval_on_start` set when to evaluate")),
    (
        &[
            "prediction_loss_only",
            "eval_do_concat_batches",
            "eval_use_gather_object",
            "include_for_metrics",
            "include_inputs_for_metrics",
            "batch_eval_metrics",
            "predict_with_generate",
        ],
        |_| Dropped(SCORED),
    ),
    (&["enable_jit_checkpoint"], |_| {
        Dropped("after SIGTERM, the run completes its step and saves a checkpoint")
    }),
    (&["hub_token", "push_to_hub_token", "token"], |_| {
        Dropped("the environment variable HF_TOKEN contains the token of the hub")
    }),
    (&["hub_always_push"], |v| match on(v) {
        Some(true) => Becomes("hub_strategy", "every_save".into()),
        _ => Dropped("`hub_strategy` sets when to push"),
    }),
    (&["hub_revision"], |v| off(v, "leave it out: the model is pushed to the main branch")),
    (&["load_best_model_at_end"], |_| {
        Dropped(
            "the run ends with the model of its last step; `save_strategy best` keeps the best checkpoint",
        )
    }),
    (&["greater_is_better"], |v| match on(v) {
        Some(false) => {
            Refused("use a `metric_for_best_model` for which higher is better, such as eval_reward")
        }
        _ => Dropped("higher is better"),
    }),
    (&["ignore_data_skip"], |v| off(v, "leave it out: a resumed run continues with the next row")),
    (&["restore_callback_states_from_checkpoint"], |_| Dropped("callbacks are unsupported")),
    (&["full_determinism"], |_| Dropped("the same seed gives the same run")),
    (&["use_cpu", "no_cuda"], |v| match on(v) {
        Some(true) => Becomes("device", "cpu".into()),
        _ => Dropped("`device` sets where the model runs"),
    }),
    (&["dataloader_drop_last"], |_| Dropped("a step may take rows from two passes")),
    (&["dataloader_multiprocessing_context", "dataloader_in_order", "dataset_streaming"], |_| {
        Dropped(READ_AHEAD)
    }),
    (
        &[
            "label_names",
            "length_column_name",
            "group_by_length",
            "group_by_modality_length",
            "train_sampling_strategy",
        ],
        |_| Dropped(SHUFFLED),
    ),
    (&["shuffle_dataset", "dataset_shuffle", "train_dataloader_shuffle"], |v| match on(v) {
        Some(false) => Refused("leave it out: each pass draws the rows in an order set by `data_seed`"),
        _ => Dropped(SHUFFLED),
    }),
    (&["debug", "skip_memory_metrics"], |_| Dropped("memory is always logged, and `profile` shows the time")),
    (&["do_train", "do_eval", "do_predict"], |_| Dropped("the command sets it: `train` or `eval`")),
    // TRL.
    (&["model_init_kwargs", "model_kwargs"], |v| {
        off(v, "give its settings by their names: `torch_dtype`, `device`, `load_in_4bit`")
    }),
    (&["disable_dropout"], |_| Dropped("only adapters have dropout (`lora_dropout`)")),
    (&["cast_lm_head_to_fp32"], |_| Dropped("logits are summed up in float32")),
    (&["pad_to_multiple_of", "padding_side"], |_| Dropped("nothing is padded")),
    (&["generation_kwargs"], |v| {
        off(v, "give its settings by their names: `temperature`, `top_p`, `repetition_penalty`")
    }),
    (
        &[
            "cache_implementation",
            "use_transformers_continuous_batching",
            "transformers_continuous_batching_config",
            "use_transformers_paged",
        ],
        |_| Dropped(IN_PROCESS),
    ),
    (&["vespo_*"], |_| Dropped("the loss VESPO is unsupported; `omnigrpo help loss_type` lists the losses")),
    (&["use_adaptive_entropy"], |v| off(v, "use `entropy_coef`: a target for the entropy is unsupported")),
    (&["entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"], |_| {
        Dropped("it is for `use_adaptive_entropy`, which is unsupported")
    }),
    (&["max_tool_calling_iterations"], |v| off(v, TURNS)),
    (&["off_policy_mask_threshold", "off_policy_sequence_mask_delta"], |v| {
        off(v, "use `importance_sampling_correction sequence_mask`")
    }),
    (
        &["log_multimodal", "num_completions_to_print", "log_unique_prompts", "wandb_log_unique_prompts"],
        |_| Dropped(SHOWN),
    ),
    (&["log_completions_hub_repo"], |v| off(v, "leave it out: completions are never sent to the hub")),
    (&["model_revision", "revision"], |v| match v {
        "main" => Dropped("this revision is always downloaded"),
        v => off(v, "give the directory of that revision to `model_name_or_path`"),
    }),
    (&["lora_target_parameters", "target_parameters"], |v| {
        off(v, "use `lora_target_modules experts`, which adapts every expert of a mixture")
    }),
    (&["use_dora"], |v| off(v, "leave it out: adapters are LoRA, with `use_rslora` for high ranks")),
    (&["use_bnb_nested_quant"], |_| Dropped("`load_in_4bit` and `load_in_8bit` each have only one format")),
    // R1-Omni's cold start, and VLM-R1.
    (
        &[
            "model_type",
            "version",
            "mm_projector_type",
            "mm_vision_select_layer",
            "mm_vision_select_feature",
            "mm_use_x_start_end",
            "mm_use_im_start_end",
            "mm_use_im_patch_token",
            "image_aspect_ratio",
            "mm_patch_merge_type",
        ],
        |_| Dropped(CONFIGURED),
    ),
    (&["mm_tunable_parts"], |v| {
        let trains = |marks: [&str; 2]| marks.iter().any(|mark| v.contains(mark)).to_string();
        BecomesAll(vec![
            ("tune_mm_llm", trains(["language_model", "llm"])),
            ("tune_mm_mlp", trains(["mlp", "projector"])),
            ("tune_mm_vision", trains(["vision_tower", "audio_tower"])),
        ])
    }),
    (&["data_path"], |v| Becomes("train_file", v.into())),
    (&["data_folder"], |v| {
        BecomesAll(
            ["image_folders", "video_folders", "audio_folders"].map(|name| (name, v.to_owned())).to_vec(),
        )
    }),
    (&["num_frames"], |v| Becomes("nframes", v.into())),
    (&["lora_resume_checkpoint"], |v| Becomes("adapter_name_or_path", v.into())),
];
