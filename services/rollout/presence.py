"""A node as a member of its job: announced to the others while it serves, and how many they are."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from headway.ledger.api import Ledger, Member
from headway.patience import patiently, woken
from services.rollout.engine import Engine
from services.rollout.held import Standing

_LOOK_EVERY_S = 1.0  # at the other nodes, at most; versions may come faster


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Who the node is to the job, and its patience."""

    node_id: str
    address: str  # gRPC, host:port
    member_ttl_s: float = 10.0
    first_backoff_s: float = 0.02  # after a refused claim; doubles
    max_backoff_s: float = 0.2


class Presence:
    """Announces the node until it drains; then withdraws it, so that no new epoch counts on it."""

    def __init__(
        self, settings: WorkerSettings, engine: Engine, ledger: Ledger, standing: Standing
    ) -> None:
        self._settings, self._engine = settings, engine
        self._ledger, self._standing = ledger, standing
        self._session = secrets.token_hex(8)
        self._changed = asyncio.Event()
        self.num_members = 1

    def tell(self) -> None:
        """There is something new to say, such as a version."""
        self._changed.set()

    async def run(self, ended: Callable[[], bool]) -> None:
        """Announces again and again until the node drains or `ended` says so."""
        clock = asyncio.get_running_loop().time
        look_at = clock()
        while not self._standing.draining and not ended():
            self._changed.clear()
            await self._announce()
            if clock() >= look_at:
                self.num_members = max(1, len(await patiently(self._ledger.members)))
                look_at = clock() + _LOOK_EVERY_S
            await woken(self._changed, self._settings.member_ttl_s / 3)
        # the node goes on with what it has begun
        await patiently(lambda: self._ledger.withdraw(self._settings.node_id))

    async def _announce(self) -> None:
        settings, engine = self._settings, self._engine
        member = Member(
            settings.node_id,
            settings.address,
            engine.transport,
            self._standing.version,
            engine.backends,
            self._session,
        )
        await patiently(lambda: self._ledger.announce(member, settings.member_ttl_s))
