"""What the OpenAI-compatible door refuses, ignores and lets in."""

import httpx
import openai
import pytest

from headway.access.gate import Gate
from headway.access.process import Access
from headway.access.tokens import TokenFile, add_token
from tests.support.openai_door import ASKED, door


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
