# Masks of tokens on which engine and trainer disagree, and no division by the standard deviation.
python3 train.py --disable-grpo-std-normalization --use-tis --tis-clip 5 --tis-clip-low 0.5 \
  --custom-tis-function-path slime.backends.megatron_utils.loss.icepop_function --use-routing-replay --hf-checkpoint /models/moe \
  --prompt-data /data/p.jsonl --num-rollout 10 --rollout-batch-size 30 --n-samples-per-prompt 8 --global-batch-size 48 \
  --rollout-max-response-len 1024 --colocate --actor-num-gpus-per-node 8 --rm-type gpqa --entropy-coef 0.001 --lr 1e-6
