//! Command lines as their projects publish them, with `omnigrpo train` in place of the launcher and the script; variables of the
//! scripts are filled in.

/// The launch script of R1-Omni's trainers.
pub const R1_OMNI: &str = "--output_dir ./outputs/test_humanomni_emer_1format_withpath_withchoice/ \
    --model_name_or_path siglip-base-patch16-224 --dataset_name DFEW_all --deepspeed local_scripts/zero3.json \
    --max_prompt_length 512 --max_completion_length 512 --per_device_train_batch_size 1 \
    --gradient_accumulation_steps 2 --logging_steps 1 --bf16 --report_to wandb --gradient_checkpointing false \
    --attn_implementation flash_attention_2 --max_pixels 401408 --num_train_epochs 2 \
    --run_name Qwen2-VL-2B-GRPO-emotion --save_steps 1000 --save_only_model true --num_generations 8";

/// The command of the GRPO guide for qwen-vl-finetune.
pub const QWEN_GUIDE: &str = "--model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct --dataset_use assy07_grpo \
    --output_dir ./output/grpo_model --num_train_epochs 3 --per_device_train_batch_size 1 --grpo_alpha 0.5 \
    --grpo_beta 0.1 --format_reward_weight 0.3 --accuracy_reward_weight 0.7 --grpo_sample_size 4";

/// The command of the video repository's README.
pub const VIDEO_README: &str = "--model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct \
    --dataset_use your_video_dataset_grpo --output_dir ./output/grpo_model --num_train_epochs 3 \
    --per_device_train_batch_size 1 --grpo_alpha 0.5 --grpo_beta 0.1 --format_reward_weight 0.3 \
    --accuracy_reward_weight 0.7 --grpo_sample_size 4 --report_to wandb --run_name video-grpo-experiment";

/// `train_grpo.sh` in its three versions: values that differ, and the additions of one of them.
pub struct Qwen {
    pub model: &'static str,
    pub dataset: &'static str,
    pub run: &'static str,
    pub epochs: &'static str,
    pub batch: &'static str,
    pub checkpointing: &'static str,
    pub report_to: &'static str,
    pub weights: [&'static str; 2],
    pub max_length: &'static str,
    pub samples: &'static str,
    pub more: &'static str,
}

impl Qwen {
    pub fn line(&self) -> String {
        let Self {
            model,
            dataset,
            run,
            epochs,
            batch,
            checkpointing,
            report_to,
            weights,
            max_length,
            samples,
            more,
        } = self;
        let [format, accuracy] = weights;
        format!(
            "--model_name_or_path {model} --dataset_use {dataset} --data_flatten True --output_dir ./output/{run} \
             --cache_dir ./cache --num_train_epochs {epochs} --per_device_train_batch_size {batch} \
             --per_device_eval_batch_size {batch} --gradient_accumulation_steps 8 --evaluation_strategy no \
             --save_strategy steps --save_steps 100 --save_total_limit 3 --learning_rate 2e-5 --weight_decay 0.1 \
             --adam_beta1 0.9 --adam_beta2 0.95 --adam_epsilon 1e-8 --max_grad_norm 1.0 --warmup_ratio 0.03 \
             --lr_scheduler_type cosine --logging_steps 10 --tf32 True --model_max_length 2048 \
             --gradient_checkpointing {checkpointing} --dataloader_num_workers 4 --report_to {report_to} \
             --run_name {run} --bf16 True --tune_mm_llm True --tune_mm_vision False --tune_mm_mlp True \
             --mm_projector_lr 2e-5 --video_max_frames 4 --video_min_frames 4 --base_interval 2 --grpo_alpha 0.5 \
             --grpo_beta 0.1 --format_reward_weight {format} --accuracy_reward_weight {accuracy} \
             --generation_max_length {max_length} --generation_temperature 0.7 --generation_top_p 0.9 \
             --grpo_sample_size {samples} {more}"
        )
    }
}

pub const ACTIONS: Qwen = Qwen {
    model: "Qwen/Qwen2.5-VL-3B-Instruct",
    dataset: "assy07_grpo",
    run: "qwen2.5-vl-grpo",
    epochs: "3",
    batch: "1",
    checkpointing: "True",
    report_to: "wandb",
    weights: ["0.3", "0.7"],
    max_length: "50",
    samples: "1",
    more: "",
};

pub const NO_THINK: Qwen = Qwen {
    dataset: "assy07_grpo_no_think",
    run: "qwen2.5-vl-3b-grpo-no-think",
    epochs: "1",
    batch: "2",
    checkpointing: "False",
    weights: ["1.0", "1.0"],
    max_length: "128",
    samples: "4",
    more: "--grpo_logging_steps 1",
    ..ACTIONS
};

pub const PER_TOKEN: Qwen = Qwen {
    model: "Qwen/Qwen2.5-VL-7B-Instruct",
    run: "qwen2.5-vl-7b-grpo-assy07_grpo_no_think-per_token_loss",
    batch: "1",
    report_to: "none",
    max_length: "64",
    samples: "1",
    ..NO_THINK
};

/// VLM-R1's script for InternVL on ViVQA-X.
pub const INTERNVL: &str = "--use_vllm False --output_dir checkpoints/rl/InternVL3-1B-ViVQA-X \
    --model_name_or_path OpenGVLab/InternVL3-1B --data_file_paths data/ViVQA-X_train_grpo.jsonl \
    --image_folders COCO_Images/train2014 --is_reward_customized_from_vlm_module False --task_type vqa \
    --per_device_train_batch_size 3 --gradient_accumulation_steps 5 --gradient_checkpointing true --logging_steps 1 \
    --max_steps 500 --num_train_epochs 1 --bf16 --attn_implementation flash_attention_2 \
    --run_name InternVL3-1B-ViVQA-X --data_seed 42 --save_steps 100 --num_generations 3 \
    --max_completion_length 1024 --reward_funcs accuracy format --beta 0.1 --report_to wandb \
    --dataset-name this_is_not_used --deepspeed local_scripts/zero2.json --learning_rate 2e-5 \
    --freeze_vision_modules true --push_to_hub true --hub_model_id TSunm/InternVL3-1B-ViVQA-X";

/// A later version of that script, with all rewards of its README.
pub const INTERNVL_EXPLAINED: &str = "--use_vllm False --output_dir checkpoints/rl/InternVL3-1B-ViVQA-X-101 \
    --resume_from_checkpoint False --model_name_or_path OpenGVLab/InternVL3-1B \
    --data_file_paths data/ViVQA-X_train_grpo.jsonl --image_folders COCO_Images/train2014 \
    --is_reward_customized_from_vlm_module False --task_type vqa --per_device_train_batch_size 3 \
    --gradient_accumulation_steps 11 --gradient_checkpointing true --logging_steps 1 --max_steps 500 \
    --num_train_epochs 2 --bf16 --attn_implementation flash_attention_2 --run_name InternVL3-1B-ViVQA-X-101 \
    --data_seed 42 --save_steps 50 --num_generations 3 --max_completion_length 1024 \
    --reward_funcs accuracy format explanation --beta 0.1 --report_to wandb --dataset-name this_is_not_used \
    --deepspeed local_scripts/zero2.json --learning_rate 2e-5 --freeze_vision_modules true --push_to_hub true \
    --hub_model_id TSunm/InternVL3-1B-ViVQA-X";

/// VLM-R1's script with adapters.
pub const ADAPTERS: &str = "--use_vllm False --output_dir checkpoints/rl/Qwen2.5-VL-3B-Instruct-rec-lora \
    --resume_from_checkpoint False --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct \
    --data_file_paths data/ViVQA-X_train_grpo.jsonl --image_folders COCO_Images/train2014 --max_pixels 200704 \
    --is_reward_customized_from_vlm_module False --task_type rec --per_device_train_batch_size 3 \
    --gradient_accumulation_steps 2 --gradient_checkpointing true --logging_steps 1 --max_steps 500 \
    --num_train_epochs 1 --bf16 --attn_implementation sdpa --run_name Qwen2.5-VL-3B-Instruct-rec-lora \
    --data_seed 42 --save_steps 100 --num_generations 3 --max_completion_length 2048 \
    --reward_funcs accuracy format --beta 0.04 --report_to wandb --dataset-name this_is_not_used \
    --deepspeed local_scripts/zero2.json --learning_rate 1e-5 --use_peft true --lora_r 64 --lora_alpha 128 \
    --lora_dropout 0.05 --lora_task_type CAUSAL_LM --freeze_vision_modules true";

/// R1-V's launch script.
pub const R1_V: &str = "--output_dir runs/clevr --model_name_or_path Qwen/Qwen2-VL-2B-Instruct --dataset_name rows.jsonl \
    --max_prompt_length 1024 --per_device_train_batch_size 1 --gradient_accumulation_steps 2 --logging_steps 1 --bf16 \
    --report_to wandb --gradient_checkpointing false --attn_implementation flash_attention_2 --max_pixels 401408 \
    --num_train_epochs 2 --run_name Qwen2-VL-2B-GRPO-CLEVR-70k --save_steps 100 --save_only_model true";

/// VLM-R1's script for referring expressions.
pub const VLM_R1: &str = "--use_vllm False --output_dir checkpoints/rl/Qwen2.5-VL-3B-Instruct-rec --resume_from_checkpoint True \
    --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct --data_file_paths rows.jsonl --image_folders . \
    --is_reward_customized_from_vlm_module True --task_type rec --per_device_train_batch_size 8 \
    --gradient_accumulation_steps 2 --gradient_checkpointing true --logging_steps 1 --num_train_epochs 2 --bf16 \
    --attn_implementation flash_attention_2 --run_name Qwen2.5-VL-3B-Instruct-rec --data_seed 42 --save_steps 100 \
    --num_generations 8 --max_completion_length 2048 --reward_funcs accuracy format --beta 0.04 --report_to wandb \
    --dataset-name this_is_not_used --deepspeed local_scripts/zero3.json";

/// VLM-R1's script for screens, whose batch forms groups only with several processes.
pub const VLM_R1_GUI: &str = "--use_vllm False --output_dir checkpoints/rl/GUI-multi-image --resume_from_checkpoint True \
    --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct --data_file_paths rows.jsonl --image_folders . \
    --is_reward_customized_from_vlm_module False --reward_method all_match --task_type gui \
    --per_device_train_batch_size 2 --gradient_accumulation_steps 2 --gradient_checkpointing true --logging_steps 1 \
    --num_train_epochs 2 --max_steps 1200 --bf16 --attn_implementation flash_attention_2 --run_name GUI-multi-image \
    --save_steps 400 --num_generations 8 --max_completion_length 2048 --reward_funcs accuracy format --beta 0.04 \
    --report_to wandb --dataset-name not_used --deepspeed local_scripts/zero3.json";

/// Video-R1's script.
pub const VIDEO_R1: &str = "--output_dir ./log/Qwen2.5-VL-7B-GRPO --model_name_or_path Qwen/Qwen2.5-VL-7B-Instruct \
    --dataset_name rows.jsonl --deepspeed local_scripts/zero3.json --max_prompt_length 16384 --max_completion_length 768 \
    --per_device_train_batch_size 1 --gradient_accumulation_steps 1 --learning_rate 1e-6 --lr_scheduler_type cosine \
    --weight_decay 0.01 --bf16 --logging_steps 1 --gradient_checkpointing true --temporal true --len_control true \
    --attn_implementation flash_attention_2 --max_pixels 401408 --num_train_epochs 1 --run_name Video-R1 --save_steps 100 \
    --beta 0.04 --max_grad_norm 5 --save_only_model false --num_generations 8";

/// ms-swift's script for a 7B model with vLLM.
pub const SWIFT: &str = "--rlhf_type grpo --model Qwen/Qwen2.5-VL-7B-Instruct --train_type lora --dataset rows.jsonl \
    --use_vllm true --vllm_mode colocate --vllm_gpu_memory_utilization 0.5 --vllm_tensor_parallel_size 4 \
    --torch_dtype bfloat16 --num_train_epochs 1 --per_device_train_batch_size 1 --per_device_eval_batch_size 1 \
    --learning_rate 1e-6 --save_total_limit 2 --logging_steps 5 --output_dir output --gradient_accumulation_steps 8 \
    --warmup_ratio 0.05 --dataloader_num_workers 4 --max_completion_length 1024 --reward_funcs accuracy format \
    --num_generations 8 --sleep_level 1 --temperature 1.0 --top_p 0.85 --lr_scheduler_type cosine";

/// verl's script for Geometry3K, on files of this machine.
pub const VERL: &str = "algorithm.adv_estimator=grpo data.train_files=geo3k/train.parquet data.val_files=geo3k/test.parquet \
    data.train_batch_size=512 data.max_prompt_length=1024 data.max_response_length=2048 \
    data.filter_overlong_prompts=True data.truncation=error data.image_key=images \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-7B-Instruct actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=10 actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.01 actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.actor.entropy_coeff=0 actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=5 actor_rollout_ref.ref.fsdp_config.param_offload=True \
    algorithm.use_kl_in_reward=False trainer.critic_warmup=0 trainer.logger=['console','wandb'] \
    trainer.experiment_name=qwen2_5_vl_7b trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=20 \
    trainer.test_freq=5 trainer.total_epochs=15";

/// EasyR1's script for Geometry3K.
pub const EASY_R1: &str = "config=examples/config.yaml data.train_files=hiyouga/geometry3k@train \
    data.val_files=hiyouga/geometry3k@test worker.actor.model.model_path=Qwen/Qwen2.5-VL-7B-Instruct \
    worker.rollout.tensor_parallel_size=1 worker.reward.reward_function=./math.py:compute_score \
    trainer.experiment_name=qwen2_5_vl_7b_geo_grpo trainer.n_gpus_per_node=8";
