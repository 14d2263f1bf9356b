"""Tokens after a push within their request, against a loop over the tokens."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megarl.batch.trajectory import find_mixed_kv


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=12))
def test_tokens_of_another_version_than_the_first_of_their_request(tokens: list[tuple[bool, int]]) -> None:
    expected, first = [], None
    for is_sampled, version in tokens:
        first = (version if first is None else first) if is_sampled else None
        expected.append(is_sampled and version != first)
    mask = np.array([is_sampled for is_sampled, _ in tokens], np.bool_)
    versions = np.array([version for _, version in tokens], np.int32)
    assert find_mixed_kv(mask, versions).tolist() == expected
