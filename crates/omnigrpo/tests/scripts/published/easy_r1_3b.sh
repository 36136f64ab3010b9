set -x
BASE=Qwen/Qwen2.5-VL-3B-Instruct

python3 -m verl.trainer.main \
  config=examples/config.yaml data.train_files=hiyouga/geometry3k@train \
  data.val_files=hiyouga/geometry3k@test trainer.experiment_name=qwen2_5_vl_3b_geo_grpo \
  trainer.n_gpus_per_node=2 worker.actor.model.model_path=${BASE}
