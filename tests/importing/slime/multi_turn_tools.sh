# Several turns with tools, by a function of the user's.
CUSTOM=(--custom-generate-function-path tools.rollout.generate --custom-rm-path tools.rollout.reward_func)
python3 train.py ${CUSTOM[@]} --tool-key functions --hf-checkpoint /models/m --save /runs/t --prompt-data /data/p.jsonl --input-key prompt \
  --metadata-key info --num-rollout 50 --rollout-batch-size 8 --n-samples-per-prompt 8 --rollout-max-response-len 4096 \
  --rollout-max-context-len 16384 --colocate --actor-num-gpus-per-node 8 --rollout-num-gpus-per-engine 2 --lr 1e-6 \
  --sglang-tool-call-parser qwen25 --rollout-stop-token-ids 151645
