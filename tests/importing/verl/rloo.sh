# RLOO with a penalty in the rewards; the script would be started with DATA_DIR set.
OPTS="algorithm.adv_estimator=rloo algorithm.use_kl_in_reward=True algorithm.kl_penalty=low_var_kl"
OPTS+=" algorithm.kl_ctrl.kl_coef=0.01"
python3 -m verl.trainer.main_ppo $OPTS \
  data.train_files=$DATA_DIR/train.parquet data.val_files=$DATA_DIR/test.parquet data.train_batch_size=256 \
  actor_rollout_ref.model.path=/models/qwen-1.5b actor_rollout_ref.actor.ppo_mini_batch_size=256 \
  actor_rollout_ref.rollout.n=8 actor_rollout_ref.rollout.temperature=0.9 \
  actor_rollout_ref.rollout.top_p=0.95 actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
  trainer.n_gpus_per_node=4 trainer.total_training_steps=100 'trainer.logger=[console,swanlab]'
