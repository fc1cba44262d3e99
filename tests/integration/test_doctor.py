"""A node that stands still: the watchdog's event and the doctor name it and its ticket."""

import asyncio
import json
import signal

from headway.cli import run_command
from tests.support.sim_fleet import FleetShape, SimFleet, eventually, sim_job

STEPS = 3
STOPPED = "rollout-1"
SHAPE = FleetShape(tokens_per_s=50.0, lengths="constant:50", lost_after_s=60.0)


async def test_a_stopped_node_is_named_with_its_ticket_by_the_watchdog_and_the_doctor(
    tmp_path, capfd
):
    async with SimFleet(tmp_path, SHAPE) as fleet:
        job = sim_job(
            tmp_path / "data.jsonl",
            algorithm__max_policy_lag=0,
            rollout__lease_s=3600.0,  # longer than the slowest machine needs for this test
            trainer__total_training_steps=STEPS,
        )
        await fleet.submit(job, "j")
        ticket_id = await eventually(lambda: stopped_at_work(fleet))
        event = await eventually(lambda: waiting_for_groups(fleet))
        assert ticket_id in event["tickets"] and event["nodes"] == [STOPPED]
        step = event["step"]
        named = f"step {step} waits for ticket {ticket_id} on node {STOPPED}, "
        assert event["message"].startswith(named) and event["waited_s"] >= 10

        await eventually(lambda: told_of(fleet, ticket_id))
        command = ["doctor", "j", "--url", fleet.api_url, "--limit", "5"]
        capfd.readouterr()
        assert await asyncio.to_thread(run_command, command) == 1
        text = capfd.readouterr().out
        for line in (
            f"STUCK  {named}",
            f"STUCK  rollout {STOPPED} has not been heard for ",
            f"STUCK  ticket {ticket_id} is on node {STOPPED} (attempt 1, started at version ",
            "idle at version",  # the other node
        ):
            assert line in text, text
        assert await asyncio.to_thread(run_command, [*command, "--json"]) == 1
        seen = json.loads(capfd.readouterr().out)
        assert {f["who"] for f in seen["findings"] if f["level"] == "stuck"} == {
            "learner", STOPPED, "ledger",
        }  # fmt: skip

        fleet.signal(STOPPED, signal.SIGCONT)
        record = await fleet.ended("j")
        assert (record.state, record.step) == ("succeeded", STEPS)
        counts = await fleet.ledger("j").counts()
        assert counts.conserved and (counts.expired_leases, counts.consumed) == (0, 4 * STEPS)
        assert (await fleet.client.waits("j"))["healthy"]


async def stopped_at_work(fleet):
    """Stops the node while it holds a ticket; the ticket's id, or None: not this time."""
    if await fleet.step("j") < 0 or not await held(fleet):
        return None
    fleet.signal(STOPPED, signal.SIGSTOP)
    if tickets := await held(fleet):
        return tickets[0]
    fleet.signal(STOPPED, signal.SIGCONT)  # it delivered just before
    return None


async def held(fleet):
    view = await fleet.ledger("j").look()
    return [lease.ticket_id for lease in view.leases if lease.node_id == STOPPED]


async def told_of(fleet, ticket_id):
    """Whether the learner's wait has reached the coordinator, as the event has the journal."""
    findings = (await fleet.client.waits("j"))["findings"]
    waits = [f["text"] for f in findings if f["who"] == "learner"]
    return any(f"waits for ticket {ticket_id} " in text for text in waits)


async def waiting_for_groups(fleet):
    rows = [row for row in await fleet.events("j") if row.get("reason") == "groups"]
    return rows[-1] if rows else None
