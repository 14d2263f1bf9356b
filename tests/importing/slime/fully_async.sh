# A rollout function that never waits for the trainer.
python train_async.py --rollout-function-path fully_async_rollout.generate_rollout_fully_async \
  --actor-num-gpus-per-node 4 --rollout-num-gpus 4 --num-gpus-per-node 4 --hf-checkpoint /models/m --prompt-data /data/p.jsonl \
  --input-key prompt --num-rollout 100 --rollout-batch-size 16 --n-samples-per-prompt 4 --rollout-max-response-len 1024 \
  --custom-rm-path my_rewards.exact.score --group-rm --partial-rollout --lr 1e-6
