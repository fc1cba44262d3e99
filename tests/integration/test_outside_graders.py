"""Reward models and remote graders, and servers that misbehave: null of the right kind, never 0."""

import asyncio
import ssl
from contextlib import asynccontextmanager

import trustme

from headway.messages import ScoreItem
from tests.support.outside_server import asking, outside_server, said
from tests.support.reward_stand import service

MODEL = {"type": "reward_model", "endpoint": "there", "model": "rm", "patience_s": 0.0}
REMOTE = {"type": "remote", "endpoint": "there", "patience_s": 0.0}
JUDGE = {"type": "judge", "endpoint": "there", "model": "m", "criteria": "x", "patience_s": 0.0}
CHAT = [{"role": "user", "content": "What?"}]


@asynccontextmanager
async def asked_of(answer, ssl=None, **settings):
    async with outside_server(answer, ssl) as there:
        endpoint = there.endpoint("there", **settings)
        async with service(asking=asking(endpoint)) as (_, client):

            async def score(grader, *texts, prompt="What?", **row):
                items = [ScoreItem(prompt, text, row) for text in texts]
                return await client.score("", "job", grader, items, 60.0)

            yield there, score


def row(**fields):
    return 200, {}, {"data": [{"index": 0, **fields}]}


async def test_reward_models_of_each_api():
    def answer(asked):
        return {
            "/classify": lambda b: row(
                label="good", probs=[0.25, 0.75] if b.get("input") == "two" else [0.5]
            ),
            "/score": lambda b: row(score=0.5 if b["text_1"] == "user: What?" else 0),
            "/pooling": lambda b: row(data=[[0.5], [0.25], [0.75]] if "input" in b else [2]),
        }[asked.path](asked.body)

    async with asked_of(answer) as (there, score):

        async def one(text, prompt="What?", **changes):
            (got,) = await score(MODEL | changes, text, prompt=prompt)
            return got.reward if got.reward is not None else got.error_message

        assert await one("yes") == 0.5
        assert there.bodies[-1] == {"model": "rm", "input": "yes"}
        assert await one("two", label=1) == 0.75
        assert "there are 2: say which with label" in await one("two")
        assert await one("yes", CHAT, api="score", extra={"use_activation": False}) == 0.5
        assert there.bodies[-1]["text_2"] == "yes" and there.bodies[-1]["use_activation"] is False
        assert await one("yes", api="pooling") == 0.75
        assert await one("yes", api="pooling", over_tokens="min") == 0.25
        assert await one("yes", api="pooling", over_tokens="mean") == 0.5
        assert await one("yes", api="pooling", over_tokens="product") == 0.09375
        assert await one("yes", CHAT, api="pooling", as_chat=True) == 2.0
        assert there.bodies[-1]["messages"] == [*CHAT, {"role": "assistant", "content": "yes"}]
        assert await one("yes", "What?", as_chat=True) == 0.5
        assert there.bodies[-1]["messages"][0] == {"role": "user", "content": "What?"}


async def test_a_remote_grader_takes_batches_and_answers_each_item():
    first = asyncio.Event()
    texts = {
        "a": {"reward": 0.5, "parts": {"style": 0.25}},
        "b": 1,
        "c": None,
        "d": {"reward": None, "error": "no such language"},
        "e": {"reward": "high"},
        "f": {"reward": 0.5, "parts": {"x/y": 1}},
        "g": {"reward": 0.5, "parts": [1]},
        "h": 10**400,
    }

    async def answer(asked):
        if len(there.asked) == 1:
            await first.wait()
        return 200, {}, {"results": [texts[item["completion"]] for item in asked.body["items"]]}

    async with asked_of(answer, max_concurrent=1) as (there, score):
        waiting = asyncio.create_task(score(REMOTE | {"batch_size": 4}, *texts, answer=3))
        await there.until_asked(1)
        first.set()
        got = await waiting
    assert [s.reward for s in got] == [0.5, 1.0] + [None] * 6
    assert got[0].parts == {"style": 0.25}
    assert [s.error_kind for s in got[2:]] == [
        "remote_unscored", "remote_unscored",
        "remote_unparsable", "remote_unparsable", "remote_unparsable", "remote_unparsable",
    ]  # fmt: skip
    assert "no such language" in got[3].error_message
    sent = [item for body in there.bodies for item in body["items"]]
    assert sent[0] == {"completion": "a", "item": {"answer": 3}, "prompt": "What?"}
    assert len(sent) == 8
    assert all(len(body["items"]) <= 4 for body in there.bodies)


async def test_a_remote_body_of_ones_own():
    def answer(asked):
        return 200, {}, {"scores": [{"value": len(asked.body["text"]) / 10}]}

    grader = REMOTE | {
        "body": {"text": "{{sample.output_text}}", "more": ["{{item.n}}", 1, None]},
        "field": "scores.0.value",
    }
    async with asked_of(answer) as (there, score):
        (got,) = await score(grader, "{{item.n}}", n=7)
        assert got.reward == 1.0
        assert there.bodies == [{"text": "{{item.n}}", "more": [7, 1, None]}]
        (lost,) = await score(grader | {"field": "scores.1.value"}, "x", n=7)
        assert (lost.reward, lost.error_kind) == (None, "remote_unparsable")
        (bad,) = await score(grader, "x")
        assert (bad.reward, bad.error_kind) == (None, "bad_input")


def raw(*pieces, then_hang=False):
    """Writes to the connection as it is."""

    async def write(writer):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        if not then_hang:
            writer.close()

    return write


OK = b"HTTP/1.1 200 OK\r\n"
FAULTS = {
    "garbage": (lambda: (200, {}, b"\x00\xff{"), "judge_unparsable", "what is no JSON"),
    "other json": (lambda: (200, {}, {"choices": []}), "judge_unparsable", "no chat completion"),
    "a list": (lambda: (200, {}, [1]), "judge_unparsable", "no chat completion"),
    "number": (lambda: said(7), "judge_unparsable", "no chat completion"),
    "deep": (lambda: (200, {}, b"[" * 100_000), "judge_unparsable", "no JSON"),
    "empty": (lambda: said(None), "judge_unparsable", "an empty text"),
    "no verdict": (lambda: said("Well."), "judge_unparsable", "verdict 'Well.' is no number"),
    "cut off": (lambda: said("<think>", "length"), "judge_unparsable", "cut off at its token"),
    "out of range": (lambda: said("Verdict: 7"), "judge_unparsable", "7 is not within 0 to 1"),
    "nan": (lambda: said("Verdict: nan"), "judge_unparsable", "is no number"),
    "zipped": (
        lambda: (200, {"content-encoding": "gzip"}, b"\x1f\x8b"), "judge_unparsable", "an encoding",
    ),
    "redirect": (
        lambda: (307, {"location": "http://127.0.0.1:9/"}, ""),
        "judge_refused", "redirects are not followed",
    ),
    "wrong key": (lambda: (401, {}, "bad key sk-sec***"), "judge_refused", "answered 401"),
    "too long": (lambda: (400, {}, "sk-secret: too long"), "judge_refused", "400: ***: too long"),
    "down": (lambda: (503, {}, "x" * 9999), "judge_unavailable", "answered 503: xxx"),
    "busy": (lambda: (429, {"retry-after": "99"}, ""), "judge_unavailable", "to wait 99 s"),
    "cut": (lambda: raw(OK + b"content-length: 99\r\n\r\n{"), "judge_unavailable", "RemoteProtoc"),
    "no http": (lambda: raw(b"SSH-2.0\r\n"), "judge_unavailable", "RemoteProtocolError"),
    "huge": (
        lambda: raw(OK + b"content-length: 9999999999\r\n\r\n", *[b" " * (1 << 20)] * 6),
        "judge_unparsable", "more than 4 MiB",
    ),
    "endless head": (
        lambda: raw(OK, *[b"x: " + b"y" * 60_000 + b"\r\n"] * 4),
        "judge_unavailable", "RemoteProtocolError",
    ),
    "drip": (
        lambda: raw(OK + b"content-length: 99\r\n\r\n", b"{", then_hang=True),
        "judge_unavailable", "no answer within 0.2 s",
    ),
}  # fmt: skip


async def test_each_way_to_misbehave_is_a_null_that_says_so_and_no_key_is_told():
    *others, drip = FAULTS
    async with asked_of(lambda asked: FAULTS[fault_in(asked)][0](), key="sk-secret") as (_, score):
        got = await score(JUDGE, *others)
        got += await score(JUDGE | {"try_timeout_s": 0.2}, drip)
    for score_, (name, (_, kind, message)) in zip(got, FAULTS.items(), strict=True):
        assert (score_.reward, score_.error_kind) == (None, kind), (name, score_.error_message)
        assert message in score_.error_message, name
        assert "sk-sec" not in score_.error_message, name


def fault_in(asked):
    content = asked.body["messages"][-1]["content"]
    return next(name for name in FAULTS if f"\n{name}\n" in content)


async def test_a_judge_killed_in_the_middle_and_back_again_loses_nothing():
    async with outside_server(lambda asked: there.hang()) as there:
        port = there.url.rpartition(":")[2]
        settings = asking(there.endpoint("there"))
        grader = JUDGE | {"patience_s": 60.0}
        items = [ScoreItem("?", f"c{i}", {}) for i in range(6)]
        async with service(asking=settings) as (_, client):
            scoring = asyncio.create_task(client.score("", "", grader, items, 60.0))
            await there.until_asked(6)
            await there.stop()
            async with outside_server(lambda asked: said("Verdict: 1"), port=int(port)) as back:
                assert [s.reward for s in await scoring] == [1.0] * 6
                assert len(back.asked) == 6


async def test_certificates_are_checked():
    ca = trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ca.issue_cert("127.0.0.1").configure_cert(context)
    async with asked_of(lambda asked: said("1"), ssl=context) as (there, score):
        (got,) = await score(JUDGE | {"patience_s": 60.0}, "x")
        assert (got.reward, got.error_kind) == (None, "judge_refused")
        assert "certificate is not trusted" in got.error_message
        assert there.asked == []
    with ca.cert_pem.tempfile() as trusted:
        async with asked_of(lambda a: said("1"), ssl=context, ca_file=trusted) as (_, score):
            assert [s.reward for s in await score(JUDGE, "x")] == [1.0]


async def test_items_are_begun_only_as_what_waits_to_be_asked_has_room():
    async with outside_server(lambda asked: said("1")) as there:
        settings = asking(there.endpoint("there"), max_waiting_bytes=1)
        async with service(asking=settings) as (_, client):
            many = [ScoreItem("?", f"c{i}", {}) for i in range(40)]
            assert [s.reward for s in await client.score("", "", JUDGE, many, 60.0)] == [1.0] * 40
    assert len(there.asked) == 40


async def test_what_is_too_large_to_ask_is_the_items_fault():
    async with asked_of(lambda asked: said("1")) as (there, score):
        got = await score(JUDGE, "x" * (1 << 20), "small")
    assert [(s.reward, s.error_kind) for s in got] == [(None, "bad_input"), (1.0, "")]
    assert "at most 1024 KiB" in got[0].error_message
    assert len(there.asked) == 1


async def test_a_group_is_asked_for_together_and_what_was_graded_is_kept(hostile, tmp_path):
    log = tmp_path / "log"
    ranks = {"type": "hostile_group", "log": str(log)}
    grader = {"type": "sum", "graders": {"rank": ranks, "good": JUDGE}}

    def verdict(asked):
        return said("1" if "xxxx" in asked.body["messages"][-1]["content"] else "0.5")

    async with outside_server(verdict) as there:
        settings = asking(there.endpoint("there"))
        async with service(hostile, asking=settings) as (_, client):
            items = [ScoreItem("?", text, {}, "g") for text in ("x", "xxxx", "xx")]
            got = await client.score("", "", grader, items, 60.0)
            graded = log.read_text().split()
            items[2] = ScoreItem("?", "lost", {"do": "lost"}, "g")
            some = await client.score("", "", grader, items, 60.0)
    assert [s.reward for s in got] == [0.5, 3.0, 1.5]
    assert got[1].parts == {"rank": 2.0, "good": 1.0}
    assert sorted(graded) == ["x", "xx", "xxxx"]  # each once, though scored in two rounds
    assert [s.reward for s in some] == [0.5, 2.0, None]
    assert (some[2].error_kind, some[2].error_message) == ("bad_input", "rank: lost")
    assert len(there.asked) == 3


async def test_a_worker_cannot_have_asked_what_no_grader_of_the_request_asks(hostile):
    forged = {"do": "ask", "asks": {"k": {"leaf": "x", "content": {"url": "http://10.0.0.1"}}}}
    many = {"do": "ask", "asks": {str(i): {"leaf": "x", "content": i} for i in range(9)}}
    rows = [forged, many, {"do": "ask", "asks": {"k": 1}}, {}]
    items = [ScoreItem("?", "c", row) for row in rows]
    both = {"type": "sum", "graders": {"h": {"type": "hostile"}, "good": JUDGE}}
    async with outside_server(lambda asked: said("1")) as there:
        settings = asking(there.endpoint("there"))
        async with service(hostile, asking=settings) as (_, client):
            alone = await client.score("", "", {"type": "hostile"}, items, 60.0)
            assert [s.error_kind for s in alone] == ["internal"] * 3 + [""]
            assert "asks outside, which its service cannot" in alone[0].error_message
            got = await client.score("", "", both, items, 60.0)
            assert [s.reward for s in got] == [None, None, None, 2.0]
            assert all("asking failed: asks" in s.error_message for s in got[:3])
    assert len(there.asked) == 1
