"""Follow a detached run from another process."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

import ray
from ray.exceptions import RayError

from megarl.cluster.workers.failures import to_megarl_error
from megarl.config import RunConfig, load_config
from megarl.controller.detached import find_controller
from megarl.controller.ray_session import defer_sigterm
from megarl.controller.run_stage import POLL_SECONDS, StopRequest, follow
from megarl.run.reward_weights import parse_weights
from megarl.tracking.progress import RunProgress


def attach(run_dir: Path, *, stop: bool = False, settings: Sequence[str] = ()) -> None:
    """Show the latest events of the run, at most `megarl.run.run_events.MAX_EVENTS`, then its progress until it ends.

    Several processes can be attached to one run; each shows all events.

    SIGUSR1 and SIGTERM are forwarded to the run as a request to end early. Ctrl-C ends this process only.

    Args:
        stop: request that the run ends after the current step.
        settings: `reward.terms.NAME.weight=VALUE` each: weights that the run has from its next step on.

    Raises:
        ConfigError: a setting is invalid; the run is not changed.
        DataError: no detached run is active in `run_dir`.
        MegarlError: the error that ended the run.
    """
    config = load_config(RunConfig, run_dir / "train.yaml")
    weights = parse_weights(config, settings)

    def has_ended() -> bool:
        # poll instead of a blocking call: that would outlive this process in one of the controller's three threads
        time.sleep(POLL_SECONDS)
        return bool(ray.get(controller.has_ended.remote()))

    try:
        controller = find_controller(run_dir)
        if weights:
            ray.get(controller.change_reward_weights.remote(weights))
        if stop:
            ray.get(controller.request_stop.remote("megarl attach --stop"))
        with RunProgress(config.trainer.steps) as progress, defer_sigterm() as sigterm:
            follow(controller, has_ended, progress, StopRequest(sigterm, math.inf))
        ray.get(controller.outcome.remote())
    except RayError as error:
        raise to_megarl_error(error, what="train", name="the controller") from error
    finally:
        ray.shutdown()
