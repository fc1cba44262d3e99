"""Visits at the OpenAI-compatible door: their versions, how many, and how they end."""

import asyncio

import httpx
import openai
import pytest

from services.rollout.visits import Policy
from tests.support.openai_door import ASKED, HELD, door


async def test_a_version_that_was_asked_for_is_the_one_that_samples():
    async with door() as it:
        wanted = {"extra_headers": {"x-headway-weight-version": "3"}}
        assert (await it.chat(**wanted)).weight_version == 3
        with pytest.raises(openai.APIStatusError) as caught:
            await it.chat(extra_headers={"x-headway-weight-version": "2"})
        assert caught.value.status_code == 412 and caught.value.code == "other_version"

        it.sample_on(rate=HELD)
        loose, pinned = (
            asyncio.create_task(it.chat(max_tokens=100, **more)) for more in ({}, wanted)
        )
        await it.sampling(2)
        it.sample_on(tokens=30, rate=HELD)
        await it.install(4)
        it.sample_on()
        rows = (answer := await loose).choices[0].weight_versions
        assert rows == [
            {"version": 3, "start": 0, "end": 30},
            {"version": 4, "start": 30, "end": 100},
        ]
        assert answer.weight_version == 4
        with pytest.raises(openai.APIStatusError) as caught:
            await pinned
        assert caught.value.status_code == 412 and "[3, 4]" in caught.value.message


async def test_beyond_so_many_requests_the_answer_is_429_and_the_others_are_answered():
    async with door(rate=HELD, max_visits=3, at_once=2) as it:
        held = [asyncio.create_task(it.chat(max_tokens=60, n=2)) for _ in range(3)]
        await it.sampling(2)  # never more at once
        while len(it.visits._in) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        with pytest.raises(openai.RateLimitError) as caught:
            await it.chat()
        assert caught.value.response.headers["retry-after"] == "1"
        most = 0
        it.sample_on()
        while not all(task.done() for task in held):
            most = max(most, it.engine.num_completions_in_flight)
            await asyncio.sleep(0.002)
        assert most == 2
        for answer in await asyncio.gather(*held):
            assert [len(c.message.content) for c in answer.choices] == [60, 60]
        assert (await it.chat()).choices


async def test_who_hangs_up_leaves_nothing_in_the_engine():
    async with door(rate=HELD) as it:
        async with httpx.AsyncClient() as raw:
            body = {"model": "job-a", "messages": ASKED, "max_tokens": 400, "n": 2}
            with pytest.raises(httpx.ReadTimeout):
                await raw.post(f"{it.url}/v1/chat/completions", json=body, timeout=0.3)
            await it.sampling(0)
            where = f"{it.url}/v1/chat/completions"
            async with raw.stream("POST", where, json=body | {"stream": True}) as answer:
                assert answer.headers["x-headway-weight-version"] == "3"
                await it.sampling(2)
            await it.sampling(0)
        assert not it.visits._in


async def test_when_the_node_gives_the_policy_up_visits_end_with_the_reason():
    async with door(rate=HELD) as it:
        whole = asyncio.create_task(it.chat(max_tokens=400))
        stream = await it.chat(max_tokens=400, stream=True)
        await it.sampling(2)
        await it.visits.close("the node is ending", 0.05)
        assert it.engine.num_completions_in_flight == 0
        with pytest.raises(openai.InternalServerError, match="the node is ending") as caught:
            await whole
        assert caught.value.status_code == 503
        with pytest.raises(openai.APIError, match="the node is ending"):
            [chunk async for chunk in stream]
        with pytest.raises(openai.InternalServerError, match="the node is ending"):
            await it.client.models.list()


async def test_visits_that_end_in_time_are_seen_off():
    async with door(rate=HELD) as it:
        whole = asyncio.create_task(it.chat(max_tokens=60))
        await it.sampling(1)
        closing = asyncio.create_task(it.visits.close("the node is ending", 30.0))
        await asyncio.sleep(0)
        with pytest.raises(openai.InternalServerError, match="the node is ending"):
            await it.chat()
        it.sample_on()
        await closing
        assert len((await whole).choices[0].message.content) == 60


async def test_without_engine_or_weights_it_is_not_available():
    async with door(version=None) as it:
        with pytest.raises(openai.InternalServerError, match="no engine") as caught:
            await it.chat()
        assert caught.value.status_code == 503
        it.visits.open(Policy("job-a", "/models/a", it.engine, lambda: it.engine.version))
        with pytest.raises(openai.InternalServerError, match="no weights"):
            await it.chat()


async def test_a_flood_is_answered_or_turned_away_and_leaves_nothing_behind():
    async with door(max_visits=5, at_once=3, length=50) as it:
        asked = [it.chat(max_tokens=50, n=1 + i % 3, stream=i % 4 == 0) for i in range(120)]
        done = await asyncio.gather(*asked, return_exceptions=True)
        answered = 0
        for one in done:
            if isinstance(one, openai.RateLimitError):
                continue
            if isinstance(one, openai.AsyncStream):
                assert [chunk async for chunk in one]
            answered += 1
        assert answered >= 5 and not [d for d in done if type(d) is Exception]
        await it.sampling(0)
        while it.visits._in:  # noqa: ASYNC110 - the last ones are on their way out
            await asyncio.sleep(0.005)
        assert it.visits._room._value == 3
        assert (await it.chat()).choices
