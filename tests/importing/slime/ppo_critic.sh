# PPO: the critic has the policy's optimizer.
python3 train.py --advantage-estimator ppo --normalize-advantages --lambd 0.95 --gamma 0.99 --kl-coef 0.02 --kl-loss-type k1 \
  --value-clip 0.3 --num-critic-only-steps 5 --eps-clip 0.2 --eps-clip-c 3.0 --actor-num-gpus-per-node 8 --colocate \
  --hf-checkpoint /models/m --save /runs/ppo --prompt-data /data/p.jsonl --input-key prompt --label-key label \
  --num-rollout 300 --rollout-batch-size 128 --n-samples-per-prompt 1 --global-batch-size 64 --rollout-max-response-len 2048 \
  --lr 2e-6 --weight-decay 0.05 --use-dynamic-batch-size --max-tokens-per-gpu 12288 --rm-type math
