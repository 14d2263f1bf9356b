"""Following a run that belongs to its cluster."""

from __future__ import annotations

import math
import time
from pathlib import Path

import ray
from ray.exceptions import RayError

from megarl.config import RunConfig, load_config
from megarl.controller.detached import find_controller
from megarl.controller.ray_session import terminated_is_noted
from megarl.controller.run_stage import POLL_SECONDS, Asked, follow
from megarl.tracking.progress import RunProgress
from megarl.workers.failures import translate


def attach(run_dir: Path, *, stop: bool = False) -> None:
    """Show the run's progress until it ends; SIGUSR1 and SIGTERM are passed on to it, Ctrl-C ends this process alone.

    Args:
        stop: have it end after the step under way.

    Raises:
        DataError: no run is at work there.
        MegarlError: what has ended the run.
    """
    config = load_config(RunConfig, run_dir / "train.yaml")

    def has_ended() -> bool:
        # not by a call that waits: it would outlive this process, in one of the few threads that the controller has
        time.sleep(POLL_SECONDS)
        return bool(ray.get(controller.has_ended.remote()))

    try:
        controller = find_controller(run_dir)
        if stop:
            ray.get(controller.finish_early.remote("megarl attach --stop"))
        with RunProgress(config.trainer.steps) as progress, terminated_is_noted() as terminated:
            follow(controller, has_ended, progress, Asked(terminated, math.inf))
        ray.get(controller.outcome.remote())
    except RayError as error:
        raise translate(error, what="train", name="the controller") from error
    finally:
        ray.shutdown()
