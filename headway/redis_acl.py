"""What each service may do in Redis: the keys it needs, the commands it uses, nothing else.

    python -m headway.redis_acl > users.acl

makes an ACL file for a server of your own, with fresh passwords: their hashes stand in the
file, they themselves once on stderr. The embedded server has the same users. A user that runs
scripts is held to its keys and commands inside of them too.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import sys
from collections.abc import Mapping
from typing import Final, Literal, get_args

from headway.ledger.keys import job_key, ledger_keys, validation_room
from headway.ledger.scripts import script

Service = Literal["coordinator", "learner", "rollout", "reward"]
SERVICES: Final[tuple[Service, ...]] = get_args(Service)

_LINK: Final = ("ping", "select", "client|setname")
_CALL = re.compile(r"redis\.call\('([A-Z]+)'")

LEDGER_CALLS: Final[Mapping[Service, frozenset[str]]] = {
    "coordinator": frozenset({"look", "members"}),
    "learner": frozenset(
        {"open", "issue", "take", "commit", "trim", "counts", "look", "members", "close"}
    ),
    "rollout": frozenset(
        {"claim", "renew", "release", "deliver", "fail", "announce", "withdraw", "members",
         "counts"}
    ),
}  # fmt: skip
"""The transitions that each service makes. Whoever runs one needs all of a ledger's keys."""

_ANY_JOB: Final = "*"
_PAYLOADS: Final = frozenset({"hmget"})
_JOBS: Final = (
    "hw:coordinator",
    "hw:jobs",
    "hw:jobs:active",
    "hw:idempotency:*",
    job_key(_ANY_JOB, "record"),
)
_JOB_COMMANDS: Final = frozenset(
    {
        "get",
        "set",
        "eval",
        "zadd",
        "zrem",
        "zrange",
        "zrevrange",
        "zrevrank",
        "xrange",
        "xrevrange",
        "info",
        "pttl",
        "pexpire",
    }
)


def acl_rules(service: Service) -> list[str]:
    """A user's rules but for its password, as `ACL SETUSER` takes them."""
    keys, commands = _needs(service)
    return [
        "reset", "on", *(f"~{key}" if not key.startswith("%") else key for key in keys),
        "-@all", *(f"+{command}" for command in sorted({*_LINK, *commands})),
    ]  # fmt: skip


def user_line(service: Service, password: str) -> str:
    """A user's line in an ACL file; only the password's hash stands in it."""
    hashed = hashlib.sha256(password.encode()).hexdigest()
    rules = [rule for rule in acl_rules(service) if rule != "reset"]
    return " ".join(["user", service, "reset", f"#{hashed}", *rules])


def derived_password(master: str, service: Service) -> str:
    """A service's password on the embedded server: the same at each start."""
    return hmac.new(master.encode(), f"redis user {service}".encode(), "sha256").hexdigest()


def _needs(service: Service) -> tuple[list[str], set[str]]:
    """Key patterns, and commands."""
    if service == "reward":
        return [], set()
    events, metrics = job_key(_ANY_JOB, "events"), job_key(_ANY_JOB, "metrics")
    rooms = ledger_keys(_ANY_JOB, validation_room("*"))
    keys = [*ledger_keys(_ANY_JOB), *rooms, events]
    commands = {"evalsha", "script|load", "xadd"}
    for transition in LEDGER_CALLS[service]:
        commands |= {name.lower() for name in _CALL.findall(script(transition))}
    if service == "learner":
        return [*keys, metrics], commands | _PAYLOADS
    if service == "coordinator":
        return [*keys, *_JOBS, f"%R~{metrics}"], commands | _JOB_COMMANDS
    return keys, commands


def main() -> int:
    """Prints an ACL file, and on stderr the passwords."""
    for service in SERVICES:
        password = secrets.token_urlsafe(32)
        print(user_line(service, password))
        print(f"{service}: {password}", file=sys.stderr)
    password = secrets.token_urlsafe(32)
    print(f"user admin reset #{hashlib.sha256(password.encode()).hexdigest()} on ~* &* +@all")
    print(f"admin: {password}", file=sys.stderr)
    print("user default reset off")
    return 0


if __name__ == "__main__":
    sys.exit(main())
