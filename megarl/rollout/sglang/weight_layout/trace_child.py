"""Traces the TP ranks of an engine that does not exist; `megarl.rollout.sglang.weight_layout.offline_trace` starts it.

Every rank's model is built on the meta device: it takes no memory, and its process groups know ranks and sizes only.

    python -m megarl.rollout.sglang.weight_layout.trace_child <request file> <file for the traces> <file for an error>
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from megarl.errors import MegarlError
from megarl.reshard.layout.layout import TensorSpec, WeightLayout
from megarl.reshard.transfer.bucket import torch_dtype
from megarl.rollout.engine_spec import EngineSpec
from megarl.rollout.sglang.server_args import engine_arguments
from megarl.rollout.sglang.weight_layout.engine_trace import EngineTrace, trace_live
from megarl.rollout.sglang.weight_layout.layer_dedup import layers_alike, trace_one_of_each
from megarl.rollout.sglang.weight_layout.trace_file import write_traces

WHOLE_TRACES = 2
"""Up to as many ranks are traced layer by layer."""


class PaperGroup:
    """What constructors ask of a process group; whatever communicates fails for want of one."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = self.rank_in_group = rank
        self.world_size = size
        self.ranks = list(range(size))
        self.is_first_rank, self.is_last_rank = rank == 0, rank == size - 1
        self.device_group = self.cpu_group = None
        self.unique_name = "trace"


def build_model(spec: EngineSpec, rank: int, device: str = "meta") -> nn.Module:
    """The model as TP rank `rank` of the engine would build it.

    An engine on CUDA can be asked for where there is none: its layout is then that of the loaders without the padding
    of heads that SGLang adds on CPU only.
    """
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.configs.update_config import adjust_config_with_unaligned_cpu_tp
    from sglang.srt.model_loader.loader import _initialize_model
    from sglang.srt.model_loader.utils import set_default_torch_dtype
    from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish, reset_context
    from sglang.srt.server_args import ServerArgs

    here = spec if torch.cuda.is_available() else replace(spec, device="cpu")
    arguments = ServerArgs(**engine_arguments(here))
    reset_context()
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=0))
    parallel = get_parallel()
    tp = PaperGroup(rank, spec.tp)
    parallel.override_permanently(
        tp_group=tp,
        attn_tp_group=tp,
        world_group=tp,
        pp_group=PaperGroup(0, 1),
        moe_ep_group=PaperGroup(parallel.moe_ep_rank, parallel.moe_ep_size),
        moe_tp_group=PaperGroup(parallel.moe_tp_rank, parallel.moe_tp_size),
    )
    config = ModelConfig.from_server_args(arguments)
    if spec.device == "cpu":
        config = adjust_config_with_unaligned_cpu_tp(config, LoadConfig(), spec.tp)
    with set_default_torch_dtype(torch_dtype(spec.dtype)), torch.device(device):
        model = _initialize_model(config, LoadConfig(), None)
    assert isinstance(model, nn.Module)
    return model


def checkpoint_tensors(model_path: str, dtype: str) -> dict[str, TensorSpec]:
    """The tensors of a published checkpoint of the model, by transformers' own reading of config.json."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    config = AutoConfig.from_pretrained(model_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    # published checkpoints hold experts one by one, transformers stacks them
    state = revert_weight_conversion(model, model.state_dict())
    tied = set(model.all_tied_weights_keys) if getattr(config, "tie_word_embeddings", False) else set()
    return {name: TensorSpec(tuple(t.shape), dtype) for name, t in state.items() if name not in tied}


def trace_ranks(spec: EngineSpec, tensors: Mapping[str, TensorSpec] | None = None) -> list[EngineTrace]:
    """The trace of every TP rank.

    With many ranks, those between the first and the last trace one layer of each kind, provided that this is as good as
    a whole trace on these two.
    """
    tensors = tensors or checkpoint_tensors(spec.model_path, spec.dtype)
    if spec.tp <= WHOLE_TRACES:
        return [trace_live(build_model(spec, rank), tensors) for rank in range(spec.tp)]
    build_model(spec, 0)
    gc.freeze()  # SGLang and transformers have made millions of objects: none of them is garbage
    first, last = (_trace_both_ways(spec, rank, tensors) for rank in (0, spec.tp - 1))
    alike = first[1] and last[1]
    between = [_trace_between(spec, rank, tensors, whole=not alike) for rank in range(1, spec.tp - 1)]
    return [first[0], *between, last[0]]


def _trace_both_ways(spec: EngineSpec, rank: int, tensors: Mapping[str, TensorSpec]) -> tuple[EngineTrace, bool]:
    """The whole trace, and whether tracing one layer of each kind gives the same."""
    model = build_model(spec, rank)
    whole = packed(trace_live(model, tensors))
    return whole, trace_one_of_each(model, tensors, layers_alike(model, tensors)) == whole


def _trace_between(spec: EngineSpec, rank: int, tensors: Mapping[str, TensorSpec], *, whole: bool) -> EngineTrace:
    model = build_model(spec, rank)
    trace = None if whole else trace_one_of_each(model, tensors, layers_alike(model, tensors))
    return trace or packed(trace_live(model, tensors))


def packed(trace: EngineTrace) -> EngineTrace:
    """The same with its pieces as arrays."""
    return replace(trace, layout=WeightLayout(trace.layout.tensors, trace.layout.table))


def main(request_file: str, traces_file: str, error_file: str) -> None:
    """Execute the request; an error of ours is written to a file of its own."""
    request = json.loads(Path(request_file).read_text())
    tensors = {name: TensorSpec(tuple(shape), dtype) for name, shape, dtype in request["tensors"]}
    try:
        write_traces(Path(traces_file), trace_ranks(EngineSpec(**request["spec"]), tensors))
    except MegarlError as e:
        Path(error_file).write_text(str(e))


if __name__ == "__main__":
    main(*sys.argv[1:])
