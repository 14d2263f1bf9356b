#!/usr/bin/env bash
# Runs fine-tuning, a reward model and PPO on arithmetic word problems, from a random model: minutes on two cores.
#   yaml/rlhf-demo/run.sh [SEED]
# An existing runs/rlhf-demo is renamed first.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PATH="$PWD/.venv/bin:$PATH"
seed="${1:-0}"
megarl demo --data-only --out runs/rlhf-demo --seed "$seed"
megarl sft yaml/rlhf-demo/sft.yaml --set "seed=$seed"
megarl rm yaml/rlhf-demo/rm.yaml --set "seed=$seed"
megarl train yaml/rlhf-demo/ppo.yaml --set "seed=$seed"
