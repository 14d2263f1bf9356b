python3 train.py --hf-checkpoint /models/m --prompt-data /data/p.jsonl --num-rollout 10 --rollout-batch-size 16 \
  --loss-type sft_loss
