"""Runs tests against a program that is in another process.

The program runs in a fork made before the tests are read: they are in no memory it has, in no
file, and no descriptor leads to them. What tests see of it are stand-ins (`Remote`) that pass
plain data over a pipe, so every comparison is of builtin values, made here. What a test asks for
that cannot be passed on is reported as `unsupported`, which is nobody's failure.

    stdin  <- a length and {"program", limits}; then a length and {"tests", "function"}
    stdout -> one JSON line a unit of the tests: {"ok": true} or {"ok": false, "err": text}
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import os
import select
import signal
import struct
import sys
import time
import unittest
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any, cast

sys.path.insert(0, "/box")
import player  # type: ignore[import-not-found]
from wire import decode, encode  # type: ignore[import-not-found]

sys.path[0] = "/packages"
_LENGTH = struct.Struct("!I")
_MAX_ANSWER = 16 << 20
Unit = Callable[[], object]
_MODULES = ("solution", "main", "program")  # tests may import the program under these names


class Ended(BaseException):
    """The program is gone, late, or out of order; no `except Exception` of a test hides it."""


class Unsupported(BaseException):
    """The tests want what cannot be passed to another process."""


class ProgramExit(Exception):
    """The program called exit."""


class Link:
    """Requests to the process that has the program."""

    def __init__(self, ask: int, answer: int, wall_s: float) -> None:
        self._ask, self._answer, self._wall_s = ask, answer, wall_s
        self._exceptions: dict[str, type[Exception]] = {}

    def call(self, request: dict[str, Any]) -> Any:
        """What the program answers, or raises what it raised."""
        try:
            player.write(self._ask, request)
        except OSError:
            raise Ended("the program has ended") from None
        answer = self._read(time.monotonic() + self._wall_s)
        if "error" in answer:
            error = self._exception(answer["error"], answer["bases"])(answer["message"])
            error.of_program = True  # type: ignore[attr-defined]
            raise error
        return self.decoded(answer["value"]), answer.get("changed", {})

    def decoded(self, data: Any) -> Any:
        """A value that came from the program."""
        try:
            return decode(data, self._other)
        except (TypeError, ValueError, KeyError, RecursionError) as error:
            raise Ended(f"the program answered nonsense: {error}") from None

    def encoded(self, value: Any) -> Any:
        """A value for the program."""
        return encode(value, _handle)

    def _other(self, tag: str, body: Any) -> Any:
        if tag == "h":
            return Remote(self, body[0], body[1])
        if tag == "x":
            return self._exception(body[0], body[1])
        if tag == "m" and body in sys.stdlib_module_names:
            return importlib.import_module(body)
        raise ValueError(f"unknown tag {tag!r}")

    def _exception(self, name: str, bases: list[str]) -> type[Exception]:
        known = getattr(builtins, name, None)
        if isinstance(known, type) and issubclass(known, Exception):
            return known
        if name not in self._exceptions:
            found = (getattr(builtins, base, None) for base in bases)
            base = next(
                (b for b in found if isinstance(b, type) and issubclass(b, Exception)), None
            )
            self._exceptions[name] = type(str(name), (base or ProgramExit,), {})
        return self._exceptions[name]

    def _read(self, deadline: float) -> dict[str, Any]:
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size, deadline))
        if length > _MAX_ANSWER:
            raise Ended("the program answered too much")
        try:
            answer = json.loads(self._exactly(length, deadline))
            assert "value" in answer or {"error", "bases", "message"} <= answer.keys()
        except (ValueError, AssertionError, TypeError, RecursionError, AttributeError):
            raise Ended("the program answered nonsense") from None
        return answer

    def _exactly(self, length: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < length:
            wait = max(0.0, deadline - time.monotonic())
            if not select.select([self._answer], [], [], wait)[0]:
                raise Ended("the program took too long")
            chunk = os.read(self._answer, length - len(data))
            if not chunk:
                raise Ended("the program has ended")
            data += chunk
        return bytes(data)


class Remote:
    """Stands for a function, class or object of the program. Equal only to itself."""

    def __init__(self, link: Link, key: int, kind: str) -> None:
        self.__dict__["_remote"] = (link, key, kind)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The program's answer; what it did to lists and dicts among `args` is done to them."""
        link, key, _ = self._remote
        sent = [link.encoded(list(args)), link.encoded(kwargs)]
        value, changed = link.call({"do": "call", "key": key, "args": sent[0], "kwargs": sent[1]})
        for position, data in changed.items():
            _write_back(args[int(position)], link.decoded(data))
        return value

    def __getattr__(self, name: str) -> Any:
        return self._ask("attribute", name=name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("set", name=name, value=self._remote[0].encoded(value))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and self._remote[1] == other._remote[1]

    def __hash__(self) -> int:
        return hash(self._remote[1])

    def __len__(self) -> int:
        return int(self._ask("len"))

    def __bool__(self) -> bool:
        return True

    def __str__(self) -> str:
        return str(self._ask("str"))

    def __repr__(self) -> str:
        return str(self._ask("repr"))

    def __getitem__(self, key: Any) -> Any:
        return self._ask("item", value=self._remote[0].encoded(key))

    def __contains__(self, value: Any) -> bool:
        return self._ask("contains", value=self._remote[0].encoded(value)) is True

    def __iter__(self) -> Iterator[Any]:
        iterator = self._ask("iter")
        while True:
            more = iterator._ask("next")
            if not more:
                return
            yield more[0]

    def __next__(self) -> Any:
        more = self._ask("next")
        if not more:
            raise StopIteration
        return more[0]

    def _ask(self, do: str, **more: Any) -> Any:
        link, key, _ = self._remote
        return link.call({"do": do, "key": key, **more})[0]


def _handle(value: Any) -> Any:
    if isinstance(value, Remote):
        return ["h", value._remote[1]]
    if isinstance(value, range | map | filter | zip | type({}.keys()) | type({}.values())):
        return encode(list(value), _handle)
    if isinstance(value, type | ModuleType):  # as the program itself may have given
        raise TypeError(f"a {type(value).__name__} is passed to the program")
    raise Unsupported(f"the tests pass a {type(value).__name__} to the program")


def _write_back(target: Any, value: Any) -> None:
    if isinstance(target, list | bytearray):
        target[:] = value
    elif isinstance(target, dict | set):
        target.clear()
        target.update(value)


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
    for suite in unittest.defaultTestLoader.loadTestsFromModule(module):
        for case in cast(unittest.TestSuite, suite):
            yield cast(unittest.TestCase, case).debug


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
    modules = {
        node.value.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    } & set(sys.stdlib_module_names)
    return (used - set(dir(builtins)) - modules) | ({function} if function else set())


def _called(tree: ast.Module, name: str) -> bool:
    calls = (
        node.func.id
        for statement in tree.body
        if not isinstance(statement, ast.FunctionDef | ast.ClassDef)
        for node in ast.walk(statement)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    )
    return name in calls


def judge(link: Link, job: dict[str, Any], tell: Callable[[dict[str, Any]], None]) -> None:
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


def read_part() -> Any:
    """One length and JSON of stdin, and not a byte more."""
    (length,) = _LENGTH.unpack(_take(_LENGTH.size))
    return json.loads(_take(length))


def _take(length: int) -> bytes:
    data = b""
    while len(data) < length:
        chunk = os.read(0, length - len(data))
        if not chunk:
            raise EOFError
        data += chunk
    return data


def _ended_by(pid: int) -> int:
    """The signal that ended the program's process, 0 if none has."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.WTERMSIG(status) if ended and os.WIFSIGNALED(status) else 0


def main() -> None:
    """Forks the program off, then reads the tests."""
    job = read_part()
    asked, ask = os.pipe()
    answer, answered = os.pipe()
    pid = os.fork()
    if pid == 0:
        player.play(job, asked, answered)
    os.close(asked)
    os.close(answered)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    verdicts = os.dup(1)
    os.dup2(os.open("/dev/null", os.O_WRONLY), 1)  # what tests print goes nowhere

    def tell(result: dict[str, Any]) -> None:
        os.write(verdicts, json.dumps(result).encode() + b"\n")

    try:
        judge(Link(ask, answer, job["wall_s"]), read_part(), tell)
    except Ended as error:
        late = "too long" in str(error) or _ended_by(pid) == signal.SIGXCPU
        tell({"ok": False, "err": str(error), "late": late})
    except (Unsupported, ModuleNotFoundError, SyntaxError, SystemExit) as error:
        key = "err" if _of_program(error) else "unsupported"
        tell({"ok": False, key: _said(error)})
    except Exception as error:  # of what tests set up
        tell({"ok": False, "err": _said(error)})
    os._exit(0)


main()
