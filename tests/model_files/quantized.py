"""Model folders with quantized weights: FP8, written and read block by block in plain loops, and INT4."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

QUANTIZATION: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
"""`quantization_config` of DeepSeek-V3."""
INT4: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "ignore": ["lm_head", r"re:.*self_attn.*", r"re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "int",
                "strategy": "group",
                "group_size": 32,
                "symmetric": True,
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "observer": "minmax",
            },
        }
    },
}
"""`quantization_config` of Kimi-K2.5."""
_PROJECTION = re.compile(
    r"(model\.(language_model\.)?|mtp\.)layers\.\d+\."
    r".*((?<!\.eh)(?<!weights)_proj(_with_mqa)?|\.in_proj_(qkv|z)|\.wq_b|\.wk)\.weight"
)


def is_quantized(name: str) -> bool:
    """Return whether published folders hold the weight in FP8."""
    return _PROJECTION.fullmatch(name) is not None


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and scales of each block: the largest magnitude becomes 448."""
    n, k = weight.shape
    values = torch.zeros(n, k, dtype=torch.float8_e4m3fn)
    scales = torch.zeros(-(-n // 128), -(-k // 128))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            block = weight[at].float()
            scales[i, j] = max(block.abs().max(), torch.tensor(1e-4)) / 448
            values[at] = (block / scales[i, j]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return values, scales


def dequantize(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight: each block times its scale, in float32, rounded to `dtype`."""
    weight = torch.zeros(values.shape, dtype=dtype)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            weight[at] = (values[at].float() * scales[i, j].float()).to(dtype)
    return weight


def pack_int4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the parts of a weight [m, k] in INT4: the largest magnitude of 32 values becomes 7.5, which is -8 or 7."""
    m, k = weight.shape
    groups = weight.float().view(m, k // 32, 32)
    scale = (groups.abs().amax(-1) / 7.5).to(weight.dtype)
    codes = ((groups / scale.unsqueeze(-1).float()).round().clamp(-8, 7).long() + 8).view(m, k // 8, 8)
    words = sum(codes[..., i] << (4 * i) for i in range(8))  # the first value is in the lowest bits
    packed = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    return {"packed": packed, "scale": scale, "shape": torch.tensor([m, k])}


def quantize_tensors(tensors: dict[str, torch.Tensor], scale_dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    quantized = {}
    for name, tensor in tensors.items():
        if is_quantized(name):
            quantized[name], scales = quantize(tensor)
            quantized[f"{name}_scale_inv"] = scales.to(scale_dtype)
        else:
            quantized[name] = tensor
    return quantized


def quantize_folder(source: str | Path, target: Path, *, dtype=torch.bfloat16, scale_dtype=torch.float32) -> str:
    """Write `target`: the model of `source` with projections in FP8 and all else in `dtype`, in two files."""
    tensors = load_file(Path(source) / "model.safetensors")
    tensors = {name: t if t.dtype != torch.float32 or "bias" in name else t.to(dtype) for name, t in tensors.items()}
    tensors = quantize_tensors(tensors, scale_dtype)
    _copy_config(Path(source), target, {"quantization_config": QUANTIZATION})
    scales = {name for name in tensors if name.endswith("_scale_inv")}
    weight_map = {}
    for number, names in enumerate((tensors.keys() - scales, scales)):  # a weight's scales may lie in another file
        file = f"model-{number}.safetensors"
        save_file({name: tensors[name] for name in names}, target / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return str(target)


def dequantize_folder(source: str | Path, target: Path, *, dtype: torch.dtype) -> str:
    """Write `target`: the model of a folder in FP8 with projections in `dtype`."""
    tensors = {name: t for file in Path(source).glob("*.safetensors") for name, t in load_file(file).items()}
    scales = {name: tensors.pop(name) for name in list(tensors) if name.endswith("_scale_inv")}
    for name, of_blocks in scales.items():
        weight = name.removesuffix("_scale_inv")
        tensors[weight] = dequantize(tensors[weight], of_blocks, dtype)
    _copy_config(Path(source), target, {"quantization_config": None})
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return str(target)


def _copy_config(source: Path, target: Path, changes: dict[str, Any]) -> None:
    target.mkdir(parents=True)
    shutil.copy(source / "config.json", target)
    config = json.loads((target / "config.json").read_text()) | {"torch_dtype": "bfloat16"} | changes
    (target / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
