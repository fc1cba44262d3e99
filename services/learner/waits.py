"""The steps' watchdog: a wait that lasts is an event and a status that name whom it is for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headway.diagnosis import describe_groups
from headway.errors import HeadwayError
from headway.jobspec import JobSpec
from headway.ledger.api import Ledger
from headway.patience import away
from headway.waits import Reason, Wait, Waiting
from services.learner.events import Events
from services.learner.status import Reporter
from services.learner.watch import top_reasons

_LOOK_EVERY_S = 0.5
_SAY_EVERY_S = 60.0
# Nodes are missing from the start and a user sits before it; the others are a hang only later.
_SAY_AFTER_S: dict[Reason, float] = {"nodes": 1.0}
_SAY_AFTER_ELSE_S = 10.0


class WaitWatch:
    """Knows what the loop waits for; says so in events and in the status of rank 0."""

    def __init__(
        self,
        spec: JobSpec,
        ledger: Ledger,
        events: Events,
        reporter: Reporter,
        meanwhile: Callable[[], str] = lambda: "",
    ) -> None:
        """`meanwhile` says what keeps newer weights back, or ""."""
        self._meanwhile = meanwhile
        self._spec = spec
        self._ledger = ledger
        self._events = events
        self._reporter = reporter
        self._waiting = Waiting()
        self._step = 0
        self._said: tuple[str, int] = ("", 0)  # the wait that was said, and when again
        self._say_at = 0.0

    @contextmanager
    def on(self, reason: Reason, step: int) -> Iterator[None]:
        """The block waits; `step` counts from 0."""
        self._step = step
        try:
            with self._waiting.on(reason):
                yield
        finally:
            self._over()

    async def run(self) -> None:
        """Looks for ever."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            await self.look()

    async def look(self) -> None:
        """Says what has been waited for too long."""
        waits = [wait for wait in (away(), self._waiting.longest()) if wait is not None]
        wait = next((w for w in waits if w.waited_s >= _say_after(w.reason)), None)
        if wait is None:
            self._over()
            return
        text, fields = await self._describe(wait)
        if held_up := self._meanwhile():
            text += f"; {held_up}"
        if (away() if wait.reason == "peer" else self._waiting.longest()) is None:
            return  # it ended meanwhile
        since = time.time() - wait.waited_s
        self._reporter.update(detail=text, waiting=wait.reason, waiting_since=since)
        now = time.monotonic()
        if (wait.reason, self._step) != self._said or now >= self._say_at:
            self._said, self._say_at = (wait.reason, self._step), now + _SAY_EVERY_S
            self._events.add("waiting", text, reason=wait.reason, **fields)

    def _over(self) -> None:
        if self._reporter.status.waiting:
            self._reporter.update(detail="", waiting="", waiting_since=0.0)

    async def _describe(self, wait: Wait) -> tuple[str, dict[str, object]]:
        """The wait in words, and the event's fields."""
        step = self._step
        fields: dict[str, object] = {"step": step + 1, "waited_s": wait.waited_s}
        begin = f"step {step + 1} waits"
        if wait.reason == "peer":
            return f"{begin} for a peer, {wait.waited_s:.0f} s: {wait.detail}", fields
        try:
            members = await self._ledger.members()
            if wait.reason == "nodes":
                wanted = self._spec.rollout.min_nodes
                text = f"waiting for rollout nodes: {len(members)} of {wanted} here"
                return text, {**fields, "nodes": len(members)}
            if wait.reason == "groups":
                view, counts = await self._ledger.look(), await self._ledger.counts()
                text, holders = describe_groups(view, wait.waited_s)
                fields["tickets"] = [holder.ticket_id for holder in holders]
                fields["nodes"] = sorted({holder.node_id for holder in holders})
                lost = top_reasons(counts.reasons)
                return text + (f"; groups lost so far: {lost}" if lost else ""), fields
        except HeadwayError:  # whatever Redis says: a watchdog ends no job
            return f"{begin} for {wait.reason}, {wait.waited_s:.0f} s", fields
        if wait.reason == "publish":
            behind = ", ".join(
                f"{m.node_id} (at {'none' if m.version is None else m.version})"
                for m in members
                if m.version is None or m.version < step
            )
            text = f"{begin} for version {step} to be installed, {wait.waited_s:.0f} s"
            return text + (f", by {behind}" if behind else ""), fields
        return f"{begin} for the {wait.reason} before it, {wait.waited_s:.0f} s", fields


def _say_after(reason: Reason) -> float:
    return _SAY_AFTER_S.get(reason, _SAY_AFTER_ELSE_S)
