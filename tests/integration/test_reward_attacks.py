"""Rubbish, floods, slow and vanishing clients at both doors: what follows is scored right."""

import asyncio
import json
import random
import socket

import grpc
import pytest

from headway.pb import reward_pb2, reward_pb2_grpc
from headway.rpc import channel
from services.reward.request import ServiceLimits
from services.reward.workers import PoolSettings
from tests.support.reward_doors import both_doors
from tests.support.reward_stand import service, until

SPEC = {"type": "numeric"}
RIGHT = [{"completion": "3", "item": {"answer": 3}}, {"completion": "4", "item": {"answer": 3}}]
WIRE = reward_pb2.ScoreRequest(grader_json=json.dumps(SPEC))
WIRE.items.add(completion="3", item_json='{"answer": 3}')


async def still_right(server):
    async with both_doors(server) as doors:
        for door in doors:
            assert [r["reward"] for r in await door.score(SPEC, RIGHT)] == [1.0, 0.0]
    await until(lambda: not server.scorer._running)
    assert server.scorer._queued_items == server.scorer._queued_bytes == 0


def connect(address):
    host, _, port = address.rpartition("/")[2].rpartition(":")
    return socket.create_connection((host, int(port)))


async def test_rubbish_is_refused_and_harms_nobody():
    noise = random.Random(1)
    async with service() as (server, _), channel(server.address) as link:
        for method in ("Score", "Validate"):
            raw = link.unary_unary(
                f"/headway.v1.RewardService/{method}",
                request_serializer=lambda body: body,
                response_deserializer=lambda body: body,
            )
            for body in (b"\xff" * 100, noise.randbytes(1000), b"\x0a\xff\xff\xff\xff\x0f"):
                with pytest.raises(grpc.aio.AioRpcError):
                    await raw(body, timeout=20)
        rewards = reward_pb2_grpc.RewardServiceStub(link)
        for grader in ("", "{", "[" * 60_000, '{"type": "\\ud800"}', '{"type": 1}', "null"):
            verdict = await rewards.Validate(reward_pb2.ValidateRequest(grader_json=grader))
            assert verdict.grader_json == "" and len(verdict.faults) == 1
        request = reward_pb2.ScoreRequest(grader_json=json.dumps(SPEC))
        items = ["{", "[]", "[" * 100_000, '{"answer": 1e999}', '{"answer": "\\ud800"}',
                 '{"answer": ' + "9" * 10_000 + "}", '{"answer": NaN}']  # fmt: skip
        for item_json in items:
            request.items.add(completion="3", item_json=item_json)
        answer = await rewards.Score(request, timeout=30)
        assert [r.error_kind for r in answer.results] == ["bad_input"] * len(items)
        for address in (server.address, server.http_address):
            for _ in range(20):
                with connect(address) as link_to_it:
                    link_to_it.sendall(noise.randbytes(5000))
        await still_right(server)


async def test_slow_and_vanishing_clients_hold_up_nobody():
    head = (b"POST /v1/score HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n")  # fmt: skip
    body = json.dumps({"grader": SPEC, "items": RIGHT * 2000}).encode()
    async with service() as (server, _), channel(server.address) as link:
        slow = [connect(server.http_address) for _ in range(100)]
        for one in slow:
            one.sendall(head % 1000 + b"{")
        deaf = [connect(server.http_address) for _ in range(8)]
        for one in deaf:
            one.sendall(head % len(body))
            await asyncio.to_thread(one.sendall, body)
        rewards = reward_pb2_grpc.RewardServiceStub(link)
        calls = [rewards.Score(WIRE) for _ in range(100)]
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await still_right(server)
        for one in (*slow, *deaf):
            one.close()


async def test_a_flood_of_small_requests_is_answered():
    async with service(PoolSettings(num_workers=1)) as (server, _), channel(server.address) as link:
        rewards = reward_pb2_grpc.RewardServiceStub(link)
        room = asyncio.Semaphore(200)

        async def one(number):
            request = reward_pb2.ScoreRequest(request_id=f"r{number % 1500}", job_id="j")
            request.MergeFrom(WIRE)
            async with room:
                answer = await rewards.Score(request, timeout=60)
            return answer.results[0].reward

        assert await asyncio.gather(*(one(number) for number in range(2000))) == [1.0] * 2000
        await still_right(server)


async def test_what_is_cancelled_leaves_its_room():
    limits = ServiceLimits(max_queued_items=600)
    async with service(limits=limits) as (server, _), channel(server.address) as link:
        rewards = reward_pb2_grpc.RewardServiceStub(link)
        request = reward_pb2.ScoreRequest(grader_json=json.dumps(SPEC))
        for number in range(500):
            request.items.add(completion=f"{number}", item_json='{"answer": 3}')
        for _ in range(5):
            call = rewards.Score(request)
            await until(lambda: server.scorer._running)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            await until(lambda: not server.scorer._running)
        await still_right(server)
