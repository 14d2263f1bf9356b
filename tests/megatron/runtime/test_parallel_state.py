"""Models of several layouts in the same processes: results are bitwise equal to those in separate processes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megarl.batch.sample_table import SampleRef
from megarl.batch.trajectory import Trajectory
from megarl.config.trainer import OptimizerConfig, ParallelConfig
from megarl.functional.losses import Denominators
from megarl.megatron.request_split import split_by_dp
from megarl.megatron.requests import MiniBatch, ModelSpec, TrainerSpec, TrainRequest
from megarl.placement.rank_grid import RankGrid
from megarl.workers.payload import LocalPayload
from tests.megatron.ranks import run_ranks

STEPS = 2


def make_request(seed):
    """Request one optimizer step on eight sequences."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(5, 60, 8)
    rows = [
        Trajectory(
            prompt_id=str(i),
            group_id=i,
            token_ids=rng.integers(2, 331, n).astype(np.int32),
            loss_mask=np.arange(n) > 0,
            logprobs=np.zeros(n, np.float32),
            policy_versions=np.zeros(n, np.int32),
        )
        for i, n in enumerate(lengths)
    ]
    batch = MiniBatch(
        samples=tuple(SampleRef(payload=0, index=i, num_tokens=row.num_tokens) for i, row in enumerate(rows)),
        denominators=Denominators(num_tokens=int(sum(lengths - 1)), num_sequences=len(rows)),
    )
    return TrainRequest(mini_batches=(batch,), payloads=(LocalPayload(rows),), max_tokens_per_micro_batch=100)


def train_alternately(paths, layouts):
    """Train several models alternately; returns for each rank, model and step: metrics, weights, random numbers.

    Args:
        layouts: parallel layout by model; only these models of `paths` are trained.
    """
    import torch.distributed as dist

    from megarl.megatron.runtime import platform

    platform.prepare()
    from megatron.core import parallel_state, tensor_parallel

    from megarl.megatron.training.trainer import MegatronTrainer

    trainers = {}
    for name, parallel in layouts.items():
        spec = ModelSpec(model_path=paths[name], dtype="float32", parallel=parallel, seed=len(name))
        optimizer = OptimizerConfig(lr=1e-2)
        trainers[name] = MegatronTrainer(TrainerSpec(model=spec, optimizer=optimizer, optimizer_steps=10))
    results = {name: [] for name in trainers}
    for step in range(STEPS):
        for name, trainer in trainers.items():
            grid = RankGrid.of(layouts[name], dist.get_world_size())
            stats = trainer.train_step(split_by_dp(make_request(step), grid)[dist.get_rank()])
            assert parallel_state.get_tensor_model_parallel_group() is trainer.model.groups.tp
            assert parallel_state.get_expert_data_parallel_group() is trainer.model.groups.expt_dp
            weights = {key: tensor.clone() for key, tensor in trainer.model.tensors().items()}
            with tensor_parallel.get_cuda_rng_tracker().fork():
                tracked = torch.rand(3)
            results[name].append((stats.metrics, weights, tracked, torch.rand(3)))
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, results)
    return gathered


def assert_same_as_alone(paths, layouts, world, tmp_path):
    models_together = run_ranks(train_alternately, world, tmp_path, paths, layouts)
    for name, parallel in layouts.items():
        model_alone = run_ranks(train_alternately, world, tmp_path, paths, {name: parallel})
        for rank in range(world):
            for (metrics, weights, *drawn), expected in zip(
                models_together[rank][name], model_alone[rank][name], strict=True
            ):
                assert metrics == expected[0], name
                assert weights.keys() == expected[1].keys()
                assert all(torch.equal(weights[key], tensor) for key, tensor in expected[1].items()), name
                assert all(map(torch.equal, drawn, expected[2:])), name


def test_two_ranks_alternate_between_models(model_folder, tmp_path):
    layouts = {"actor": {"tp": 2}, "critic": {}, "reference": {"pp": 2, "vpp": 2}}
    paths = dict.fromkeys(layouts, model_folder("qwen3"))
    assert_same_as_alone(paths, {name: ParallelConfig(**sizes) for name, sizes in layouts.items()}, 2, tmp_path)


@pytest.mark.slow
def test_four_ranks_alternate_between_models(model_folder, tmp_path):
    layouts = {"actor": {"tp": 2, "ep": 2, "etp": 1}, "critic": {"pp": 2}, "cost": {"cp": 2, "tp": 2}, "rm": {"ep": 2}}
    moe, dense = model_folder("qwen3_moe"), model_folder("qwen3")
    paths = {"actor": moe, "critic": dense, "cost": dense, "rm": moe}
    assert_same_as_alone(paths, {name: ParallelConfig(**sizes) for name, sizes in layouts.items()}, 4, tmp_path)


def draw_with_equal_layouts(path):
    """Return whether two models share groups, the second's draws before and after the first draws, the first's draw."""
    from megarl.megatron.runtime import platform

    platform.prepare()
    from megarl.megatron.modeling.megatron_model import MegatronModel

    first, second = (
        MegatronModel(ModelSpec(model_path=path, dtype="float32", parallel=ParallelConfig(tp=2), seed=seed))
        for seed in (3, 4)
    )
    draws = [torch.rand(2)]
    first.activate()
    other = torch.rand(2)
    second.activate()
    return first.groups is second.groups, [*draws, torch.rand(2)], other


def test_equal_layouts_share_groups_but_not_rng_states(model_folder, tmp_path):
    shared, draws, other = run_ranks(draw_with_equal_layouts, 2, tmp_path, model_folder("qwen3"))
    assert shared
    torch.manual_seed(3)
    assert torch.equal(other, torch.rand(2))
    torch.manual_seed(4)
    assert all(torch.equal(drawn, torch.rand(2)) for drawn in draws)


def group_timeouts(path, seconds):
    """Return the timeout in seconds of each process group of a model by backend, and the backend of each group."""
    import torch.distributed as dist

    from megarl.megatron.runtime import platform

    platform.prepare()
    from megarl.megatron.modeling.megatron_model import MegatronModel

    parallel = ParallelConfig(tp=2, ep=2, etp=1)
    spec = ModelSpec(model_path=path, dtype="float32", parallel=parallel, timeout_seconds=seconds, weights="none")
    MegatronModel(spec)
    groups = dist.distributed_c10d._world.pg_map
    timeouts = {group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups}
    return len(groups), timeouts, set(dist.distributed_c10d._world.pg_names.values())


def test_every_group_has_the_configured_timeout_and_no_gloo_group_is_extra(model_folder, tmp_path):
    count, timeouts, names = run_ranks(group_timeouts, 2, tmp_path, model_folder("qwen3_moe"), 90.0)
    assert count > 8
    assert timeouts == {90.0}
    assert not [name for name in names if "GLOO" in name]
