"""Codes of changed elements: any change is restored bit for bit, in the size that both ends compute."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.errors import WeightSyncError
from megarl.reshard.transfer.element_code import BLOCK, code_form, decode, decode_boxes, encode, whole_bytes
from tests.errors import expect_error

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)
INTEGERS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}


def bits(tensor):
    """Return the elements as integers, flat."""
    return tensor.contiguous().view(INTEGERS[tensor.itemsize]).flatten()


def random_box(shape, dtype, rng):
    words = rng.integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8)
    return torch.from_numpy(words).view(INTEGERS[dtype.itemsize]).squeeze(-1).view(dtype)


def strided(box, kind):
    """Return an equal tensor with other strides."""
    if kind == "transposed":
        return box.mT.contiguous().mT
    wide = torch.zeros(*box.shape[:-1], box.shape[-1] + 3, dtype=box.dtype)
    part = wide[..., 1:-2]
    part.copy_(box)
    return part


def send(now, base, target, offset=0):
    """Encode `now` against `base`, decode into `target`; return changed elements and bytes sent."""
    copy = bits(base).clone()
    changed, code = encode(now, copy)
    assert torch.equal(copy, bits(now))
    form = code_form(now.numel(), now.itemsize, changed)
    if form.kind in ("places", "bitmap"):
        assert 2 * code.nbytes <= now.nbytes
    else:
        assert code is None
        code = whole_bytes(now) if form.kind == "whole" else torch.zeros(0, dtype=torch.uint8)
    assert code.nbytes == form.num_bytes
    bucket = torch.full((offset + code.nbytes + 3,), 0xEE, dtype=torch.uint8)
    bucket[offset : offset + code.nbytes] = code
    decode(bucket[offset : offset + code.nbytes], changed, target)
    return changed, code.nbytes


@given(data=st.data())
def test_any_change_of_any_box_is_restored_bitwise(data):
    dtype = data.draw(st.sampled_from(DTYPES))
    shape = data.draw(st.sampled_from([(1,), (7,), (64,), (5, 9), (33, 40), (3, 4, 50), (300, 230)]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    base = random_box(shape, dtype, rng)
    now = base.clone()
    share = data.draw(st.sampled_from([0.0, 0.01, 0.1, 0.4, 0.9, 1.0]))
    mask = torch.from_numpy(rng.random(shape) < share)
    bits_now = now.view(INTEGERS[dtype.itemsize])
    bits_now[mask] ^= 1
    target, box = base.clone(), now
    if len(shape) > 1:
        kinds = st.sampled_from(["contiguous", "transposed", "part"])
        ours, theirs = data.draw(kinds), data.draw(kinds)
        box = now if ours == "contiguous" else strided(now, ours)
        target = target if theirs == "contiguous" else strided(target, theirs)
    changed, _ = send(box, base, target, offset=data.draw(st.integers(0, 9)))
    assert changed == int(mask.sum())
    assert torch.equal(bits(target), bits(now))


@pytest.mark.parametrize(
    ("shape", "itemsize", "changed", "kind", "num_bytes"),
    [
        ((4096, 64), 2, 0, "none", 0),
        ((4096, 64), 2, 1000, "places", 4 * 4 + 1000 * 4),  # four blocks
        ((1024, 64), 2, 655, "places", 655 * 4),  # one block needs no count
        ((1024, 64), 2, 10_000, "bitmap", 8192 + 20_000),
        ((1024, 64), 2, 40_000, "whole", 131_072),
        ((1024, 64), 4, 10_000, "bitmap", 8192 + 40_000),
        ((1024, 64), 1, 2000, "places", 6000),
        ((1,), 2, 1, "whole", 2),
    ],
)
def test_the_smallest_form_is_taken_up_to_half_of_the_box(shape, itemsize, changed, kind, num_bytes):
    form = code_form(int(np.prod(shape)), itemsize, changed)
    assert (form.kind, form.num_bytes) == (kind, num_bytes)


@given(
    elements=st.integers(1, 300_000),
    itemsize=st.sampled_from([1, 2, 4]),
    share=st.floats(0, 1),
)
def test_no_code_is_larger_than_its_box(elements, itemsize, share):
    form = code_form(elements, itemsize, changed := round(share * elements))
    assert (form.num_bytes == 0) == (changed == 0)
    assert form.num_bytes == elements * itemsize if form.kind == "whole" else 2 * form.num_bytes <= elements * itemsize


def test_places_of_all_blocks_are_found():
    """The first and the last element of each block, and blocks without a change."""
    base = torch.zeros(3 * BLOCK + 17, dtype=torch.bfloat16)
    now = base.clone()
    now[[0, BLOCK - 1, 2 * BLOCK, 3 * BLOCK - 1, 3 * BLOCK, 3 * BLOCK + 16]] = 1.0
    target = base.clone()
    assert send(now, base, target) == (6, 4 * 4 + 6 * 4)
    assert torch.equal(target, now)


def test_signs_of_zero_and_nan_are_compared_by_their_bits():
    base = torch.zeros(1000)
    now = base.clone()
    now[3] = -0.0
    now[5] = torch.nan
    target = base.clone()
    assert send(now, base, target)[0] == 2
    assert torch.equal(bits(target), bits(now))
    assert send(now, now.clone(), target) == (0, 0)


def test_a_code_outside_of_the_bucket_is_refused():
    with expect_error(WeightSyncError, "code", "3", "40", "39", "bucket"):
        decode_boxes(torch.zeros(39, dtype=torch.uint8), np.array([[3, 2, 32]]), [torch.zeros(100)[:2]])


@pytest.mark.gpu
@pytest.mark.parametrize("share", [0.01, 0.3, 0.9])
def test_codes_of_a_gpu_are_those_of_the_cpu(share):
    """The base and the code are in host memory, the box and its target on the GPU."""
    rng = np.random.default_rng(0)
    base = random_box((512, 300), torch.bfloat16, rng)
    now = base.clone()
    now.view(torch.int16)[torch.from_numpy(rng.random(now.shape) < share)] ^= 1
    copies = [bits(base).clone().pin_memory(), bits(base).clone()]
    (changed, code), expected = encode(now.cuda(), copies[0]), encode(now, copies[1])
    assert torch.equal(*copies)
    assert changed == expected[0]
    assert code is None if expected[1] is None else torch.equal(code, expected[1])
    target = base.cuda()
    decode((whole_bytes(now) if code is None else code).cuda(), changed, target)
    assert torch.equal(bits(target.cpu()), bits(now))
