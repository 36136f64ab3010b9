//! The trainers whose scripts are read, and their defaults.

/// A trainer whose scripts are read.
#[derive(Debug)]
pub struct System {
    pub name: &'static str,
    /// Preset with its defaults; empty if there is none.
    pub preset: &'static str,
    /// Defaults by the names of the trainer. They mean the same as in a script. Those that change nothing here are left out.
    pub defaults: &'static [(&'static str, &'static str)],
    /// Environment variables that it reads as settings, with the name of the setting.
    pub variables: &'static [(&'static str, &'static str)],
    /// Unit of its batch and its steps.
    pub counts: Counts,
}

/// Units of a trainer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counts {
    /// A batch belongs to each process, and a step is an update.
    Updates,
    /// A batch belongs to all processes, and a step is a rollout with its updates.
    Rollouts,
}

pub const TRL: System = System {
    name: "TRL",
    preset: "trl",
    // `ModelConfig` of `trl/trainer/model_config.py`. The preset has those of `GRPOConfig`.
    defaults: &[("lora_r", "16"), ("lora_alpha", "32"), ("lora_dropout", "0.05")],
    variables: &[],
    counts: Counts::Updates,
};
/// TRL in a script that makes the adapters itself.
pub const TRL_PEFT: System = System {
    // `LoraConfig` of `peft/tuners/lora/config.py`.
    defaults: &[("lora_r", "8"), ("lora_alpha", "8"), ("lora_dropout", "0")],
    ..TRL
};
pub const UNSLOTH: System = System {
    name: "Unsloth",
    // `get_peft_model` of `unsloth/models/vision.py`.
    defaults: &[("lora_r", "16"), ("lora_alpha", "16"), ("lora_dropout", "0")],
    ..TRL
};
pub const VLM_R1: System = System { name: "VLM-R1", preset: "vlm-r1", ..TRL };
pub const VIVQA_X: System = System { name: "VLM-R1 for ViVQA-X", preset: "vivqa-x", ..TRL };
pub const R1_V: System = System { name: "R1-V", preset: "r1-v", ..TRL };
pub const VIDEO_R1: System = System {
    name: "Video-R1",
    preset: "r1-v",
    // `GRPOScriptArguments` of its `src/r1-v/src/open_r1/grpo.py`.
    defaults: &[("temporal", "true"), ("len_control", "true")],
    ..TRL
};
pub const R1_OMNI: System = System { name: "R1-Omni", preset: "humanomni", ..TRL };
pub const QWEN_VIDEO: System = System { name: "qwen-vl-finetune", preset: "qwen-mcq", ..TRL };
pub const MS_SWIFT: System = System {
    name: "ms-swift",
    preset: "trl",
    defaults: &[
        // `swift/arguments/rlhf_args.py`.
        ("rlhf_type", "grpo"),
        ("loss_type", "grpo"),
        ("beta", "0.04"),
        ("temperature", "0.9"),
        ("num_generations", "8"),
        ("max_completion_length", "512"),
        ("gradient_accumulation_steps", "1"),
        // `swift/trainers/arguments.py`.
        ("per_device_train_batch_size", "1"),
        ("gradient_checkpointing", "true"),
        ("logging_steps", "5"),
        ("weight_decay", "0.1"),
        ("adam_beta2", "0.95"),
        ("lr_scheduler_type", "cosine"),
        ("report_to", "tensorboard"),
        // `swift/arguments/tuner_args.py` and `swift/arguments/base_args/base_args.py`.
        ("tuner_type", "lora"),
        ("freeze_llm", "false"),
        ("freeze_vit", "true"),
        ("freeze_aligner", "true"),
        ("lora_rank", "8"),
        ("lora_alpha", "32"),
        ("lora_dropout", "0.05"),
        ("target_modules", "all-linear"),
        // `swift/arguments/base_args/data_args.py`.
        ("data_seed", "42"),
    ],
    // `swift/template` and `qwen_vl_utils`.
    variables: &[
        ("MIN_PIXELS", "min_pixels"),
        ("MAX_PIXELS", "max_pixels"),
        ("FPS", "fps"),
        ("FPS_MIN_FRAMES", "video_min_frames"),
        ("FPS_MAX_FRAMES", "video_max_frames"),
        ("NFRAMES", "nframes"),
        ("VIDEO_MIN_PIXELS", "video_min_frame_pixels"),
        ("VIDEO_MAX_PIXELS", "video_max_frame_pixels"),
        ("VIDEO_TOTAL_PIXELS", "total_pixels"),
    ],
    counts: Counts::Updates,
};
pub const VERL: System = System {
    name: "verl",
    preset: "",
    defaults: &[
        // `verl/trainer/config/data/legacy_data.yaml`.
        ("data.train_batch_size", "1024"),
        ("data.max_prompt_length", "512"),
        ("data.max_response_length", "512"),
        // `verl/trainer/config/actor/actor.yaml`.
        ("actor_rollout_ref.actor.ppo_mini_batch_size", "256"),
        ("actor_rollout_ref.actor.ppo_epochs", "1"),
        ("actor_rollout_ref.actor.clip_ratio_low", "0.2"),
        ("actor_rollout_ref.actor.clip_ratio_high", "0.2"),
        ("actor_rollout_ref.actor.clip_ratio_c", "3.0"),
        ("actor_rollout_ref.actor.loss_agg_mode", "token-mean"),
        ("actor_rollout_ref.actor.use_kl_loss", "false"),
        ("actor_rollout_ref.actor.kl_loss_coef", "0.001"),
        ("actor_rollout_ref.actor.kl_loss_type", "low_var_kl"),
        ("actor_rollout_ref.actor.freeze_vision_tower", "false"),
        // `verl/trainer/config/optim/fsdp.yaml`, and the rate of `actor.yaml`.
        ("actor_rollout_ref.actor.optim.lr", "1e-6"),
        ("actor_rollout_ref.actor.optim.lr_scheduler_type", "constant"),
        ("actor_rollout_ref.actor.optim.weight_decay", "0.01"),
        ("actor_rollout_ref.actor.optim.betas", "[0.9,0.999]"),
        ("actor_rollout_ref.actor.optim.clip_grad", "1.0"),
        // `verl/trainer/config/rollout/rollout.yaml`.
        ("actor_rollout_ref.rollout.n", "1"),
        ("actor_rollout_ref.rollout.temperature", "1.0"),
        ("actor_rollout_ref.rollout.top_p", "1"),
        ("actor_rollout_ref.rollout.top_k", "-1"),
        // `verl/trainer/config/model/hf_model.yaml`.
        ("actor_rollout_ref.model.lora_rank", "0"),
        ("actor_rollout_ref.model.lora_alpha", "16"),
        ("actor_rollout_ref.model.target_modules", "all-linear"),
        ("actor_rollout_ref.model.enable_gradient_checkpointing", "true"),
        // `verl/trainer/config/ppo_trainer.yaml`.
        ("algorithm.norm_adv_by_std_in_grpo", "true"),
        ("trainer.total_epochs", "30"),
        ("trainer.logger", "[console,wandb]"),
        ("trainer.save_freq", "-1"),
        ("trainer.test_freq", "-1"),
        ("trainer.val_before_train", "true"),
        ("trainer.n_gpus_per_node", "8"),
    ],
    variables: &[],
    counts: Counts::Rollouts,
};
pub const EASY_R1: System = System {
    name: "EasyR1",
    preset: "",
    defaults: &[
        // `examples/config.yaml`, which its scripts name.
        ("data.prompt_key", "problem"),
        ("data.answer_key", "answer"),
        ("data.video_fps", "2.0"),
        ("data.max_prompt_length", "2048"),
        ("data.max_response_length", "2048"),
        ("data.rollout_batch_size", "512"),
        ("data.format_prompt", "./examples/format_prompt/math.jinja"),
        ("data.seed", "1"),
        ("data.min_pixels", "262144"),
        ("data.max_pixels", "4194304"),
        ("algorithm.disable_kl", "false"),
        ("algorithm.use_kl_loss", "true"),
        ("algorithm.kl_penalty", "low_var_kl"),
        ("algorithm.kl_coef", "1.0e-2"),
        ("algorithm.online_filtering", "false"),
        ("worker.actor.global_batch_size", "128"),
        ("worker.actor.max_grad_norm", "1.0"),
        ("worker.actor.model.enable_gradient_checkpointing", "true"),
        ("worker.actor.model.freeze_vision_tower", "false"),
        ("worker.actor.model.lora.rank", "0"),
        ("worker.actor.model.lora.alpha", "64"),
        ("worker.actor.model.lora.target_modules", "all-linear"),
        ("worker.actor.optim.lr", "1.0e-6"),
        ("worker.actor.optim.weight_decay", "1.0e-2"),
        ("worker.actor.optim.lr_warmup_ratio", "0.0"),
        ("worker.actor.fsdp.enable_full_shard", "true"),
        ("worker.actor.offload.offload_optimizer", "true"),
        ("worker.rollout.n", "5"),
        ("worker.rollout.temperature", "1.0"),
        ("worker.rollout.top_p", "1.0"),
        ("worker.rollout.val_override_config.temperature", "0.6"),
        ("worker.reward.reward_function", "./examples/reward_function/math.py:compute_score"),
        ("trainer.total_epochs", "15"),
        ("trainer.logger", "[file,wandb]"),
        ("trainer.n_gpus_per_node", "8"),
        ("trainer.max_try_make_batch", "20"),
        ("trainer.val_freq", "5"),
        ("trainer.val_before_train", "true"),
        ("trainer.save_freq", "5"),
        ("trainer.save_limit", "3"),
        // `verl/workers/actor/config.py`.
        ("worker.actor.clip_ratio_low", "0.2"),
        ("worker.actor.clip_ratio_high", "0.3"),
        ("worker.actor.clip_ratio_dual", "3.0"),
        ("worker.actor.loss_avg_mode", "token"),
        ("worker.actor.ppo_epochs", "1"),
        ("worker.actor.optim.betas", "[0.9,0.999]"),
        ("worker.actor.optim.lr_scheduler_type", "constant"),
        ("worker.rollout.top_k", "-1"),
    ],
    variables: &[],
    counts: Counts::Rollouts,
};
