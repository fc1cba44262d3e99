"""The OpenAI-compatible door, through OpenAI's own client, over the sim engine."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx
import openai
import pytest

from headway.access.gate import Gate
from headway.access.process import Access
from headway.access.tokens import TokenFile, add_token
from headway.messages import WeightManifest
from headway.web import make_app, serve_http
from services.rollout.door.routes import router
from services.rollout.sim_engine import Lengths, SimEngine, SimSettings
from services.rollout.visits import Policy, Visits

ASKED = [{"role": "user", "content": "What is 1 + 2?"}]


class Door:
    def __init__(self, engine, visits, url):
        self.engine, self.visits, self.url = engine, visits, url
        self.client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    async def chat(self, **fields):
        fields = {"model": "job-a", "messages": ASKED, "max_tokens": 12, **fields}
        return await self.client.chat.completions.create(**fields)

    async def text(self, **fields):
        fields = {"model": "job-a", "prompt": "1 + 2 =", "max_tokens": 12, **fields}
        return await self.client.completions.create(**fields)

    async def install(self, version):
        await self.engine.install(WeightManifest(version, (), 1), 5.0)

    def sample_on(self, tokens=0.0, rate=20_000.0):
        """A held engine has sampled so many tokens more, and goes on at this rate."""
        self.engine._advance()
        self.engine._progress += tokens
        self.engine._settings = replace(self.engine._settings, tokens_per_s=rate)
        self.engine._arm()

    async def sampling(self, count):
        async with asyncio.timeout(20):
            while self.engine.num_completions_in_flight != count:  # noqa: ASYNC110
                await asyncio.sleep(0.005)


HELD = 1e-6  # tokens a second: nothing ends until the test says so


@asynccontextmanager
async def door(rate=20_000.0, length=400, max_visits=8, at_once=4, access=None, version=3):
    engine = SimEngine(SimSettings(tokens_per_s=rate, lengths=Lengths("constant", length)))
    await engine.start()
    visits = Visits(max_visits, at_once)
    app = make_app("door", lambda: True, max_body_bytes=1 << 20, access=access or Access())
    app.include_router(router(visits))
    async with serve_http(app, "127.0.0.1", 0) as port:
        made = Door(engine, visits, f"http://127.0.0.1:{port}")
        if version is not None:
            await made.install(version)
            visits.open(Policy("job-a", "/models/a", engine, lambda: engine.version))
        try:
            yield made
        finally:
            await visits.close("the test is over")
            await made.client.close()
            await engine.close()


async def test_models_are_the_policy_and_its_version():
    async with door() as it:
        (card,) = (await it.client.models.list()).data
        assert (card.id, card.root, card.weight_version) == ("job-a", "/models/a", 3)
        assert (await it.client.models.retrieve("/models/a")).id == "job-a"
        with pytest.raises(openai.NotFoundError, match="there is 'job-a'"):
            await it.client.models.retrieve("other")


async def test_a_chat_has_n_choices_usage_and_the_version_of_every_token():
    async with door() as it:
        raw = await it.client.chat.completions.with_raw_response.create(
            model="job-a", messages=ASKED, n=3, max_completion_tokens=12, seed=5
        )
        answer = raw.parse()
        assert raw.headers["x-headway-weight-version"] == "3" and answer.weight_version == 3
        assert [c.index for c in answer.choices] == [0, 1, 2]
        assert len({c.message.content for c in answer.choices}) == 3
        for choice in answer.choices:
            assert choice.finish_reason == "length" and len(choice.message.content) == 12
            assert choice.weight_versions == [{"version": 3, "start": 0, "end": 12}]
        prompt_tokens = len("user: What is 1 + 2?\n")
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt_tokens, 36)
        again = await it.chat(n=3, seed=5)
        other = await it.chat(n=3, seed=6)
        texts = [[c.message.content for c in a.choices] for a in (answer, again, other)]
        assert texts[0] == texts[1] and not set(texts[0]) & set(texts[2])


async def test_stop_strings_and_lengths_end_an_answer():
    async with door() as it:
        whole = (await it.chat(seed=1, max_tokens=40)).choices[0].message.content
        stop = whole[9:11]
        cut = (await it.chat(seed=1, max_tokens=40, stop=[stop])).choices[0]
        assert cut.finish_reason == "stop" and cut.message.content == whole[: whole.index(stop)]
    async with door(length=5) as it:
        ended = (await it.chat(seed=1)).choices[0]
        assert ended.finish_reason == "stop" and len(ended.message.content) == 4  # and an end


async def test_a_stream_is_the_same_answer_in_pieces():
    async with door() as it:
        whole = await it.chat(seed=9, n=2, max_tokens=80, logprobs=True, top_logprobs=2)
        texts, versions, tokens, usage = ["", ""], {}, [[], []], None
        stream = await it.chat(
            seed=9, n=2, max_tokens=80, logprobs=True, top_logprobs=2, stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        num_chunks = 0
        async for chunk in stream:
            num_chunks += 1
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                tokens[choice.index] += choice.logprobs.content if choice.logprobs else []
                if choice.finish_reason:
                    versions[choice.index] = choice.weight_versions
        assert num_chunks == 2 + 2 * 80 + 1  # who speaks; a token each; the usage
        assert texts == [c.message.content for c in whole.choices]
        assert tokens == [c.logprobs.content for c in whole.choices]
        assert versions == {i: [{"version": 3, "start": 0, "end": 80}] for i in (0, 1)}
        assert usage == whole.usage and usage.completion_tokens == 160


async def test_echo_gives_the_log_probs_of_a_prompt_as_lm_eval_reads_them():
    async with door() as it:
        answer = await it.text(
            prompt=["7 + 8 = 15", "7 + 8 = 16"], echo=True, logprobs=1, max_tokens=1, temperature=0
        )
        for choice, prompt in zip(answer.choices, ("7 + 8 = 15", "7 + 8 = 16"), strict=True):
            seen = choice.logprobs
            assert choice.text[: len(prompt)] == prompt and seen.tokens[: len(prompt)] == [*prompt]
            assert seen.token_logprobs[0] is None and seen.top_logprobs[0] is None
            assert len(seen.tokens) == len(prompt) + 1
            assert seen.text_offset == list(range(len(prompt) + 1))
            for token, logprob, top in zip(
                seen.tokens[1:], seen.token_logprobs[1:], seen.top_logprobs[1:], strict=True
            ):
                assert top[token] == logprob <= max(top.values()) <= 0.0
        first, second = (c.logprobs.token_logprobs for c in answer.choices)
        assert first[:9] == second[:9] and first[9] != second[9]
        alone = await it.text(prompt="7 + 8 = 15", echo=True, logprobs=1, max_tokens=0)
        assert alone.choices[0].logprobs.token_logprobs == first[:10]
        assert alone.choices[0].text == "7 + 8 = 15"
        by_ids = await it.text(
            prompt=[list(b"7 + 8 = 15")], echo=True, logprobs=1, max_tokens=1, temperature=0
        )
        assert by_ids.choices[0].logprobs == answer.choices[0].logprobs


async def test_an_echoed_stream_is_the_same_text():
    async with door() as it:
        asked = {"prompt": "1 + 2 =", "echo": True, "logprobs": 0, "max_tokens": 60, "seed": 4}
        whole = (await it.text(**asked)).choices[0]
        text, offsets = "", []
        async for chunk in await it.text(**asked, stream=True):
            text += chunk.choices[0].text
            offsets += chunk.choices[0].logprobs.text_offset
        assert text == whole.text and offsets == whole.logprobs.text_offset
        assert len(offsets) == 67


async def test_prompts_times_n_are_choices_in_order():
    async with door() as it:
        answer = await it.text(prompt=["one", "two"], n=2, seed=3)
        assert [c.index for c in answer.choices] == [0, 1, 2, 3]
        assert len({c.text for c in answer.choices}) == 4
        assert answer.usage.prompt_tokens == 6 and answer.usage.completion_tokens == 48


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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [{"type": "function"}]}, "tools is not possible here"),
        ({"response_format": {"type": "json_object"}}, "response_format is not possible"),
        ({"frequency_penalty": 0.5}, "frequency_penalty is not possible"),
        ({"temperature": -1}, "temperature"),
        ({"n": 0}, "n:"),
        ({"top_logprobs": 3}, "needs logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "type"),
        ({"stop": [""]}, "stop"),
        ({"min_tokens": 99}, "min_tokens 99"),
    ],
)
async def test_what_is_not_possible_is_refused_in_openais_shape(fields, message):
    async with door() as it:
        body = {"model": "job-a", "messages": ASKED, "max_tokens": 12, **fields}
        async with httpx.AsyncClient() as raw:
            answer = await raw.post(f"{it.url}/v1/chat/completions", json=body)
        error = answer.json()["error"]
        assert answer.status_code == 400 and message in error["message"], error
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid")


async def test_fields_that_ask_for_nothing_and_unknown_ones_are_ignored():
    async with door() as it:
        plain = await it.chat(seed=2, temperature=0.5)
        answer = await it.chat(
            seed=2, temperature=0.5, user="me", frequency_penalty=0, tool_choice="none",
            extra_body={"do_sample": True, "best_of": None, "logit_bias": {}},
        )  # fmt: skip
        assert answer.choices == plain.choices
        parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "1 + 2?"}]
        split = await it.chat(messages=[{"role": "user", "content": parts}], seed=2)
        assert split.usage.prompt_tokens == plain.usage.prompt_tokens
        with pytest.raises(openai.NotFoundError, match="no model 'gpt'"):
            await it.chat(model="gpt")


async def test_tokens_open_it_as_other_doors(tmp_path):
    file = TokenFile(tmp_path / "tokens.json")
    viewer, _ = add_token(file, "viewer", "harness")
    user, _ = add_token(file, "user", "harness")
    async with door(access=Access(Gate(file.path))) as it:
        with pytest.raises(openai.AuthenticationError, match="not known here"):
            await it.chat()
        it.client.api_key = viewer
        assert (await it.client.models.list()).data
        with pytest.raises(openai.PermissionDeniedError, match="role viewer"):
            await it.chat()
        it.client.api_key = user
        assert (await it.chat()).choices


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"model": 1e999}',
        b'{"prompt": "\\ud800", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"prompt": [[1], "x"], "messages": [[]]}',
        b'{"prompt": [99999999999999999999], "messages": {"role": "user"}}',
        b'{"prompt": [], "messages": "hello"}', b'{"prompt": [[]], "messages": [null]}',
        b'{"prompt": "", "messages": [{"role": "user"}], "top_p": NaN}',
        b'{"prompt": "x", "messages": [{"role": "user"}], "n": 1e9}',
        b'{"prompt": "x", "messages": [{"role": "user"}], "seed": 1e30}',
        b"[" * 100_000,
    ],
)  # fmt: skip
async def test_rubbish_is_a_faulty_request_and_the_next_one_is_answered(path, body):
    async with door() as it:
        async with httpx.AsyncClient() as raw:
            headers = {"content-type": "application/json"}
            answer = await raw.post(f"{it.url}/v1/{path}", content=body, headers=headers)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["type"] == "invalid_request_error"
        assert (await it.chat()).choices and not it.visits._in


async def test_a_body_that_is_too_long_and_a_version_that_is_none_are_refused():
    async with door() as it:
        with pytest.raises(openai.APIStatusError) as caught:
            await it.text(prompt="x" * (2 << 20))
        assert caught.value.status_code == 413
        with pytest.raises(openai.BadRequestError, match="weight-version"):
            await it.text(extra_headers={"x-headway-weight-version": "newest"})


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
