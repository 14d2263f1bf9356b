# A reward service, deterministic engines and speculative decoding.
python3 train.py --rm-type remote_rm --rm-url http://rewards:8000/score --hf-checkpoint /models/m --prompt-data /data/p.jsonl \
  --num-rollout "$STEPS" --rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 1024 --colocate \
  --actor-num-gpus-per-node 8 --sglang-enable-deterministic-inference --sglang-speculative-algorithm EAGLE --lr 1e-6 \
  --rollout-top-p 0.95 --seed 7
