"""Runs `megarl sft` with a stage that fails on rank 1 while rank 0 waits in a collective."""

import os
import signal
import sys
from typing import Any

import torch.distributed as dist

from megarl.cli.main import main
from megarl.config import SftConfig
from megarl.errors import DataError
from megarl.run.remote.trainer_group import TrainerGroup
from megarl.tracking.progress import EventLog


class Failing:
    how: str

    def __init__(self, config: SftConfig, events: EventLog, trainer: TrainerGroup, **_: Any) -> None:
        pass

    def train(self) -> None:
        if dist.get_rank() == 1:
            match self.how:
                case "error":
                    raise DataError("rank 1 has read something bad")
                case "exception":
                    raise ZeroDivisionError("of no use")
                case "SIGKILL":
                    os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()


if __name__ == "__main__":
    import megarl.stages

    module: Any = megarl.stages
    Failing.how = sys.argv.pop()
    module.SftRun = Failing
    sys.exit(main())
