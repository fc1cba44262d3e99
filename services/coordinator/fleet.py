"""Who is in the fleet: every process, when it was last heard, what it said it does.

Kept in memory only: after a restart of the coordinator each process is asked to
register again by the answer to its next heartbeat. Times are seconds of a
monotonic clock that the caller reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from headway.errors import NoCapacity
from headway.waits import Wait

MAX_NODES = 10_000
Role = Literal["rollout", "learner", "reward"]


@dataclass(frozen=True, slots=True)
class JobReport:
    """What a process says of one job it works on."""

    job_id: str
    phase: str  # starting, running, succeeded, failed or cancelled
    detail: str = ""
    version: int | None = None
    error_kind: str = ""
    run_dir: str = ""


@dataclass(frozen=True, slots=True)
class Node:
    """One process of the fleet as it was last heard."""

    node_id: str
    role: Role
    address: str
    http_address: str = ""
    engine: str = ""
    num_cpus: int = 0
    num_gpus: int = 0
    software_version: str = ""
    pid: int = 0
    draining: bool = False
    reports: tuple[JobReport, ...] = ()
    waits: tuple[Wait, ...] = ()
    changed_at: float = 0.0  # when the reports were last new
    # None: registered, but has not said yet what it does. It gets no new work
    # before, since it may be at work already.
    heard_at: float | None = None

    def report(self, job_id: str) -> JobReport | None:
        """What it says of `job_id`, if anything."""
        return next((r for r in self.reports if r.job_id == job_id), None)


class FleetRegistry:
    """The processes heard within the last `lost_after_s` seconds."""

    def __init__(self, lost_after_s: float) -> None:
        self.lost_after_s = lost_after_s
        self._nodes: dict[str, Node] = {}
        self._last_seen: dict[str, float] = {}
        self._expected: dict[str, float] = {}  # node -> until when it may still turn up

    def expect(self, node_ids: Iterable[str], now: float) -> None:
        """These should be alive, though we know only their names: they get the time to say so."""
        for node_id in node_ids:
            if node_id not in self._nodes:
                self._expected.setdefault(node_id, now + self.lost_after_s)

    def restarted(self, node: Node) -> bool:
        """Whether `node` is known, but as another process: that one is gone."""
        known = self._nodes.get(node.node_id)
        return known is not None and (known.pid, known.address) != (node.pid, node.address)

    def register(self, node: Node, now: float) -> None:
        """Adds a process; what it was known to do is kept when it registers twice.

        NoCapacity beyond MAX_NODES.
        """
        known = self._nodes.get(node.node_id)
        if known is None and len(self._nodes) >= MAX_NODES:
            raise NoCapacity(f"the fleet has {MAX_NODES} processes and takes no more")
        if known is not None:
            node = replace(node, reports=known.reports, heard_at=known.heard_at)
        self._nodes[node.node_id] = node
        self._last_seen[node.node_id] = now

    def beat(
        self,
        node_id: str,
        reports: tuple[JobReport, ...],
        draining: bool,
        now: float,
        waits: tuple[Wait, ...] = (),
    ) -> bool | None:
        """Takes a heartbeat in. None: unknown process. True: it says something new.

        That a rollout node has newer weights is no news: nothing is planned by it.
        """
        known = self._nodes.get(node_id)
        if known is None:
            return None
        self._expected.pop(node_id, None)
        self._last_seen[node_id] = now
        self._nodes[node_id] = replace(
            known,
            reports=reports,
            draining=draining,
            heard_at=now,
            waits=waits,
            changed_at=known.changed_at if reports == known.reports else now,
        )
        told = _plans(known.role, known.reports) != _plans(known.role, reports)
        return known.heard_at is None or told or known.draining != draining

    def leave(self, node_id: str) -> bool:
        """Forgets a process; False when it was not known."""
        self._last_seen.pop(node_id, None)
        self._expected.pop(node_id, None)
        return self._nodes.pop(node_id, None) is not None

    def expire(self, now: float) -> list[str]:
        """Forgets the processes that were silent too long and names them."""
        silent = [n for n, seen in self._last_seen.items() if now - seen > self.lost_after_s]
        for node_id in silent:
            self.leave(node_id)
        self._expected = {n: until for n, until in self._expected.items() if now <= until}
        return silent

    def nodes(self) -> list[Node]:
        """All processes, by id."""
        return [self._nodes[node_id] for node_id in sorted(self._nodes)]

    def expected(self) -> frozenset[str]:
        """Names of processes that have yet to turn up and still may."""
        return frozenset(self._expected) - frozenset(self._nodes)

    def silence_s(self, node_id: str, now: float) -> float:
        """Seconds since `node_id` was last heard."""
        return max(0.0, now - self._last_seen[node_id])


def _plans(role: Role, reports: tuple[JobReport, ...]) -> tuple[JobReport, ...]:
    return tuple(replace(r, version=None) for r in reports) if role == "rollout" else reports
