"""Runs the corpus in the kinds of sandboxes of this machine, and without one, and judges what came out."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from megarl.reward.code.grading import TestCase, is_passed
from megarl.sandbox.fork_server_client import ForkServer
from megarl.sandbox.guest.limits import MIB, Limits
from megarl.sandbox.local_sandbox import LocalSandbox
from megarl.sandbox.sandbox import Case, Outcome, Program
from tests.sandbox.corpus import bombs, files, kernel, network, processes
from tests.sandbox.corpus.attack import REACHED, Attack
from tests.sandbox.corpus.forgeries import FORGERIES, HONEST
from tests.sandbox.corpus.targets import Targets

ATTACKS = [*files.ATTACKS, *network.ATTACKS, *processes.ATTACKS, *kernel.ATTACKS, *bombs.ATTACKS]

LIMITS = Limits(
    wall_seconds=1.0,
    cpu_seconds=1,
    memory_bytes=128 * MIB,
    disk_bytes=16 * MIB,
    max_processes=12,
    output_bytes=32 * 1024,
)
MAX_GROWTH = 50 * MIB
"""Bytes by which a program may enlarge the process that runs it."""


NUM_THREADS = 4
"""Programs at once: most of them wait for a time limit."""


@dataclass
class Report:
    """What came out of the corpus in one kind of sandbox."""

    tier: str
    contained: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    forgeries: int = 0
    seconds: float = 0.0
    longest_seconds: float = 0.0
    """Longest time of a program beyond `wall_seconds`."""


def check_tier(tier: str, targets: Targets, server: ForkServer, attacks: list[Attack] = ATTACKS) -> Report:
    """Run all programs and forgeries in a kind of sandbox."""
    report, began_at = Report(tier), time.monotonic()
    sandbox = LocalSandbox(tier, LIMITS, server)
    memory = _peak_memory()
    targets.prepare()

    def run(attack: Attack) -> tuple[Outcome, float]:
        start = time.monotonic()
        outcome = sandbox.run(Program(source=attack.source(targets.places), cases=[Case()]))[0]
        return outcome, time.monotonic() - start

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        for attack, (outcome, seconds) in zip(attacks, threads.map(run, attacks), strict=True):
            report.longest_seconds = max(report.longest_seconds, seconds - LIMITS.wall_seconds)
            if (problem := find_problem(outcome, targets)) is None:
                report.contained.append(attack.name)
            else:
                report.failures.append(f"{attack.name}: {problem}")
                targets.prepare()
    if _peak_memory() - memory > MAX_GROWTH:
        report.failures.append(f"the host's memory grew by {(_peak_memory() - memory) / MIB:.0f} MiB")
    for name, problem in find_passed_forgeries(sandbox):
        report.failures.append(f"forgery {name}: {problem}")
    report.forgeries = len(FORGERIES)
    report.failures += [f"left behind: {left}" for left in find_leftovers(server)]
    report.seconds = time.monotonic() - began_at
    return report


def find_problem(outcome: Outcome, targets: Targets) -> str | None:
    """Return how a program got out of its sandbox; None: it did not."""
    texts = (outcome.stdout, outcome.stderr, outcome.value)
    if any(targets.canary in text for text in texts):
        return "has the secret"
    if REACHED in outcome.stdout:
        return "reached its target"
    if any(len(text.encode()) > LIMITS.output_bytes + 3 for text in texts):  # a cut character is replaced
        return "wrote more than its limit"
    return targets.find_change()


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


def find_leftovers(server: ForkServer) -> list[str]:
    """Return processes, mounts and control groups that sandboxes have left behind."""
    deadline = time.monotonic() + 5  # the last supervisor exits after it has reported
    while (processes := descendants(server.pid)) and time.monotonic() < deadline:
        time.sleep(0.02)
    found = [f"process {pid}" for pid in processes]
    found += [line for line in Path("/proc/self/mounts").read_text().splitlines() if "megarl" in line]
    for folder, names, _ in os.walk("/sys/fs/cgroup"):
        found += [
            f"{folder}/{name}"
            for name in names
            if name.startswith("megarl-sandbox-") and not Path(f"/proc/{name.rpartition('-')[2]}").exists()
        ]
    return found


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
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    except OSError:
        return 0


def _peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


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
        timeout=60,
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
    return (
        not attack.not_outside
        and (not attack.needs_root or os.geteuid() == 0)
        and (not needs_x86 or platform.machine() == "x86_64")
    )
