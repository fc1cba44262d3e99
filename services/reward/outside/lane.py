"""All asking of one service: who may be asked, what is remembered, what is on its way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headway.graders import GraderSpec
from headway.graders.outside import Outside
from headway.lifecycle import end_tasks
from services.reward.grading.asking import digest
from services.reward.outside import metrics
from services.reward.outside.cache import AnswerCache
from services.reward.outside.door import Door, Target
from services.reward.outside.endpoints import Endpoint, Endpoints
from services.reward.outside.line import Ask, Backoff, Desk, Line
from services.reward.outside.reading import body_of, path_of

_MAX_DESKS = 1000  # then those that nothing waits for are forgotten


@dataclass(frozen=True, slots=True)
class LaneSettings:
    """What the service is told of its endpoints, and its limits."""

    endpoints: Endpoints = field(default_factory=Endpoints)
    cache_bytes: int = 64 << 20
    max_waiting_bytes: int = 128 << 20  # of requests; beyond, no new items are begun
    backoff: Backoff = field(default_factory=Backoff)


@dataclass(frozen=True, slots=True)
class Leaf:
    """One grader that asks, and where."""

    spec: Mapping[str, Any]
    target: Target


Leaves = Mapping[str, Leaf]  # by the digest of their spec


@dataclass(frozen=True, slots=True)
class Answered:
    """Answers by the keys of their asks, one a sample; and under which keys they are cached."""

    answers: Mapping[str, list[dict[str, Any]]]
    cache_keys: tuple[str, ...]


class Lane:
    """Asks for graders; every ask is answered, if only by an error."""

    def __init__(self, settings: LaneSettings) -> None:
        self._settings = settings
        self._cache = AnswerCache(settings.cache_bytes)
        self._door = Door()
        self._desks: dict[str, Desk] = {}
        self._lines: dict[tuple[str, str], Line] = {}
        self._asked: dict[str, Ask] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting_bytes = 0
        self._room = asyncio.Event()
        self._room.set()

    def leaves(self, grader: GraderSpec, path: str = "grader") -> dict[str, Leaf]:
        """The graders in it that ask. InvalidSpec when one asks where it may not."""
        found: dict[str, Leaf] = {}
        for where, part in grader.inner().items():
            found |= self.leaves(part, f"{path}.{where}")
        if isinstance(grader, Outside):
            spec = grader.model_dump(mode="json")
            endpoint = self._settings.endpoints.find(spec, path)
            url = endpoint.base_url.rstrip("/") + path_of(spec)
            found[digest(spec)] = Leaf(spec, Target(endpoint, url, grader.try_timeout_s))
        return found

    async def room(self) -> None:
        """Waits until what waits to be asked has room for more."""
        await self._room.wait()

    async def ask(self, leaves: Leaves, job_id: str, asks: Mapping[str, Any]) -> Answered:
        """Answers what the leaves of a grader ask for one item, all at once.

        `asks` is what a worker wrote: ValueError when it is not what a worker writes.
        """
        if len(asks) > len(leaves):
            raise ValueError("asks more often than there are graders that ask")
        wanted = [
            (key, *_checked(leaves, ask), sample)
            for key, ask in asks.items()
            for sample in range(_checked(leaves, ask)[0].spec.get("samples", 1))
        ]
        size = sum(len(json.dumps(ask)) for ask in asks.values())
        self._count(size)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    (key, group.create_task(self._one(leaf, job_id, content, sample)))
                    for key, leaf, content, sample in wanted
                ]
        finally:
            self._count(-size)
        answers: dict[str, list[dict[str, Any]]] = {}
        for key, task in tasks:
            answers.setdefault(key, []).append(task.result()[0])
        return Answered(answers, tuple(task.result()[1] for _, task in tasks))

    def waits(self) -> str:
        """What is waited for, for people; empty where nothing is."""
        now = asyncio.get_running_loop().time()
        told = []
        for name, desk in self._desks.items():
            failing_s = desk.failing_s(now)
            failing = f", which fails since {failing_s:.0f} s" if failing_s else ""
            if desk.num_asks:
                told.append(f"{desk.num_asks} requests wait for endpoint {name}{failing}")
        return "; ".join(told)

    def forget(self, cache_keys: Iterable[str]) -> None:
        """Drops answers that nothing could be scored by, so that they are asked for again."""
        self._cache.forget(cache_keys)

    async def close(self) -> None:
        """Ends all asking."""
        await end_tasks(list(self._tasks))
        await self._door.close()

    async def _one(
        self, leaf: Leaf, job_id: str, content: Any, sample: int
    ) -> tuple[dict[str, Any], str]:
        kind, endpoint = leaf.spec["type"], leaf.target.endpoint
        body = body_of(leaf.spec, endpoint.model, [content], sample)
        key = digest([endpoint.name, leaf.target.url, kind, leaf.spec.get("field"), body, sample])
        outcome = "cancelled"
        desk = self._desk(endpoint)
        desk.num_asks += 1
        metrics.ASKING.inc()
        try:
            if leaf.spec["cache"] and (known := self._cache.get(key)) is not None:
                outcome = "cached"
                return {"ok": known[0]}, key
            ask = self._asked.get(key) if leaf.spec["cache"] else None
            if ask is not None and ask.future.cancelled():
                ask = None
            joined = ask is not None
            if ask is None:
                ask = self._begin(leaf, job_id, content, sample, key)
            answer = await ask.wait()
            outcome = str(answer.get("error", "ok")).removeprefix(f"{kind}_")
            outcome = "joined" if joined and outcome == "ok" else outcome
            return answer, key
        finally:
            desk.num_asks -= 1
            metrics.ASKING.dec()
            metrics.ASKS.labels(kind, outcome).inc()

    def _begin(self, leaf: Leaf, job_id: str, content: Any, sample: int, key: str) -> Ask:
        remembered = leaf.spec["cache"]
        ask = Ask(
            content, sample, lambda value: self._cache.put(key, value) if remembered else None
        )
        if remembered:
            self._asked[key] = ask
            ask.future.add_done_callback(lambda _: self._unasked(key, ask))
        self._line(leaf, job_id).put(ask)
        return ask

    def _unasked(self, key: str, ask: Ask) -> None:
        if self._asked.get(key) is ask:
            del self._asked[key]

    def _line(self, leaf: Leaf, job_id: str) -> Line:
        name = digest(leaf.spec)
        if (name, job_id) not in self._lines:
            desk = self._desk(leaf.target.endpoint)
            self._lines[name, job_id] = Line(
                leaf.spec, leaf.target, desk, self._door, self._settings.backoff, self._spawn
            )
        return self._lines[name, job_id]

    def _desk(self, endpoint: Endpoint) -> Desk:
        if endpoint.desk not in self._desks:
            if len(self._desks) >= _MAX_DESKS:
                self._desks = {name: desk for name, desk in self._desks.items() if desk.num_asks}
            self._desks[endpoint.desk] = Desk(endpoint.max_concurrent)
        return self._desks[endpoint.desk]

    def _spawn(self, coro: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(coro, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not self._tasks:
            self._lines.clear()  # nothing is on its way: their jobs may be gone

    def _count(self, size: int) -> None:
        self._waiting_bytes += size
        if self._waiting_bytes < self._settings.max_waiting_bytes:
            self._room.set()
        else:
            self._room.clear()


def _checked(leaves: Leaves, ask: Any) -> tuple[Leaf, Any]:
    if not isinstance(ask, dict) or ask.get("leaf") not in leaves or "content" not in ask:
        raise ValueError("asks for what no grader of the request asks for")
    return leaves[ask["leaf"]], ask["content"]
