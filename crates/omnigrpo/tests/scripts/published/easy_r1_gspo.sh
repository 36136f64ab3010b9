set -x
BASE=Qwen/Qwen2.5-VL-7B-Instruct

python3 -m verl.trainer.main \
  algorithm.disable_kl=True config=examples/config.yaml \
  data.train_files=hiyouga/geometry3k@train data.val_files=hiyouga/geometry3k@test \
  trainer.experiment_name=qwen2_5_vl_7b_geo_gspo trainer.n_gpus_per_node=8 \
  worker.actor.clip_ratio_high=4e-4 worker.actor.clip_ratio_low=3e-4 \
  worker.actor.loss_avg_mode=seq worker.actor.loss_type=gspo_token \
  worker.actor.model.model_path=${BASE}
