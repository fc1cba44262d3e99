"""The tests' side of `asserts`: runs them, unit by unit, and tells how each ended."""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any, cast

from services.reward.grading.inside.remote import Ended, Link, Unsupported
from services.reward.grading.inside.wire import dumps

_ALIASES = {"np": "numpy", "numpy": "numpy", "pd": "pandas", "pandas": "pandas"}
Unit = Callable[[], object]
_MODULES = ("solution", "main", "program")  # tests may import the program under these names


class ProgramModule(ModuleType):
    """What `from solution import f` finds."""

    def __init__(self, name: str, names: dict[str, Any]) -> None:
        super().__init__(name)
        self.__dict__.update(names)
        self.__all__ = [known for known in names if not hasattr(builtins, known)]


def units(tree: ast.Module, function: str | None, names: dict[str, Any]) -> Iterator[Unit]:
    """The tests one by one: assert statements, `check`, test functions, unittest methods."""
    scope: dict[str, Any] = {"__name__": "tests"}
    scope.update({name: names[name] for name in _wanted(tree, function) if name in names})
    for name, module_name in _modules(tree).items():
        with contextlib.suppress(ImportError):  # where tests leave the import to the program
            scope[name] = importlib.import_module(module_name)
    if function in names:
        scope.setdefault("candidate", names[function])
    module = sys.modules["tests"] = ModuleType("tests")
    for statement in tree.body:
        code = compile(ast.Module([statement], []), "tests.py", "exec")
        if _is_unit(statement):
            yield partial(exec, code, scope)
        else:
            exec(code, scope)
    module.__dict__.update(scope)
    if _has_check(tree, function):
        yield lambda: scope["check"](scope["candidate"])
    for name in _test_functions(tree):
        yield scope[name]
    if not any(isinstance(node, ast.ClassDef) for node in tree.body):
        return
    import unittest

    for suite in unittest.defaultTestLoader.loadTestsFromModule(module):
        for case in cast(Any, suite):
            yield case.debug


def count(tree: ast.Module, function: str | None) -> int:
    """How many units there are, before any has run."""
    methods = (
        node.name
        for statement in tree.body
        if isinstance(statement, ast.ClassDef)
        for node in statement.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test")
    )
    plain = sum(map(_is_unit, tree.body)) + len(_test_functions(tree)) + len(list(methods))
    return plain + _has_check(tree, function)


def _is_unit(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Call)
    return isinstance(statement, ast.Assert | ast.For | ast.With | ast.Try)


def _has_check(tree: ast.Module, function: str | None) -> bool:
    """HumanEval's form: `def check(candidate)`, which nobody calls."""
    defined = any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body)
    return defined and function is not None and not _called(tree, "check")


def _test_functions(tree: ast.Module) -> list[str]:
    found = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            if _called(tree, node.name):
                continue
            if len(node.args.args) > len(node.args.defaults) or node.decorator_list:
                raise Unsupported(f"{node.name} wants arguments or a decorator")
            found.append(node.name)
    return found


def _wanted(tree: ast.Module, function: str | None) -> set[str]:
    """Names that only the program can define: no builtins, no modules that tests look into."""
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    own = set(dir(builtins)) | _modules(tree).keys()
    return (used - own) | ({function} if function else set())


def _modules(tree: ast.Module) -> dict[str, str]:
    """Modules that tests look into, by the names they use: real ones, never the program's."""
    known = {name: name for name in sys.stdlib_module_names} | _ALIASES
    used = (
        node.value.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    )
    return {name: known[name] for name in used if name in known}


def _called(tree: ast.Module, name: str) -> bool:
    calls = (
        node.func.id
        for statement in tree.body
        if not isinstance(statement, ast.FunctionDef | ast.ClassDef)
        for node in ast.walk(statement)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    )
    return name in calls


def _run(link: Link, job: dict[str, Any], tell: Callable[[dict[str, Any]], None]) -> None:
    """Runs all units, telling of each. Ended and Unsupported stop it."""
    function = job["function"]
    trees = [ast.parse(tests) for tests in job["tests"]]
    tell({"total": sum(count(tree, function) for tree in trees)})
    try:
        raw, _ = link.call({"do": "names"})
    except Exception as error:  # of the program's top level
        tell({"ok": False, "err": _said(error)})
        return
    names = {name: value for name, value in raw.items() if isinstance(name, str)}
    for name in _MODULES:
        sys.modules[name] = ProgramModule(name, names)
    for tree in trees:
        for unit in units(tree, function, names):
            try:
                unit()
            except Exception as error:
                if isinstance(error, ModuleNotFoundError) and not _of_program(error):
                    raise Unsupported(str(error)) from None
                tell({"ok": False, "err": _said(error)})
            else:
                tell({"ok": True})
    tell({"end": True})


def _of_program(error: BaseException) -> bool:
    return hasattr(error, "of_program")


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:500]


def judge(link: Link, job: dict[str, Any], pid: int, verdicts: int) -> None:
    """Runs the tests, and writes how each unit ended. `pid` is the program's process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)

    def tell(result: dict[str, Any]) -> None:
        os.write(verdicts, dumps(result).encode() + b"\n")

    try:
        _run(link, job, tell)
    except Ended as error:
        late = "too long" in str(error) or _ended_by(pid) == signal.SIGXCPU
        tell({"ok": False, "err": str(error), "late": late})
    except (Unsupported, ModuleNotFoundError, SyntaxError, SystemExit) as error:
        key = "err" if _of_program(error) else "unsupported"
        tell({"ok": False, key: _said(error)})
    except Exception as error:  # of what tests set up
        tell({"ok": False, "err": _said(error)})


def _ended_by(pid: int) -> int:
    """The signal that ended the program's process, 0 if none has."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.WTERMSIG(status) if ended and os.WIFSIGNALED(status) else 0
