# Groups without a signal are replaced; more prompts are sampled than are trained.
ARGS="--dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
python3 train.py $ARGS --over-sampling-batch-size 64 --rollout-batch-size 32 --n-samples-per-prompt 8 --num-rollout 100 \
  --hf-checkpoint /models/m --prompt-data /data/p.jsonl --colocate --rm-type dapo --rollout-max-response-len 8192 \
  --eps-clip 0.2 --eps-clip-high 0.28 --lr 1e-6 --actor-num-gpus-per-node 4 --calculate-per-token-loss
