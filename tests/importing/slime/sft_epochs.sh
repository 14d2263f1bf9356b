python3 train_async.py --loss-type sft_loss --rollout-function-path my_data.make_rows --debug-train-only \
  --loss-mask-type distill_qwen --hf-checkpoint /models/m --prompt-data /data/p.jsonl@[100:2000] --input-key messages \
  --num-epoch 3 --rollout-batch-size 128 --num-steps-per-rollout 2 --lr-decay-style constant
