# REINFORCE++ with a cosine schedule, and a reward function of one's own.
set -x
if [ -z "$EXTRA" ]; then
  LR=3e-6
else
  LR=5e-6
fi
unset EXTRA
LR=4e-6
cmd="python3 -m verl.trainer.main_ppo
  algorithm.adv_estimator=reinforce_plus_plus algorithm.gamma=0.99
  data.train_files=/data/train.jsonl data.val_files=null data.train_batch_size=128
  data.max_response_length=2048 data.seed=7
  actor_rollout_ref.model.path=/models/qwen-7b actor_rollout_ref.actor.optim.lr=$LR
  actor_rollout_ref.actor.optim.lr_warmup_steps=5 actor_rollout_ref.actor.optim.lr_scheduler_type=cosine
  actor_rollout_ref.actor.optim.min_lr_ratio=0.1 actor_rollout_ref.actor.optim.betas=[0.9,0.95]
  actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.entropy_coeff=0.001
  actor_rollout_ref.rollout.n=2 actor_rollout_ref.rollout.tensor_model_parallel_size=1
  custom_reward_function.path=rewards/my_score.py custom_reward_function.name=score
  trainer.total_training_steps=300 trainer.n_gpus_per_node=2"
eval $cmd
