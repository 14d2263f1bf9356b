"""The driver process: check the configuration, prepare the run folder, start the controller, show its progress."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.checkpoint.run_lock import RunLock, find_claim
from megarl.checkpoint.store import CheckpointStore
from megarl.cluster.placement.pool import start_cluster
from megarl.cluster.process import launcher_env
from megarl.cluster.process.atomic_files import write_durably
from megarl.cluster.process.launcher_env import torchrun_world
from megarl.cluster.workers.failures import to_megarl_error
from megarl.config import RunConfig, StageConfig, dump_config, load_config
from megarl.config.run import RecoveryConfig, with_absolute_paths
from megarl.controller.actor import Controller
from megarl.controller.preflight.cluster_check import check_nodes_or_raise, required_paths
from megarl.controller.preflight.data_checks import find_template_notices
from megarl.controller.preflight.model_checks import find_model_notices, write_missing_model
from megarl.controller.preflight.run_checks import check_or_raise, find_warmup_notices
from megarl.controller.ray_session import (
    SigtermFlag,
    defer_sigterm,
    detach_run,
    detached_options,
    discarded_native_stderr,
    find_controller,
    leave_cluster,
    sigterm_as_interrupt,
)
from megarl.controller.resume import AUTO, RecordedInputs, ResumePlan, plan_resume, recorded_inputs
from megarl.data.data_files import with_local_data
from megarl.errors import ConfigError
from megarl.model_files.hub import with_local_models
from megarl.tracking.progress import Event, MessageEvent, PhaseEvent, RunProgress, StepSummary
from megarl.tracking.timing import Startup

POLL_SECONDS = 0.2

RUN_ARTIFACTS = (
    "metrics.jsonl",
    "tensorboard",
    "wandb-id",
    "rollouts",
    "restarts.jsonl",
    "startup.json",
    "summary.json",
    "checkpoints",
    "journal",
    "dumps",
    "stacks",
)
"""Files and folders that a run writes into `run_dir`. A new run renames those of an earlier run; see `rotate`."""

STOP_SECONDS = 4.0
"""Time to shut down gracefully: for a run after SIGTERM and its grace period, before Ray kills its processes; for a
rank of torchrun after any signal."""

INTERRUPT_SECONDS = 15.0
"""Time for a run to shut down gracefully after Ctrl-C; a second one ends it at once. `megarl launch` kills after
20 seconds."""


def run_stage[C: StageConfig](
    config: C,
    method: Callable[..., object],
    *,
    begins_run: bool = True,
    startup: Startup | None = None,
    resume: str | None = None,
    extra_arguments: tuple[object, ...] = (),
    detach: bool = False,
) -> Any:
    """Run a method of `Controller` on the Ray cluster, show its progress, and return its result.

    A cluster that was started here is shut down at the end.

    Args:
        method: takes the configuration and, for a resumed run, a checkpoint folder.
        begins_run: lock the folder and rename the artifacts of an earlier run; False for a command that trains nothing.
        startup: start-up trace of the command; None: create one that starts now.
        resume: `auto`, a step or a checkpoint folder, see `megarl.controller.resume`; None: start a new run.
        extra_arguments: further arguments of the method, for one that begins no run.
        detach: return once the controller has started and leave the run to the cluster; needs RAY_ADDRESS and `train`.

    Raises:
        MegarlError: the error that ended the run.
    """
    if torchrun_world() is not None:
        raise ConfigError(
            f"{method.__name__} starts its own processes on Ray and cannot run as a torchrun rank: start it with "
            f"`torchrun --nproc-per-node 1 ... -m megarl launch {method.__name__} ...`, or without torchrun"
        )
    if detach and not os.environ.get("RAY_ADDRESS"):
        raise ConfigError(
            "--detach needs RAY_ADDRESS: a detached run continues on a Ray cluster that outlives this command"
        )
    startup = startup or Startup(time.time())
    with ExitStack() as closing:
        with startup.phase("checks"):
            config = resolve_and_check(config, resume=resume if begins_run else AUTO)
            checkpoint = None
            if begins_run:
                checkpoint = begin_run(config, method.__name__, resume, closing)
            else:
                prepare_folder(config, method.__name__, ())
        arguments = (config, *extra_arguments) if checkpoint is None else (config, checkpoint)
        return run_on_cluster(config, method, arguments, startup, detach=detach)


def begin_run(config: StageConfig, name: str, resume: str | None, closing: ExitStack) -> Path | None:
    """Lock and prepare the run folder; return the checkpoint to resume from, None for a run from step 0.

    Args:
        config: configuration with absolute paths.
        name: file name, without suffix, of the resolved configuration in the folder.
        resume: as in `run_stage`.
        closing: releases the lock.

    Raises:
        MegarlError: another run holds the folder, or the checkpoint cannot be resumed; the folder is unchanged.
    """
    closing.enter_context(RunLock(config.run_dir))
    CheckpointStore(config.run_dir).remove_partial()
    if resume is None:
        plan = ResumePlan(to_rotate=tuple(Path(config.run_dir) / result for result in RUN_ARTIFACTS))
    else:
        plan = plan_resume(config, resume, RUN_ARTIFACTS, print)
    prepare_folder(config, name, plan.to_rotate)
    return plan.checkpoint


def run_on_cluster[C: StageConfig](
    config: C, method: Callable[..., object], arguments: tuple[object, ...], startup: Startup, *, detach: bool
) -> Any:
    """Call the controller's `method` on the Ray cluster and return its result; with `detach`, leave it running."""
    # installed twice: connecting to a cluster replaces the first handler by Ray's own
    with sigterm_as_interrupt(), _cluster(config, startup), sigterm_as_interrupt():
        with startup.phase("node checks"):
            checked = check_nodes_or_raise(config.placement, required_paths(config))
        if detach:
            options = detached_options(config)
            return detach_run(
                config, start_controller(config, startup, counts_restarts=True, autostart=arguments, **options)
            )
        actor = start_controller(config, startup, counts_restarts=method is Controller.train)
        result = getattr(actor, method.__name__).remote(*arguments)

        def has_ended() -> bool:
            return bool(ray.wait([result], timeout=POLL_SECONDS)[0])

        with defer_sigterm() as sigterm:
            try:
                with RunProgress(config.trainer.steps) as progress:
                    if checked is not None:
                        progress.notify(checked)
                    follow(actor, has_ended, progress, StopRequest(sigterm, _grace_seconds(config)))
                return ray.get(result)
            except RayError as error:
                raise to_megarl_error(error, what=method.__name__, name="the controller") from error
            except KeyboardInterrupt:
                seconds = INTERRUPT_SECONDS if sigterm.received_at is None else STOP_SECONDS
                with discarded_native_stderr():
                    ray.wait([actor.stop.remote()], timeout=seconds)
                raise


def start_controller(
    config: StageConfig,
    startup: Startup,
    *,
    counts_restarts: bool = False,
    autostart: tuple[object, ...] | None = None,
    **options: object,
) -> ray.actor.ActorHandle:
    """Create the controller actor on this node. Ray restarts it on failure and re-invokes the running method.

    Args:
        counts_restarts: the method ends the run itself once its restarts are used up; else Ray counts them.
        autostart: arguments of `Controller.train` for a detached run; None: the driver calls the stage's method.
        options: further options of the Ray actor.
    """
    node = ray.get_runtime_context().get_node_id()
    # soft: a detached run outlives this node
    here = NodeAffinitySchedulingStrategy(node, soft=autostart is not None)
    restarts = config.recovery.max_restarts if isinstance(config, RunConfig) else 0
    if counts_restarts and restarts:
        restarts = -1
    hosted = ray.remote(Controller).options(
        num_cpus=0,
        max_concurrency=3,
        max_restarts=restarts,
        max_task_retries=restarts,
        scheduling_strategy=here,
        **options,
    )
    if autostart is not None:
        return hosted.remote(startup, time.time(), (*autostart, None)[:2])
    return hosted.remote(startup, time.time(), None, find_claim(config.run_dir))


def resolve_and_check[C: StageConfig](config: C, *, resume: str | None = None) -> C:
    """Provide the models, run the preflight checks, and return `config` with absolute paths.

    Downloads the models that are named by a hub id, and writes the tiny model if configured. Prints the commits that
    were downloaded and the messages of `find_model_notices`, `find_warmup_notices` and `find_template_notices` to
    stderr.

    Args:
        resume: as in `run_stage`; the run keeps the commits of models and data and the date of templates that it has
            recorded, unless the configuration states others.

    Raises:
        MegarlError: a model or data file cannot be downloaded, or the checks found problems.
    """
    recorded = RecordedInputs() if resume is None else recorded_inputs(config, resume)
    if recorded.template_date is not None and "template_date" not in config.data.model_fields_set:
        data = config.data.model_copy(update={"template_date": recorded.template_date})
        config = config.model_copy(update={"data": data})

    def notify(line: str) -> None:
        sys.stderr.write(f"{line}\n")

    config = with_local_models(config, recorded.models, notify)
    config = with_local_data(config, recorded.data, notify)
    write_missing_model(config)
    check_or_raise(config)
    for notice in (*find_model_notices(config), *find_warmup_notices(config), *find_template_notices(config)):
        sys.stderr.write(f"{notice}\n")
    return with_absolute_paths(config)


def prepare_folder(config: StageConfig, name: str, to_rotate: Iterable[Path]) -> None:
    """Create the run folder, rename old artifacts, and write the resolved configuration.

    Args:
        name: file name, without suffix, of the resolved configuration in the folder.
        to_rotate: paths to rename if they exist; see `rotate`.
    """
    folder = Path(config.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for path in to_rotate:
        if path.exists():
            rotate(path)
    write_durably(folder / f"{name}.yaml", dump_config(config))


def rotate(path: Path) -> Path:
    """Rename a file or folder to the first free `<name>.<n>`; return the new path."""
    n = 1
    while (rotated := path.with_name(f"{path.name}.{n}")).exists():
        n += 1
    path.rename(rotated)
    return rotated


class StopRequest:
    """Reports which signal, if any, has requested an early end of the run."""

    def __init__(self, sigterm: SigtermFlag, grace_seconds: float) -> None:
        """`grace_seconds`: time for the run to end after SIGTERM before it is interrupted."""
        self._sigterm, self._grace_seconds = sigterm, grace_seconds

    def signal_name(self) -> str:
        """Return `SIGTERM`, `SIGUSR1`, or an empty string if no signal was received.

        Raises:
            KeyboardInterrupt: SIGTERM was received more than `grace_seconds` ago.
        """
        if (since := self._sigterm.received_at) is not None:
            if time.monotonic() - since >= self._grace_seconds:
                raise KeyboardInterrupt
            return "SIGTERM"
        return "SIGUSR1" if launcher_env.stop_requested() else ""


def _grace_seconds(config: StageConfig) -> float:
    """Return the grace period after SIGTERM in seconds; 0 without checkpoints, as nothing would be saved."""
    recovery = config.recovery if isinstance(config, RunConfig) else RecoveryConfig()
    return recovery.grace_seconds if config.checkpoint.every else 0.0


def follow(
    actor: ray.actor.ActorHandle, has_ended: Callable[[], bool], progress: RunProgress, stop_request: StopRequest
) -> None:
    """Show the controller's events until the run has ended, and forward requests to end early.

    Args:
        has_ended: polled in a loop; each call waits up to POLL_SECONDS.
    """
    cursor, ended, stop_signal = 0, False, ""
    while not ended:
        ended = has_ended()
        was_requested, stop_signal = bool(stop_signal), stop_request.signal_name() or stop_signal
        if stop_signal and not was_requested:
            progress.notify("early end requested: the run stops after the current step")
        if stop_signal:
            actor.request_stop.remote(stop_signal)  # on every poll: a restarted controller does not remember it
        try:
            events, cursor = ray.get(actor.events.remote(cursor))
        except RayError:
            return  # the call for the result raises the cause
        for event in events:
            show_event(event, progress)


def show_event(event: Event, progress: RunProgress) -> None:
    """Show the event in the terminal."""
    match event:
        case PhaseEvent(step, name):
            progress.phase(step, name)
        case MessageEvent(text):
            progress.notify(text)
        case StepSummary():
            progress.done(event)


@contextmanager
def _cluster(config: StageConfig, startup: Startup) -> Iterator[None]:
    with startup.phase("cluster", "ray"):
        start_cluster(config.placement)
    try:
        yield
    finally:
        leave_cluster()


def attach(run_dir: Path, *, stop: bool = False, settings: Sequence[str] = ()) -> None:
    """Show the latest events of a detached run, at most `MAX_EVENTS`, then its progress until it ends.

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
    from megarl.run.reward_weights import parse_weights  # imports all that a rollout worker needs

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
