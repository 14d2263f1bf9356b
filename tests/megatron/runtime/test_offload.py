"""State that leaves the device between phases: what is freed, and that training goes on as if it had stayed."""

from __future__ import annotations

import pytest
import torch

from megarl.config.trainer import OffloadConfig, OptimizerConfig, ParallelConfig
from megarl.config.weight_sync import WeightSyncConfig
from megarl.megatron.requests import ModelSpec, SyncSetup, TrainerSpec, split_by_dp
from megarl.megatron.runtime.offload import OffloadedTensors
from megarl.placement.rank_grid import RankGrid
from megarl.reshard.planning.strategy import Outlets
from tests.megatron.fidelity.measure import nll_work
from tests.megatron.fidelity.reference import draw
from tests.megatron.ranks import CollectingSink, run_ranks

EVERYTHING = OffloadConfig(optimizer=True, gradients=True, weights=True)
LENGTHS = (5, 9, 21, 34, 40, 18)
STEPS = 2

LAYOUTS = {
    "tp2": ("qwen3", 2, {"tp": 2}),
    "pp2": ("deepseek_v3", 2, {"pp": 2}),
    "vpp": ("qwen3", 2, {"pp": 2, "vpp": 2}),
    "ep2": ("qwen3_moe", 2, {"ep": 2}),
    "dp2 distributed optimizer": ("qwen3", 2, {}),
    "dp2 replicated optimizer": ("qwen3", 2, {"distributed": False}),
}


def make_worker(path, dtype, distributed, parallel):
    from megarl.megatron.trainer_worker import TrainerWorker

    model = ModelSpec(model_path=path, dtype=dtype, parallel=ParallelConfig(**parallel))
    optimizer = OptimizerConfig(lr=1e-3, distributed=distributed)
    return TrainerWorker(TrainerSpec(model=model, optimizer=optimizer, optimizer_steps=STEPS))


def storages(tensors):
    return {s._cdata: s for s in (t.untyped_storage() for t in tensors)}.values()


def num_bytes(tensors):
    return sum(s.nbytes() for s in storages(tensors))


def held_tensors(worker):
    """By kind."""
    trainer = worker._trainer
    state = [p for group in trainer._optimizer.param_groups for p in group["params"]]
    state += [t for _, of in trainer._optimizer.state.items() for t in of.values() if torch.is_tensor(t)]
    weights = list(trainer.rank.tensors().values())
    ids = {s._cdata for s in storages(weights)}
    return {
        "optimizer": [t for t in state if t.untyped_storage()._cdata not in ids],
        "gradients": [b.grad_data for chunk in trainer._ddp for b in chunk.buffers + chunk.expert_parallel_buffers],
        "weights": weights,
    }


def check_offload(worker, kinds, held_before):
    """Offload `kinds`, twice; what they name is gone and counted, the rest stays."""
    away = [kind for kind in held_before if getattr(kinds, kind)]
    expected = {kind: num_bytes(tensors) for kind, tensors in held_before.items()}
    assert expected["weights"] > 0
    assert expected["gradients"] > 0
    stats, again = worker.offload(kinds), worker.offload(kinds)
    for kind, tensors in held_before.items():
        assert num_bytes(tensors) == (0 if kind in away else expected[kind]), kind
    assert stats.device_bytes == sum(expected[kind] for kind in away)
    assert stats.host_bytes == sum(expected[kind] for kind in away if kind != "gradients")
    assert again.device_bytes == 0
    # freed memory must not come back with the bytes that it had
    waste = [torch.full((n,), 0x7F, dtype=torch.uint8) for n in expected.values() for _ in range(3)]
    del waste
    return stats


def train_on_rank(path, dtype, distributed, parallel, kinds):
    """Steps with `kinds` away before each; weights and optimizer state of all ranks after the last."""
    import torch.distributed as dist

    worker = make_worker(path, dtype, distributed, parallel)
    grid = RankGrid.of(ParallelConfig(**parallel), dist.get_world_size())
    for step in range(STEPS):
        held = held_tensors(worker)
        stats = check_offload(worker, kinds, held)
        if step == 0:
            assert worker.onload(None).device_bytes == stats.device_bytes
            assert worker.onload(None).device_bytes == 0
            assert not kinds.gradients or not any(t.any() for t in held["gradients"])
        # later, the step itself brings everything back
        worker.train_step(split_by_dp(nll_work(draw(LENGTHS, 331, seed=step), 64), grid)[dist.get_rank()])
    everyone = [None] * dist.get_world_size()
    held = held_tensors(worker)
    assert num_bytes(held["optimizer"]) > 0
    dist.all_gather_object(everyone, {kind: [t.clone() for t in held[kind]] for kind in ("weights", "optimizer")})
    return everyone


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_goes_on_as_if_nothing_had_left(layout, dtype, model_folder, tmp_path):
    name, world, options = LAYOUTS[layout]
    parallel = {k: v for k, v in options.items() if k != "distributed"}
    arguments = (model_folder(name), dtype, options.get("distributed", True), parallel)
    got = run_ranks(train_on_rank, world, tmp_path, *arguments, EVERYTHING)
    want = run_ranks(train_on_rank, world, tmp_path, *arguments, OffloadConfig())
    for rank, (of, wanted) in enumerate(zip(got, want, strict=True)):
        for kind in wanted:
            for number, (tensor, other) in enumerate(zip(of[kind], wanted[kind], strict=True)):
                assert torch.equal(tensor, other), (rank, kind, number)


@pytest.mark.parametrize("kind", ["optimizer", "gradients", "weights"])
def test_each_kind_leaves_alone(kind, model_folder, tmp_path):
    run_ranks(train_on_rank, 1, tmp_path, model_folder("qwen3"), "bfloat16", True, {}, OffloadConfig(**{kind: True}))


def push_on_rank(path, folder):
    """Push and save while everything is away; what the sink got, before and after a step."""
    import torch.distributed as dist

    worker = make_worker(path, "bfloat16", True, {"tp": 2})
    grid = RankGrid(tp=2)
    received = []
    sink = CollectingSink()
    outlets = {0: Outlets(whole=(sink,))}
    worker.prepare_sync(SyncSetup(config=WeightSyncConfig(strategy="gather_hf", bucket_bytes=20_000), outlets=outlets))
    for away in (False, True):
        worker.train_step(split_by_dp(nll_work(draw(LENGTHS, 331), 64), grid)[dist.get_rank()])
        if away:
            worker.offload(EVERYTHING)
        worker.push_weights(None)
        received.append(dict(sink.tensors))
    held = held_tensors(worker)
    assert num_bytes(held["weights"])
    assert not num_bytes(held["optimizer"] + held["gradients"]), "a push needs weights alone"
    worker.offload(EVERYTHING)
    worker.save_hf(folder)
    return received


def test_a_push_and_an_export_bring_the_weights_back(model_folder, tmp_path):
    from safetensors.torch import load_file

    before, after = run_ranks(push_on_rank, 2, tmp_path, model_folder("qwen3"), str(tmp_path / "export"))
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], after[name]) for name in before)
    files = list((tmp_path / "export").glob("*.safetensors"))
    saved = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert saved.keys() == after.keys()
    assert all(torch.equal(saved[name], after[name]) for name in saved)


def test_storages_are_moved_once_and_fill_every_view():
    buffer = torch.arange(100, dtype=torch.float32)
    views = [buffer[:40].view(5, 8), buffer[30:]]
    other, empty = torch.arange(7, dtype=torch.int16), torch.empty(0)
    tensors, moved = [buffer, *views, other, empty], OffloadedTensors(piece_bytes=64)
    assert moved.offload(tensors) == 400 + 14
    assert [t.untyped_storage().nbytes() for t in tensors] == [0] * 5
    assert moved.host_bytes == 414
    assert moved.onload() == 414
    assert torch.equal(buffer, torch.arange(100.0))
    assert torch.equal(views[0], torch.arange(40.0).view(5, 8))
    assert torch.equal(other, torch.arange(7, dtype=torch.int16))
    views[1].zero_()
    assert buffer[30:].sum() == 0


def test_storages_of_others_stay_and_new_ones_are_found():
    kept, first, second = torch.ones(4), torch.full((5,), 2.0), torch.full((60,), 3.0)
    moved = OffloadedTensors(piece_bytes=16)
    assert moved.offload([kept[:2], first], apart_from=[kept]) == 20
    assert kept.untyped_storage().nbytes() == 16
    moved.onload()
    assert moved.offload([first, second]) == 20 + 240
    moved.onload()
    assert (first == 2).all()
    assert (second == 3).all()
    assert moved.host_bytes == 260


def test_by_default_cuda_alone_offloads_optimizer_and_gradients():
    assert OffloadConfig().resolved("cuda") == OffloadConfig(optimizer=True, gradients=True)
    assert not OffloadConfig().resolved("cpu").anything
    assert not OffloadConfig().resolved("cuda", shared=False).anything
    assert OffloadConfig(weights=True).resolved("cuda", shared=False).anything
    chosen = OffloadConfig(optimizer=False, weights=True)
    assert chosen.resolved("cuda") == OffloadConfig(optimizer=False, gradients=True, weights=True)
    assert chosen.resolved("cpu").anything
