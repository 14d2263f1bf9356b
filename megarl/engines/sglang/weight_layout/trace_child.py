"""Child process of `megarl.engines.sglang.weight_layout.offline_trace`: traces the TP ranks of an engine.

Every rank's model is built on the meta device: it takes no memory, and its process groups have ranks and sizes only.

    python -m megarl.engines.sglang.weight_layout.trace_child <request file> <file for the traces> <file for an error>
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

from megarl.engines.engine_spec import EngineSpec
from megarl.engines.sglang.scheduler_process import skip_other_models
from megarl.engines.sglang.server_args import make_engine_arguments
from megarl.engines.sglang.weight_layout.engine_trace import (
    EngineTrace,
    encode_traces,
    trace_deduplicated,
    trace_live,
)
from megarl.errors import MegarlError
from megarl.model_files.json_object import read_json_object
from megarl.model_files.model_config import untrained_patterns
from megarl.model_files.quantization import is_quantized
from megarl.model_files.weight_index import matches_any
from megarl.reshard.layout.layout import TensorSpec
from megarl.reshard.layout.quantized_layout import quantize_specs
from megarl.reshard.transfer.bucket import torch_dtype

HOPPER = (9, 0)
NEEDS_SINKS = ["GptOssForCausalLM"]
"""Architectures that SGLang builds only for an attention with sinks, which torch's on the CPU has not."""


class FakeProcessGroup:
    """The attributes of a process group that model constructors read; any communication fails."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = self.rank_in_group = rank
        self.world_size = size
        self.ranks = list(range(size))
        self.is_first_rank, self.is_last_rank = rank == 0, rank == size - 1
        self.device_group = self.cpu_group = None
        self.unique_name = "trace"


def build_model(spec: EngineSpec, rank: int, device: str = "meta") -> nn.Module:
    """Build the model as TP rank `rank` of the engine would.

    A CUDA engine can be traced without a GPU: its layout lacks the padding of heads that SGLang adds only on CPU.
    """
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.configs.update_config import adjust_config_with_unaligned_cpu_tp
    from sglang.srt.layers.dp_attention import initialize_dp_attention_flags
    from sglang.srt.layers.moe.fused_moe_triton import layer as fused_moe
    from sglang.srt.layers.moe.utils import get_moe_a2a_backend, initialize_moe_config
    from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model
    from sglang.srt.model_loader.utils import set_default_torch_dtype
    from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish, reset_context
    from sglang.srt.server_args import ServerArgs

    _define_operators()
    here, stated = spec, read_json_object(Path(spec.model_path) / "config.json")
    # the caches of some models with linear attention need a GPU, and no cache changes where weights lie
    options: dict[str, object] = {"disable_radix_cache": True}
    if not torch.cuda.is_available():
        here = replace(spec, device="cpu")
        # SGLang asks for it where a model has an indexer, for a dtype of the KV cache
        torch.cuda.get_device_capability = lambda *_: HOPPER
        options |= {"attention_backend": "intel_amx"} if stated["architectures"] == NEEDS_SINKS else {}
    arguments = ServerArgs(**make_engine_arguments(here) | options)
    reset_context()
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=0))
    parallel = get_parallel()
    tp = FakeProcessGroup(rank, spec.tp)
    parallel.override_permanently(
        tp_group=tp,
        attn_tp_group=FakeProcessGroup(parallel.attn_tp_rank, parallel.attn_tp_size),
        world_group=tp,
        pp_group=FakeProcessGroup(0, 1),
        moe_ep_group=FakeProcessGroup(parallel.moe_ep_rank, parallel.moe_ep_size),
        moe_tp_group=FakeProcessGroup(parallel.moe_tp_rank, parallel.moe_tp_size),
    )
    initialize_moe_config()
    if not get_moe_a2a_backend().is_none():
        # it exchanges tokens through packages for GPUs, and holds no weights
        fused_moe.create_moe_dispatcher = lambda *_, **__: SimpleNamespace()
    initialize_dp_attention_flags(arguments)
    config = ModelConfig.from_server_args(arguments)
    if spec.device == "cpu":
        config = adjust_config_with_unaligned_cpu_tp(config, LoadConfig(), spec.tp)
    elif here.device == "cpu":
        _name_heads_for_cpu(config.hf_text_config)
    quantization = _get_quantization_config(config, LoadConfig())
    with set_default_torch_dtype(torch_dtype(spec.dtype)), torch.device(device):
        model = _initialize_model(config, LoadConfig(), quantization)
    assert isinstance(model, nn.Module)
    return model


_CPU_OPERATORS = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)
"""Operators of sgl_kernel that files of models look up on import where there is no GPU."""


def _define_operators() -> None:
    """Define those of `_CPU_OPERATORS` that are missing, without an implementation: a trace calls none."""
    for name in _CPU_OPERATORS:
        if not hasattr(torch.ops.sgl_kernel, name):
            torch.library.define(f"sgl_kernel::{name}", "(Tensor x) -> Tensor")


def _name_heads_for_cpu(config: object) -> None:
    """Give a configuration the unpadded head counts under the names that SGLang reads where there is no GPU."""
    for name in ("linear_num_key_heads", "linear_num_value_heads"):
        if hasattr(config, name):
            setattr(config, f"{name}_cpu", getattr(config, name))


def checkpoint_tensors(model_path: str, dtype: str) -> dict[str, TensorSpec]:
    """Return the tensors of a published checkpoint of the model, as transformers derives them from config.json."""
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    stated = read_json_object(Path(model_path) / "config.json")
    # by the architecture: the type of model may be one that only code in the folder or SGLang knows
    kind = getattr(transformers, stated["architectures"][0])
    config = kind.config_class.from_dict({k: v for k, v in stated.items() if k not in ("auto_map", "model_type")})
    with torch.device("meta"):
        model = kind(config)
    # transformers stacks experts, published checkpoints store them separately
    state = revert_weight_conversion(model, model.state_dict())
    tied = set(model.all_tied_weights_keys) if getattr(config, "tie_word_embeddings", False) else set()
    specs = {name: TensorSpec(tuple(t.shape), dtype) for name, t in state.items() if name not in tied}
    return quantize_specs(specs, {name for name in specs if is_quantized(name, stated)})


def trace_ranks(spec: EngineSpec, tensors: Mapping[str, TensorSpec]) -> list[EngineTrace]:
    """Return the trace of every TP rank, of `checkpoint_tensors` if no tensors are given.

    With many ranks, ranks between the first and the last are traced with layer deduplication, if that gives the same as
    a full trace on the first and last rank.
    """
    tensors = tensors or checkpoint_tensors(spec.model_path, spec.dtype)
    patterns = untrained_patterns(read_json_object(Path(spec.model_path) / "config.json"))
    untrained = {name for name in tensors if matches_any(name, patterns)}
    inner, traces, is_dedup_exact = range(1, spec.tp - 1), dict[int, EngineTrace](), True
    if inner:
        build_model(spec, 0)
        gc.freeze()  # SGLang and transformers have created millions of objects, none of them garbage
    for rank in sorted({0, spec.tp - 1}):
        model = build_model(spec, rank)
        traces[rank] = trace_live(model, tensors)
        if inner:
            is_dedup_exact &= trace_deduplicated(model, tensors) == traces[rank]
    for rank in inner:
        model = build_model(spec, rank)
        deduplicated = trace_deduplicated(model, tensors) if is_dedup_exact else None
        traces[rank] = deduplicated or trace_live(model, tensors)
    return [traces[rank].without(untrained) for rank in range(spec.tp)]


def main(request_file: str, traces_file: str, error_file: str) -> None:
    """Execute the request; write the message of a `MegarlError` to `error_file`."""
    request = json.loads(Path(request_file).read_text())
    tensors = {name: TensorSpec(tuple(shape), dtype) for name, shape, dtype in request["tensors"]}
    try:
        skip_other_models(request["spec"]["model_path"])
        Path(traces_file).write_bytes(encode_traces(trace_ranks(EngineSpec(**request["spec"]), tensors)))
    except MegarlError as e:
        Path(error_file).write_text(str(e))


if __name__ == "__main__":
    main(*sys.argv[1:])
