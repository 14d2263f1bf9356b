"""Execution of untrusted code, in a process of its own that ends with it. Its output is data, never a result of a test.

Nothing here knows the expected result of a program: a value that a program forges is compared like any other. Modules
that not all programs need are imported where they are used, since imports are most of the CPU time of a sandbox.
"""

from __future__ import annotations

import atexit
import builtins
import os
import random
import site
import sys

from megarl.sandbox.guest.channel import read_request

TYPE_CHECKING = False  # of `typing`, without its import, which delays the start of a sandbox
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, ModuleType
    from typing import Any

NAME = "<program>"
CELL_ENDS = {False: "ok", True: "error"}
"""Status of a cell, by whether it has raised an exception."""

_sources: dict[str, str] = {}
"""File name -> source, for the lines of tracebacks."""

MAX_DEPTH = 50
"""Largest depth of a returned value."""

LONG_RANGE = range(-(2**63), 2**63)
"""Values of the C type long, from which Python takes an exit code."""

INVALID_EXIT_CODE = 255
"""Exit code of Python for `sys.exit(n)` with a number beyond a C long."""


def run_program(source: str) -> None:
    """Execute a program as `__main__` and end this process with its exit code."""
    code = _contain(_execute, source, _create_module("__main__"))
    finish_code = _contain(_finish)
    os._exit(code or finish_code)


def run_call(source: str, setup: str, expression: str, value_fd: int) -> None:
    """Execute program and setup as a module, write the value of an expression as a literal, end this process.

    An expression that raises an exception, or whose value is no literal, has no value: nothing is written.
    """
    module = _create_module("program")
    is_written = False

    def execute() -> None:
        nonlocal is_written
        _execute(source, module)
        _execute(setup, module)
        value = eval(_compile(expression, "<call>", "eval"), module.__dict__)  # noqa: S307 -- what a sandbox is for
        data = memoryview(repr(plain_value(value)).encode())
        while data:
            data = data[os.write(value_fd, data) :]
        is_written = True

    code = _contain(execute)
    os._exit(0 if is_written else code or 1)


def run_interpreter(cells_fd: int, ends_fd: int) -> None:
    """Execute the cells that arrive, in one namespace, and report the end of each; end this process with the cells.

    `exit()` ends a cell, and the variables stay.
    """
    cells = _Cells(_create_module("__main__"))
    pid = os.getpid()
    while (message := read_request(cells_fd)) is not None:
        code = _contain(cells.execute, message["source"])
        sys.stdout.flush()
        if os.getpid() != pid:
            break  # a child that the cell has forked
        os.write(ends_fd, end_of_cell(cells.number, CELL_ENDS[code != 0]))
    os._exit(0)


def _contain(function: Callable[..., None], *arguments: Any) -> int:
    """Call what executes code of a program, and return the exit code that Python has after it."""
    try:
        function(*arguments)
    except SystemExit as e:
        return _exit_code(e)
    except BaseException:  # noqa: BLE001 -- the program's own
        _print_traceback()
        return 1
    return 0


def _finish() -> None:
    """Do what Python does at the end of a program."""
    if "threading" in sys.modules:  # as multiprocessing does: waits for the program's threads
        sys.modules["threading"]._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()


def end_of_cell(number: int, status: str) -> bytes:
    """Return what an interpreter reports at the end of a cell; cells are numbered from 1."""
    return f"{number} {status}\n".encode()


def _create_module(name: str) -> ModuleType:
    """Return a new module, in a process as a new Python is: with `exit`, `quit` and `help`, and its whole stack.

    The same program gets the same random numbers in each run.
    """
    random.seed(0)
    module = type(sys)(name)
    module.__dict__.update(__file__=NAME, __builtins__=builtins)
    sys.modules[name] = module
    sys.argv = [NAME]
    sys.path.insert(0, os.getcwd())
    site.setquit()
    site.setcopyright()
    site.sethelper()
    depth, frame = 0, sys._getframe().f_back
    while frame is not None:  # the frames below the program's
        depth, frame = depth + 1, frame.f_back
    sys.setrecursionlimit(sys.getrecursionlimit() + depth)
    return module


def _execute(source: str, module: ModuleType) -> None:
    _sources[NAME] = source
    exec(_compile(source, NAME, "exec"), module.__dict__)  # noqa: S102 -- what a sandbox is for


def _compile(source: Any, name: str, mode: str, flags: int = 0) -> CodeType:
    """Compile source or a tree; of future features, it has those of `flags` and its own, and none of this module."""
    code: CodeType = compile(source, name, mode, flags, dont_inherit=True)
    return code


class _Cells:
    """Cells of an interpreter; features that one imports from `__future__` hold for later ones."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._flags = module, 0
        self.number = 0
        """Cells that have been executed."""

    def execute(self, source: str) -> None:
        """Execute a cell; if it ends in an expression, print its value."""
        import __future__

        import ast

        self.number += 1
        name = f"<cell {self.number}>"
        _sources[name] = source
        tree = ast.parse(source, name)
        last = tree.body[-1] if tree.body else None
        if isinstance(last, ast.Expr):
            tree.body.pop()
        code = _compile(tree, name, "exec", self._flags)
        for feature in __future__.all_feature_names:
            self._flags |= code.co_flags & getattr(__future__, feature).compiler_flag
        exec(code, self._module.__dict__)  # noqa: S102
        if isinstance(last, ast.Expr):
            value = eval(  # noqa: S307
                _compile(ast.Expression(last.value), name, "eval", self._flags), self._module.__dict__
            )
            if value is not None:
                print(repr(value))  # noqa: T201 -- the interpreter's output


def _exit_code(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        code = error.code or 0
        return code & 0xFF if code in LONG_RANGE else INVALID_EXIT_CODE
    sys.stderr.write(f"{error.code}\n")
    return 1


def _print_traceback() -> None:
    """Print the exception that is being handled, without the frames of this file."""
    import linecache
    import traceback

    for name, source in _sources.items():
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    kind, error, frames = sys.exc_info()
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    try:
        traceback.print_exception(kind, error, frames)
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001, S110 -- a program may have replaced stderr
        pass


def plain_value(value: Any, depth: int = 0, *, hashable: bool = False) -> Any:
    """Return a value in types whose `repr` is a literal that equals what the value does: a Counter becomes a dict.

    Beside built-in types these are Fraction and Decimal; see `megarl.reward.code_grading`. `hashable`: in a set.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"a value needs to be nested at most {MAX_DEPTH} times")
    match value:
        case bool() | None:
            return value
        case int():
            return int(value)
        case float():
            return _Float(value)
        case str():
            return str.__str__(value)
        case bytes() | bytearray() | memoryview():
            return bytes(value)
        case complex():
            return complex(value)
        case tuple():
            return tuple(plain_value(item, depth + 1, hashable=hashable) for item in tuple.__iter__(value))
        case list():
            return [plain_value(item, depth + 1) for item in list.__iter__(value)]
        case dict():
            pairs = dict.items(value)
            return {plain_value(key, depth + 1, hashable=True): plain_value(item, depth + 1) for key, item in pairs}
        case set() | frozenset():
            items = {plain_value(item, depth + 1, hashable=True) for item in value}
            return frozenset(items) if hashable else items
        case _ if isinstance(value, (type({}.keys()), type({}.items()))):
            return plain_value(set(value), depth, hashable=hashable)
        case _ if isinstance(value, type(type.__dict__)):
            return plain_value(dict(value), depth)
        case _:
            return _plain_number(value)


def _plain_number(value: Any) -> Any:
    """Return a Fraction or Decimal, of the modules that the program has imported."""
    for module, name in (("fractions", "Fraction"), ("decimal", "Decimal")):
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and isinstance(value, kind):
            return kind(value)
    raise TypeError(f"a value needs to be of built-in types, got {type(value).__name__}")


class _Float(float):
    """A number whose `repr` is a literal for infinities too."""

    def __repr__(self) -> str:
        return {float("inf"): "1e999", float("-inf"): "-1e999"}.get(self, float.__repr__(self))
