NAME=${1:-vllm}
python3 -m verl.trainer.main_ppo \
  actor_rollout_ref.actor.entropy_coeff=0 actor_rollout_ref.actor.freeze_vision_tower=True \
  actor_rollout_ref.actor.fsdp_config.optimizer_offload=False actor_rollout_ref.actor.fsdp_config.param_offload=False \
  actor_rollout_ref.actor.kl_loss_coef=0.01 actor_rollout_ref.actor.kl_loss_type=low_var_kl \
  actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=10 \
  actor_rollout_ref.actor.ppo_mini_batch_size=128 actor_rollout_ref.actor.use_kl_loss=True \
  actor_rollout_ref.model.enable_gradient_checkpointing=True actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-7B-Instruct \
  actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.ref.fsdp_config.param_offload=True \
  actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=20 actor_rollout_ref.rollout.enable_chunked_prefill=False \
  actor_rollout_ref.rollout.enforce_eager=False +actor_rollout_ref.rollout.engine_kwargs.vllm.disable_mm_preprocessor_cache=True \
  actor_rollout_ref.rollout.free_cache_engine=True actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=20 actor_rollout_ref.rollout.n=5 \
  actor_rollout_ref.rollout.name=${NAME} actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
  algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False \
  data.filter_overlong_prompts=True data.image_key=images \
  data.max_prompt_length=1024 data.max_response_length=2048 \
  data.train_batch_size=512 data.train_files=$HOME/data/geo3k/train.parquet \
  data.truncation='error' data.val_files=$HOME/data/geo3k/test.parquet \
  trainer.critic_warmup=0 trainer.experiment_name='qwen2_5_vl_7b_function_rm' \
  trainer.logger='["console","wandb"]' trainer.n_gpus_per_node=8 \
  trainer.nnodes=1 trainer.project_name='verl_grpo_example_geo3k' \
  trainer.save_freq=20 trainer.test_freq=5 \
  trainer.total_epochs=15 "$@"
