# CISPO, started inside another command.
docker run --rm image bash -c "cd /work && python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \
 actor_rollout_ref.actor.policy_loss.loss_mode=cispo actor_rollout_ref.actor.clip_ratio_low=10 \
 actor_rollout_ref.actor.clip_ratio_high=0.2 actor_rollout_ref.model.path=/m/q \
 data.train_files=/d/a.parquet data.val_files=/d/b.parquet data.train_batch_size=32 \
 actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.rollout.n=8 \
 actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_type=k3+ trainer.total_training_steps=8"
