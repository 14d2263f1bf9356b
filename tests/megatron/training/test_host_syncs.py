"""Counts the places where the host would wait for the device between the start of a forward pass and the update.

On a GPU, `.item()`, `int(tensor)`, `.tolist()` and indexing with a mask wait until all kernels before them have run,
and so does `torch.tensor`, which copies from the host. A CPU cannot show the wait, but it can count these calls.
Stand-ins that stay on the device take the place of what Transformer Engine brings: attention, the RoPE kernel and the
norm of many tensors; everything else is the code that runs on GPUs. What this cannot show is whether Transformer
Engine's own functions wait, and the token dispatcher of models with experts, which needs the number of tokens of each
expert on the host.

Between the backward pass and Adam, the host reads once whether loss and gradient norm are within their limits, and once
more in a step that checks the mismatch: megatron-core's optimizer decides on the host whether it steps, and its own
`optimizer.step()` reads the norm there too. Adam itself is not counted: torch's reads step counters that are on the
host, FusedAdam of Transformer Engine reads nothing, and `HybridDeviceOptimizer` waits for its copies.
"""

import traceback
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.config.limits import LimitConfig
from megarl.config.megatron import MegatronConfig, MoeConfig
from megarl.config.trainer import ParallelConfig
from megarl.megatron.requests import MISMATCH_METRICS, UpdateGuardSpec
from tests.megatron.rank_models import make_trainer, model_spec, train_step, trainer_spec
from tests.megatron.ranks import run_ranks
from tests.megatron.training.test_trainer import ALL_INDICES, HALVES, make_request

SOURCES = tuple(f"{Path(find_spec(package).origin).parent}/" for package in ("megarl", "megatron.core"))
"""Folders of the code whose functions are named where it waits."""
WAITING = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2"}
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
"""These wait if an index is a mask."""
FUNCTIONS = ((torch.Tensor, "tolist"), (torch.Tensor, "numpy"), (torch, "tensor"))
"""What does not go through the dispatcher, or does not show there that the host waits."""
HOST_ONLY = {"fork"}
"""Functions that read tensors that are on the host anyway: megatron-core's compares the host's generator states."""
PIPELINE = {"_communicate_shapes"}
"""Functions of megatron-core's that wait once per message between pipeline stages, whose lengths differ."""


class WaitCounter(TorchDispatchMode):
    """Records where operations wait for the device, while it is entered."""

    def __init__(self):
        super().__init__()
        self.places = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split(".")[0]
        # torch turns writing one number to the places of a mask into masked_fill, which does not wait
        by_mask = name in INDEXING and not (len(args) > 2 and args[2].numel() == 1)
        by_mask = by_mask and any(index is not None and index.dtype == torch.bool for index in args[1])
        if name in WAITING or by_mask:
            self.note(func.name())
        return func(*args, **(kwargs or {}))

    def note(self, name):
        frames = [f for f in traceback.extract_stack() if f.filename.startswith(SOURCES)]
        function, place = (frames[-1].name, f"{frames[-1].filename}:{frames[-1].lineno}") if frames else ("", "a test")
        if function not in HOST_ONLY:
            self.places.append((function, f"{name} at {place}"))

    def __enter__(self):
        self._patches = ExitStack()
        for owner, name in FUNCTIONS:
            self._patches.enter_context(patch.object(owner, name, self._counting(getattr(owner, name), name)))
        return super().__enter__()

    def __exit__(self, *error):
        self._patches.close()
        return super().__exit__(*error)

    def _counting(self, method, name):
        def counted(*args, **kwargs):
            if name != "tensor" or "device" in kwargs:
                self.note(name)
            return method(*args, **kwargs)

        return counted


def rope_on_device(t, cu_seqlens, freqs, cp_size=1, cp_rank=0, interleaved=False):
    """Return the rotated queries or keys [t, heads, dim], as Transformer Engine's kernel does."""
    index_t = torch.arange(len(t), device=t.device)
    starts_t = cu_seqlens[torch.bucketize(index_t, cu_seqlens[1:], right=True)]
    angles = freqs[index_t - starts_t, 0]
    left, right = t.chunk(2, -1)
    return t * angles.cos() + torch.cat([-right, left], -1) * angles.sin()


def norm_on_device(chunk_size, overflow, tensor_lists, per_tensor):
    """Return the norm of all tensors together [1], as Transformer Engine's `multi_tensor_l2norm` does."""
    return torch.stack([torch.linalg.vector_norm(t) for t in tensor_lists[0]]).norm(keepdim=True), None


def make_attention_class():
    from megatron.core.transformer.module import MegatronModule

    class DeviceAttention(MegatronModule):
        def __init__(self, config, softmax_scale=None, **_):
            super().__init__(config)
            self.scale = softmax_scale if softmax_scale is not None else config.softmax_scale

        def forward(self, query, key, value, attention_mask, packed_seq_params=None, **_):
            assert packed_seq_params.groups == ()
            index_t = torch.arange(len(query), device=query.device)
            ids_t = torch.bucketize(index_t, packed_seq_params.cu_seqlens_q[1:], right=True)
            mask_tt = (ids_t[:, None] == ids_t) & (index_t[:, None] >= index_t)
            q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_tt, enable_gqa=True, scale=self.scale)
            return out[0].transpose(0, 1).flatten(1)

    return DeviceAttention


def test_the_counter_sees_what_it_is_to_see():
    counter, x, index = WaitCounter(), torch.arange(4.0), torch.tensor([1, 2])
    waits = (x[0].item, lambda: int(x[1]), lambda: x[x > 1], lambda: x.tolist(), lambda: bool(x.sum() > 1), x.nonzero)
    with counter:
        for wait in (*waits, lambda: torch.tensor([1.0], device="cpu")):
            before = len(counter.places)
            wait()
            assert len(counter.places) > before
        before = len(counter.places)
        x[index] = torch.where(x[:2] > 1, 0.0, 1.0)
        assert len(counter.places) == before


def train(path, parallel, max_tokens, stand_ins, **fields):
    """Take one training step of two updates, and one of one update that checks the mismatch.

    Args:
        fields: of the model's spec.

    Returns metrics of the first, the number of micro-batches, functions in which passes wait for the device, and where,
    and the functions that wait between the passes and Adam in each of the steps.
    """
    from megarl.megatron.runtime import platform

    platform.prepare()
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.optimizer import clip_grads

    from megarl.megatron.modeling import layer_spec

    def block_spec(self, architecture, config, layers, vp_stage):
        assert self.te_layers
        assert config.apply_rope_fusion
        return layer_spec.torch_block_spec(architecture, layers)

    with ExitStack() as patches:
        if stand_ins:
            patches.enter_context(patch.object(platform, "uses_transformer_engine", lambda: True))
            patches.enter_context(patch.object(platform, "compute_capability", lambda: (9, 0)))
            patches.enter_context(patch.object(layer_spec, "needs_torch_layers", lambda *_: False))  # in float32
            patches.enter_context(patch.object(layer_spec.LayerBackend, "block_spec", block_spec))
            patches.enter_context(patch.object(layer_spec, "TorchAttention", make_attention_class()))
            name = "fused_apply_rotary_pos_emb_thd"
            patches.enter_context(patch.object(rope_utils, name, rope_on_device, create=True))
            patches.enter_context(patch.object(clip_grads, "l2_norm_impl", norm_on_device))
        trainer = make_trainer(trainer_spec(model_spec(path, parallel, **fields), lr=1e-3))
        passes, forward_backward, num_packs = WaitCounter(), trainer.model.forward_backward, []

        def counted(packs, *args, **kwargs):
            num_packs.append(len(packs))
            with passes:
                return forward_backward(packs, *args, **kwargs)

        trainer.model.forward_backward = counted
        updates, accumulate, adam = WaitCounter(), trainer.accumulate_gradients, trainer.optimizer

        def accumulate_then_count(*args, **kwargs):
            losses = accumulate(*args, **kwargs)
            updates.__enter__()
            return losses

        def step_uncounted(step=adam.step_with_ready_grads):
            updates.__exit__(None, None, None)
            return step()

        trainer.accumulate_gradients, adam.step_with_ready_grads = accumulate_then_count, step_uncounted
        guard = UpdateGuardSpec(mismatch={key: LimitConfig(max=1e6, action="stop") for key in MISMATCH_METRICS})
        waits, steps = [], []
        for mini_batches in (HALVES, (ALL_INDICES,)):
            request = replace(make_request(*mini_batches, max_tokens=max_tokens), guard=guard)
            steps.append(train_step(trainer, request))
            waits.append([function for function, _ in updates.places])
            updates.places.clear()
    return steps[0], sum(num_packs), passes.places, waits


@pytest.mark.parametrize("sizes", [{}, {"tp": 2}, {"pp": 2}], ids=str)
def test_passes_never_wait_for_the_device_with_transformer_engine(sizes, model_folder, tmp_path):
    path, parallel = model_folder("qwen3"), ParallelConfig(**sizes)
    metrics, packs, places, waits = run_ranks(train, parallel.model_size, tmp_path, path, parallel, 128, True)
    assert packs > 8
    assert sorted({place for function, place in places if function not in PIPELINE}) == []
    assert waits == [["allows_step", "check_update", "check_update"], ["allows_step", "check_update"]]
    if not sizes:
        plain, _, places, _ = run_ranks(train, 1, tmp_path, path, parallel, 128, False)
        assert metrics["loss"] == pytest.approx(plain["loss"], abs=1e-5)
        assert metrics["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4)
        assert len(places) > packs  # megatron-core's RoPE without the kernel reads the lengths in every layer


def train_with_and_without_losses_of_routers(path):
    """Return where passes wait for the device: with a load-balancing loss of sequences and a z-loss, and without."""
    losses = {"moe": MoeConfig(aux_loss_coeff=1.0, aux_loss_scope="sequence")}
    losses |= {"megatron": MegatronConfig(model={"moe_z_loss_coeff": 1.0})}
    return [{place for _, place in train(path, None, 4096, False, **fields)[2]} for fields in (losses, {})]


def test_losses_of_routers_never_wait_for_the_device(model_folder, tmp_path):
    path = model_folder("qwen3_moe")
    with_losses, without = run_ranks(train_with_and_without_losses_of_routers, 1, tmp_path, path)
    assert with_losses
    assert with_losses == without
