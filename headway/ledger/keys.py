"""Every Redis key of a job's work ledger: name, type, lifetime, who writes it.

A job has one ledger for what it trains on, and one beside it, in a *room* `val-<version>`, for each
validation: the same keys with the room before their names, `hw:{<job>}:val-20:meta`.

All names share the hash tag `{<job>}`, so that a cluster keeps a job in one slot.
Every script gets all of them, in this order, as KEYS; `scripts` gives each its
name in capitals inside the script. `close` lets all of them expire after
RETENTION_S. Values named `id` are ticket ids; times are microseconds of the
server's clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

RETENTION_S: Final = 7 * 24 * 3600
"""How long a closed ledger can still be read."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key: what it holds, how long an entry lives, and who writes it."""

    name: str
    type: Literal["hash", "zset", "set"]
    holds: str
    lifetime: str
    written_by: str


KEYS: Final[tuple[Key, ...]] = (
    Key("meta", "hash", "settings, counters and step pointers", "the job", "all transitions"),
    Key("tickets", "hash", "id -> packed ticket", "issue until it is no longer claimable",
        "issue, deliver, fail, take"),
    Key("issued", "zset", "id scored by id: claimable, oldest first", "issue until claim",
        "issue, claim, release, fail, expiry"),
    Key("attempts", "hash", "id -> attempts begun", "first claim until the ticket ends",
        "claim, release, deliver, fail, take, expiry"),
    Key("leases", "zset", "id scored by the time its lease ends", "claim until it ends",
        "claim, renew, release, deliver, fail, take, expiry"),
    Key("holders", "hash", "id -> token:start_version:claimed_at:node", "as leases",
        "claim, release, deliver, fail, take, expiry"),
    Key("deadlines", "hash", "id -> last step that may train on it; leased or delivered",
        "claim until take; gone when the lease is lost or the ticket is late",
        "claim, release, deliver, fail, take, expiry"),
    Key("late", "set", "id: to be trained with its too old tokens masked", "take until its take",
        "take, release, deliver, fail, expiry"),
    Key("arrived", "zset", "id scored by order of arrival: delivered, not taken",
        "deliver until take", "deliver, take"),
    Key("arrived_at", "hash", "id -> time of delivery", "as arrived", "deliver, take"),
    Key("payloads", "hash", "id -> packed group", "deliver until trim", "deliver, trim"),
    Key("batches", "hash", "step -> ids;late ids;microseconds queued", "take until trim",
        "take, trim"),
    Key("reasons", "hash", "reason -> groups filtered, dropped or abandoned for it", "the job",
        "deliver, fail, take, expiry"),
    Key("members", "hash", "node id -> JSON of its announcement", "announce until its time is up",
        "announce, withdraw, members"),
    Key("members_until", "zset", "node id scored by the time its announcement ends",
        "as members", "announce, withdraw, members"),
)  # fmt: skip


def job_key(job_id: str, name: str) -> str:
    """The full name of a job's key; the braces make the job the cluster's hash tag."""
    return f"hw:{{{job_id}}}:{name}"


def validation_room(version: int | str) -> str:
    """The room of the ledger in which a job validates one of its versions."""
    return f"val-{version}"


def ledger_keys(job_id: str, room: str = "") -> list[str]:
    """All keys of one of a job's ledgers, in the order in which scripts expect them."""
    return [job_key(job_id, room_key(room, key.name)) for key in KEYS]


def room_key(room: str, name: str) -> str:
    """A key's name in a room: a job has its own ledger in none, and others beside it."""
    return f"{room}:{name}" if room else name
