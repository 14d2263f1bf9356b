# Generation of the next batch during training, on GPUs of its own.
NUM_GPUS=16
ACTOR=$((NUM_GPUS / 2))
ray job submit -- python3 train_async.py --actor-num-nodes 1 --actor-num-gpus-per-node $ACTOR --rollout-num-gpus $((NUM_GPUS - ACTOR)) \
  --rollout-num-gpus-per-engine 4 --hf-checkpoint /models/m --save /runs/a --prompt-data /data/p.jsonl --input-key q --label-key a \
  --rm-type math --num-rollout 200 --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256 \
  --rollout-max-response-len 4096 --use-tis --tis-clip 1.5 --calculate-per-token-loss --eps-clip 0.2 \
  --use-dynamic-batch-size --max-tokens-per-gpu 8192 --lr 2e-6 --lr-warmup-iters 10 --lr-decay-style cosine --min-lr 2e-7
