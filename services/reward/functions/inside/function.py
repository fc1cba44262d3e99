"""The user's function: loaded from its source, called as its signature wants, its answer read."""

from __future__ import annotations

import inspect
import math
import numbers
import sys
import types
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

from services.reward.functions.inside.arguments import SINGLE, WHOLE, Sample

_MAX_TEXT = 1500
_MODULE = "reward_function"


class Unfit(Exception):
    """What a function wants cannot be given, or what it gave is no reward."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Function:
    """The user's function, ready to be called."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        """Runs the source. Unfit when it defines no such function; whatever it raises."""
        self.name: str = spec["function"]
        self._file: str = spec["file"]
        self._call: str = spec["call"]
        self._kwargs: dict[str, Any] = spec["kwargs"]
        self._loop: Any = None  # asyncio's Runner, kept: clients belong to their loop
        self._module = types.ModuleType(_MODULE)
        self._module.__file__ = self._file
        sys.modules[_MODULE] = self._module
        exec(compile(spec["source"], self._file, "exec"), self._module.__dict__)
        function = getattr(self._module, self.name, None)
        if not callable(function):
            raise Unfit("internal", f"{self._file} defines no function {self.name}")
        self._function: Callable[..., Any] = function
        self._parameters = inspect.signature(function).parameters.values()

    def scores(self, samples: list[Sample]) -> list[dict[str, Any]]:
        """One result a sample, in order."""
        try:
            if self._call in WHOLE:
                given = self._given(WHOLE[self._call](samples))
                return list(self._each(self._value(given), len(samples)))
            return [self._one(sample) for sample in samples]
        except BaseException as error:  # a function may raise anything, SystemExit included
            return [self.failure(error)] * len(samples)

    def failure(self, error: BaseException) -> dict[str, Any]:
        """An error as it is told: kind, and what and where in the user's own file."""
        if isinstance(error, MemoryError):
            text = f"{self.name} needed more memory than it may have"
            return {"error": "memory", "message": text}
        if isinstance(error, Unfit):
            return {"error": error.kind, "message": str(error)}
        text = f"{self.name}: {described(error, self._file)}"
        return {"error": "internal", "message": text}

    def _one(self, sample: Sample) -> dict[str, Any]:
        value = self._value(self._given(SINGLE[self._call](sample)))
        parts = {}
        if self._call == "verl" and isinstance(value, Mapping):
            if "score" not in value:
                raise Unfit("internal", f"{self.name} gave a dict without score")
            parts = {str(k): number(v) for k, v in value.items() if k != "score" and countable(v)}
            value = value["score"]
        return {"reward": self._reward(value), "parts": parts}

    def _each(self, value: Any, wanted: int) -> Iterator[dict[str, Any]]:
        if not isinstance(value, list | tuple):
            raise Unfit(
                "internal", f"{self.name} gave {_kind(value)}, not a list of {wanted} rewards"
            )
        if len(value) != wanted:
            raise Unfit("internal", f"{self.name} gave {len(value)} rewards, not {wanted}")
        for entry in value:
            try:
                if entry is None:
                    raise Unfit("bad_input", f"{self.name} gave None for this completion")
                yield {"reward": self._reward(entry), "parts": {}}
            except Unfit as error:
                yield self.failure(error)

    def _reward(self, value: Any) -> float:
        if not countable(value):
            raise Unfit("internal", f"{self.name} gave {_kind(value)}, not a number")
        reward = number(value)
        if not math.isfinite(reward):
            raise Unfit("internal", f"{self.name} gave {reward}, not a finite number")
        return reward

    def _value(self, given: tuple[list[Any], dict[str, Any]]) -> Any:
        value = self._function(*given[0], **given[1])
        if not inspect.isawaitable(value):
            return value
        import asyncio  # slow to load, and rarely wanted

        self._loop = self._loop or asyncio.Runner()
        return self._loop.run(_awaited(value))

    def _given(self, values: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """What it is called with: of all there is, what its arguments name."""
        have = {**values, **self._kwargs}
        args: list[Any] = []
        named: dict[str, Any] = {}
        for parameter in self._parameters:
            name = parameter.name
            if parameter.kind is parameter.VAR_KEYWORD:
                named = {key: have[key] for key in have if key not in named} | named
            elif parameter.kind is not parameter.VAR_POSITIONAL:
                if name not in have and parameter.default is parameter.empty:
                    have[name] = self._wanted(name, values)
                if name in have and parameter.kind is parameter.POSITIONAL_ONLY:
                    args.append(have.pop(name))
                elif name in have:
                    named[name] = have[name]
        return args, named

    def _wanted(self, name: str, values: Mapping[str, Any]) -> Any:
        of_file = self._call.startswith("rubric") and hasattr(self._module, name)
        if of_file:  # a parser, say, that a Rubric would hold
            return getattr(self._module, name)
        hint = " or a variable of that name in the file" if self._call.startswith("rubric") else ""
        raise Unfit(
            "bad_input",
            f"{self.name} wants {name}, of which neither the item nor kwargs{hint} has a value"
            f" (there are: {', '.join(sorted(map(str, values)))})",
        )


def countable(value: Any) -> bool:
    """Whether it is one number: Python's, or a scalar of numpy or torch."""
    if isinstance(value, numbers.Real):
        return True
    shape = getattr(value, "shape", None)
    return callable(getattr(value, "item", None)) and shape is not None and tuple(shape) == ()


def number(value: Any) -> float:
    """As Python's own float. Unfit when it has no such value."""
    try:
        return float(value if isinstance(value, numbers.Real) else value.item())
    except (OverflowError, TypeError, ValueError) as error:
        raise Unfit("internal", f"{_kind(value)} is no reward: {error}") from None


def described(error: BaseException, file: str) -> str:
    """The last line of its traceback, and the last line of the user's file it went through."""
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            line = trace.tb_lineno
        trace = trace.tb_next
    try:
        text = f"{type(error).__name__}: {error}"
    except BaseException:
        text = type(error).__name__
    return text[:_MAX_TEXT] + (f" ({file}, line {line})" if line is not None else "")


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
