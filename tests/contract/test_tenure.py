"""One coordinator, one Redis, on real servers: who comes second is refused, who follows is not."""

import asyncio
import json
import os
import subprocess
from contextlib import asynccontextmanager

import pytest

from headway.errors import Conflict
from headway.pids import is_running, pid_space, started
from headway.redis_client import command, connect
from services.coordinator.tenure import COORDINATOR_KEY, Tenure
from tests.support.fleet import eventually

FAR_MS = 10_000_000


@asynccontextmanager
async def emptied(url):
    client = connect(url)
    await command(client, "DEL", COORDINATOR_KEY)
    try:
        yield client
    finally:
        await command(client, "DEL", COORDINATOR_KEY)
        await client.aclose()


@pytest.fixture
async def redis(store_url):
    async with emptied(store_url) as client:
        yield client


async def hold(redis, milliseconds, **changes):
    holder = {"tenure_id": "x", "host": "there", "pid_space": "another", "pid": 1, "started": 1}
    value = json.dumps({**holder, **changes})
    await command(redis, "SET", COORDINATOR_KEY, value, "PX", milliseconds)


async def test_a_second_coordinator_is_refused_while_the_first_works(redis):
    first, second = Tenure(redis, 5.0, 0.02), Tenure(redis)
    await first.take()
    keeping = asyncio.create_task(first.keep())
    try:
        with pytest.raises(Conflict, match=rf"another coordinator .* pid {os.getpid()}\)"):
            await second.take()
        assert not keeping.done()
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
    await second.leave()  # not its own to give back
    assert await command(redis, "PTTL", COORDINATOR_KEY) > 0
    await first.leave()
    await second.take()


async def test_who_follows_a_killed_one_on_this_machine_need_not_wait(redis):
    process = await asyncio.create_subprocess_exec("sleep", "600")
    began = started(process.pid)
    process.kill()
    await process.wait()
    await hold(redis, FAR_MS, pid_space=pid_space(), pid=process.pid, started=began)
    await Tenure(redis).take()


def test_a_zombie_has_ended():
    process = subprocess.Popen(["true"])
    began = started(process.pid)
    while is_running(process.pid, began):
        pass
    assert started(process.pid) == began  # not reaped yet
    process.wait()
    assert not is_running(process.pid, began)
    assert is_running(os.getpid(), started(os.getpid()))


async def test_a_pid_that_another_process_has_by_now(redis):
    me = os.getpid()
    await hold(redis, FAR_MS, pid_space=pid_space(), pid=me, started=started(me) - 1)
    await Tenure(redis).take()


async def test_a_silent_one_elsewhere_is_followed_when_its_time_is_up(redis):
    await hold(redis, 300)
    await Tenure(redis).take()
    held = json.loads(await command(redis, "GET", COORDINATOR_KEY))
    assert held["pid"] == os.getpid()


@pytest.mark.parametrize("rubbish", ["", "x", "[]", "{}", '{"pid": 1}'])
async def test_rubbish_holds_nobody_up(redis, rubbish):
    await command(redis, "SET", COORDINATOR_KEY, rubbish)
    await Tenure(redis).take()


async def test_a_hold_without_an_end_is_none(redis):
    await hold(redis, FAR_MS)
    await command(redis, "PERSIST", COORDINATOR_KEY)
    await Tenure(redis).take()


async def test_what_redis_forgot_is_taken_again(redis):
    tenure = Tenure(redis, 5.0, 0.01)
    await tenure.take()
    await command(redis, "DEL", COORDINATOR_KEY)
    keeping = asyncio.create_task(tenure.keep())
    try:
        await eventually(lambda: command(redis, "GET", COORDINATOR_KEY))
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


async def test_who_was_overtaken_ends(redis):
    """As one that was stopped for longer than its tenure."""
    slow, next_one = Tenure(redis, 5.0, 0.01), Tenure(redis, 5.0, 0.02)
    await slow.take()
    await command(redis, "DEL", COORDINATOR_KEY)
    await next_one.take()
    keeping = asyncio.create_task(next_one.keep())
    try:
        with pytest.raises(Conflict):
            await slow.keep()
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
