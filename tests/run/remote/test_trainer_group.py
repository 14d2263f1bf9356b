"""What the trainer's handle asks of the ranks, and what it knows from the results of their training steps."""

from types import SimpleNamespace

from megarl.batch.balance import QWEN2_5_7B
from megarl.cluster.placement.rank_grid import RankGrid
from megarl.config.trainer import OffloadConfig
from megarl.megatron.requests import SaveStats, TrainStats
from megarl.run.remote.trainer_group import TrainerGroup

GRID = RankGrid(tp=2)


class Ranks:
    """Two ranks that return what is set for each; logs the calls."""

    grid = GRID

    def __init__(self):
        self.calls, self.results = [], {}

    def call(self, method, argument, *, dispatch, timeout=None):
        self.calls.append(method.__name__)
        return dispatch.collect(self.results[method.__name__], GRID)

    def begin(self, method, argument, *, dispatch):
        return SimpleNamespace(result=lambda timeout=None: self.call(method, argument, dispatch=dispatch))


def stats(*is_written):
    return [TrainStats(metrics={"rank": float(i)}, num_tokens=1, is_save_written=w) for i, w in enumerate(is_written)]


def test_ranks_that_train_are_not_asked_whether_a_save_is_written():
    ranks = Ranks()
    offload = OffloadConfig(optimizer=False, gradients=False, weights=False)
    trainer = TrainerGroup(ranks, cost=QWEN2_5_7B, offload_config=offload)
    ranks.results["begin_save"] = [SaveStats(staging_bytes=1, bytes=1, seconds=0.0)] * 2
    ranks.results["train_step"] = stats(True, True)
    trainer.train_step(None)
    trainer.begin_save(None)
    ranks.results["is_save_written"] = [True, False]  # what an earlier step has reported does not count
    assert not trainer.is_save_written()
    for is_written in ((True, False), (False, True)):
        ranks.results["train_step"] = stats(*is_written)
        assert trainer.begin_train_step(None).result().metrics == {"rank": 0.0}
        assert not trainer.is_save_written()
    ranks.results["train_step"] = stats(True, True)
    trainer.train_step(None)
    assert trainer.is_save_written()
    assert ranks.calls.count("is_save_written") == 1
    assert not trainer.is_save_written()  # a step without training, such as one that a limit has skipped
    assert ranks.calls.count("is_save_written") == 2
