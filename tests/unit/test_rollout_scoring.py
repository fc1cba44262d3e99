"""What the job runner does with failed scorings and spoilt groups, in virtual time."""

import asyncio
from dataclasses import replace

import pytest
from prometheus_client import REGISTRY

from headway import graders
from headway.errors import (
    DeadlineExceeded,
    InvalidSpec,
    Unavailable,
)
from headway.messages import Score, VersionSpan
from tests.support.hostile_graders import HostileGroup
from tests.support.rollout_stand import FlawedEngine, Graders, digits_sum, job, now, stand
from tests.support.virtual_time import run_virtual

FAILED = Score(None, error_kind="timeout", error_message="grader 'judge' took 10 s")


def nulls(kind, then):
    labels = {"error_kind": kind, "then": then}
    return REGISTRY.get_sample_value("headway_rollout_null_rewards_total", labels) or 0.0


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

        before = {then: nulls("timeout", then) for then in ("rescore", "drop_group", "fail")}
        spec = job(on_error="rescore", max_rescores=2)
        async with stand(spec, num_tickets=1, graders=Graders(second_time)) as it:
            await it.reaches("delivered", 1)
            asked = [texts for _, texts in it.graders.calls]
            assert len(asked) == 3 and len(asked[0]) == 4
            assert asked[1] == asked[2] == [t for t in asked[0] if "7" not in t] != asked[0]
            assert len({request_id for request_id, _ in it.graders.calls}) == 3
            assert it.events.rows == []
        failed = sum("7" not in text for text in asked[0])
        assert nulls("timeout", "rescore") - before["rescore"] == 2 * failed

        before["rescore"] += 2 * failed
        always = Graders(lambda item, call: FAILED)
        async with stand(spec, num_tickets=2, graders=always) as it:
            await it.reaches("filtered", 2)
            assert len(always.calls) == 6
            assert await it.count("reasons") == {"reward_error:timeout": 2}
            assert len(it.events.rows) == 1  # one for the kind, not one a group
        assert nulls("timeout", "rescore") - before["rescore"] == 2 * 2 * 4  # two rounds of two
        assert nulls("timeout", "drop_group") - before["drop_group"] == 2 * 4
        async with stand(job(on_error="fail"), num_tickets=1, graders=always) as it:
            await it.reaches("filtered", 1)
        assert nulls("timeout", "fail") - before["fail"] == 4

    run_virtual(main())


def test_a_whole_group_grader_has_the_whole_group_scored_again(monkeypatch):
    monkeypatch.setitem(graders.GRADERS, "hostile_group", HostileGroup)

    async def main():
        def second_time(item, call):
            return FAILED if call < 2 and "7" in item.completion else digits_sum(item)

        for grader, num_again in (({"type": "hostile_group"}, 4), ({"type": "numeric"}, None)):
            spec = job(on_error="rescore", max_rescores=2, grader=grader)
            asked = Graders(second_time)
            async with stand(spec, num_tickets=1, graders=asked) as it:
                await it.reaches("delivered", 1)
            texts = [texts for _, texts in asked.calls]
            with_7 = sum("7" in text for text in texts[0])
            assert 0 < with_7 < 4
            assert len(texts[1]) == (num_again or with_7)
            assert asked.groups[0] == ["0"] * 4  # the ticket's id

    run_virtual(main())


def test_a_failing_call_is_an_error_and_an_absent_service_is_waited_for():  # S043
    async def main():
        def refuse(item, call):
            raise InvalidSpec("unknown grader type 'nope'")

        for spec in (job(), job(on_error="rescore", grader={"type": "nope"})):
            async with stand(spec, num_tickets=1, graders=Graders(refuse)) as it:
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
