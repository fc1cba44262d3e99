"""The job runner over the in-memory ledger and the sim engine, in virtual time."""

import asyncio
import contextlib
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from headway.codec import unpack_group
from headway.errors import (
    DeadlineExceeded,
    EpochBroken,
    InvalidSpec,
    JobFailed,
    Unavailable,
    WeightMismatch,
)
from headway.jobspec import parse_job
from headway.ledger.api import LedgerConfig
from headway.ledger.memory import MemoryLedger
from headway.messages import Score, Ticket, VersionSpan, WeightManifest
from services.rollout.sim_engine import Lengths, SimEngine, SimSettings
from services.rollout.worker import JobRunner, WorkerSettings
from tests.support.virtual_time import run_virtual, until


def job(n=4, batch=2, lag=1, max_num_seqs=8, lease_s=3.0, dynamic=False, **reward):
    return parse_job(
        {
            "model": {"path": "/nowhere"},
            "data": {"source": "reasoning_gym", "name": "chain_sum", "train_batch_size": batch},
            "reward": {"grader": {"type": "string_check", "operation": "eq"}, **reward},
            "algorithm": {"max_policy_lag": lag, "dynamic_sampling": dynamic},
            "rollout": {"n": n, "max_num_seqs": max_num_seqs, "lease_s": lease_s, "max_tokens": 50},
            "trainer": {"total_training_steps": 9},
        }
    )


def tickets(start, stop, n=4):
    return [
        Ticket(i, (1, 2, i), f"question {i}", {"answer": str(i)}, n, 100 + i)
        for i in range(start, stop)
    ]


def digits_sum(item):
    return Score(float(sum(int(c) for c in item.completion if c.isdigit())))


class Graders:
    """Scores by a function of (item, call number); keeps what it was asked."""

    def __init__(self, rule=lambda item, call: digits_sum(item), takes_s=0.0):
        self.rule = rule
        self.takes_s = takes_s
        self.calls = []

    async def score(self, request_id, job_id, grader, items, timeout_s):
        self.calls.append((request_id, [item.completion for item in items]))
        call = len(self.calls)
        await asyncio.sleep(self.takes_s)
        return tuple(self.rule(item, call) for item in items)


class EventList:
    def __init__(self):
        self.rows = []

    async def append_event(self, kind, message, **fields):
        self.rows.append({"kind": kind, "message": message, **fields})
        return str(len(self.rows))


class LinkToLedger:
    """The ledger over a link that can be cut."""

    def __init__(self, ledger):
        self._ledger = ledger
        self.cut = False

    def __getattr__(self, name):
        method = getattr(self._ledger, name)

        async def call(*args):
            if self.cut:
                raise Unavailable("the link is cut")
            return await method(*args)

        return call


class Stand:
    def __init__(self, spec, engine, graders, ledger):
        self.spec = spec
        self.engine = engine
        self.graders = graders
        self.ledger = ledger
        self.link = LinkToLedger(ledger)
        self.events = EventList()
        self.runner = self.another("node-a")
        self.task = None

    def another(self, node_id, engine=None):
        settings = WorkerSettings(node_id, f"{node_id}:1")
        return JobRunner(
            "job", self.spec, settings, engine or self.engine, self.link, self.graders, self.events
        )

    async def install(self, version, timeout_s=5.0):
        try:
            report = await self.engine.install(WeightManifest(version, (), 0), timeout_s)
        except EpochBroken as error:
            self.runner.install_failed(error)
            raise
        self.runner.installed(report.version)

    async def count(self, field):
        return getattr(await self.ledger.counts(), field)

    async def reaches(self, field, value):
        async with asyncio.timeout(600):
            while await self.count(field) < value:  # noqa: ASYNC110 - virtual time
                await asyncio.sleep(0.005)

    async def train(self, step):
        """Takes and commits a step as the learner does; its groups."""
        async with asyncio.timeout(600):
            while (taken := await self.ledger.take(step)).ticket_ids is None:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        groups = [unpack_group(body) for body in await self.ledger.payloads(taken.ticket_ids)]
        await self.ledger.commit(step, taken.ticket_ids)
        return groups


@asynccontextmanager
async def stand(spec=None, num_tickets=20, graders=None, engine=None, install=True, **sim):
    spec = spec or job()
    sim = {"tokens_per_s": 10.0, "lengths": Lengths("constant", 10), **sim}
    engine = engine or SimEngine(SimSettings(**sim))
    await engine.start()
    ledger = MemoryLedger(asyncio.get_running_loop().time)
    await ledger.open(
        LedgerConfig(
            spec.data.train_batch_size,
            spec.algorithm.max_policy_lag,
            lease_s=spec.rollout.lease_s,
            max_attempts=3,
            max_outstanding_groups=max(num_tickets, spec.data.train_batch_size),
        )
    )
    await ledger.issue(tickets(0, num_tickets, spec.rollout.n))
    made = Stand(spec, engine, graders or Graders(), ledger)
    made.task = asyncio.create_task(made.runner.run())
    if install:
        await made.install(0)
    try:
        yield made
    finally:
        await made.runner.stop(0.0)
        await asyncio.gather(made.task, return_exceptions=True)
        assert (await ledger.counts()).conserved


def now():
    return asyncio.get_running_loop().time()


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
            again = await fresh.generate("r", (1,), 4, it.runner._work_on._sampling, 100)
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


FAILED = Score(None, error_kind="timeout", error_message="grader 'judge' took 10 s")


def test_survivors_of_failed_scorings_are_no_group():  # S055
    async def main():
        def three_fail(item, call):
            return FAILED if item.completion != it.graders.calls[call - 1][1][0] else Score(1.0)

        async with stand(num_tickets=1, graders=Graders(three_fail)) as it:
            await it.reaches("filtered", 1)
            counts = await it.ledger.counts()
            assert counts.reasons == {"reward_error:timeout": 1}
            assert (counts.delivered, counts.payload_bytes) == (0, 0)
            [event] = it.events.rows
            assert event["kind"] == "reward_errors"
            assert event["error_kind"] == "timeout" and "judge" in event["message"]
            assert len(it.graders.calls) == 1

    run_virtual(main())


def test_rescoring_asks_only_for_what_failed_under_new_request_ids():
    async def main():
        def second_time(item, call):
            return digits_sum(item) if call > 2 or "7" in item.completion else FAILED

        spec = job(on_error="rescore", max_rescores=2)
        async with stand(spec, num_tickets=1, graders=Graders(second_time)) as it:
            await it.reaches("delivered", 1)
            asked = [texts for _, texts in it.graders.calls]
            assert len(asked) == 3 and len(asked[0]) == 4
            assert asked[1] == asked[2] == [t for t in asked[0] if "7" not in t] != asked[0]
            assert len({request_id for request_id, _ in it.graders.calls}) == 3
            assert it.events.rows == []

        always = Graders(lambda item, call: FAILED)
        async with stand(spec, num_tickets=2, graders=always) as it:
            await it.reaches("filtered", 2)
            assert len(always.calls) == 6
            assert await it.count("reasons") == {"reward_error:timeout": 2}
            assert len(it.events.rows) == 1  # one for the kind, not one a group

    run_virtual(main())


def test_a_failing_call_is_an_error_and_an_absent_service_is_waited_for():  # S043
    async def main():
        def refuse(item, call):
            raise InvalidSpec("unknown grader type 'nope'")

        async with stand(num_tickets=1, graders=Graders(refuse)) as it:
            await it.reaches("filtered", 1)
            assert await it.count("reasons") == {"reward_error:invalid": 1}

        def too_slow(item, call):
            raise DeadlineExceeded("no answer")

        async with stand(num_tickets=1, graders=Graders(too_slow)) as it:
            await it.reaches("filtered", 1)
            assert await it.count("reasons") == {"reward_error:deadline": 1}

        def absent(item, call):
            if now() < 120:
                raise Unavailable("no reward service is known")
            return digits_sum(item)

        async with stand(job(batch=8, lag=4), graders=Graders(absent)) as it:
            await asyncio.sleep(100)
            counts = await it.ledger.counts()
            assert (counts.delivered, counts.filtered, counts.expired_leases) == (0, 0, 0)
            assert counts.leased == it.runner.num_tickets == 4 and it.engine.busy_s < 2.1
            await it.reaches("delivered", 20)

    run_virtual(main())


def test_equal_rewards_are_filtered_only_with_dynamic_sampling():
    async def main():
        equal = Graders(lambda item, call: Score(0.5))
        async with stand(job(dynamic=True), num_tickets=2, graders=equal) as it:
            await it.reaches("filtered", 2)
            assert await it.count("reasons") == {"zero_variance": 2}
        async with stand(num_tickets=2, graders=equal) as it:
            await it.reaches("delivered", 2)
        async with stand(job(dynamic=True), num_tickets=2) as it:
            await it.reaches("delivered", 2)

    run_virtual(main())


class FlawedEngine(SimEngine):
    """Spoils the groups of some tickets, told by their seed."""

    def __init__(self, spoil):
        super().__init__(SimSettings(tokens_per_s=10.0, lengths=Lengths("constant", 10)))
        self.spoil = spoil

    async def generate(self, request_id, prompt_ids, n, sampling, seed):
        completions = await super().generate(request_id, prompt_ids, n, sampling, seed)
        return self.spoil(completions, seed)


def aborted(completions, seed):
    last = replace(completions[-1], finish_reason="aborted")
    return completions if seed != 100 else (*completions[:-1], last)


def short(completions, seed):
    return completions if seed != 100 else completions[:1]


def crash(completions, seed):
    if seed == 100:
        raise ValueError("prompt is too long")
    return completions


def stale(completions, seed):
    old = replace(completions[0], spans=(VersionSpan(-1, 0, 10),))
    return completions if seed != 100 else (old, *completions[1:])


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [(aborted, "aborted"), (short, "short_group"), (crash, "ValueError"), (stale, "older_weights")],
)
def test_a_spoilt_group_is_never_delivered(spoil, reason):  # S055
    async def main():
        async with stand(num_tickets=3, engine=FlawedEngine(spoil)) as it:
            await it.reaches("abandoned", 1)
            await it.reaches("delivered", 2)
            counts = await it.ledger.counts()
            assert counts.failed_attempts == 3
            assert counts.reasons == {f"generate:{reason}": 1}
            assert {g.ticket.ticket_id for g in await it.train(0)} == {1, 2}

    run_virtual(main())


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
