"""The error vocabulary of all services, and its one table to HTTP and gRPC.

A message says what was wrong, where, and what to do. `kind` is the stable
machine name; `retryable` says whether the very same call may succeed later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class HeadwayError(Exception):
    """Base of every error that Headway raises on purpose."""

    kind = "internal"
    retryable = False
    http_status = 500
    grpc_status = "INTERNAL"
    retry_after_s: float | None = None  # when a retryable call may succeed, where that is known


class Fault(NamedTuple):
    """One fault of what a user wrote: the dotted path of the key, and a sentence that names it."""

    path: str
    message: str


class InvalidSpec(HeadwayError):
    """A job, request or setting that cannot be accepted as written.

    `faults`: one by one, where they have been told apart.
    """

    kind = "invalid"
    http_status = 422
    grpc_status = "INVALID_ARGUMENT"

    def __init__(self, message: str = "", faults: Sequence[Fault] = ()) -> None:
        super().__init__(message or "; ".join(fault.message for fault in faults))
        self.faults = tuple(faults)


class NotFound(HeadwayError):
    """The thing that was named does not exist."""

    kind = "not_found"
    http_status = 404
    grpc_status = "NOT_FOUND"


class Conflict(HeadwayError):
    """The call contradicts what is already there."""

    kind = "conflict"
    http_status = 409
    grpc_status = "ALREADY_EXISTS"


class NoCapacity(HeadwayError):
    """The fleet lacks the processes that the job needs."""

    kind = "no_capacity"
    retryable = True
    http_status = 503
    grpc_status = "RESOURCE_EXHAUSTED"


class TooMany(NoCapacity):
    """As much as is taken on at once is at work: the same call fits later, or elsewhere."""

    kind = "too_many"
    http_status = 429

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(HeadwayError):
    """A service, Redis included, cannot be reached or is not ready."""

    kind = "unavailable"
    retryable = True
    http_status = 503
    grpc_status = "UNAVAILABLE"


class StoreFull(Unavailable):
    """Redis has no memory left: it takes again once some is freed."""

    kind = "store_full"


class Unauthorized(HeadwayError):
    """No token, or a wrong one."""

    kind = "unauthorized"
    http_status = 401
    grpc_status = "UNAUTHENTICATED"


class Forbidden(HeadwayError):
    """The token is good, but its role may not do this."""

    kind = "forbidden"
    http_status = 403
    grpc_status = "PERMISSION_DENIED"


class DeadlineExceeded(HeadwayError):
    """A peer did not answer in time."""

    kind = "deadline"
    retryable = True
    http_status = 504
    grpc_status = "DEADLINE_EXCEEDED"


class WeightMismatch(HeadwayError):
    """What landed in a rollout node is not what the learner sent."""

    kind = "weight_mismatch"
    http_status = 500
    grpc_status = "DATA_LOSS"


class EpochBroken(HeadwayError):
    """A weight group epoch lost a member; a new epoch is needed."""

    kind = "epoch_broken"
    retryable = True
    http_status = 503
    grpc_status = "ABORTED"


class LedgerViolation(HeadwayError):
    """A ledger invariant would break; never retried, always a bug or a stale caller."""

    kind = "ledger"
    http_status = 500
    grpc_status = "FAILED_PRECONDITION"


class NoCheckpoint(HeadwayError):
    """A job has trained steps that no checkpoint covers and that cannot be retraced."""

    kind = "no_checkpoint"
    http_status = 409
    grpc_status = "FAILED_PRECONDITION"


class OtherVersion(Conflict):
    """What was asked for one weight version would be, or was, sampled by another."""

    kind = "other_version"
    http_status = 412
    grpc_status = "FAILED_PRECONDITION"


class StorageFailed(HeadwayError):
    """A run's folder takes no more: the disk is full, gone or read-only."""

    kind = "storage"


class TrainingDiverged(HeadwayError):
    """Loss or gradient stayed non-finite."""

    kind = "diverged"


class JobFailed(HeadwayError):
    """A job ended in failure."""

    kind = "job_failed"


def sayable(text: str) -> str:
    """A message as UTF-8 can carry it: what it quotes may hold half a surrogate pair."""
    return text.encode("utf-8", "backslashreplace").decode()


class Interrupted(Exception):
    """The user asked to stop while something was being waited for."""
