"""All families on one rank, compared with transformers: log-probabilities, entropy bounds, gradients."""

from __future__ import annotations

import math

import pytest
import torch

from tests.megatron.fidelity.measure import measure, score_on_ranks, worst_gradient
from tests.megatron.fidelity.models import CONFIGS
from tests.megatron.fidelity.reference import LONG, SHORT, differentiate, draw, score

TOLERANCE = 1e-5


@pytest.mark.parametrize("name", CONFIGS)
def test_logprobs_and_gradients_match_transformers(name, model_folder, tmp_path):
    folder, sequences = model_folder(name), draw(SHORT, CONFIGS[name]["vocab_size"])
    want = differentiate(folder, sequences)
    got = measure(folder, sequences, tmp_path)
    for i, logprobs in enumerate(want.logprobs):
        torch.testing.assert_close(got.logprobs[i], logprobs, rtol=0, atol=TOLERANCE)
        assert (got.entropies[i] >= 0).all()
        assert (got.entropies[i] <= math.log(CONFIGS[name]["vocab_size"]) + 1e-5).all()
    assert got.loss == pytest.approx(want.loss, abs=TOLERANCE)
    difference, tensor = worst_gradient(got.gradients, want.gradients)
    assert difference <= TOLERANCE, tensor
    norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in want.gradients.values()))
    assert got.grad_norm == pytest.approx(norm, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("qwen3", {}), ("gemma2", {"world": 2, "cp": 2}), ("mixtral", {"world": 2, "tp": 2}), ("deepseek_v3", {})],
    ids=str,
)
def test_lengths_from_1_to_2048_in_one_pack(name, sizes, model_folder, tmp_path):
    folder, sequences = model_folder(name), draw(LONG, CONFIGS[name]["vocab_size"])
    got = score_on_ranks(folder, sequences, tmp_path, max_tokens=2 * sum(LONG), **sizes)
    for i, logprobs in enumerate(score(folder, sequences)):
        torch.testing.assert_close(got[i], logprobs, rtol=0, atol=TOLERANCE)
