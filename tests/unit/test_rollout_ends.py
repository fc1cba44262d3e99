"""How the job runner ends: by failure, by a broken install, by being stopped; in virtual time."""

import asyncio
import contextlib

import pytest

from headway.errors import (
    EpochBroken,
    JobFailed,
    Unavailable,
    WeightMismatch,
)
from services.rollout.sim_engine import Lengths
from tests.support.rollout_stand import FlawedEngine, job, now, stand
from tests.support.virtual_time import run_virtual


def test_an_engine_that_only_fails_ends_the_runner():
    async def main():
        def always(completions, seed):
            raise RuntimeError("out of memory")

        async with stand(engine=FlawedEngine(always)) as it:
            with pytest.raises(JobFailed, match="8 generations in a row"):
                await it.task
            assert await it.count("leased") == 0 and await it.ledger.members() == ()

    run_virtual(main())


def test_a_claim_that_outlives_the_end_hides_no_cause_and_keeps_no_lease():
    async def main():
        def always(completions, seed):
            raise RuntimeError("out of memory")

        async with stand(engine=FlawedEngine(always)) as it:
            claim = it.ledger.claim

            async def deaf(*args):  # as the Redis client of Python 3.11: cancelled, it goes on
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.05)
                return await claim(*args)

            it.ledger.claim = deaf
            with pytest.raises(JobFailed, match="generations in a row"):
                await it.task
            assert await it.count("leased") == 0 and await it.ledger.members() == ()

    run_virtual(main())


def test_a_dead_engine_gives_its_tickets_back_unharmed():
    async def main():
        async with stand() as it:
            await it.reaches("leased", 2)
            await it.engine.close()
            with pytest.raises(Unavailable, match="closed"):
                await it.task
            counts = await it.ledger.counts()
            assert (counts.issued, counts.leased, counts.failed_attempts) == (20, 0, 0)

    run_virtual(main())


def test_a_weight_mismatch_ends_the_runner_and_frees_its_tickets():  # S015
    async def main():
        async with stand() as it:
            await it.reaches("leased", 2)
            it.runner.install_failed(WeightMismatch("tensor lm_head.weight: shape"))
            with pytest.raises(WeightMismatch, match=r"lm_head\.weight"):
                await it.task
            counts = await it.ledger.counts()
            assert (counts.issued, counts.leased) == (20, 0)
            assert await it.ledger.members() == ()

    run_virtual(main())


def test_after_a_broken_install_work_waits_then_goes_back():
    async def main():
        async with stand(job(lease_s=3.0), install_pause_s=0.1) as it:
            await it.reaches("leased", 2)
            with pytest.raises(EpochBroken):
                await it.install(1, timeout_s=0.05)
            await asyncio.sleep(20)  # kept for twice the update's time-out of 20 s
            assert await it.count("leased") == 2
            await asyncio.sleep(25)
            counts = await it.ledger.counts()
            assert (counts.leased, counts.issued, counts.expired_leases) == (0, 20, 0)
            [member] = await it.ledger.members()
            assert member.version is None
            await it.install(0)
            await it.reaches("delivered", 4)

    run_virtual(main())


def test_stopping_finishes_what_it_can_and_hands_the_rest_back():
    async def main():
        async with stand(job(batch=8)) as it:
            await asyncio.sleep(0.5)
            await it.runner.stop(10.0)
            await it.task
            assert now() == pytest.approx(1.0, abs=0.01)
            counts = await it.ledger.counts()
            assert (counts.delivered, counts.leased, counts.issued) == (2, 0, 18)
            assert await it.ledger.members() == ()
        begun = now()
        async with stand(job(batch=8), lengths=Lengths("constant", 50)) as it:
            await asyncio.sleep(1)
            await it.runner.stop(2.0)
            await it.task
            assert now() - begun == pytest.approx(3.0, abs=0.01)
            counts = await it.ledger.counts()
            assert (counts.delivered, counts.leased, counts.issued) == (0, 0, 20)
            again = await it.ledger.claim("node-b", 0)
            assert [lease.attempt for lease in again.leases] == [1]  # not held against the ticket

    run_virtual(main())


def test_stopping_does_not_hang_on_a_ledger_that_is_away():
    async def main():
        async with stand() as it:
            await asyncio.sleep(0.5)
            it.link.cut = True
            await it.runner.stop(2.0)
            await it.task
            assert now() < 8
            await asyncio.sleep(3)
            assert await it.count("issued") == 20  # expired by themselves

    run_virtual(main())
