"""Formats of quantized weights that are read: what config.json states about them.

    FP8      quant_method: fp8                   DeepSeek-V3, Kimi-K2      `block_fp8`
    MXFP4    quant_method: mxfp4                 gpt-oss                   `packed_weights`
    INT4     quant_method: compressed-tensors    Kimi-K2.5                 `packed_weights`

The stored tensors say which weights are quantized. torch is not imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from megarl.model_files.json_object import JsonMapping

CONFIG_KEY = "quantization_config"
"""Key of config.json that describes how weights are quantized."""

QuantizedFormat = Literal["FP8", "MXFP4", "INT4"]

_FORMATS: Mapping[str, QuantizedFormat] = {"fp8": "FP8", "mxfp4": "MXFP4", "compressed-tensors": "INT4"}
"""Format by `quant_method`."""

Needs = Mapping[str, tuple[object, ...]]
"""Key -> supported values; None: the key may be missing."""

_FP8: Needs = {"weight_block_size": ([128, 128],), "fmt": ("e4m3", "float8_e4m3fn", None)}  # MiniMax-M2.5: the second
_INT4: Needs = {
    "format": ("pack-quantized",),
    "quantization_status": ("compressed", None),
    "kv_cache_scheme": (None,),
    "transform_config": (None, {}),
}
_INT4_GROUP: Needs = {
    "format": ("pack-quantized", None),
    "input_activations": (None,),
    "output_activations": (None,),
}
_INT4_WEIGHTS: Needs = {
    "num_bits": (4,),
    "type": ("int", None),
    "strategy": ("group", None),
    "group_size": (32,),
    "symmetric": (True, None),
    "actorder": (None,),
}


def quantized_format(config: JsonMapping) -> QuantizedFormat | None:
    """Return the format that the language model's keys of a config.json state; None if it states none that is read."""
    stated = config.get(CONFIG_KEY)
    return _FORMATS.get(str(stated.get("quant_method"))) if isinstance(stated, Mapping) else None


def find_config_problem(config: JsonMapping) -> str | None:
    """Return why weights cannot be read that are quantized as a config.json says; None if they can, or are not."""
    stated = config.get(CONFIG_KEY)
    if not stated:
        return None
    return next(_config_problems(stated if isinstance(stated, Mapping) else {}), None)


def _config_problems(stated: JsonMapping) -> Iterator[str]:
    method = stated.get("quant_method")
    if method not in _FORMATS:
        yield f"{CONFIG_KEY}.quant_method needs {' or '.join(_FORMATS)}, got {method}; others cannot be read"
    elif method == "fp8":
        yield from _mismatches(stated, _FP8, CONFIG_KEY)
    elif method == "compressed-tensors":
        yield from _mismatches(stated, _INT4, CONFIG_KEY)
        groups = stated.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            yield f"{CONFIG_KEY}.config_groups needs a group of weights, got {groups}"
            return
        for name, group in groups.items():
            key = f"{CONFIG_KEY}.config_groups.{name}"
            yield from _mismatches(group, _INT4_GROUP, key)
            yield from _mismatches(group.get("weights") or {}, _INT4_WEIGHTS, f"{key}.weights")


def _mismatches(stated: JsonMapping, needs: Needs, where: str) -> Iterator[str]:
    for key, allowed in needs.items():
        if stated.get(key) not in allowed:
            yield f"{where}.{key} needs {allowed[0]}, got {stated.get(key)}; other quantized weights cannot be read"
