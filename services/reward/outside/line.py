"""The requests of one grader and job on their way to one endpoint.

A line consumes asks, produces an answer for each, and is unblocked by a free slot of the
endpoint. One sender of a line at a time waits for a slot, and slots are given in the order in
which they were asked for: jobs take turns, however much each has waiting. A sender that waits
between two tries holds no slot.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from headway.telemetry import get_logger
from services.reward.outside import metrics
from services.reward.outside.door import Door, Failed, Target
from services.reward.outside.reading import answers_of, body_of

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses between tries: doubling, each shortened by chance to as little as half."""

    first_s: float = 0.5
    longest_s: float = 30.0
    max_answered: int = 4  # tries that are answered, but with nothing of use


class Ask:
    """One request that somebody waits for."""

    __slots__ = ("content", "future", "num_waiting", "on_answer", "sample", "sender")

    def __init__(self, content: Any, sample: int, on_answer: Callable[[Any], None]) -> None:
        self.content = content
        self.sample = sample
        self.on_answer = on_answer
        self.num_waiting = 0
        self.sender: _Sender | None = None
        self.future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

    async def wait(self) -> dict[str, Any]:
        """`{"ok": value}` or `{"error": kind, "message": text}`. Drops it when nobody waits."""
        self.num_waiting += 1
        try:
            return await asyncio.shield(self.future)
        finally:
            self.num_waiting -= 1
            if not self.num_waiting and not self.future.done():
                self.future.cancel()
                if self.sender is not None:
                    self.sender.unwanted()

    def settle(self, answer: dict[str, Any]) -> None:
        """Answers all who wait."""
        if not self.future.done():
            self.future.set_result(answer)


class Desk:
    """What all requests to one endpoint share: its slots, and since when it fails."""

    def __init__(self, max_concurrent: int) -> None:
        self.slots = asyncio.Semaphore(max_concurrent)
        self.num_asks = 0  # waiting or on their way
        self._failing_since = 0.0
        self._failed_at: float | None = None

    def worked(self) -> None:
        """Notes an answer."""
        self._failed_at = None

    def failing_s(self, now: float) -> float:
        """Seconds for which there were only failures; 0 where the last try was answered."""
        return 0.0 if self._failed_at is None else now - self._failing_since

    def failed(self, now: float, patience_s: float) -> float:
        """Notes a failure; returns since when there were only failures."""
        if self._failed_at is None or now - self._failed_at > patience_s:
            self._failing_since = now
        self._failed_at = now
        return self._failing_since


class Line:
    """Sends what is put into it."""

    def __init__(
        self, spec: Mapping[str, Any], target: Target, desk: Desk, door: Door, backoff: Backoff,
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
    ) -> None:  # fmt: skip
        self.spec, self.target, self.desk = spec, target, desk
        self.door, self.backoff = door, backoff
        self.patience_s: float = spec["patience_s"]
        self._spawn = spawn
        self._waiting: deque[Ask] = deque()
        self._sender_waits = False

    def put(self, ask: Ask) -> None:
        """Sends a request in its turn."""
        self._waiting.append(ask)
        self.send_next()

    def send_next(self) -> None:
        """Has a sender wait for a slot, if there is something to send."""
        if self._waiting and not self._sender_waits:
            self._sender_waits = True
            sender = _Sender(self)
            sender.task = self._spawn(sender.run(), f"ask-{self.target.endpoint.name}")

    def take(self) -> list[Ask]:
        """As much as one request takes of what is still wanted."""
        self._sender_waits = False
        most = self.spec.get("batch_size", 1)
        taken: list[Ask] = []
        while self._waiting and len(taken) < most:
            ask = self._waiting.popleft()
            if not ask.future.done():
                taken.append(ask)
        return taken


class _Sender:
    """One request, tried until it is answered or patience ends."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._asks: list[Ask] = []
        self.task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        try:
            await self._patiently()
        except Failed as failed:
            kind = f"{self._line.spec['type']}_{failed.kind}"
            message = f"endpoint {self._line.target.endpoint.name}: {failed}"
            for ask in self._asks:
                ask.settle({"error": kind, "message": message})
        except Exception as error:  # a fault of ours must not leave anyone waiting
            log.exception("asking %s failed", self._line.target.endpoint.name)
            for ask in self._asks:
                ask.settle({"error": "internal", "message": f"asking failed: {error!r}"})
        finally:
            for ask in self._asks:
                ask.future.cancel()

    def unwanted(self) -> None:
        """Told when nobody waits for one of its asks any more; ends when that was the last."""
        if self.task is not None and all(ask.future.done() for ask in self._asks):
            self.task.cancel()

    async def _patiently(self) -> None:
        line, tries, answered = self._line, 0, 0
        clock = asyncio.get_running_loop().time
        began = None
        while True:
            async with line.desk.slots:
                if began is None:
                    self._begin()
                    began = clock()
                self._asks = [ask for ask in self._asks if not ask.future.done()]
                if not self._asks:
                    return
                try:
                    await self._once()
                    line.desk.worked()
                    return
                except Failed as error:
                    failed = error
            tries += 1
            answered += failed.kind == "unparsable"
            await self._pause(failed, tries, answered, began)

    def _begin(self) -> None:
        self._asks = self._line.take()
        for ask in self._asks:
            ask.sender = self
        self._line.send_next()

    async def _once(self) -> None:
        line = self._line
        name = line.target.endpoint.name
        contents = [ask.content for ask in self._asks]
        body = body_of(line.spec, line.target.endpoint.model, contents, self._asks[0].sample)
        started = time.perf_counter()
        result = "cancelled"
        try:
            answer = await line.door.post(line.target, body)
            values = answers_of(line.spec, answer, len(contents))
            result = "ok"
        except Failed as failed:
            result = failed.label
            raise
        finally:
            metrics.TRIES.labels(name, result).inc()
            metrics.TRY_SECONDS.labels(name).observe(time.perf_counter() - started)
        for ask, value in zip(self._asks, values, strict=True):
            ask.on_answer(value)
            ask.settle({"ok": value})

    async def _pause(self, failed: Failed, tries: int, answered: int, began: float) -> None:
        """Waits for the next try; raises the failure when there shall be none."""
        if not failed.again:
            raise failed
        now = asyncio.get_running_loop().time()
        backoff, patience_s = self._line.backoff, self._line.patience_s
        # Useless answers are no sign that the endpoint is dead, for other jobs that ask it.
        useless = failed.kind == "unparsable"
        since = began if useless else min(began, self._line.desk.failed(now, patience_s))
        pause_s = min(backoff.first_s * 2 ** min(tries - 1, 30), backoff.longest_s)
        pause_s = max(pause_s * random.uniform(0.5, 1.0), failed.after_s)
        if now + pause_s <= since + patience_s and answered < backoff.max_answered:
            await asyncio.sleep(pause_s)
            return
        asked = f", and asked to wait {failed.after_s:.0f} s" if failed.after_s else ""
        times = f"{tries} {'try' if tries == 1 else 'tries'} in {now - began:.0f} s"
        raise Failed(f"{failed} ({times}{asked})", failed.label, kind=failed.kind, again=False)
