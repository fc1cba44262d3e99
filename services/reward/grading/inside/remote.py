"""Stand-ins for what a program in another process defines.

They pass plain data over a pipe, so every comparison is of builtin values, made here. What cannot
be passed on is `Unsupported`, which is nobody's failure.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import select
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from services.reward.grading.inside import player
from services.reward.grading.inside.wire import decode, dumps, encode, loads

_MAX_ANSWER = 16 << 20


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
            player.write(self._ask, dumps(request).encode())
        except OSError:
            raise Ended("the program has ended") from None
        answer = self._read(time.monotonic() + self._wall_s)
        if "error" in answer:
            error = self._raised(answer)
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
        raise ValueError(f"unknown tag {tag!r}")

    def _raised(self, answer: dict[str, Any]) -> Exception:
        kind = self._exception(answer["error"], answer["bases"])
        if kind.__module__ == "builtins":  # one of the program's own may print itself otherwise
            with contextlib.suppress(TypeError):
                return kind(*self.decoded(answer["args"]))
        return kind(answer["message"])

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
        length = int.from_bytes(self._exactly(4, deadline), "big")
        if length > _MAX_ANSWER:
            raise Ended("the program answered too much")
        try:
            answer: dict[str, Any] = loads(self._exactly(length, deadline).decode())
            assert "value" in answer or {"error", "bases", "message", "args"} <= answer.keys()
        except (
            ValueError,
            StopIteration,
            AssertionError,
            TypeError,
            RecursionError,
            AttributeError,
        ):
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
