"""Data, reward and control of examples/real-model; its model needs a download."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

EXAMPLE = Path(__file__).parents[2] / "examples/real-model"


@pytest.fixture(scope="module")
def reward() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE / "reward.py"))


def test_held_out_prompts_share_no_word_with_the_training_data(tmp_path: Path) -> None:
    runpy.run_path(str(EXAMPLE / "make_data.py"))["main"](tmp_path)
    train, heldout = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "heldout")
    )
    assert (len(train), len(heldout)) == (1770, 240)
    words = [{word for row in rows for word in row["words"].split()} for rows in (train, heldout)]
    assert not words[0] & words[1]
    for rows in (train, heldout):
        assert len({frozenset(row["words"].split()) for row in rows}) == len(rows)
        assert all(set(row["words"].split()) <= set(row["prompt"][-1]["content"][:-1].split()) for row in rows)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The lamp stood on the old piano.", 1.0),
        (" The lamp's light fell on a piano and the lamp. ", 1.0),
        ("The lamps stood on the old piano.", 0.0),
        ("The lamp stood on the old piano", 0.0),
        ("The lamp stood on the old piano. It was red.", 0.0),
        ("the lamp stood on the old piano.", 0.0),
        ("A lamp and a piano.", 0.0),
        ("The lamp " + "really " * 13 + "lit the piano.", 0.0),
    ],
)
def test_the_reward_is_for_one_sentence_of_bounded_length_with_both_words(
    reward: dict[str, Any], text: str, expected: float
) -> None:
    assert reward["sentence"](None, text, {"words": "lamp piano"}) == expected


def test_the_control_permutes_the_rewards_of_a_group(reward: dict[str, Any]) -> None:
    sums = torch.zeros(8)
    for index in range(200):
        texts = ["The lamp stood on the old piano.", "The piano and the lamp were both red."] + [f"{index}"] * 6
        rewards = reward["shuffled"]([None] * 8, texts, {"words": "lamp piano"})
        assert sorted(rewards) == [0.0] * 6 + [1.0] * 2
        assert rewards == reward["shuffled"]([None] * 8, texts, {"words": "lamp piano"})
        sums += torch.tensor(rewards)
    assert sums.max() < 0.25 * 200 + 5 * (0.25 * 0.75 * 200) ** 0.5  # 5 standard deviations above equal chances
    assert sums.min() > 0.25 * 200 - 5 * (0.25 * 0.75 * 200) ** 0.5


def test_gguf_rows_give_the_attention_of_llama_cpp() -> None:
    """llama.cpp rotates the row pairs (2 i, 2 i + 1), transformers (i, i + size / 2): both give the same scores."""
    interleave_halves = runpy.run_path(str(EXAMPLE / "make_model.py"))["interleave_halves"]
    heads, size, hidden, position = 3, 8, 16, 5.0
    gguf = [torch.randn(heads * size, hidden, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    x = torch.randn(2, hidden, generator=torch.Generator().manual_seed(2))
    angles = position * 10000.0 ** (-torch.arange(0, size, 2) / size)

    def rotated_pairs(weight: torch.Tensor) -> torch.Tensor:
        pairs = (x @ weight.T).reshape(2, heads, size // 2, 2)
        turn = torch.polar(torch.ones(size // 2), angles)
        rotated = torch.view_as_complex(pairs[1].contiguous()) * turn  # the second token, at `position`
        return torch.stack([pairs[0].flatten(1), torch.view_as_real(rotated).flatten(1)])

    query, key = map(rotated_pairs, gguf)
    expected = torch.einsum("hs,hs->h", query[1], key[0])

    query, key = (
        (x @ interleave_halves(weight, heads).T).reshape(1, 2, heads, size).transpose(1, 2) for weight in gguf
    )
    both = torch.stack([torch.zeros(size // 2), angles])
    cos, sin = (torch.cat([part, part], -1)[None] for part in (both.cos(), both.sin()))
    query, key = apply_rotary_pos_emb(query, key, cos, sin)
    assert torch.allclose((query[0, :, 1] * key[0, :, 0]).sum(-1), expected, atol=1e-4)
