"""The check at every door: who presents this token, and may they come in?"""

from __future__ import annotations

import hmac
import os
import time
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import Counter

from headway.access.roles import Role, Roles
from headway.access.tokens import TOKEN, TokenFile, TokenRecord, sha256_of
from headway.errors import Forbidden, HeadwayError, InvalidSpec, Unauthorized
from headway.telemetry import get_logger

log = get_logger(__name__)

REFUSED = Counter("headway_refused_calls", "Calls turned away at the door", ["door", "reason"])
_LOOK_EVERY_S = 1.0
_NOBODY = "0" * 64
_SCHEME = "bearer "


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a request comes from."""

    token_id: str
    name: str
    role: Role


class Gate:
    """Knows the tokens that a process accepts.

    `file` is looked at again when it changed, so that a revoked token is refused a second
    later. `own` is the process's own token: whoever has it is of the same fleet.
    """

    def __init__(self, file: Path | None, own: str = "") -> None:
        """InvalidSpec when the file cannot be used."""
        self._file = TokenFile(file) if file is not None else None
        self._own = self._own_record(own)
        self._stamp = self._stamp_now()
        self._looked_at = time.monotonic()
        self._records = self._read()

    def admit(self, authorization: str | None, roles: Roles, door: str) -> Caller:
        """The caller behind an Authorization header. Unauthorized, or Forbidden for the role."""
        try:
            return self._admit(authorization, roles)
        except HeadwayError as error:
            REFUSED.labels(door, error.kind).inc()
            raise

    def _admit(self, authorization: str | None, roles: Roles) -> Caller:
        if not authorization:
            raise Unauthorized("no token: send 'Authorization: Bearer TOKEN' (HEADWAY_TOKEN)")
        self._refresh()
        token = authorization[len(_SCHEME) :].strip()
        found = TOKEN.fullmatch(token)
        record = self._records.get(found[1]) if found is not None else None
        kept = record.sha256 if record is not None else _NOBODY
        known = hmac.compare_digest(sha256_of(token), kept)
        is_bearer = authorization[: len(_SCHEME)].lower() == _SCHEME
        if record is None or not known or not is_bearer or record.expired(time.time()):
            raise Unauthorized("this token is not known here, was revoked or has expired")
        if record.role not in roles:
            needed = ", ".join(sorted(roles))
            raise Forbidden(f"a token of the role {record.role} may not do this ({needed} may)")
        return Caller(record.token_id, record.name, record.role)

    def _refresh(self) -> None:
        now = time.monotonic()
        if self._file is None or now - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = now
        stamp = self._stamp_now()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._records = self._read()
        except InvalidSpec as error:
            log.error("%s; nobody but the fleet is let in until it is mended", error)
            self._records = {r.token_id: r for r in (self._own,) if r is not None}

    def _read(self) -> dict[str, TokenRecord]:
        records = self._file.read() if self._file is not None else ()
        mine = (self._own,) if self._own is not None else ()
        # Entries of the file come last: a role that it gives to our own token holds.
        return {record.token_id: record for record in (*mine, *records)}

    def _stamp_now(self) -> tuple[int, int, int] | None:
        if self._file is None:
            return None
        try:
            facts = os.stat(self._file.path)
        except OSError:
            return None
        return facts.st_mtime_ns, facts.st_size, facts.st_ino

    @staticmethod
    def _own_record(own: str) -> TokenRecord | None:
        found = TOKEN.fullmatch(own)
        if found is None:
            return None
        return TokenRecord(found[1], "the fleet", "service", sha256_of(own), 0.0)
