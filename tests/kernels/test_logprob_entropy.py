"""Both ops for log-probability and entropy: against torch's log_softmax in float64, and the unsplit result."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megarl_kernels import clear_dummy_gradients, linear_logprob, linear_logprob_entropy, logprob_entropy_
from megarl_kernels.linear_logprob import chunk_columns
from tests.errors import expect_error

OPTIONS = [{}, {"inv_temperature": 1.7}, {"softcap": 5.0}, {"inv_temperature": 0.6, "softcap": 2.0}]


def plain_scores(logits_tv: Tensor, targets_t: Tensor, *, inv_temperature=1.0, softcap=None) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies [t] from all columns, in the dtype of `logits_tv`."""
    if softcap is not None:
        logits_tv = softcap * torch.tanh(logits_tv / softcap)
    logprobs_tv = torch.log_softmax(logits_tv * inv_temperature, dim=-1)
    entropy_t = -(logprobs_tv.exp() * logprobs_tv).sum(-1)
    return logprobs_tv.gather(1, targets_t[:, None])[:, 0], entropy_t


def random_inputs(t: int, v: int, h: int, *, dtype=torch.float64, seed=0) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states [t, h], a weight [v, h] and targets [t]; the logits have a standard deviation of about 3."""
    g = torch.Generator().manual_seed(seed)
    hidden_th = torch.randn(t, h, generator=g, dtype=torch.float64).to(dtype)
    weight_vh = (torch.randn(v, h, generator=g, dtype=torch.float64) * 3 / h**0.5).to(dtype)
    return hidden_th, weight_vh, torch.randint(v, (t,), generator=g)


def fused(op, hidden, weight, targets, **options):
    """Call one of the two ops, both from hidden states."""
    if op == "linear":
        return linear_logprob_entropy(hidden, weight, targets, **options)
    return logprob_entropy_(hidden @ weight.t(), targets, **options)


def gradients(results, tensors, seed=1):
    """Return the gradients of a random combination of the results."""
    g = torch.Generator().manual_seed(seed)
    factors = [torch.randn(r.shape, generator=g, dtype=torch.float64).to(r) for r in results]
    return torch.autograd.grad(results, tensors, factors)


SIZES = [(1, 1, 1, 1), (7, 13, 5, 13), (33, 257, 16, 257), (9, 40, 8, 30)]
"""Tokens, columns, hidden size, and columns that are no padding."""


@pytest.fixture(autouse=True)
def _no_dummy_gradients() -> Iterator[None]:
    yield
    clear_dummy_gradients()


def use_chunks_of(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the linear op compute so many columns at a time."""
    for name, value in {"MAX_CHUNKS": 10**6, "CHUNK_BYTES": 0, "COLUMN_MULTIPLE": columns}.items():
        monkeypatch.setattr(f"megarl_kernels.linear_logprob.{name}", value)


@pytest.fixture
def small_tiles(monkeypatch):
    """Make every size take several tiles of odd sizes."""
    use_chunks_of(7, monkeypatch)
    monkeypatch.setattr("megarl_kernels.logprob_entropy.TILE_ELEMENTS", 50)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("op", ["linear", "logits"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("chosen", [slice(0, 2), slice(0, 1), slice(1, 2)], ids=["both", "logprobs", "entropy"])
def test_results_and_gradients_are_those_of_log_softmax(op, options, size, chosen):
    """Padding columns have no weight and no gradient."""
    t, v, h, valid = size
    hidden, weight, targets = random_inputs(t, v, h)
    targets %= valid
    weight[valid:] = 100.0
    tensors = [hidden.requires_grad_(), weight.requires_grad_()]
    want = plain_scores((hidden @ weight.t())[:, :valid], targets, **options)[chosen]
    got = fused(op, hidden, weight, targets, vocab_start=0, valid_columns=valid, **options)[chosen]
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    got_grads = gradients(got, tensors)
    torch.testing.assert_close(got_grads, gradients(want, tensors), rtol=1e-10, atol=1e-12)
    assert not got_grads[1][valid:].any()


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradcheck(options):
    hidden, weight, targets = random_inputs(6, 17, 4)
    op = partial(linear_logprob_entropy, vocab_start=0, valid_columns=15, **options)
    targets %= 15
    assert torch.autograd.gradcheck(lambda a, b: op(a, b, targets), (hidden.requires_grad_(), weight.requires_grad_()))


@pytest.mark.parametrize("op", ["linear", "logits"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_results_are_float32(op, dtype):
    hidden, weight, targets = random_inputs(64, 300, 32, dtype=dtype)
    tensors = [hidden.requires_grad_(), weight.requires_grad_()]
    exact = [x.detach().double().requires_grad_() for x in tensors]
    got = fused(op, hidden, weight, targets, vocab_start=0, valid_columns=300)
    want = plain_scores(exact[0] @ exact[1].t(), targets)
    assert [x.dtype for x in got] == [torch.float32] * 2
    # the fused op never rounds logits to bfloat16; the other one gets logits that a linear layer has rounded
    rounded = dtype == torch.bfloat16 and op == "logits"
    torch.testing.assert_close(got, want, rtol=0, atol=0.05 if rounded else 2e-5, check_dtype=False)
    for x, y in zip(gradients(got, tensors), gradients(want, exact), strict=True):
        assert x.dtype == dtype
        assert (x - y).norm() <= (2e-2 if rounded else 4e-3 if dtype == torch.bfloat16 else 1e-6) * y.norm()


def test_linear_adds_to_main_grad_as_megatron_core_expects():
    hidden, weight, targets = random_inputs(9, 31, 8, dtype=torch.float32)
    weight.requires_grad_()

    def backward():
        fused("linear", hidden, weight, targets, vocab_start=0, valid_columns=31)[0].sum().backward()

    backward()
    want, weight.grad = weight.grad, None
    weight.main_grad = torch.ones_like(weight)
    backward()
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad, want + 1)
    weight.grad_added_to_main_grad = False
    backward()
    assert weight.grad_added_to_main_grad
    assert weight.grad.shape == weight.shape
    torch.testing.assert_close(weight.main_grad, 2 * want + 1)
    weight.zero_out_wgrad, weight.grad = True, None
    backward()
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad, 3 * want + 1)


def test_one_dummy_gradient_serves_all_micro_batches():
    hidden, weight, targets = random_inputs(9, 31, 8, dtype=torch.bfloat16)
    weights = [weight.clone().requires_grad_() for _ in range(2)]
    places = set()
    for one in (*weights, *weights):
        one.main_grad, one.grad_added_to_main_grad, one.grad = torch.zeros(31, 8), False, None
        fused("linear", hidden, one, targets, vocab_start=0, valid_columns=31)[0].sum().backward()
        places.add(one.grad.data_ptr())
    assert len(places) == 1  # neither a new tensor each time, nor a copy that autograd makes of it
    clear_dummy_gradients()
    assert not linear_logprob.dummy_gradients


def test_a_tied_embedding_adds_its_gradient_to_that_of_the_head():
    """With what megatron-core's DDP does when autograd has accumulated the gradients of both uses of the weight."""
    hidden, weight, targets = random_inputs(9, 31, 8, dtype=torch.float32)
    ids = torch.arange(9) % 5

    def loss(weight):
        embedded = torch.nn.functional.embedding(ids, weight)
        return fused("linear", hidden + embedded, weight, targets, vocab_start=0, valid_columns=31)[0].sum()

    plain, tied = (weight.clone().requires_grad_() for _ in range(2))
    loss(plain).backward()

    def add_to_main_grad(weight):
        if not weight.grad_added_to_main_grad or weight.zero_out_wgrad:
            weight.main_grad.add_(weight.grad)
        weight.grad = None

    tied.main_grad, tied.grad_added_to_main_grad, tied.zero_out_wgrad = torch.zeros(31, 8), False, True
    tied.register_post_accumulate_grad_hook(add_to_main_grad)
    for _ in range(2):
        loss(tied).backward()
    torch.testing.assert_close(tied.main_grad, 2 * plain.grad)
    assert not linear_logprob.dummy_gradients


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_logits_change_no_bit(dtype, monkeypatch):
    """Where they fit, the backward pass computes none of them again."""
    hidden, weight, targets = random_inputs(33, 257, 16, dtype=dtype)
    tensors = [hidden.requires_grad_(), weight.requires_grad_()]
    num_chunks, products, product = -(-257 // 7), [], linear_logprob.chunk_product

    def count_products(a, b):
        products.append(a.shape)
        return product(a, b)

    monkeypatch.setattr(linear_logprob, "chunk_product", count_products)
    found = []
    for free, in_backward in ((0, 3), (2 * 33 * 257 * 4 - 1, 3), (2 * 33 * 257 * 4, 2)):
        monkeypatch.setattr(linear_logprob, "free_bytes", lambda _, free=free: free)
        products.clear()
        results = linear_logprob_entropy(*tensors, targets, vocab_start=0, valid_columns=257)
        assert len(products) == num_chunks
        first = gradients(results, tensors)
        assert len(products) == num_chunks * (1 + in_backward)
        found.append((*(result.detach() for result in results), *first))
    for others in zip(*found, strict=True):
        assert all(torch.equal(others[0], other) for other in others[1:])


@pytest.mark.usefixtures("small_tiles")
def test_logits_are_kept_unchanged_for_a_second_backward_pass(monkeypatch):
    monkeypatch.setattr(linear_logprob, "free_bytes", lambda _: 2**40)
    hidden, weight, targets = random_inputs(9, 31, 8, dtype=torch.float32)
    logprobs, _ = linear_logprob_entropy(hidden.requires_grad_(), weight, targets, vocab_start=0, valid_columns=31)
    first, second = (torch.autograd.grad(logprobs.sum(), hidden, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("num_tokens", [1, 100, 1024, 4096, 8192, 65536])
@pytest.mark.parametrize("num_columns", [1, 1000, 32_768, 151_936, 262_144])
def test_chunks_are_few_and_wide(num_tokens, num_columns):
    columns = chunk_columns(num_tokens, num_columns, 6)
    assert columns % 256 == 0
    assert -(-num_columns // columns) <= 16
    # as narrow as that, or as the least size allows
    assert columns - 256 < max(num_columns / 16, 2**28 / (6 * num_tokens))


@pytest.mark.parametrize("op", ["linear", "logits"])
@pytest.mark.parametrize("target", [-1, 9, 30, 31])
def test_targets_that_are_no_valid_columns_are_an_error(op, target):
    hidden, weight, targets = random_inputs(4, 31, 8, dtype=torch.float32)
    targets = targets.remainder(20) + 10
    targets[2] = target
    with expect_error(RuntimeError, "vocabulary", "targets"):
        fused(op, hidden, weight, targets, vocab_start=10, valid_columns=20)


def test_logits_hold_their_gradient_after_one_backward_pass():
    hidden, weight, targets = random_inputs(9, 31, 8)
    logits = (hidden @ weight.t()).requires_grad_()
    doubled = logits * 1.0
    logprobs, entropy = logprob_entropy_(doubled, targets, vocab_start=0, valid_columns=31)
    before = doubled.detach().clone()
    logprobs.sum().backward(retain_graph=True)
    torch.testing.assert_close(doubled.detach(), logits.grad)
    assert not torch.equal(doubled.detach(), before)
    with expect_error(RuntimeError, "operation", "modified"):
        entropy.sum().backward()


@pytest.mark.parametrize("op", ["linear", "logits"])
def test_no_tokens(op):
    hidden, weight, targets = random_inputs(0, 31, 8)
    hidden.requires_grad_()
    logprobs, entropy = fused(op, hidden, weight, targets, vocab_start=0, valid_columns=31)
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.shape == entropy.shape == (0,)
    assert hidden.grad.shape == (0, 8)


def run_split(valid, options):
    """Return what both ranks get for 40 columns of which `valid` are no padding, and the gradients of the parts."""
    dist.init_process_group("gloo")
    rank, group = dist.get_rank(), dist.group.WORLD
    found = {}
    for op in ("linear", "logits"):
        hidden, weight, targets = random_inputs(9, 40, 8)
        targets %= valid
        part = weight[rank * 20 : rank * 20 + 20].clone().requires_grad_()
        hidden.requires_grad_()
        mine = min(max(valid - rank * 20, 0), 20)
        results = fused(op, hidden, part, targets, vocab_start=rank * 20, valid_columns=mine, group=group, **options)
        grad_hidden, grad_part = gradients(results, [hidden, part])
        dist.all_reduce(grad_hidden)
        grad_parts = [torch.empty_like(grad_part) for _ in range(2)]
        dist.all_gather(grad_parts, grad_part)
        other = [torch.empty_like(results[0]) for _ in range(2)]
        dist.all_gather(other, results[0].detach())
        assert torch.equal(other[0], other[1])
        found[op] = ([r.detach() for r in results], grad_hidden, torch.cat(grad_parts))
    return found


@pytest.mark.parametrize(("valid", "options"), [(33, {"softcap": 3.0, "inv_temperature": 1.3}), (18, {})], ids=str)
def test_two_ranks_agree_with_one(valid, options, tmp_path):
    """With 18 valid columns, all columns of the second rank are padding."""
    from tests.megatron.ranks import run_ranks  # needs more than torch, which tests of kernels on a GPU do without

    found = run_ranks(run_split, 2, tmp_path, valid, options)
    hidden, weight, targets = random_inputs(9, 40, 8)
    targets %= valid
    tensors = [hidden.requires_grad_(), weight.requires_grad_()]
    want = plain_scores((hidden @ weight.t())[:, :valid], targets, **options)
    want_grads = gradients(want, tensors)
    for op in ("linear", "logits"):
        results, grad_hidden, grad_weight = found[op]
        torch.testing.assert_close(results, [w.detach() for w in want], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close([grad_hidden, grad_weight], list(want_grads), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(3, 5)}, r"hidden \[t, h\] and weight \[v, h\] need one h and one dtype"),
        ({"weight": torch.zeros(7, 4, dtype=torch.bfloat16)}, "one dtype, got"),
        ({"targets": torch.zeros(3, dtype=torch.int32)}, r"targets need to be int64 of shape \[3\], got torch.int32"),
        ({"targets": torch.zeros(2, dtype=torch.int64)}, r"of shape \[3\], got torch.int64 of \[2\]"),
        ({"valid_columns": 8}, "valid_columns is 8, but this rank has 7 columns"),
        ({"vocab_start": -1}, "need at least 0, got -1 and 7"),
        ({"inv_temperature": 0.0}, "inv_temperature needs to be greater than 0, got 0.0"),
        ({"softcap": 0.0}, "softcap needs to be greater than 0, got 0.0"),
    ],
    ids=str,
)
def test_inputs_that_do_not_fit_are_refused(change, message):
    arguments = {"hidden": torch.zeros(3, 4), "weight": torch.zeros(7, 4), "targets": torch.zeros(3, dtype=torch.int64)}
    arguments |= {"vocab_start": 0, "valid_columns": 7}
    with pytest.raises(ValueError, match=message):
        linear_logprob_entropy(**(arguments | change))


def test_logits_that_are_no_matrix_are_refused():
    with expect_error(ValueError, "[t", "v]", "[3]", "logits"):
        logprob_entropy_(torch.zeros(3), torch.zeros(3, dtype=torch.int64), vocab_start=0, valid_columns=3)
