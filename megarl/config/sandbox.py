"""The section `sandbox` of rewards and environments that run programs of the policy."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from megarl.config.section import Section


class SandboxConfig(Section):
    """Where programs of the policy run, and what they may use; `megarl doctor` names the tiers of a machine."""

    tier: Literal["auto", "bubblewrap", "launcher", "runsc", "service"] = "auto"
    """`bubblewrap`: the program of that name. `launcher`: megarl's own, by namespaces, Landlock and seccomp.
    `runsc`: gVisor, whose kernel runs between programs and that of the machine; a program takes about 0.2 CPU seconds
    more. `service`: one that runs elsewhere. `auto`: the first of bubblewrap, launcher and runsc that works here."""

    url: str | None = None
    """Address of the service of the tier `service`."""

    allow_unsafe: bool = False
    """Where no tier works on a machine, run programs with the rights of the user who runs megarl, limited in memory and
    time only. Such programs can read and change everything that this user can."""

    wall_seconds: float = Field(default=10.0, gt=0)
    """Time limit of a program on one input, or of one cell of an interpreter."""

    cpu_seconds: int = Field(default=5, ge=1)
    """CPU seconds of each process of a program."""

    memory_mib: int = Field(default=512, ge=16)
    """MiB of memory of a program and its children together."""

    disk_mib: int = Field(default=64, ge=1)
    """MiB of files that a program may write; they are kept in memory and deleted with the sandbox."""

    max_processes: int = Field(default=16, ge=2)
    """Largest number of processes and threads of a program."""

    output_kib: int = Field(default=64, ge=1)
    """KiB of a program's stdout, stderr and of the value of a call. A program that writes more is ended, unless a right
    output needs more; a cell's further output is left out."""

    @model_validator(mode="after")
    def _check_url(self) -> SandboxConfig:
        if self.tier == "service" and (self.url is None or not self.url.startswith(("http://", "https://"))):
            raise ValueError(f"tier: service needs a url that begins with http:// or https://, got {self.url!r}")
        if self.tier != "service" and self.url is not None:
            raise ValueError(f"url needs tier: service, got tier: {self.tier}")
        return self
