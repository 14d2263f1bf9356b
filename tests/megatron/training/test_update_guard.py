"""Updates that are refused: nothing of them stays but the dump, and whoever never saw the batch is where the run is."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import MethodType

import pyarrow.parquet as pq
import pytest
import torch

from megarl.config.limits import LimitConfig
from megarl.config.trainer import OptimizerConfig, ParallelConfig
from megarl.errors import LimitError
from megarl.megatron.requests import Guard, ModelSpec, TrainerSpec, split_by_dp
from megarl.megatron.training.metric_sums import MetricSums
from megarl.placement.rank_grid import RankGrid
from tests.megatron.ranks import run_ranks
from tests.megatron.training.test_trainer import HALVES, TRAJECTORIES, make_work

BAD = 5
"""The trajectory whose advantage is NaN."""

LAYOUTS = {"dp2": {}, "tp2": {"tp": 2}, "pp2": {"pp": 2}}


def spoilt(work, number, value=math.nan):
    """The same with another advantage of trajectory `number`."""
    return replace(
        work,
        mini_batches=tuple(
            replace(
                batch,
                samples=tuple(
                    replace(s, scalars={"advantages": value}) if s.index == number else s for s in batch.samples
                ),
            )
            for batch in work.mini_batches
        ),
    )


def guarded(work, **guard):
    return replace(work, guard=Guard(**guard))


class Trainee:
    """A trainer in the process of a rank, and what can be seen of it."""

    def __init__(self, path, parallel, *, dtype="float32", **optimizer):
        import torch.distributed as dist

        from megarl.megatron.runtime import platform

        platform.prepare()
        from megarl.megatron.training.trainer import MegatronTrainer

        spec = ModelSpec(model_path=path, dtype=dtype, parallel=parallel)
        config = OptimizerConfig(**{"lr": 1e-3, **optimizer})
        self.trainer = MegatronTrainer(TrainerSpec(model=spec, optimizer=config, optimizer_steps=10))
        self.grid, self.rank = RankGrid.of(parallel, dist.get_world_size()), dist.get_rank()

    def step(self, work):
        """Metrics, where this rank answers."""
        return self.trainer.train_step(split_by_dp(work, self.grid)[self.rank]).metrics

    def state(self):
        """Copies of the weights, and of all that the optimizer holds."""
        optimizer = self.trainer._optimizer
        out = {name: tensor.clone() for name, tensor in self.trainer.rank.tensors().items()}
        params = [p for group in optimizer.param_groups for p in group["params"]]
        out |= {f"main {i}": p.detach().clone() for i, p in enumerate(params)}
        of = [part.optimizer.state for part in optimizer.chained_optimizers]
        for i, p in enumerate(params):
            for key, value in next((state[p] for state in of if p in state), {}).items():
                out[f"{key} {i}"] = torch.as_tensor(value).clone()
        return out


def assert_same(got, want):
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name


def refuse_and_go_on(path, parallel, folder):
    """On a rank: a batch that is refused and a clean one, beside a trainer that sees the clean one alone."""
    import torch.distributed as dist

    clean, bad = make_work(HALVES[1]), guarded(spoilt(make_work(HALVES[0]), BAD), not_finite="skip", dump_folder=folder)
    never, saw = Trainee(path, parallel), Trainee(path, parallel)
    for each in (never, saw):
        each.step(make_work(HALVES[0]))  # so that the optimizer has a state to keep
    before = saw.state()
    assert any(name.startswith("exp_avg") for name in before)
    refused = saw.step(bad)
    assert_same(saw.state(), before)
    want, got = never.step(clean), saw.step(clean)
    assert got == want
    assert_same(saw.state(), never.state())
    # both attempts of the first, and one more
    assert (never.trainer._scheduler.num_steps, saw.trainer._scheduler.num_steps) == (2, 3)
    with pytest.raises(LimitError) as error:
        saw.step(replace(bad, guard=replace(bad.guard, not_finite="stop")))
    assert_same(saw.state(), never.state())
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (refused, str(error.value)))
    return everyone[saw.grid.output_rank(0)][0], [text for _, text in everyone]


@pytest.fixture(scope="module")
def path(model_folder):
    return model_folder("qwen3")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_that_is_not_finite_leaves_nothing_but_its_dump(layout, path, tmp_path):
    folder = tmp_path / "dumps"
    parallel = ParallelConfig(**LAYOUTS[layout])
    metrics, texts = run_ranks(refuse_and_go_on, 2, tmp_path, path, parallel, str(folder))
    assert (metrics["updates"], metrics["skipped/not_finite"], metrics["skipped/grad_norm"]) == (0, 1, 0)
    assert "loss" not in metrics
    assert "grad_norm" not in metrics
    assert metrics["mismatch/logprob_abs_max"] > 0
    assert len(set(texts)) == 1
    assert texts[0].startswith("the loss of mini-batch 1 of 1 is not finite, on rank ")
    assert texts[0].endswith(f"; the batch is in {folder / 'update-1'}")
    tables = sorted((folder / "update-1").glob("*.parquet"))
    assert len(tables) == (2 if layout == "dp2" else 1)
    rows = [row for table in tables for row in pq.read_table(table).to_pylist()]
    assert sorted(int(row["prompt_id"]) for row in rows) == list(HALVES[0])
    for row in rows:
        told = TRAJECTORIES[int(row["prompt_id"])]
        assert row["token_ids"] == told.token_ids.tolist()
        assert row["logprobs"] == told.logprobs.tolist()
        assert math.isnan(row["advantages"]) == (row["prompt_id"] == str(BAD))
        assert all(x < 0 for x in row["model_logprobs"][1:])
    said = [json.loads(table.with_suffix(".json").read_text()) for table in tables]
    (lost,) = [bad for summary in said for bad in summary["not_finite"]]
    assert (lost["prompt_id"], lost["fields"]) == (str(BAD), ["advantages"])
    micro_batches = [each for summary in said for each in summary["micro_batches"]]
    (bad,) = [each for each in micro_batches if not each["loss_is_finite"]]
    assert str(BAD) in bad["prompt_ids"]
    assert {summary["what"] for summary in said} == {texts[0].partition(";")[0]}


def refuse_by_norm(path, parallel):
    """On a rank: two mini-batches whose gradients differ, and limits between their norms and beyond."""
    strong = spoilt(make_work(*HALVES), HALVES[1][0], value=50.0)

    def step(work):
        trainee = Trainee(path, parallel)
        return trainee.step(work), trainee.state()

    def limited(action, most):
        return guarded(strong, grad_norm=LimitConfig(max=most, action=action))

    free, free_state = step(strong)
    weak, weak_state = step(make_work(HALVES[0]))
    small, large = weak["grad_norm"], free["grad_norm_max"]
    assert small < large
    assert free["grad_norm"] == pytest.approx((small + large) / 2)
    some, some_state = step(limited("skip", (small + large) / 2))
    assert_same(some_state, weak_state)
    assert (some["updates"], some["skipped/grad_norm"]) == (1, 1)
    assert (some["grad_norm"], some["grad_norm_max"], some["loss"]) == (small, large, weak["loss"])
    for unheard in (limited("skip", large), limited("warn", small / 2)):
        metrics, state = step(unheard)
        assert metrics == free
        assert_same(state, free_state)
    trainee = Trainee(path, parallel)
    with pytest.raises(LimitError, match=r"grad_norm of mini-batch 2 of 2 = \S+ passed limits.grad_norm = "):
        trainee.step(limited("stop", (small + large) / 2))
    assert_same(trainee.state(), weak_state)
    none = Trainee(path, parallel)
    before = none.state()
    metrics = none.step(replace(limited("skip", small / 2), epochs=2))
    assert (metrics["updates"], metrics["skipped/grad_norm"]) == (0, 4)
    assert metrics["grad_norm_max"] > small
    assert_same(none.state(), before)


def test_a_gradient_past_the_limit_leaves_out_its_update_alone(path, tmp_path):
    run_ranks(refuse_by_norm, 1, tmp_path, path, ParallelConfig())


def refuse_by_mismatch(path, parallel, folder):
    """On a rank: the engine said -5 of every token, which is not what the model says."""
    work = make_work(*HALVES)
    trainee = Trainee(path, parallel)
    before = trainee.state()

    def step(dump_folder=folder, **limit):
        return trainee.step(guarded(work, mismatch=LimitConfig(**limit), dump_folder=dump_folder))

    metrics = step(max=1e-3, action="skip")
    assert_same(trainee.state(), before)
    assert trainee.trainer._scheduler.num_steps == 2
    if trainee.trainer.rank.is_last:
        assert metrics["mismatch/logprob_abs_max"] > 1e-3
        assert metrics["mismatch/kl"] > 0
    assert (metrics["updates"], metrics["skipped/mismatch"]) == (0, 2)
    with pytest.raises(LimitError) as error:
        step(max=1e-3, action="stop")
    assert_same(trainee.state(), before)
    assert "passed limits.logprob_abs_max = 0.001: trainer and engine disagree about the log-" in str(error.value)
    assert str(error.value).startswith("mismatch/logprob_abs_max = ")
    with pytest.raises(LimitError, match=r"sampled token; the batch could not be written to /dev/null/dumps/mismatch$"):
        step(dump_folder="/dev/null/dumps", max=1e-3, action="stop")
    assert step(max=1e-3, action="warn")["updates"] == 2
    assert step(max=1e3, action="stop")["updates"] == 2


def test_engines_that_disagree_leave_out_the_whole_step(path, tmp_path):
    folder = tmp_path / "dumps"
    run_ranks(refuse_by_mismatch, 2, tmp_path, path, ParallelConfig(pp=2), str(folder))
    (table,) = (folder / "mismatch").glob("*.parquet")
    assert len(pq.read_table(table)) == len(TRAJECTORIES)


def update_as_megatron_core(trainer, batch, packs, loss, metrics, watch):
    """An update by megatron-core's own `step`."""
    for chunk in trainer._ddp:
        chunk.zero_grad_buffer()
    trainer._optimizer.zero_grad()
    losses = trainer._accumulate(packs, loss, batch.denominators, metrics)
    _, grad_norm, _ = trainer._optimizer.step()
    assert watch.allows_update(batch, losses, grad_norm)
    trainer._scheduler.step(increment=1)
    return metrics


def step_both_ways(path, parallel, variants):
    for variant in variants:
        ours, reference = Trainee(path, parallel, **variant), Trainee(path, parallel, **variant)
        reference.trainer._try_update = MethodType(update_as_megatron_core, reference.trainer)
        for _ in range(2):
            assert ours.step(make_work(*HALVES)) == reference.step(make_work(*HALVES)), variant
            assert_same(ours.state(), reference.state())


VARIANTS = [
    {"clip_grad": clip_grad, "distributed": distributed, "dtype": dtype}
    for clip_grad, distributed, dtype in ((0.05, True, "float32"), (0.0, False, "float32"), (0.05, True, "bfloat16"))
]


def test_an_unwatched_step_is_that_of_megatron_core_bit_for_bit(path, tmp_path):
    run_ranks(step_both_ways, 2, tmp_path, path, ParallelConfig(), VARIANTS)


def reduce_on_rank():
    import torch.distributed as dist

    dist.init_process_group("gloo")
    metrics, rank = MetricSums(), dist.get_rank()
    for name, values in {
        "a": (1.0, math.nan),
        "b": (math.nan, 1.0),
        "c": (-math.inf, -3.0),
        "d": (2.0, math.inf),
    }.items():
        metrics.maximum(name, torch.tensor(values[rank]))
    return metrics.reduce(dist.group.WORLD)


def test_a_maximum_over_ranks_keeps_nan(tmp_path):
    got = run_ranks(reduce_on_rank, 2, tmp_path)
    assert math.isnan(got["a"])
    assert math.isnan(got["b"])
    assert (got["c"], got["d"]) == (-3.0, math.inf)
