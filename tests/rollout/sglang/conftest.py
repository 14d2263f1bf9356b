"""A model that TP ranks share unevenly."""

import pytest

from tests.rollout.conftest import tiny_qwen3


@pytest.fixture(scope="session")
def uneven_dir(tmp_path_factory):
    """Model with one key-value head for both ranks and a vocabulary that needs padding: rank 1 attends to nothing."""
    folder = tmp_path_factory.mktemp("models") / "uneven"
    tiny_qwen3(folder, num_key_value_heads=1, vocab_size=252)
    return str(folder)
