"""Optimizers other than Adam under megatron-core, against the same classes of torch on full parameters."""

import re
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from megarl.config.megatron import MegatronConfig
from megarl.config.trainer import OffloadConfig, OptimizerConfig, ParallelConfig
from megarl.errors import ConfigError
from megarl.megatron.requests import SaveRequest
from megarl.megatron.trainer_worker import TrainerWorker
from megarl.megatron.training.optimizer_class import load_optimizer
from tests.megatron.rank_models import (
    assert_same_bits,
    gather,
    model_spec,
    own_part,
    sync_weights,
    trained_parameters,
    trainer_spec,
)
from tests.megatron.ranks import run_ranks, sample
from tests.megatron.training import outside_optimizers
from tests.megatron.training.test_trainer import HALVES, make_request

OUTSIDE = outside_optimizers.__name__
LION = {"type": f"{OUTSIDE}:Lion", "kwargs": {"betas": (0.8, 0.95)}}
SGD = {"type": "sgd", "kwargs": {"momentum": 0.9, "nesterov": True}}
SCHEDULE = {"lr": 1e-2, "warmup_steps": 3, "weight_decay": 0.1, "clip_grad": 0.5}


def weights_of(worker):
    return {name: tensor.detach().clone() for name, tensor in worker.trainer.model.tensors().items()}


def record_steps(trainer):
    """Return a list that gets, before each step, the gradient of the ranges that this rank steps, NaN elsewhere."""
    from megarl.megatron.checkpoint.optimizer_state import stepped_parameters

    recorded, step = [], trainer.optimizer.step_with_ready_grads

    def record_then_step():
        parameters = trained_parameters(trainer.model)
        names = {id(parameter): name for name, parameter in parameters.items()}
        gradients = {name: torch.full([parameter.numel()], torch.nan) for name, parameter in parameters.items()}
        for member in trainer.optimizer.chained_optimizers:
            for parameter, main, start in stepped_parameters(member):
                gradients[names[id(parameter)]][start : start + main.numel()] = main.grad.flatten()
        recorded.append(gradients)
        return step()

    trainer.optimizer.step_with_ready_grads = record_then_step
    return recorded


def train_on_rank(model, optimizer, steps):
    """Return by rank: weights before and after, gradients of each step, weights of full tensors, and freed bytes."""
    worker = TrainerWorker(trainer_spec(model, **optimizer))
    before, recorded = weights_of(worker), record_steps(worker.trainer)
    request = own_part(worker.model, make_request(*HALVES, max_tokens=128))
    for _ in range(steps):
        worker.train_step(request)
    after, pushed = weights_of(worker), sync_weights(worker)
    freed = worker.trainer.memory.offload(OffloadConfig(optimizer=True, gradients=False)).device_bytes
    return gather((before, after, recorded, pushed, freed))


def step_full_parameters(before, gradients, make):
    """Step full parameters with a class of torch, at learning rates of a warm-up, without decay of vectors."""
    parameters = {name: torch.nn.Parameter(before[name].clone()) for name in gradients[0]}
    groups = [
        {"params": [p for p in parameters.values() if p.dim() == 1], "weight_decay": 0.0},
        {"params": [p for p in parameters.values() if p.dim() > 1], "weight_decay": SCHEDULE["weight_decay"]},
    ]
    optimizer = make(groups)
    for number, of_step in enumerate(gradients):
        for group in optimizer.param_groups:
            group["lr"] = SCHEDULE["lr"] * min(1, (number + 1) / SCHEDULE["warmup_steps"])
        for name, parameter in parameters.items():
            parameter.grad = of_step[name].view(parameter.shape)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


@pytest.mark.parametrize(
    ("optimizer", "make"),
    [
        (LION, lambda groups: outside_optimizers.Lion(groups, lr=1.0, betas=(0.8, 0.95))),
        (SGD, lambda groups: torch.optim.SGD(groups, lr=1.0, momentum=0.9, nesterov=True)),
    ],
    ids=["outside", "sgd"],
)
def test_ranks_together_step_as_the_class_does_on_full_parameters(optimizer, make, model_folder, tmp_path):
    spec = model_spec(model_folder("qwen3"))
    ranks = run_ranks(train_on_rank, 2, tmp_path, spec, SCHEDULE | optimizer, 2)
    # each value is stepped by one of two ranks
    gradients = [
        {name: torch.where(ours.isnan(), theirs[name], ours) for name, ours in mine.items()}
        for mine, theirs in zip(ranks[0][2], ranks[1][2], strict=True)
    ]
    assert any(each.isnan().any() for each in ranks[0][2][0].values())
    assert not any(each.isnan().any() for of_step in gradients for each in of_step.values())
    assert len(gradients) == 4
    want = step_full_parameters(ranks[0][0], gradients, make)
    for before, after, *_ in ranks:
        stepped = {name: after[name] for name in want}
        assert any(not torch.equal(before[name], stepped[name]) for name in want)
        assert_same_bits(stepped, want)


def test_the_example_of_the_documentation_is_that_class():
    page = (Path(__file__).parents[3] / "docs/configuration.md").read_text()
    (block,) = (each for each in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class Lion" in each)
    example = {}
    exec(block, example)
    generator = torch.Generator().manual_seed(0)
    values, *gradients = torch.randn(4, 9, generator=generator)
    found = []
    for make in (example["Lion"], outside_optimizers.Lion):
        parameter = torch.nn.Parameter(values.clone())
        optimizer = make([parameter], lr=0.1, weight_decay=0.2)
        for gradient in gradients:
            parameter.grad = gradient
            optimizer.step()
        found.append(parameter.detach())
    assert torch.equal(*found)


LAYOUTS = [
    ("qwen3", {"tp": 2}, 4, {}),
    ("qwen3", {"pp": 2}, 2, {"distributed": False}),
    ("qwen3_moe", {"ep": 2}, 2, {}),
]


@pytest.mark.parametrize(("name", "sizes", "world", "fields"), LAYOUTS)
def test_layouts_step_alike(name, sizes, world, fields, model_folder, tmp_path):
    path, optimizer = model_folder(name), SCHEDULE | SGD
    (alone,) = run_ranks(train_on_rank, 1, tmp_path, model_spec(path), optimizer, 2)
    ranks = run_ranks(train_on_rank, world, tmp_path, model_spec(path, sizes), optimizer | fields, 2)
    got, want = ranks[0][3], alone[3]
    assert got.keys() == want.keys()
    for each, value in want.items():
        assert torch.allclose(got[each], value, rtol=1e-4, atol=1e-6), each
    # one tensor of momentum for each trained value; parameters in float32 are weights, which stay
    assert alone[4] == 4 * sum(each.numel() for each in alone[2][0].values())


def resume_on_rank(path, dtype, optimizer, folder, asynchronous):
    """Save before the first step, after it and after the next, with an offload between them, and train on.

    Returns the weights at the end, and those of trainers that resume from each save and of the same trainer again.
    """

    def build():
        return TrainerWorker(trainer_spec(model_spec(path, dtype=dtype), lr=1e-2, weight_decay=0.1, **optimizer))

    worker = build()
    request = own_part(worker.model, make_request(*HALVES, max_tokens=128))
    for number in range(3):
        worker.begin_save(SaveRequest(folder=f"{folder}/{number}", asynchronous=asynchronous))
        worker.finish_save(None)
        worker.trainer.memory.offload(OffloadConfig(optimizer=True, gradients=True))
        worker.train_step(request)
    resumed = []
    for number in range(3):
        other = build()
        other.trainer.checkpoint.load(folder / str(number))
        for _ in range(number, 3):
            other.train_step(request)
        resumed.append(weights_of(other))
    trained = weights_of(worker)
    worker.trainer.checkpoint.load(folder / "0")  # its state is that of three steps
    for _ in range(3):
        worker.train_step(request)
    return trained, [*resumed, weights_of(worker)]


RESUMED = {
    "lion": (LION, "bfloat16", True),
    "dampened sgd": (SGD | {"kwargs": {"momentum": 0.9, "dampening": 0.5}}, "float32", False),
    "plain sgd": ({"type": "sgd"}, "bfloat16", False),
    "replaced state": ({"type": f"{OUTSIDE}:Mean"}, "bfloat16", True),
    "steps of groups": ({"type": f"{OUTSIDE}:CountsInGroups", "distributed": False}, "float32", True),
    "radam": ({"type": "torch.optim:RAdam"}, "float32", False),
    "whole tensors": ({"type": f"{OUTSIDE}:WholeNorm", "distributed": False}, "float32", False),
}
"""Optimizers, the dtype of the model, and whether checkpoints are written in the background."""


@pytest.mark.parametrize("name", sample(RESUMED, ["lion", "replaced state", "steps of groups", "whole tensors"]))
def test_training_resumes_bitwise(name, model_folder, tmp_path):
    optimizer, dtype, asynchronous = RESUMED[name]
    for number in range(3):
        (tmp_path / str(number)).mkdir()
    arguments = (model_folder("qwen3"), dtype, optimizer, tmp_path, asynchronous)
    trained, resumed = run_ranks(resume_on_rank, 2, tmp_path, *arguments)
    for each in resumed:
        assert_same_bits(each, trained)


def load_on_rank(path, sizes, optimizer, folder, steps):
    """Resume and train on; return full tensors of the weights."""
    worker = TrainerWorker(trainer_spec(model_spec(path, sizes), lr=1e-2, weight_decay=0.1, **optimizer))
    worker.trainer.checkpoint.load(folder)
    request = own_part(worker.model, make_request(*HALVES, max_tokens=128))
    for _ in range(steps):
        worker.train_step(request)
    return sync_weights(worker)


def test_state_is_resumed_in_another_layout(model_folder, tmp_path):
    for number in range(3):
        (tmp_path / str(number)).mkdir()
    path, optimizer = model_folder("qwen3"), {"type": f"{OUTSIDE}:Mean"}
    run_ranks(resume_on_rank, 2, tmp_path, path, "float32", optimizer, tmp_path, False)
    same, tensors, alone = (
        run_ranks(load_on_rank, world, tmp_path, path, sizes, optimizer | fields, tmp_path / "2", 1)
        for world, sizes, fields in ((2, {}, {}), (2, {"tp": 2}, {}), (1, {}, {"distributed": False}))
    )
    for name, want in same.items():
        for got in (tensors, alone):
            assert torch.allclose(got[name], want, rtol=1e-4, atol=1e-6), name


def load(megatron=None, parallel=None, **fields):
    config = OptimizerConfig(**fields)
    return load_optimizer(config, megatron or MegatronConfig(), parallel or ParallelConfig(), key="trainer.optimizer")


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"type": "absent:Lion"}, "trainer.optimizer.type: cannot import absent"),
        ({"type": f"{OUTSIDE}:function"}, "trainer.optimizer.type needs a class, got .*:function, a function"),
        ({"type": f"{OUTSIDE}:NoOptimizer"}, "type needs a subclass of torch.optim.Optimizer, got .*:NoOptimizer"),
        (
            {"type": f"{OUTSIDE}:Lion", "kwargs": {"beta": 1}},
            "trainer.optimizer.kwargs: .*:Lion needs to take .*'beta'",
        ),
        ({"type": "sgd", "kwargs": {"betas": 1}}, "trainer.optimizer.kwargs: sgd needs to take .*'betas'"),
        ({"type": "sgd", "kwargs": {"momentum": -1}}, "creating sgd raised ValueError: Invalid momentum"),
        ({"type": f"{OUTSIDE}:CannotBeCreated"}, "creating .*:CannotBeCreated raised ValueError: never"),
        ({"type": f"{OUTSIDE}:Raises"}, "trainer.optimizer.type: .*:Raises: step raised SystemExit: no"),
        ({"type": f"{OUTSIDE}:ConstantRate", "lr": 0.1}, ":ConstantRate does not read lr from its parameter groups"),
        ({"type": f"{OUTSIDE}:Random", "distributed": False}, ":Random takes different steps with the same gradients"),
        ({"type": f"{OUTSIDE}:CountsInItself"}, ":CountsInItself keeps the attribute 'count' between steps"),
        ({"type": f"{OUTSIDE}:ChangesGroups"}, ":ChangesGroups keeps the option 'scale' of a group between steps"),
        ({"type": f"{OUTSIDE}:KeepsNumbers"}, ":KeepsNumbers has the state 'largest', .*; checkpoints hold tensors"),
        ({"type": "torch.optim:NAdam"}, r":NAdam has the state 'mu_product', a tensor of shape \[\]"),
        (
            {"type": f"{OUTSIDE}:WholeNorm"},
            ":WholeNorm updates a value by others .* trainer.optimizer.distributed: false",
        ),
    ],
)
def test_classes_that_cannot_train_are_refused(fields, problem):
    with pytest.raises(ConfigError, match=problem):
        load(**fields)


def test_updates_that_take_whole_tensors_need_whole_tensors():
    fields = {"type": f"{OUTSIDE}:WholeNorm", "distributed": False}
    load(**fields)
    with pytest.raises(ConfigError, match=r"parallel\.tp = parallel\.etp = 1"):
        load(parallel=ParallelConfig(tp=2), **fields)


def test_options_of_adam_are_refused():
    megatron = MegatronConfig(optimizer={"optimizer_cpu_offload": True, "decoupled_lr": 0.1})
    with pytest.raises(
        ConfigError, match=r"trainer\.megatron\.optimizer: optimizer_cpu_offload need .*type: adam, got sgd"
    ):
        load(megatron, type="sgd")
    load(MegatronConfig(optimizer={"decoupled_lr": 0.1, "apply_wd_to_qk_layernorm": True}), type="sgd")
    for name in ("beta1", "beta2", "eps"):
        with pytest.raises(ValidationError, match=f"{name} is an option of Adam, got it with type = sgd"):
            OptimizerConfig(type="sgd", **{name: 0.5})


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"type": "lion"}, "type needs to be adam, sgd or package.module:Class, got 'lion'"),
        ({"kwargs": {"amsgrad": True}}, "kwargs are those of another optimizer, got some with type = adam"),
        ({"type": "sgd", "kwargs": {"lr": 1}}, "kwargs: lr is an argument that megarl gives"),
    ],
)
def test_wrong_settings_are_refused(fields, problem):
    with pytest.raises(ValidationError, match=problem):
        OptimizerConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "num_bytes"),
    [
        ({"type": "sgd"}, 0),
        (SGD, 4),
        (LION, 4),
        ({"type": "torch.optim:AdamW"}, 8),
        ({"type": f"{OUTSIDE}:CountsInGroups"}, 2),
    ],
)
def test_bytes_of_state_are_those_of_the_class(fields, num_bytes):
    assert load(**fields).state_bytes == num_bytes
