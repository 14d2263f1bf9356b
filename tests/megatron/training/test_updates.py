"""Updates: rejected ones change no state and are dumped; others are megatron-core's, and reuse their forward passes."""

import json
import math
from dataclasses import replace
from types import MethodType
from unittest.mock import patch

import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist

from megarl.cluster.workers.dispatch import LocalPayload
from megarl.config.limits import LimitConfig
from megarl.config.policy import RolloutIsConfig
from megarl.config.trainer import ParallelConfig
from megarl.errors import LimitError
from megarl.megatron.requests import MISMATCH_METRICS, ForwardRequest, UpdateGuardSpec
from megarl.megatron.trainer_worker import TrainerWorker
from megarl.megatron.training.metric_sums import DeviceMetrics, MetricSums, read_metrics
from tests.errors import expect_error
from tests.megatron import rank_models
from tests.megatron.rank_models import assert_same_bits, gather, model_spec, train_step, trainer_spec
from tests.megatron.ranks import run_ranks, sample
from tests.megatron.training.test_trainer import ADVANTAGES, ALL_INDICES, HALVES, TRAJECTORIES, make_request

NAN_INDEX = 5
"""Index of the trajectory whose advantage is NaN."""

LAYOUTS = {"dp2": {}, "tp2": {"tp": 2}, "pp2": {"pp": 2}}


def with_advantage(number, value):
    """Return the advantages, of which that of trajectory `number` is another."""
    return [value if i == number else advantage for i, advantage in enumerate(ADVANTAGES)]


def with_guard(request, **guard):
    return replace(request, guard=UpdateGuardSpec(**guard))


class RankTrainer:
    """A trainer on one rank, with access to its complete state."""

    def __init__(self, path, parallel, *, dtype="float32", **optimizer):
        self.trainer = rank_models.make_trainer(
            trainer_spec(model_spec(path, parallel, dtype=dtype), **{"lr": 1e-3, **optimizer})
        )

    def step(self, request):
        return train_step(self.trainer, request)

    def state(self):
        """Return copies of the weights, main parameters and optimizer state."""
        optimizer = self.trainer.optimizer
        out = {name: tensor.clone() for name, tensor in self.trainer.model.tensors().items()}
        params = [p for group in optimizer.param_groups for p in group["params"]]
        out |= {f"main {i}": p.detach().clone() for i, p in enumerate(params)}
        of = [part.optimizer.state for part in optimizer.chained_optimizers]
        for i, p in enumerate(params):
            for key, value in next((state[p] for state in of if p in state), {}).items():
                out[f"{key} {i}"] = torch.as_tensor(value).clone()
        return out


def reject_and_continue(path, parallel, folder):
    """Train on a rejected batch, then a clean one; compare with a trainer that sees only the clean one."""
    clean, bad = make_request(HALVES[1]), make_request(HALVES[0], advantages=with_advantage(NAN_INDEX, math.nan))
    bad = with_guard(bad, not_finite="skip", dump_folder=folder)
    baseline, guarded_trainer = RankTrainer(path, parallel), RankTrainer(path, parallel)
    for each in (baseline, guarded_trainer):
        each.step(make_request(HALVES[0]))  # so that the optimizer has state
    before = guarded_trainer.state()
    assert any(name.startswith("exp_avg") for name in before)
    rejected_metrics = guarded_trainer.step(bad)
    assert_same_bits(guarded_trainer.state(), before)
    want, got = baseline.step(clean), guarded_trainer.step(clean)
    assert got == want
    assert_same_bits(guarded_trainer.state(), baseline.state())
    # rejected updates advance the scheduler too
    assert (baseline.trainer.scheduler.num_steps, guarded_trainer.trainer.scheduler.num_steps) == (2, 3)
    with pytest.raises(LimitError) as error:
        guarded_trainer.step(replace(bad, guard=replace(bad.guard, not_finite="stop")))
    assert_same_bits(guarded_trainer.state(), baseline.state())
    return rejected_metrics, gather(str(error.value))


@pytest.mark.parametrize("layout", sample(LAYOUTS, ["dp2", "pp2"]))
def test_rejected_non_finite_batch_is_dumped_and_changes_no_state(layout, path, tmp_path):
    folder = tmp_path / "dumps"
    parallel = ParallelConfig(**LAYOUTS[layout])
    metrics, texts = run_ranks(reject_and_continue, 2, tmp_path, path, parallel, str(folder))
    assert (metrics["updates"], metrics["skipped/not_finite"], metrics["skipped/grad_norm"]) == (0, 1, 0)
    assert not metrics.keys() & {"loss", "grad_norm"}
    assert metrics["train_infer_mismatch/logprob_abs_max"] > 0
    assert len(set(texts)) == 1
    assert texts[0].startswith("the loss of mini-batch 1 of 1 is not finite, on rank ")
    assert texts[0].endswith(f"; the batch is in {folder / 'update-1'}")
    tables = sorted((folder / "update-1").glob("*.parquet"))
    assert len(tables) == (2 if layout == "dp2" else 1)
    rows = [row for table in tables for row in pq.read_table(table).to_pylist()]
    assert sorted(int(row["prompt_id"]) for row in rows) == list(HALVES[0])
    for row in rows:
        trajectory = TRAJECTORIES[int(row["prompt_id"])]
        assert row["token_ids"] == trajectory.token_ids.tolist()
        assert row["logprobs"] == trajectory.logprobs.tolist()
        assert math.isnan(row["advantages"]) == (row["prompt_id"] == str(NAN_INDEX))
        assert all(x < 0 for x in row["model_logprobs"][1:])
    summaries = [json.loads(table.with_suffix(".json").read_text()) for table in tables]
    (non_finite,) = [bad for summary in summaries for bad in summary["not_finite"]]
    assert (non_finite["prompt_id"], non_finite["fields"]) == (str(NAN_INDEX), ["advantages"])
    micro_batches = [each for summary in summaries for each in summary["micro_batches"]]
    (bad,) = [each for each in micro_batches if not each["loss_is_finite"]]
    assert str(NAN_INDEX) in bad["prompt_ids"]
    assert {summary["what"] for summary in summaries} == {texts[0].partition(";")[0]}


def reject_by_grad_norm(path, parallel):
    """Train on two mini-batches of different gradient norm, with limits below, between and above the norms."""
    strong = make_request(*HALVES, advantages=with_advantage(HALVES[1][0], 50.0))

    def step(request):
        rank_trainer = RankTrainer(path, parallel)
        return rank_trainer.step(request), rank_trainer.state()

    def limited(action, most):
        return with_guard(strong, grad_norm=LimitConfig(max=most, action=action))

    free, free_state = step(strong)
    weak, weak_state = step(make_request(HALVES[0]))
    small, large = weak["grad_norm"], free["grad_norm_max"]
    assert small < large
    assert free["grad_norm"] == pytest.approx((small + large) / 2)
    some, some_state = step(limited("skip", (small + large) / 2))
    assert_same_bits(some_state, weak_state)
    assert (some["updates"], some["skipped/grad_norm"]) == (1, 1)
    assert (some["grad_norm"], some["grad_norm_max"], some["loss"]) == (small, large, weak["loss"])
    for not_violated in (limited("skip", large), limited("warn", small / 2)):
        metrics, state = step(not_violated)
        assert metrics == free
        assert_same_bits(state, free_state)
    rank_trainer = RankTrainer(path, parallel)
    with expect_error(LimitError, "grad_norm", "2", "2 =", "limits.grad_norm ="):
        rank_trainer.step(limited("stop", (small + large) / 2))
    assert_same_bits(rank_trainer.state(), weak_state)
    none = RankTrainer(path, parallel)
    before = none.state()
    metrics = none.step(replace(limited("skip", small / 2), epochs=2))
    assert (metrics["updates"], metrics["skipped/grad_norm"]) == (0, 4)
    assert metrics["grad_norm_max"] > small
    assert_same_bits(none.state(), before)


def test_grad_norm_limit_skips_only_the_violating_update(path, tmp_path):
    run_ranks(reject_by_grad_norm, 1, tmp_path, path, ParallelConfig())


def reject_by_mismatch(path, parallel, folder, mini_batches):
    """Train with engine log-probabilities of -5 for all tokens, far from those of the model."""
    request, num_updates = make_request(*mini_batches), len(mini_batches)
    rank_trainer = RankTrainer(path, parallel)
    before = rank_trainer.state()

    def step(dump_folder=folder, key="logprob_abs_max", **limit):
        return rank_trainer.step(with_guard(request, mismatch={key: LimitConfig(**limit)}, dump_folder=dump_folder))

    metrics = step(max=1e-3, action="skip")
    assert_same_bits(rank_trainer.state(), before)
    assert rank_trainer.trainer.scheduler.num_steps == num_updates
    assert not metrics.keys() & {"loss", "entropy", "policy/ratio", "grad_norm"}
    assert metrics["train_infer_mismatch/logprob_abs_max"] > 1e-3
    assert metrics["train_infer_mismatch/kl"] > 0
    assert (metrics["updates"], metrics["skipped/mismatch"]) == (0, num_updates)
    with pytest.raises(LimitError) as error:
        step(max=1e-3, action="stop")
    assert_same_bits(rank_trainer.state(), before)
    assert "passed limits.logprob_abs_max = 0.001: trainer and engine disagree about the log-" in str(error.value)
    assert str(error.value).startswith("train_infer_mismatch/logprob_abs_max = ")
    with expect_error(LimitError, "/dev/null/dumps/mismatch"):
        step(dump_folder="/dev/null/dumps", max=1e-3, action="stop")
    for key in MISMATCH_METRICS:
        assert step(key=key, max=1e-3, action="skip")["skipped/mismatch"] == num_updates
    assert step(max=1e-3, action="warn")["updates"] == num_updates
    assert step(max=1e3, action="stop")["updates"] == num_updates


@pytest.mark.parametrize("mini_batches", [HALVES, (ALL_INDICES,)], ids=["two updates", "one update"])
def test_logprob_mismatch_skips_all_updates_of_the_step(mini_batches, path, tmp_path):
    """The mismatch is known after the forward passes of the first update."""
    folder = tmp_path / "dumps"
    run_ranks(reject_by_mismatch, 2, tmp_path, path, ParallelConfig(pp=2), str(folder), mini_batches)
    (table,) = (folder / "mismatch").glob("*.parquet")
    assert len(pq.read_table(table)) == len(TRAJECTORIES)


def update_as_megatron_core(trainer, step, batch, packs, *, reuses_forward):
    """Update with megatron-core's own `optimizer.step()`."""
    for chunk in trainer.ddp_chunks:
        chunk.zero_grad_buffer()
    trainer.optimizer.zero_grad()
    losses = trainer.accumulate_gradients(step, batch, packs, step.metrics, reuses_forward=reuses_forward)
    _, grad_norm, _ = trainer.optimizer.step()
    with patch("megarl.megatron.training.update_guard.gradient_norm", lambda squares: grad_norm):
        assert step.guard.check_update(batch, losses, torch.zeros(1)) == grad_norm
    trainer.scheduler.step(increment=1)


def compare_with_megatron_core(path, parallel, variants):
    for variant in variants:
        ours, reference = RankTrainer(path, parallel, **variant), RankTrainer(path, parallel, **variant)
        reference.trainer.try_update = MethodType(update_as_megatron_core, reference.trainer)
        for _ in range(2):
            assert ours.step(make_request(*HALVES)) == reference.step(make_request(*HALVES)), variant
            assert_same_bits(ours.state(), reference.state())


VARIANTS = [{"clip_grad": 0.05}, {"clip_grad": 0.0, "distributed": False}, {"clip_grad": 0.05, "dtype": "bfloat16"}]


def test_unguarded_step_is_bitwise_equal_to_megatron_core(path, tmp_path):
    run_ranks(compare_with_megatron_core, 2, tmp_path, path, ParallelConfig(), VARIANTS)


@pytest.mark.slow
def test_gradient_norm_of_experts_is_bitwise_equal_to_megatron_core(model_folder, tmp_path):
    """Experts have an optimizer of their own."""
    variants, parallel = [{"distributed": distributed} for distributed in (True, False)], ParallelConfig(ep=2)
    run_ranks(compare_with_megatron_core, 2, tmp_path, model_folder("qwen3_moe"), parallel, variants)


def reduce_on_rank():
    dist.init_process_group("gloo")
    metrics, rank = MetricSums(), dist.get_rank()
    of_ranks = {"a": (1.0, math.nan), "b": (math.nan, 1.0), "c": (-math.inf, -3.0), "d": (2.0, math.inf)}
    for name, values in of_ranks.items():
        metrics.update_max(name, torch.tensor(values[rank]))
    metrics.add("e", torch.tensor(rank + 0.5))
    values, mask = torch.tensor([1e-3, 0.5, 1e9]), torch.tensor([True, True, rank == 1])
    metrics.add_values("f", values, mask)
    metrics.add_values("g", values, torch.zeros(3, dtype=torch.bool))
    return read_metrics(metrics.reduce(dist.group.WORLD, count=2), DeviceMetrics())


def test_maximum_over_ranks_propagates_nan(tmp_path):
    got = run_ranks(reduce_on_rank, 2, tmp_path)
    assert math.isnan(got["a"])
    assert math.isnan(got["b"])
    assert (got["c"], got["d"], got["e"]) == (-3.0, math.inf, 1.0)
    assert (got["f"], got["g"]) == (math.inf, 0.0)  # quantiles above the last edge, and of nothing


def with_correction(request):
    corrected = request.loss.algorithm.model_copy(update={"rollout_is": RolloutIsConfig(kind="token_tis")})
    return replace(request, loss=replace(request.loss, algorithm=corrected))


def compare_on_rank(path, parallel, dtype):
    """Compare steps with the same steps after separate forward passes, and count forward passes."""
    from megarl.megatron.training import trainer as trainer_module

    def step(rank_trainer, request):
        """Return the metrics of the step and the numbers of forward passes without and with gradients."""
        model, calls = rank_trainer.trainer.model, []
        forward_backward = type(model).forward_backward

        def count(self, *args, ddp_chunks=None):
            calls.append(ddp_chunks is not None)
            return forward_backward(self, *args, ddp_chunks=ddp_chunks)

        with patch.object(type(model), "forward_backward", count):
            metrics = rank_trainer.step(request)
        return metrics, (calls.count(False), calls.count(True))

    def without_reuse(rank_trainer, request):
        with patch.object(trainer_module.Step, "reuses_forward", False):
            return step(rank_trainer, request)

    one_update = with_correction(make_request(ALL_INDICES))
    reusing, separate, given = (RankTrainer(path, parallel, dtype=dtype) for _ in range(3))
    metrics, counts = step(reusing, one_update)
    assert counts == (0, 1)
    want, counts = without_reuse(separate, one_update)
    assert counts == (1, 1)
    assert metrics == want
    assert_same_bits(reusing.state(), separate.state())

    # the column is in the request if something needed it earlier, as `kl_reward` does
    worker = object.__new__(TrainerWorker)
    worker.trainer, worker.model = given.trainer, given.trainer.model
    (batch,) = one_update.mini_batches
    forward = ForwardRequest(samples=batch.samples, payloads=one_update.payloads, max_tokens_per_micro_batch=256)
    columns = gather(worker.logprobs(rank_models.own_part(worker.model, forward)))
    payload = LocalPayload([column for column in columns if column])
    metrics, counts = step(given, replace(one_update, columns={"old_logprobs": payload}))
    assert counts == (0, 1)
    assert metrics == want
    assert_same_bits(given.state(), separate.state())

    two_updates = with_correction(make_request(*HALVES))
    metrics, counts = step(reusing, two_updates)
    assert counts == (1, 2)
    want, counts = without_reuse(separate, two_updates)
    assert counts == (2, 2)
    assert metrics.keys() == want.keys()
    for name, value in want.items():  # sums of the mismatch are in another order
        assert metrics[name] == (pytest.approx(value, rel=1e-12) if "mismatch" in name else value), name
    assert_same_bits(reusing.state(), separate.state())
    assert step(reusing, replace(one_update, epochs=2))[1] == (1, 2)


@pytest.mark.parametrize(("world", "sizes", "dtype"), [(1, {}, "bfloat16"), (2, {"pp": 2}, "float32")], ids=str)
def test_a_step_equals_one_with_separate_forward_passes(world, sizes, dtype, model_folder, tmp_path):
    run_ranks(compare_on_rank, world, tmp_path, model_folder("qwen3"), ParallelConfig(**sizes), dtype)
