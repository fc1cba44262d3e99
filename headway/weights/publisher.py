"""The learner's side: every version to every member, whoever comes and goes.

    publish(version) -> (new epoch when the members changed) -> broadcast
                     -> each member verifies and installs -> report
    admit()          -> newcomers and stragglers catch up by a snapshot, beside all that

Only who has a version gets a seat, so that a newcomer that hangs holds up nobody. A member
that dies or hangs in a broadcast costs one deadline and a new epoch without it; it comes back
by catching up. One whose weights differ is left out for good. Neither is ever the job's end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from headway.errors import EpochBroken, WeightMismatch
from headway.ledger.api import Member
from headway.messages import AdapterBase, InstallReport, WeightManifest
from headway.telemetry import get_logger
from headway.weights.catch_up import CatchUps, OnEvent, tell_missed, tell_refused
from headway.weights.epoch import Backend, Epoch, EpochSettings, MembersLost, common_backend
from headway.weights.manifest import BUCKET_BYTES, build_manifest, combined_digest
from headway.weights.members import MemberClient, wait_for_survivors
from headway.weights.outcome import Outcome, PublishReport, judge, report_of, unable
from headway.weights.roster import Key, Roster
from headway.weights.snapshot import Offers, Staged

if TYPE_CHECKING:
    from torch import Tensor

log = get_logger(__name__)
_GRACE_S = 2.0


class Publisher:
    """Owns the epochs of one job. `on_event(kind, message, **fields)` is awaited.

    `host` is where members reach the sender, `backends` what it can broadcast over, `device`
    where its buffers lie with nccl, `timeout_s` the deadline of a rendezvous and of a whole
    broadcast, `offers` how nodes get at snapshots, `base` what the published adapters are added to.
    """

    def __init__(
        self,
        job_id: str,
        members: Callable[[], Awaitable[Sequence[Member]]],
        on_event: OnEvent,
        offers: Offers,
        *,
        backends: tuple[Backend, ...] = ("gloo",),
        device: str = "cpu",
        host: str = "127.0.0.1",
        timeout_s: float = 60.0,
        bucket_bytes: int = BUCKET_BYTES,
        base: AdapterBase | None = None,
    ) -> None:
        self._settings = EpochSettings(job_id, backends, device, host, timeout_s)
        self._on_event = on_event
        self._bucket_bytes = bucket_bytes
        self._base = base
        self._roster = Roster(job_id, members)
        self._catch_ups = CatchUps(self._roster, offers, on_event, timeout_s)
        self._lock = asyncio.Lock()  # one publish at a time
        self._newest: Staged | None = None
        self._epoch: Epoch | None = None
        self._publishing: frozenset[Key] = frozenset()  # who gets the version under way
        # of the last epoch; a learner that starts anew must be past its earlier ones
        self._number = time.time_ns() // 1_000_000

    async def publish(
        self, version: int, tensors: Mapping[str, Tensor] | Sequence[tuple[str, Tensor]]
    ) -> PublishReport:
        """Brings a version to all members; nobody may write to the tensors afterwards.

        WeightMismatch when members are there and the weights fit none of them: learner and
        rollout then disagree about the model, and no later version would fit.
        """
        async with self._lock:
            started = time.monotonic()
            named = dict(tensors)
            if len(named) != len(tensors):
                raise WeightMismatch(f"version {version} names a tensor twice")
            manifest = await asyncio.to_thread(
                build_manifest, version, named, self._bucket_bytes, self._base
            )
            digest = combined_digest(spec.digest for spec in manifest.tensors)
            staged = Staged(manifest, named, digest)
            outcome = await self._broadcast_to(staged, await self._roster.announced())
            report = report_of(staged, outcome, started)
            if outcome.rejected and not outcome.installed and not outcome.lost:
                raise WeightMismatch(next(iter(outcome.rejected.values())))
            await self._on_event(
                "weights_published",
                f"version {version} is installed on {len(report.installed)} nodes",
                version=version,
                nodes=len(report.installed),
                seconds=report.seconds,
                pause_s=report.pause_s,
                num_bytes=report.num_bytes,
            )
            return report

    def retire(self) -> None:
        """Lets go of the newest version, so that the next can be staged in its memory.

        Nobody begins to catch up until the next publish; who does so already goes on.
        """
        self._newest = None

    async def admit(self) -> tuple[asyncio.Task[None], ...]:
        """Lets members that lack the newest version catch up; waits for none of them.

        Gives the catch-ups under way. Raises what an earlier one broke with.
        """
        members = await self._roster.announced()
        announced = {member.key for member in members}
        await self._catch_ups.look_after(announced)
        if self._newest is not None:
            self._begin_catch_ups(members, self._newest)
        await self._roster.forget_all_but(announced | self._publishing | self._catch_ups.busy)
        return self._catch_ups.tasks

    async def close(self) -> None:
        """Takes all seats back."""
        async with self._lock:
            await self._catch_ups.close()
            await asyncio.gather(*(c.leave(_GRACE_S) for c in self._roster.clients))
            self._close_epoch()
            await self._roster.forget_all_but(())

    def _begin_catch_ups(self, members: Sequence[Member], staged: Staged) -> None:
        spoken_for = self._publishing | self._catch_ups.busy
        for member in members:
            lacks = self._roster.version(member) != staged.manifest.version
            if lacks and member.key not in spoken_for and self._roster.may_try(member):
                self._catch_ups.begin(member, lambda: self._newest)

    async def _broadcast_to(self, staged: Staged, announced: Sequence[Member]) -> Outcome:
        """Broadcasts to all that have a version; to everyone at first, when nobody has."""
        busy = self._catch_ups.busy
        free = [m for m in announced if m.key not in busy and self._roster.may_try(m)]
        seated = [m for m in free if self._roster.version(m) is not None] or free
        self._publishing = frozenset(m.key for m in seated)
        self._newest = staged
        self._begin_catch_ups(announced, staged)
        try:
            return await self._deliver(staged, seated)
        finally:
            self._publishing = frozenset()

    # -- one version, round by round until every member has it or is out

    async def _deliver(self, staged: Staged, members: Sequence[Member]) -> Outcome:
        total = Outcome()
        waiting = {m.node_id: m for m in members}
        stalls = 0
        while waiting:
            outcome = await self._round(staged, list(waiting.values()))
            settled = {**outcome.installed, **outcome.lost, **outcome.rejected}
            stalls = 0 if settled else stalls + 1
            if stalls == 2:
                outcome.lost = dict.fromkeys(waiting, "its epoch broke twice, for no known cause")
            for node_id in {**settled, **outcome.lost}:
                await self._settle(waiting.pop(node_id), outcome, staged)
            total.installed.update(outcome.installed)
            total.lost.update(outcome.lost)
            total.rejected.update(outcome.rejected)
        return total

    async def _round(self, staged: Staged, members: Sequence[Member]) -> Outcome:
        outcome = Outcome()
        clients = [self._roster.client(m) for m in members]
        seated = [c for c in clients if c.member.transport == "broadcast"]
        epoch: Epoch | None = None
        if seated:
            backend = common_backend(self._settings.backends, [c.member for c in seated])
            outcome.rejected = unable(backend, seated)
            if outcome.rejected:
                return outcome
            try:
                epoch = await self._epoch_of(seated, backend)
            except MembersLost as error:
                outcome.lost.update(error.lost)
                return outcome
            except EpochBroken as error:
                log.warning("a %s epoch broke while it formed: %s", backend, error)
                # such as two processes on one GPU, which NCCL refuses
                self._settings = replace(self._settings, backends=("gloo",))
                return outcome
        number = epoch.number if epoch is not None else self._number
        bare = WeightManifest(staged.manifest.version, (), staged.manifest.bucket_bytes)
        calls: dict[asyncio.Task[InstallReport], MemberClient] = {}
        for client in clients:
            manifest = staged.manifest if client.member.transport == "broadcast" else bare
            install = client.install(number, manifest, self._settings.timeout_s)
            calls[asyncio.create_task(install)] = client
        try:
            await self._broadcast(epoch, staged, calls)
            for call, client in calls.items():
                judge(call, client, staged, outcome)
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        return outcome

    async def _broadcast(
        self,
        epoch: Epoch | None,
        staged: Staged,
        calls: Mapping[asyncio.Task[InstallReport], MemberClient],
    ) -> None:
        """Returns when the calls are answered, or a broken broadcast left some silent."""
        broken = False
        if epoch is not None:
            try:
                await epoch.send(staged.manifest, staged.tensors)
            except EpochBroken as error:
                log.warning("broadcast broke", extra={"reason": str(error)})
                broken = True
        # outside of the handler: the error's frames would keep the sockets open
        if broken:
            await wait_for_survivors(calls)
        else:
            await asyncio.wait(calls)

    async def _epoch_of(self, seated: Sequence[MemberClient], backend: Backend) -> Epoch:
        seats = frozenset(c.member.key for c in seated)
        if self._epoch is not None:
            if not self._epoch.broken and self._epoch.seats == seats:
                return self._epoch
            self._close_epoch()
        self._number += 1
        started = time.monotonic()
        self._epoch = await Epoch.form(self._number, self._settings, seated, backend)
        await self._on_event(
            "epoch_formed",
            f"weight group epoch {self._number} stands with {len(seated)} nodes ({backend})",
            epoch=self._number,
            nodes=sorted(c.member.node_id for c in seated),
            backend=backend,
            seconds=time.monotonic() - started,
        )
        return self._epoch

    def _close_epoch(self) -> None:
        epoch, self._epoch = self._epoch, None
        if epoch is not None:
            epoch.close()

    async def _settle(self, member: Member, outcome: Outcome, staged: Staged) -> None:
        node_id, version = member.node_id, staged.manifest.version
        if node_id in outcome.installed:
            self._roster.installed(member, version, by_broadcast=True)
        elif node_id in outcome.rejected:
            self._roster.refuse(member)
            await tell_refused(self._on_event, member, version, outcome.rejected[node_id])
        else:
            self._roster.missed(member)
            await tell_missed(self._on_event, member, version, outcome.lost[node_id])
