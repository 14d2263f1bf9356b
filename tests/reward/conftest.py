from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from megarl.batch.trajectory import Prompt, Trajectory
from megarl.config.reward import RewardsConfig
from megarl.reward.reward_scorer import RewardScorer


def decode(token_ids: Sequence[int]) -> str:
    """Decode token ids, which are code points in these tests."""
    return "".join(map(chr, token_ids))


def make_trajectory(completion: str, prompt: str = "Q?", finish_reason: str = "stop") -> Trajectory:
    tokens = [ord(c) for c in prompt + completion]
    mask = np.arange(len(tokens)) >= len(prompt)
    return Trajectory(
        prompt_id="train.jsonl:7",
        group_id=0,
        token_ids=np.array(tokens, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.zeros(len(tokens), dtype=np.float32),
        policy_versions=np.where(mask, 0, -1).astype(np.int32),
        finish_reason=finish_reason,
    )


def make_scorer(**terms: Any) -> RewardScorer:
    """Return a scorer with these terms, by name."""
    return RewardScorer(RewardsConfig.model_validate({"terms": terms}), decode)


@pytest.fixture
def prompt() -> Prompt:
    return Prompt(
        prompt_id="train.jsonl:7", text="Q?", token_ids=(81, 63), row={"answer": "72", "bonus": 0.5}, answer="72"
    )
