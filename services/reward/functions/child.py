"""The process that runs one user's function, as its worker sees it."""

from __future__ import annotations

import json
import os
import resource
import secrets
import select
import subprocess
import sys
import sysconfig
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol, cast

from services.reward import frames
from services.reward.functions.trust import functions_are_trusted
from services.reward.grading.outcome import (
    BadInput,
    GradingError,
    OutOfMemory,
    SandboxUnavailable,
    Spoilt,
)
from services.reward.sandbox import Limits, View, python_argv, require
from services.reward.sandbox.child import start_child

_INSIDE = "services.reward.functions.inside"
_FOLDER, _IN_SANDBOX = Path(__file__).parent / "inside", "/headway/services/reward/functions/inside"
_ENTRY = f"import sys; sys.path.insert(0, '/headway'); from {_INSIDE}.__main__ import main; main()"
_ROOM_A_RESULT = 4 << 10  # bytes of an answer, for each sample it is about
_LOOK_S = 0.1  # how often the memory of all its processes is looked at while it computes
_MAX_PROCESSES = 32  # and threads
_MAX_KEPT = 16  # functions a worker keeps loaded

_kept: OrderedDict[str, FunctionChild] = OrderedDict()


def child_of(spec: Mapping[str, Any]) -> FunctionChild:
    """The loaded child of a `python` grader, kept for the next batch.

    GradingError: the source fails. SandboxUnavailable: there is no sandbox, or none is wanted
    and the operator has not said that functions are trusted.
    """
    key = json.dumps(spec, sort_keys=True)
    child = _kept.pop(key, None) or FunctionChild(spec)
    child.start()
    _kept[key] = child
    while len(_kept) > _MAX_KEPT:
        _kept.popitem(last=False)[1].kill()
    return child


class _Process(Protocol):
    """A running child, sandboxed or not."""

    stdin: IO[bytes]
    stdout: IO[bytes]

    @property
    def resident_bytes(self) -> int: ...

    def kill(self) -> None: ...


class FunctionChild:
    """Starts the process when it is needed, asks it, and ends it when it is of no more use."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._spec = spec
        self._process: _Process | None = None
        self._memory_bytes = _memory_bytes()

    def start(self) -> None:
        """Loads the source unless that is done. GradingError, SandboxUnavailable."""
        if self._process is not None:
            return
        self._process = _sandboxed(self._memory_bytes) if self._spec["sandbox"] else _plain()
        load = ("source", "file", "function", "call", "kwargs")
        try:
            answer = self._exchange({key: self._spec[key] for key in load})
        except _Died as error:
            file = self._spec["file"]
            raise GradingError(f"{file} ended its process while loading: {error}") from None
        if answer.get("error") is not None:
            self.kill()
            raise GradingError(f"{self._spec['file']} does not load: {answer['error']}")

    def scores(self, samples: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
        """The function's results for the samples of one call, unchecked beyond their number.

        Spoilt when it ended its process, OutOfMemory when that and what it started held too much.
        """
        self.start()
        room = len(samples) * _ROOM_A_RESULT
        try:
            results = self._exchange({"samples": samples}, room).get("results")
        except _Died as error:
            raise Spoilt(str(error)) from None
        if not isinstance(results, list) or len(results) != len(samples):
            self.kill()
            raise Spoilt("it wrote nonsense")
        if any(isinstance(r, dict) and r.get("error") == "memory" for r in results):
            self.kill()  # what it has left may not be enough for the next
        return results

    def kill(self) -> None:
        """Ends the process and all that it started."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def _exchange(self, message: dict[str, Any], room: int = 0) -> dict[str, Any]:
        """Its answer to this very message: whatever else it writes ends it."""
        assert self._process is not None
        process, number = self._process, secrets.token_hex(8)
        try:
            frame = frames.encode(message | {"id": number})
        except (ValueError, RecursionError) as error:
            raise BadInput(f"the item cannot be sent to a function: {error}") from None
        try:
            frames.write_frame(process.stdin.fileno(), frame)
            self._watch(process)
            limit = frames.MAX_ANSWER_BYTES + room
            answer = frames.read_blocking(process.stdout.fileno(), limit)
        except (OSError, ValueError, RecursionError, frames.BrokenFrame) as error:
            self.kill()
            raise _Died(str(error)) from None
        if not isinstance(answer, dict) or answer.get("id") != number:
            self.kill()
            raise _Died("it closed its pipe" if answer is None else "it wrote nonsense")
        return answer

    def _watch(self, process: _Process) -> None:
        """Waits for an answer; OutOfMemory when its processes together hold too much."""
        while not select.select([process.stdout], [], [], _LOOK_S)[0]:
            if process.resident_bytes > self._memory_bytes:
                self.kill()
                raise OutOfMemory(
                    f"{self._spec['function']} and what it started needed more memory than they"
                    " may have"
                )


class _Died(Exception):
    """The child ended, or wrote what is no answer."""


def _sandboxed(memory_bytes: int) -> _Process:
    require()
    packages = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    inside = [f"/packages{number}" for number in range(len(packages))]
    view = View(
        paths=((str(_FOLDER), _IN_SANDBOX), *zip(packages, inside, strict=True)),
    )
    limits = Limits(wall_s=None, cpu_s=None, memory_bytes=memory_bytes, processes=_MAX_PROCESSES)
    argv = python_argv("-c", _ENTRY, *(f"--packages={path}" for path in inside))
    return start_child(argv, limits=limits, view=view)


class _Plain:
    """A child outside the sandbox: with the worker's limits, environment and network."""

    resident_bytes = 0  # not looked at: it is trusted

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", _INSIDE, "--die-with-parent"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
        )  # fmt: skip
        self.stdin = cast(IO[bytes], self._process.stdin)
        self.stdout = cast(IO[bytes], self._process.stdout)

    def kill(self) -> None:
        """Ends it and waits for the end."""
        self._process.kill()
        self._process.wait()
        for pipe in (self.stdin, self.stdout):
            with suppress(OSError):
                pipe.close()


def _plain() -> _Process:
    if not functions_are_trusted():
        raise SandboxUnavailable(
            "this service runs functions in the sandbox only: leave sandbox at true, or start it"
            " with --trust-functions"
        )
    return _Plain()


def _memory_bytes() -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if limit < 0 else limit
