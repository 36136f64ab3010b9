CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 \
NPROC_PER_NODE=8 \
swift rlhf \
  --dataset AI-MO/NuminaMath-TIR --model Qwen/Qwen2.5-7B-Instruct --rlhf_type grpo
