"""One program, run once: what goes in, what comes out, and what ended it."""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, cast

from services.reward.grading.outcome import SandboxUnavailable
from services.reward.sandbox.command import START_S, STARTED, View
from services.reward.sandbox.limits import MAX_FILES, Kind, Limits, Outcome, kind_of
from services.reward.sandbox.tree import Tree

_LOOK_S = 0.05  # how often the memory of all processes together is looked at
_CHUNK = 1 << 16


def run(
    argv: Sequence[str],
    stdin: bytes = b"",
    files: Mapping[str, bytes] | None = None,
    limits: Limits | None = None,
    view: View | None = None,
) -> Outcome:
    """Runs a program to its end or its limits; every process it started is gone afterwards.

    `files` (names or relative paths) lie read-only under /box; the working folder is /tmp. Call
    `require()` first. SandboxUnavailable when the sandbox itself does not come up: nothing ran.
    """
    limits = limits or Limits()
    tree = Tree(argv, limits, view or View(), files or {}, keep_stderr=True)
    try:
        return _Run(tree, stdin, limits).play()
    finally:
        tree.end()


class _Run:
    """Feeds and reads one sandbox until it ends or must."""

    def __init__(self, tree: Tree, stdin: bytes, limits: Limits) -> None:
        self._tree = tree
        self._left = memoryview(stdin)
        self._limits = limits
        self._out = {1: bytearray(), 2: bytearray()}
        self._created = time.monotonic()
        self._began: float | None = None  # when the program itself started
        self._next_look = self._created + _LOOK_S
        self._selector = selectors.DefaultSelector()

    def play(self) -> Outcome:
        """How it ended."""
        process = self._tree.process
        for number, pipe in enumerate((process.stdin, process.stdout, process.stderr)):
            stream = cast(IO[bytes], pipe)
            os.set_blocking(stream.fileno(), False)
            event = selectors.EVENT_READ if number else selectors.EVENT_WRITE
            self._selector.register(stream, event, number)
        with self._selector:
            ended_by = self._pump() or self._await_end()
        code = self._tree.end()
        if self._began is None:
            raise SandboxUnavailable(_reason(bytes(self._out[2]), ended_by))
        seconds = time.monotonic() - self._began
        stdout, stderr = (bytes(self._out[n][: self._limits.output_bytes]) for n in (1, 2))
        if ended_by is not None:
            return Outcome(ended_by, None, stdout, stderr, seconds)
        return Outcome(
            kind_of(code, stderr.decode(errors="replace")), code, stdout, stderr, seconds
        )

    def _pump(self) -> Kind | None:
        while any(key.data for key in self._selector.get_map().values()):
            for key, _ in self._selector.select(_LOOK_S):
                stream = cast(IO[bytes], key.fileobj)
                if key.data == 0:
                    self._feed(stream)
                elif not self._read(stream, key.data):
                    return "output"
            if (ended_by := self._look()) is not None:
                return ended_by
        return None

    def _await_end(self) -> Kind | None:
        """It has closed its outputs, but may go on."""
        while True:
            with suppress(subprocess.TimeoutExpired):
                self._tree.process.wait(_LOOK_S)
                return None
            if (ended_by := self._look()) is not None:
                return ended_by

    def _look(self) -> Kind | None:
        now = time.monotonic()
        if self._began is None:
            return "timeout" if now - self._created > START_S else None
        if self._limits.wall_s is not None and now - self._began > self._limits.wall_s:
            return "timeout"
        if now < self._next_look:
            return None
        self._next_look = now + _LOOK_S
        if self._tree.resident_bytes() > self._limits.memory_bytes:
            return "memory"
        return "disk" if self._tree.num_files() > MAX_FILES else None

    def _feed(self, stream: IO[bytes]) -> None:
        try:
            self._left = self._left[os.write(stream.fileno(), self._left[:_CHUNK]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._left = memoryview(b"")
        if not self._left:
            self._selector.unregister(stream)
            stream.close()

    def _read(self, stream: IO[bytes], number: int) -> bool:
        """False when the program has written more than it may."""
        out = self._out[number]
        chunk = os.read(stream.fileno(), _CHUNK)
        if not chunk:
            self._selector.unregister(stream)
        out += chunk
        if number == 2 and self._began is None and out[:1] == STARTED:
            del out[:1]
            self._began = time.monotonic()
        return len(out) <= self._limits.output_bytes


def _reason(stderr: bytes, ended_by: Kind | None) -> str:
    said = stderr.decode(errors="replace").strip() or "it said nothing"
    late = f" within {START_S:g} s" if ended_by == "timeout" else ""
    return f"the sandbox did not start{late}: {said[-500:]}"
