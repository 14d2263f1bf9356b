"""From a checked configuration to a running controller: what the driver process does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.checkpoint.run_lock import RunLock
from megarl.checkpoint.store import CheckpointStore
from megarl.config import RunConfig, StageConfig, dump_config
from megarl.config.algorithms.algorithm import FrozenModelConfig
from megarl.config.recovery import RecoveryConfig
from megarl.config.reward import ModelRewardConfig
from megarl.config.section import Section
from megarl.controller.actor import Controller
from megarl.controller.detached import detached_options, leave
from megarl.controller.ray_session import Terminated, terminated_is_interrupted, terminated_is_noted
from megarl.controller.resume import Start, find_start
from megarl.errors import ConfigError
from megarl.placement.pool import start_cluster
from megarl.preflight.cluster.cluster_check import places_of, require_sound_nodes
from megarl.preflight.run_checks import require_ready
from megarl.preflight.tiny_model import write_missing_model
from megarl.process import early_stop_signal
from megarl.process.torchrun_env import torchrun_world
from megarl.run.events import Event, Note, Phase
from megarl.tracking.progress import RunProgress, StepLine
from megarl.tracking.startup import Startup
from megarl.workers.failures import translate

C = TypeVar("C", bound=StageConfig)
S = TypeVar("S", bound=Section)

POLL_SECONDS = 0.2

RESULTS = (
    "metrics.jsonl",
    "tensorboard",
    "wandb-id",
    "rollouts",
    "startup.json",
    "summary.json",
    "checkpoints",
    "journal",
    "dumps",
    "stacks",
)
"""What a run writes into its folder step by step; an earlier run's is kept under another name."""
STOP_SECONDS = 4.0
"""How long an interrupted run may take to end in order, before Ray ends its processes."""


def run_stage(
    config: C,
    method: Callable[..., Any],
    *,
    begins_run: bool = True,
    startup: Startup | None = None,
    resume: str | None = None,
    detach: bool = False,
) -> Any:
    """Run a method of the controller on the cluster, showing its progress; the cluster ends with it if started here.

    Args:
        method: takes the configuration, and where a run is resumed a checkpoint's folder.
        begins_run: the results of an earlier run in the folder are set aside.
        startup: what came before; None: nothing that counts.
        resume: which run to go on with: see `megarl.controller.resume`; None: a new one begins.
        detach: return at once, and leave the run to the cluster, which has to be there already; of training.

    Raises:
        MegarlError: what ended the run.
    """
    if torchrun_world() is not None:
        raise ConfigError(
            f"{method.__name__} starts processes of its own, on Ray, and cannot be torchrun's: start it with "
            f"`torchrun --nproc-per-node 1 ... -m megarl launch {method.__name__} ...`, or without torchrun"
        )
    if detach and not os.environ.get("RAY_ADDRESS"):
        raise ConfigError("--detach leaves the run to a Ray cluster that stays, and needs RAY_ADDRESS to name one")
    startup = startup or Startup(time.time())
    with ExitStack() as closing:
        with startup.phase("checks"):
            config = require_sound(config)
            checkpoint = None
            if begins_run:
                checkpoint = begin_run(config, method.__name__, resume, closing)
            else:
                prepare_folder(config, method.__name__, ())
        arguments = (config,) if checkpoint is None else (config, checkpoint)
        return _on_cluster(config, method, arguments, startup, detach=detach)


def begin_run(config: StageConfig, name: str, resume: str | None, closing: ExitStack) -> Path | None:
    """Make the run's folder ready, for this run alone, and return the checkpoint that it goes on from.

    Args:
        config: with absolute paths.
        name: what the resolved configuration is called in the folder.
        resume: see `run_stage`.
        closing: lets the folder go.

    Raises:
        MegarlError: another run has the folder, or there is nothing to go on from; nothing in it has changed.
    """
    closing.enter_context(RunLock(config.run_dir))
    CheckpointStore(config.run_dir).clean()
    if resume is None:
        start = Start(stale=tuple(Path(config.run_dir) / result for result in RESULTS))
    else:
        start = find_start(config, resume, RESULTS, print)
    prepare_folder(config, name, start.stale)
    return start.checkpoint


def _on_cluster(
    config: C, method: Callable[..., Any], arguments: tuple[Any, ...], startup: Startup, *, detach: bool
) -> Any:
    # twice, because connecting to a cluster puts Ray's own handler of SIGTERM in the place of the first
    with terminated_is_interrupted(), _cluster(config, startup), terminated_is_interrupted():
        with startup.phase("node checks"):
            checked = require_sound_nodes(config.placement, places_of(config))
        if detach:
            return leave(config, _controller(config, startup, **detached_options(config), alone=arguments))
        actor = _controller(config, startup)
        result = getattr(actor, method.__name__).remote(*arguments)

        def has_ended() -> bool:
            return bool(ray.wait([result], timeout=POLL_SECONDS)[0])

        try:
            with RunProgress(config.trainer.steps) as progress, terminated_is_noted() as terminated:
                if checked is not None:
                    progress.say(checked)
                follow(actor, has_ended, progress, Asked(terminated, _grace_seconds(config)))
            return ray.get(result)
        except RayError as error:
            raise translate(error, what=method.__name__, name="the controller") from error
        except KeyboardInterrupt:
            ray.wait([actor.stop.remote()], timeout=STOP_SECONDS)
            raise


def _controller(config: StageConfig, startup: Startup, *, alone: tuple[Any, ...] | None = None, **options: Any) -> Any:
    """Its actor, beside the driver; one that dies is restarted by Ray, and asked again what it was at.

    Args:
        alone: what it trains without being asked.
        options: of the actor.
    """
    node = ray.get_runtime_context().get_node_id()
    here = NodeAffinitySchedulingStrategy(node, soft=alone is not None)  # the machine may be lost, and the run go on
    restarts = config.recovery.max_restarts if isinstance(config, RunConfig) else 0
    hosted = ray.remote(Controller).options(
        num_cpus=0,
        max_concurrency=3,
        max_restarts=restarts,
        max_task_retries=restarts,
        scheduling_strategy=here,
        **options,
    )
    return hosted.remote(startup, time.time(), None if alone is None else (*alone, None)[:2])


def require_sound(config: C) -> C:
    """`config` with absolute paths, if nothing would stop the run.

    Raises:
        MegarlError: something would.
    """
    write_missing_model(config)
    require_ready(config)
    return with_absolute_paths(config)


def prepare_folder(config: StageConfig, name: str, stale: Iterable[Path]) -> None:
    """Make the run's folder ready.

    Args:
        name: what the resolved configuration is called in the folder.
        stale: to be set aside where it is there.
    """
    folder = Path(config.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for path in stale:
        if path.exists():
            set_aside(path)
    (folder / f"{name}.yaml").write_text(dump_config(config))


def set_aside(path: Path) -> Path:
    """Rename a file or folder to the first free `<name>.<n>`, and return that."""
    n = 1
    while (aside := path.with_name(f"{path.name}.{n}")).exists():
        n += 1
    path.rename(aside)
    return aside


def with_absolute_paths(config: C) -> C:
    """The same configuration for processes that run in another folder."""
    data = config.data.model_copy(
        update={
            "path": _absolute(config.data.path),
            "eval_path": None if config.data.eval_path is None else _absolute(config.data.eval_path),
        }
    )
    update: dict[str, Any] = {
        "run_dir": _absolute(config.run_dir),
        "export_dir": _absolute(config.export_path),
        "model": config.model.model_copy(update={"path": _absolute(config.model.path)}),
        "data": data,
    }
    return _with_absolute_folders(config).model_copy(update=update)


def _with_absolute_folders(section: S) -> S:
    """The section with the folders of the models that are described in it."""
    update: dict[str, Any] = {}
    for name, value in section:
        if isinstance(value, Section):
            update[name] = _with_absolute_folders(value)
        elif isinstance(value, dict):
            update[name] = {k: _with_absolute_folders(v) if isinstance(v, Section) else v for k, v in value.items()}
    if isinstance(section, FrozenModelConfig | ModelRewardConfig) and section.path is not None:
        update["path"] = _absolute(section.path)
    return section.model_copy(update=update)


def _absolute(path: str) -> str:
    return str(Path(path).absolute())


class Asked:
    """By which signal the run was asked to end early."""

    def __init__(self, terminated: Terminated, grace_seconds: float) -> None:
        """`grace_seconds`: how long the run may take to end after SIGTERM."""
        self._terminated, self._grace_seconds = terminated, grace_seconds

    def by(self) -> str:
        """Its name; empty: none has come.

        Raises:
            KeyboardInterrupt: SIGTERM has, and the run does not end.
        """
        if (since := self._terminated.since) is not None:
            if time.monotonic() - since >= self._grace_seconds:
                raise KeyboardInterrupt
            return "SIGTERM"
        return "SIGUSR1" if early_stop_signal.is_asked() else ""


def _grace_seconds(config: StageConfig) -> float:
    """How long a run that is told to end may take: no time, where it would not save anything."""
    recovery = config.recovery if isinstance(config, RunConfig) else RecoveryConfig()
    return recovery.grace_seconds if config.checkpoint.every else 0.0


def follow(actor: Any, has_ended: Callable[[], bool], progress: RunProgress, asked: Asked) -> None:
    """Show the controller's events until the run has ended, and tell it where a signal asks for an early end.

    Args:
        has_ended: asked again and again, and takes its time.
    """
    cursor, ended, ends = 0, False, ""
    while not ended:
        ended = has_ended()
        told, ends = bool(ends), asked.by() or ends
        if ends and not told:
            progress.say("asked to end early: the step under way will be the last")
        if ends:
            actor.finish_early.remote(ends)  # each time: one that has been restarted has forgotten
        try:
            events, cursor = ray.get(actor.events.remote(cursor))
        except RayError:
            return  # the result says what happened
        for event in events:
            show(event, progress)


def show(event: Event, progress: RunProgress) -> None:
    """Tell the user."""
    match event:
        case Phase(step, name):
            progress.phase(step, name)
        case Note(text):
            progress.say(text)
        case StepLine():
            progress.done(event)


@contextmanager
def _cluster(config: StageConfig, startup: Startup) -> Iterator[None]:
    with startup.phase("cluster", "ray"):
        start_cluster(config.placement)
    try:
        yield
    finally:
        ray.shutdown()
