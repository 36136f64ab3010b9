"""Settings by name, for `GRPOConfig` and others. Written by tools/packaging/stubs.py; do not edit."""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict

class Settings(TypedDict, total=False):
    port: int
    served_model_name: str | float | bool
    strict: bool
    input: str | PathLike[str]
    output: str | PathLike[str]
    keep: str | float | bool
    prompt: str | float | bool
    image: Sequence[str | float | bool] | str | float | bool | str | PathLike[str]
    video: Sequence[str | float | bool] | str | float | bool | str | PathLike[str]
    audio: Sequence[str | float | bool] | str | float | bool | str | PathLike[str]
    num_rows: int
    workload: Literal["own", "easyr1-3b"]
    num_images: int
    image_px: int
    prompt_tokens: int
    completion_tokens: int
    num_prompts: int
    num_steps: int
    json: str | PathLike[str]
    model_name_or_path: str | float | bool
    model_path: str | float | bool
    torch_dtype: Literal["auto", "float32", "bfloat16"]
    dtype: Literal["auto", "float32", "bfloat16"]
    device: str | float | bool
    reference_device: str | float | bool
    gpu_memory: str | float | bool
    gpu_rates: str | float | bool
    adapter_name_or_path: str | PathLike[str]
    adapter_path: str | PathLike[str]
    merge: bool
    format: Literal["safetensors", "gguf"]
    outtype: Literal["f16", "q8_0"]
    load_in_8bit: bool
    load_in_4bit: bool
    quantized_activations: Literal["auto", "float32"]
    bf16_products: Literal["auto", "widened", "dot", "amx"]
    init_weights: int
    pure_bf16: bool
    stochastic_rounding: bool
    max_stream_tokens: int
    gradient_checkpointing: bool
    train_file: Sequence[str | float | bool] | str | float | bool | str | PathLike[str]
    dataset_config: str | float | bool
    dataset_train_split: str | float | bool
    dataset_test_split: str | float | bool
    dataset_use: Sequence[str | float | bool] | str | float | bool | str | PathLike[str]
    dataset_registry: str | PathLike[str]
    data_file_paths: Sequence[str | float | bool] | str | float | bool | str | PathLike[str]
    data_paths: Sequence[str | float | bool] | str | float | bool | str | PathLike[str]
    filter_low: float
    filter_high: float
    curriculum: Literal["off", "easy_first", "hard_first"]
    eval_file: Sequence[str | float | bool] | str | float | bool | str | PathLike[str]
    eval_dataset_use: Sequence[str | float | bool] | str | float | bool | str | PathLike[str]
    val_split_ratio: float | str | PathLike[str]
    prompt_column: str | float | bool
    prompt_key: str | float | bool
    solution_column: str | float | bool
    answer_key: str | float | bool
    question: str | float | bool
    image_column: str | float | bool
    image_key: str | float | bool
    video_column: str | float | bool
    video_key: str | float | bool
    audio_column: str | float | bool
    audio_key: str | float | bool
    image_folders: Sequence[str | float | bool] | str | float | bool | str | PathLike[str]
    video_folders: Sequence[str | float | bool] | str | float | bool | str | PathLike[str]
    audio_folders: Sequence[str | float | bool] | str | float | bool | str | PathLike[str]
    continue_text_prompts: bool
    use_audio_in_video: bool
    missing_audio: Literal["error", "silence"]
    allow_urls: Literal["off", "public", "all"]
    media_timeout_secs: float
    mm_processor_cache_gb: float
    allow_text_only: bool
    strict_media: bool
    max_skipped: float | str | PathLike[str]
    skip_data_check: bool
    orientation: Literal["upright", "stored"]
    min_pixels: int
    max_pixels: int
    frame_sampling: Literal["qwen_vl_utils", "base_interval", "meta", "processor"]
    fps: float
    nframes: int
    video_min_frames: int
    min_frames: int
    video_max_frames: int
    max_frames: int
    base_interval: float
    video_min_frame_pixels: int
    video_max_frame_pixels: int
    total_pixels: int
    question_template: Literal["none", "default", "rec", "ic", "odLength", "r1-v", "emotion", "humanomni", "context"]
    system_prompt: str | float | bool
    chat_template_kwargs: Mapping[str, Any] | str | PathLike[str]
    max_prompt_length: int
    model_max_length: int
    rewards: Sequence[str | float | bool] | str | float | bool | str | PathLike[str]
    reward_weights: Sequence[float] | float | str | PathLike[str]
    format_reward_weight: float
    accuracy_reward_weight: float
    format_mode: Literal["strict", "graded", "tags3", "r1v", "rec", "context"]
    accuracy_mode: Sequence[Literal["auto", "label", "emotion", "mcq_exact", "mcq_iou", "short_text", "math", "yes_no", "iou", "temporal_iou", "od_ap", "od_ap50", "odLength", "weighted_sum", "all_match", "fuzzy", "r1v", "mcq", "map", "default"]] | Literal["auto", "label", "emotion", "mcq_exact", "mcq_iou", "short_text", "math", "yes_no", "iou", "temporal_iou", "od_ap", "od_ap50", "odLength", "weighted_sum", "all_match", "fuzzy", "r1v", "mcq", "map", "default"] | str | PathLike[str]
    reward_method: Sequence[Literal["auto", "label", "emotion", "mcq_exact", "mcq_iou", "short_text", "math", "yes_no", "iou", "temporal_iou", "od_ap", "od_ap50", "odLength", "weighted_sum", "all_match", "fuzzy", "r1v", "mcq", "map", "default"]] | Literal["auto", "label", "emotion", "mcq_exact", "mcq_iou", "short_text", "math", "yes_no", "iou", "temporal_iou", "od_ap", "od_ap50", "odLength", "weighted_sum", "all_match", "fuzzy", "r1v", "mcq", "map", "default"] | str | PathLike[str]
    accu_reward_method: Sequence[Literal["auto", "label", "emotion", "mcq_exact", "mcq_iou", "short_text", "math", "yes_no", "iou", "temporal_iou", "od_ap", "od_ap50", "odLength", "weighted_sum", "all_match", "fuzzy", "r1v", "mcq", "map", "default"]] | Literal["auto", "label", "emotion", "mcq_exact", "mcq_iou", "short_text", "math", "yes_no", "iou", "temporal_iou", "od_ap", "od_ap50", "odLength", "weighted_sum", "all_match", "fuzzy", "r1v", "mcq", "map", "default"] | str | PathLike[str]
    answer_policy: Literal["last", "first"]
    think: Literal["auto", "on", "off"]
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"]
    temporal_order_bonus: bool
    length_bonus: bool
    compat: Sequence[Literal["s2_accuracy", "s3_accuracy", "s3_format", "s4_accuracy", "s4_format", "s4_explanation", "vlmr1_choice", "vlmr1_iou", "vlmr1_length"]] | Literal["s2_accuracy", "s3_accuracy", "s3_format", "s4_accuracy", "s4_format", "s4_explanation", "vlmr1_choice", "vlmr1_iou", "vlmr1_length"] | str | PathLike[str]
    reward_timeout_secs: float
    reward_workers: int
    judge_model: str | float | bool
    judge_prompt: str | PathLike[str]
    reward_python: str | float | bool
    clip_model: str | float | bool
    clip_text_model: str | float | bool
    explanation_clip_weight: float
    bertscore_model: str | float | bool
    bertscore_layer: int
    bertscore_idf: bool
    bertscore_baseline: str | PathLike[str]
    num_generations: int
    grpo_sample_size: int
    num_samples: int
    g: int
    max_resample_times: int
    temperature: float
    generation_temperature: float
    top_p: float
    generation_top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    logprob_temperature: float
    max_completion_length: int
    generation_max_length: int
    min_completion_length: int
    stop_strings: Sequence[str | float | bool] | str | float | bool | str | PathLike[str]
    stop: Sequence[str | float | bool] | str | float | bool | str | PathLike[str]
    environment: str | float | bool
    max_turns: int
    max_tool_calling_iterations: int
    max_tool_tokens: int
    max_tool_images: int
    batch_size: int
    replay: str | PathLike[str]
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "gspo", "sapo", "luspo", "vespo", "gmpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl", "seq_logp", "clamped_std", "gspo_token", "geo_mean", "reinforce++", "reinforce++_baseline", "dppo"]
    teacher_model_name_or_path: str | float | bool
    teacher_model: str | float | bool
    teacher_prompt_column: str | float | bool
    privileged_context_column: str | float | bool
    teacher_prompt_template: str | float | bool
    teacher_coef: float
    teacher_kl_coef: float
    teacher_divergence: Literal["reverse_kl", "forward_kl", "jsd"]
    teacher_top_k: int
    loss_top_k: int
    distillation_topk: int
    gkd_logits_topk: int
    teacher_beta: float
    distillation_alpha: float
    ref_model_name_or_path: str | float | bool
    ref_model: str | float | bool
    ref_load_in_8bit: bool
    ref_load_in_4bit: bool
    beta: float
    grpo_beta: float
    grpo_alpha: float
    scale_rewards: Literal["group", "batch", "none"]
    advantage: Literal["group_std", "batch_std", "group_center", "group_std_clamped", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "grpo_passk", "maxrl", "rloo_vectorized", "reinforce++", "max_rl"]
    kl: Literal["k3", "k1_seq"]
    use_bias_correction_kl: bool
    router_aux_loss_coef: float
    moe_aux_loss_coeff: float
    router_z_loss_coef: float
    moe_z_loss_coeff: float
    loss_agg: Literal["seq_mean", "token_mean", "token_mean_local", "constant_length", "token_sum"]
    importance_sampling_level: Literal["token", "sequence", "sequence_product"]
    epsilon: float
    epsilon_high: float
    delta: float
    off_policy_mask_threshold: float
    off_policy_sequence_mask_delta: float
    sapo_temperature_pos: float
    sapo_temperature_neg: float
    vespo_k_pos: float
    vespo_lambda_pos: float
    vespo_k_neg: float
    vespo_lambda_neg: float
    clip_cov_ratio: float
    clip_cov_lb: float
    clip_cov_ub: float
    kl_cov_ratio: float
    ppo_kl_coef: float
    num_iterations: int
    steps_per_generation: int
    sync_ref_model: bool
    ref_model_sync_steps: int
    ref_model_mixup_alpha: float
    mask_truncated_completions: bool
    top_entropy_quantile: float
    importance_sampling_correction: Literal["off", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
    vllm_importance_sampling_mode: Literal["off", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
    importance_sampling_clip_max: float
    vllm_importance_sampling_clip_max: float
    importance_sampling_clip_min: float
    vllm_importance_sampling_clip_min: float
    entropy_coef: float
    learning_rate: float
    lr: float
    lr_scheduler_type: Literal["constant", "constant_with_warmup", "linear", "cosine"]
    lr_scheduler: Literal["constant", "constant_with_warmup", "linear", "cosine"]
    warmup_ratio: float | str | PathLike[str]
    warmup_steps: int
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    max_grad_norm: float
    optim: Literal["adamw", "adamw_8bit"]
    grad_dtype: Literal["float32", "bfloat16"]
    offload_optimizer: Literal["none", "cpu", "file"] | bool
    nvme_path: str | PathLike[str]
    mm_projector_lr: float
    vision_tower_lr: float
    tune_mm_llm: bool
    tune_mm_mlp: bool
    tune_mm_vision: bool
    freeze_vision_modules: bool
    trainable_patterns: Sequence[str | float | bool] | str | float | bool | str | PathLike[str]
    use_peft: bool
    use_lora: bool
    lora_enable: bool
    lora_r: int
    lora_alpha: float
    lora_dropout: float
    lora_target_modules: Sequence[str | float | bool] | str | float | bool | str | PathLike[str]
    lora_targets: Sequence[str | float | bool] | str | float | bool | str | PathLike[str]
    use_rslora: bool
    per_device_train_batch_size: int
    batch_unit: Literal["prompts", "completions"]
    gradient_accumulation_steps: int
    exp_name: str | float | bool
    deepspeed: str | PathLike[str]
    num_train_epochs: float
    max_steps: int
    seed: int
    data_seed: int
    save_strategy: Literal["no", "steps", "epoch", "best"]
    save_steps: int
    save_minutes: float
    save_total_limit: int
    save_only_model: bool
    resume_from_checkpoint: str | float | bool
    stop_on_collapse: bool
    push_to_hub: bool
    hub_model_id: str | float | bool
    hub_private_repo: bool
    hub_strategy: Literal["end", "every_save"]
    allow_changed_settings: bool
    eval_strategy: Literal["no", "steps", "epoch"]
    evaluation_strategy: Literal["no", "steps", "epoch"]
    eval_steps: int
    eval_on_start: bool
    num_generations_eval: int
    metric_for_best_model: str | float | bool
    category_column: str | float | bool
    accuracy_threshold: float
    label_set: Sequence[str | float | bool] | str | float | bool | str | PathLike[str]
    logging_steps: int
    grpo_logging_steps: int
    report_to: Sequence[Literal["none", "jsonl", "tensorboard", "wandb", "trackio", "prometheus", "all"]] | Literal["none", "jsonl", "tensorboard", "wandb", "trackio", "prometheus", "all"] | str | PathLike[str]
    prometheus_port: int
    dashboard: bool
    dashboard_port: int
    host: str | float | bool
    allowed_hosts: Sequence[str | float | bool] | str | float | bool | str | PathLike[str]
    tui: bool
    notify: Sequence[str | float | bool] | str | float | bool | str | PathLike[str]
    profile: bool
    gpu: bool
    run_name: str | float | bool
    log_completions: bool
    log_token_stats: bool
    preset: Literal["r1-v", "humanomni", "humanomni-v2", "qwen-video", "qwen-mcq", "vivqa-x", "vlm-r1", "deepeyes", "trl"]
    threads: int
    nproc_per_node: int
    num_processes: int
    nnodes: int
    gradient_leaves: int
    gradient_sum: Literal["ordered", "engine"]
    shard: Literal["none", "optimizer", "gradients", "weights"]
    shard_min_elements: int
    stage3_param_persistence_threshold: int
    min_num_params: int
    reduce_bucket_size: int
    ddp_backend: Literal["auto", "nccl", "mpi", "gloo"]
    rank_address: str | float | bool
    ddp_timeout: int
    vision_tower: str | float | bool
    audio_tower: str | float | bool
    bert: str | float | bool
    mm_dynamic_compressor: bool
    prompt_form: Literal["sft", "r1omni_grpo"]
    tune_gate: bool
    tune_bert: bool
    max_anyres_num: int
    layout: Literal["hf", "original"]
