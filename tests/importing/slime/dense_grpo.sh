#!/bin/bash
# Dense model on one node, engines on the trainer's GPUs.
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/models/dense-4B.sh"
CKPT_ARGS=(--hf-checkpoint /models/dense-4B --ref-load /models/dense-4B_dist --save /runs/dense --save-interval 50)
ROLLOUT_ARGS=(
   --prompt-data /data/math.jsonl
   --input-key prompt
   --label-key label
   --apply-chat-template
   --apply-chat-template-kwargs '{"enable_thinking": false}'
   --rollout-shuffle
   --rm-type deepscaler
   --num-rollout 1000
   --rollout-batch-size 64
   --n-samples-per-prompt 8
   --rollout-max-response-len 8192
   --rollout-temperature 0.8
   --global-batch-size 128
)
GRPO_ARGS=(
   --advantage-estimator grpo
   --use-kl-loss
   # --kl-loss-coef 0.1
   --kl-loss-coef 0.01
   --kl-loss-type low_var_kl
   --eps-clip 0.2
   --eps-clip-high 0.28
)
OPTIMIZER_ARGS=(--optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98)
PERF_ARGS=(--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 --use-dynamic-batch-size --max-tokens-per-gpu 9216)
ray job submit --address="http://127.0.0.1:8265" --runtime-env-json='{"env_vars": {"A": "1"}}' \
   -- python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate ${MODEL_ARGS[@]} \
   ${CKPT_ARGS[@]} ${ROLLOUT_ARGS[@]} ${GRPO_ARGS[@]} ${OPTIMIZER_ARGS[@]} ${PERF_ARGS[@]} \
   --rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7 --attention-dropout 0.0 --hidden-dropout 0.0
