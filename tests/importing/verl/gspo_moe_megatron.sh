#!/bin/bash
# GSPO of a model with experts on Megatron, with options in arrays and routes of the engines replayed.
tp=4; pp=4; ep=8; etp=1
MODEL_PATH=${1:-Qwen/Qwen3-235B-A22B}

DATA=(
    data.train_files="/data/train.parquet"
    data.val_files="/data/val.parquet"
    data.train_batch_size=256   # prompts
    data.max_prompt_length=2048
    data.max_response_length=8192
)

ACTOR=(
    actor_rollout_ref.model.path="$MODEL_PATH"
    actor_rollout_ref.actor.policy_loss.loss_mode=gspo
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean
    actor_rollout_ref.actor.clip_ratio_low=0.0003
    actor_rollout_ref.actor.clip_ratio_high=0.0004
    actor_rollout_ref.actor.ppo_mini_batch_size=64
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=10240
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=${tp}
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=${pp}
    actor_rollout_ref.actor.megatron.context_parallel_size=2
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=${ep}
    actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=${etp}
    actor_rollout_ref.actor.megatron.param_offload=True
    actor_rollout_ref.actor.megatron.optimizer_offload=True
    actor_rollout_ref.actor.megatron.router_replay.mode=R3
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method=uniform
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers=1
    +actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_dtype=fp32
    +actor_rollout_ref.actor.megatron.override_transformer_config.moe_enable_deepep=True
    +actor_rollout_ref.actor.megatron.override_transformer_config.moe_aux_loss_coeff=0.001
    +actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_last_pipeline_stage=22
    +actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_first_pipeline_stage=24
    +actor_rollout_ref.actor.megatron.override_transformer_config.hidden_dropout=0.1
    +actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload=True
    +actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_offload_fraction=1.0
)

python3 -m verl.trainer.main_ppo model_engine=megatron algorithm.adv_estimator=grpo \
    "${DATA[@]}" \
    "${ACTOR[@]}" \
    actor_rollout_ref.rollout.n=16 \
    actor_rollout_ref.rollout.name=sglang \
    actor_rollout_ref.rollout.tensor_model_parallel_size=8 \
    actor_rollout_ref.rollout.expert_parallel_size=8 \
    actor_rollout_ref.rollout.enable_rollout_routing_replay=True \
    trainer.nnodes=8 trainer.n_gpus_per_node=8 trainer.total_training_steps=500 trainer.save_freq=50
