"""Builds the trainer, engine and rollout worker of a run, which tests then drive in place of the controller.

Most tests share the processes of two Megatron ranks, in which each trainer is a role of its own.
"""

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import torch
from ray.util import remove_placement_group
from safetensors.torch import load_file
from torch import Tensor

from megarl.algorithms import find_algorithm
from megarl.batch.trajectory import Prompt
from megarl.cluster.placement.pool import SlotPool, reserve, reserve_pools
from megarl.cluster.placement.rank_grid import RankGrid
from megarl.cluster.workers.group import WorkerGroup, WorkerProcesses, by_node
from megarl.config import RunConfig
from megarl.config.placement import MAIN_POOL, PlacementConfig
from megarl.config.policy import ClippedPolicyConfig
from megarl.data.prompts import load_prompts
from megarl.data.tokenizer import load_tokenizer
from megarl.engines.engine import EngineUpdate, Sampling
from megarl.losses import ClippedLoss, PolicyLoss
from megarl.megatron.requests import TrainStats
from megarl.reshard.transfer.commit_decision import CommitDecision, CommitSpec, open_store
from megarl.run.remote.build import read_prompts, start_engines, trainer_spec
from megarl.run.remote.engine_group import EngineGroup
from megarl.run.remote.rollout_group import FinishedGroup, RolloutGroup
from megarl.run.remote.trainer_group import (
    AuxiliaryModels,
    TrainerGroup,
    make_rank_processes,
    make_trainer_group,
    rank_environment,
)
from megarl.run.rl_run import RLRun
from megarl.run.rollout_batch import RolloutBatch
from megarl.run.run_parts import RunParts
from megarl.run.sync.weight_sync import WeightSync
from megarl.tracking.progress import EventLog
from megarl.tracking.timing import PhaseTimer, Startup
from tests.end_to_end.tiny_world import run_tree
from tests.engines.remote import begin_and_load
from tests.time_limits import HANG_SECONDS

SMALL_BUCKETS = {"weight_sync": {"strategy": "gather_hf", "bucket_bytes": 60_000}}


def engine_host(scheduler: int) -> int:
    """Return the process id of the host of an engine's scheduler, whose parent is the host's fork server."""
    server = psutil.Process(scheduler).parent()
    assert server is not None
    return server.ppid()


class SharedRanks(WorkerProcesses):
    """The processes of two Megatron ranks for trainers of several tests, each of which has a role of its own.

    They are called through a relay, as if there were other nodes.
    """

    def __init__(self) -> None:
        pool = reserve(PlacementConfig(slots_per_node=2))
        with patch("megarl.cluster.workers.group.ranks_by_relay", by_node):
            super().__init__("trainer", pool, rank_environment(pool.device, pool.gpus))
        self._numbers = itertools.count()

    def group(self, name: str, grid: RankGrid) -> WorkerGroup[Any]:
        return WorkerGroup(f"{name} {next(self._numbers)}", self, grid)

    def stop(self) -> None:
        """Do nothing: other tests use the processes."""

    def end(self) -> None:
        super().stop()
        remove_placement_group(self.pool.group)


@dataclass(frozen=True)
class Components:
    config: RunConfig
    trainer: TrainerGroup
    engines: EngineGroup
    rollout: RolloutGroup
    weights: WeightSync
    prompts: Sequence[Prompt]
    pool: SlotPool
    """Slots of the trainer."""
    processes: WorkerProcesses
    """Processes of the trainer."""

    def close(self) -> None:
        """Stop all processes, except shared ones, and release their slots, of which the cluster has few."""
        self.rollout.shutdown()
        self.engines.shutdown()
        self.processes.stop()
        groups = {pool.group.id: pool.group for pool in (self.pool, self.engines.pool)}
        if isinstance(self.processes, SharedRanks):
            del groups[self.processes.pool.group.id]
        for group in groups.values():
            remove_placement_group(group)

    def run(self, config: RunConfig) -> RLRun:
        """Train the trainer's model as the controller does in a run of its own; return the finished run.

        Weights are synced as these components do it.
        """
        config = config.model_copy(update={"weight_sync": self.config.weight_sync})
        Path(config.run_dir).mkdir(exist_ok=True)
        rollout = self.rollout if config == self.config else RolloutGroup(config, self.engines)
        prompts = read_prompts(config, Path(config.run_dir))
        with ExitStack() as closing:
            models, starting = AuxiliaryModels.start(config, self.processes, {MAIN_POOL: self.pool})
            if rollout is not self.rollout:
                closing.callback(rollout.shutdown)
                rollout.start()
            for pending in starting:
                pending.result(HANG_SECONDS)
            run = RLRun(
                config,
                EventLog(),
                PhaseTimer(),
                Startup(time.time()),
                RunParts(
                    trainer=self.trainer,
                    models=models,
                    rollout=rollout,
                    sync=WeightSync.between(config, self.trainer, self.engines, self.pool, models),
                    prompts=prompts,
                ),
            )
            find_algorithm(config.algorithm.type)().train(run, config.algorithm)
            run.export(run.trainer)
            run.finish()
        return run

    def sample(self, label: str, *, temperature: float = 1.0) -> list[FinishedGroup]:
        """Sample two completions of each of four prompts."""
        sampling = Sampling(temperature=temperature, max_new_tokens=self.config.rollout.max_new_tokens)
        return self.rollout.collect(self.prompts[:4], num_samples=2, sampling=sampling, label=label)

    def train(self, groups: Sequence[FinishedGroup], trainer: TrainerGroup | None = None) -> TrainStats:
        """Train one step with advantages 1 and -1 for alternating completions, whatever their rewards."""
        batch = RolloutBatch(groups=list(groups), scalars={"advantages": [1.0, -1.0] * 4})
        algorithm = self.config.algorithm
        assert isinstance(algorithm, ClippedPolicyConfig)
        loss = PolicyLoss(token_loss=ClippedLoss.of(algorithm), algorithm=algorithm, length_norm=1)
        work = batch.train_request(self.config, loss)
        return (trainer or self.trainer).train_step(work)

    def exported(self, folder: Path) -> dict[str, Tensor]:
        self.trainer.save_hf(str(folder))
        return load_file(folder / "model.safetensors")

    def overwrite_served(self, weights: Mapping[str, Tensor]) -> None:
        """Replace all of these weights by noise in the engines, as version 1,000, so that a push must write each."""
        load_into_engines(self.engines, {name: torch.randn_like(tensor) for name, tensor in weights.items()}, 1000)

    def served(self, folder: Path) -> dict[str, Tensor]:
        """Return the engine's parameters."""
        folder.mkdir()
        self.engines.call("read_weights", str(folder))
        parameters: dict[str, Tensor] = torch.load(folder / "rank0.pt")
        return parameters


def load_into_engines(engines: EngineGroup, weights: Mapping[str, Tensor], policy_version: int) -> None:
    """Make the engines serve these weights, whatever the trainer has."""
    begin_and_load(engines, weights)
    store = open_store("127.0.0.1")
    spec = CommitSpec("127.0.0.1", store.port, "other weights", len(engines.engine_slots))
    CommitDecision(spec, store).decide()
    update = EngineUpdate(policy_version=policy_version, commit=spec, receives=False)
    engines.call("update_weights", update)


def make_config(world: Path, run_dir: Path, **sections: Any) -> RunConfig:
    return RunConfig.model_validate(run_tree(world, run_dir, **SMALL_BUCKETS, **sections))


def build(config: RunConfig, ranks: SharedRanks | None = None) -> Components:
    """Start all components and wait until they are idle.

    Args:
        ranks: processes of the trainer; None: start them.
    """
    wanted = {name: pool for name, pool in config.placement.all_pools.items() if ranks is None or name != MAIN_POOL}
    pools = reserve_pools(config.placement, wanted) if wanted else {}
    processes = ranks or make_rank_processes(pools[MAIN_POOL], "trainer")
    pool = pools[MAIN_POOL] = processes.pool
    trainer = make_trainer_group(config, processes)
    engines = start_engines(config, pools, trainer.grid)
    starting = trainer.start_workers(trainer_spec(config))
    rollout = RolloutGroup(config, engines)
    starting.result(HANG_SECONDS)
    engines.wait_started()
    rollout.start()
    prompts = load_prompts(
        config.data.resolved_sources[0], load_tokenizer(config.model.path), path=config.data.file, max_prompt_tokens=100
    )
    weights = WeightSync.between(config, trainer, engines, pool)
    return Components(config, trainer, engines, rollout, weights, prompts, pool, processes)


@contextmanager
def started(config: RunConfig, ranks: SharedRanks | None = None) -> Iterator[Components]:
    components = build(config, ranks)
    try:
        yield components
    finally:
        components.close()
