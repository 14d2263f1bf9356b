# Several turns with tools, on a configuration file of one's own.
PROJECT_DIR="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
CONFIG_PATH="$PROJECT_DIR/config"
python3 -m verl.trainer.main_ppo \
    --config-path="$CONFIG_PATH" --config-name='multiturn_grpo' \
    algorithm.adv_estimator=grpo data.train_batch_size=128 \
    data.train_files=/data/gsm8k_tools/train.parquet data.val_files=/data/gsm8k_tools/test.parquet \
    actor_rollout_ref.model.path=/models/qwen-3b actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.rollout.n=16 actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.multi_turn.tool_config_path="$PROJECT_DIR/config/tools.yaml" \
    trainer.total_training_steps=150
