"""The old log-probabilities of a step's first update are those of its own forward passes."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest

from megarl.config.algorithms.group_baseline import GrpoConfig
from megarl.config.algorithms.policy import RolloutIsConfig
from megarl.config.trainer import ParallelConfig
from megarl.megatron.losses.policy import ClippedLoss, PolicyLoss
from megarl.megatron.requests import ForwardRequest
from megarl.megatron.trainer_worker import TrainerWorker
from megarl.workers.payload import LocalPayload
from tests.megatron.rank_models import assert_same_bits, gather, own_part
from tests.megatron.ranks import run_ranks
from tests.megatron.training.test_trainer import ALL_INDICES, HALVES, make_request
from tests.megatron.training.test_update_guard import RankTrainer

LOSS = PolicyLoss(
    token_loss=ClippedLoss(clip_low=0.2, clip_high=0.2),
    algorithm=GrpoConfig(kl_loss=None, rollout_is=RolloutIsConfig(kind="token_tis")),
    length_norm=1,
)


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

    one_update = replace(make_request(ALL_INDICES), loss=LOSS)
    reusing, separate, given = (RankTrainer(path, parallel, dtype=dtype) for _ in range(3))
    metrics, counts = step(reusing, one_update)
    assert counts == (0, 1)
    with patch.object(trainer_module._Step, "reuses_forward", False):
        want, counts = step(separate, one_update)
    assert counts == (1, 1)
    assert metrics == want
    assert_same_bits(reusing.state(), separate.state())

    # the column is in the request if something needed it earlier, as `kl_reward` does
    worker = object.__new__(TrainerWorker)
    worker._trainer, worker._model = given.trainer, given.trainer.model
    (batch,) = one_update.mini_batches
    forward = ForwardRequest(samples=batch.samples, payloads=one_update.payloads, max_tokens_per_micro_batch=256)
    columns = gather(worker.logprobs(own_part(worker._model, forward)))
    payload = LocalPayload([column for column in columns if column])
    metrics, counts = step(given, replace(one_update, columns={"old_logprobs": payload}))
    assert counts == (0, 1)
    assert metrics == want
    assert_same_bits(given.state(), separate.state())

    two_updates = replace(make_request(*HALVES), loss=LOSS)
    metrics, counts = step(reusing, two_updates)
    assert counts == (1, 2)
    with patch.object(trainer_module._Step, "reuses_forward", False):
        want, counts = step(separate, two_updates)
    assert counts == (2, 2)
    assert metrics.keys() == want.keys()
    for name, value in want.items():  # sums of the mismatch are in another order
        assert metrics[name] == (pytest.approx(value, rel=1e-12) if "mismatch" in name else value), name
    assert_same_bits(reusing.state(), separate.state())
    assert step(reusing, replace(one_update, epochs=2))[1] == (1, 2)


@pytest.mark.parametrize(("world", "sizes", "dtype"), [(1, {}, "bfloat16"), (2, {"pp": 2}, "float32")], ids=str)
def test_a_step_equals_one_with_separate_forward_passes(world, sizes, dtype, model_folder, tmp_path):
    run_ranks(compare_on_rank, world, tmp_path, model_folder("qwen3"), ParallelConfig(**sizes), dtype)
