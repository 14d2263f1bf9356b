# Dr. GRPO with keys of earlier versions.
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=False \
  data.train_files=/data/train.parquet data.val_files=/data/val.parquet data.train_batch_size=96 \
  actor_rollout_ref.model.path=/models/qwen-8b actor_rollout_ref.actor.ppo_mini_batch_size=40 \
  actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm actor_rollout_ref.actor.grad_clip=0.3 \
  actor_rollout_ref.actor.tis_imp_ratio_cap=3.0 actor_rollout_ref.actor.optim.warmup_style=cosine \
  actor_rollout_ref.rollout.n=8 trainer.total_training_steps=10 trainer.no_such_key=1
