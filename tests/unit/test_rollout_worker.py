"""The job runner over the in-memory ledger and the sim engine, in virtual time."""

import asyncio

import pytest

from headway.messages import VersionSpan, WeightManifest
from services.rollout.engines import sampling_of
from services.rollout.sim_engine import Lengths, SimEngine, SimSettings
from tests.support.rollout_stand import Graders, digits_sum, job, now, stand
from tests.support.virtual_time import run_virtual, until


def test_nothing_is_claimed_before_the_first_install():
    async def main():
        async with stand(install=False) as it:
            await asyncio.sleep(60)
            assert await it.count("issued") == 20
            [member] = await it.ledger.members()
            assert (member.node_id, member.version, member.transport) == ("node-a", None, "none")
            await it.install(0)
            await it.reaches("leased", 2)
            [member] = await it.ledger.members()
            assert member.version == 0

    run_virtual(main())


def test_groups_are_whole_and_say_where_they_come_from():
    async def main():
        async with stand() as it:
            await it.reaches("delivered", 4)  # B * (lag + 1): the rule (F) allows no more
            await asyncio.sleep(30)
            counts = await it.ledger.counts()
            assert (counts.delivered, counts.leased) == (4, 0)
            groups = await it.train(0)
            assert [g.ticket.ticket_id for g in groups] == [0, 1]
            for group in groups:
                assert len(group.completions) == group.ticket.n == 4
                assert (group.node_id, group.attempt, group.start_version) == ("node-a", 1, 0)
                assert group.generate_s == pytest.approx(1.0)  # 10 tokens at 10/s
                for completion in group.completions:
                    assert completion.spans == (VersionSpan(0, 0, 10),)
                    assert completion.reward == digits_sum(completion_item(completion)).reward
            # the ticket's own seed: the same tokens wherever and whenever it is sampled
            fresh = SimEngine(SimSettings(lengths=Lengths("constant", 10)))
            await fresh.start()
            await fresh.install(WeightManifest(0, (), 0), 1.0)
            again = await fresh.generate("r", (1,), 4, sampling_of(it.spec), 100)
            assert [c.token_ids for c in again] == [c.token_ids for c in groups[0].completions]

    run_virtual(main())


def completion_item(completion):
    class Item:
        pass

    item = Item()
    item.completion = completion.text
    return item


def test_slots_are_filled_and_a_freed_one_is_filled_at_once():
    async def main():
        spec = job(n=4, batch=8, lag=4, max_num_seqs=15)  # 3 tickets of 4 fit
        async with stand(spec) as it:
            await it.reaches("leased", 3)
            await asyncio.sleep(0.5)
            assert it.engine.num_completions_in_flight == 12
            assert await it.count("leased") == 3
            await it.reaches("delivered", 12)
            assert now() == pytest.approx(4.0, abs=0.01)  # four full waves of one second
            assert it.engine.busy_s == pytest.approx(4.0, abs=0.01)

    run_virtual(main())


def test_scoring_takes_no_sampling_slot_and_is_bounded():
    async def main():
        spec = job(n=4, batch=8, lag=4, max_num_seqs=8)  # 2 slots, so at most 4 + 2 in scoring
        async with stand(spec, graders=Graders(takes_s=100.0)) as it:
            await asyncio.sleep(50)
            assert len(it.graders.calls) == 4
            assert it.engine.num_completions_in_flight == 0
            assert it.engine.busy_s == pytest.approx(2.0, abs=0.01)
            await it.reaches("delivered", 4)
            assert now() == pytest.approx(102.0, abs=0.05)  # two waves of 1 s, then 100 s each
            assert await it.count("expired_leases") == 0

    run_virtual(main())


def test_an_install_in_flight_splits_spans_and_wakes_a_refused_claim():
    async def main():
        spec = job(batch=2, lag=0)
        async with stand(spec) as it:
            await asyncio.sleep(0.45)
            first = await asyncio.gather(it.train(0), asyncio.sleep(0))
            assert {s.version for c in first[0][0].completions for s in c.spans} == {0}
            await asyncio.sleep(5)  # refused for lag all the while
            assert await it.count("leased") == 0
            before = now()
            await it.install(1)
            await it.reaches("leased", 2)
            assert now() - before < 0.005
            assert {g.start_version for g in await it.train(1)} == {1}
        async with stand(job(batch=2, lag=1)) as it:
            await it.train(0)  # ended at 1 s; the next two have begun as this was taken
            await it.reaches("leased", 2)
            begun = now()
            await asyncio.sleep(0.35)
            await it.install(1)
            groups = await it.train(1)
            assert now() - begun == pytest.approx(1.0, abs=0.01)
            for group in groups:
                assert group.start_version == 0
                for completion in group.completions:
                    assert completion.spans == (VersionSpan(0, 0, 3), VersionSpan(1, 3, 10))

    run_virtual(main())


def test_lag_zero_trains_step_by_step_on_policy():
    async def main():
        async with stand(job(batch=2, lag=0)) as it:
            for step in range(4):
                for group in await it.train(step):
                    assert {s.version for c in group.completions for s in c.spans} == {step}
                await it.install(step + 1)
            assert now() == pytest.approx(4.0, abs=0.05)  # nothing but the sampling itself

    run_virtual(main())


def test_leases_of_long_work_are_kept_and_lost_ones_stop_at_once():
    async def main():
        async with stand(job(lease_s=3.0), lengths=Lengths("constant", 50), num_tickets=2) as it:
            # 5 s of sampling on leases of 3 s
            await it.reaches("delivered", 2)
            assert await it.count("expired_leases") == 0
        async with stand(job(lease_s=3.0), lengths=Lengths("constant", 50), num_tickets=1) as it:
            await it.reaches("leased", 1)
            it.link.cut = True
            await asyncio.sleep(3.5)  # the lease runs out unheard
            other = await it.ledger.claim("node-b", 0)
            assert [lease.attempt for lease in other.leases] == [2]
            it.link.cut = False
            await until(lambda: it.engine.num_completions_in_flight == 0, 1.5)
            assert now() < 11.0 and it.runner.num_tickets == 0
            assert await it.ledger.deliver(other.leases[0], b"theirs")
            counts = await it.ledger.counts()
            assert (counts.delivered, counts.expired_leases, counts.abandoned) == (1, 1, 0)

    run_virtual(main())


def test_a_late_delivery_is_refused_and_counted():  # S035
    async def main():
        async with stand(job(lease_s=3.0), num_tickets=1) as it:
            await asyncio.sleep(0.5)
            it.link.cut = True
            await asyncio.sleep(4)  # sampled and scored meanwhile, but nobody heard
            other = await it.ledger.claim("node-b", 0)
            assert await it.ledger.deliver(other.leases[0], b"theirs")
            it.link.cut = False
            await until(lambda: it.runner.num_tickets == 0, 5)
            counts = await it.ledger.counts()
            assert counts.delivered == 1
            assert await it.ledger.payloads([0]) == [b"theirs"]

    run_virtual(main())


def test_an_outage_shorter_than_the_lease_loses_nothing():
    async def main():
        async with stand(job(batch=8, lease_s=10.0), num_tickets=8) as it:
            await asyncio.sleep(0.5)
            it.link.cut = True
            await asyncio.sleep(6)
            it.link.cut = False
            await it.reaches("delivered", 8)
            counts = await it.ledger.counts()
            assert (counts.expired_leases, counts.refused_deliveries) == (0, 0)

    run_virtual(main())


def test_sampling_stops_when_the_ledger_is_closed():
    async def main():
        lengths = Lengths("constant", 36_000)
        async with stand(job(max_num_seqs=12), lengths=lengths, num_tickets=2) as it:
            await it.reaches("leased", 2)
            await it.ledger.close()
            await until(lambda: it.engine.num_completions_in_flight == 0, 1.0)
            counts = await it.ledger.counts()
            assert (counts.issued, counts.leased, it.runner.num_tickets) == (2, 0, 0)

    run_virtual(main())


def test_with_no_lag_several_nodes_share_a_batch():
    async def main():
        async with stand(job(batch=4, lag=0, max_num_seqs=64), install=False) as it:
            engine = SimEngine(SimSettings(tokens_per_s=10.0, lengths=Lengths("constant", 10)))
            await engine.start()
            second = it.another("node-b", engine)
            task = asyncio.create_task(second.run())
            await asyncio.sleep(4)  # each has seen the other
            await engine.install(WeightManifest(0, (), 0), 1.0)
            second.installed(0)
            await it.install(0)
            groups = await it.train(0)
            assert sorted(g.node_id for g in groups) == ["node-a"] * 2 + ["node-b"] * 2
            await second.stop(0.0)
            await task

    run_virtual(main())
