# ReMax, with several data files, and k1 in the loss, which has no equivalent.
f1=/data/gsm8k/train.parquet; f2=/data/math/train.parquet
train_files="['$f1', '$f2']"
test_files="['/data/gsm8k/test.parquet', '/data/math/test.parquet']"
python -m verl.trainer.main_ppo algorithm.adv_estimator=remax "data.train_files=$train_files" \
  "data.val_files=$test_files" data.train_batch_size=512 actor_rollout_ref.model.path=/models/qwen-7b \
  actor_rollout_ref.actor.ppo_mini_batch_size=128 actor_rollout_ref.actor.use_kl_loss=True \
  actor_rollout_ref.actor.kl_loss_type=kl actor_rollout_ref.rollout.n=4 trainer.total_training_steps=60
