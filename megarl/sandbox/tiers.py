"""Which kinds of sandboxes a machine has, and the choice among them."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache

from megarl.config.sandbox import SandboxConfig
from megarl.errors import ConfigError, SandboxError
from megarl.sandbox.fork_server_client import PROGRAMS, ForkServer
from megarl.sandbox.guest.limits import Limits
from megarl.sandbox.launcher.bubblewrap import MIN_VERSION
from megarl.sandbox.local_sandbox import LocalSandbox
from megarl.sandbox.sandbox import Case, Program, Sandbox
from megarl.sandbox.service import ServiceSandbox

LOCAL_TIERS = ("bubblewrap", "launcher", "runsc")
"""Kinds of sandboxes of this machine, in the order of preference; runsc takes the most CPU time."""

PROBE_TEXT = "the sandbox works"


def find_local_tiers() -> dict[str, str | None]:
    """Return tier -> None where it works on this machine, else the reason why not; each is tried with a program."""
    return {tier: find_tier_problem(tier) for tier in LOCAL_TIERS}


def choose_tier(config: SandboxConfig, *, key: str) -> str:
    """Return the tier that a configuration leads to on this machine.

    Args:
        config: the section.
        key: its YAML path, for errors.

    Raises:
        ConfigError: the tier does not work here, or none does and `allow_unsafe` is not set.
    """
    if config.tier == "service":
        return "service"
    problems = list[str]()
    for tier in LOCAL_TIERS if config.tier == "auto" else (config.tier,):
        problem = find_tier_problem(tier)
        if problem is None:
            return tier
        problems.append(f"{tier}: {problem}")
    if config.allow_unsafe:
        return "unsafe"
    raise ConfigError(
        f"{key} needs a sandbox that works on this machine, or allow_unsafe: true, which runs programs with the rights "
        f"of this user; got none ({'; '.join(problems)})"
    )


def open_sandbox(config: SandboxConfig, *, key: str) -> Sandbox:
    """Return the sandbox of a configuration; arguments and errors as for `choose_tier`."""
    limits = Limits(
        wall_seconds=config.wall_seconds,
        cpu_seconds=config.cpu_seconds,
        memory_bytes=config.memory_mib * 2**20,
        disk_bytes=config.disk_mib * 2**20,
        max_processes=config.max_processes,
        output_bytes=config.output_kib * 2**10,
    )
    tier = choose_tier(config, key=key)
    if tier == "service":
        assert config.url is not None
        return ServiceSandbox(config.url, limits)
    return LocalSandbox(tier, limits)


@cache
def find_tier_problem(tier: str) -> str | None:
    """Return why a tier of `LOCAL_TIERS` does not work on this machine, found by a program; None: it does."""
    path = None
    if tier in PROGRAMS:
        path = shutil.which(PROGRAMS[tier])
        if path is None:
            return f"{PROGRAMS[tier]} is not installed (package {tier})"
    if path is not None and tier == "bubblewrap":
        answer = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout.split()  # noqa: S603
        version = tuple(int(part) for part in answer[-1].split(".")[:2]) if answer else (0, 0)
        if version < MIN_VERSION:
            return f"needs bwrap {'.'.join(map(str, MIN_VERSION))} or newer, got {'.'.join(map(str, version))}"
    server = ForkServer()
    try:
        program = Program(source=f"print({PROBE_TEXT!r})", cases=[Case()])
        outcome = LocalSandbox(tier, Limits(), server).run(program)[0]
    except SandboxError as e:
        return str(e)
    finally:
        server.close()
    return None if outcome.stdout.strip() == PROBE_TEXT else f"a program failed: {outcome.stderr.strip()}"
