CUDA_VISIBLE_DEVICES=0,1,2,3,4,5 \
env NPROC_PER_NODE=6 swift rlhf \
  --dataset AI-MO/NuminaMath-TIR --model Qwen/Qwen2.5-7B-Instruct --reward_funcs accuracy \
  --rlhf_type grpo --torch_dtype bfloat16 --tuner_type full \
  --use_vllm true --vllm_mode server --vllm_server_host 127.0.0.1 \
  --vllm_server_port 8000
