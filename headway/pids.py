"""Processes of this machine, named so that no later one can be taken for them."""

from __future__ import annotations

import os
from pathlib import Path


def started(pid: int) -> int:
    """When a process began, in clock ticks after boot. ProcessLookupError: there is none.

    The kernel's own count: a time of day would move when the clock is set.
    """
    return int(_stat(pid)[19])


def is_running(pid: int, since: int) -> bool:
    """Whether the process that began then has not ended; a zombie has."""
    try:
        stat = _stat(pid)
    except ProcessLookupError:
        return False
    return int(stat[19]) == since and stat[0] not in (b"Z", b"X")


def _stat(pid: int) -> list[bytes]:
    """The fields from the third on: the name before them may hold anything."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessLookupError(f"no process {pid}") from None
    return stat.rpartition(b")")[2].split()


def boot() -> str:
    """Which boot of the machine this is."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def pid_space() -> str:
    """Where a process id means the same process: a boot, and a space of ids (a container's)."""
    return f"{boot()} {os.readlink('/proc/self/ns/pid')}"
