set -x
BASE=Qwen/Qwen3-VL-4B-Instruct

python3 -m verl.trainer.main \
  config=examples/config.yaml data.train_files=hiyouga/geometry3k@train \
  data.val_files=hiyouga/geometry3k@test trainer.experiment_name=qwen3_vl_4b_geo_grpo_lora \
  trainer.n_gpus_per_node=2 worker.actor.model.lora.rank=64 \
  worker.actor.model.model_path=${BASE} worker.actor.optim.lr=1e-5
