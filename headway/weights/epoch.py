"""One epoch on the sender's side: who is in it, and its one broadcasting thread."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

from headway.errors import EpochBroken, HeadwayError
from headway.ledger.api import Member
from headway.messages import EpochInvite, WeightManifest
from headway.weights.group import Rendezvous, WeightGroup
from headway.weights.members import MemberClient, wait_for_survivors
from headway.weights.transfer import send

if TYPE_CHECKING:
    from torch import Tensor

Backend = Literal["gloo", "nccl"]


@dataclass(frozen=True, slots=True)
class EpochSettings:
    """How epochs are formed. `backends` and `device` are the sender's."""

    job_id: str
    backends: tuple[Backend, ...] = ("gloo",)
    device: str = "cpu"
    host: str = "127.0.0.1"  # where members reach the sender
    timeout_s: float = 60.0


class MembersLost(Exception):
    """Some nodes did not take their seat: node id -> why."""

    def __init__(self, lost: Mapping[str, str]) -> None:
        super().__init__(", ".join(lost))
        self.lost = lost


class Epoch:
    """A standing weight group with the sender as rank 0."""

    def __init__(
        self,
        number: int,
        settings: EpochSettings,
        clients: Sequence[MemberClient],
        group: WeightGroup,
        meeting: Rendezvous,
        pool: ThreadPoolExecutor,
    ) -> None:
        self.number = number
        self.clients = tuple(clients)
        self.broken = False
        self._settings = settings
        self._group = group
        self._meeting = meeting
        self._pool = pool

    @property
    def seats(self) -> frozenset[tuple[str, str, str]]:
        """The keys of its members."""
        return frozenset(c.member.key for c in self.clients)

    @classmethod
    async def form(
        cls, number: int, settings: EpochSettings, clients: Sequence[MemberClient], backend: Backend
    ) -> Self:
        """Invites all clients and returns when every one has its seat.

        MembersLost, at most the deadline later, names those who did not; EpochBroken when
        nobody can be named.
        """
        meeting = Rendezvous(settings.host, settings.timeout_s)
        pool = ThreadPoolExecutor(1, thread_name_prefix=f"epoch-{number}")
        world = len(clients) + 1
        invites = [
            EpochInvite(
                settings.job_id,
                number,
                settings.host,
                meeting.port,
                rank,
                world,
                backend,
                settings.timeout_s,
            )
            for rank in range(world)
        ]
        loop = asyncio.get_running_loop()
        own = loop.run_in_executor(
            pool, WeightGroup.join, invites[0], settings.device, meeting.store
        )
        calls = {
            asyncio.create_task(client.join(invite)): client
            for client, invite in zip(clients, invites[1:], strict=True)
        }
        try:
            everyone: list[asyncio.Future[Any]] = [own, *calls]
            await asyncio.wait(everyone, return_when=asyncio.FIRST_EXCEPTION)
            lost = unanswered(calls, blame_silent=False)
            if not lost:
                await asyncio.wait([own])
                if own.exception() is not None:
                    # the members have the same deadline; who is alive tells so now
                    await wait_for_survivors(calls)
                    lost = unanswered(calls, blame_silent=True)
            if lost:
                raise MembersLost(lost)
            return cls(number, settings, clients, await own, meeting, pool)
        except BaseException:
            own.add_done_callback(_discard)
            meeting.close()
            pool.shutdown(wait=False)
            raise
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    async def send(self, manifest: WeightManifest, tensors: Mapping[str, Tensor]) -> None:
        """Broadcasts one version. EpochBroken when a member was lost on the way."""
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(
                self._pool, send, self._group, manifest, tensors, self._group.device
            )
        except EpochBroken:
            self.close()
            raise

    def close(self) -> None:
        """Hangs up; members that still wait for bytes fail at once."""
        self.broken = True
        self._group.close()
        self._meeting.close()
        self._pool.shutdown(wait=False)


def common_backend(offered: Sequence[Backend], members: Sequence[Member]) -> Backend:
    """NCCL where the sender and every member have it, else Gloo."""
    everyone = [offered, *(member.backends for member in members)]
    return "nccl" if all("nccl" in backends for backends in everyone) else "gloo"


def unanswered(
    calls: Mapping[asyncio.Task[None], MemberClient], *, blame_silent: bool
) -> dict[str, str]:
    """Node id -> why, of those that failed by themselves or do not answer.

    EpochBroken is what survivors say: they are not to blame.
    """
    lost: dict[str, str] = {}
    for call, client in calls.items():
        node_id = client.member.node_id
        if not call.done():
            if blame_silent:
                lost[node_id] = "did not answer in time"
            continue
        error = call.exception()
        if isinstance(error, HeadwayError) and not isinstance(error, EpochBroken):
            lost[node_id] = str(error)
        elif error is not None and not isinstance(error, EpochBroken):
            raise error
    return lost


def _discard(own: asyncio.Future[WeightGroup]) -> None:
    if not own.cancelled() and own.exception() is None:
        own.result().close()
