"""Models of several layouts in the same processes: results are bitwise equal to those in separate processes."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.megatron import rank_models
from tests.megatron.fidelity.measure import nll_request
from tests.megatron.fidelity.reference import draw
from tests.megatron.rank_models import assert_same_bits, gather, make_model, model_spec, train_step, trainer_spec
from tests.megatron.ranks import run_ranks
from tests.time_limits import HANG_SECONDS

STEPS = 2


def make_request(seed):
    """Request one optimizer step on eight sequences."""
    return nll_request(draw(np.random.default_rng(seed).integers(5, 60, 8), 331, seed), 100)


def train_alternately(paths, layouts):
    """Train the models of `layouts` alternately; returns by rank, model and step: metrics, weights, random numbers."""
    trainers = {
        name: rank_models.make_trainer(trainer_spec(model_spec(paths[name], sizes, seed=len(name)), lr=1e-2))
        for name, sizes in layouts.items()
    }
    from megatron.core import parallel_state, tensor_parallel

    results = {name: [] for name in trainers}
    for step in range(STEPS):
        for name, trainer in trainers.items():
            metrics = train_step(trainer, make_request(step))
            assert parallel_state.get_tensor_model_parallel_group() is trainer.model.groups.tp
            assert parallel_state.get_expert_data_parallel_group() is trainer.model.groups.expt_dp
            weights = {key: tensor.clone() for key, tensor in trainer.model.tensors().items()}
            with tensor_parallel.get_cuda_rng_tracker().fork():
                tracked = torch.rand(3)
            results[name].append((metrics, weights, tracked, torch.rand(3)))
    return gather(results)


def assert_same_as_alone(paths, layouts, world, tmp_path):
    models_together = run_ranks(train_alternately, world, tmp_path, paths, layouts)
    for name, sizes in layouts.items():
        model_alone = run_ranks(train_alternately, world, tmp_path, paths, {name: sizes})
        for together, alone in zip(models_together, model_alone, strict=True):
            for (metrics, weights, *drawn), expected in zip(together[name], alone[name], strict=True):
                assert metrics == expected[0], name
                assert_same_bits(weights, expected[1])
                assert all(map(torch.equal, drawn, expected[2:])), name


def test_two_ranks_alternate_between_models(model_folder, tmp_path):
    layouts = {"actor": {"tp": 2}, "critic": {}, "reference": {"pp": 2, "vpp": 2}}
    paths = dict.fromkeys(layouts, model_folder("qwen3"))
    assert_same_as_alone(paths, layouts, 2, tmp_path)


@pytest.mark.slow
def test_four_ranks_alternate_between_models(model_folder, tmp_path):
    layouts = {"actor": {"tp": 2, "ep": 2, "etp": 1}, "critic": {"pp": 2}, "cost": {"cp": 2, "tp": 2}, "rm": {"ep": 2}}
    moe, dense = model_folder("qwen3_moe"), model_folder("qwen3")
    paths = {"actor": moe, "critic": dense, "cost": dense, "rm": moe}
    assert_same_as_alone(paths, layouts, 4, tmp_path)


def draw_with_equal_layouts(path):
    """Return whether two models share groups, the second's draws before and after the first draws, the first's draw."""
    first, second = (make_model(model_spec(path, {"tp": 2}, seed=seed)) for seed in (3, 4))
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
    parallel = {"tp": 2, "ep": 2, "etp": 1}
    make_model(model_spec(path, parallel, timeout_seconds=seconds, weights="none"))
    groups = dist.distributed_c10d._world.pg_map
    timeouts = {group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups}
    return len(groups), timeouts, set(dist.distributed_c10d._world.pg_names.values())


def test_every_group_has_the_configured_timeout_and_no_gloo_group_is_extra(model_folder, tmp_path):
    seconds = HANG_SECONDS + 90
    count, timeouts, names = run_ranks(group_timeouts, 2, tmp_path, model_folder("qwen3_moe"), seconds)
    assert count > 8
    assert timeouts == {seconds}
    assert not [name for name in names if "GLOO" in name]
