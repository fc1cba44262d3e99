"""Whom the publisher knows: each member's connection, the version it has, and its failures."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass

from headway.ledger.api import Member
from headway.weights.members import MemberClient

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 600.0
Key = tuple[str, str, str]  # of `Member.key`


@dataclass(slots=True)
class _Entry:
    client: MemberClient
    version: int | None = None  # installed; None: it has to catch up before it gets a seat
    pause_s: float = 0.0  # after its last failure
    until: float = 0.0  # by the clock: the end of its pause


class Roster:
    """The members of one job. `announced` asks the ledger who is there; `clock`: seconds."""

    def __init__(
        self,
        job_id: str,
        announced: Callable[[], Awaitable[Sequence[Member]]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job_id = job_id
        self._announced = announced
        self._clock = clock
        self._entries: dict[Key, _Entry] = {}

    async def announced(self) -> Sequence[Member]:
        """Who is there, as the ledger says."""
        return await self._announced()

    def may_try(self, member: Member) -> bool:
        """Whether a member is not in a pause after a failure, and not refused."""
        return self._entry(member).until <= self._clock()

    def client(self, member: Member) -> MemberClient:
        """The connection to a member."""
        return self._entry(member).client

    def version(self, member: Member) -> int | None:
        """The version that a member has installed, as far as is known."""
        return self._entry(member).version

    def installed(self, member: Member, version: int, *, by_broadcast: bool) -> None:
        """A member has a version. Only a broadcast proves that it keeps up with the others."""
        entry = self._entry(member)
        entry.version, entry.until = version, 0.0
        if by_broadcast:
            entry.pause_s = 0.0

    def missed(self, member: Member) -> None:
        """A member failed: it is left alone for a while, twice as long each time."""
        entry = self._entry(member)
        entry.version = None
        entry.pause_s = min(max(_FIRST_PAUSE_S, 2 * entry.pause_s), _LONGEST_PAUSE_S)
        entry.until = self._clock() + entry.pause_s

    def refuse(self, member: Member) -> None:
        """A member's weights differ: it is out for as long as it lives."""
        entry = self._entry(member)
        entry.version, entry.until = None, math.inf

    async def forget_all_but(self, keys: Collection[Key]) -> None:
        """Closes the connections to everyone else."""
        gone = [self._entries.pop(key) for key in list(self._entries) if key not in keys]
        for entry in gone:
            await entry.client.close()

    @property
    def clients(self) -> list[MemberClient]:
        """All connections."""
        return [entry.client for entry in self._entries.values()]

    def _entry(self, member: Member) -> _Entry:
        if member.key not in self._entries:
            self._entries[member.key] = _Entry(MemberClient(self._job_id, member))
        return self._entries[member.key]
