python3 train_async.py --loss-type sft_loss --rollout-function-path slime.rollout.sft_rollout.generate_rollout --debug-train-only \
  --hf-checkpoint /models/m --prompt-data /data/p.parquet --input-key messages --num-epoch 3 --rollout-batch-size 128
