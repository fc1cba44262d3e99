"""What rank 0 tells its agent: JSON lines on a pipe, the last one counts."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from typing import Literal

Phase = Literal["starting", "running", "succeeded", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class Status:
    """Where a job's training stands."""

    phase: Phase = "starting"
    detail: str = ""  # what it waits for, or why it failed
    step: int | None = None  # optimiser steps done
    error_kind: str = ""
    retryable: bool = False  # the failure may pass: start the ranks again
    waiting: str = ""  # a reason of headway/waits.py, while it waits long enough to be told
    waiting_since: float = 0.0  # Unix time


class Reporter:
    """Sends every change of the status; without a descriptor it only remembers the last."""

    def __init__(self, fd: int | None = None) -> None:
        self._fd = fd
        self.status = Status()

    def update(self, **changes: object) -> None:
        """Changes fields of the status and sends it when it differs."""
        status = replace(self.status, **changes)  # type: ignore[arg-type]
        if status == self.status:
            return
        self.status = status
        if self._fd is not None:
            os.write(self._fd, (json.dumps(asdict(status)) + "\n").encode())


def parse_status(line: bytes) -> Status:
    """A status from one line of the pipe."""
    return Status(**json.loads(line))
