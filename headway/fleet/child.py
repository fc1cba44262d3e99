"""One child process of a local fleet: start, watch, read its log, end."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from headway.fleet.state import ProcessRecord, record_of, wait_ended
from headway.leash import leashed

_NUM_LOG_LINES = 15
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # whatever http_proxy says


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """How a child is started."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]  # added to our own environment
    log: Path
    http_address: str  # http://host:port that serves /readyz


class Child:
    """A running child. It leads its own session, so a terminal's Ctrl-C passes it by."""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.num_restarts = 0
        self._start()

    def _start(self) -> None:
        self.spec.log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self.spec.log.open("ab" if self.num_restarts else "wb") as log:
            self._process = subprocess.Popen(
                leashed(self.spec.argv, signal.SIGTERM),  # from the command's main thread
                env={**os.environ, **self.spec.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.record: ProcessRecord = record_of(
            self.spec.name, self._process.pid, str(self.spec.log), self.spec.http_address
        )

    def restart(self) -> None:
        """Starts an ended child again, with the same command."""
        self.num_restarts += 1
        self._start()

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def ready(self) -> bool:
        """True when /readyz answers 200."""
        try:
            with _NO_PROXY.open(self.spec.http_address + "/readyz", timeout=1) as answer:
                return bool(answer.status == 200)
        # URLError included: nobody listens yet, or it says 503; or another listens there
        except (OSError, http.client.HTTPException):
            return False

    def last_words(self) -> str:
        """The last lines of its log, for people, and where the rest is."""
        return f"{last_lines(self.spec.log)}\n(from {self.spec.log})"

    def signal_group(self, number: signal.Signals) -> None:
        """Signals the child and what shares its process group."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)


def stop_children(children: Sequence[Child], patience_s: float, hurry: Callable[[], bool]) -> None:
    """Ends children in order: SIGTERM, then SIGKILL for what is left, grandchildren included.

    `patience_s` is for all of them together; `hurry` is asked often and cuts it short.
    """
    family = _family(children)
    end = time.monotonic() + patience_s
    for child in children:
        child.signal_group(signal.SIGTERM)
        while child.exit_code is None and time.monotonic() < end and not hurry():
            time.sleep(0.05)
    for child in children:
        child.signal_group(signal.SIGKILL)
    for process in family:
        with suppress(psutil.Error):
            process.kill()
    wait_ended(family, 5.0)


def last_lines(log: Path, count: int = _NUM_LOG_LINES) -> str:
    """The end of a log; JSON lines are shown as level, message and what was raised.

    Of a traceback that stands there as it is, what was raised alone.
    """
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "(no log)"
    shown = list(_without_tracebacks(lines))[-count:]
    return "\n".join(_plain(line) for line in shown) or "(the log is empty)"


def _without_tracebacks(lines: Iterable[str]) -> Iterator[str]:
    inside = False
    for line in lines:
        if line.startswith("Traceback (most recent call last)"):
            inside = True
        elif not (inside and (not line or line[0].isspace())):
            inside = False
            yield line


def _plain(line: str) -> str:
    try:
        row = json.loads(line)
        cause = str(row.get("exception", "")).strip().splitlines()[-1:]
        return " ".join([str(row.get("level", "")), row["message"], *cause]).strip()
    except (ValueError, KeyError, TypeError, AttributeError):
        return line


def _family(children: Sequence[Child]) -> list[psutil.Process]:
    family: list[psutil.Process] = []
    for child in children:
        process = child.record.process()
        if process is not None:
            with suppress(psutil.Error):
                family += [process, *process.children(recursive=True)]
    return family
