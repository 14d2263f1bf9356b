# LoRA, which is refused.
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=/d/a.parquet \
  actor_rollout_ref.model.path=/m/q \
  actor_rollout_ref.model.lora_rank=32 actor_rollout_ref.model.lora_alpha=32 \
  actor_rollout_ref.actor.policy_loss.loss_mode=sapo
