#!/usr/bin/env bash
# Runs fine-tuning, a reward model and PPO on arithmetic word problems, from a random model: minutes on two cores.
#   examples/reward-model-ppo/run.sh [SEED]
# Writes to runs/reward-model-ppo in the working directory; an existing one is renamed first.
set -euo pipefail
recipes="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PATH="$recipes/../../.venv/bin:$PATH"
seed="${1:-0}"
megarl demo --data-only --out runs/reward-model-ppo --seed "$seed"
megarl sft "$recipes/sft.yaml" --set "seed=$seed"
megarl rm "$recipes/rm.yaml" --set "seed=$seed"
megarl train "$recipes/ppo.yaml" --set "seed=$seed"
