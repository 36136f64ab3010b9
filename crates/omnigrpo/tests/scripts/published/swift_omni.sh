pip install transformers -U

ENABLE_AUDIO_OUTPUT=1 \
CUDA_VISIBLE_DEVICES=0,1,2,3 \
MAX_PIXELS=1003520 \
NPROC_PER_NODE=4 \
swift rlhf \
  --dataset lmms-lab/multimodal-open-r1-8k-verified --lora_alpha 32 --lora_rank 8 \
  --model Qwen/Qwen2.5-Omni-7B --reward_funcs external_r1v_acc format --reward_weights 1 0.5 \
  --rlhf_type grpo --target_modules all-linear --torch_dtype bfloat16 \
  --tuner_type lora
