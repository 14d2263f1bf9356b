# REINFORCE++ with a discount.
python3 train.py --advantage-estimator=reinforce_plus_plus --normalize-advantages --gamma=0.99 --kl-coef=0.001 \
  --hf-checkpoint /models/m --prompt-data /data/p.jsonl --input-key prompt --label-key label --num-rollout 10 \
  --rollout-batch-size 256 --n-samples-per-prompt 1 --global-batch-size 256 --rollout-max-response-len 1024 --colocate \
  --actor-num-gpus-per-node 8 --lr 5e-7 --lr-warmup-fraction 0.1 --lr-decay-style constant --rm-type math --no-offload-train
