"""Programs, calls and interpreters in sandboxes of this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import Counter, OrderedDict, namedtuple
from collections.abc import Iterator

import pytest

from megarl.errors import SandboxError
from megarl.reward.code_grading import TestCase, is_passed
from megarl.sandbox.guest.channel import MIB
from megarl.sandbox.guest.program import plain_value
from megarl.sandbox.sandbox import Case, Interpreter, Outcome, Program
from megarl.sandbox.session import ForkServer
from megarl.sandbox.tiers import LOCAL_TIERS, LocalSandbox, find_tier_problem
from tests.errors import expect_error
from tests.sandbox.corpus.check import descendants, find_leftovers, find_traces, parent, state
from tests.sandbox.local_tiers import best_tier, patient_limits, require_tier
from tests.time_limits import HANG_SECONDS, wait_until

OUTPUT_BYTES = 1000
SIZES = {"memory_bytes": 128 * MIB, "output_bytes": OUTPUT_BYTES}
LIMITS = patient_limits(**SIZES)


@pytest.fixture(params=[*LOCAL_TIERS, "unsafe"])
def sandbox(request, server) -> LocalSandbox:
    require_tier(request.param)
    return LocalSandbox(request.param, LIMITS, server)


@pytest.fixture(scope="module")
def best(server) -> LocalSandbox:
    """Return a sandbox of the preferred tier, for what does not depend on the tier."""
    return LocalSandbox(best_tier(), LIMITS, server)


@pytest.fixture
def interpreter(sandbox) -> Iterator[Interpreter]:
    interpreter = sandbox.open_interpreter()
    yield interpreter
    interpreter.close()


@pytest.fixture(scope="module")
def broken_interpreter(best) -> Iterator[Interpreter]:
    """Start an interpreter for all tests that break it."""
    interpreter = best.open_interpreter()
    yield interpreter
    interpreter.close()


def run(sandbox: LocalSandbox, source: str, stdin: str = "") -> Outcome:
    return sandbox.run(Program(source=source, cases=[Case(stdin=stdin)]))[0]


def test_programs_read_stdin_and_print(sandbox):
    text = "line\n" * 50_000  # more than a pipe holds
    outcome = run(sandbox, "import sys\nprint(len(sys.stdin.read()), __name__)", text)
    assert outcome == Outcome(status="ok", stdout=f"{len(text)} __main__\n")


@pytest.mark.parametrize(
    ("source", "status", "text"),
    [
        ("import sys; sys.exit(3)", "error", ""),
        ("1 / 0", "error", 'last):\n  File "<program>", line 1, in <module>\n    1 / 0\n'),
        ("x = = 1", "error", "SyntaxError"),
        ("x = bytearray(1 << 30)", "error", "MemoryError"),
        ("print('x' * 2000)", "output", ""),
        ("import os; os.kill(os.getpid(), 9)", "killed", ""),
        ("import atexit; atexit.register(print, 'end', flush=True)", "ok", ""),
        ("", "ok", ""),
        ("x = '\x00'", "error", "SyntaxError"),
        ("x = '\ud800'", "error", "UnicodeEncodeError"),
        ("import sys; print(7); sys.stdout.close()", "ok", ""),
        ("import sys; sys.stdout = None", "ok", ""),
        ("import sys; sys.stdin.close(); sys.exit()", "ok", ""),
        ("import os; os.closerange(0, 64)", "ok", ""),
        ("import os; os.close(1); print(7)", "error", "OSError"),
        ("import sys; sys.stderr.write('e' * 2000)", "output", "eee"),
        ("import os; os.fork() and os.wait(); print('x' * 600)", "output", ""),
        ("raise SystemExit('text')", "error", "text\n"),
        ("import sys; sys.setrecursionlimit(10**9); eval('f' + '(' * 100 + ')' * 99)", "error", "SyntaxError"),
    ],
)
def test_reports_how_a_program_ended(best, source, status, text):
    outcome = run(best, source)
    assert outcome.status == status
    assert text in outcome.stderr
    assert len(outcome.stdout) <= OUTPUT_BYTES + 1


@pytest.mark.parametrize(
    ("source", "limit"),
    [("while True: pass", {"cpu_seconds": 1}), ("import time; time.sleep(6000)", {"wall_seconds": 0.1})],
)
def test_ends_a_program_at_its_limit_of_time(server, source, limit):
    assert run(LocalSandbox(best_tier(), patient_limits(**limit), server), source).status == "timeout"


@pytest.mark.parametrize("stdin", ["", "\ud800\x00", "x" * 1_000_000])
def test_outputs_are_text_whatever_a_program_writes(best, stdin):
    source = "import os, sys\nos.close(0)\nos.write(1, b'\\xff7\\xf0')\nos.write(2, b'\\x80\\n')"
    assert run(best, source, stdin) == Outcome(status="ok", stdout="\ufffd7\ufffd", stderr="\ufffd\n")
    assert run(best, "print(chr(0xD800))", stdin).stdout == "\\ud800\n"


def test_values_are_those_that_a_program_may_write(best):
    source = (
        "import os\n"
        "def forge(data): os.write(3, data); os._exit(0)\n"
        "def close(): os.close(3); return 7\n"
        "def nest():\n    x = []\n    x.append(x)\n    return x"
    )
    statuses = {
        "forge(b'\\xff')": "ok",
        "forge(b'[' * 900)": "ok",
        "forge(b'7' * 9000)": "output",
        "'x' * 2000": "output",
    }
    statuses |= dict.fromkeys(("close()", "nest()", "10 ** 5000", ""), "error")
    outcomes = best.run(Program(source=source, cases=[Case(call=call) for call in statuses]))
    assert {call: outcome.status for call, outcome in zip(statuses, outcomes, strict=True)} == statuses
    assert not any(is_passed(TestCase(case=Case(call="f()"), expected=7), outcome) for outcome in outcomes)


CELL_ENDS = {
    "os.write(1, b'\\xff')": ("ok", "\ufffd1\n"),
    "print('x' * 10**6)": ("ok", "x" * (OUTPUT_BYTES + 1)),
    "": ("ok", ""),
    "x = '\x00'": ("error", ""),
    "sys.stdin.close(); input()": ("error", ""),
    "os.fork() and os.wait()\nx": ("ok", "5\n5\n"),
    "sys.stdout.close()": ("exit", ""),
    "os.close(1); print(1)": ("exit", ""),
    "os.closerange(0, 64)": ("exit", ""),
    "for fd in range(3, 64):\n    with contextlib.suppress(OSError): os.write(fd, b'1 ok\\n' * 1000)": ("exit", ""),
    "for fd in range(3, 64):\n    with contextlib.suppress(OSError): os.write(fd, bytes(4) + b'{}')": ("exit", ""),
}


@pytest.mark.parametrize("source", CELL_ENDS)
def test_a_cell_that_breaks_its_interpreter_leaves_one_that_works(broken_interpreter, source):
    interpreter = broken_interpreter
    assert interpreter.run("import contextlib, os, sys\nx = 5").status == "ok"
    outcome = interpreter.run(source)
    assert (outcome.status, outcome.stdout) == CELL_ENDS[source]
    for number in range(3):
        assert interpreter.run(f"print({number})").stdout == f"{number}\n"
    known = interpreter.run("x").stdout == "5\n"
    assert known == (outcome.status in ("ok", "error"))


def test_programs_import_the_standard_library(sandbox, server):
    larger = LocalSandbox(sandbox.tier, patient_limits(), server)
    outcome = run(larger, "import wave, sqlite3, asyncio\nasyncio.run(asyncio.sleep(0))\nprint(wave.__name__)")
    assert outcome == Outcome(status="ok", stdout="wave\n")


def test_calls_return_literals(sandbox):
    source = "from collections import Counter\ndef f(x): return Counter(x)\ndef g(): return [float('inf'), (1,), {2}]"
    calls = ["f('aab')", "g()", "f(1)", "undefined", "f"]
    cases = [Case(call=call) for call in calls]
    outcomes = sandbox.run(Program(source=source, setup="import math\nZERO = 0", cases=cases))
    assert [outcome.value for outcome in outcomes] == ["{'a': 2, 'b': 1}", "[1e999, (1,), {2}]", "", "", ""]
    assert [outcome.status for outcome in outcomes] == ["ok", "ok", "error", "error", "error"]


def test_values_become_built_in_types():
    point = namedtuple("point", "x y")
    value = [Counter("aa"), OrderedDict(b=point(1, 2.5)), frozenset({1}), True, None, b"x", 1j]
    assert repr(plain_value(value)) == "[{'a': 2}, {'b': (1, 2.5)}, {1}, True, None, b'x', 1j]"
    with expect_error(TypeError, "built-in", "types"):
        plain_value(range(3))


def test_programs_see_nothing_of_each_other(sandbox):
    first = "import os\nopen('left', 'w').write('x')\nprint(sorted(os.listdir('.')))"
    assert run(sandbox, first).stdout == "['left']\n"
    assert run(sandbox, "import os; print(os.listdir('.'))").stdout == "[]\n"


def test_programs_get_the_same_random_numbers(sandbox):
    source = "import random\nprint(random.random(), hash('text'))"
    assert run(sandbox, source) == run(sandbox, source)


OWN_MEMORY = """
import ctypes, re
found, own = set(), input()
for line in open('/proc/self/maps'):
    start, end = (int(text, 16) for text in line.split()[0].split('-'))
    if ' rw' in line and not line.split()[-1].startswith('['):
        found |= set(re.findall(rb'secret=\\d{6}', ctypes.string_at(start, end - start)))
print(sorted(text.decode() for text in found) == [own], len(found))
"""


def test_a_program_sees_one_input_at_a_time(sandbox):
    cases = [Case(stdin=f"secret={i}{i}{i}{i}{i}{i}\n") for i in range(1, 4)]
    outcomes = sandbox.run(Program(source=OWN_MEMORY, cases=cases))
    assert [outcome.stdout for outcome in outcomes] == ["True 1\n"] * 3


CHANGES = {
    "file": "open('left', 'w').write('x')",
    "folder": "os.mkdir('left')",
    "link": "os.symlink('/', 'left')",
    "deleted file": "open('left', 'w').close(); os.remove('left')",
    "process": "os.fork() or time.sleep(6000)",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_case_finds_nothing_of_the_one_before(change, best):
    source = f"import os, time\nprint(os.listdir('.'), flush=True)\n{CHANGES[change]}"
    outcomes = best.run(Program(source=source, cases=[Case()] * 3))
    assert {outcome.stdout.split()[0] for outcome in outcomes} == {"[]"}


def test_cases_share_a_time_limit(server):
    sandbox = LocalSandbox(best_tier(), patient_limits(), server)
    source = "import time\nif input() == 'wait': time.sleep(6000)"
    cases = [Case(stdin=text) for text in ("go", "wait", "go", "wait", "go")]
    found = sandbox.run(Program(source=source, cases=cases, seconds=5.0))
    assert [outcome.status for outcome in found][1:] == ["timeout"] * 4
    patient = sandbox.run(Program(source=source, cases=[cases[0]] * 2))
    assert [outcome.status for outcome in patient] == ["ok"] * 2


def test_runs_no_case_after_the_last_that_is_wanted(best):
    seen = []

    def until(index: int, outcome: Outcome) -> bool:
        seen.append((index, outcome.stdout))
        return outcome.stdout == "b"

    program = Program(source="print(input(), end='')", cases=[Case(stdin=text) for text in "abc"])
    assert [outcome.stdout for outcome in best.run(program, until=until)] == ["a", "b"]
    assert seen == [(0, "a"), (1, "b")]


def test_a_program_may_print_as_much_as_it_needs_to(best):
    source = f"print('x' * {3 * OUTPUT_BYTES})"
    assert [run(best, source).status] == ["output"]
    wide = best.run(Program(source=source, cases=[Case()], output_bytes=4 * OUTPUT_BYTES))
    assert wide == [Outcome(status="ok", stdout="x" * 3 * OUTPUT_BYTES + "\n")]


def test_an_input_takes_no_room_from_the_files_of_a_program(server):
    sandbox = LocalSandbox(best_tier(), patient_limits(disk_bytes=MIB), server)
    source = "import sys\nprint(len(sys.stdin.read()))\nopen('x', 'w').write('x' * 900_000)"
    assert run(sandbox, source, "x" * 3 * MIB) == Outcome(status="ok", stdout=f"{3 * MIB}\n")


KILL_RUNNER = "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)"
"""Ends the first process of the tier `unsafe`, which has no namespace that protects it."""


def test_a_program_that_ends_its_sandbox_has_an_outcome_and_its_next_case_another_sandbox(server):
    sandbox = LocalSandbox("unsafe", LIMITS, server)
    source = f"if input() == 'kill':\n    {KILL_RUNNER.replace(chr(10), chr(10) + '    ')}\nprint(1)"
    found = sandbox.run(Program(source=source, cases=[Case(stdin=text) for text in ("go", "kill", "go")]))
    assert [outcome.status for outcome in found] == ["ok", "killed", "ok"]


def test_a_lost_interpreter_is_a_new_one(server):
    interpreter = LocalSandbox("unsafe", LIMITS, server).open_interpreter()
    for _ in range(2):
        assert interpreter.run("x = 1").status == "ok"
        assert interpreter.run(KILL_RUNNER).status == "killed"
        assert "NameError" in interpreter.run("x").stderr
    interpreter.close()


def test_signals_do_not_end_an_interpreter(interpreter):
    signals = "signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}"
    assert interpreter.run(f"import os, signal\nx = 1\nfor n in {signals}: os.kill(os.getppid(), n)").status == "ok"
    assert interpreter.run("x").stdout == "1\n"


def test_a_closed_session_has_ended(server):
    session = server.start("unsafe", LIMITS)
    session.close()
    for call in (lambda: session.send({"kind": "cell", "source": ""}, seconds=1), lambda: session.receive(seconds=1)):
        with pytest.raises(EOFError):
            call()


def test_an_interpreter_ends_while_a_cell_runs(sandbox):
    interpreter = sandbox.open_interpreter()

    def sleep() -> None:
        with contextlib.suppress(SandboxError):
            interpreter.run("import time; time.sleep(6000)")

    thread = threading.Thread(target=sleep)
    thread.start()
    interpreter.close()
    thread.join(HANG_SECONDS)
    assert not thread.is_alive()


def test_interpreters_keep_variables(interpreter):
    assert interpreter.run("x = 20\nprint('set')").stdout == "set\n"
    assert interpreter.run("x + 22").stdout == "42\n"
    failed = interpreter.run("def f():\n    return x / 0\nf()")
    assert failed.status == "error"
    assert failed.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert "runner" not in failed.stderr
    long = interpreter.run("print('x' * 5000)\nx += 1")
    assert (long.status, len(long.stdout) <= OUTPUT_BYTES + 1) == ("ok", True)
    assert interpreter.run("x").stdout == "21\n"
    assert interpreter.run("import os; os._exit(0)").status == "exit"
    assert "NameError" in interpreter.run("x").stderr
    assert interpreter.run("1").stdout == "1\n"


def test_a_cell_at_its_limit_of_time_takes_the_variables_with_it(sandbox, server):
    interpreter = LocalSandbox(sandbox.tier, patient_limits(wall_seconds=1.0), server).open_interpreter()

    def finish(source: str) -> Outcome:
        """Run a cell until it ends in time, which a busy machine may prevent."""
        while (outcome := interpreter.run(source)).status == "timeout":
            pass
        return outcome

    assert finish("x = 20").status == "ok"
    assert interpreter.run("import time; time.sleep(6000)").status == "timeout"
    assert "NameError" in finish("x").stderr
    interpreter.close()


def test_nothing_runs_between_cells(server):
    """The processes of an interpreter are stopped when its cell has ended."""
    tier = best_tier()
    if tier == "runsc":
        pytest.skip("programs in runsc are no processes of this machine: needs another sandbox")
    interpreter = LocalSandbox(tier, LIMITS, server).open_interpreter()
    before = set(descendants(server.pid))
    endless = "import os, threading\ndef run():\n    while True: pass\nif os.fork() == 0: run()\n"
    try:
        for cell in (f"{endless}threading.Thread(target=run, daemon=True).start()\n7", "7"):
            assert interpreter.run(cell).stdout == "7\n"
            programs = set(descendants(server.pid)) - before
            assert len(programs) == 2
            assert wait_until(lambda programs=programs: all(state(pid) == "T" for pid in programs))
    finally:
        interpreter.close()


def test_a_lost_fork_server_does_not_end_its_sandboxes(sandbox):
    own = ForkServer()
    lost = LocalSandbox(sandbox.tier, LIMITS, own)
    interpreter = lost.open_interpreter()
    interpreter.run("x = 1")
    assert own.pid is not None
    os.kill(own.pid, signal.SIGKILL)
    os.waitpid(own.pid, 0)
    assert interpreter.run("x").stdout == "1\n"
    assert run(lost, "print(1)").stdout == "1\n"  # by a new fork server
    interpreter.close()
    own.close()


def test_a_lost_supervisor_is_no_result_of_the_program(server):
    tier = "launcher" if find_tier_problem("launcher") is None else "unsafe"
    before = set(descendants(server.pid))
    interpreter = LocalSandbox(tier, LIMITS, server).open_interpreter()
    (supervisor,) = (pid for pid in descendants(server.pid) if pid not in before and parent(pid) == server.pid)
    os.kill(supervisor, signal.SIGKILL)
    with expect_error(SandboxError, "supervisor", "ended"):
        interpreter.run("import time; time.sleep(6000)")


def test_sandboxes_end_with_their_host(server):
    source = f"""
import os, signal
from megarl.sandbox.guest.channel import Limits
from megarl.sandbox.tiers import LocalSandbox, shared_fork_server
interpreter = LocalSandbox({best_tier()!r}, Limits()).open_interpreter()
interpreter.run("x = 1")
print(shared_fork_server().pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    known = find_traces(server)
    found = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    pid = int(found.stdout)
    assert wait_until(lambda: state(pid) in (None, "Z"))  # in a container, nobody may wait for it
    assert find_leftovers(server, known) == []
