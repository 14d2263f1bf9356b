"""Two TP ranks in two threads, with a process group each."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megarl.rollout.sglang.weight_update import weight_loader
from megarl.rollout.sglang.weight_update.commit_vote import Ballot
from megarl.rollout.sglang.weight_update.messages import dump_order, mark_path, read_reply, reply_path
from tests.rollout.sglang.weight_update.test_weight_loader import Engine, order

__all__ = ["order"]


@pytest.fixture
def both():
    """Runs a function of (rank, group) in both ranks: their results."""
    store = dist.HashStore()

    def run(rank, work):
        return work(rank, dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=10)))

    def run_both(work):
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(run, (0, 1), (work, work)))

    return run_both


@pytest.mark.parametrize("votes", [(True, True), (True, False), (False, True), (False, False)])
def test_ranks_agree_only_if_all_are_ready(both, tmp_path, votes):
    def vote(rank, group):
        return Ballot(group, tmp_path / str(rank)).agree(votes[rank])

    assert both(vote) == [all(votes)] * 2
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}


@pytest.mark.parametrize("ready", [True, False])
def test_a_rank_on_its_own_waits_for_nobody(tmp_path, ready):
    assert Ballot(None, tmp_path / "mark").agree(ready) is ready
    assert not any(tmp_path.iterdir())


def test_a_mark_that_cannot_be_made_does_not_keep_a_rank_from_voting(both, tmp_path):
    assert both(lambda rank, group: Ballot(group, tmp_path / "missing" / str(rank)).agree(True)) == [True, True]


@pytest.fixture
def execute(both, monkeypatch):
    """Gives each rank an order and a model of its own: both models and replies."""
    here = threading.local()
    monkeypatch.setattr(weight_loader, "_tp_rank", lambda: here.rank)
    monkeypatch.setattr(weight_loader, "_tp_group", lambda: here.group)

    def run(orders):
        models = [Engine(), Engine()]

        def load(rank, group):
            here.rank, here.group = rank, group
            weight_loader.load(models[rank], [(orders[rank], torch.empty(0))])
            return read_reply(reply_path(orders[rank]["reply"], rank))

        return models, both(load)

    return run


@pytest.mark.parametrize("problem", ["path", "num_bytes", "slots"])
def test_a_rank_that_cannot_write_keeps_the_other_from_writing(execute, order, problem):
    """Also one that fails before it can vote."""
    good = order(a=torch.ones(4))
    bad = {**good["bucket"], **{"path": {"path": "/gone"}, "num_bytes": {"num_bytes": 10**7}, "slots": {}}[problem]}
    if problem == "slots":
        del bad["slots"]
    models, replies = execute([good, good | {"bucket": bad}])
    assert [reply.wrote for reply in replies] == [False, False]
    assert replies[0].error is None
    assert replies[1].error
    assert all((model.a == 0).all() for model in models)


def test_both_write_what_both_can(execute, order):
    good = order(a=torch.ones(4))
    models, replies = execute([good, good])
    assert [(reply.wrote, reply.error) for reply in replies] == [(True, None)] * 2
    assert all((model.a == 1).all() for model in models)
    assert mark_path(good["reply"], 0).exists()


def test_reading_takes_no_vote(execute, tmp_path):
    asked = dump_order(str(tmp_path)) | {"reply": str(tmp_path / "reply")}
    _, replies = execute([asked, asked])
    assert [(reply.wrote, reply.error) for reply in replies] == [(False, None)] * 2
    assert not mark_path(asked["reply"], 0).exists()
