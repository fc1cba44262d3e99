"""What only a ledger on a real server can show: keys, clocks, full memory, broken links."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest
from redis.crc import key_slot

from headway.errors import HeadwayError, StoreFull, Unavailable
from headway.ledger.api import LedgerConfig, Member
from headway.ledger.keys import KEYS, RETENTION_S, job_key, ledger_keys
from headway.ledger.redis_ledger import RedisLedger
from headway.redis_client import command, connect
from headway.valkey import EmbeddedValkey
from tests.support.ledgers import ids, persist, tickets


@pytest.fixture
async def client(store_url):
    client = connect(store_url)
    yield client
    await client.aclose()


async def busy_ledger(client, job_id: str) -> RedisLedger:
    """A ledger in which every key is in use."""
    ledger = RedisLedger(client, job_id)
    await ledger.open(LedgerConfig(1, 1, on_late="mask", max_outstanding_groups=9))
    await ledger.issue(tickets(0, 8))
    late, filtered = (await ledger.claim("a", 0, 2)).leases
    await ledger.deliver(filtered, b"", "dull")
    first = (await ledger.claim("a", 0)).leases[0]
    await ledger.deliver(first, b"first")
    await ledger.commit(0, (await ledger.take(0)).ticket_ids)
    second = (await ledger.claim("a", 1)).leases[0]
    await ledger.deliver(second, b"second")
    assert (await ledger.take(1)).ticket_ids == (second.ticket.ticket_id,)  # `late` is let go by
    third, _ = (await ledger.claim("a", 2, 2)).leases
    await ledger.deliver(third, b"third")
    await ledger.announce(Member("a", "127.0.0.1:1", "none"), 60)
    assert late.ticket.ticket_id == 0
    return ledger


async def test_the_key_table_is_the_truth(client, job_id):
    await busy_ledger(client, job_id)
    found = {key.decode() async for key in client.scan_iter(match=job_key(job_id, "*"), count=1000)}
    assert found == set(ledger_keys(job_id))
    types = {key.name: (await client.type(job_key(job_id, key.name))).decode() for key in KEYS}
    assert types == {key.name: key.type for key in KEYS}
    assert len({key_slot(key.encode()) for key in found}) == 1


async def test_a_closed_ledger_goes_in_time(client, job_id):
    ledger = await busy_ledger(client, job_id)
    announced = {job_key(job_id, "members"), job_key(job_id, "members_until")}
    for key in ledger_keys(job_id):
        assert 50 < await client.ttl(key) <= 60 if key in announced else await client.ttl(key) == -1
    await ledger.close()
    left = [await client.ttl(key) for key in ledger_keys(job_id)]
    assert min(left) > RETENTION_S - 600 and max(left) <= RETENTION_S


async def test_an_announcement_after_the_close_is_not_kept_for_ever(client, job_id):
    ledger = await busy_ledger(client, job_id)
    await ledger.withdraw("a")
    await ledger.close()
    await ledger.announce(Member("b", "127.0.0.1:1", "none"), 60)
    await ledger.announce(Member("c", "127.0.0.1:2", "none"), 1)  # does not cut b's time
    for name in ("members", "members_until"):
        assert 50 < await client.ttl(job_key(job_id, name)) <= 60
    assert [m.node_id for m in await ledger.members()] == ["b", "c"]


async def test_nothing_is_left_of_tickets_that_are_trimmed(client, job_id):
    ledger = RedisLedger(client, job_id)
    await ledger.open(LedgerConfig(2, 0))
    await ledger.issue(tickets(0, 4))
    for step in range(2):
        for lease in (await ledger.claim("a", step, 2)).leases:
            await ledger.deliver(lease, b"x" * 1000)
        await ledger.commit(step, (await ledger.take(step)).ticket_ids)
    assert await ledger.trim(2) == 4
    found = {key async for key in client.scan_iter(match=job_key(job_id, "*"), count=1000)}
    assert found == {job_key(job_id, "meta").encode()}
    assert (await ledger.counts()).held_bytes == 0


async def test_a_lease_ends_by_the_servers_clock_and_not_earlier(client, job_id):
    ledger = RedisLedger(client, job_id)
    await ledger.open(LedgerConfig(1, 0, lease_s=0.1, max_attempts=100))
    await ledger.issue(tickets(0, 1))
    before = await server_us(client)
    old = (await ledger.claim("a", 0)).leases[0]
    while not (new := (await ledger.claim("b", 0)).leases):
        pass
    assert await server_us(client) - before >= 100_000
    assert (ids(new), new[0].attempt >= 2) == ([0], True)
    assert not await ledger.deliver(old, b"old")


async def test_an_announcement_ends_by_the_servers_clock(client, job_id):
    ledger = RedisLedger(client, job_id)
    before = await server_us(client)
    await ledger.announce(Member("a", "127.0.0.1:1", "none"), 0.1)
    while await ledger.members():
        pass
    assert await server_us(client) - before >= 100_000


async def test_many_at_once_share_the_tickets_without_overlap(store_url, job_id):
    ledger_client = connect(store_url)
    ledger = RedisLedger(ledger_client, job_id)
    await ledger.open(LedgerConfig(10, 9))
    await ledger.issue(tickets(0, 100))

    async def node(name: str) -> list[int]:
        client = connect(store_url)
        own, got = RedisLedger(client, job_id), []
        while (claimed := await own.claim(name, 0, 2)).leases:
            for lease in claimed.leases:
                assert await own.deliver(lease, name.encode())
            got += ids(claimed)
        await client.aclose()
        return got

    shares = await asyncio.gather(*(node(f"n{i}") for i in range(5)))
    assert sorted(ticket for share in shares for ticket in share) == list(range(100))
    assert (await ledger.counts()).delivered == 100
    await ledger_client.aclose()


async def test_after_a_broken_link_a_call_may_be_repeated(client, store_url, job_id):
    ledger = RedisLedger(client, job_id)
    await ledger.open(LedgerConfig(1, 0))
    killer = connect(store_url)
    for num in (1, 2):
        await command(killer, "CLIENT", "KILL", "TYPE", "NORMAL", "SKIPME", "YES")
        assert await persist(partial(ledger.issue, tickets(0, num))) == num
    assert (await ledger.counts()).issued_total == 2
    await killer.aclose()


@pytest.mark.parametrize("binary", [None, Path("/usr/bin/redis-server")])
async def test_a_restarted_server_forgets_nothing(tmp_path, job_id, binary):
    server = EmbeddedValkey(tmp_path, binary=binary)
    client = connect(server.start())
    ledger = RedisLedger(client, job_id)
    await ledger.open(LedgerConfig(2, 0))
    await ledger.issue(tickets(0, 2))
    lease = (await ledger.claim("a", 0)).leases[0]
    port = int(client.connection_pool.connection_kwargs["port"])
    await asyncio.to_thread(server.kill)
    delivery = asyncio.create_task(persist(lambda: ledger.deliver(lease, b"kept")))
    again = EmbeddedValkey(tmp_path, port, binary=binary)
    await asyncio.to_thread(again.start)
    assert await delivery
    counts = await ledger.counts()
    assert (counts.delivered, counts.issued, counts.conserved) == (1, 1, True)
    assert await ledger.payloads([0]) == [b"kept"]
    await client.aclose()
    again.stop()


async def test_a_server_that_stays_away_is_unavailable(job_id, tmp_path):
    with EmbeddedValkey(tmp_path) as server:
        client = connect(server.url)
        ledger = RedisLedger(client, job_id)
        await ledger.open(LedgerConfig(1, 0))
    with pytest.raises(Unavailable, match="cannot reach Redis at redis://127"):
        await ledger.counts()
    await client.aclose()


@pytest.mark.parametrize("binary", [None, Path("/usr/bin/redis-server")])
async def test_a_full_server_refuses_whole_transitions_and_lets_memory_be_freed(
    tmp_path, job_id, binary
):
    with EmbeddedValkey(tmp_path, binary=binary) as server:
        client = connect(server.url)
        ledger = RedisLedger(client, job_id)
        await ledger.open(LedgerConfig(1, 1))
        await ledger.issue(tickets(0, 2))
        one, two = (await ledger.claim("a", 0, 2)).leases
        await ledger.deliver(one, b"x" * 1000)
        before = await ledger.counts()
        await command(client, "CONFIG", "SET", "maxmemory", 1)
        for call in (
            ledger.deliver(two, b"y" * 1000),
            ledger.issue(tickets(2, 3)),
            ledger.claim("a", 0),
        ):
            with pytest.raises(StoreFull, match="out of memory") as caught:
                await call
            assert server.url.split("@")[0].split(":")[-1] not in str(caught.value)
        assert await ledger.counts() == before
        await ledger.announce(Member("a", "127.0.0.1:1", "none"), 60)  # a member stays one
        taken = await ledger.take(0)
        await ledger.commit(0, taken.ticket_ids)
        assert await ledger.trim(1) == 1
        await command(client, "CONFIG", "SET", "maxmemory", 0)
        assert await ledger.deliver(two, b"y" * 1000)
        assert (await ledger.take(1)).ticket_ids == (1,)
        await client.aclose()


async def test_a_damaged_key_is_an_error_and_not_a_guess(client, job_id):
    ledger = RedisLedger(client, job_id)
    await ledger.open(LedgerConfig(1, 0))
    await client.set(job_key(job_id, "issued"), "no zset")
    with pytest.raises(HeadwayError, match="WRONGTYPE"):
        await ledger.claim("a", 0)


async def server_us(client) -> int:
    seconds, micros = await command(client, "TIME")
    return int(seconds) * 1_000_000 + int(micros)
