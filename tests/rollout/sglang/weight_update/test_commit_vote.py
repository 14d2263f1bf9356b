"""Commit votes of two TP ranks, in two threads with a process group each."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megarl.rollout.sglang.weight_update import weight_loader
from megarl.rollout.sglang.weight_update.commit_vote import CommitVote
from megarl.rollout.sglang.weight_update.messages import checked_path, dump_command, read_reply, reply_path
from tests.rollout.sglang.weight_update.test_weight_loader import Engine, command
from tests.time_limits import UNREACHED_SECONDS

__all__ = ["command"]


@pytest.fixture
def both():
    """Runs a function of (rank, group) in both ranks and returns their results."""
    store = dist.HashStore()

    def run(rank, work):
        return work(rank, dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=UNREACHED_SECONDS)))

    def run_both(work):
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(run, (0, 1), (work, work)))

    return run_both


@pytest.mark.parametrize("votes", [(True, True), (True, False), (False, True), (False, False)])
def test_vote_succeeds_only_if_all_ranks_are_ready(both, tmp_path, votes):
    def all_ready(rank, group):
        return CommitVote(group, tmp_path / str(rank)).all_ready(votes[rank])

    assert both(all_ready) == [all(votes)] * 2
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}


@pytest.mark.parametrize("ready", [True, False])
def test_single_rank_does_not_wait(tmp_path, ready):
    assert CommitVote(None, tmp_path / "mark").all_ready(ready) is ready
    assert not any(tmp_path.iterdir())


def test_rank_votes_even_if_it_cannot_create_the_checked_file(both, tmp_path):
    assert both(lambda rank, group: CommitVote(group, tmp_path / "missing" / str(rank)).all_ready(True)) == [True, True]


@pytest.fixture
def execute(both, monkeypatch):
    """Executes one command per rank on separate models; returns both models and replies."""
    here = threading.local()
    monkeypatch.setattr(weight_loader, "_tp_rank", lambda: here.rank)
    monkeypatch.setattr(weight_loader, "_tp_group", lambda: here.group)

    def run(commands):
        models = [Engine(), Engine()]

        def load(rank, group):
            here.rank, here.group = rank, group
            weight_loader.load(models[rank], [(commands[rank], torch.empty(0))])
            return read_reply(reply_path(commands[rank]["reply"], rank))

        return models, both(load)

    return run


@pytest.mark.parametrize("problem", ["path", "num_bytes", "slots"])
def test_no_rank_writes_if_one_cannot(execute, command, problem):
    """Also if that rank fails before it votes."""
    good = command(a=torch.ones(4))
    bad = {**good["bucket"], **{"path": {"path": "/gone"}, "num_bytes": {"num_bytes": 10**7}, "slots": {}}[problem]}
    if problem == "slots":
        del bad["slots"]
    models, replies = execute([good, good | {"bucket": bad}])
    assert [reply.wrote for reply in replies] == [False, False]
    assert replies[0].error is None
    assert replies[1].error
    assert all((model.a == 0).all() for model in models)


def test_all_ranks_write_if_all_are_ready(execute, command):
    good = command(a=torch.ones(4))
    models, replies = execute([good, good])
    assert [(reply.wrote, reply.error) for reply in replies] == [(True, None)] * 2
    assert all((model.a == 1).all() for model in models)
    assert checked_path(good["reply"], 0).exists()


def test_commands_that_write_nothing_have_no_vote(execute, tmp_path):
    dump = dump_command(str(tmp_path)) | {"reply": str(tmp_path / "reply")}
    _, replies = execute([dump, dump])
    assert [(reply.wrote, reply.error) for reply in replies] == [(False, None)] * 2
    assert not checked_path(dump["reply"], 0).exists()
