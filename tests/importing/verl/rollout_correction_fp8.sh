# Weights for the difference between engine and trainer, with engines that quantize to FP8.
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \
  data.train_files=/data/train.parquet data.val_files=/data/val.parquet data.train_batch_size=64 \
  +data.apply_chat_template_kwargs.enable_thinking=False \
  actor_rollout_ref.model.path=/models/qwen-8b actor_rollout_ref.actor.ppo_mini_batch_size=64 \
  actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm actor_rollout_ref.actor.loss_scale_factor=4096 \
  actor_rollout_ref.rollout.n=8 actor_rollout_ref.rollout.calculate_log_probs=True \
  +actor_rollout_ref.rollout.quantization=fp8 \
  algorithm.rollout_correction.rollout_is=token \
  algorithm.rollout_correction.rollout_is_threshold=0.5_5.0 \
  algorithm.rollout_correction.rollout_rs=seq_mean_k1 \
  algorithm.rollout_correction.rollout_rs_threshold=0.999_1.001 \
  trainer.total_training_steps=10
