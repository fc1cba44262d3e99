"""A reward service for this process alone: the same workers and limits, on loopback.

It is a process of its own, shows its door to whoever has the token that was made for it, and
ends with the process that started it, however that ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress

import httpx

from headway.access.tokens import new_token
from headway.errors import Unavailable
from headway.leash import leashed
from headway.ports import free_port

_START_S = 90.0
_LOOK_EVERY_S = 0.05
# What the environment says of other fleets is not for this service.
_NOT_OURS = ("HEADWAY_TOKENS", "HEADWAY_TOKEN_FILE", "HEADWAY_COORDINATOR", "HEADWAY_ALLOW_PATHS")
_TLS = tuple(f"HEADWAY_TLS_{part}" for part in ("DIR", "CERT", "KEY", "CA", "NAME"))


class OwnService:
    """Started at once; `ready` waits for it."""

    def __init__(self, num_workers: int = 0) -> None:
        """`num_workers` 0: two at most, one on a single core."""
        port = free_port()
        self.address = f"http://127.0.0.1:{port}"
        self.token, _ = new_token("service", "harness", time.time())
        workers = num_workers or min(2, os.cpu_count() or 1)
        argv = [sys.executable, "-P", "-m", "services.reward"]
        argv += ["--http-port", str(port), "--workers", str(workers), "--log-level", "warning"]
        env = {k: v for k, v in os.environ.items() if k not in (*_NOT_OURS, *_TLS)}
        env["HEADWAY_TOKEN"] = self.token
        self._last_words: deque[str] = deque(maxlen=15)
        self._process: subprocess.Popen[str] | None = None
        self._begun = threading.Event()
        # The kernel ends the service when the thread that started it ends: not a harness's own,
        # which may be one of a pool.
        threading.Thread(target=self._keep, args=(argv, env), daemon=True).start()

    def ready(self) -> None:
        """Returns when it scores. Unavailable: it ended, or takes too long."""
        end = time.monotonic() + _START_S
        self._begun.wait()
        with httpx.Client(base_url=self.address, trust_env=False, timeout=2.0) as probe:
            while self.alive and time.monotonic() < end:
                with suppress(httpx.HTTPError):  # nobody listens yet
                    if probe.get("/readyz").is_success:
                        return
                time.sleep(_LOOK_EVERY_S)
        self.stop()
        raise Unavailable("no reward service could be started: " + "".join(self._last_words))

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """Ends it; safe to repeat."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _keep(self, argv: list[str], env: dict[str, str]) -> None:
        try:
            self._process = subprocess.Popen(
                leashed(argv, signal.SIGKILL),
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        except OSError as error:
            self._last_words.append(str(error))
            return
        finally:
            self._begun.set()
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._last_words.append(line)
        self._process.wait()
