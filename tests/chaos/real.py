"""The same with a real model, on vLLM and the real trainer: each process is killed once."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from headway.lifecycle import end_tasks
from tests.support.accounts import accounts
from tests.support.sim_fleet import FleetShape, SimFleet
from tests.support.tiny_model import build_tiny_model
from tests.support.whole_job import tiny_job

STEPS, BATCH, LAG = 24, 2, 2
TARGETS = ("rollout-0", "rank", "learner", "reward", "coordinator", "redis")
PATIENCE_S = 400.0  # vLLM starts in half a minute, on a machine with nothing else to do


async def run_real(folder: Path) -> dict[str, Any]:
    """One job, one kill of each process; the job's figures."""
    began = time.monotonic()
    model = build_tiny_model(folder / "model", seed=1, dtype="float32")
    job = tiny_job(
        model,
        trainer__total_training_steps=STEPS,
        trainer__save_freq=4,
        algorithm__max_policy_lag=LAG,
        rollout__lease_s=5.0,
        rollout__update_timeout_s=20.0,
    )
    async with SimFleet(folder, FleetShape(nodes=1, model=True)) as fleet:
        await fleet.submit(job, "real")
        tending = asyncio.create_task(fleet.tend(lambda: 0.2))
        try:
            for target in TARGETS:
                step = max(await fleet.step("real"), 0)
                await fleet.seen_step("real", step + 2, PATIENCE_S)
                fleet.kill(target)
                print(f"killed {target} after {step + 2} steps")
            record = await fleet.ended("real", PATIENCE_S)
        finally:
            await end_tasks([tending])
        found = await accounts(fleet.redis, "real", fleet.runs / "real")
    return {
        "state": record.state,
        "error": record.error.message if record.error else "",
        "kills": len(TARGETS),
        "steps": len(found.steps),
        "issued": found.counts.issued_total,
        "trained": len(found.trained),
        "filtered": found.counts.filtered,
        "dropped": found.counts.dropped,
        "lost": found.lost,
        "doubled": found.doubled,
        "largest_lag": found.largest_lag,
        "max_policy_lag": LAG,
        "seconds": round(time.monotonic() - began, 1),
    }
