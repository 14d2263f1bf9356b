"""Commands whose stage needs no engines: on Ray, or in the processes of torchrun."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megarl.cli.output import console
from megarl.config import StageConfig, load_config
from megarl.process.torchrun_env import TorchrunWorld, said_once, torchrun_world

if TYPE_CHECKING:
    from megarl.controller.actor import Controller
    from megarl.controller.spmd_stage import Stage
    from megarl.run.events import EventLog
    from megarl.workers.group import Processes

C = TypeVar("C", bound=StageConfig)


def load_stage(kind: type[C], args: argparse.Namespace) -> tuple[C, TorchrunWorld | None]:
    """The configuration, and the world that this process is of where torchrun has started it."""
    world = torchrun_world()
    with said_once(world):
        config = load_config(kind, args.config, args.overrides, slots=world.slots if world else None)
        if world is not None:
            world.require(config.placement)
    return config, world


def run_anywhere(
    config: C,
    world: TorchrunWorld | None,
    method: Callable[[Controller, C, Path | None], Any],
    make: Callable[[C, EventLog, Processes, Path | None], Stage],
    *,
    resume: str | None,
) -> int:
    """Run the stage on the ranks of `world`, or, where it is None, on Ray; say where the model is.

    Args:
        method: the stage as the controller runs it.
        make: the same for `run_spmd_stage`.
        resume: see `megarl.controller.resume`.
    """
    if world is None:
        from megarl.controller.run_stage import run_stage

        run_stage(config, method, resume=resume)
    else:
        from megarl.controller.spmd_stage import run_spmd_stage

        run_spmd_stage(config, make, world, name=method.__name__, resume=resume)
    if world is None or world.rank == 0:
        console().print(f"model        {config.export_path}", highlight=False)
    return 0
