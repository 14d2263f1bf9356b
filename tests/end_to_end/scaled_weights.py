"""GRPO whose engines serve one wrong matrix after a push, as a defect of the weight sync could have it."""

import tempfile
from pathlib import Path

from safetensors.torch import load_file

from megarl import algorithms as rl
from megarl.algorithms.grpo import Grpo
from megarl.config.algorithm import GrpoConfig
from megarl.run.sync.weight_sync import PushReport

SCALED_PUSH = 12
"""The version after whose push the engines' matrix is multiplied by 1.25."""
MATRIX = "model.layers.1.self_attn.o_proj.weight"


class ScaledAfterPush(Grpo):
    Config = GrpoConfig

    def train(self, run: rl.RLRun, config: GrpoConfig) -> None:
        push = run.sync.push

        def push_and_scale(policy_version: int) -> PushReport | None:
            report = push(policy_version)
            if policy_version == SCALED_PUSH:
                _scale(run, policy_version)
            return report

        run.sync.push = push_and_scale  # type: ignore[method-assign]
        super().train(run, config)


def _scale(run: rl.RLRun, policy_version: int) -> None:
    from tests.end_to_end.components import load_into_engines

    with tempfile.TemporaryDirectory() as folder:
        run.trainer.save_hf(folder)
        weights = load_file(Path(folder) / "model.safetensors")
        weights[MATRIX] *= 1.25
        load_into_engines(run.rollout._engines, weights, policy_version)
