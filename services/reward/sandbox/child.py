"""A sandboxed process that lives on: for what is slow to load and asked many times."""

from __future__ import annotations

import select
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, cast

from services.reward.grading.outcome import SandboxUnavailable
from services.reward.sandbox.command import START_S, STARTED, View
from services.reward.sandbox.limits import Limits
from services.reward.sandbox.tree import Tree


class SandboxedChild:
    """A running sandbox. `stdin` and `stdout` are unbuffered pipes; stderr goes nowhere.

    The caller watches the clock, bounds what it reads, and treats it as an enemy's. Of
    `Limits`, `wall_s` and `output_bytes` do not apply here; `cpu_s` counts its whole life.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self.stdin = cast(IO[bytes], tree.process.stdin)
        self.stdout = cast(IO[bytes], tree.process.stdout)

    @property
    def exit_code(self) -> int | None:
        """None while it runs; 128 + n after signal n."""
        return self._tree.process.poll()

    @property
    def resident_bytes(self) -> int:
        """Private resident memory of all its processes, each by itself."""
        return self._tree.resident_bytes()

    def kill(self) -> None:
        """Kills it with everything it started, and waits for the end. May be called twice."""
        self._tree.end()


@contextmanager
def sandboxed_child(
    argv: Sequence[str],
    files: Mapping[str, bytes] | None = None,
    limits: Limits | None = None,
    view: View | None = None,
) -> Iterator[SandboxedChild]:
    """A child that runs while the block does, and dies with it or with this process.

    It also dies with the thread that calls this: call it from one that stays. `files` (plain
    names) lie read-only under /box. Call `require()` first. SandboxUnavailable when the sandbox
    itself does not come up: nothing ran.
    """
    child = start_child(argv, files, limits, view)
    try:
        yield child
    finally:
        child.kill()


def start_child(
    argv: Sequence[str],
    files: Mapping[str, bytes] | None = None,
    limits: Limits | None = None,
    view: View | None = None,
) -> SandboxedChild:
    """The same without a block: the caller must `kill()` it."""
    limits = limits or Limits(wall_s=None, cpu_s=None)
    tree = Tree(argv, limits, view or View(), files or {}, keep_stderr=False)
    try:
        _await_start(cast(IO[bytes], tree.process.stderr))
    except BaseException:
        tree.end()
        raise
    return SandboxedChild(tree)


def _await_start(stderr: IO[bytes]) -> None:
    """Returns at the mark. SandboxUnavailable with what was said instead."""
    said, deadline = b"", time.monotonic() + START_S
    while not said.startswith(STARTED):
        ready, _, _ = select.select([stderr], [], [], max(0.0, deadline - time.monotonic()))
        chunk = stderr.read(4096) if ready else b""
        if not chunk:
            reason = said.decode(errors="replace").strip() or "it said nothing"
            raise SandboxUnavailable(f"the sandbox did not start: {reason[-500:]}")
        said += chunk
