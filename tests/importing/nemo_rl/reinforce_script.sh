#!/bin/bash
# Overrides of a file that the repository has.
STEPS=40
export NCCL_DEBUG=WARN
uv run --frozen examples/run_grpo.py --config base/grpo_base.yaml \
  grpo.max_num_steps=$STEPS ++grpo.adv_estimator.name=reinforce_plus_plus ++grpo.adv_estimator.minus_baseline=true \
  loss_fn.reference_policy_kl_penalty=0.0 policy.optimizer.kwargs.lr=2e-6 policy.train_global_batch_size=128 \
  ~loss_fn.ratio_clip_min cluster.gpus_per_node=4 logger.wandb.name=$RUN_NAME
