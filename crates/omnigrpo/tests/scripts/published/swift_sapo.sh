CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 \
MAX_PIXELS=602112 \
NPROC_PER_NODE=8 \
swift rlhf \
  --attn_impl flash_attention_2 --beta 0.001 --dataloader_num_workers 4 \
  --dataset AI-ModelScope/clevr_cogen_a_train --deepspeed zero1 --external_plugins examples/train/grpo/plugin/plugin.py \
  --gradient_accumulation_steps 4 --importance_sampling_level token --learning_rate 1e-6 \
  --log_completions true --logging_steps 1 --loss_type sapo \
  --max_completion_length 4096 --max_length 4096 --model Qwen/Qwen2.5-VL-3B-Instruct \
  --num_generations 8 --num_train_epochs 1 --offload_model true \
  --offload_optimizer true --overlong_filter false --per_device_train_batch_size 4 \
  --report_to tensorboard swanlab --reward_funcs external_r1v_acc format --rlhf_type grpo \
  --save_steps 1000 --sleep_level 1 --steps_per_generation 32 \
  --system 'examples/train/grpo/prompt.txt' --tau_neg 1.05 --tau_pos 1 \
  --temperature 1.0 --torch_dtype bfloat16 --tuner_type full \
  --use_vllm true --vllm_gpu_memory_utilization 0.6 --vllm_max_model_len 8192 \
  --vllm_mode colocate --vllm_tensor_parallel_size 1
