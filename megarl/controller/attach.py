"""Following a run that belongs to its cluster."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from megarl.config import RunConfig, load_config
from megarl.controller.cluster import terminated_is_noted
from megarl.controller.detached import find_controller
from megarl.controller.launch import POLL_SECONDS, Asked, show
from megarl.tracking.progress import RunProgress
from megarl.workers.failure import translate


def attach(run_dir: Path, *, stop: bool = False) -> None:
    """Show the run's progress until it ends; SIGUSR1 and SIGTERM are passed on to it, Ctrl-C ends this process alone.

    Args:
        stop: have it end after the step under way.

    Raises:
        DataError: no run is at work there.
        MegarlError: what has ended the run.
    """
    config = load_config(RunConfig, run_dir / "train.yaml")
    try:
        controller = find_controller(run_dir)
        if stop:
            ray.get(controller.finish_early.remote("megarl attach --stop"))
        with RunProgress(config.trainer.steps) as progress, terminated_is_noted() as terminated:
            _follow(controller, progress, Asked(terminated, math.inf))
        ray.get(controller.outcome.remote())
    except RayError as error:
        raise translate(error, what="train", name="the controller") from error
    finally:
        ray.shutdown()


def _follow(controller: Any, progress: RunProgress, asked: Asked) -> None:
    """Show the controller's events until the run has ended.

    As `launch.follow`, but in calls that end at once: one that waits would outlive this process, in one of the few
    threads that the controller answers with.
    """
    cursor, ended, ends = 0, False, ""
    while not ended:
        time.sleep(POLL_SECONDS)
        if not ends and (ends := asked.by()):
            progress.say("asked to end early: the step under way will be the last")
        if ends:
            controller.finish_early.remote(ends)  # each time: one that has been restarted has forgotten
        ended = ray.get(controller.has_ended.remote())
        events, cursor = ray.get(controller.events.remote(cursor))
        for event in events:
            show(event, progress)
