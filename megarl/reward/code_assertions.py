"""Assertions taken apart: calls, which a program answers in its sandbox, and what is expected of them.

Expected values that are no literals, and assertions in loops, are evaluated by `AssertionTests.recording`, which
runs in a sandbox without the program of the policy.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from megarl.reward.code_grading import TestCase, Tolerance
from megarl.sandbox.sandbox import Case

COLLECTIONS = {"set": set, "tuple": tuple, "list": list, "frozenset": frozenset, "dict": dict}
"""Built-in types whose calls on a literal are literals too."""

CLOSE = {"isclose": ("rel_tol", "abs_tol", 1e-9, 0.0), "allclose": ("rtol", "atol", 1e-5, 1e-8)}
"""Functions that compare numbers: the names of their tolerances, relative and absolute, and the defaults."""

NO_PYTHON = (SyntaxError, ValueError, MemoryError, RecursionError)
"""What `ast.parse` raises on texts that are no Python, or are nested too deeply."""

NUM_OPERANDS = 2
PLUS_TOLERANCE = Tolerance(relative=1e-7, absolute=1e-6)
"""Tolerance of HumanEval+ for floats whose test has none."""

CALLS_PER_CASE = 32
"""Calls of an assertion in a loop that one process of the program answers."""

CALLS_BYTES = 8 * 1024
"""Expected values of these calls in bytes, at most, unless one of them alone is larger."""

RECORDED = "__recorded__"
"""Name of the function that evaluates assertions."""

RECORDER = """
from copy import deepcopy as __copy__
__records__ = []
def __record__(*record): __records__.append(__copy__(record))
"""


class TestCaseError(ValueError):
    """A test case cannot be taken apart into an input and an expected output."""

    __test__ = False  # pytest does not collect it


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A call of the program and the expressions of its accepted values."""

    call: ast.expr
    accepted: tuple[ast.expr, ...]
    relative: ast.expr | None = None
    absolute: ast.expr | None = None
    """Tolerances; None: numbers need to be equal."""
    as_plus: bool = False
    """Compare as `assertion` of HumanEval+, whose tolerance depends on the expected value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssertionTests:
    """Test cases of assertions, or what needs to be evaluated to get them."""

    cases: list[TestCase] | None
    """None: `recording` has to be evaluated."""
    imports: str
    """Import statements of the assertions, which calls need."""
    recording: str = ""
    """Source that defines the function `RECORDED`, which returns the argument of `cases_of`."""
    templates: tuple[Check, ...] = ()

    def cases_of(self, records: Sequence[Any]) -> list[TestCase]:
        """Return the test cases of an evaluation: for each assertion met, its number, variables and values."""
        cases = list[TestCase]()
        for number, group in groupby(records, key=lambda record: record[0]):
            cases += _merge(self.templates[number], [record[1:] for record in group])
        return cases


def parse_assertions(sources: Sequence[str], where: str) -> AssertionTests:
    """Return the test cases of a list of assertions such as `assert f(1) == 2`; `where` names the list.

    Raises:
        TestCaseError: an assertion cannot be taken apart, so that what it expects cannot be kept out of the sandbox.
    """
    statements = list[ast.stmt]()
    for i, source in enumerate(sources):
        at = f"{where}[{i}]"
        try:
            (statement,) = ast.parse(source.strip()).body
        except NO_PYTHON:
            raise _refuse(source, at) from None
        if not isinstance(statement, ast.Assert) or not _take_apart(statement.test, (), at):
            raise _refuse(source, at)
        statements.append(statement)
    return _parse_body(statements, [], (), where)


def parse_check_function(source: str, entry_point: str, where: str) -> AssertionTests:
    """Return the test cases of a source with `check(candidate)`, as HumanEval has it.

    Args:
        source: the source.
        entry_point: expression of the function that is tested.
        where: name of the field with the source.

    Raises:
        TestCaseError: there is no such function, or it calls the program outside of assertions that can be taken apart.
    """
    try:
        module = ast.parse(source)
        target = ast.parse(entry_point.strip(), mode="eval").body
    except NO_PYTHON as e:
        raise TestCaseError(f"{where} and the entry point need to be Python: {str(e)[:200]}") from None
    checks = [s for s in module.body if isinstance(s, ast.FunctionDef) and s.name == "check" and len(s.args.args) == 1]
    if len(checks) != 1:
        raise TestCaseError(f"{where} needs one function check(candidate), got {len(checks)}")
    (check,) = checks
    candidate = check.args.args[0].arg
    names = (candidate, target.id) if isinstance(target, ast.Name) else (candidate,)
    calls_check = [
        s for s in module.body if isinstance(s, ast.Expr) and "check" in _loaded(s) and isinstance(s.value, ast.Call)
    ]
    others = [s for s in module.body if s is not check and s not in calls_check]
    return _parse_body(check.body, others, names, where, target)


def literal(node: ast.expr) -> tuple[bool, Any]:
    """Return whether an expression is a literal, or a collection made of one, and its value."""
    match node:
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in COLLECTIONS and len(args) <= 1:
            inner = [literal(argument) for argument in args]
            if not all(known for known, _ in inner):
                return False, None
            try:
                return True, COLLECTIONS[name](*(value for _, value in inner))
            except (TypeError, ValueError):
                return False, None
    try:
        return True, ast.literal_eval(node)
    except (TypeError, *NO_PYTHON):
        return False, None


def _parse_body(
    body: Sequence[ast.stmt],
    module: Sequence[ast.stmt],
    names: tuple[str, ...],
    where: str,
    target: ast.expr | None = None,
) -> AssertionTests:
    """Return the tests of the statements of a check; `module`: statements outside of it; `names`: of the program."""
    recorder = _Recorder(names, where, _variables([*body, *module]))
    replaced = recorder.visit(ast.parse(ast.unparse(_module(body))))  # a copy, since it replaces statements
    if names and _mentions(replaced, names[:1]):
        raise TestCaseError(
            f"{where} calls the program outside of an assertion that compares it with an expected value"
        )
    if not recorder.found:
        raise TestCaseError(f"{where} has no assertion about the program")
    templates = tuple(replace(check, call=_renamed(check.call, names, target)) for check in recorder.found)
    imported = {name: s for s in [*module, *body] for name in _imported_names(s)}
    used = {name for check in templates for name in _loaded(check.call)} & imported.keys()
    imports = "\n".join(dict.fromkeys(ast.unparse(imported[name]) for name in sorted(used)))
    if recorder.is_static and all(isinstance(s, ast.Assert | ast.Expr | ast.Pass) for s in body):
        return AssertionTests(cases=[_single(check) for check in templates], imports=imports)
    recording = "\n".join([RECORDER, *map(_optional, module), ast.unparse(_function_of(replaced.body))])
    return AssertionTests(cases=None, imports=imports, recording=recording, templates=templates)


def _function_of(statements: list[ast.stmt]) -> ast.FunctionDef:
    """Return the function `RECORDED`, which executes statements and returns what they have recorded."""
    inner, outer = ast.parse(f"def __check__(): pass\ndef {RECORDED}(): return (__check__(), __records__)[1]").body
    assert isinstance(inner, ast.FunctionDef)
    assert isinstance(outer, ast.FunctionDef)
    inner.body = statements
    outer.body.insert(0, inner)
    return ast.fix_missing_locations(outer)


class _Recorder(ast.NodeTransformer):
    """Replaces assertions by calls of `__record__` with their number, variables, accepted values and tolerances."""

    def __init__(self, names: tuple[str, ...], where: str, variables: set[str]) -> None:
        self.found: list[Check] = []
        self.is_static = True
        self._names, self._where, self._variables = names, where, variables

    def visit_Assert(self, node: ast.Assert) -> list[ast.stmt] | ast.stmt:
        """Return the records of an assertion; one of a constant, such as `assert True`, tests nothing."""
        if isinstance(node.test, ast.Constant) and node.test.value:
            return ast.Pass()
        checks = _take_apart(node.test, self._names, self._where)
        if not checks:
            raise _refuse(ast.unparse(node), self._where)
        return [self._record(check) for check in checks]

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        """Return the record of a call `assertion(OUTPUT, EXPECTED, TOLERANCE)`, as HumanEval+ has it."""
        match node.value:
            case ast.Call(func=ast.Name(id="assertion"), args=[output, expected, tolerance], keywords=[]):
                return self._record(Check(call=output, accepted=(expected,), absolute=tolerance, as_plus=True))
        return node

    def _record(self, check: Check) -> ast.stmt:
        free = sorted((_loaded(check.call) - _stored(check.call) - set(self._names)) & self._variables)
        self.is_static &= not free and all(
            literal(e)[0] for e in (*check.accepted, check.relative, check.absolute) if e is not None
        )
        variables = ", ".join(f"{name!r}: {name}" for name in free)
        accepted = ", ".join(map(ast.unparse, check.accepted))
        tolerances = ", ".join("None" if e is None else ast.unparse(e) for e in (check.relative, check.absolute))
        source = f"__record__({len(self.found)}, {{{variables}}}, [{accepted}], {tolerances})"
        self.found.append(check)
        return ast.parse(source).body[0]


def _take_apart(test: ast.expr, names: tuple[str, ...], where: str) -> list[Check]:
    """Return the checks of an asserted expression; empty if it cannot be taken apart."""
    match test:
        case ast.BoolOp(op=ast.And(), values=values):
            parts = [_take_apart(value, names, where) for value in values]
            return [check for part in parts for check in part] if all(parts) else []
        case ast.BoolOp(op=ast.Or(), values=values):
            parts = [_take_apart(value, names, where) for value in values]
            return _alternatives([part[0] for part in parts]) if all(len(part) == 1 for part in parts) else []
        case ast.Compare(left=left, ops=[ast.Eq() | ast.Is()], comparators=[right]):
            return _equality(left, right, names)
        case ast.Compare(left=left, ops=[ast.In()], comparators=[ast.List() | ast.Tuple() | ast.Set() as right]):
            sides = _sides(left, right, names)
            return [Check(call=left, accepted=tuple(right.elts))] if sides and sides[0] is left and right.elts else []
        case ast.Compare(left=ast.Call(args=[difference]) as call, ops=[ast.Lt() | ast.LtE()], comparators=[limit]):
            if _function(call) not in ("abs", "fabs") or _mentions(limit, names):
                return []
            match difference:
                case ast.BinOp(left=left, op=ast.Sub(), right=right) if sides := _sides(left, right, names):
                    zero = ast.Constant(0.0)
                    return [Check(call=sides[0], accepted=(sides[1],), relative=zero, absolute=limit)]
            return []
        case ast.Call() as call if _function(call) in CLOSE:
            return _closeness(call, names)
        case ast.UnaryOp(op=ast.Not(), operand=call) if _is_call_of_program(call, names):
            return [_truth(call, expected=False)]
        case call if _is_call_of_program(call, names):
            return [_truth(call, expected=True)]
    return []


def _truth(call: ast.expr, *, expected: bool) -> Check:
    twice = ast.UnaryOp(op=ast.Not(), operand=ast.UnaryOp(op=ast.Not(), operand=call))
    return Check(call=twice, accepted=(ast.Constant(expected),))


def _equality(left: ast.expr, right: ast.expr, names: tuple[str, ...]) -> list[Check]:
    sides = _sides(left, right, names)
    if sides is None:
        return []
    call, expected = sides
    match expected:
        case ast.Call(args=[value], keywords=keywords) if _function(expected) == "approx":
            given = {keyword.arg: keyword.value for keyword in keywords}
            if not given.keys() <= {"rel", "abs"}:
                return []
            relative, absolute = (
                given.get(*each) for each in (("rel", ast.Constant(1e-6)), ("abs", ast.Constant(1e-12)))
            )
            return [Check(call=call, accepted=(value,), relative=relative, absolute=absolute)]
    return [Check(call=call, accepted=(expected,))]


def _closeness(call: ast.Call, names: tuple[str, ...]) -> list[Check]:
    relative, absolute, *defaults = CLOSE[_function(call)]
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    if len(call.args) != NUM_OPERANDS or not given.keys() <= {relative, absolute}:
        return []
    sides = _sides(call.args[0], call.args[1], names)
    if sides is None:
        return []
    relative_value, absolute_value = (
        given.get(name, ast.Constant(default)) for name, default in zip((relative, absolute), defaults, strict=True)
    )
    return [Check(call=sides[0], accepted=(sides[1],), relative=relative_value, absolute=absolute_value)]


def _alternatives(checks: Sequence[Check]) -> list[Check]:
    """Return one check that accepts the values of several of the same call; none if their calls differ."""
    if len({ast.dump(check.call) for check in checks}) > 1 or any(check.absolute for check in checks):
        return []
    return [replace(checks[0], accepted=tuple(value for check in checks for value in check.accepted))]


def _sides(left: ast.expr, right: ast.expr, names: tuple[str, ...]) -> tuple[ast.expr, ast.expr] | None:
    """Return the call of the program and the expected value, of the two sides of a comparison."""
    for name in names:
        is_left, is_right = (_mentions(side, (name,)) for side in (left, right))
        if is_left != is_right:
            return (left, right) if is_left else (right, left)
    if names:
        return None
    if literal(left)[0]:
        return None if literal(right)[0] else (right, left)
    return (left, right) if literal(right)[0] or any(isinstance(node, ast.Call) for node in ast.walk(left)) else None


def _is_call_of_program(node: ast.expr, names: tuple[str, ...]) -> bool:
    """Return whether an expression is a call of the program itself, not of a function that judges its value."""
    if not isinstance(node, ast.Call):
        return False
    arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
    if names:
        is_program = isinstance(node.func, ast.Name) and node.func.id in names
        return is_program and not any(_mentions(argument, names) for argument in arguments)
    match node.func:
        case ast.Name(id=name) | ast.Attribute(value=ast.Name(id=name) | ast.Call(func=ast.Name(id=name))):
            inner = (call for argument in arguments for call in ast.walk(argument) if isinstance(call, ast.Call))
            return not hasattr(builtins, name) and all(hasattr(builtins, _function(call)) for call in inner)
    return False


def _function(call: ast.Call) -> str:
    """Return the last name of a called function: `isclose` of `math.isclose(...)`."""
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _mentions(node: ast.AST, names: Sequence[str]) -> bool:
    return any(name in _loaded(node) for name in names)


def _loaded(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def _stored(node: ast.AST) -> set[str]:
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return names | {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}


def _variables(statements: Sequence[ast.stmt]) -> set[str]:
    """Return the names that statements assign, or define as functions; the names of imports are not among them."""
    found = {name for statement in statements for name in _stored(statement)}
    return found | {n.name for s in statements for n in ast.walk(s) if isinstance(n, ast.FunctionDef | ast.ClassDef)}


def _imported_names(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.Import | ast.ImportFrom):
        for alias in statement.names:
            yield alias.asname or alias.name.partition(".")[0]


def _renamed(node: ast.expr, names: tuple[str, ...], target: ast.expr | None) -> ast.expr:
    """Return a copy of an expression in which the parameter of `check` is the function that is tested."""

    class Rename(ast.NodeTransformer):
        def visit_Name(self, name: ast.Name) -> ast.expr:
            return target if target is not None and name.id == names[0] else name

    renamed = Rename().visit(ast.parse(ast.unparse(node), mode="eval").body)
    assert isinstance(renamed, ast.expr)
    return renamed


def _module(body: Sequence[ast.stmt]) -> ast.Module:
    return ast.Module(body=list(body), type_ignores=[])


def _optional(statement: ast.stmt) -> str:
    """Return the source of a statement; an import of a module that a sandbox lacks is left out when it runs."""
    source = ast.unparse(statement)
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return f"try: {source}\nexcept ImportError: pass"
    return source


def _tolerance(check: Check, expected: Any, relative: Any, absolute: Any) -> Tolerance | None:
    if check.as_plus:
        if absolute:
            return Tolerance(relative=PLUS_TOLERANCE.relative, absolute=absolute)
        values = expected if isinstance(expected, list | tuple) else [expected]
        return PLUS_TOLERANCE if all(isinstance(value, float) for value in values) else None
    return None if absolute is None else Tolerance(relative=relative, absolute=absolute)


def _single(check: Check) -> TestCase:
    """Return the test case of an assertion whose expected values and tolerances are literals."""
    relative, absolute = (None if e is None else literal(e)[1] for e in (check.relative, check.absolute))
    expected, *others = [literal(e)[1] for e in check.accepted]
    return TestCase(
        case=Case(call=ast.unparse(check.call)),
        expected=expected,
        others=tuple(others),
        tolerance=_tolerance(check, expected, relative, absolute),
    )


def _merge(check: Check, records: Sequence[Any]) -> Iterator[TestCase]:
    """Yield the test cases of an assertion that was met several times: lists of calls, and of their values."""
    tolerances = [_tolerance(check, accepted[0], *numbers) for _, accepted, *numbers in records]
    chunk, size = list[tuple[Any, Any]](), 0
    for i, (variables, accepted, *_) in enumerate(records):
        if len(accepted) > 1:
            yield _calls(check, [(variables, accepted[0])], tolerances[i], others=[[value] for value in accepted[1:]])
            continue
        chunk.append((variables, accepted[0]))
        size += len(repr(accepted[0]))
        is_last = i + 1 == len(records) or tolerances[i + 1] != tolerances[i]
        if is_last or len(chunk) == CALLS_PER_CASE or size > CALLS_BYTES:
            yield _calls(check, chunk, tolerances[i])
            chunk, size = [], 0
    if chunk:
        yield _calls(check, chunk, tolerances[-1])


def _calls(
    check: Check, pairs: Sequence[tuple[dict[str, Any], Any]], tolerance: Tolerance | None, others: Sequence[Any] = ()
) -> TestCase:
    """Return the test case of calls with the variables and the expected values of `pairs`."""
    if not pairs[0][0] and len(pairs) == 1:
        others = tuple(value for (value,) in others)
        return TestCase(
            case=Case(call=ast.unparse(check.call)), expected=pairs[0][1], others=others, tolerance=tolerance
        )
    names = "".join(f"{name}, " for name in pairs[0][0])
    values = repr([tuple(variables.values()) for variables, _ in pairs])
    try:
        ast.literal_eval(values)
    except (ValueError, MemoryError, RecursionError):
        raise TestCaseError(f"variables of an assertion need to be finite, got {values[:80]}") from None
    call = f"[{ast.unparse(check.call)} for ({names}) in {values}]"
    expected = [value for _, value in pairs]
    return TestCase(case=Case(call=call), expected=expected, others=tuple(others), tolerance=tolerance)


def _refuse(source: str, where: str) -> TestCaseError:
    return TestCaseError(
        f"{where} needs an assertion that compares a call of the program with an expected value, so that the value "
        f"stays outside of the sandbox, got {source[:200]!r}"
    )
