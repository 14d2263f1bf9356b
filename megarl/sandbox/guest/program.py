"""Execution of untrusted code, in a process of its own that ends with it. What it writes is data, never a verdict.

Nothing here knows the expected result of a program: a value that a program forges is compared like any other. Modules
that not all programs need are imported where they are used, since imports are most of the CPU time of a sandbox.
"""

from __future__ import annotations

import atexit
import os
import random
import sys

from megarl.sandbox.guest.channel import read_request

TYPE_CHECKING = False  # of `typing`, without its import, which delays the start of a sandbox
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

NAME = "<program>"
CELL_ENDS = {False: "ok", True: "error"}
"""Status of a cell, by whether it has raised an exception."""

_sources: dict[str, str] = {}
"""File name -> source, for the lines of tracebacks."""

MAX_DEPTH = 50
"""Largest depth of a returned value."""


def run_program(source: str) -> None:
    """Execute a program as `__main__` and end this process with its exit code."""
    module = _create_module("__main__")
    code = 0
    try:
        _execute(source, module)
    except SystemExit as e:
        code = _exit_code(e)
    except BaseException:  # noqa: BLE001 -- the program's own
        _print_traceback()
        code = 1
    try:
        if "threading" in sys.modules:  # as multiprocessing does: waits for the program's threads
            sys.modules["threading"]._shutdown()
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):  # as at the end of any Python program
            if stream is not None and not stream.closed:
                stream.flush()
    except BaseException:  # noqa: BLE001
        _print_traceback()
        code = 1
    os._exit(code)


def run_call(source: str, setup: str, expression: str, value_fd: int) -> None:
    """Execute setup and program as a module, write the value of an expression as a literal, end this process.

    An expression that raises an exception, or whose value is no literal, has no value: nothing is written.
    """
    module = _create_module("program")
    code = 1
    try:
        _execute(setup, module)
        _execute(source, module)
        value = eval(compile(expression, "<call>", "eval"), module.__dict__)  # noqa: S307 -- what a sandbox is for
        data = memoryview(repr(_plain(value)).encode())
        while data:
            data = data[os.write(value_fd, data) :]
        code = 0
    except SystemExit as e:
        code = _exit_code(e) or 1
    except BaseException:  # noqa: BLE001 -- the program's own
        _print_traceback()
    os._exit(code)


def run_interpreter(cells_fd: int, ends_fd: int) -> None:
    """Execute the cells that arrive, in one namespace, and report the end of each; end this process with the cells."""
    module = _create_module("__main__")
    number, pid = 0, os.getpid()
    while (message := read_request(cells_fd)) is not None:
        number += 1
        failed = False
        try:
            _execute_cell(message["source"], module, f"<cell {number}>")
        except SystemExit:
            pass
        except BaseException:  # noqa: BLE001 -- the program's own
            _print_traceback()
            failed = True
        sys.stdout.flush()
        if os.getpid() != pid:
            break  # a child that the cell has forked
        os.write(ends_fd, end_of_cell(number, CELL_ENDS[failed]))
    os._exit(0)


def end_of_cell(number: int, status: str) -> bytes:
    """Return what an interpreter reports at the end of a cell; cells are numbered from 1."""
    return f"{number} {status}\n".encode()


def _create_module(name: str) -> ModuleType:
    """Return a new module; the same program gets the same random numbers in each run."""
    random.seed(0)
    module = type(sys)(name)
    sys.modules[name] = module
    sys.argv = [NAME]
    return module


def _execute(source: str, module: ModuleType) -> None:
    _sources[NAME] = source
    exec(compile(source, NAME, "exec"), module.__dict__)  # noqa: S102 -- what a sandbox is for


def _execute_cell(source: str, module: ModuleType, name: str) -> None:
    """Execute a cell; if it ends in an expression, print its value."""
    import ast

    _sources[name] = source
    tree = ast.parse(source, name)
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):
        tree.body.pop()
    exec(compile(tree, name, "exec"), module.__dict__)  # noqa: S102
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), name, "eval"), module.__dict__)  # noqa: S307
        if value is not None:
            print(repr(value))  # noqa: T201 -- the interpreter's output


def _exit_code(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
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


def _plain(value: Any, depth: int = 0) -> Any:
    """Return a value in built-in types, so that a literal equals it where the value does: a Counter becomes a dict."""
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
        case bytes():
            return bytes(value)
        case complex():
            return complex(value)
        case tuple():
            return tuple(_plain(item, depth + 1) for item in tuple.__iter__(value))
        case list():
            return [_plain(item, depth + 1) for item in list.__iter__(value)]
        case dict():
            return {_plain(key, depth + 1): _plain(item, depth + 1) for key, item in dict.items(value)}
        case set() | frozenset():
            return {_plain(item, depth + 1) for item in value}
        case _:
            raise TypeError(f"a value needs to be of built-in types, got {type(value).__name__}")


class _Float(float):
    """A number whose `repr` is a literal for infinities too."""

    def __repr__(self) -> str:
        return {float("inf"): "1e999", float("-inf"): "-1e999"}.get(self, float.__repr__(self))
