"""What the OpenAI-compatible door answers, through OpenAI's own client, over the sim engine."""

import openai
import pytest

from tests.support.openai_door import ASKED, door


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


async def test_special_tokens_that_would_be_added_unasked_are_refused():
    async with door() as it:
        bare = {"extra_body": {"add_special_tokens": False}}
        with pytest.raises(openai.BadRequestError, match="add_special_tokens"):
            await it.text(prompt=["1 + 2 ="], **bare)
        with pytest.raises(openai.BadRequestError, match="add_special_tokens"):
            await it.chat(extra_body={"add_special_tokens": True})
        asked = {"prompt": [list(b"1 + 2 =")], "seed": 3}
        assert (await it.text(**asked, **bare)).choices == (await it.text(**asked)).choices
        assert (await it.chat(seed=3, **bare)).choices == (await it.chat(seed=3)).choices


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
