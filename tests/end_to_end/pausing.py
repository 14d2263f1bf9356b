"""GRPO that waits before some steps, so that a test can disturb the run at a known step."""

from collections.abc import Iterator
from pathlib import Path

from megarl import algorithms as rl
from megarl.algorithms.grpo import Grpo
from megarl.batch.trajectory import Prompt
from megarl.cluster.workers.failures import pause
from megarl.config.algorithm import GrpoConfig


def pause_file(run_dir: str | Path, step: int) -> Path:
    """Return the file because of which the run waits before `step`, for as long as it exists; 0: before its first."""
    return Path(run_dir).with_name(f"pause-{step}")


class Pausing(Grpo):
    Config = GrpoConfig

    def train(self, run: rl.RLRun, config: GrpoConfig) -> None:
        begin_steps = run.steps

        def wait(step: int) -> None:
            while pause_file(run.config.run_dir, step).exists():
                assert run.checkpoints is not None
                run.checkpoints.poll()  # completes one that is being written
                pause(0.05)

        def steps() -> Iterator[list[Prompt]]:
            for prompts in begin_steps():
                wait(run.step)
                yield prompts

        wait(0)
        run.steps = steps  # type: ignore[method-assign]
        super().train(run, config)
