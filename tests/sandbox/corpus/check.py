"""Runs the corpus in the kinds of sandboxes of this machine, and without one, and judges what came out."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.reward.code_grading import TestCase, is_passed
from megarl.sandbox.guest.channel import MIB, Limits
from megarl.sandbox.sandbox import Case, Outcome, Program
from megarl.sandbox.session import ForkServer
from megarl.sandbox.tiers import LocalSandbox
from tests.sandbox.corpus.attacks import ATTACKS, REACHED, Attack
from tests.sandbox.corpus.forgeries import FORGERIES, HONEST
from tests.sandbox.corpus.targets import Targets
from tests.sandbox.local_tiers import patient_limits
from tests.time_limits import HANG_SECONDS, wait_until

EXEMPT = {
    "runsc": {
        "higher_priority": "gVisor keeps the number and does not pass it on to the scheduler of the machine",
        "open_files_of_parent": "of the runner's files, gVisor opens the program's own pipes and not the channel",
    }
}
"""Tier -> name of a program that reaches its target there, and why that gives it nothing."""

SIZES: dict[str, Any] = {"memory_bytes": 128 * MIB, "disk_bytes": 16 * MIB, "output_bytes": 32 * 1024}
LIMITS = Limits(wall_seconds=1.0, cpu_seconds=1, max_processes=12, **SIZES)
PATIENT_LIMITS = patient_limits(max_processes=12, **SIZES)
"""Limits of the honest program and of forgeries, which end by themselves."""

MAX_GROWTH = 50 * MIB
"""Bytes by which the corpus may enlarge this process and its fork server together."""

MAX_OVERRUN = 0.5
"""Seconds from a program's limit until nothing of it is left, on a machine that does nothing else."""

LONGER_OVERRUN = {"runsc": 3.0}
"""Tier -> as `MAX_OVERRUN`; gVisor's kernel starts in a few tenths of a second, and ends fork bombs late."""

NUM_THREADS = 4
"""Programs at once: most of them wait for a time limit."""


@dataclass
class Report:
    """What came out of the corpus in one kind of sandbox."""

    tier: str
    exempt: dict[str, str] = field(default_factory=dict)
    """Programs that were left out, and why."""
    contained: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    leaks: int = 0
    """Programs that have got the secret."""
    refused: int = 0
    """Forgeries that pass no test."""
    seconds: float = 0.0
    overrun: float = -LIMITS.wall_seconds
    """Longest time of a program beyond `wall_seconds`, with the start and the end of its sandbox, in seconds."""
    slowest: str = ""
    """Program with that time."""
    growth: int = 0
    """Bytes by which the peak of resident memory of this process and of the fork server has grown."""


def check_tier(
    tier: str,
    targets: Targets,
    server: ForkServer,
    attacks: list[Attack] = ATTACKS,
    *,
    max_overrun: float | None = None,
) -> Report:
    """Run all programs and forgeries in a kind of sandbox; `max_overrun`: in seconds, None: that of the tier."""
    max_overrun = LONGER_OVERRUN.get(tier, MAX_OVERRUN) if max_overrun is None else max_overrun
    exempt = EXEMPT.get(tier, {})
    report = Report(tier, {attack.name: exempt[attack.name] for attack in attacks if attack.name in exempt})
    attacks = [attack for attack in attacks if attack.name not in report.exempt]
    began_at = time.monotonic()
    known = find_traces(server)
    sandbox = LocalSandbox(tier, LIMITS, server)
    sandbox.run(Program(source="", cases=[Case()]))  # starts the fork server
    pids = [pid for pid in (os.getpid(), server.pid) if pid is not None]
    before = [reset_peak(pid) for pid in pids]
    targets.prepare()

    def run(attack: Attack) -> tuple[Outcome, float]:
        start = time.monotonic()
        outcome = sandbox.run(Program(source=attack.source(targets.places), cases=[Case()]))[0]
        return outcome, time.monotonic() - start

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        for attack, (outcome, seconds) in zip(attacks, threads.map(run, attacks), strict=True):
            if seconds - LIMITS.wall_seconds > report.overrun:
                report.overrun, report.slowest = seconds - LIMITS.wall_seconds, attack.name
            report.leaks += _has_secret(outcome, targets)
            if (problem := find_problem(attack, outcome, targets)) is None:
                report.contained.append(attack.name)
            else:
                report.failures.append(f"{attack.name}: {problem}")
                targets.prepare()
    passed = dict(find_passed_forgeries(LocalSandbox(tier, PATIENT_LIMITS, server)))
    report.failures += [f"forgery {name}: {problem}" for name, problem in passed.items()]
    report.refused = len(FORGERIES.keys() - passed.keys())
    report.growth = sum(peak(pid) - start for pid, start in zip(pids, before, strict=True))
    if report.growth > MAX_GROWTH:
        report.failures.append(f"the host's memory grew by {report.growth / MIB:.0f} MiB")
    if report.overrun > max_overrun:
        report.failures.append(f"{report.slowest} ended {report.overrun:.2f} s after its limit, not {max_overrun} s")
    report.failures += [f"left behind: {left}" for left in find_leftovers(server, known)]
    report.seconds = time.monotonic() - began_at
    return report


def find_problem(attack: Attack, outcome: Outcome, targets: Targets) -> str | None:
    """Return how a program got out of its sandbox; None: it did not."""
    texts = (outcome.stdout, outcome.stderr, outcome.value)
    if _has_secret(outcome, targets):
        return "has the secret"
    if REACHED in outcome.stdout:
        return "reached its target"
    if attack.prints not in outcome.stdout:
        return "ended its sandbox"
    if any(len(text.encode()) > LIMITS.output_bytes + 3 for text in texts):  # a cut character is replaced
        return "wrote more than its limit"
    return targets.find_change()


def _has_secret(outcome: Outcome, targets: Targets) -> bool:
    return any(targets.canary in text for text in (outcome.stdout, outcome.stderr, outcome.value))


def find_passed_forgeries(sandbox: LocalSandbox) -> Iterator[tuple[str, str]]:
    """Yield forgeries that pass a test; the honest program, if it does not."""
    tests = [TestCase(case=Case(call=f"answer({x})"), expected=[x * 7919 + 104729, str(x)[::-1]]) for x in (12, 345)]
    text = TestCase(case=Case(stdin="12\n"), expected="199757 21")
    cases = [test.case for test in tests]
    outcomes = sandbox.run(Program(source=HONEST, cases=cases))
    if not all(is_passed(test, outcome) for test, outcome in zip(tests, outcomes, strict=True)):
        yield "none", f"the honest program fails: {outcomes}"
    printing = HONEST + "print(*answer(int(input())))"
    if not is_passed(text, sandbox.run(Program(source=printing, cases=[text.case]))[0]):
        yield "none", "the honest program that prints fails"
    for name, source in FORGERIES.items():
        outcomes = sandbox.run(Program(source=source, cases=[*cases, text.case]))
        for test, outcome in zip([*tests, text], outcomes, strict=True):
            if is_passed(test, outcome):
                yield name, f"passes with {outcome}"


def find_leftovers(server: ForkServer, known: frozenset[str]) -> list[str]:
    """Return the traces other than `known` ones that sandboxes have left behind."""
    wait_until(lambda: find_traces(server) <= known)  # the last supervisor exits after it has reported
    return sorted(find_traces(server) - known)


def find_traces(server: ForkServer) -> frozenset[str]:
    """Return processes of sandboxes, mounts in this namespace, and control groups whose supervisors have ended."""
    found = {f"process {pid}" for pid in descendants(server.pid)}
    found |= {line for line in Path("/proc/self/mounts").read_text().splitlines() if "megarl" in line}
    for folder, names, _ in os.walk("/sys/fs/cgroup"):
        groups = {Path(folder, name) for name in names if name.startswith("megarl-sandbox-")}
        ended = {group for group in groups if not Path(f"/proc/{group.name.rpartition('-')[2]}").exists()}
        found |= {str(group) for group in ended if group.exists()}
    return frozenset(found)


def descendants(root: int | None) -> list[int]:
    """Return the processes below a process."""
    parents = {int(name): parent(int(name)) for name in os.listdir("/proc") if name.isdecimal()}
    found: list[int] = []
    todo = [] if root is None else [root]
    while todo:
        above = todo.pop()
        children = [pid for pid, of in parents.items() if of == above]
        found += children
        todo += children
    return found


def parent(pid: int) -> int:
    """Return the parent of a process; 0 if it has ended."""
    return int((_stat(pid) or [b"", b"0"])[1])


def state(pid: int) -> str | None:
    """Return the letter of a process's state, such as T: stopped; None if there is no such process."""
    fields = _stat(pid)
    return fields[0].decode() if fields else None


def _stat(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat after the name; none if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return []


def reset_peak(pid: int) -> int:
    """Set the peak of a process's resident memory to its present value, where the kernel can, and return its bytes."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    return peak(pid)


def peak(pid: int) -> int:
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def find_fault_outside(attack: Attack, targets: Targets) -> str | None:
    """Return why a program does not reach its target without a sandbox; None: it does. Only for those that may run so.

    Text that contains "Error" is that of a Python exception.
    """
    assert not attack.not_outside
    targets.prepare()
    found = subprocess.run(
        [sys.executable, "-S", "-c", attack.source(targets.places)],
        capture_output=True,
        pass_fds=[targets.fd],
        cwd=str(targets.places["folder"]),
        timeout=HANG_SECONDS,
        check=False,
    )
    (Path(str(targets.places["folder"])) / "link").unlink(missing_ok=True)
    if targets.canary.encode() in found.stdout or REACHED.encode() in found.stdout:
        return None
    *_, fault = ["the kernel refuses", *found.stderr.decode(errors="replace").splitlines()]
    return fault


def can_run_outside(attack: Attack) -> bool:
    """Whether a program can be run on this machine without a sandbox, to show that it works."""
    needs_x86 = attack.name in {"calls_of_32_bits", "clone_user_namespace", "keyring", "user_fault", "seccomp_listener"}
    has_rights = os.geteuid() == 0 or not attack.needs_root
    return not attack.not_outside and has_rights and (not needs_x86 or platform.machine() == "x86_64")
