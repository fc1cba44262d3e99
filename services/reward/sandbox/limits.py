"""What a sandboxed program may use, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

MIB = 1 << 20
MAX_FILES = 20_000  # in /tmp

Kind = Literal["ok", "crash", "timeout", "memory", "processes", "disk", "output"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_SIGXCPU, _SIGXFSZ = 128 + 24, 128 + 25
# What Python, and most others, say last when they meet a limit.
_COMPLAINTS: tuple[tuple[str, Kind], ...] = (
    ("MemoryError", "memory"), ("Cannot allocate memory", "memory"), ("bad_alloc", "memory"),
    ("can't start new thread", "processes"), ("Resource temporarily unavailable", "processes"),
    ("No space left on device", "disk"), ("File too large", "disk"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one sandbox. Sizes are bytes, times seconds."""

    wall_s: float | None = 10.0  # None: the caller watches the clock (long-lived children)
    cpu_s: int | None = 10  # of one process
    memory_bytes: int = 512 * MIB  # address space of one process; resident memory of all
    processes: int = 16  # and threads, all together
    file_bytes: int = 64 * MIB  # one file
    tmp_bytes: int = 64 * MIB  # /tmp as a whole
    output_bytes: int = 1 * MIB  # stdout, and as much of stderr
    open_files: int = 64  # of one process


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program ended.

    `kind`: `ok` (exit code 0), `timeout` (wall clock or CPU), `memory`, `processes`, `disk`,
    `output` (more than it may write), else `crash` (an exit code other than 0, a signal).
    `exit_code` is 128 + n after signal n, and None where the sandbox ended it.
    """

    kind: Kind
    exit_code: int | None
    stdout: bytes
    stderr: bytes
    seconds: float


def kind_of(exit_code: int, stderr: str) -> Kind:
    """What an exit code (128 + n after signal n) and the last line of stderr make likely."""
    if exit_code == 0:
        return "ok"
    if exit_code in (_SIGXCPU, _SIGXFSZ):
        return "timeout" if exit_code == _SIGXCPU else "disk"
    last = stderr.rstrip().rpartition("\n")[2]
    return next((kind for complaint, kind in _COMPLAINTS if complaint in last), "crash")
