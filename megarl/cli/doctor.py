"""`megarl doctor`: report hardware, packages and what is missing, of this machine or of all nodes of a cluster."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from megarl import __version__
from megarl.cli.options import add_overrides, console, file_path
from megarl.cluster.placement.hardware import (
    GpuType,
    find_gpu_type,
    free_shared_memory,
    package_version,
    visible_gpu_names,
)
from megarl.config.megatron import MegatronConfig
from megarl.errors import ConfigError
from megarl.megatron.mcore_fields import attention_backend, find_flash_attn_problem
from megarl.sandbox.tiers import find_local_tiers

if TYPE_CHECKING:
    from megarl.config import StageConfig

TORCH_LAYERS = "megarl's torch layers"
ATTENTION_KERNELS = {"flash": "flash-attn", "fused": "cuDNN"}
"""Package by megatron-core's `attention_backend`."""

STAGE_NAMES = ("train", "sft", "rm", "dpo")

REQUIRED = (
    "torch",
    "megatron-core",
    "sglang",
    "ray",
    "transformers",
    "tokenizers",
    "safetensors",
    "pydantic",
    "PyYAML",
    "numpy",
    "pyarrow",
    "rich",
    "psutil",
    "tensorboard",
    "latex2sympy2_extended",
)
OPTIONAL = ("transformer-engine", "apex", "triton", "sglang-kernel", "flash-attn", "wandb")

GIB = 2**30
MIN_MEMORY = 6 * GIB
"""Bytes of host memory at the demo's peak: two trainer ranks, two engines, Ray."""
MIN_SHARED_MEMORY = 512 * 2**20
"""Bytes of shared memory for Ray's object store and weight buckets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A component that a run needs, and the implementation that it uses on this machine; printed by --json."""

    what: str
    """Name of the component."""
    uses: str
    """Implementation used on this machine."""
    otherwise: str
    """Alternative implementation, and when it is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Report of `megarl doctor`, with the field names that --json prints."""

    machine: dict[str, str]
    """Property of the machine -> value."""
    packages: dict[str, str | None]
    """Package name -> version; None where it is not installed."""
    choices: tuple[Choice, ...]
    missing: tuple[str, ...]
    """What a run on this machine lacks, each with a remedy. Empty where the machine is ready."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `[--json]` and `--cluster [--config CONFIG [--stage ...] [--set ...]]`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--cluster",
        action="store_true",
        help="check all nodes of the cluster at RAY_ADDRESS, as a run does first",
    )
    parser.add_argument(
        "--config", type=file_path, metavar="CONFIG", help="with --cluster: check the paths of this run too"
    )
    parser.add_argument("--stage", choices=STAGE_NAMES, default="train", help="command that CONFIG is for")
    add_overrides(parser)


def run(args: argparse.Namespace) -> int:
    """Print the report; return 0 if a run can start on this machine's CPU, or with --cluster if all nodes pass.

    Raises:
        ConfigError: RAY_ADDRESS is not set, or the configuration is invalid.
    """
    if args.cluster:
        return _run_cluster(args)
    if args.config is not None or args.overrides:
        raise ConfigError("--config and --set need --cluster; on this machine, use `megarl check`")
    diagnosis = diagnose()
    if args.json:
        print(json.dumps(asdict(diagnosis), indent=2))
    else:
        _print_diagnosis(diagnosis)
    return 1 if diagnosis.missing else 0


def _run_cluster(args: argparse.Namespace) -> int:
    if "RAY_ADDRESS" not in os.environ:
        raise ConfigError(
            "--cluster needs the address of a Ray cluster in RAY_ADDRESS; `megarl launch doctor --cluster` starts one "
            "on the nodes of a job"
        )
    from rich.markup import escape

    from megarl.config.placement import PlacementConfig  # after the check of RAY_ADDRESS: Ray takes a second to import
    from megarl.controller.preflight.cluster_check import RequiredPaths, check_cluster, required_paths
    from megarl.controller.preflight.cluster_findings import nodes_table

    config = None if args.config is None else _load_config(args)
    placement = PlacementConfig() if config is None else config.placement
    check = check_cluster(RequiredPaths() if config is None else required_paths(config), placement)
    if args.json:
        problems = [{"about": p.category, "nodes": p.nodes, "says": p.message} for p in check.problems]
        print(json.dumps(asdict(check) | {"problems": problems, "sentences": check.messages}, indent=2))
    else:
        out = console()
        out.print(nodes_table(check.reports, check.problems))
        out.print()
        for message in check.messages:
            out.print(f"[red]problem[/red] {escape(message)}", soft_wrap=True)
        out.print(f"{check.summary}: {'not ready' if check.problems else 'ready'}")
    return 1 if check.problems else 0


def _load_config(args: argparse.Namespace) -> StageConfig:
    """Load the run's configuration, with local models, local data and absolute paths."""
    from megarl.config import STAGES, load_config
    from megarl.config.run import with_absolute_paths
    from megarl.data.data_files import with_local_data
    from megarl.model_files.hub import with_local_models

    config = load_config(STAGES[args.stage], args.config, args.overrides)
    return with_absolute_paths(with_local_data(with_local_models(config)))


def diagnose() -> Diagnosis:
    """Collect the report from package metadata and the operating system, without importing the packages."""
    gpus = visible_gpu_names()
    packages = {name: package_version(name) for name in (*REQUIRED, *OPTIONAL)}
    return Diagnosis(
        machine=_describe_machine(gpus),
        packages=packages,
        choices=_choose_components(packages, gpus),
        missing=_find_missing(packages, gpus),
    )


def _describe_machine(gpus: list[str]) -> dict[str, str]:
    memory, disk = psutil.virtual_memory(), shutil.disk_usage(Path.cwd())
    shared = free_shared_memory()
    return {
        "megarl": __version__,
        "Python": f"{platform.python_version()} ({sys.executable})",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "CPU cores": str(len(psutil.Process().cpu_affinity() or [])),
        "memory": f"{memory.available / GIB:.1f} GiB free of {memory.total / GIB:.1f}",
        "shared memory": "none" if shared is None else f"{shared / GIB:.1f} GiB free",
        "disk": f"{disk.free / GIB:.1f} GiB free in {Path.cwd()}",
        "GPUs": ", ".join(gpus) or "none",
        "C compiler": find_compiler() or "none",
        "Ray cluster": os.environ.get("RAY_ADDRESS") or "RAY_ADDRESS is not set: a run starts its own",
    }


def _choose_components(packages: dict[str, str | None], gpus: list[str]) -> tuple[Choice, ...]:
    gpu = bool(gpus)
    te = packages["transformer-engine"]
    kernels = {attention_backend(MegatronConfig(), gpu.capability) for gpu in _known_types(gpus)}
    attention = ", ".join(sorted(ATTENTION_KERNELS[kind] for kind in kernels))
    cuda_engine = "SGLang on CUDA"
    if packages["sglang-kernel"] is None:
        cuda_engine += ", but sglang-kernel is missing; placement.device=cpu does not need it"
    adam = "Transformer Engine's" if te else "apex's" if packages["apex"] else None
    return (
        Choice(
            what="attention and layers",
            uses=f"Transformer Engine{attention and f'; attention of {attention}'}" if gpu and te else TORCH_LAYERS,
            otherwise="Transformer Engine, with a GPU and transformer-engine",
        ),
        Choice(
            what="optimizer",
            uses=f"{adam} FusedAdam" if gpu and adam else "torch's AdamW",
            otherwise="FusedAdam, with a GPU and transformer-engine or apex",
        ),
        Choice(
            what="collectives",
            uses="nccl" if gpu else "gloo",
            otherwise="nccl, with a GPU",
        ),
        Choice(
            what="rollout engine",
            uses=cuda_engine if gpu else "SGLang's CPU engine, stand-ins for its GPU packages",
            otherwise="SGLang on CUDA, with a GPU and SGLang's own dependencies",
        ),
        Choice(
            what="kernels",
            uses="Triton" if gpu and packages["triton"] else "torch",
            otherwise="Triton, with a GPU and triton",
        ),
        _describe_sandboxes(),
    )


def _describe_sandboxes() -> Choice:
    """Return the sandbox for programs of the policy, found by trying each on this machine."""
    found = find_local_tiers()
    lacking = [f"{tier}: {reason}" for tier, reason in found.items() if reason is not None]
    return Choice(
        what="sandbox for programs",
        uses=next((tier for tier, reason in found.items() if reason is None), "none"),
        otherwise="; ".join(lacking) or "launcher, if bubblewrap is not installed",
    )


def _known_types(gpus: list[str]) -> list[GpuType]:
    return [gpu for gpu in map(find_gpu_type, gpus) if gpu is not None]


def _find_missing(packages: dict[str, str | None], gpus: list[str]) -> tuple[str, ...]:
    problems = []
    absent = [name for name in REQUIRED if packages[name] is None]
    if absent:
        problems.append(f"packages {', '.join(absent)}: run `make setup` in a clone of megarl")
    if find_compiler() is None:
        problems.append("a C compiler: install gcc or clang, or name one in CC")
    total = psutil.virtual_memory().total
    if total < MIN_MEMORY:
        problems.append(f"{MIN_MEMORY / GIB:.0f} GiB of memory, got {total / GIB:.1f}")
    shared = free_shared_memory()
    if shared is None or shared < MIN_SHARED_MEMORY:
        problems.append(
            f"{MIN_SHARED_MEMORY / 2**20:.0f} MiB of shared memory in /dev/shm, got {(shared or 0) / 2**20:.0f}: "
            "in a container, start it with --shm-size=2g"
        )
    if packages["transformer-engine"] is not None:
        problems += _find_missing_attention(gpus)
    return tuple(problems)


def _find_missing_attention(gpus: list[str]) -> list[str]:
    """Return what Transformer Engine's layers lack for attention on these GPUs, without options of a configuration."""
    config = MegatronConfig()
    capabilities = {gpu.capability for gpu in _known_types(gpus)}
    flash = sorted(each for each in capabilities if attention_backend(config, each) == "flash")
    problems = [find_flash_attn_problem(config, each, cp=1) for each in flash]
    return [problem for problem in problems if problem is not None]


def find_compiler() -> str | None:
    """Return the path of the C compiler that `CC` names, else of one on `PATH`; None if there is none."""
    named = os.environ.get("CC")
    return next((path for name in (named, "cc", "gcc", "clang") if name and (path := shutil.which(name))), None)


def _print_diagnosis(diagnosis: Diagnosis) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in diagnosis.machine.items():
        table.add_row(name, escape(value))
    table.add_row()
    for package, installed in diagnosis.packages.items():
        table.add_row(package, installed or ("[red]missing[/red]" if package in REQUIRED else "[dim]none[/dim]"))
    table.add_row()
    for choice in diagnosis.choices:
        other = "" if choice.otherwise.startswith(choice.uses) else f" [dim](or {choice.otherwise})[/dim]"
        table.add_row(choice.what, choice.uses + other)
    out = console()
    out.print(table)
    out.print()
    for problem in diagnosis.missing:
        out.print(f"[red]missing[/red] {escape(problem)}")
    out.print("not ready" if diagnosis.missing else "ready: try `megarl demo`")
