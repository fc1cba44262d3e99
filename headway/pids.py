"""Processes of this machine, named so that no later one can be taken for them."""

from __future__ import annotations

import os
from pathlib import Path


def started(pid: int) -> int:
    """When a process began, in clock ticks after boot. ProcessLookupError: there is none.

    The kernel's own count: a time of day would move when the clock is set.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessLookupError(f"no process {pid}") from None
    return int(stat.rpartition(b")")[2].split()[19])  # the name before it may hold anything


def boot() -> str:
    """Which boot of the machine this is."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def pid_space() -> str:
    """Where a process id means the same process: a boot, and a space of ids (a container's)."""
    return f"{boot()} {os.readlink('/proc/self/ns/pid')}"
