"""What a rollout node says it waits for, in virtual time."""

import asyncio

from headway.errors import EpochBroken
from services.rollout.sim_engine import Lengths
from tests.support.rollout_stand import Graders, job, stand
from tests.support.virtual_time import run_virtual


def told(it):
    return [(w.reason, w.detail, round(w.waited_s, 1)) for w in it.runner.waits()]


def test_a_node_without_weights_waits_for_them():
    async def main():
        async with stand(install=False) as it:
            await asyncio.sleep(7)
            assert told(it) == [("weights", "has no weights yet", 7.0)]
            assert it.runner.waits()[0].job_id == "job"

    run_virtual(main())


def test_it_names_its_oldest_ticket_and_then_the_full_schedule():
    async def main():
        async with stand(job(batch=2, lag=0), lengths=Lengths("constant", 50)) as it:
            await it.reaches("leased", 2)
            await asyncio.sleep(2)
            assert told(it) == [
                ("sampling", "samples 2 tickets, the oldest is ticket 0, started at version 0", 2.0)
            ]
            await it.reaches("delivered", 2)
            await asyncio.sleep(10)
            text = "idle at version 0: the schedule is full: it waits for the learner's next step"
            [(reason, detail, waited_s)] = told(it)
            assert (reason, detail) == ("schedule", text) and 10 <= waited_s < 10.5

    run_virtual(main())


def test_scores_that_do_not_come_are_waited_for():
    async def main():
        async with stand(num_tickets=1, graders=Graders(takes_s=60.0)) as it:
            await asyncio.sleep(31)  # sampled after one second
            scores, tickets = told(it)
            assert scores == (
                "scores",
                "1 tickets have no scores or are on their way to the ledger, the oldest is"
                " ticket 0, started at version 0",
                30.0,
            )
            assert tickets[:2] == ("tickets", "idle at version 0: no ticket is issued")

    run_virtual(main())


def test_a_broken_install_and_a_drain_say_so():
    async def main():
        async with stand(install_pause_s=0.1, lengths=Lengths("constant", 500)) as it:
            await it.reaches("leased", 2)
            try:
                await it.install(1, timeout_s=0.05)
            except EpochBroken:
                await asyncio.sleep(5)
            assert told(it)[-1] == ("weights", "an install broke: it waits for the next", 5.0)
            stopping = asyncio.create_task(it.runner.stop(20.0))
            await asyncio.sleep(3)
            assert told(it)[-1][:2] == ("drain", "finishes 2 tickets and stops")
            await stopping

    run_virtual(main())
