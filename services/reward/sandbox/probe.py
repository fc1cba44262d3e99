"""Does the sandbox hold on this machine? Tried by a canary before anything runs in it."""

from __future__ import annotations

import json
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from services.reward.grading.outcome import SandboxUnavailable
from services.reward.sandbox.command import python_argv
from services.reward.sandbox.limits import MIB, Limits, Outcome
from services.reward.sandbox.once import run

_CANARY = Path(__file__).with_name("canary.py")
_LIMITS = Limits(
    wall_s=20.0, cpu_s=10, memory_bytes=256 * MIB, processes=6, file_bytes=8 * MIB, tmp_bytes=MIB
)
_MAX_PID = 100
_FORGET_S = 30.0  # a sandbox that does not hold is looked at again then
_held = False
_failure: tuple[float, str] | None = None


def require() -> None:
    """Returns once the sandbox has been seen to hold in this process.

    SandboxUnavailable says what is missing or does not hold. Takes tenths of a second the first
    time; a failure is remembered for half a minute.
    """
    global _held, _failure
    if _held:
        return
    if _failure is None or time.monotonic() - _failure[0] > _FORGET_S:
        problem = _problem()
        _held, _failure = not problem, (time.monotonic(), problem) if problem else None
    if _failure is not None:
        raise SandboxUnavailable(_failure[1])


def _problem() -> str:
    """Why code must not be run here; empty when it may."""
    try:
        faults = _faults()
    except SandboxUnavailable as error:
        return f"code is not run: {error}"
    except OSError as error:
        return f"code is not run: the sandbox could not be tried: {error}"
    return f"code is not run: the sandbox does not hold: {'; '.join(faults)}" if faults else ""


def _faults() -> list[str]:
    with (
        tempfile.NamedTemporaryFile(prefix="headway-canary-") as host_file,
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as unix,
    ):
        name = f"headway-canary-{secrets.token_hex(8)}"
        unix.bind("\0" + name)
        unix.listen()
        os.chmod(host_file.name, 0o644)
        asked = {
            "host_file": host_file.name, "tcp": tcp.getsockname(), "unix": name,
            "tmp_bytes": _LIMITS.tmp_bytes, "memory_bytes": _LIMITS.memory_bytes,
            "processes": _LIMITS.processes, "limits": sorted(_expected_limits()),
        }  # fmt: skip
        argv = python_argv("/box/canary.py", json.dumps(asked))
        outcome = run(argv, files={"canary.py": _CANARY.read_bytes()}, limits=_LIMITS)
        called = [kind for kind, door in (("TCP", tcp), ("Unix", unix)) if _called(door)]
    return [f"a {kind} connection came out" for kind in called] + _compare(outcome)


def _expected_limits() -> dict[str, int]:
    return {
        "RLIMIT_AS": _LIMITS.memory_bytes, "RLIMIT_CPU": _LIMITS.cpu_s or 0,
        "RLIMIT_FSIZE": _LIMITS.file_bytes, "RLIMIT_NOFILE": _LIMITS.open_files, "RLIMIT_CORE": 0,
    }  # fmt: skip


def _compare(outcome: Outcome) -> list[str]:
    try:
        found: dict[str, Any] = json.loads(outcome.stdout)
        return [name for name, holds in _PROMISES.items() if not holds(found)]
    except (ValueError, KeyError, TypeError):
        said = outcome.stderr.decode(errors="replace").strip()[-300:]
        return [f"the canary ended as {outcome.kind}, exit code {outcome.exit_code}: {said}"]


def _stopped(name: str) -> Callable[[dict[str, Any]], bool]:
    return lambda found: found[name] != "done"


_PROMISES: dict[str, Callable[[dict[str, Any]], bool]] = {
    "runs as root": lambda found: found["uid"] != 0,
    "can become root": _stopped("become_root"),
    "has capabilities": _stopped("chroot"),
    "no process namespace": lambda found: found["pid"] < _MAX_PID,
    "sees the environment": lambda found: len(found["environment"]) < 12,
    "sees host files": _stopped("host_file"),
    "sees /proc": _stopped("proc"),
    "sees /sys": _stopped("sys"),
    "writes to /": _stopped("write_root"),
    "writes to /usr": _stopped("write_usr"),
    "writes to the interpreter": _stopped("write_interpreter"),
    "cannot write to /tmp": lambda found: found["write_tmp"] == "done",
    "/tmp has no limit": lambda found: found["fill_tmp"] == "OSError",
    "has a network": _stopped("network"),
    "reaches abstract sockets": _stopped("unix"),
    "no system call filter": lambda found: found["uncounted_memory"] == "PermissionError",
    "no memory limit": lambda found: found["memory"] == "MemoryError",
    "other limits": lambda found: found["limits"] == _expected_limits(),
    "no process limit": lambda found: 1 <= found["forks"] <= _LIMITS.processes,
}


def _called(door: socket.socket) -> bool:
    door.setblocking(False)
    with suppress(BlockingIOError):
        door.accept()[0].close()
        return True
    return False
