"""Transformer Engine's FusedAdam and megatron-core's Adam on the host against torch's Adam on the device.

On the CPU the stand-in for FusedAdam, with which other tests train, takes its place.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.config.trainer import ParallelConfig
from tests.megatron.rank_models import assert_same_bits
from tests.megatron.ranks import run_ranks
from tests.megatron.training import fused_adam
from tests.megatron.training.test_optimizer import train_and_resume

SHAPES = ((1,), (7,), (64, 33), (129, 257))
STEPS = 20
LR = 1e-3
OPTIONS: dict[str, Any] = {"lr": LR, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
FLOAT32_TOLERANCE = 5e-6
"""Of weights around 1 after all steps, which move them by 0.02."""


def draw_weights() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).bfloat16().float() for shape in SHAPES]


def draw_gradients() -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(shape, generator=generator) for shape in SHAPES] for _ in range(STEPS)]


def step(make: Callable[..., torch.optim.Optimizer], parameters: Sequence[Tensor], attribute: str) -> Any:
    """Return the optimizer after all steps."""
    optimizer = make(parameters, **OPTIONS)
    for gradients in draw_gradients():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            setattr(parameter, attribute, gradient.to(parameter.device))
        optimizer.step()
    return optimizer


@pytest.fixture(scope="module")
def expected() -> list[Tensor]:
    """Weights after the steps of torch's AdamW in float32 on the CPU."""
    weights = [torch.nn.Parameter(weight) for weight in draw_weights()]
    step(torch.optim.AdamW, weights, "grad")
    return [weight.detach() for weight in weights]


def fused_adam_class(device: str) -> Any:
    if device == "cpu":
        return fused_adam.FusedAdam
    reason = "needs Transformer Engine: make setup-gpu"
    return pytest.importorskip("transformer_engine.pytorch.optimizers", reason=reason).FusedAdam


@pytest.mark.parametrize(("moments", "tolerance"), [("float32", FLOAT32_TOLERANCE), ("bfloat16", 0.1 * LR * STEPS)])
def test_fused_adam_of_16_bit_parameters_is_torchs_adam(device, moments, tolerance, expected):
    parameters = [torch.nn.Parameter(weight.bfloat16().to(device)) for weight in draw_weights()]
    dtype = getattr(torch, moments)

    def make(parameters: Sequence[Tensor], **options: Any) -> Any:
        dtypes = {"exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype}
        return fused_adam_class(device)(parameters, **options, **dtypes, master_weights=True, use_decoupled_grad=True)

    optimizer = step(make, parameters, "decoupled_grad")
    for parameter, want in zip(parameters, expected, strict=True):
        state = optimizer.state[parameter]
        assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (dtype, dtype)
        torch.testing.assert_close(state["master_param"].cpu(), want, rtol=0, atol=tolerance)
        assert torch.equal(parameter.detach(), state["master_param"].bfloat16())


@pytest.mark.gpu
def test_fused_adam_of_float32_parameters_is_torchs_adam(expected):
    parameters = [torch.nn.Parameter(weight.cuda()) for weight in draw_weights()]
    step(fused_adam_class("cuda"), parameters, "grad")
    for parameter, want in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.detach().cpu(), want, rtol=0, atol=FLOAT32_TOLERANCE)


@pytest.mark.gpu
def test_adam_on_the_host_is_adam_on_the_device(model_folder, tmp_path):
    """As tests/megatron/training/test_optimizer.py on CPU ranks, where a resumed step is bitwise the same."""
    path, results = model_folder("qwen3"), []
    for fraction in (0.0, 1.0, 0.5):
        fields = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": fraction} if fraction else {}
        arguments = (path, ParallelConfig(), "bfloat16", fields, tmp_path / str(fraction))
        results.append(run_ranks(train_and_resume, 1, tmp_path, *arguments, device="cuda"))
    plain, _, share, _ = results[0]
    assert share == 0
    moved = max(float(tensor.float().abs().max()) for tensor in plain.values())
    for fraction, (hosted, resumed, share, _) in zip((1.0, 0.5), results[1:], strict=True):
        assert share == pytest.approx(fraction, abs=0.2)
        for name, tensor in plain.items():
            for other in (hosted, resumed):
                assert float((other[name].float() - tensor.float()).abs().max()) < 2**-8 * moved, name


@pytest.mark.gpu
def test_a_trainer_with_moments_in_bfloat16_is_resumed_bitwise(model_folder, tmp_path):
    pytest.importorskip("transformer_engine", reason="needs Transformer Engine: make setup-gpu")
    aware = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}
    (plain, *_), (trained, resumed, _, dtypes) = (
        run_ranks(
            train_and_resume, 1, tmp_path, model_folder("qwen3"), ParallelConfig(), "bfloat16", *of, device="cuda"
        )
        for of in (({}, tmp_path / "plain"), (aware, tmp_path / "aware"))
    )
    assert dtypes == {"exp_avg": "torch.bfloat16", "exp_avg_sq": "torch.bfloat16", "master_param": "torch.float32"}
    assert_same_bits(resumed, trained)
    largest = max(float(tensor.float().abs().max()) for tensor in plain.values())
    assert max(float((trained[name].float() - of.float()).abs().max()) for name, of in plain.items()) < 2**-7 * largest
