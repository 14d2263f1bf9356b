# FP8 in the trainer, FP8 weights in the engines.
python3 train.py --hf-checkpoint /models/moe-30B-FP8 --ref-load /models/moe_dist --prompt-data /data/p.jsonl --input-key prompt \
  --transformer-impl transformer_engine --bf16 --fp8-format e4m3 --fp8-recipe blockwise --num-rollout 100 --rollout-batch-size 32 \
  --n-samples-per-prompt 8 --global-batch-size 256 --rollout-max-response-len 8192 --colocate --actor-num-gpus-per-node 8 \
  --rollout-num-gpus-per-engine 8 --rm-type math --lr 1e-6 --use-dynamic-batch-size --max-tokens-per-gpu 16384
