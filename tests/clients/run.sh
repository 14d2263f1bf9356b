#!/usr/bin/env bash
# Runs the scripts of this folder, which are written for other people's frameworks, against the gateway and a scripted engine.
# Usage: run.sh [FOLDER]. The frameworks come from PyPI, each into an environment of its own in FOLDER (runs/clients).
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=$(realpath -m "${1:-runs/clients}")
for name in openai-agents langgraph smolagents anthropic; do
  if [ ! -e "$folder/$name/ready" ]; then
    python -m venv "$folder/$name"
    "$folder/$name/bin/pip" install --quiet --disable-pip-version-check -r "tests/clients/requirements-$name.txt"
    touch "$folder/$name/ready"
  fi
done
! grep -il megarl tests/clients/scripts/*.py  # no script knows what serves it
python -m tests.clients "$folder"
