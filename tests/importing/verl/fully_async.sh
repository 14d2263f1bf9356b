# The fully asynchronous trainer: engines on nodes of their own, partial rollouts.
n_resp=8
python3 -m verl.experimental.fully_async_policy.fully_async_main \
    --config-path=config --config-name='fully_async_ppo_megatron_trainer.yaml' \
    algorithm.adv_estimator=grpo \
    data.train_files=/data/train.parquet data.val_files=/data/val.parquet \
    data.train_batch_size=0 data.gen_batch_size=1 \
    data.max_prompt_length=1024 data.max_response_length=4096 \
    actor_rollout_ref.model.path=/models/qwen-30b \
    actor_rollout_ref.actor.strategy=megatron \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \
    actor_rollout_ref.actor.use_rollout_log_probs=False \
    actor_rollout_ref.actor.loss_agg_mode=token-mean \
    actor_rollout_ref.rollout.n=${n_resp} \
    actor_rollout_ref.rollout.name=sglang \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    algorithm.rollout_correction.rollout_is=token \
    algorithm.rollout_correction.rollout_is_threshold=2.0 \
    trainer.nnodes=2 trainer.n_gpus_per_node=8 \
    rollout.nnodes=1 rollout.n_gpus_per_node=8 rollout.total_rollout_steps=12800 \
    async_training.staleness_threshold=0.5 \
    async_training.trigger_parameter_sync_step=4 \
    async_training.require_batches=1 \
    async_training.partial_rollout=True
