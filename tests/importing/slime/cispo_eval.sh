# CISPO with its usual bound, two evaluation files and Weights & Biases.
EVAL=(--eval-interval 10 --eval-prompt-data aime /data/aime.jsonl amc /data/amc.jsonl --n-samples-per-eval-prompt 16 --eval-temperature 0.6)
python3 train.py --advantage-estimator cispo --eps-clip 1 --eps-clip-high 4 "${EVAL[@]}" --use-wandb --wandb-project rl --wandb-group cispo \
  --hf-checkpoint /models/m --prompt-data /data/p.jsonl --num-rollout 10 --rollout-batch-size 32 --n-samples-per-prompt 8 \
  --rollout-max-response-len 1024 --colocate --actor-num-gpus-per-node 8 --rm-type math --use-unbiased-kl --use-kl-loss \
  --kl-loss-coef 0.001 --kl-loss-type k3 --lr 1e-6 --update-weight-mode delta --update-weight-transport disk
