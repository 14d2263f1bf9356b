"""Translates an engine spec into the arguments of `sglang.Engine`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from megarl.errors import ConfigError
from megarl.rollout.engine_spec import EngineSpec
from megarl.rollout.sglang.cpu_determinism import allow_determinism_on_cpu
from megarl.rollout.sglang.weight_update.weight_loader import IMPORT_PATH

CPU_ARGUMENTS = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "sleep_on_idle": True,
}
"""Arguments for the CPU engine: SGLang's defaults need CUDA, and an idle scheduler would keep a core busy."""

CPU_MEM_FRACTION = 0.5
"""Upper limit of weights and KV cache, as a fraction of memory; `max_total_tokens` limits the KV cache further."""


def make_engine_arguments(spec: EngineSpec) -> dict[str, object]:
    """Return the keyword arguments of `sglang.Engine`, without those that the spec leaves to SGLang.

    Raises:
        ConfigError: `extra_args` has a name that SGLang does not know, or one that megarl sets.
    """
    optional = {
        "context_length": spec.context_length,
        "max_total_tokens": spec.max_total_tokens,
        "max_running_requests": spec.max_running_requests,
        "mem_fraction_static": spec.mem_fraction,
        "nccl_port": spec.port,
    }
    fixed = {
        "model_path": spec.model_path,
        "device": spec.device,
        "dtype": spec.dtype,
        "tp_size": spec.tp,
        "random_seed": spec.seed,
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
    _check_names(spec, fixed)
    return {**defaults, **spec.extra_args, **fixed}


def _check_names(spec: EngineSpec, fixed: Mapping[str, object]) -> None:
    from sglang.srt.server_args import ServerArgs

    known = ServerArgs.__struct_fields__
    for name in spec.extra_args:
        if name in fixed:
            raise ConfigError(f"rollout.engine.extra_args.{name}: megarl sets this argument itself")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(f"rollout.engine.extra_args.{name}: SGLang has no such argument{hint}")
