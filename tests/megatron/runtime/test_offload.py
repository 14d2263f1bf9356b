"""Offloading of training state between phases: what is freed, and that it does not change training."""

from types import SimpleNamespace

import pytest
import torch

from megarl.config.trainer import OffloadConfig
from megarl.megatron.requests import ForwardRequest
from megarl.megatron.runtime import platform
from megarl.megatron.runtime.offload import FrozenMemory, OffloadedTensors, TrainerMemory
from megarl.megatron.trainer_worker import FrozenWorker, TrainerWorker
from megarl_kernels import linear_logprob
from tests.megatron.fidelity.measure import nll_request
from tests.megatron.fidelity.models import TWO_DTYPES
from tests.megatron.fidelity.reference import draw
from tests.megatron.rank_models import assert_same_bits, gather, model_spec, own_part, sync_weights, trainer_spec
from tests.megatron.ranks import run_ranks, sample
from tests.megatron.test_hf_export import load_folder

EVERYTHING = OffloadConfig(optimizer=True, gradients=True, weights=True)
STEPS = 2

LAYOUTS = {
    "tp2": ("qwen3", {"tp": 2}),
    "pp2": ("deepseek_v3", {"pp": 2}),
    "vpp": ("qwen3", {"pp": 2, "vpp": 2}),
    "ep2": ("qwen3_moe", {"ep": 2}),
    "dp2 two dtypes": (TWO_DTYPES, {}),
    "dp2 distributed optimizer": ("qwen3", {}),
    "dp2 replicated optimizer": ("qwen3", {"distributed": False}),
}


def make_worker(path, dtype, distributed=True, **parallel):
    model = model_spec(path, parallel, dtype=dtype)
    return TrainerWorker(trainer_spec(model, lr=1e-3, distributed=distributed, steps=STEPS))


def request_of(worker, seed=0):
    return own_part(worker.model, nll_request(draw((5, 9, 21, 34, 40, 18), 331, seed=seed), 64))


def storages(tensors):
    return {s._cdata: s for s in (t.untyped_storage() for t in tensors)}.values()


def num_bytes(tensors):
    return sum(s.nbytes() for s in storages(tensors))


def held_tensors(worker):
    """Return all tensors of the worker by kind of state."""
    trainer = worker.trainer
    state = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    state += [t for _, of in trainer.optimizer.state.items() for t in of.values() if torch.is_tensor(t)]
    weights = list(trainer.model.tensors().values())
    state = [t for t in state if t.device == weights[0].device]  # torch's Adam counts steps on the host
    ids = {s._cdata for s in storages(weights)}
    buffers = [buffer for chunk in trainer.ddp_chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]
    optimizer = [t for t in state if t.untyped_storage()._cdata not in ids]
    return {"optimizer": optimizer, "gradients": [b.grad_data for b in buffers], "weights": weights}


def check_offload(worker, kinds, held_before):
    """Offload `kinds` twice; checks that they are freed and counted, and that all other state stays."""
    offloaded = [kind for kind in held_before if getattr(kinds, kind)]
    expected = {kind: num_bytes(tensors) for kind, tensors in held_before.items()}
    assert expected["weights"] > 0
    assert expected["gradients"] > 0
    stats, again = worker.offload(kinds), worker.offload(kinds)
    for kind, tensors in held_before.items():
        assert num_bytes(tensors) == (0 if kind in offloaded else expected[kind]), kind
    assert stats.device_bytes == sum(expected[kind] for kind in offloaded)
    assert stats.host_bytes == sum(expected[kind] for kind in offloaded if kind != "gradients")
    assert again.device_bytes == 0
    # overwrite freed memory, so that restored tensors cannot reuse their old bytes
    device = held_before["weights"][0].device
    waste = [torch.full((n,), 0x7F, dtype=torch.uint8, device=device) for n in expected.values() for _ in range(3)]
    del waste
    return stats


def train_on_rank(path, dtype, options, kinds):
    """Train with `kinds` offloaded before each step; returns the final weights and optimizer state of all ranks."""
    worker = make_worker(path, dtype, **options)
    for step in range(STEPS):
        held = held_tensors(worker)
        stats = check_offload(worker, kinds, held)
        if step == 0:
            assert worker.trainer.memory.onload().device_bytes == stats.device_bytes
            assert worker.trainer.memory.onload().device_bytes == 0
            assert not kinds.gradients or not any(t.any() for t in held["gradients"])
        # in later steps, train_step itself onloads everything
        worker.train_step(request_of(worker, seed=step))
    held = held_tensors(worker)
    assert num_bytes(held["optimizer"]) > 0
    return gather({(kind, i): t.clone() for kind in ("weights", "optimizer") for i, t in enumerate(held[kind])})


CASES = [(layout, dtype) for layout in LAYOUTS for dtype in ("float32", "bfloat16")]
DEFAULT = [
    ("tp2", "float32"),
    ("pp2", "float32"),
    ("ep2", "bfloat16"),
    ("dp2 two dtypes", "bfloat16"),
    CASES[-3],
    CASES[-1],
]


@pytest.mark.parametrize(("layout", "dtype"), sample(CASES, DEFAULT))
def test_offloading_everything_does_not_change_training(layout, dtype, model_folder, tmp_path):
    name, options = LAYOUTS[layout]
    offloaded, plain = (
        run_ranks(train_on_rank, 2, tmp_path, model_folder(name), dtype, options, kinds)
        for kinds in (EVERYTHING, OffloadConfig())
    )
    for got, want in zip(offloaded, plain, strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("kind", ["optimizer", "gradients", "weights"])
def test_each_kind_of_state_can_be_offloaded_alone(kind, device, model_folder, tmp_path):
    arguments = (model_folder("qwen3"), "bfloat16", {}, OffloadConfig(**{kind: True}))
    run_ranks(train_on_rank, 1, tmp_path, *arguments, device=device)


def push_on_rank(path, folder):
    """Sync and export while everything is offloaded; returns the synced weights of two steps."""
    worker = make_worker(path, "bfloat16", tp=2)
    received = []
    for offloaded in (False, True):
        worker.train_step(request_of(worker))
        if offloaded:
            worker.offload(EVERYTHING)
        received.append(sync_weights(worker))
    held = held_tensors(worker)
    assert num_bytes(held["weights"])
    assert not num_bytes(held["optimizer"] + held["gradients"]), "a weight sync must onload only the weights"
    worker.offload(EVERYTHING)
    worker.save_hf(folder)
    return received


def test_weight_sync_and_export_onload_the_weights(model_folder, tmp_path):
    before, after = run_ranks(push_on_rank, 2, tmp_path, model_folder("qwen3"), str(tmp_path / "export"))
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], after[name]) for name in before)
    assert_same_bits(load_folder(tmp_path / "export"), after)


def test_shared_storages_are_moved_once(device):
    buffer = torch.arange(100, dtype=torch.float32, device=device)
    views = [buffer[:40].view(5, 8), buffer[30:]]
    other, empty = torch.arange(7, dtype=torch.int16, device=device), torch.empty(0, device=device)
    tensors, moved = [buffer, *views, other, empty], OffloadedTensors(block_bytes=64)
    assert moved.offload(tensors) == 400 + 14
    assert [t.untyped_storage().nbytes() for t in tensors] == [0] * 5
    assert moved.host_bytes == 414
    assert moved.onload() == 414
    assert torch.equal(buffer.cpu(), torch.arange(100.0))
    assert torch.equal(views[0].cpu(), torch.arange(40.0).view(5, 8))
    assert torch.equal(other.cpu(), torch.arange(7, dtype=torch.int16))
    views[1].zero_()
    assert buffer[30:].sum() == 0


@pytest.mark.gpu
def test_offloading_frees_device_memory_and_uses_pinned_host_memory():
    tensor = torch.arange(2**22, dtype=torch.float32, device="cuda")
    moved, before = OffloadedTensors(block_bytes=2**22), torch.cuda.memory_allocated()
    assert moved.offload([tensor]) == tensor.numel() * 4
    assert torch.cuda.memory_allocated() == before - tensor.numel() * 4
    assert len(moved.host_blocks) == 4
    assert all(block.is_pinned() for block in moved.host_blocks)
    moved.onload()
    assert torch.equal(tensor, torch.arange(2**22, dtype=torch.float32, device="cuda"))


class FakeAllocator:
    """Pretends that CPU tensors are on a CUDA device: records calls of torch, and counts what the process reserves."""

    def __init__(self, monkeypatch, tensors):
        self.events = []
        self.allocated = self.reserved = num_bytes(tensors)
        record = self.events.append
        resize = torch.UntypedStorage.resize_

        def resize_storage(storage, size):
            change = size - storage.nbytes()
            self.allocated += change
            self.reserved = max(self.reserved, self.allocated)  # freed memory stays reserved
            if change:
                record("allocate" if change > 0 else "free")
            return resize(storage, size)

        def empty_cache():
            self.reserved = self.allocated
            record("empty_cache")

        empty, copy = torch.empty, torch.Tensor.copy_
        monkeypatch.setattr(platform, "is_cuda", lambda: True)
        monkeypatch.setattr(platform, "device", lambda: torch.device("cpu"))
        monkeypatch.setattr(torch, "empty", lambda *args, pin_memory=False, **options: empty(*args, **options))
        monkeypatch.setattr(torch.UntypedStorage, "resize_", resize_storage)
        monkeypatch.setattr(torch.Tensor, "copy_", lambda *args, **options: record("copy") or copy(*args, **options))
        monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: record("synchronize"))


def test_offloading_returns_all_memory_to_the_device(monkeypatch):
    """Copies finish before storages are freed, and torch's cache is emptied once everything is."""
    weight, moment = torch.arange(8.0), torch.arange(16.0)
    optimizer = SimpleNamespace(param_groups=[{"params": [weight]}], state={weight: {"exp_avg": moment}})
    gradient = torch.zeros(8)

    def offload_gradients(*, empty_cache):
        assert not empty_cache
        gradient.untyped_storage().resize_(0)

    # a model chunk wrapped in megatron-core's DDP
    chunk = SimpleNamespace(buffers=[SimpleNamespace(grad_data=gradient)], expert_parallel_buffers=[])
    chunk.offload_grad_buffers = offload_gradients
    model = SimpleNamespace(tensors=lambda: {"weight": weight}, chunks=[])
    memory = TrainerMemory(model, [chunk], optimizer)
    device = FakeAllocator(monkeypatch, [weight, moment, gradient])
    memory.offload(EVERYTHING)
    steps = ["copy", "synchronize", "free"]
    assert device.events == [*steps, "free", *steps, "empty_cache"]
    assert device.reserved == device.allocated == 0
    device.events.clear()
    memory.offload(EVERYTHING)
    assert device.events == ["empty_cache"]


def frozen(weight):
    return weight, FrozenMemory(SimpleNamespace(tensors=lambda: {"weight": weight}, chunks=[]))


def test_a_frozen_model_returns_its_memory_to_the_device(monkeypatch):
    weight, memory = frozen(torch.arange(8.0))
    device = FakeAllocator(monkeypatch, [weight])
    assert memory.offload() == 32
    assert device.events == ["copy", "synchronize", "free", "empty_cache"]
    assert device.reserved == 0
    assert memory.onload() == 32
    assert device.reserved == device.allocated == 32
    assert weight.tolist() == [*range(8)]


@pytest.mark.gpu
def test_an_idle_frozen_model_leaves_nothing_reserved():
    weight, memory = frozen(torch.arange(2**24, dtype=torch.float32, device="cuda"))
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    assert memory.offload() == 2**26
    assert before[0] - torch.cuda.memory_allocated() == 2**26
    assert before[1] - torch.cuda.memory_reserved() >= 2**26
    memory.onload()
    assert torch.equal(weight, torch.arange(2**24, dtype=torch.float32, device="cuda"))


class QuantizedLayer(torch.nn.Module):
    """Keeps an FP8 copy of a weight as Transformer Engine's linear layers do, and counts how often it makes one.

    megatron-core's schedules tell such modules where a pass over micro-batches begins.
    """

    def __init__(self):
        super().__init__()
        self._fp8_workspaces, self.is_first_microbatch, self.num_copies, self.num_forwards = {}, True, 0, 0

    def forward(self):
        if self.is_first_microbatch or not self._fp8_workspaces:
            self._fp8_workspaces["weight"] = torch.ones(4, dtype=torch.uint8)
            self.num_copies += 1
        self.is_first_microbatch = False
        self.num_forwards += 1


def held_caches(worker):
    """Return the numbers of FP8 copies, RoPE tables and dummy gradients."""
    modules = [module for chunk in worker.model.chunks for module in chunk.module.modules()]
    copies = sum(len(getattr(module, "_fp8_workspaces", ())) for module in modules)
    tables = max(type(m).forward.cache_info().currsize for m in modules if hasattr(type(m).forward, "cache_info"))
    return copies, tables, len(linear_logprob.dummy_gradients)


def with_quantized_layer(worker):
    """Return a layer that takes part in every forward pass of the worker's model."""
    layer, chunk = QuantizedLayer(), worker.model.chunks[0].module
    chunk.decoder.layers[0].register_module("quantized", layer)
    chunk.decoder.layers[0].register_forward_pre_hook(lambda *_: layer())
    chunk.config.use_kitchen = True  # megatron-core tells modules of first micro-batches as with FP8
    return layer


def caches_on_rank(language_path, value_path):
    """Return what an actor holds after a step and when offloaded, and what other models hold between two passes."""
    actor = TrainerWorker(trainer_spec(model_spec(language_path, fused_lm_head=True), lr=1e-3))
    critic = TrainerWorker(trainer_spec(model_spec(value_path, head="value", offload_when_idle=True), lr=1e-3))
    frozen = FrozenWorker(model_spec(language_path, offload_when_idle=True))
    train = request_of(actor)
    forward = own_part(
        actor.model,
        ForwardRequest(samples=train.mini_batches[0].samples, payloads=train.payloads, max_tokens_per_micro_batch=64),
    )
    layers = {name: with_quantized_layer(w) for name, w in (("actor", actor), ("critic", critic), ("frozen", frozen))}
    found = {}
    for kinds in (OffloadConfig(optimizer=False, gradients=False), EVERYTHING):
        actor.train_step(train)
        found["trained"] = held_caches(actor)
        actor.offload(kinds)
        found["offloaded"] = held_caches(actor)
        for name, worker, compute in (("critic", critic, critic.values), ("frozen", frozen, frozen.logprobs)):
            compute(forward)
            found[name] = held_caches(worker)
    return found, {name: (layer.num_copies, layer.num_forwards) for name, layer in layers.items()}


def test_caches_of_libraries_are_freed_and_made_again(qwen3_path, value_folder, tmp_path):
    """FP8 copies of weights, RoPE tables and dummy gradients; the copies are made once in each pass, as without."""
    found, made = run_ranks(caches_on_rank, 1, tmp_path, qwen3_path, value_folder("qwen3"))
    assert found == {"trained": (1, 1, 1), "offloaded": (0, 0, 0), "critic": (0, 0, 0), "frozen": (0, 0, 0)}
    for num_copies, num_forwards in made.values():
        assert num_copies == 2 < num_forwards


def test_excluded_storages_stay_and_new_storages_are_moved(device):
    kept, first, second = (torch.full((size,), float(size), device=device) for size in (4, 5, 60))
    moved = OffloadedTensors(block_bytes=16)
    assert moved.offload([kept[:2], first], exclude=[kept]) == 20
    assert kept.untyped_storage().nbytes() == 16
    moved.onload()
    assert moved.offload([first, second]) == 20 + 240
    moved.onload()
    assert (first == 5).all()
    assert (second == 60).all()
    assert moved.host_bytes == 260


def test_default_offloads_optimizer_and_gradients_only_on_shared_cuda_devices():
    assert OffloadConfig().resolved("cuda") == OffloadConfig(optimizer=True, gradients=True)
    assert not OffloadConfig().resolved("cpu").is_enabled
    assert not OffloadConfig().resolved("cuda", shared=False).is_enabled
    assert OffloadConfig(weights=True).resolved("cuda", shared=False).is_enabled
    chosen = OffloadConfig(optimizer=False, weights=True)
    assert chosen.resolved("cuda") == OffloadConfig(optimizer=False, gradients=True, weights=True)
    assert chosen.resolved("cpu").is_enabled
