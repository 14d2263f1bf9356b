"""Programs in a sandbox do what they do in a new Python: the same output, and an exit code of 0 or not."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from megarl.sandbox.sandbox import Case, Interpreter, Program
from megarl.sandbox.session import python_path
from megarl.sandbox.tiers import LocalSandbox
from tests.sandbox.local_tiers import best_tier, patient_limits
from tests.time_limits import HANG_SECONDS

PROGRAMS = {
    "exit": "print(5)\nexit()\nprint(6)",
    "exit with a code": "print(5)\nexit(3)",
    "quit": "print(5)\nquit()",
    "exit with text": "exit('stop')",
    "names of exit": "print(exit, quit)",
    "exit codes": "import sys\nsys.exit(int(input()))",
    "exit with a truth": "import sys\nsys.exit(True)",
    "exit with an object": "import sys\nsys.exit((0,))",
    "exit with none": "raise SystemExit",
    "exit in a function": "def main():\n    try:\n        exit(0)\n    finally:\n        print('end')\nmain()",
    "help": "def f():\n    'Doubles.'\nhelp(f)",
    "license": "print(repr(license)[:20], copyright is not None)",
    "annotations": "def f(a: list[int]): pass\nprint(f.__annotations__)",
    "unknown annotation": "def f(a: List[int]): pass\nprint(1)",
    "future": "from __future__ import annotations\ndef f(a: List[int]): pass\nprint(f.__annotations__)",
    "future of a string": "exec('def f(a: int): pass')\nprint(f.__annotations__)",
    "fast input": "import io, os\nread = io.BytesIO(os.read(0, os.fstat(0).st_size)).readline\nprint(read(), read())",
    "size of input": "import os\nprint(os.fstat(0).st_size)",
    "input": "print(input())\nprint(input())",
    "end of input": "import sys\nprint(sys.stdin.read().split())\nprint(repr(sys.stdin.readline()))",
    "lines of input": "import sys\nfor line in sys.stdin: print(line.strip()[::-1])",
    "buffer of input": "import sys\nprint(sys.stdin.buffer.readline(), sys.stdin.seekable())",
    "input again": "import os\nprint(len(os.read(0, 9)), os.lseek(0, 0, 0), os.read(0, 2))",
    "input by number": "print(open(0).read())",
    "closed input": "import sys\nsys.stdin.close()\nprint(1)",
    "no terminal": "import sys\nprint(sys.stdin.isatty(), sys.stdout.isatty())",
    "main": "if __name__ == '__main__':\n    print(__name__, __doc__, __spec__, __builtins__.len([1]))",
    "file": "import os\nprint(os.path.isabs(os.path.abspath(__file__)))",
    "arguments": "import sys\nprint(len(sys.argv), sys.argv[0] == __file__)",
    "depth": "def depth(n): return 0 if n == 0 else 1 + depth(n - 1)\nprint(depth(980))",
    "too deep": "def depth(n): return 0 if n == 0 else 1 + depth(n - 1)\nprint(depth(1000))",
    "deeper": "import sys\nsys.setrecursionlimit(10**5)\ndef d(n): return n and 1 + d(n - 1)\nprint(d(9000))",
    "exception": "print(1)\n1 / 0",
    "exception of an exit": "import atexit\natexit.register(lambda: print('bye'))\nprint('hi')",
    "exit handler that raises": "import atexit\natexit.register(lambda: 1 / 0)\nprint(1)",
    "exit handler that exits": "import atexit, sys\natexit.register(sys.exit, 3)\nprint(1)",
    "exit with a handler": "import atexit, sys\natexit.register(print, 'bye')\nsys.exit(3)",
    "error with a handler": "import atexit\natexit.register(print, 'bye')\n1 / 0",
    "error with a thread": "import threading\nthreading.Timer(0.2, print, ('late',)).start()\n1 / 0",
    "thread that raises": "import threading\nt = threading.Thread(target=lambda: 1 / 0)\nt.start()\nt.join()\nprint(1)",
    "closed output": "import sys\nprint(1)\nsys.stdout.close()",
    "no output": "import sys\nsys.stdout = None\nprint(1)",
    "surrogate in an error": "raise ValueError('\\ud800')",
    "exit with a surrogate": "import sys\nsys.exit('\\ud800')",
    "error without text": "class E(Exception):\n    def __str__(self): raise self\nraise E",
    "thread": "import threading\nt = threading.Thread(target=print, args=(7,))\nt.start()",
    "null device": "import subprocess\nprint(open('/dev/null').read() == '', subprocess.DEVNULL)",
    "random device": "print(len(open('/dev/urandom', 'rb').read(4)))",
    "broken pipe": "import os\nr, w = os.pipe()\nos.close(r)\ntry: os.write(w, b'x')\nexcept OSError: print(1)",
    "signals": "import signal\nprint([str(signal.getsignal(n))[:30] for n in sorted(signal.valid_signals())])",
    "interrupt": "import os\ntry: os.kill(os.getpid(), 2)\nexcept KeyboardInterrupt: print('interrupted')",
    "own limits": "import resource as r\nr.setrlimit(r.RLIMIT_NOFILE, (20, 20))\nprint(r.getrlimit(r.RLIMIT_NOFILE))",
    "own priority": "import os\nprint(os.nice(3) - os.nice(0))",
    "module of its own": "open('mine.py', 'w').write('x = 3')\nimport mine\nprint(mine.x)",
    "class in main": "import pickle\nclass A: x = 1\nprint(pickle.loads(pickle.dumps(A())).x)",
    "data class": "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\nprint(A(1).x)",
    "error of a name": "print(undefined)",
    "unicode": "print('é\u2028😀', ascii('é'))",
    "print to error": "import sys\nprint('e', file=sys.stderr)\nprint('o')",
    "child": "import os\npid = os.fork()\nif pid == 0: os._exit(4)\nprint(os.waitstatus_to_exitcode(os.wait()[1]))",
}
INPUTS = {"exit codes": ("0", "1", "256", "-1", str(2**32), str(2**63), str(-(2**70)))}
USUAL_INPUT = "12 é\nzwei\n"


@pytest.fixture(scope="module")
def sandbox(server) -> LocalSandbox:
    return LocalSandbox(best_tier(), patient_limits(), server)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_does_what_it_does_in_python(name, sandbox, tmp_path):
    file, stdin = tmp_path / "program.py", tmp_path / "input"
    file.write_text(PROGRAMS[name])
    texts = INPUTS.get(name, (USUAL_INPUT,))
    outcomes = sandbox.run(Program(source=PROGRAMS[name], cases=[Case(stdin=text) for text in texts]))
    for text, outcome in zip(texts, outcomes, strict=True):
        stdin.write_text(text)
        with stdin.open() as opened:
            found = subprocess.run(
                # a process that has run an engine ignores SIGQUIT, one under nohup SIGHUP, and so would its children
                ["env", "--default-signal=QUIT,HUP", python_path(), str(file)],
                stdin=opened,
                capture_output=True,
                text=True,
                cwd=tmp_path,
                env={"LANG": "C.UTF-8", "PYTHONHASHSEED": "0"},
                timeout=HANG_SECONDS,
                check=False,
            )
        assert (outcome.stdout, outcome.status == "ok") == (found.stdout, found.returncode == 0), text
        if found.returncode == 1:
            assert outcome.stderr.splitlines()[-1:] == found.stderr.splitlines()[-1:]


CELLS = [
    (
        "future features stay",
        ["from __future__ import annotations", "def f(a: List): pass", "print(f.__annotations__)"],
    ),
    ("features of this package do not", ["def f(a: int): pass", "print(f.__annotations__)"]),
    ("values are printed", ["x = 3", "x", "None", "'a'", "_ = 5\nx + _"]),
    ("names of a new Python", ["print(exit, callable(help), __name__)"]),
]


@pytest.fixture
def interpreter(sandbox) -> Iterator[Interpreter]:
    interpreter = sandbox.open_interpreter()
    yield interpreter
    interpreter.close()


@pytest.mark.parametrize(("cells"), [cells for _, cells in CELLS], ids=[name for name, _ in CELLS])
def test_cells_print_what_a_session_of_python_prints(cells, interpreter):
    session = subprocess.run(
        [python_path(), "-i", "-q", "-c", "import sys; sys.ps1 = sys.ps2 = ''"],
        input="".join(f"{cell}\n\n" for cell in "\n".join(cells).split("\n")),
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=True,
    )
    assert "".join(interpreter.run(cell).stdout for cell in cells) == session.stdout


def test_exit_ends_a_cell_and_no_variables(interpreter):
    assert interpreter.run("x = 1\nexit()\nx = 2").status == "ok"
    assert interpreter.run("import sys\nsys.exit('why')").status == "error"
    assert interpreter.run("x").stdout == "1\n"
