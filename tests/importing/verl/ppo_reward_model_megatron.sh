# PPO with a critic and a reward model on Megatron; the learning rate warms up over a share of the training.
TP=4
PP=2
python3 -m verl.trainer.main_ppo --config-path=config --config-name='ppo_megatron_trainer.yaml' \
    algorithm.adv_estimator=gae algorithm.gamma=1.0 algorithm.lam=0.95 \
    algorithm.use_kl_in_reward=True algorithm.kl_penalty=kl algorithm.kl_ctrl.type=adaptive \
    algorithm.kl_ctrl.kl_coef=0.02 algorithm.kl_ctrl.target_kl=0.05 \
    data.train_files=/data/hh/train.parquet data.val_files=/data/hh/test.parquet \
    data.train_batch_size=512 data.max_prompt_length=1024 data.max_response_length=512 \
    data.truncation=left \
    actor_rollout_ref.model.path=/models/llama-8b \
    actor_rollout_ref.actor.optim.lr=2e-6 \
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1 \
    actor_rollout_ref.actor.optim.clip_grad=0.5 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 actor_rollout_ref.actor.ppo_epochs=2 \
    actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=12000 \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=$TP \
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=$PP \
    actor_rollout_ref.ref.megatron.tensor_model_parallel_size=$((TP / 2)) \
    actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=$PP \
    actor_rollout_ref.rollout.name=sglang actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    critic.optim.lr=5e-6 critic.optim.lr_warmup_steps=10 critic.cliprange_value=0.2 critic.model.path=/models/critic \
    critic.megatron.tensor_model_parallel_size=$TP critic.megatron.pipeline_model_parallel_size=$PP \
    reward_model.enable=True reward_model.model.path=/models/reward \
    trainer.critic_warmup=5 trainer.total_training_steps=200 trainer.nnodes=2 trainer.n_gpus_per_node=8 \
    trainer.logger=['console','tensorboard'] trainer.default_local_dir=/checkpoints/hh
