source models/dense-4B.sh
SFT_ARGS=(
  --loss-type sft_loss --calculate-per-token-loss --disable-compute-advantages-and-returns --debug-train-only
  --rollout-function-path slime.rollout.sft_rollout.generate_rollout
  --prompt-data /data/chats.parquet --input-key chat --tool-key functions --rollout-shuffle
  --num-rollout 50 --rollout-batch-size 256 --global-batch-size 64 --save-interval 10
)
python3 train_async.py --actor-num-nodes 2 --actor-num-gpus-per-node 8 --hf-checkpoint /models/m --save /runs/sft \
  ${SFT_ARGS[@]} --tensor-model-parallel-size 2 --sequence-parallel --offload-train --seed 5 \
  --lr 1e-5 --lr-decay-style cosine --min-lr 1e-6 --lr-warmup-fraction 0.1 --weight-decay 0.1 --adam-beta2 0.98 \
  --use-dynamic-batch-size --max-tokens-per-gpu 8192 --attention-dropout 0.0 --hidden-dropout 0.0
