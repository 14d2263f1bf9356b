"""Compiles the kernels that the ops launch to machine code for an NVIDIA GPU, on a machine without one.

python -m tests.kernels.compile_kernels 90

Calls the ops on CPU tensors in bfloat16, with launches replaced by compilations for the types and values of their
arguments. Prints a line of JSON for each kernel. Needs Triton, and no `TRITON_INTERPRET`.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import megarl_kernels as kernels
from megarl_kernels import fp8_block, logprob_entropy, reverse_scan

TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int64: "*i64", torch.uint8: "*u8"}
OPTIONS = ("num_warps", "num_stages")


def compile_launch(kernel: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], capability: int) -> None:
    """Compile one launch with the types, constants and alignments that Triton derives from its arguments."""
    given = dict(zip(kernel.arg_names, arguments, strict=False)) | keywords
    options = {name: given.pop(name) for name in OPTIONS if name in given}
    assert set(given) == set(kernel.arg_names), (kernel.__name__, set(given) ^ set(kernel.arg_names))
    constants, signature, attributes = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        value = given[parameter.name]
        if parameter.is_constexpr or (isinstance(value, int) and value == 1):
            constants[parameter.name], signature[parameter.name] = value, "constexpr"
            continue
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = TYPES[value.dtype]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
        if (value.data_ptr() if isinstance(value, torch.Tensor) else value) % 16 == 0:
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    module = kernel.fn.__module__.rpartition(".")[2]
    line = {"kernel": f"{module}.{kernel.__name__}", "shared_bytes": compiled.metadata.shared}
    line |= {"code_bytes": len(compiled.asm["cubin"])} | resources(compiled.asm["cubin"])
    sys.stdout.write(json.dumps(line) + "\n")


def resources(code: bytes) -> dict[str, int]:
    """Return the registers per thread and the bytes that it spills, as the disassembler of Triton's package says."""
    disassembler = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        out = subprocess.check_output([disassembler, "-res-usage", file.name], text=True, stderr=subprocess.STDOUT)
    registers, stack = (int(re.findall(rf"{name}:(\d+)", out)[-1]) for name in ("REG", "STACK"))
    return {"registers": registers, "spilled_bytes": stack}


def main(capability: int) -> None:
    """Call every op once, and some with other options."""
    for module in (logprob_entropy, fp8_block, reverse_scan):
        module.uses_triton = lambda _: True
    triton.JITFunction.__getitem__ = lambda kernel, _: lambda *a, **k: compile_launch(kernel, a, k, capability)

    g = torch.Generator().manual_seed(0)
    hidden, weight, logits, big = (
        torch.zeros(shape, dtype=torch.bfloat16) for shape in ((64, 256), (512, 256), (64, 512), (256, 384))
    )
    targets = torch.randint(512, (64,), generator=g)
    for softcap in (None, 30.0):
        shard = {"vocab_start": 0, "valid_columns": 512, "softcap": softcap}
        for op, tensors in ((kernels.linear_logprob_entropy, (hidden, weight)), (kernels.logprob_entropy_, (logits,))):
            tensors = [x.clone().requires_grad_() for x in tensors]
            sum(x.sum() for x in op(*(x * 1 for x in tensors), targets, **shard)).backward()
    values, scales = kernels.fp8_block_quantize(big)
    kernels.fp8_block_quantize(big, power_of_two_scales=True)
    kernels.fp8_block_dequantize(values, scales)
    kernels.fp8_block_encode(big, scales, values)
    kernels.fp8_block_maxima(big)
    kernels.segmented_reverse_scan(torch.zeros(5000), torch.zeros(5000))


if __name__ == "__main__":
    main(int(sys.argv[1]))
