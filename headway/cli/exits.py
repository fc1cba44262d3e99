"""Exit codes, the same for every command (docs/command.md)."""

from __future__ import annotations

from headway.errors import HeadwayError, Interrupted
from headway.jobs import JobRecord

SUCCEEDED, FAILED, BAD_USAGE, UNREACHABLE, CANCELLED = 0, 1, 2, 3, 130

_BY_KIND = {
    "invalid": BAD_USAGE,
    "not_found": BAD_USAGE,
    "conflict": BAD_USAGE,
    "no_capacity": UNREACHABLE,
    "unavailable": UNREACHABLE,
    "unauthorized": UNREACHABLE,
    "forbidden": UNREACHABLE,
    "deadline": UNREACHABLE,
}


def exit_code_of(error: BaseException) -> int | None:
    """The code for an error that was raised on purpose; None for a bug."""
    if isinstance(error, Interrupted):
        return CANCELLED
    if isinstance(error, HeadwayError):
        return _BY_KIND.get(error.kind, FAILED)
    return None


def exit_code_of_job(record: JobRecord) -> int:
    """The code for a job that has ended."""
    return {"succeeded": SUCCEEDED, "cancelled": CANCELLED}.get(record.state, FAILED)
