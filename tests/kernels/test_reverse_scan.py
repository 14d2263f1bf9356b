"""The recurrence against a loop over Python numbers."""

import pytest
import torch

from megarl_kernels import segmented_reverse_scan
from tests.errors import expect_error


def random_recurrence(t, dtype=torch.float32, seed=0):
    """Return b and a of segments of about 20 elements; two thirds of the factors within them are near 1."""
    g = torch.Generator().manual_seed(seed)
    b, a = torch.randn(t, generator=g), torch.rand(t, generator=g) ** 0.1
    a[torch.rand(t, generator=g) < 0.05] = 0.0
    return b.to(dtype), a.to(dtype)


def loop(b, a):
    x, out = 0.0, []
    for value, factor in zip(reversed(b.tolist()), reversed(a.tolist()), strict=True):
        x = value + factor * x
        out.append(x)
    return torch.tensor(out[::-1], dtype=torch.float64)


@pytest.mark.parametrize("t", [0, 1, 2, 3, 31, 1000])
def test_recurrence_is_that_of_a_loop(t):
    b, a = random_recurrence(t, torch.float64)
    torch.testing.assert_close(segmented_reverse_scan(b, a), loop(b, a), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("b", "a"),
    [(torch.zeros(2), torch.zeros(3)), (torch.zeros(2), torch.zeros(2).double()), (torch.zeros(2).int(),) * 2],
    ids=["length", "dtypes", "dtype"],
)
def test_inputs_that_do_not_fit_are_refused(b, a):
    with expect_error(ValueError, "[t]", "float32", "float64"):
        segmented_reverse_scan(b, a)
