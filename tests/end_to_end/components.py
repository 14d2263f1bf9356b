"""Builds the trainer, engine and rollout worker of a run, which tests then drive in place of the controller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from ray.util import remove_placement_group
from safetensors.torch import load_file
from torch import Tensor

from megarl.batch.trajectory import Prompt
from megarl.config import RunConfig
from megarl.config.algorithms.policy import ClippedPolicyConfig
from megarl.config.placement import MAIN_POOL
from megarl.data.prompts import load_prompts
from megarl.data.tokenizer import load_tokenizer
from megarl.groups.build import start_engines, trainer_spec
from megarl.groups.engine_group import EngineGroup
from megarl.groups.group_stream import FinishedGroup
from megarl.groups.rollout_group import RolloutGroup
from megarl.groups.trainer_group import TrainerGroup, make_rank_processes, make_trainer_group
from megarl.groups.weight_sync import WeightSync
from megarl.megatron.losses.policy import ClippedLoss, PolicyLoss
from megarl.megatron.requests import TrainStats
from megarl.placement.pool import SlotPool, reserve_pools
from megarl.reshard.transfer.commit_decision import CommitDecision, CommitSpec
from megarl.reshard.transfer.sync_store import open_store
from megarl.rollout.engine import EngineUpdate, Sampling
from megarl.run.rollout_batch import RolloutBatch
from megarl.workers.group import WorkerProcesses
from tests.end_to_end.tiny_world import run_tree
from tests.rollout.remote import begin_and_load

SMALL_BUCKETS = {"weight_sync": {"strategy": "gather_hf", "bucket_bytes": 60_000}}


def engine_host(scheduler: int) -> int:
    """Return the process id of the host of an engine's scheduler, whose parent is the host's fork server."""
    server = psutil.Process(scheduler).parent()
    assert server is not None
    return server.ppid()


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
        """Stop all processes and release their slots, of which the cluster has few."""
        self.engines.shutdown()
        self.processes.stop()
        remove_placement_group(self.pool.group)

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
        """Export the trainer's weights and return them."""
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
    update = EngineUpdate(policy_version=policy_version, commit=spec, begins=False, receives=False)
    engines.call("update_weights", update)


def make_config(world: Path, run_dir: Path, **sections: Any) -> RunConfig:
    return RunConfig.model_validate(run_tree(world, run_dir, **SMALL_BUCKETS, **sections))


def build(config: RunConfig) -> Components:
    """Start all components and wait until they are idle."""
    pools = reserve_pools(config.placement, config.placement.all_pools)
    pool = pools[MAIN_POOL]
    processes = make_rank_processes(pool, "trainer")
    trainer = make_trainer_group(config, processes)
    engines = start_engines(config, pools, trainer.grid)
    starting = trainer.start_workers(trainer_spec(config))
    rollout = RolloutGroup(config, engines)
    starting.result(120)
    engines.wait_started()
    rollout.start()
    prompts = load_prompts(
        config.data.resolved_sources[0], load_tokenizer(config.model.path), path=config.data.file, max_prompt_tokens=100
    )
    weights = WeightSync(config, trainer, engines, pool)
    return Components(config, trainer, engines, rollout, weights, prompts, pool, processes)
