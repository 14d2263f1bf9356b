"""Reference results from transformers: log-probabilities, values, gradients; one unpadded sequence at a time, float32.

Uses no megarl code. Results are cached for the session, since they are the same for every layout.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

SHORT = (2, 3, 5, 8, 9, 13, 21, 34, 47, 55, 72, 90)
LONG = (1, 2, 3, 17, 64, 129, 333, 777, 1025)
"""Lengths in tokens; a sequence of one token has no log-probabilities."""

Tokens = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Scores of sequences under one model, with loss and gradients."""

    scores: tuple[torch.Tensor, ...]
    """By sequence, float32: log-probabilities [T - 1] of tokens 1 to T - 1, or of a value model all values [T]."""
    loss: float
    gradients: dict[str, torch.Tensor]
    """Gradients of the loss by name on disk: one tensor per expert, a tied head as `model.embed_tokens.weight`."""


def draw(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> Tokens:
    """Draw random sequences of ids from 2, including the last id of the vocabulary; 0 is padding and 1 is EOS."""
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(2, vocab_size, length) for length in lengths]
    for sequence in sequences:
        if len(sequence) > 2:
            sequence[len(sequence) // 2] = vocab_size - 1
    return tuple(tuple(sequence.tolist()) for sequence in sequences)


@cache
def score(folder: str, sequences: Tokens) -> tuple[torch.Tensor, ...]:
    """Return log-probabilities of tokens 1 to T - 1 by sequence, float32 [T - 1]."""
    model = _load(folder)
    with torch.no_grad():
        return tuple(_logprobs(model, sequence) for sequence in sequences)


@cache
def differentiate(folder: str, sequences: Tokens) -> Reference:
    """Compute the mean negative log-likelihood of all tokens except the first of each sequence, and its gradient."""
    model = _load(folder)
    num_tokens = sum(len(sequence) - 1 for sequence in sequences)
    every, loss = [], 0.0
    for sequence in sequences:
        logprobs = _logprobs(model, sequence)
        part = -logprobs.sum() / num_tokens
        if part.requires_grad:
            part.backward()
        loss += float(part.detach())
        every.append(logprobs.detach())
    return Reference(scores=tuple(every), loss=loss, gradients=_gradients_on_disk(model))


def draw_returns(sequences: Tokens) -> list[np.ndarray]:
    """Draw the return of each token: by sequence, float32 [T]."""
    rng = np.random.default_rng(1)
    return [rng.normal(size=len(sequence)).astype(np.float32) for sequence in sequences]


@cache
def differentiate_values(folder: str, sequences: Tokens) -> Reference:
    """Compute half the mean squared error of values against `draw_returns`, and its gradient.

    The value of a token is the model's output at the token before it; the first tokens are not counted.
    """
    from transformers import AutoModelForSequenceClassification

    model = _load(folder, AutoModelForSequenceClassification)
    num_tokens = sum(len(sequence) - 1 for sequence in sequences)
    every, loss = [], 0.0
    for sequence, returns in zip(sequences, draw_returns(sequences), strict=True):
        hidden = model.model(torch.tensor(sequence)[None], use_cache=False).last_hidden_state
        values = model.score(hidden)[0, :, 0]
        part = (values[:-1] - torch.from_numpy(returns[1:])).square().sum() / 2 / num_tokens
        part.backward()
        loss += float(part.detach())
        every.append(values.detach())
    return Reference(scores=tuple(every), loss=loss, gradients=_gradients_on_disk(model))


def _load(folder: str, kind: Any = None) -> Any:
    from transformers import AutoModelForCausalLM

    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return (kind or AutoModelForCausalLM).from_pretrained(folder, dtype=torch.float32, **options).eval()


def _logprobs(model: Any, sequence: tuple[int, ...]) -> torch.Tensor:
    if len(sequence) == 1:
        return torch.zeros(0)
    ids = torch.tensor(sequence)
    logits = model(ids[None, :-1], use_cache=False).logits[0].float()
    return torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0]


def _gradients_on_disk(model: Any) -> dict[str, torch.Tensor]:
    """Return gradients by name on disk. They are saved as a model, because saving splits fused tensors."""
    with torch.no_grad():
        frozen = {name for name, parameter in model.named_parameters() if ".indexer." in name}
        for name, parameter in model.named_parameters():
            assert (parameter.grad is None) == (name in frozen), name
            if name not in frozen:
                parameter.copy_(parameter.grad)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        saved = load_file(Path(folder) / "model.safetensors")
    frozen |= {name for name in saved if name.endswith("e_score_correction_bias")}
    return {name: gradient for name, gradient in saved.items() if name not in frozen}
