"""The controller actor: runs a stage in one thread and answers the driver's calls in others.

Each stage imports what it runs when it is called: the driver imports this module only to name the methods, and the
imports of one stage (torch, training loops) take seconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import ray

from megarl import IMPORT_STARTED_AT
from megarl.checkpoint.run_lock import LockClaim, RunLock, adopt_claim
from megarl.cluster.workers.failures import interruptible
from megarl.config import DpoConfig, RmConfig, RunConfig, SftConfig
from megarl.controller.ray_session import acquire_when_free
from megarl.errors import MegarlError, RewardError, WorkerError
from megarl.tracking.progress import Event, EventLog, MessageEvent
from megarl.tracking.timing import Startup

LINGER_SECONDS = 60.0
"""How long the actor of a detached run stays alive after its end, so that `outcome` can still be read."""

REPLY_SECONDS = 2.0
"""Time left for the reply of `outcome` to reach its caller before the actor is killed."""


class Controller:
    """Run one training or evaluation stage.

    Hosted by a Ray actor with three threads: one runs the stage, the others serve `events`, `request_stop` and `stop`.
    """

    def __init__(
        self,
        startup: Startup,
        requested_at: float,
        autostart: tuple[RunConfig, Path | None] | None = None,
        claim: LockClaim | None = None,
    ) -> None:
        """Args:
        startup: start-up trace of the command, to which this process adds its own spans.
        requested_at: when the driver requested this actor from Ray, in Unix seconds.
        autostart: arguments of `train` for a detached run, which starts at construction, also after Ray has restarted
            this actor; None: the driver calls the stage's method.
        claim: the driver's claim to the run folder, for which the stage writes; None: the driver has not locked one,
            or the run is detached and this actor acquires the lock itself.
        """
        if claim is not None:
            adopt_claim(claim)
        startup.add("controller", "ray", [(requested_at, IMPORT_STARTED_AT)])
        startup.add("controller", "imports", [(IMPORT_STARTED_AT, time.time())])
        self._startup = startup
        self._events = EventLog()
        self._interrupt, self._idle = threading.Event(), threading.Event()
        self._idle.set()
        self._train_thread: threading.Thread | None = None
        self._failure: MegarlError | None = WorkerError(
            "the run failed with an unexpected error; see the controller's log"
        )
        self._is_outcome_read = threading.Event()
        self._run_dir = None if autostart is None else autostart[0].run_dir
        if autostart is not None:
            self._train_thread = threading.Thread(target=self._train_autostarted, args=autostart, name="train")
            self._train_thread.start()

    def events(self, cursor: int) -> tuple[list[Event], int]:
        """Return the events since `cursor`, and the cursor for the next call."""
        return self._events.since(cursor)

    def request_stop(self, stop_signal: str) -> None:
        """End the stage after the current step: it exports the model, writes its totals and raises EarlyStop."""
        self._events.request_stop(stop_signal)

    def change_reward_weights(self, weights: Mapping[str, float]) -> None:
        """Change the weights of reward terms of the detached run, from its next step on."""
        from megarl.run.reward_weights import request_weights

        assert self._run_dir is not None, "its caller knows"
        request_weights(self._run_dir, weights)

    def has_ended(self) -> bool:
        """Whether the detached run has ended."""
        assert self._train_thread is not None, "its caller knows"
        return not self._train_thread.is_alive()

    def outcome(self) -> None:
        """Wait for the end of the detached run; raise the error that ended it, if any."""
        assert self._train_thread is not None, "its caller knows"
        self._train_thread.join()
        self._is_outcome_read.set()
        if self._failure is not None:
            raise self._failure

    def _train_autostarted(self, config: RunConfig, resume: Path | None) -> None:
        try:
            with acquire_when_free(RunLock(config.run_dir)):
                self.train(config, resume)
            self._failure = None
        except MegarlError as error:
            self._failure = error
        finally:
            threading.Thread(target=self._exit_actor, name="end", daemon=True).start()

    def _exit_actor(self) -> None:
        """Kill this actor once `outcome` has been read, or after LINGER_SECONDS."""
        self._is_outcome_read.wait(LINGER_SECONDS)
        time.sleep(REPLY_SECONDS)
        ray.kill(ray.get_runtime_context().current_actor)

    def stop(self) -> None:
        """Interrupt `train` or `evaluate`; return once its thread has shut down what must end gracefully.

        The thread notices the interrupt in its next wait for other processes.
        """
        self._interrupt.set()
        self._idle.wait()

    @contextmanager
    def _stage(self) -> Iterator[ExitStack]:
        """Yield the stack of the shutdown callbacks, which this thread alone uses and closes.

        Raises:
            MegarlError: `stop` has interrupted the stage.
        """
        self._idle.clear()
        try:
            with interruptible(self._interrupt), ExitStack() as closing:
                yield closing
        except KeyboardInterrupt as error:
            raise MegarlError("the run was interrupted") from error
        finally:
            self._idle.set()

    def train(self, config: RunConfig, resume: Path | None = None) -> None:
        """Run reinforcement learning up to the export; `resume`: checkpoint folder to resume from.

        Ray calls this method again after it has restarted this actor.
        """
        self._events.add(MessageEvent("starting trainer ranks and rollout engines"))
        with self._startup.phase("controller", "imports"):
            from megarl.controller.recovery import Recovery

        restarted = ray.get_runtime_context().was_current_actor_reconstructed
        with self._stage() as closing:
            recovery = Recovery(config, self._events, closing, self._startup, resume=resume, restarted=restarted)
            while not recovery.is_finished:
                with recovery.attempt() as run:
                    from megarl.algorithms import find_algorithm  # imports torch, while other processes start

                    find_algorithm(config.algorithm.type)().train(run, config.algorithm)
                    run.save()
                    run.export(run.trainer)
                    run.finish()
        run.raise_if_stopped_early()

    def sft(self, config: SftConfig, resume: Path | None = None) -> None:
        """Run supervised fine-tuning up to the export; `resume`: checkpoint folder to resume from."""
        from megarl.run.remote.build import stage_processes
        from megarl.stages import make_sft

        self._events.add(MessageEvent("starting trainer ranks"))
        run = make_sft(config, self._events, stage_processes(config), resume)
        run.train()
        run.raise_if_stopped_early()

    def rm(self, config: RmConfig, resume: Path | None = None) -> None:
        """Train a reward or cost model on preference pairs; arguments as in `sft`."""
        from megarl.run.remote.build import stage_processes
        from megarl.stages import make_rm

        self._events.add(MessageEvent("starting trainer ranks"))
        run = make_rm(config, self._events, stage_processes(config), resume)
        run.train()
        run.raise_if_stopped_early()

    def dpo(self, config: DpoConfig, resume: Path | None = None) -> None:
        """Run direct preference optimization; arguments as in `sft`."""
        from megarl.run.remote.build import stage_processes
        from megarl.stages import make_dpo

        self._events.add(MessageEvent("starting trainer ranks"))
        run = make_dpo(config, self._events, stage_processes(config), resume)
        run.train()
        run.raise_if_stopped_early()

    def replay(self, config: RunConfig, resume: Path | None, last_step: int) -> dict[str, float]:
        """Train again on the rollouts of a journal; return the seconds in all and by phase.

        Args:
            resume: checkpoint to begin from; None: from step 0.
            last_step: last step of the journal.
        """
        from megarl.controller.replay import replay_journal

        self._events.add(MessageEvent("starting trainer ranks"))
        with self._stage() as closing:
            return replay_journal(config, self._events, closing, self._startup, resume=resume, last_step=last_step)

    def evaluate(self, config: RunConfig) -> dict[str, float]:
        """Return the metrics of the untrained model on the held-out prompts, by name.

        Raises:
            RewardError: the reward failed on all completions.
        """
        from megarl.run.group_sampler import evaluate
        from megarl.run.remote.build import build_evaluation

        self._events.add(MessageEvent("starting rollout engines"))
        with self._stage() as closing:
            rollout, held_out = build_evaluation(config, closing)
            evaluation = evaluate(config, rollout, held_out, label="evaluate")
        num = len(held_out) * config.eval.samples
        failures = f"reward.terms.{config.reward.eval_name} failed on {evaluation.num_dropped} of {num} completions"
        if evaluation.score is None:
            raise RewardError(f"{failures} (on_error: drop)")
        if evaluation.num_dropped:
            self._events.add(MessageEvent(f"{failures}, which do not count"))
        return dict(evaluation.metrics)
