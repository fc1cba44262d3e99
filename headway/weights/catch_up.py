"""Brings newcomers and stragglers up to date, each by itself and beside everything else.

A node that has no version, or an old one, fetches the newest from a snapshot. Nobody waits
for it: neither a publish nor the other nodes. Once it has a version it gets a seat in the
next epoch; a node that hangs or dies here costs nobody anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from headway.errors import HeadwayError, WeightMismatch
from headway.ledger.api import Member
from headway.lifecycle import end_tasks
from headway.messages import InstallReport, WeightManifest
from headway.weights.roster import Key, Roster
from headway.weights.snapshot import Offers, Staged

OnEvent = Callable[..., Awaitable[Any]]
_AT_A_TIME = 4  # each may keep an older version in the learner's memory


class CatchUps:
    """The catch-ups under way, at most one a member and a few at a time."""

    def __init__(self, roster: Roster, offers: Offers, on_event: OnEvent, timeout_s: float) -> None:
        self._roster = roster
        self._offers = offers
        self._on_event = on_event
        self._timeout_s = timeout_s
        self._turns = asyncio.Semaphore(_AT_A_TIME)
        self._tasks: dict[Key, asyncio.Task[None]] = {}

    @property
    def busy(self) -> frozenset[Key]:
        """Who catches up now."""
        return frozenset(key for key, task in self._tasks.items() if not task.done())

    @property
    def tasks(self) -> tuple[asyncio.Task[None], ...]:
        """What is under way."""
        return tuple(self._tasks.values())

    def begin(self, member: Member, newest: Callable[[], Staged | None]) -> None:
        """Starts to bring a member to the version that is the newest when its turn comes.

        None: there is none just then; the member is looked at again soon.
        """
        work = self._bring(member, newest)
        self._tasks[member.key] = asyncio.create_task(work, name=f"catch-up {member.node_id}")

    async def look_after(self, announced: Collection[Key]) -> None:
        """Ends the catch-ups of nodes that have gone; raises what an ended one broke with."""
        await end_tasks([self._tasks[key] for key in self._tasks if key not in announced])
        for key, task in list(self._tasks.items()):
            if task.done():
                del self._tasks[key]
                if not task.cancelled():
                    task.result()

    async def close(self) -> None:
        """Ends them all."""
        await end_tasks(self._tasks.values())
        self._tasks.clear()

    async def _bring(self, member: Member, newest: Callable[[], Staged | None]) -> None:
        async with self._turns:
            staged = newest()
            if staged is None:
                return
            version = staged.manifest.version
            try:
                report = await self._install(member, staged)
            except WeightMismatch as error:
                self._roster.refuse(member)
                await tell_refused(self._on_event, member, version, str(error))
                return
            except HeadwayError as error:
                self._roster.missed(member)
                await tell_missed(self._on_event, member, version, str(error))
                return
        self._roster.installed(member, version, by_broadcast=False)
        await self._on_event(
            "weights_caught_up",
            f"node {member.node_id} caught up with version {version}",
            node_id=member.node_id,
            version=version,
            pause_s=report.pause_s,
        )

    async def _install(self, member: Member, staged: Staged) -> InstallReport:
        client = self._roster.client(member)
        if member.transport == "none":
            bare = WeightManifest(staged.manifest.version, (), staged.manifest.bucket_bytes)
            return await client.install(0, bare, self._timeout_s)
        async with self._offers.offer(staged) as address:
            report = await client.catch_up(address, staged.manifest, self._timeout_s)
        check_report(report, member, staged)
        return report


def check_report(report: InstallReport, member: Member, staged: Staged) -> None:
    """Raises WeightMismatch when a node installed something else than was sent."""
    if member.transport == "broadcast" and report.digest != staged.digest:
        raise WeightMismatch(
            f"node {member.node_id} reports digest {report.digest} of version {report.version},"
            f" not {staged.digest}"
        )


async def tell_refused(on_event: OnEvent, member: Member, version: int, why: str) -> None:
    """The event of a node whose weights differ."""
    text = f"node {member.node_id} is put out, its weights differ: {why}"
    await on_event(
        "weights_refused", text, node_id=member.node_id, level="error", version=version, why=why
    )


async def tell_missed(on_event: OnEvent, member: Member, version: int, why: str) -> None:
    """The event of a node that did not get a version."""
    text = f"node {member.node_id} missed version {version}: {why}"
    await on_event(
        "weights_missed", text, node_id=member.node_id, level="warning", version=version, why=why
    )
