# One step off policy: 6 GPUs train, 2 generate.
NGPUS_PER_NODE=8
n_gpus_rollout=2
n_gpus_training=$((NGPUS_PER_NODE - n_gpus_rollout))
PYTHONUNBUFFERED=1 python3 -m recipe.one_step_off_policy.main_ppo \
    --config-path=config --config-name=one_step_off_ppo_trainer \
    algorithm.adv_estimator=grpo \
    data.train_files=/data/train.parquet data.val_files=/data/val.parquet data.train_batch_size=1152 \
    actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.model.path=/models/qwen-0.6b \
    actor_rollout_ref.actor.ppo_mini_batch_size=192 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32 \
    actor_rollout_ref.rollout.n=5 actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    trainer.nnodes=1 trainer.n_gpus_per_node="${n_gpus_training}" \
    rollout.nnodes=1 rollout.n_gpus_per_node="${n_gpus_rollout}" \
    trainer.total_training_steps=40 > out.log 2>&1 &
wait
