"""Quantization of weights to FP8 with a scale for each block of 128 x 128, and back.

The format of DeepSeek-V3's published weights: `weight` in float8_e4m3fn, and `weight_scale_inv` in float32, the factor
that a block is multiplied by to get it back. Shapes: n rows and k columns of a weight, or of a box of it.

    whole blocks        fp8_block_quantize
    parts of blocks     fp8_block_maxima, the maximum over the parts of each block, fp8_block_scales, fp8_block_encode
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl_kernels.backend import jit, tl, triton, uses_triton

SIZE = 128
"""Rows and columns of a block."""
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
SMALLEST_MAXIMUM = 1e-4
"""Blocks whose largest magnitude is smaller are scaled as if it were this; also blocks of zeros."""


def fp8_block_quantize(
    weight: Tensor,
    *,
    row_offset: int = 0,
    column_offset: int = 0,
    full_shape: tuple[int, int] | None = None,
    power_of_two_scales: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return float8_e4m3fn values [n, k] and float32 scales [ceil(n / 128), ceil(k / 128)] of a weight or a box of it.

    A block's scale is its largest magnitude divided by 448, and its values are weight / scale, rounded to nearest even.
    A box gets the values and scales that the whole weight gets there, bit for bit.

    Args:
        weight: [n, k], bfloat16, float16 or float32.
        row_offset: first row of the box in the whole weight, a multiple of 128.
        column_offset: first column of the box in the whole weight, a multiple of 128.
        full_shape: shape of the whole weight, if `weight` is a box of it: the box ends at a multiple of 128 or where
            the whole weight does.
        power_of_two_scales: round scales up to powers of two, as kernels for Blackwell GPUs need them.

    Raises:
        ValueError: the box has a part of a block, whose scale would differ from that of the whole weight.
    """
    n, k = weight.shape
    full = full_shape or (row_offset + n, column_offset + k)
    for what, offset, length, end in (("rows", row_offset, n, full[0]), ("columns", column_offset, k, full[1])):
        if offset % SIZE or ((offset + length) % SIZE and offset + length != end):
            raise ValueError(
                f"{what} {offset} to {offset + length} of {end} cut a block of {SIZE}: quantize whole blocks only"
            )
    compute = _triton_quantize if uses_triton(weight) else _reference_quantize
    return compute(weight, power_of_two_scales)


def fp8_block_dequantize(
    values: Tensor,
    scales: Tensor,
    *,
    row_offset: int = 0,
    column_offset: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Return values * scales, rounded to `dtype`, [n, k].

    Args:
        values: float8_e4m3fn [n, k], a weight or any box of it.
        scales: float32, of the whole weight or any part that covers the box.
        row_offset: first row of the box, counted from that of the first scale.
        column_offset: first column of the box, counted from that of the first scale.

    Raises:
        ValueError: `scales` do not cover the box.
    """
    n, k = values.shape
    if values.dtype != FP8:
        raise ValueError(f"values need to be {FP8}, got {values.dtype}")
    if row_offset < 0 or column_offset < 0:
        raise ValueError(f"offsets need to be at least 0, got {row_offset} and {column_offset}")
    needed = (-(-(row_offset + n) // SIZE), -(-(column_offset + k) // SIZE))
    if scales.ndim != 2 or scales.shape[0] < needed[0] or scales.shape[1] < needed[1]:
        raise ValueError(f"the box needs {list(needed)} scales, got {list(scales.shape)}")
    compute = _triton_dequantize if uses_triton(values) else _reference_dequantize
    return compute(values, scales, row_offset, column_offset, dtype)


def fp8_block_maxima(weight: Tensor, *, row_offset: int = 0, column_offset: int = 0) -> Tensor:
    """Return the largest magnitude of the box's part of each block that it touches, float32 [blocks, blocks].

    Args:
        weight: [n, k], a box, which may cut blocks.
        row_offset: first row of the box, counted from that of the first block that it touches: 0 to 127.
        column_offset: first column of the box, likewise.
    """
    _check_offsets(row_offset, column_offset)
    compute = _triton_maxima if uses_triton(weight) else _reference_maxima
    return compute(weight, row_offset, column_offset)


def fp8_block_scales(maxima: Tensor) -> Tensor:
    """Return the scales, float32, of blocks with these largest magnitudes: those of `fp8_block_quantize`."""
    maxima = maxima.clamp(min=SMALLEST_MAXIMUM)
    # by a tensor: on CUDA, torch multiplies by the reciprocal of a number, which rounds twice
    return maxima.div_(torch.full_like(maxima, FP8_MAX))


def fp8_block_encode(
    weight: Tensor, scales: Tensor, out: Tensor, *, row_offset: int = 0, column_offset: int = 0
) -> None:
    """Write weight / scales, rounded to nearest even, into `out`.

    Args:
        weight: [n, k], a box, which may cut blocks.
        scales: float32, of the blocks that the box touches.
        out: float8_e4m3fn [n, k], of any strides.
        row_offset: as in `fp8_block_maxima`.
        column_offset: likewise.
    """
    _check_offsets(row_offset, column_offset)
    n, k = weight.shape
    needed = (-(-(row_offset + n) // SIZE), -(-(column_offset + k) // SIZE))
    if tuple(scales.shape) != needed:
        raise ValueError(f"the box needs {list(needed)} scales, got {list(scales.shape)}")
    if out.dtype != FP8 or out.shape != weight.shape:
        raise ValueError(f"out needs to be {FP8} {list(weight.shape)}, got {out.dtype} {list(out.shape)}")
    compute = _triton_encode if uses_triton(weight) else _reference_encode
    compute(weight, scales, out, row_offset, column_offset)


def _check_offsets(row_offset: int, column_offset: int) -> None:
    if not (0 <= row_offset < SIZE and 0 <= column_offset < SIZE):
        raise ValueError(f"offsets need to be from 0 to {SIZE - 1}, got {row_offset} and {column_offset}")


def _blocks_of(weight: Tensor, row_offset: int, column_offset: int) -> Tensor:
    """Return the blocks that the box touches, float32 [blocks, 128, blocks, 128], with zeros outside of the box."""
    n, k = weight.shape
    rows, columns = -(-(row_offset + n) // SIZE), -(-(column_offset + k) // SIZE)
    padded = weight.new_zeros(rows * SIZE, columns * SIZE, dtype=torch.float32)
    padded[row_offset : row_offset + n, column_offset : column_offset + k] = weight
    return padded.view(rows, SIZE, columns, SIZE)


def _reference_maxima(weight: Tensor, row_offset: int, column_offset: int) -> Tensor:
    return _blocks_of(weight, row_offset, column_offset).abs_().amax(dim=(1, 3))


def _reference_encode(weight: Tensor, scales: Tensor, out: Tensor, row_offset: int, column_offset: int) -> None:
    n, k = weight.shape
    blocks = _blocks_of(weight, row_offset, column_offset)
    values = blocks.div_(scales[:, None, :, None]).clamp_(-FP8_MAX, FP8_MAX)
    values = values.view(scales.shape[0] * SIZE, scales.shape[1] * SIZE)
    out.copy_(values[row_offset : row_offset + n, column_offset : column_offset + k])


def _reference_quantize(weight: Tensor, power_of_two_scales: bool) -> tuple[Tensor, Tensor]:
    n, k = weight.shape
    rows, columns = -(-n // SIZE), -(-k // SIZE)
    padded = weight.new_zeros(rows * SIZE, columns * SIZE, dtype=torch.float32)
    padded[:n, :k] = weight
    blocks = padded.view(rows, SIZE, columns, SIZE)
    scales = fp8_block_scales(blocks.abs().amax(dim=(1, 3)))
    if power_of_two_scales:
        fraction, exponent = torch.frexp(scales)
        scales = torch.ldexp(torch.ones_like(scales), exponent - (fraction == 0.5).int())
    values = blocks.div_(scales[:, None, :, None]).clamp_(-FP8_MAX, FP8_MAX).to(FP8)
    return values.view(rows * SIZE, columns * SIZE)[:n, :k].contiguous(), scales


def _reference_dequantize(
    values: Tensor, scales: Tensor, row_offset: int, column_offset: int, dtype: torch.dtype
) -> Tensor:
    n, k = values.shape
    rows = torch.arange(row_offset, row_offset + n, device=values.device) // SIZE
    columns = torch.arange(column_offset, column_offset + k, device=values.device) // SIZE
    return values.float().mul_(scales[rows][:, columns]).to(dtype)


def _triton_quantize(weight: Tensor, power_of_two_scales: bool) -> tuple[Tensor, Tensor]:
    n, k = weight.shape
    rows, columns = triton.cdiv(n, SIZE), triton.cdiv(k, SIZE)
    values = torch.empty(n, k, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(rows, columns, dtype=torch.float32, device=weight.device)
    if values.numel():
        _quantize_kernel[(rows, columns)](
            weight,
            values,
            scales,
            n,
            k,
            weight.stride(0),
            weight.stride(1),
            columns,
            POWER_OF_TWO=power_of_two_scales,
            SMALLEST=SMALLEST_MAXIMUM,
            LARGEST=FP8_MAX,
            BLOCK=SIZE,
            num_warps=8,
        )
    return values.view(FP8), scales


def _triton_maxima(weight: Tensor, row_offset: int, column_offset: int) -> Tensor:
    n, k = weight.shape
    rows, columns = triton.cdiv(row_offset + n, SIZE), triton.cdiv(column_offset + k, SIZE)
    maxima = torch.zeros(rows, columns, dtype=torch.float32, device=weight.device)
    if weight.numel():
        _maxima_kernel[(rows, columns)](
            weight,
            maxima,
            n,
            k,
            weight.stride(0),
            weight.stride(1),
            columns,
            row_offset,
            column_offset,
            BLOCK=SIZE,
            num_warps=8,
        )
    return maxima


def _triton_encode(weight: Tensor, scales: Tensor, out: Tensor, row_offset: int, column_offset: int) -> None:
    n, k = weight.shape
    if weight.numel():
        _encode_kernel[(triton.cdiv(n, SIZE), triton.cdiv(k, SIZE))](
            weight,
            scales,
            out.view(torch.uint8),
            n,
            k,
            weight.stride(0),
            weight.stride(1),
            scales.stride(0),
            scales.stride(1),
            out.stride(0),
            out.stride(1),
            row_offset,
            column_offset,
            LARGEST=FP8_MAX,
            BLOCK=SIZE,
            num_warps=8,
        )


def _triton_dequantize(
    values: Tensor, scales: Tensor, row_offset: int, column_offset: int, dtype: torch.dtype
) -> Tensor:
    n, k = values.shape
    weight = torch.empty(n, k, dtype=dtype, device=values.device)
    if weight.numel():
        _dequantize_kernel[(triton.cdiv(n, SIZE), triton.cdiv(k, SIZE))](
            values.view(torch.uint8),
            scales,
            weight,
            n,
            k,
            values.stride(0),
            values.stride(1),
            scales.stride(0),
            scales.stride(1),
            row_offset,
            column_offset,
            BLOCK=SIZE,
            num_warps=8,
        )
    return weight


@jit
def _encode(x: tl.tensor) -> tl.tensor:
    """Return the e4m3 bits, uint8, of float32 numbers of at most 448: rounded to nearest even, on any GPU."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    # 3 of 23 bits of the mantissa stay; the exponent's bias is 7 instead of 127
    rounded = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    normal = rounded - (120 << 3)
    # below 2**-6 the step is 2**-9: adding 1.5 * 2**14 rounds a float32 to it
    subnormal = ((tl.abs(x) + 24576.0).to(tl.int32, bitcast=True)) & 0xF
    return (sign | tl.where(magnitude < (121 << 23), subnormal, normal)).to(tl.uint8)


@jit
def _decode(code: tl.tensor) -> tl.tensor:
    """Return the float32 numbers of e4m3 bits, uint8."""
    code = code.to(tl.int32)
    magnitude = code & 0x7F
    normal = ((magnitude + (120 << 3)) << 20).to(tl.float32, bitcast=True)
    x = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    x = tl.where(magnitude == 0x7F, float("nan"), x)
    return tl.where(code >= 0x80, -x, x)


@jit
def _quantize_kernel(
    weight: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    scale_columns: tl.tensor,
    POWER_OF_TWO: tl.constexpr,
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the values and the scale of one block of `weight`."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (rows < n)[:, None] & (columns < k)[None, :]
    at = rows[:, None].to(tl.int64) * row_stride + columns[None, :].to(tl.int64) * column_stride
    x = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.max(tl.abs(x), axis=1), axis=0), SMALLEST)
    scale = tl.div_rn(largest, LARGEST)
    if POWER_OF_TWO:
        bits = scale.to(tl.int32, bitcast=True)
        scale = (((bits + 0x7FFFFF) >> 23) << 23).to(tl.float32, bitcast=True)
    quotient = tl.div_rn(x, tl.zeros_like(x) + scale)
    quotient = tl.minimum(tl.maximum(quotient, -LARGEST), LARGEST)
    tl.store(values + rows[:, None].to(tl.int64) * k + columns[None, :], _encode(quotient), mask=inside)
    tl.store(scales + tl.program_id(0) * scale_columns + tl.program_id(1), scale)


@jit
def _dequantize_kernel(
    values: tl.tensor,
    scales: tl.tensor,
    weight: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    scale_row_stride: tl.tensor,
    scale_column_stride: tl.tensor,
    row_offset: tl.tensor,
    column_offset: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Convert a tile, which need not be a block, to the dtype of `weight`."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (rows < n)[:, None] & (columns < k)[None, :]
    at = rows[:, None].to(tl.int64) * row_stride + columns[None, :].to(tl.int64) * column_stride
    x = _decode(tl.load(values + at, mask=inside, other=0))
    block_rows = ((rows + row_offset) // BLOCK)[:, None] * scale_row_stride
    block_columns = ((columns + column_offset) // BLOCK)[None, :] * scale_column_stride
    scale = tl.load(scales + block_rows + block_columns, mask=inside, other=0.0)
    out = weight + rows[:, None].to(tl.int64) * k + columns[None, :]
    tl.store(out, (x * scale).to(weight.dtype.element_ty), mask=inside)


@jit
def _maxima_kernel(
    weight: tl.tensor,
    maxima: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    block_columns: tl.tensor,
    row_offset: tl.tensor,
    column_offset: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Write the largest magnitude of the box's part of one block."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK) - row_offset
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK) - column_offset
    inside = ((rows >= 0) & (rows < n))[:, None] & ((columns >= 0) & (columns < k))[None, :]
    at = rows[:, None].to(tl.int64) * row_stride + columns[None, :].to(tl.int64) * column_stride
    x = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.max(tl.abs(x), axis=1), axis=0)
    tl.store(maxima + tl.program_id(0) * block_columns + tl.program_id(1), largest)


@jit
def _encode_kernel(
    weight: tl.tensor,
    scales: tl.tensor,
    values: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    scale_row_stride: tl.tensor,
    scale_column_stride: tl.tensor,
    value_row_stride: tl.tensor,
    value_column_stride: tl.tensor,
    row_offset: tl.tensor,
    column_offset: tl.tensor,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the values of a tile, which need not be a block."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (rows < n)[:, None] & (columns < k)[None, :]
    at = rows[:, None].to(tl.int64) * row_stride + columns[None, :].to(tl.int64) * column_stride
    x = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    block_rows = ((rows + row_offset) // BLOCK)[:, None] * scale_row_stride
    block_columns = ((columns + column_offset) // BLOCK)[None, :] * scale_column_stride
    scale = tl.load(scales + block_rows + block_columns, mask=inside, other=1.0)
    quotient = tl.minimum(tl.maximum(tl.div_rn(x, scale), -LARGEST), LARGEST)
    out = rows[:, None].to(tl.int64) * value_row_stride + columns[None, :].to(tl.int64) * value_column_stride
    tl.store(values + out, _encode(quotient), mask=inside)
