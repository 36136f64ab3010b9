set -x
BASE=Qwen/Qwen2.5-VL-7B-Instruct

python3 -m verl.trainer.main \
  algorithm.disable_kl=True algorithm.online_filtering=True \
  config=examples/config.yaml data.mini_rollout_batch_size=128 \
  data.train_files=hiyouga/geometry3k@train data.val_files=hiyouga/geometry3k@test \
  trainer.experiment_name=qwen2_5_vl_7b_geo_dapo trainer.n_gpus_per_node=8 \
  worker.actor.clip_ratio_high=0.28 worker.actor.clip_ratio_low=0.2 \
  worker.actor.model.model_path=${BASE}
