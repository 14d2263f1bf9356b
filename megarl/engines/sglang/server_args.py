"""Translates an engine spec into the arguments of `sglang.Engine`."""

from __future__ import annotations

import json
import os
from pathlib import Path

from megarl.config.engine_options import find_option_problems, find_variable_problems
from megarl.config.rollout import IN_PLACE_ARGUMENTS
from megarl.engines.engine_spec import EngineSpec
from megarl.engines.sglang.cpu.batching import PAGE_SIZE
from megarl.engines.sglang.cpu.determinism import allow_determinism_on_cpu
from megarl.engines.sglang.weight_update.weight_loader import IMPORT_PATH
from megarl.errors import ConfigError
from megarl.model_files.model_config import find_corrections

CPU_ARGUMENTS = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "sleep_on_idle": True,
    "page_size": PAGE_SIZE,
}
"""Arguments for the CPU engine: SGLang's defaults need CUDA, and an idle scheduler would keep a core busy.

Nothing overlaps with a forward pass on the CPU, and with overlap, requests take part in one more pass than they need.
"""

CPU_MEM_FRACTION = 0.5
"""Upper limit of weights and KV cache, as a fraction of memory; `max_total_tokens` limits the KV cache further."""


def make_engine_arguments(spec: EngineSpec) -> dict[str, object]:
    """Return the keyword arguments of `sglang.Engine`, without those that the spec leaves to SGLang.

    Raises:
        ConfigError: `extra_args` or the environment has an option that engines cannot have.
    """
    _check_options(spec)
    # without auto_map: SGLang would run the code of a model that it does not have, whatever trust_remote_code is
    overrides = find_corrections(Path(spec.model_path)) | ({} if spec.trust_remote_code else {"auto_map": {}})
    optional = {
        "json_model_override_args": json.dumps(overrides) if overrides else None,
        "context_length": spec.context_length,
        "max_total_tokens": spec.max_total_tokens,
        "max_running_requests": spec.max_running_requests,
        "mem_fraction_static": spec.mem_fraction,
        "enable_memory_saver": True if spec.releases_memory and spec.device == "cuda" else None,
        "enable_return_routed_experts": None if spec.routes is None else True,
        "nccl_port": spec.port if spec.nnodes == 1 else None,  # else it is that of `dist_init_addr`
        "dist_init_addr": spec.dist_init_addr,
    }
    fixed: dict[str, object] = {
        "model_path": spec.model_path,
        "device": spec.device,
        "dtype": spec.dtype,
        "enable_fp32_lm_head": spec.fp32_lm_head,
        "trust_remote_code": spec.trust_remote_code,
        "tp_size": spec.tp,
        "nnodes": spec.nnodes,
        "node_rank": spec.node_rank,
        "random_seed": spec.seed % 2**32,  # numpy's limit; requests have seeds of their own
        "weight_version": str(spec.policy_version),
        "custom_weight_loader": [IMPORT_PATH],
        "skip_tokenizer_init": True,  # prompts and completions are token ids
        **{name: value for name, value in optional.items() if value is not None},
    }
    defaults: dict[str, object] = {"log_level": "error"}
    if spec.device == "cpu":
        defaults |= CPU_ARGUMENTS
    if spec.deterministic:
        defaults |= {"enable_deterministic_inference": True}
        if spec.device == "cpu":
            allow_determinism_on_cpu()
            # With chunked prefill, the position where a long prompt is split depends on the batch; with the radix
            # cache, its cached prefix depends on earlier requests. Without chunking, SGLang reserves memory for the
            # longest possible prompt, more than the node has, unless the fraction is set.
            defaults |= {
                "chunked_prefill_size": -1,
                "disable_radix_cache": True,
                "mem_fraction_static": CPU_MEM_FRACTION,
            }
    if spec.pause_mode == "in_place":
        fixed |= IN_PLACE_ARGUMENTS
        if spec.device == "cpu":
            defaults |= {"mem_fraction_static": CPU_MEM_FRACTION}
    return {**defaults, **spec.extra_args, **fixed}


def _check_options(spec: EngineSpec) -> None:
    problems = [f"rollout.engine.extra_args: {problem}" for problem in find_option_problems(spec.extra_args)]
    problems += find_variable_problems(os.environ)
    if problems:
        raise ConfigError("\n".join(problems))
