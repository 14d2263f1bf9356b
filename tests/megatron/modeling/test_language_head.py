"""The language head: scores and gradients against log_softmax, the tokens that reach it, its memory."""

import json
import sys
from contextlib import redirect_stdout
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.config.trainer import ParallelConfig
from tests.kernels.test_logprob_entropy import plain_scores
from tests.megatron.rank_models import gather, make_model, model_spec
from tests.megatron.ranks import run_ranks
from tests.megatron.training.test_trainer import TRAJECTORIES
from tests.time_limits import HANG_SECONDS

TOKENS, HIDDEN, PADDED_VOCAB = 12, 16, 40
SCORED = [1, 4, 5, 10]
FACTORS = torch.linspace(-1, 1, TOKENS)
"""Of log-probabilities in the loss; those of entropies are in the opposite order."""


def inputs(vocab: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states [t, h], weight [padded vocabulary, h] and targets [t]."""
    g = torch.Generator().manual_seed(0)
    hidden_th = torch.randn(TOKENS, HIDDEN, generator=g).to(dtype)
    weight_vh = torch.randn(PADDED_VOCAB, HIDDEN, generator=g).to(dtype)
    return hidden_th, weight_vh, torch.randint(vocab, (TOKENS,), generator=g)


def head_on_rank(
    parallel: ParallelConfig, dtype: torch.dtype, vocab: int, options: dict[str, Any], softcap: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log-probabilities, entropies and the full gradients of hidden states and weight."""
    from megarl.megatron.runtime import parallel_state, platform

    platform.prepare()
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megarl.megatron.modeling.gpt_model import HeadOptions, LanguageHead

    state = parallel_state.init_parallel_state(parallel, seed=0, timeout=timedelta(seconds=HANG_SECONDS))
    state.activate()
    rank, tp = dist.get_rank(), parallel.tp
    sizes = {"num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": tp, "tensor_model_parallel_size": tp}
    dtypes = {"params_dtype": dtype, "bf16": dtype == torch.bfloat16}
    config = TransformerConfig(**sizes, **dtypes, sequence_parallel=parallel.uses_sequence_parallel)
    fields = {"init_method": lambda w: w, "bias": False, "tp_group": state.groups.tp}
    layer = ColumnParallelLinear(HIDDEN, PADDED_VOCAB, config=config, **fields)
    head = LanguageHead(layer, HeadOptions(**options), vocab_size=vocab, softcap=softcap)
    device = platform.device()
    hidden_th, weight_vh, target_ids_t = (x.to(device) for x in inputs(vocab, dtype))
    with torch.no_grad():
        head.weight.copy_(weight_vh.chunk(tp)[rank])
    own_th = hidden_th.chunk(tp)[rank].clone() if parallel.uses_sequence_parallel else hidden_th
    hidden_s1h, bias = head(own_th[:, None].requires_grad_())
    assert bias is None
    hidden_s1h.retain_grad()
    scores = head.score(hidden_s1h, target_ids_t, torch.tensor(SCORED, device=device))
    factors = FACTORS.to(device)
    ((scores.logprobs_T * factors).sum() + (scores.entropy_T * factors.flip(0)).sum()).backward()
    hidden_grads, weight_grads = zip(*gather((hidden_s1h.grad[:, 0], head.weight.grad)), strict=True)
    hidden_grad = torch.cat(hidden_grads) if parallel.uses_sequence_parallel else hidden_grads[-1]
    return scores.logprobs_T.detach(), scores.entropy_T.detach(), hidden_grad, torch.cat(weight_grads)


def brute_force(dtype: torch.dtype, vocab: int, temperature: float, softcap: float | None) -> tuple[Tensor, ...]:
    """Return what `head_on_rank` returns, from log_softmax in float64 over the vocabulary without padding."""
    hidden_th, weight_vh, target_ids_t = inputs(vocab, dtype)
    hidden_th, weight_vh = hidden_th.double().requires_grad_(), weight_vh.double().requires_grad_()
    logits_tv = hidden_th @ weight_vh[:vocab].t()
    logprobs_t, entropy_t = plain_scores(logits_tv, target_ids_t, inv_temperature=1 / temperature, softcap=softcap)
    scored_t = torch.zeros(TOKENS, dtype=torch.bool)
    scored_t[SCORED] = True
    logprobs_t, entropy_t = (torch.where(scored_t, x_t, 0.0) for x_t in (logprobs_t, entropy_t))
    ((logprobs_t * FACTORS).sum() + (entropy_t * FACTORS.flip(0)).sum()).backward()
    return logprobs_t.detach(), entropy_t.detach(), hidden_th.grad, weight_vh.grad


LAYOUTS = {"tp2": ParallelConfig(tp=2), "tp2 without sequence parallel": ParallelConfig(tp=2, sequence_parallel=False)}


def heads_on_rank(parallel: ParallelConfig, cases: list[tuple[Any, ...]]) -> list[tuple[Tensor, ...]]:
    return [head_on_rank(parallel, *case) for case in cases]


def test_one_rank_scores_as_log_softmax(device: str, tmp_path: Any) -> None:
    check_scores(ParallelConfig(), tmp_path, device=device)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensor_parallel_ranks_score_as_log_softmax(layout: str, tmp_path: Any) -> None:
    check_scores(LAYOUTS[layout], tmp_path)


def check_scores(parallel: ParallelConfig, tmp_path: Any, *, device: str = "cpu") -> None:
    """Compare on 29 tokens, of which the second of two ranks has 9, and on 15, of which it has none."""
    cases = [
        (torch.float32, vocab, {"temperature": temperature, "fused": fused, "fp32": False}, softcap)
        for fused in (False, True)
        for vocab, temperature, softcap in ((29, 1.0, None), (15, 0.7, 6.0))
    ]
    found = run_ranks(heads_on_rank, parallel.tp, tmp_path, parallel, cases, device=device)
    for got, (dtype, vocab, options, softcap) in zip(found, cases, strict=True):
        want = brute_force(dtype, vocab, options["temperature"], softcap)
        for got_x, want_x in zip(got, want, strict=True):
            torch.testing.assert_close(got_x.double(), want_x, rtol=1e-4, atol=2e-5)


def test_logits_of_a_bfloat16_head_are_rounded_unless_it_is_fused_or_float32(tmp_path: Any) -> None:
    want = brute_force(torch.bfloat16, 29, 1.0, None)
    bounds = {(False, False): (2e-3, 0.1), (False, True): (0.0, 1e-5), (True, False): (0.0, 1e-5)}
    options = [{"temperature": 1.0, "fused": fused, "fp32": fp32} for fused, fp32 in bounds]
    cases = [(torch.bfloat16, 29, each, None) for each in options]
    found = run_ranks(heads_on_rank, 1, tmp_path, ParallelConfig(), cases)
    for (kind, (low, high)), got in zip(bounds.items(), found, strict=True):
        assert low <= float((got[0] - want[0]).abs().max()) < high, kind
        assert got[0].dtype == got[1].dtype == torch.float32
        for gradient, want_gradient in zip(got[2:], want[2:], strict=True):
            assert gradient.dtype == torch.bfloat16
            assert (gradient - want_gradient).abs().max() < 0.02 * want_gradient.abs().max(), kind


def rows_of_rank(path: str, parallel: ParallelConfig) -> list[tuple[list[int], int, int]]:
    """Return (rows that reach the head, sampled tokens, tokens) of each rank: sampled ones, all, and an empty pack."""
    model = make_model(model_spec(path, parallel))
    head = model.chunks[-1].module.output_layer
    rows, score = [], head.score_rows

    def count_then_score(hidden_kh: Tensor, *arguments: Any) -> Any:
        rows.append(len(hidden_kh))
        return score(hidden_kh, *arguments)

    head.score_rows = count_then_score
    packs = [model.pack(TRAJECTORIES), model.pack(TRAJECTORIES, score_all=True), model.pack([])]
    logprobs, *_ = model.logprobs(packs)
    sampled_t = packs[0].batch.mask_T
    assert bool((logprobs[sampled_t] < 0).all())
    assert not logprobs[~sampled_t].any()
    return gather((rows, int(sampled_t.sum()), len(packs[0].index_t)))


@pytest.mark.parametrize("layout", ["one rank", "cp2"])
def test_only_tokens_in_the_loss_mask_reach_the_head(layout: str, qwen3_path: str, tmp_path: Any) -> None:
    parallel = ParallelConfig(cp=2) if layout == "cp2" else ParallelConfig()
    ranks = run_ranks(rows_of_rank, parallel.cp, tmp_path, qwen3_path, parallel)
    assert sum(num_sampled for _, num_sampled, _ in ranks) == sum(int(t.loss_mask.sum()) for t in TRAJECTORIES)
    for rows, num_sampled, num_tokens in ranks:
        assert rows == [num_sampled, num_tokens, 1]
        assert 0 < num_sampled < num_tokens


def run_benchmark() -> tuple[dict[str, float], float]:
    """Return what `python -m benchmarks.kernels.head_memory --json` prints, and the peak of a product in bfloat16.

    The latter is also relative to the logits. It is 0.5 where the processor multiplies bfloat16, and else 1.5: the
    product is computed in float32 first.
    """
    from benchmarks.kernels.head_memory import main
    from benchmarks.kernels.measure import peak_allocated_bytes

    sys.argv = ["head_memory", "--json"]
    with redirect_stdout(StringIO()) as out:
        assert main() == 0
    printed: dict[str, float] = json.loads(out.getvalue())
    tokens, vocab = int(printed["tokens"]), int(printed["vocab"])
    hidden_th, weight_vh = (torch.ones(n, int(printed["hidden"]), dtype=torch.bfloat16) for n in (tokens, vocab))
    product = peak_allocated_bytes(lambda: hidden_th @ weight_vh.t())
    return printed, product / (4 * tokens * vocab)


def test_peak_memory_of_a_head_is_the_planned_one(device: str, tmp_path: Any) -> None:
    """In the ratios of a real model: tokens, hidden size and vocabulary as 1 : 1 : 37."""
    on_cpu = device == "cpu"
    memory, product = run_ranks(run_benchmark, 1, tmp_path, device=device)
    assert memory["hidden"] == memory["tokens"] == 4096 / (8 if on_cpu else 1)
    # CPUs copy what they multiply to float32: a chunk of the gradient of logits, and one of the weight
    copies = {"plain": 0.1 + product - 0.5, "plain_fp32": 0.1, "fused": 2.5 / 16}
    for kind, on_a_cpu in copies.items():
        measured, planned = memory[f"peak_over_logits_{kind}"], memory[f"planned_over_logits_{kind}"]
        assert 0.9 * planned <= measured <= 1.02 * planned + (on_a_cpu if on_cpu else 0), (kind, measured, planned)
