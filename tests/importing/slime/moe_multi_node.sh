# MoE model on 4 nodes, with experts over 8 ranks and one engine per node.
NODES=${NODES:-4}
PERF=(--tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 2 --expert-model-parallel-size 8
  --expert-tensor-parallel-size 1 --decoder-last-pipeline-num-layers 22 --recompute-granularity full
  --recompute-method uniform --recompute-num-layers 1 --use-dynamic-batch-size --max-tokens-per-gpu 16384)
SGLANG=(--rollout-num-gpus-per-engine 8 --sglang-mem-fraction-static 0.7 --sglang-ep-size 8 --sglang-cuda-graph-bs 1 2 4 8)
python3 train.py --actor-num-nodes ${NODES} --actor-num-gpus-per-node 8 --colocate \
  --hf-checkpoint /models/moe-30B --save /runs/moe --prompt-data /data/dapo.jsonl --input-key prompt --label-key label \
  --apply-chat-template --rm-type dapo --num-rollout 500 --rollout-batch-size 128 --num-steps-per-rollout 4 \
  --n-samples-per-prompt 8 --rollout-max-response-len 16384 --advantage-estimator gspo --eps-clip 3e-4 --eps-clip-high 4e-4 \
  --lr 1e-6 --lr-decay-style constant --use-rollout-routing-replay --moe-token-dispatcher-type alltoall \
  --moe-aux-loss-coeff 0.001 --moe-router-load-balancing-type seq_aux_loss --optimizer-cpu-offload \
  --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer "${PERF[@]}" "${SGLANG[@]}" \
  --attention-dropout 0.0 --hidden-dropout 0.0
