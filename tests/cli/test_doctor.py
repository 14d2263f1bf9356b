"""`megarl doctor`: report and exit code for simulated machines."""

import json
from collections.abc import Callable

import pytest

from megarl.cli import doctor
from megarl.cli.doctor import OPTIONAL, REQUIRED, diagnose
from megarl.megatron import mcore_fields


@pytest.fixture
def machine(monkeypatch) -> Callable[..., None]:
    """Function that simulates GPUs, shared memory and packages (`None`: not installed) on a machine with a compiler."""

    def pretend(gpus: tuple[str, ...] = (), shared: int | None = 2**33, **packages: str | None) -> None:
        real = doctor.package_version
        named = {name.replace("_", "-"): version for name, version in packages.items()}
        monkeypatch.setattr(doctor, "find_local_tiers", lambda: {"bubblewrap": "not installed", "launcher": None})
        monkeypatch.setattr(doctor, "visible_gpu_names", lambda: list(gpus))
        monkeypatch.setattr(doctor, "find_compiler", lambda: "/usr/bin/cc")
        monkeypatch.setattr(doctor, "free_shared_memory", lambda: shared)
        monkeypatch.setattr(doctor, "package_version", lambda name: named[name] if name in named else real(name))
        monkeypatch.setattr(doctor, "MIN_MEMORY", 1)

    return pretend


def test_a_ready_machine(machine, output):
    machine()
    out = output("doctor")
    assert "ready: try `megarl demo`" in out
    assert all(name in out for name in (*REQUIRED, *OPTIONAL))


def test_json_output(machine, output):
    machine(torch="9.9.9")
    tree = json.loads(output("doctor", "--json"))
    assert set(tree) == {"machine", "packages", "choices", "missing"}
    assert tree["packages"]["torch"] == "9.9.9"
    assert tree["machine"]["GPUs"] == "none"


def test_a_missing_package(machine, run):
    machine(sglang=None, ray=None)
    code, out, _ = run("doctor")
    assert code == 1
    assert "packages sglang, ray: run `make setup`" in out
    assert "not ready" in out


@pytest.mark.parametrize(
    ("shared", "compiler", "lacks"),
    [
        (None, "/usr/bin/cc", "512 MiB of shared memory in /dev/shm, got 0"),
        (64 * 2**20, "/usr/bin/cc", "512 MiB of shared memory in /dev/shm, got 64"),
        (2**33, None, "a C compiler: install gcc or clang"),
    ],
)
def test_what_a_machine_lacks(shared, compiler, lacks, machine, monkeypatch):
    machine(shared=shared)
    monkeypatch.setattr(doctor, "find_compiler", lambda: compiler)
    (problem,) = diagnose().missing
    assert problem.startswith(lacks)


GPU_PACKAGES = {"transformer_engine": "2.0", "triton": "3.0", "sglang_kernel": "1.0"}
ON_CPU = {
    "attention and layers": "megarl's torch layers",
    "optimizer": "torch's AdamW",
    "collectives": "gloo",
    "rollout engine": "SGLang's CPU engine, stand-ins for its GPU packages",
    "kernels": "torch",
    "sandbox for programs": "launcher",
}
ON_GPU = {
    "attention and layers": "Transformer Engine",
    "optimizer": "Transformer Engine's FusedAdam",
    "collectives": "nccl",
    "rollout engine": "SGLang on CUDA",
    "kernels": "Triton",
    "sandbox for programs": "launcher",
}


@pytest.mark.parametrize(
    ("gpus", "packages", "chosen"),
    [
        ((), {}, ON_CPU),
        (("H200",), {}, ON_GPU),
        (("H200",), {"transformer_engine": None, "apex": "0.1"}, {"optimizer": "apex's FusedAdam"}),
        (("H200",), {"transformer_engine": None}, {"attention and layers": "megarl's torch layers"}),
        (("H200",), {"triton": None}, {"kernels": "torch"}),
        (("H200",), {"sglang_kernel": None}, {"rollout engine": "SGLang on CUDA, but sglang-kernel is missing"}),
    ],
    ids=["CPU", "GPU", "no Transformer Engine, apex", "no Transformer Engine", "no Triton", "no sglang-kernel"],
)
def test_choices_follow_gpus_and_packages(machine, gpus, packages, chosen):
    """Packages for GPUs change nothing on a machine without one."""
    machine(gpus=gpus, **(GPU_PACKAGES | packages))
    found = {choice.what: choice.uses for choice in diagnose().choices}
    assert {what: found[what].partition(";")[0] for what in chosen} == chosen
    assert found.keys() == ON_CPU.keys()


A100, H100 = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("gpus", "packages", "attention", "lacks"),
    [
        ((H100,), {}, "Transformer Engine; attention of cuDNN", False),
        ((A100, A100), {"flash_attn": "2.8.3"}, "Transformer Engine; attention of flash-attn", False),
        (
            (A100, A100),
            {"flash_attn": None, "flash_attn_4": "4.0"},
            "Transformer Engine; attention of flash-attn",
            True,
        ),
        ((A100,), {"flash_attn": None, "transformer_engine": None}, "megarl's torch layers", False),
        (("NVIDIA GeForce RTX 4090",), {}, "Transformer Engine", False),
    ],
)
def test_attention_of_a_gpu(machine, gpus, packages, attention, lacks, run, monkeypatch):
    """GPUs before Hopper need flash-attn 2 for packed sequences, or torch's layers by choice."""
    machine(gpus=gpus, **(GPU_PACKAGES | packages))
    monkeypatch.setattr(mcore_fields, "package_version", lambda name: packages.get(name.replace("-", "_")))
    found = {choice.what: choice.uses for choice in diagnose().choices}
    assert found["attention and layers"] == attention
    code, out, _ = run("doctor")
    assert code == int(lacks)
    assert ("install it, or set trainer.megatron.model.transformer_impl: local" in " ".join(out.split())) == lacks


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--cluster"],
            "--cluster needs the address of a Ray cluster in RAY_ADDRESS; `megarl launch doctor --cluster`",
        ),
        (["--config", "x.yaml"], "--config and --set need --cluster"),
    ],
)
def test_options_that_need_others_are_refused(words, message, refusal, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert refusal("doctor", *words).startswith(f"error: {message}")
