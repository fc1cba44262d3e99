"""Runs tests against a program that is in another process.

The program runs in a fork made before the tests are read: they are in no memory it has, in no
file, and no descriptor leads to them. `player` is its side, `judge` the other.

    stdin  <- a length and {"program", limits}; then a length and {"tests", "function"}
    stdout -> one JSON line a unit of the tests: {"ok": true} or {"ok": false, "err": text}
"""

from __future__ import annotations

import os

from services.reward.grading.inside import player
from services.reward.grading.inside.wire import loads

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def read_part() -> Any:
    """One length and message of stdin, and not a byte more."""
    return loads(_take(int.from_bytes(_take(4), "big")).decode())


def _take(length: int) -> bytes:
    data = b""
    while len(data) < length:
        chunk = os.read(0, length - len(data))
        if not chunk:
            raise EOFError
        data += chunk
    return data


def main() -> None:
    """Forks the program off, then reads the tests."""
    job = read_part()
    asked, ask = os.pipe()
    answer, answered = os.pipe()
    pid = os.fork()
    if pid == 0:
        player.play(job, asked, answered)
    os.close(asked)
    os.close(answered)
    from services.reward.grading.inside import judge, remote

    verdicts = os.dup(1)
    os.dup2(os.open("/dev/null", os.O_WRONLY), 1)  # what tests print goes nowhere
    judge.judge(remote.Link(ask, answer, job["wall_s"]), read_part(), pid, verdicts)
    os._exit(0)
