"""Learning-rate schedule, and megatron-core's overlapped communication and Adam on the CPU against the plain ones."""

import math
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from megarl.config.megatron import MegatronConfig
from megarl.config.trainer import OffloadConfig, OptimizerConfig, ParallelConfig, load_decay
from megarl.errors import ConfigError
from megarl.megatron.requests import SaveRequest
from megarl.megatron.trainer_worker import TrainerWorker
from tests.megatron.fidelity.models import TWO_DTYPES
from tests.megatron.rank_models import (
    assert_same_bits,
    gather,
    make_trainer,
    model_spec,
    own_part,
    sync_weights,
    trainer_spec,
)
from tests.megatron.ranks import run_ranks, sample
from tests.megatron.training.fused_adam import install
from tests.megatron.training.test_trainer import HALVES, TRAJECTORIES, make_request


def learning_rates(cases):
    from megarl.megatron.runtime import platform

    platform.prepare()
    from megarl.megatron.training.optimizer import make_scheduler

    rates = []
    for config, steps in cases:
        group = {}
        scheduler = make_scheduler(config, SimpleNamespace(param_groups=[group]), steps)
        rates.append([])
        for _ in range(steps):
            rates[-1].append(group["lr"])
            scheduler.step(increment=1)
    return rates


def test_no_update_has_learning_rate_zero(tmp_path):
    warm = OptimizerConfig(lr=1.0, warmup_steps=4)
    cases = [(warm, 6), (OptimizerConfig(lr=1.0, warmup_steps=4, decay="linear"), 10)]
    cases += [(OptimizerConfig(lr=1.0, decay="linear", min_lr=0.2), 4), (warm, 3)]
    constant, linear, without_warmup, short = run_ranks(learning_rates, 1, tmp_path, cases)
    assert constant == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])
    assert linear == pytest.approx([0.25, 0.5, 0.75, 1, *(n / 7 for n in (6, 5, 4, 3, 2, 1))])
    assert without_warmup == pytest.approx([1, 0.8, 0.6, 0.4])
    assert short == pytest.approx([0.25, 0.5, 0.75])


def left_linear(done):
    return 1 - done


def left_cosine(done):
    return (1 + math.cos(math.pi * done)) / 2


@pytest.mark.parametrize("warmup_steps", [0, 3])
def test_functions_of_the_decay_give_the_rates_of_megatron_core(warmup_steps, tmp_path):
    fields = {"lr": 1.0, "min_lr": 0.1, "warmup_steps": warmup_steps}
    shapes = ["linear", f"{__name__}:left_linear", "cosine", f"{__name__}:left_cosine"]
    cases = [(OptimizerConfig(**fields, decay=decay), 9) for decay in shapes]
    linear, own_linear, cosine, own_cosine = run_ranks(learning_rates, 1, tmp_path, cases)
    assert own_linear == pytest.approx(linear, rel=1e-12)
    assert own_cosine == pytest.approx(cosine, rel=1e-12)
    assert linear != cosine


def rising(done):
    return 1 + done


@pytest.mark.parametrize(
    ("decay", "problem"),
    [
        ("absent:decay", "trainer.optimizer.decay: cannot import absent"),
        (f"{__name__}:HALVES", "needs a function, got .*HALVES"),
        (f"{__name__}:rising", r"rising\(0.5\) needs to return a number from 0 to 1, got 1.5"),
        (f"{__name__}:train", r"train\(0\) raised TypeError"),
    ],
)
def test_wrong_decays_are_refused(decay, problem):
    with pytest.raises(ConfigError, match=problem):
        load_decay(decay, key="trainer.optimizer.decay")


def train(model, steps):
    """Take `steps` training steps of four updates each.

    Returns by rank: weights, gradient norms, gradient buckets, and whether the rank's last micro-batch is empty.
    """
    # without clipping: the norm is summed in another order when there are several buckets
    trainer = make_trainer(trainer_spec(model, lr=1e-3, clip_grad=0))
    # the last micro-batch of the second update is empty on one rank
    request = replace(own_part(trainer.model, make_request(range(6), range(3), max_tokens=64)), epochs=2)
    norms = [trainer.train_step(request).metrics["grad_norm"] for _ in range(steps)]
    weights = {name: tensor.detach().clone() for name, tensor in trainer.model.tensors().items()}
    buckets = max(len(chunk.bucket_groups) for chunk in trainer.ddp_chunks)
    return gather((weights, norms, buckets, not request.mini_batches[1].micro_batches[-1]))


OVERLAPPED = MegatronConfig(ddp={"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 4000})


OVERLAP_CASES = [
    # dense parameters are replicated on both ranks and experts are not: buffers of both kinds
    ("qwen3_moe", {"ep": 2}, 2, False),
    # the head adds to the gradient of the tied embedding itself
    ("qwen2", {}, 2, True),
    ("qwen2", {"pp": 2}, 4, True),
    ("qwen3", {"pp": 2, "vpp": 2}, 4, False),
    ("qwen3", {"tp": 2}, 4, False),
    ("qwen3", {"cp": 2}, 2, False),
    ("deepseek_v3", {"tp": 2, "ep": 2, "etp": 1}, 4, False),
]


@pytest.mark.parametrize(
    ("name", "sizes", "world", "fused_lm_head"), sample(OVERLAP_CASES, [*OVERLAP_CASES[:2], OVERLAP_CASES[3]])
)
def test_overlapped_communication_changes_no_weight(name, sizes, world, fused_lm_head, model_folder, tmp_path):
    fields = {"path": model_folder(name), "parallel": sizes, "fused_lm_head": fused_lm_head}
    results = [
        run_ranks(train, world, tmp_path, model_spec(**fields, megatron=megatron), 2)
        for megatron in (MegatronConfig(), OVERLAPPED)
    ]
    assert results[0][0][2] < 3 < results[1][0][2]  # an embedding that two stages share has a bucket of its own
    if "cp" not in sizes:
        assert {rank[3] for rank in results[1]} == {False, True}
    for plain, overlapped in zip(*results, strict=True):
        assert plain[1] == pytest.approx(overlapped[1], rel=1e-6)
        assert_same_bits(plain[0], overlapped[0])


def read_after_updates(model, folder):
    """Read the weights in every way that needs no forward pass, each right after a training step.

    Returns by rank: the weights, those pushed to engines, those that come back to the device after an offload, those
    of a trainer that reads a checkpoint; then the log-probabilities of the resumed trainer and of this one.
    """

    def build():
        return TrainerWorker(trainer_spec(model, lr=1e-3, clip_grad=0))

    def weights(worker):
        return {name: tensor.detach().clone() for name, tensor in worker.trainer.model.tensors().items()}

    worker = build()
    request = own_part(worker.model, make_request(range(6), range(3), max_tokens=64))
    found = []
    worker.train_step(request)
    found.append(weights(worker))
    worker.train_step(request)
    found.append(sync_weights(worker))
    worker.train_step(request)
    worker.trainer.memory.offload(OffloadConfig(optimizer=True, gradients=True))
    worker.trainer.memory.onload()
    found.append(weights(worker))
    worker.train_step(request)
    worker.begin_save(SaveRequest(folder=str(folder)))
    worker.finish_save(None)
    resumed = build()
    resumed.trainer.checkpoint.load(folder)
    found.append(weights(resumed))
    sequences = [[trajectory] for trajectory in TRAJECTORIES[:3]]
    scores = [each.model.score(sequences) for each in (resumed, worker)]
    found += [{str(i): torch.stack(of[0]) for i, of in enumerate(each)} for each in scores]
    assert_same_bits(found[-1], found[-2])
    return gather(found)


@pytest.mark.parametrize(("name", "sizes"), [("qwen3_moe", {"ep": 2}), ("qwen2", {})])
def test_weights_are_complete_wherever_they_are_read(name, sizes, model_folder, tmp_path):
    """The next forward pass would gather them, and weight sync, offloading and checkpoints do not wait for it."""
    fields = {"path": model_folder(name), "parallel": sizes}
    plain, overlapped = (
        run_ranks(
            read_after_updates, 2, tmp_path, model_spec(**fields, megatron=megatron), tmp_path / f"saved {number}"
        )
        for number, megatron in enumerate((MegatronConfig(), OVERLAPPED))
    )
    for rank_plain, rank_overlapped in zip(plain, overlapped, strict=True):
        for want, got in zip(rank_plain, rank_overlapped, strict=True):
            assert_same_bits(got, want)


def train_and_resume(path, parallel, dtype, fields, folder, fused=False, ddp=None):
    """Take two steps, with state offloaded between them.

    Returns weights, those of a trainer resumed after the first step, the share of parameters stepped on the host, and
    the dtypes of the optimizer's state.
    """
    from megarl.megatron.runtime import platform

    platform.prepare()
    patches = ExitStack()
    if fused:
        install(patches)
        patches.enter_context(patch.object(MegatronConfig, "find_te_problems", lambda _: ()))

    def build():
        model = model_spec(path, parallel, dtype=dtype, megatron=MegatronConfig(optimizer=fields, ddp=ddp or {}))
        return TrainerWorker(trainer_spec(model, lr=1e-3))

    def weights(worker):
        return {name: tensor.detach().clone() for name, tensor in worker.trainer.model.tensors().items()}

    first = build()
    before = weights(first)
    request = own_part(first.model, make_request(*HALVES, max_tokens=128))
    first.train_step(request)
    first.begin_save(SaveRequest(folder=str(folder)))
    first.finish_save(None)
    first.trainer.memory.offload(OffloadConfig(optimizer=True, gradients=True))
    first.train_step(request)
    resumed = build()
    resumed.trainer.checkpoint.load(folder)
    resumed.train_step(request)
    optimizer = first.trainer.optimizer.chained_optimizers[0].optimizer
    on_host = sum(map(torch.numel, getattr(optimizer, "cpu_copys_map_gpu_param", {})))
    assert any(not torch.equal(before[name], tensor) for name, tensor in weights(first).items())
    share = on_host / sum(p.numel() for p in optimizer.param_groups[0]["params"])
    state = next(iter(optimizer.state.values()))
    return weights(first), weights(resumed), share, {name: str(each.dtype) for name, each in state.items()}


def refused_on_rank(path):
    megatron = MegatronConfig(optimizer={"optimizer_cpu_offload": True})
    with pytest.raises(ConfigError) as error:
        make_trainer(trainer_spec(model_spec(path, dtype="bfloat16", megatron=megatron)))
    return str(error.value)


def test_adam_on_the_host_refuses_float32_parameters(model_folder, tmp_path):
    message = run_ranks(refused_on_rank, 1, tmp_path, model_folder(TWO_DTYPES))
    assert message.endswith("got float32 for model.layers.0.linear_attn.A_log, as config.json says")


def test_adam_on_the_host_is_adam(model_folder, tmp_path):
    path, results = model_folder("qwen3"), []
    for fraction in (0.0, 0.5):
        fields = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": fraction} if fraction else {}
        folder = tmp_path / str(fraction)
        results.append(run_ranks(train_and_resume, 2, tmp_path, path, ParallelConfig(), "bfloat16", fields, folder))
    (plain, _, share, _), (hosted, resumed, hosted_share, _) = results
    assert share == 0
    assert hosted_share == pytest.approx(0.5, abs=0.2)
    assert_same_bits(resumed, hosted)
    moved = max(float(tensor.float().abs().max()) for tensor in plain.values())
    difference = max(float((hosted[name].float() - tensor.float()).abs().max()) for name, tensor in plain.items())
    assert difference < 2**-8 * moved


def devices_of_steps(cases):
    """Return where the state of torch's AdamW of a parameter on device `meta` has its step count, by its options."""
    from megarl.megatron.runtime import platform

    platform.prepare()
    from megarl.megatron.checkpoint.optimizer_state import create_moments

    devices = []
    for options in cases:
        parameter = torch.nn.Parameter(torch.empty(3, device="meta"))
        optimizer = torch.optim.AdamW([parameter], **options)
        create_moments(optimizer)
        devices.append([str(optimizer.state[parameter][name].device) for name in ("step", "exp_avg")])
    return devices


def test_step_counts_are_where_torch_reads_them(tmp_path):
    """Its fused kernels read them on the device, as do steps that are recorded in a CUDA graph."""
    cases = ({}, {"fused": True}, {"capturable": True})
    found = run_ranks(devices_of_steps, 1, tmp_path, cases)
    assert found == [["cpu", "meta"], ["meta", "meta"], ["meta", "meta"]]


@pytest.mark.parametrize("name", ["qwen3", TWO_DTYPES])
def test_moments_in_bfloat16_are_resumed_bitwise(name, model_folder, tmp_path):
    fields = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}
    path, folder = model_folder(name), tmp_path / "saved"
    arguments = (path, ParallelConfig(), "bfloat16", fields, folder, True)
    trained, resumed, _, dtypes = run_ranks(train_and_resume, 2, tmp_path, *arguments)
    assert dtypes == {"exp_avg": "torch.bfloat16", "exp_avg_sq": "torch.bfloat16", "master_param": "torch.float32"}
    assert_same_bits(resumed, trained)


def test_gradients_of_two_dtypes_are_clipped_together(model_folder, tmp_path):
    """Kernels over many tensors take them to have the dtype of the first one."""
    fields = {"use_precision_aware_optimizer": True, "main_grads_dtype": "bfloat16"}
    arguments = (ParallelConfig(), "bfloat16", fields, tmp_path / "saved", True, {"grad_reduce_in_fp32": False})
    trained, resumed, _, _ = run_ranks(train_and_resume, 2, tmp_path, model_folder(TWO_DTYPES), *arguments)
    assert_same_bits(resumed, trained)
