MAX_PIXELS=602112 \
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 \
NPROC_PER_NODE=8 \
swift rlhf \
  --dataset lmms-lab/multimodal-open-r1-8k-verified --model Qwen/Qwen2.5-VL-72B-Instruct --rlhf_type grpo \
  --tuner_type lora --use_vllm true --vllm_gpu_memory_utilization 0.5 \
  --vllm_max_model_len 8192 --vllm_mode colocate --vllm_tensor_parallel_size 4
