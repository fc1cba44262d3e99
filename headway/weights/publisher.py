"""The learner's side: every version to every member, whoever comes and goes.

    publish(version) -> (new epoch when the members changed) -> broadcast
                     -> each member verifies and installs -> report

A member that dies or hangs costs one deadline and a new epoch without it; one
whose weights differ is left out for good. Neither is ever the job's end.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from headway.errors import EpochBroken, HeadwayError, WeightMismatch
from headway.ledger.api import Member
from headway.messages import InstallReport, WeightManifest
from headway.telemetry import get_logger
from headway.weights.epoch import Epoch, EpochSettings, MembersLost
from headway.weights.manifest import BUCKET_BYTES, build_manifest, combined_digest, spec_bytes
from headway.weights.members import MemberClient, wait_for_survivors

if TYPE_CHECKING:
    from torch import Tensor

log = get_logger(__name__)
_GRACE_S = 2.0
_MAX_EXCLUSION_S = 600.0
Key = tuple[str, str]  # node id, address: a restarted node is another one


@dataclass(frozen=True, slots=True)
class PublishReport:
    """What became of one version. By node id: its report, or why it has none."""

    version: int
    installed: Mapping[str, InstallReport]
    lost: Mapping[str, str]
    rejected: Mapping[str, str]
    num_bytes: int
    seconds: float

    @property
    def pause_s(self) -> float:
        """The longest time that sampling stood still on a member."""
        return max((report.pause_s for report in self.installed.values()), default=0.0)


@dataclass(slots=True)
class _Latest:
    manifest: WeightManifest
    tensors: Mapping[str, Tensor]
    digest: str


@dataclass(slots=True)
class _Outcome:
    installed: dict[str, InstallReport] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)


class Publisher:
    """Owns the epochs of one job. `on_event(kind, message, **fields)` is awaited.

    `host` is where members reach the sender, `device` where its broadcast buffers lie
    (`cuda` with nccl), `timeout_s` the deadline of a rendezvous and of a whole broadcast.
    """

    def __init__(
        self,
        job_id: str,
        members: Callable[[], Awaitable[Sequence[Member]]],
        on_event: Callable[..., Awaitable[Any]],
        *,
        backend: Literal["gloo", "nccl"] = "gloo",
        device: str = "cpu",
        host: str = "127.0.0.1",
        timeout_s: float = 60.0,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._settings = EpochSettings(job_id, backend, device, host, timeout_s)
        self._members = members
        self._on_event = on_event
        self._bucket_bytes = bucket_bytes
        self._lock = asyncio.Lock()
        self._latest: _Latest | None = None
        self._epoch: Epoch | None = None
        # of the last epoch; a learner that starts anew must be past its earlier ones
        self._number = time.time_ns() // 1_000_000
        self._clients: dict[Key, MemberClient] = {}
        self._have: dict[Key, int] = {}  # the version each member installed last
        self._excluded: dict[Key, tuple[float, float]] = {}  # until when, for how long

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
            manifest = await asyncio.to_thread(build_manifest, version, named, self._bucket_bytes)
            digest = combined_digest(spec.digest for spec in manifest.tensors)
            self._latest = _Latest(manifest, named, digest)
            outcome = await self._deliver(self._latest, await self._eligible())
            report = _report(self._latest, outcome, started)
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

    async def admit(self) -> PublishReport | None:
        """Brings the latest version to members that lack it; None when all have it.

        Newcomers get it in an epoch of their own, so that the others sample on.
        """
        async with self._lock:
            latest = self._latest
            if latest is None:
                return None
            started = time.monotonic()
            version = latest.manifest.version
            members = await self._eligible()
            lacking = [m for m in members if self._have.get(_key(m)) != version]
            if not lacking:
                return None
            aside, self._epoch = self._epoch, None
            try:
                outcome = await self._deliver(latest, lacking)
            finally:
                if aside is not None:
                    self._close_epoch()
                    self._epoch = aside
            return _report(latest, outcome, started)

    async def close(self) -> None:
        """Takes all seats back."""
        async with self._lock:
            await asyncio.gather(*(c.leave(_GRACE_S) for c in self._clients.values()))
            self._close_epoch()
            await asyncio.gather(*(c.close() for c in self._clients.values()))
            self._clients.clear()

    # -- one version, round by round until every member has it or is out

    async def _deliver(self, latest: _Latest, members: Sequence[Member]) -> _Outcome:
        total = _Outcome()
        waiting = {m.node_id: m for m in members}
        stalls = 0
        while waiting:
            outcome = await self._round(latest, list(waiting.values()))
            settled = {**outcome.installed, **outcome.lost, **outcome.rejected}
            stalls = 0 if settled else stalls + 1
            if stalls == 2:
                outcome.lost = dict.fromkeys(waiting, "its epoch broke twice, for no known cause")
            for node_id in {**settled, **outcome.lost}:
                await self._settle(waiting.pop(node_id), outcome, latest)
            total.installed.update(outcome.installed)
            total.lost.update(outcome.lost)
            total.rejected.update(outcome.rejected)
        return total

    async def _round(self, latest: _Latest, members: Sequence[Member]) -> _Outcome:
        outcome = _Outcome()
        clients = [self._client(m) for m in members]
        seated = [c for c in clients if c.member.transport == "broadcast"]
        epoch: Epoch | None = None
        if seated:
            try:
                epoch = await self._epoch_of(seated)
            except MembersLost as error:
                outcome.lost.update(error.lost)
                return outcome
            except EpochBroken as error:
                log.warning("epoch broke while it formed", extra={"reason": str(error)})
                return outcome
        number = epoch.number if epoch is not None else self._number
        bare = WeightManifest(latest.manifest.version, (), latest.manifest.bucket_bytes)
        calls: dict[asyncio.Task[InstallReport], MemberClient] = {}
        for client in clients:
            manifest = latest.manifest if client.member.transport == "broadcast" else bare
            install = client.install(number, manifest, self._settings.timeout_s)
            calls[asyncio.create_task(install)] = client
        try:
            await self._broadcast(epoch, latest, calls)
            for call, client in calls.items():
                _judge(call, client, latest, outcome)
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        return outcome

    async def _broadcast(
        self,
        epoch: Epoch | None,
        latest: _Latest,
        calls: Mapping[asyncio.Task[InstallReport], MemberClient],
    ) -> None:
        """Returns when the calls are answered, or a broken broadcast left some silent."""
        broken = False
        if epoch is not None:
            try:
                await epoch.send(latest.manifest, latest.tensors)
            except EpochBroken as error:
                log.warning("broadcast broke", extra={"reason": str(error)})
                broken = True
        # outside of the handler: the error's frames would keep the sockets open
        if broken:
            await wait_for_survivors(calls)
        else:
            await asyncio.wait(calls)

    async def _epoch_of(self, seated: Sequence[MemberClient]) -> Epoch:
        seats = frozenset(_key(c.member) for c in seated)
        if self._epoch is not None:
            if not self._epoch.broken and self._epoch.seats == seats:
                return self._epoch
            self._close_epoch()
        self._number += 1
        started = time.monotonic()
        self._epoch = await Epoch.form(self._number, self._settings, seated)
        await self._on_event(
            "epoch_formed",
            f"weight group epoch {self._number} stands with {len(seated)} nodes",
            epoch=self._number,
            nodes=sorted(c.member.node_id for c in seated),
            seconds=time.monotonic() - started,
        )
        return self._epoch

    def _close_epoch(self) -> None:
        epoch, self._epoch = self._epoch, None
        if epoch is not None:
            epoch.close()

    # -- who is in

    async def _eligible(self) -> list[Member]:
        members = await self._members()
        present = {_key(m) for m in members}
        for key in [k for k in self._clients if k not in present]:
            await self._clients.pop(key).close()
            self._have.pop(key, None)
            self._excluded.pop(key, None)
        now = time.monotonic()
        return [m for m in members if self._excluded.get(_key(m), (0.0, 0.0))[0] <= now]

    def _client(self, member: Member) -> MemberClient:
        key = _key(member)
        if key not in self._clients:
            self._clients[key] = MemberClient(self._settings.job_id, member)
        return self._clients[key]

    async def _settle(self, member: Member, outcome: _Outcome, latest: _Latest) -> None:
        key, node_id = _key(member), member.node_id
        if node_id in outcome.installed:
            new = key not in self._have
            self._have[key] = latest.manifest.version
            self._excluded.pop(key, None)
            if new:
                text = f"node {node_id} has its first weights"
                await self._on_event("member_joined", text, node_id=node_id)
            return
        self._have.pop(key, None)
        rejected = node_id in outcome.rejected
        why = outcome.rejected[node_id] if rejected else outcome.lost[node_id]
        # a lost node that is still announced gets another chance, ever more seldom
        last_s = self._excluded.get(key, (0.0, self._settings.timeout_s / 2))[1]
        pause_s = math.inf if rejected else min(2 * last_s, _MAX_EXCLUSION_S)
        self._excluded[key] = (time.monotonic() + pause_s, pause_s)
        await self._on_event(
            "member_lost",
            f"node {node_id} is left out: {why}",
            node_id=node_id,
            reason="weight_mismatch" if rejected else "lost",
            level="error" if rejected else "warning",
            version=latest.manifest.version,
        )


def _judge(
    call: asyncio.Task[InstallReport], client: MemberClient, latest: _Latest, outcome: _Outcome
) -> None:
    node_id = client.member.node_id
    if not call.done():
        outcome.lost[node_id] = "did not answer in time"
        return
    error = call.exception()
    if error is None:
        report = call.result()
        if client.member.transport == "broadcast" and report.digest != latest.digest:
            outcome.rejected[node_id] = (
                f"reports digest {report.digest} of version {report.version}, not {latest.digest}"
            )
        else:
            outcome.installed[node_id] = report
    elif isinstance(error, WeightMismatch):
        outcome.rejected[node_id] = str(error)
    elif isinstance(error, HeadwayError):
        # a survivor of a broken epoch stays for the next round
        if not isinstance(error, EpochBroken):
            outcome.lost[node_id] = str(error)
    else:
        raise error


def _report(latest: _Latest, outcome: _Outcome, started: float) -> PublishReport:
    return PublishReport(
        latest.manifest.version,
        outcome.installed,
        outcome.lost,
        outcome.rejected,
        sum(spec_bytes(spec) for spec in latest.manifest.tensors),
        time.monotonic() - started,
    )


def _key(member: Member) -> Key:
    return member.node_id, member.address
