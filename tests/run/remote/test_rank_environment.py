"""Environment variables of trainer ranks by GPU, and by what the user has set."""

import pytest

from megarl.run.remote.trainer_group import MAX_CONNECTIONS, rank_environment


@pytest.mark.parametrize(
    ("gpus", "want"),
    [
        (("H100",), {MAX_CONNECTIONS: "1"}),
        (("NVIDIA A100-SXM4-80GB",), {MAX_CONNECTIONS: "1"}),
        (("B200",), {}),
        (("NVIDIA GB200", "NVIDIA B200"), {}),
        (("B200", "H100"), {MAX_CONNECTIONS: "1"}),
        (("an unknown GPU",), {MAX_CONNECTIONS: "1"}),
        ((), {MAX_CONNECTIONS: "1"}),
    ],
)
def test_one_queue_before_blackwell(gpus, want, monkeypatch):
    monkeypatch.delenv(MAX_CONNECTIONS, raising=False)
    assert rank_environment("cuda", gpus) == want


def test_the_users_own_setting_wins(monkeypatch):
    monkeypatch.setenv(MAX_CONNECTIONS, "32")
    assert rank_environment("cuda", ["H100"]) == rank_environment("cuda", ["B200"]) == {MAX_CONNECTIONS: "32"}
    assert rank_environment("cpu") == {"OMP_NUM_THREADS": "1"}
