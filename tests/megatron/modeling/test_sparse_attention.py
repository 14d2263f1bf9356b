"""The keys that an indexer selects, compared with plain loops: packs of several lengths, equal scores."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from megarl.megatron.families.attention import Indexer, LatentAttention, Rope
from megarl.megatron.modeling.packed_seq import describe_pack
from megarl.megatron.modeling.sparse_attention import KeyIndexer

LENGTHS = (1, 3, 4, 7, 8, 12, 16, 20)
HIDDEN, LATENT, ROTATED = 6, 5, 4


def make_indexer(top_k: int, *, interleaved: bool) -> KeyIndexer:
    """Return an indexer whose weights and inputs are small integers, so that scores are equal up to rounding."""
    torch.manual_seed(0)
    indexer = Indexer(num_heads=2, head_dim=6, top_k=top_k, interleaved_rope=interleaved)
    attention = LatentAttention(
        hidden_size=HIDDEN,
        num_heads=2,
        q_lora_rank=LATENT,
        kv_lora_rank=4,
        qk_nope_head_dim=4,
        qk_rope_head_dim=ROTATED,
        v_head_dim=4,
        rope=Rope(theta=10_000, max_positions=64),
        indexer=indexer,
    )
    config = SimpleNamespace(
        params_dtype=torch.float32, perform_initialization=False, init_method=None, sequence_parallel=False
    )
    module = KeyIndexer(config, attention, SimpleNamespace(tp=None, cp=None))
    for parameter in module.parameters():
        parameter.copy_(torch.randint(-1, 2, parameter.shape))
    return module


def rotate(vector: torch.Tensor, position: int, *, interleaved: bool) -> torch.Tensor:
    out = vector.clone()
    for pair in range(ROTATED // 2):
        i, j = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + ROTATED // 2)
        angle = torch.tensor(position * 10_000 ** (-2 * pair / ROTATED))
        out[i] = vector[i] * angle.cos() - vector[j] * angle.sin()
        out[j] = vector[j] * angle.cos() + vector[i] * angle.sin()
    return out


def scores_of(module: KeyIndexer, hidden: torch.Tensor, latent: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """Return the scores of one sequence, [queries, keys]."""
    length = len(hidden)
    scores = torch.zeros(length, length)
    for q, k in itertools.product(range(length), repeat=2):
        key = rotate(module.k_norm(module.linear_wk.weight @ hidden[k]), k, interleaved=interleaved)
        heads = (module.linear_wq_b.weight @ latent[q]).view(2, 6)
        for head, weight in zip(heads, module.linear_weights_proj.weight @ hidden[q], strict=True):
            scores[q, k] += weight * torch.relu(rotate(head, q, interleaved=interleaved) @ key) / 12**0.5
    return scores


def expected(scores: torch.Tensor, top_k: int) -> torch.Tensor:
    chosen = torch.zeros(scores.shape, dtype=torch.bool)
    for q in range(len(scores)):
        best = sorted(range(q + 1), key=lambda k, q=q: (-float(scores[q, k]), k))[:top_k]
        chosen[q, best] = True
    return chosen


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("top_k", [1, 4, 8])
def test_selected_keys_match_plain_loops(top_k: int, interleaved: bool) -> None:
    module = make_indexer(top_k, interleaved=interleaved)
    starts = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)
    hidden = torch.randint(-1, 2, (int(starts[-1]), HIDDEN)).float()
    latent = torch.randint(-1, 2, (int(starts[-1]), LATENT)).float()
    pack = describe_pack(starts, device=torch.device("cpu"), for_torch=True)
    masks = module(hidden[:, None], latent, pack)
    for start, end in itertools.pairwise(starts.tolist()):
        scores = scores_of(module, hidden[start:end], latent[start:end], interleaved=interleaved)
        row, mask = next(
            (group.key_index_nL[:, 0].tolist().index(start), mask)
            for group, mask in zip(pack.groups, masks, strict=True)
            if start in group.key_index_nL[:, 0]
        )
        want = expected(scores, top_k)
        if mask is None:
            assert want.equal(torch.ones_like(want).tril())
            continue
        got = mask[row, 0, : end - start, : end - start]
        assert got.sum(1).tolist() == [min(q + 1, top_k) for q in range(end - start)]
        # scores that are equal up to rounding may be selected in another order
        torch.testing.assert_close((scores * got).sum(1), (scores * want).sum(1))


def test_equal_scores_select_the_earlier_keys() -> None:
    module = make_indexer(4, interleaved=False)
    module.linear_weights_proj.weight.zero_()
    starts = torch.tensor([0, 11], dtype=torch.int32)
    (mask,) = module(
        torch.randn(11, 1, HIDDEN),
        torch.randn(11, LATENT),
        describe_pack(starts, device=torch.device("cpu"), for_torch=True),
    )
    assert mask is not None
    assert [row.nonzero()[:, 0].tolist() for row in mask[0, 0]] == [list(range(min(q + 1, 4))) for q in range(11)]


def test_short_sequences_need_no_index() -> None:
    module = make_indexer(8, interleaved=False)
    starts = torch.tensor([0, 8, 11], dtype=torch.int32)
    pack = describe_pack(starts, device=torch.device("cpu"), for_torch=True)
    module.linear_wk = None  # is not called
    assert module(torch.randn(11, 1, HIDDEN), torch.randn(11, LATENT), pack) == [None, None]
