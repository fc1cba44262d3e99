"""Nodes that join and leave a running job: real processes, a real weight group and stream."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from tests.support.accounts import accounts
from tests.support.sim_fleet import FleetShape, SimFleet, eventually, sim_job

BATCH, LAG = 4, 2


async def event(fleet: SimFleet, kind: str, **fields: Any) -> dict[str, Any]:
    """The first event of a kind with these fields, once there is one."""

    async def look() -> dict[str, Any] | None:
        for found in await fleet.events("job"):
            if found["kind"] == kind and fields.items() <= found.items():
                return found
        return None

    return await eventually(look)


async def test_nodes_join_drain_and_come_back_while_the_job_runs(tmp_path: Path) -> None:
    # half the tickets held at any time are far from their end when a node drains
    shape = FleetShape(
        nodes=2, broadcast=3, step_s=0.1, weight_mib=8.0, lengths="uniform:40",
        node_flags=("--drain-s", "0.05"),
    )  # fmt: skip
    async with SimFleet(tmp_path, shape) as fleet:
        spec = sim_job(
            tmp_path / "data.jsonl",
            trainer__total_training_steps=10_000,  # it runs until it has seen everything
            rollout__min_nodes=2,
            rollout__lease_s=60.0,
        )
        await fleet.submit(spec, "job")
        await fleet.seen_step("job", 3)

        await fleet.add_node(2)
        caught_up = await event(fleet, "weights_caught_up", node_id="rollout-2")
        assert caught_up["version"] >= 3
        everyone = ["rollout-0", "rollout-1", "rollout-2"]
        await event(fleet, "epoch_formed", nodes=everyone)

        # what it gives back is there for the others at once, long before its leases end
        fleet.signal("rollout-0", signal.SIGTERM)
        await event(fleet, "epoch_formed", nodes=everyone[1:])
        assert await eventually(lambda: ended(fleet, "rollout-0")) == "ended with 0"
        await fleet.seen_step("job", await fleet.step("job") + 2 * LAG + 2)
        assert (await fleet.ledger("job").counts()).expired_leases == 0

        # under its old name, and without a pause
        fleet.kill("rollout-1")
        fleet.restart("rollout-1")
        await event(fleet, "weights_caught_up", node_id="rollout-1")

        await fleet.client.cancel("job")
        record = await fleet.ended("job")
        assert record.state == "cancelled", record.error
        found = await accounts(fleet.redis, "job", fleet.runs / "job")
        assert found.counts.conserved and found.doubled == 0
        assert found.lost == found.counts.consumed - len(found.trained)  # the step cut short
        assert found.smallest_lag >= 0 and found.largest_lag <= LAG
        refused = [e for e in await fleet.events("job") if e["kind"] == "weights_refused"]
        assert not refused


async def ended(fleet: SimFleet, name: str) -> str | None:
    """How a process ended, once it has."""
    code = fleet.children[name].exit_code
    return None if code is None else f"ended with {code}"
