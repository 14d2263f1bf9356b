"""Measures the share of bytes that codecs of changed elements send after an optimizer step, for megarl and its peers.

Simulated Adam on float32 weights from a normal distribution, with normal gradients; after the warm-up of its moments,
one step is compared in bfloat16, bit by bit. Gradients of all weights are there, as in a dense model. Every code is
decoded into the weights of the step before, and has to restore the step's bits.

    python -m benchmarks.reshard.changed_weights --lr 1e-6 --json

Formats of the peers, as their repositories had them in August 2026, written here from these facts:

    verl      indices: int32 positions, then values.
              verl-project/verl, docs/advance/delta_weight_sync.md, verl/checkpoint_engine/delta_sync/encode.py
    NeMo-RL   uint16 gaps between positions (uint32 if one is longer), then the new bits XOR the old ones, or the new
              ones where vLLM's loader does more than copy; zstd, level 1.
              NVIDIA-NeMo/RL, docs/design-docs/sparse-delta-refit.md, nemo_rl/utils/weight_transfer_sparse_codec.py
    slime,    xor (default): the new XOR the old bytes, all of them; overwrite: uint32 number of changed bytes, uint32
    Miles     position of each, then the bytes; both: zstd, level 1.
              THUDM/slime, docs/en/advanced/delta-weight-sync.md, slime/utils/disk_delta.py
              radixark/miles, miles/utils/disk_delta.py

Peers code whole parameters and NeMo-RL up to 512 MiB of them at once, so all weights are one parameter to them; megarl
codes each box. Names, shapes, counts and checksums, which all of them send separately, are not counted.

All of these codes are lossless. XOR codes are small because an Adam step moves nearly every changed bfloat16 by one
unit in the last place, up or down: relative to the value that the receiver holds, that is 2 bits, not 16. Hence they
can take less than the entropy of the positions with 2 bytes a value. They need a base that is right and must be applied
once; absolute values (megarl, verl, overwrite) may be applied again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.text_table import print_rows
from megarl.reshard.transfer import element_code

type Words = NDArray[np.int16]
"""[elements], the bits of bfloat16 weights."""

PIECES = (1 << 10, 256 << 10)
"""Sizes of pieces in bytes, to compare codes of elements with: a piece is sent if one of its elements differs."""

BETAS, EPS = (0.9, 0.95), 1e-8

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedWeights:
    """What one step has changed, and what codecs send for it; one JSON object. Shares are of all elements' bytes."""

    lr: float
    step: int
    """Number of the step; the moments of Adam are those of all steps until then."""
    dtype: str
    changed_elements: float
    """Share of the elements that differ."""
    pieces: dict[int, float]
    """By size of a piece in bytes, the share of pieces with an element that differs."""
    entropy: float
    """Entropy of the changed positions and of the differences from the base, both taken as independent draws. Only a
    code that expects more changes among small weights could take less."""
    codecs: dict[str, float]
    """Bytes of the code, by codec."""
    zstd_seconds_per_gib: dict[str, float]
    """CPU seconds of zstd, compressing and decompressing, for a GiB of weights, by codec that uses it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """A code of changed elements."""

    encode: Callable[[Words, Words], bytes]
    """Returns the code of weights relative to the base."""
    decode: Callable[[bytes, Words, int], Words]
    """Returns the weights, from the code, the base, and the number of changed elements."""
    zstd: bool = False
    """Whether zstd compresses the code."""
    by_box: bool = False
    """Whether each box has its code, rather than all weights together."""


def encode_megarl(now: Words, base: Words) -> bytes:
    """Return megarl's code, which is the box itself where many elements have changed."""
    box, held = torch.from_numpy(now), torch.from_numpy(base.copy())
    changed, code = element_code.encode(box, held)
    if not torch.equal(held, box):
        raise RuntimeError("megarl's encode leaves a base that differs from the box")
    if code is None:
        return element_code.whole_bytes(box).numpy().tobytes() if changed else b""
    return code.numpy().tobytes()


def decode_megarl(code: bytes, base: Words, changed: int) -> Words:
    """Return the weights; inverse of `encode_megarl`."""
    target = torch.from_numpy(base.copy())
    element_code.decode(torch.from_numpy(np.frombuffer(code, np.uint8).copy()), changed, target)
    return target.numpy()


def encode_indices(now: Words, base: Words) -> bytes:
    """Return verl's code: int32 positions, then values."""
    positions = np.flatnonzero(now != base)
    return positions.astype("<i4").tobytes() + now[positions].tobytes()


def decode_indices(code: bytes, base: Words, changed: int) -> Words:
    """Return the weights; inverse of `encode_indices`."""
    weights = base.copy()
    weights[np.frombuffer(code, "<i4", changed)] = np.frombuffer(code, base.dtype, offset=4 * changed)
    return weights


def encode_gaps(now: Words, base: Words) -> bytes:
    """Return NeMo-RL's code before zstd: gaps between positions, then XORs."""
    positions = np.flatnonzero(now != base)
    gaps = np.diff(positions, prepend=-1) - 1
    width = "<u2" if gaps.max(initial=0) < 1 << 16 else "<u4"
    return gaps.astype(width).tobytes() + (now[positions] ^ base[positions]).tobytes()


def decode_gaps(code: bytes, base: Words, changed: int) -> Words:
    """Return the weights; inverse of `encode_gaps`."""
    weights = base.copy()
    width = len(code) // changed - base.itemsize
    gaps = np.frombuffer(code, f"<u{width}", changed).astype(np.int64)
    weights[np.cumsum(gaps + 1) - 1] ^= np.frombuffer(code, base.dtype, offset=width * changed)
    return weights


def encode_xor(now: Words, base: Words) -> bytes:
    """Return the code of slime and Miles before zstd: the XOR of all bytes."""
    return (now ^ base).tobytes()


def decode_xor(code: bytes, base: Words, changed: int) -> Words:
    """Return the weights; inverse of `encode_xor`."""
    del changed
    return base ^ np.frombuffer(code, base.dtype)


def encode_overwrite(now: Words, base: Words) -> bytes:
    """Return the other code of slime and Miles before zstd: number, positions and values of changed bytes."""
    new = now.view(np.uint8)
    positions = np.flatnonzero(new != base.view(np.uint8)).astype("<u4")
    return b"".join(part.tobytes() for part in (np.array(len(positions), "<u4"), positions, new[positions]))


def decode_overwrite(code: bytes, base: Words, changed: int) -> Words:
    """Return the weights; inverse of `encode_overwrite`."""
    del changed
    weights = base.copy()
    number = int(np.frombuffer(code, "<u4", 1)[0])
    positions = np.frombuffer(code, "<u4", number, offset=4)
    weights.view(np.uint8)[positions] = np.frombuffer(code, np.uint8, offset=4 + 4 * number)
    return weights


CODECS = {
    "megarl": Codec(encode=encode_megarl, decode=decode_megarl, by_box=True),
    "megarl + zstd": Codec(encode=encode_megarl, decode=decode_megarl, zstd=True, by_box=True),
    "verl: indices": Codec(encode=encode_indices, decode=decode_indices),
    "NeMo-RL: xor + zstd": Codec(encode=encode_gaps, decode=decode_gaps, zstd=True),
    "slime, Miles: xor + zstd": Codec(encode=encode_xor, decode=decode_xor, zstd=True),
    "slime, Miles: overwrite + zstd": Codec(encode=encode_overwrite, decode=decode_overwrite, zstd=True),
}


class Zstd:
    """Compresses at level 1, as the peers do, and counts the CPU seconds of that."""

    def __init__(self) -> None:
        module: Any = import_module("zstandard")
        self._compress = module.ZstdCompressor(level=1).compress
        self._decompress = module.ZstdDecompressor().decompress
        self.seconds = 0.0

    def compress(self, data: bytes) -> bytes:
        """Return the compressed bytes."""
        return self._timed(self._compress, data)

    def decompress(self, data: bytes) -> bytes:
        """Return the bytes that were compressed."""
        return self._timed(self._decompress, data)

    def _timed(self, function: Callable[[bytes], bytes], data: bytes) -> bytes:
        start = time.process_time()
        result = function(data)
        self.seconds += time.process_time() - start
        return result


def code_bytes(codec: Codec, now: Words, base: Words, zstd: Zstd | None) -> int:
    """Return the size of the code for weights relative to the base, 0 if none has changed.

    Raises:
        RuntimeError: the code does not restore the weights.
    """
    changed = int(np.count_nonzero(now != base))
    if not changed:
        return 0
    code = codec.encode(now, base)
    sent = zstd.compress(code) if zstd else code
    restored = codec.decode(zstd.decompress(sent) if zstd else sent, base, changed)
    if not np.array_equal(restored, now):
        raise RuntimeError(f"{codec.decode.__name__} restores {(restored != now).sum()} of {len(now)} elements wrongly")
    return len(sent)


def entropy_bytes(now: Words, base: Words) -> float:
    """Return the bytes of entropy of changed positions, and of differences from the base in units of the last place."""
    changed = now != base
    count = int(np.count_nonzero(changed))
    _, counts = np.unique(now[changed].astype(np.int32) - base[changed], return_counts=True)
    return (_bits(np.array([count, len(now) - count])) + _bits(counts)) / 8


def _bits(counts: NDArray[Any]) -> float:
    """Return the entropy, in bits, of all draws together that came out as often as `counts` tells."""
    counts = counts[counts > 0]
    return float(-(counts * np.log2(counts / counts.sum())).sum())


def compare(now: Words, base: Words, names: Sequence[str], *, boxes: int, **where: Any) -> ChangedWeights:
    """Return what has changed and what the codecs of these names send; `where`: the other fields of the report."""
    codecs, zstd_seconds = {}, {}
    for name in names:
        codec = CODECS[name]
        zstd = Zstd() if codec.zstd else None
        parts = boxes if codec.by_box else 1
        pairs = zip(np.split(now, parts), np.split(base, parts), strict=True)
        codecs[name] = sum(code_bytes(codec, *pair, zstd) for pair in pairs) / now.nbytes
        if zstd:
            zstd_seconds[name] = zstd.seconds * GIB / now.nbytes
    changed = now != base
    return ChangedWeights(
        changed_elements=float(changed.mean()),
        pieces={size: float(changed.reshape(-1, size // now.itemsize).any(axis=1).mean()) for size in PIECES},
        entropy=entropy_bytes(now, base) / now.nbytes,
        codecs=codecs,
        zstd_seconds_per_gib=zstd_seconds,
        **where,
    )


def measure(
    lr: float, steps: int, names: Sequence[str], *, boxes: int, box_elements: int, std: float
) -> list[ChangedWeights]:
    """Return what the first and the last of `steps` Adam steps change."""
    rng = torch.Generator().manual_seed(0)
    elements = boxes * box_elements
    weight = torch.randn(elements, generator=rng) * std
    mean, square = torch.zeros(elements), torch.zeros(elements)
    found = []
    for step in range(1, steps + 1):
        before = weight.to(torch.bfloat16)
        gradient = torch.randn(elements, generator=rng)
        mean = BETAS[0] * mean + (1 - BETAS[0]) * gradient
        square = BETAS[1] * square + (1 - BETAS[1]) * gradient.square()
        unbiased = mean / (1 - BETAS[0] ** step), square / (1 - BETAS[1] ** step)
        weight = weight - lr * unbiased[0] / (unbiased[1].sqrt() + EPS)
        if step in (1, steps):
            now, base = (each.view(torch.int16).numpy() for each in (weight.to(torch.bfloat16), before))
            found.append(compare(now, base, names, boxes=boxes, lr=lr, step=step, dtype="bfloat16"))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table or JSON lines; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-7, 1e-6, 1e-5], help="learning rates")
    parser.add_argument("--steps", type=int, default=20, help="Adam steps (20)")
    parser.add_argument("--std", type=float, default=0.02, help="standard deviation of the weights (0.02)")
    parser.add_argument("--mib", type=int, default=4, help="MiB of a box in bfloat16 (4)")
    parser.add_argument("--boxes", type=int, default=4, help="boxes (4)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    names = list(CODECS)
    if find_spec("zstandard") is None:
        names = [name for name in names if not CODECS[name].zstd]
        left_out = "; ".join(name for name in CODECS if name not in names)
        print(f"The package zstandard is not installed; codecs left out: {left_out}.", file=sys.stderr)
    sizes = {"boxes": args.boxes, "box_elements": args.mib * 2**20 // 2}
    reports = [each for lr in args.lr for each in measure(lr, args.steps, names, std=args.std, **sizes)]
    if args.json:
        for each in reports:
            print(json.dumps(asdict(each)), flush=True)
        return 0
    columns = ["lr", "step", "elements", *(f"pieces of {size >> 10} KiB" for size in PIECES), "entropy", *names]
    print_rows(columns, [_row(each) for each in reports], num_text_columns=1)
    return 0


def _row(report: ChangedWeights) -> list[str]:
    shares = (report.changed_elements, *report.pieces.values(), report.entropy, *report.codecs.values())
    return [f"{report.lr:g}", str(report.step), *(f"{share:.2%}" for share in shares)]


if __name__ == "__main__":
    sys.exit(main())
