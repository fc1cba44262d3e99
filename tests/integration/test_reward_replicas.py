"""Several reward services behind one client, one address, one load balancer; and who dies."""

import asyncio
import itertools
import json
import signal
import subprocess
import sys
from contextlib import asynccontextmanager, suppress

import grpc
import pytest

from headway.errors import InvalidSpec, NoCapacity, Unavailable
from headway.lifecycle import end_tasks
from headway.messages import ScoreItem
from headway.pb import reward_pb2, reward_pb2_grpc
from headway.reward_blocking import BlockingRewardClient, requests_of
from headway.reward_client import _BALANCED, RewardClient
from headway.rpc import grpc_server
from tests.support.reward_stand import GOOD, QUICKSTART, ROOT, service

SPEC = {"type": "numeric"}


def sums(num):
    """Items with rewards that tell one from the other."""
    items = [ScoreItem(None, f"The answer is {n}.", {"answer": str(n + n % 3)}) for n in range(num)]
    return items, [float(n % 3 == 0) for n in range(num)]


class Process:
    """A reward service as a process of its own."""

    def __init__(self):
        command = [sys.executable, "-m", "services.reward", "--workers", "1", "--cache-items", "0"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        self.address = ""

    def ready(self):
        row = next(json.loads(line) for line in self.process.stderr if "http_address" in line)
        self.address = row["address"]
        return self

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(timeout=20)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        self.process.stderr.close()


@asynccontextmanager
async def load_balancer(*addresses):
    """A TCP load balancer: a connection goes to the next service that takes it."""
    turns = itertools.cycle(addresses)
    links = set()

    async def accept(reader, writer):
        links.add(asyncio.current_task())
        try:
            for address in itertools.islice(turns, len(addresses)):
                host, _, port = address.rpartition(":")
                with suppress(OSError):
                    far_reader, far_writer = await asyncio.open_connection(host, int(port))
                    break
            else:
                return
            await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))
        finally:
            writer.close()

    async def pump(source, sink):
        try:
            while data := await source.read(1 << 16):
                sink.write(data)
                await sink.drain()
        except ConnectionError:
            pass
        finally:
            sink.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await end_tasks(links)


async def score_all(client, items, on_first):
    """All rewards; `on_first` is called once the first of many requests has been answered."""
    waiting = [
        asyncio.create_task(client.score(f"r{n}", "job", SPEC, items[n : n + 50], 30.0))
        for n in range(0, len(items), 50)
    ]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    on_first()
    return [score.reward for scores in await asyncio.gather(*waiting) for score in scores]


async def test_a_service_killed_in_the_middle_loses_no_item():
    items, wanted = sums(2000)
    with Process() as one, Process() as two, Process() as three:
        for process in (one, two, three):
            process.ready()
        client = RewardClient([one.address, two.address])
        assert await score_all(client, items, one.kill) == wanted
        await client.close()
        async with load_balancer(two.address, three.address) as address:
            client = RewardClient([address])
            assert await score_all(client, items, two.kill) == wanted
            await client.close()


@asynccontextmanager
async def stub(answer):
    """A service whose Score is `answer`; its address, and the request ids it was asked with."""
    asked = []

    class Stub(reward_pb2_grpc.RewardServiceServicer):
        async def Score(self, request, context):
            asked.append(request.request_id)
            return await answer(request, context)

    def register(server):
        reward_pb2_grpc.add_RewardServiceServicer_to_server(Stub(), server)
        return ()

    async with grpc_server("127.0.0.1", 0, register) as port:
        yield f"127.0.0.1:{port}", asked


async def ones(request, context):
    results = [reward_pb2.ScoreResult(reward=1.0)] * len(request.items)
    return reward_pb2.ScoreResponse(results=results)


async def test_a_dead_address_is_skipped_and_costs_no_pause():
    async with stub(ones) as (alive, asked):
        client = RewardClient(["127.0.0.1:1", alive], patience_s=0.0)
        for number in range(6):
            (score,) = await client.score(f"r{number}", "", SPEC, [GOOD], 5.0)
            assert score.reward == 1.0
        assert asked == [f"r{n}" for n in range(6)]
        await client.close()


async def test_one_name_with_several_services_behind_it():
    async with stub(ones) as (one, by_one), stub(ones) as (two, by_two):
        # as a DNS name with two records resolves
        link = grpc.aio.insecure_channel(f"ipv4:{one},{two}", options=_BALANCED)
        async with link:
            request = reward_pb2.ScoreRequest()
            rewards = reward_pb2_grpc.RewardServiceStub(link)
            while not (by_one and by_two):  # until both connections stand
                await rewards.Score(request, timeout=20, wait_for_ready=True)
            before = len(by_one), len(by_two)
            for _ in range(20):
                await rewards.Score(request, timeout=20)
        assert (len(by_one) - before[0], len(by_two) - before[1]) == (10, 10)


def full(after_ms):
    async def answer(request, context):
        context.set_trailing_metadata((("headway-kind", "too_many"), ("retry-after-ms", after_ms)))
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")

    return answer


async def test_the_hint_of_a_full_service_is_kept_to():
    loop = asyncio.get_running_loop()
    times = []

    async def full_at_first(request, context):
        times.append(loop.time())
        if len(times) > 1:
            return await ones(request, context)
        return await full("700")(request, context)

    async with stub(full_at_first) as (address, _):
        client = RewardClient([address], patience_s=30.0)
        (score,) = await client.score("r", "", SPEC, [GOOD], 5.0)
        assert score.reward == 1.0
        assert times[1] - times[0] >= 0.7
        await client.close()
    async with stub(full("5000")) as (one, _), stub(full("3000")) as (two, _):
        client = RewardClient([one, two], patience_s=1.0)
        with pytest.raises(NoCapacity, match="full") as refused:
            await client.score("r", "", SPEC, [GOOD], 5.0)
        assert refused.value.retry_after_s == 3.0  # of the one that has room first
        await client.close()
    async with stub(full("a while")) as (odd, _), stub(ones) as (alive, _):
        client = RewardClient([odd, alive], patience_s=0.0)
        assert (await client.score("r", "", SPEC, [GOOD], 5.0))[0].reward == 1.0
        await client.close()


# --- without an event loop -----------------------------------------------------------------


def use(address):
    items, wanted = sums(1200)
    with BlockingRewardClient(address) as client:
        scores = client.score(SPEC, items)
        assert [score.reward for score in scores] == wanted
        (fault,) = client.validate(QUICKSTART, {"answr": 1}).faults
        assert fault.path == "grader.graders.right.reference"
        assert "did you mean item.answr?" in fault.message
        assert client.validate(QUICKSTART).grader["graders"]["right"]["extract"] == "last"
        with pytest.raises(InvalidSpec, match="did you mean numeric"):
            client.score({"type": "numerc"}, items)
        assert client.score(SPEC, []) == ()
    client.close()
    with BlockingRewardClient("127.0.0.1:1", patience_s=0.0) as lonely, pytest.raises(Unavailable):
        lonely.score(SPEC, items[:1])


async def test_scores_without_an_event_loop():
    async with service() as (server, _):
        await asyncio.to_thread(use, server.address)


def test_groups_stay_in_one_request():
    items = [ScoreItem(None, "", {}, group) for group in ("a", "a", "", "b", "a", "b", "")]
    assert requests_of(items, 3) == [[0, 1, 4], [2, 3, 5], [6]]
    assert requests_of(items, 1) == [[0, 1, 4], [2], [3, 5], [6]]
    assert requests_of([], 3) == []
