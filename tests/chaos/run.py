"""One chaos run: faults by the schedule, processes started again, jobs to their end, accounts.

A training process is not killed again before the last one has done a step: a job whose
ranks crash again and again without a step is meant to fail (services/learner/ranks.py).
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.lifecycle import end_tasks
from tests.chaos.plan import Fault, faults
from tests.support.accounts import Accounts, accounts
from tests.support.proxy import Weather
from tests.support.sim_fleet import FleetShape, SimFleet, sim_job

LAG, BATCH, LEASE_S = 2, 4, 1.5


@dataclass(frozen=True)
class ChaosSettings:
    """How much chaos."""

    seed: int = 1
    faults: int = 200
    mean_gap_s: float = 2.2
    nodes: int = 4
    steps: int = 500  # of one job; another follows while faults are left
    step_s: float = 0.25
    on_late: str = "wait"
    patience_s: float = 300.0  # for the last job's end once all is quiet


@dataclass
class Outcome:
    """What was done, and what came of it."""

    faults: Counter[str] = field(default_factory=Counter)
    jobs: dict[str, Accounts] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # job -> why it did not succeed
    seconds: float = 0.0

    def figures(self) -> dict[str, Any]:
        """The run in one flat JSON object."""
        all_jobs = list(self.jobs.values())

        def total(name: str) -> int:
            return sum(int(getattr(job.counts, name)) for job in all_jobs)

        return {
            "faults": self.faults.total(),
            **dict(sorted(self.faults.items())),
            "jobs": len(self.jobs),
            "jobs_failed": self.failed,
            "steps": sum(len(job.steps) for job in all_jobs),
            "issued": total("issued_total"),
            "trained": sum(len(job.trained) for job in all_jobs),
            "filtered": total("filtered"),
            "dropped": total("dropped"),
            "abandoned": total("abandoned"),
            "open_at_the_end": sum(job.open for job in all_jobs),
            "expired_leases": total("expired_leases"),
            "refused_deliveries": total("refused_deliveries"),
            "lost": sum(job.lost for job in all_jobs),
            "doubled": sum(job.doubled for job in all_jobs),
            "largest_lag": max((job.largest_lag for job in all_jobs), default=0),
            "max_policy_lag": LAG,
            "seconds": round(self.seconds, 1),
        }


class Chaos:
    """The faults of one run, under way."""

    def __init__(self, fleet: SimFleet, settings: ChaosSettings, outcome: Outcome) -> None:
        self._fleet = fleet
        self._settings = settings
        self._outcome = outcome
        self._plan = faults(settings.seed, settings.nodes, LEASE_S, settings.mean_gap_s)
        self._healing: set[asyncio.Task[None]] = set()
        self._busy: set[str] = set()  # what is paused or down by our doing
        self.job_id = ""
        self._spared_until = -1  # the step after which a rank may be killed again

    @property
    def done(self) -> bool:
        """Whether all faults were injected."""
        return self._outcome.faults.total() >= self._settings.faults

    async def run(self) -> None:
        """Injects all faults, each beside the healing of those before."""
        while not self.done:
            fault = next(self._plan)
            if await self._inject(fault):
                self._outcome.faults[f"{fault.kind}_{_kin(fault.target)}"] += 1
                await asyncio.sleep(fault.gap_s)
        if self._healing:
            await asyncio.wait(self._healing)

    async def stop(self) -> None:
        """Ends what is under way, healing nothing."""
        await end_tasks(list(self._healing))

    async def _inject(self, fault: Fault) -> bool:
        """Whether there was anything to disturb."""
        target = fault.target
        if target in self._busy:
            return False
        if target in self._fleet.links:
            weather: Weather = fault.kind  # type: ignore[assignment]
            await self._fleet.links[target].turn(weather)
        elif not self._fleet.processes(target) or not await self._may_kill(fault):
            return False
        elif fault.kind == "kill":
            self._fleet.kill(target)
            return True
        else:
            self._fleet.signal(target, signal.SIGSTOP)
        self._busy.add(target)
        healing = asyncio.create_task(self._heal(fault))
        self._healing.add(healing)
        healing.add_done_callback(self._healing.discard)
        return True

    async def _may_kill(self, fault: Fault) -> bool:
        if fault.kind != "kill" or fault.target not in ("rank", "learner"):
            return True
        step = await self._fleet.step(self.job_id)
        if step < self._spared_until:
            return False
        self._spared_until = step + 1
        return True

    async def _heal(self, fault: Fault) -> None:
        await asyncio.sleep(fault.seconds)
        if fault.target in self._fleet.links:
            await self._fleet.links[fault.target].turn("fair")
        else:
            self._fleet.signal(fault.target, signal.SIGCONT)
        self._busy.discard(fault.target)


async def run_chaos(folder: Path, settings: ChaosSettings) -> Outcome:
    """Runs jobs one after the other while faults are left; the last one to its end."""
    shape = FleetShape(
        nodes=settings.nodes,
        broadcast=settings.nodes // 2,
        step_s=settings.step_s,
        weight_mib=1.0,
        lengths="lognormal:24:0.8",
        tokens_per_s=100.0,
        links=True,
    )
    folder.mkdir(parents=True, exist_ok=True)
    outcome = Outcome()
    began = time.monotonic()
    async with SimFleet(folder, shape) as fleet:
        pauses = random.Random(settings.seed)
        tending = asyncio.create_task(fleet.tend(lambda: pauses.uniform(0.1, 1.0)))
        chaos = Chaos(fleet, settings, outcome)
        storm: asyncio.Task[None] | None = None
        try:
            while storm is None or not storm.done():
                job_id = f"chaos-{len(outcome.jobs) + len(outcome.failed)}"
                await _submit(fleet, settings, job_id)
                chaos.job_id = job_id
                if storm is None:
                    await fleet.seen_step(job_id, 1)
                    storm = asyncio.create_task(chaos.run())
                record = await fleet.ended(job_id, 3600.0)
                if record.state != "succeeded":
                    why = record.error.message if record.error else record.state
                    outcome.failed[job_id] = why
                    break
                found = await accounts(fleet.redis, job_id, fleet.runs / job_id)
                outcome.jobs[job_id] = found
            assert storm is None or not storm.done() or storm.result() is None
        finally:
            await end_tasks([t for t in (tending, storm) if t is not None])
            await chaos.stop()
    outcome.seconds = time.monotonic() - began
    return outcome


async def _submit(fleet: SimFleet, settings: ChaosSettings, job_id: str) -> None:
    job = sim_job(
        fleet.folder / "data.jsonl",
        data__train_batch_size=BATCH,
        algorithm__max_policy_lag=LAG,
        algorithm__dynamic_sampling=True,
        algorithm__on_late=settings.on_late,
        rollout__lease_s=LEASE_S,
        trainer__total_training_steps=settings.steps,
        trainer__save_freq=5,
    )
    while True:
        try:
            return await fleet.submit(job, job_id)
        except Exception as error:  # the coordinator, or its Redis, is down just now
            print(f"submitting again: {error}")
            await asyncio.sleep(0.2)


def _kin(target: str) -> str:
    """A target without its number: rollout-3-redis -> rollout_redis."""
    return "_".join(part for part in target.split("-") if not part.isdecimal())
