# The present trainer with engines on nodes of their own.
ROLLOUT=(
  actor_rollout_ref.rollout.name=sglang
  actor_rollout_ref.rollout.nnodes=2
  actor_rollout_ref.rollout.n_gpus_per_node=8
  actor_rollout_ref.rollout.tensor_model_parallel_size=4
  actor_rollout_ref.rollout.checkpoint_engine.backend=nccl
  actor_rollout_ref.rollout.n=8
  +actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=fa3
  +actor_rollout_ref.rollout.engine_kwargs.sglang.enable_dp_attention=True
)
python3 -m verl.trainer.main_ppo model_engine=megatron \
  algorithm.adv_estimator=grpo data.train_files=/d/train.parquet data.val_files=/d/val.parquet \
  data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=16 \
  actor_rollout_ref.model.path=/m/q actor_rollout_ref.actor.megatron.tensor_model_parallel_size=8 \
  actor_rollout_ref.actor.megatron.sequence_parallel=False \
  trainer.use_v1=True trainer.v1.trainer_mode=separate_async trainer.v1.separate_async.parameter_sync_step=4 \
  trainer.v1.sampler.max_off_policy_threshold=4 trainer.v1.sampler.max_off_policy_strategy=wait \
  trainer.nnodes=2 trainer.n_gpus_per_node=8 trainer.total_training_steps=1000 "${ROLLOUT[@]}"
