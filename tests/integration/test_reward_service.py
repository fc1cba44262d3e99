"""The reward service through both of its doors, with real worker processes."""

import asyncio
import json
from contextlib import asynccontextmanager

import grpc
import httpx
import pytest

from headway.errors import Conflict, HeadwayError, InvalidSpec, Unavailable
from headway.messages import ScoreItem
from headway.pb import reward_pb2, reward_pb2_grpc
from headway.reward_client import RewardClient
from headway.rpc import channel, grpc_server
from services.reward.request import ServiceLimits
from tests.support.reward_stand import GOOD, QUICKSTART, items, service, until


async def test_the_quickstart_grader_by_grpc_and_rest():
    texts = ["3", "4 - 1 = 3", " -4 ", "no idea", "It is\n3."]
    wanted = [1.0, 0.8, 0.2, 0.0, 0.8]
    async with service() as (server, client), httpx.AsyncClient() as http:
        by_grpc = await client.score(
            "", "job", QUICKSTART, [ScoreItem("4 - 1?", t, {"answer": "3"}) for t in texts], 5.0
        )
        body = {
            "grader": QUICKSTART,
            "items": [{"completion": t, "item": {"answer": "3"}, "prompt": "?"} for t in texts],
        }
        answer = await http.post(server.http_address + "/v1/score", json=body)
        assert [s.reward for s in by_grpc] == wanted
        assert by_grpc[1].parts == {"only_an_integer": 0.0, "right": 1.0}
        assert all(s.error_kind == "" and s.duration_s > 0 for s in by_grpc)
        results = answer.json()["results"]
        assert [r["reward"] for r in results] == wanted
        assert results[1]["parts"] == {"only_an_integer": 0.0, "right": 1.0}
        assert (await http.get(server.http_address + "/readyz")).status_code == 200
        metrics = (await http.get(server.http_address + "/metrics")).text
        assert 'headway_reward_items_total{grader="sum",outcome="ok"}' in metrics
        assert "headway_reward_queued_items 0.0" in metrics
        assert await client.score("", "", QUICKSTART, [], 5.0) == ()


async def test_an_item_without_a_reference_is_null_among_good_ones():
    mixed = [GOOD, ScoreItem(None, "3", {}), ScoreItem(None, "3", {"answer": "many"}), GOOD]
    async with service() as (server, client), httpx.AsyncClient() as http:
        scores = await client.score("", "", QUICKSTART, mixed, 5.0)
        assert [s.reward for s in scores] == [1.0, None, None, 1.0]
        assert [s.error_kind for s in scores] == ["", "bad_input", "bad_input", ""]
        assert scores[1].error_message.startswith("right: item.answer does not exist")
        body = {"grader": QUICKSTART, "items": [{"completion": "3"}]}
        answer = (await http.post(server.http_address + "/v1/score", json=body)).json()
        assert answer["results"][0]["reward"] is None


async def test_damaged_json_of_one_item_is_that_items_error():
    request = reward_pb2.ScoreRequest(grader_json=json.dumps(QUICKSTART))
    for text in ('{"answer": "3"}', "{", "[1]", '{"answer": 3}'):
        request.items.add(completion="3", item_json=text)
    async with service() as (server, _), channel(server.address) as link:
        answer = await reward_pb2_grpc.RewardServiceStub(link).Score(request, timeout=20)
        assert [r.error_kind for r in answer.results] == ["", "bad_input", "bad_input", ""]
        assert [r.HasField("reward") for r in answer.results] == [True, False, False, True]


async def test_odd_characters_and_numbers_travel():
    odd = {
        "grader": {"type": "string_check", "operation": "eq"},
        "items": [
            {"completion": "\ud800", "item": {"answer": "\ud800"}},
            {"completion": "é\u0000😀", "item": {"answer": "é\u0000😀"}},
            {"completion": str(10**40), "item": {"answer": 10**40}},
        ],
    }
    async with service() as (server, _), httpx.AsyncClient() as http:
        answer = await http.post(
            server.http_address + "/v1/score",
            content=json.dumps(odd),
            headers={"content-type": "application/json"},
        )
        assert answer.status_code == 200, answer.text
        assert [r["reward"] for r in answer.json()["results"]] == [1.0, 1.0, 1.0]


async def test_a_repeated_request_id_is_scored_once(hostile, tmp_path):
    gate, log = tmp_path / "gate", tmp_path / "log"
    spec = {"type": "hostile", "log": str(log)}
    wait = items({"do": "wait_for", "file": str(gate)})
    async with service(hostile) as (_, client):
        twins = [asyncio.create_task(client.score("r1", "j", spec, wait, 30.0)) for _ in range(2)]
        await until(log.exists)
        gate.touch()
        first, second = await asyncio.gather(*twins)
        later = await client.score("r1", "j", spec, wait, 30.0)
        assert first == second == later
        assert first[0].reward == 1.0
        assert log.read_text() == "c0\n"
        with pytest.raises(Conflict, match="'r1' was used for another request"):
            await client.score("r1", "j", spec, items({}), 30.0)
        await client.score("r2", "j", spec, wait, 30.0)
        assert log.read_text() == "c0\nc0\n"


async def test_remembered_answers_are_bounded():
    async with service(limits=ServiceLimits(max_remembered=6)) as (server, client):
        for number in range(5):
            await client.score(f"r{number}", "", QUICKSTART, [GOOD, GOOD], 5.0)
        assert list(server.scorer._known) == ["r3", "r4"]
        for number in range(9):  # a request without items has its place too
            await client.score(f"none{number}", "", QUICKSTART, [], 5.0)
        assert list(server.scorer._known) == [f"none{number}" for number in range(3, 9)]


@pytest.mark.parametrize("ids", [("x" * 1025, "job"), ("r", "x" * 1025)])
async def test_ids_that_would_be_remembered_are_bounded(ids):
    async with service() as (server, client):
        with pytest.raises(InvalidSpec, match="_id has 1025 characters, and at most 1024"):
            await client.score(*ids, QUICKSTART, [GOOD], 5.0)
        assert not server.scorer._known


@pytest.mark.parametrize(
    "grader, message",
    [
        ({"type": "numerc"}, "unknown grader 'numerc' (did you mean numeric?)"),
        ({"type": "numeric", "extrct": "last"}, "did you mean grader.extract?"),
        ({"type": "numeric", "timeout_s": 1e6}, "exceeds this service's limit"),
    ],
)
async def test_a_faulty_grader_is_invalid_by_both_doors(grader, message):
    async with service() as (server, client), httpx.AsyncClient() as http:
        with pytest.raises(InvalidSpec) as refused:
            await client.score("", "", grader, [GOOD], 5.0)
        assert message in str(refused.value)
        request = reward_pb2.ScoreRequest(grader_json=json.dumps(grader))
        async with channel(server.address) as link:
            with pytest.raises(grpc.aio.AioRpcError) as status:
                await reward_pb2_grpc.RewardServiceStub(link).Score(request, timeout=20)
        assert status.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        answer = await http.post(
            server.http_address + "/v1/score", json={"grader": grader, "items": []}
        )
        assert answer.status_code == 422
        assert message in answer.json()["error"]["message"]
        unknown = await http.post(
            server.http_address + "/v1/score", json={"grader": QUICKSTART, "itms": []}
        )
        assert unknown.status_code == 422


async def test_requests_and_items_beyond_the_limits():
    limits = ServiceLimits(max_items=2, max_item_bytes=100, max_request_bytes=1000)
    async with service(limits=limits) as (_, client):
        with pytest.raises(InvalidSpec, match="3 items: one request takes at most 2"):
            await client.score("", "", QUICKSTART, [GOOD] * 3, 5.0)
        long = ScoreItem(None, "3" * 200, {"answer": "3"})
        scores = await client.score("", "", QUICKSTART, [long, GOOD], 5.0)
        assert [s.error_kind for s in scores] == ["bad_input", ""]
        with pytest.raises(InvalidSpec, match="one request takes 1000"):
            await client.score("", "", QUICKSTART, [ScoreItem(None, "3" * 2000, {})], 5.0)


async def test_the_client_goes_on_to_a_service_that_answers():
    async with service() as (server, _):
        client = RewardClient(["127.0.0.1:1", server.address], patience_s=30.0)
        for number in range(3):
            (score,) = await client.score(f"r{number}", "", QUICKSTART, [GOOD], 5.0)
            assert score.reward == 1.0
        client.update_addresses([])
        impatient = RewardClient([], patience_s=0.0)
        with pytest.raises(Unavailable, match="no reward service is known"):
            await impatient.score("r", "", QUICKSTART, [GOOD], 5.0)
        assert client.addresses == ()
        await client.close()


async def test_s047_a_wrong_number_of_scores_is_an_error_with_both_counts():
    async with reward_stub(num_too_few=1) as (address, _):
        client = RewardClient([address], patience_s=0.0)
        spec = {"type": "string_check", "operation": "eq"}
        with pytest.raises(HeadwayError, match=r"1 scores for 2 items \(grader 'string_check'\)"):
            await client.score("", "job", spec, [GOOD, GOOD], 1.0)
        await client.close()


async def test_the_calls_deadline_follows_the_graders_own_limit():
    async with reward_stub() as (address, deadlines):
        client = RewardClient([address], patience_s=0.0)
        spec = {"type": "string_check", "operation": "eq"}
        await client.score("", "job", spec, [GOOD], 1.0)
        await client.score("", "job", {**spec, "timeout_s": 100.0}, [GOOD, GOOD], 1.0)
        await client.close()
    # gRPC rounds a deadline up, to whole seconds when it is far
    assert 25 < deadlines[0] <= 2 * 1.0 + 30 + 1
    assert 300 < deadlines[1] <= 3 * 100.0 + 30 + 1


@asynccontextmanager
async def reward_stub(num_too_few=0):
    """A service that notes how long its callers wait, and scores everything 1."""
    deadlines = []

    class Notes(reward_pb2_grpc.RewardServiceServicer):
        async def Score(self, request, context):
            deadlines.append(context.time_remaining())
            result = reward_pb2.ScoreResult(reward=1.0)
            return reward_pb2.ScoreResponse(results=[result] * (len(request.items) - num_too_few))

    def register(server):
        reward_pb2_grpc.add_RewardServiceServicer_to_server(Notes(), server)
        return ()

    async with grpc_server("127.0.0.1", 0, register) as port:
        yield f"127.0.0.1:{port}", deadlines


async def test_a_request_beyond_what_the_wire_takes_is_the_requests_fault():
    async with service(limits=ServiceLimits(max_request_bytes=1000)) as (_, client):
        with pytest.raises(InvalidSpec, match="larger than max"):
            await client.score("", "", QUICKSTART, [ScoreItem("", "x" * (2 << 20), {})], 5.0)


HALF = "\ud800"  # of a surrogate pair: JSON can name it, UTF-8 cannot carry it
ITEM = {"completion": "3", "item": {"answer": "3"}}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 422), (b"[]", 422), (b"\xff", 422), (b"{" * 50_000, 422),
        (b'{"grader": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b', "items": []}', 422),
        (b'{"grader": {"type": "numeric", "abs_tol": NaN}, "items": []}', 422),
        (b'{"grader": {"type": "numeric", "timeout_s": 1e999}, "items": []}', 422),
        ({"grader": {"type": HALF}, "items": []}, 422),
        ({"grader": {"type": "sum", "graders": {HALF: QUICKSTART}}, "items": [ITEM]}, 422),
        ({"grader": QUICKSTART, "items": [ITEM], HALF: 1}, 422),
        ({"grader": QUICKSTART, "items": [{"completion": HALF, "item": {"answer": HALF}}]}, 200),
        ({"grader": {"type": "numeric", "reference": "{{item.\ud800}}"}, "items": [ITEM]}, 200),
        ({"grader": QUICKSTART, "items": [ITEM], "request_id": HALF, "job_id": HALF}, 200),
    ],
    ids=range(13),
)  # fmt: skip
async def test_bodies_of_every_kind_are_answered(body, status):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = {"Content-Type": "application/json"}
    async with service() as (server, _), httpx.AsyncClient(base_url=server.http_address) as http:
        answer = await http.post("/v1/score", content=content, headers=head)
    assert answer.status_code == status, answer.text
    assert ("results" if status == 200 else "error") in answer.json()
