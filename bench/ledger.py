"""How fast the work ledger moves groups, beside plain writes to the same store.

    python bench/ledger.py [--redis URL] [--groups 4000] [--payload-kib 8] [--nodes 8]

Rollout nodes claim and deliver at once, each over a connection of its own; then a
learner takes, reads, commits and trims. The baseline: as many plain SETs of the same
payload over the same connections. `ratio` is a rate over the baseline's. Server and
clients share this machine, and all clients one process: lower bounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Awaitable
from contextlib import ExitStack
from typing import Any

from redis.asyncio import Redis

from headway.ledger.api import Lease, LedgerConfig
from headway.ledger.redis_ledger import RedisLedger
from headway.messages import Ticket
from headway.redis_client import connect
from headway.valkey import EmbeddedValkey

BATCH_GROUPS = 64
LAG = 2


class Rates:
    """Seconds and calls of each kind."""

    def __init__(self) -> None:
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._done: Counter[str] = Counter()

    async def time(self, kind: str, num: int, *work: Awaitable[Any]) -> None:
        """Awaits all of the work, which makes `num` calls."""
        started = time.perf_counter()
        await asyncio.gather(*work)
        self._spent[kind] += time.perf_counter() - started
        self._done[kind] += num

    def per_s(self) -> dict[str, float]:
        """Calls a second, by kind."""
        return {f"{kind}_per_s": self._done[kind] / self._spent[kind] for kind in self._done}


async def measure(url: str, num_groups: int, payload: bytes, num_nodes: int) -> dict[str, float]:
    """All rates, in groups a second."""
    clients = [connect(url) for _ in range(num_nodes)]
    job = f"bench-{uuid.uuid4().hex[:8]}"
    ledgers = [RedisLedger(client, job) for client in clients]
    await ledgers[0].open(LedgerConfig(BATCH_GROUPS, LAG))
    rates = Rates()
    for step in range(num_groups // BATCH_GROUPS):
        first = step * BATCH_GROUPS
        await ledgers[0].issue([ticket(first + i) for i in range(BATCH_GROUPS)])
        leases: list[list[Lease]] = [[] for _ in ledgers]
        await rates.time("claims", BATCH_GROUPS, *map(claim, ledgers, leases, [step] * num_nodes))
        await rates.time(
            "delivers", BATCH_GROUPS, *map(deliver, ledgers, leases, [payload] * num_nodes)
        )
        await rates.time("trained", BATCH_GROUPS, train(ledgers[0], step))
        await rates.time(
            "plain_sets", BATCH_GROUPS, *map(store, clients, leases, [payload] * num_nodes)
        )
    for client in clients:
        await client.aclose()
    return rates.per_s()


async def claim(ledger: RedisLedger, leases: list[Lease], version: int) -> None:
    """Claims one ticket after another until there are none."""
    while (claimed := await ledger.claim("node", version)).leases:
        leases += claimed.leases


async def deliver(ledger: RedisLedger, leases: list[Lease], payload: bytes) -> None:
    """Delivers one group after another."""
    for lease in leases:
        await ledger.deliver(lease, payload)


async def store(client: Redis, leases: list[Lease], payload: bytes) -> None:
    """Stores one payload after another, without any rule."""
    for lease in leases:
        await client.set(f"bench:{lease.ticket.ticket_id}", payload, ex=60)


async def train(ledger: RedisLedger, step: int) -> None:
    """What a learner does with a step, save for the learning."""
    ids = (await ledger.take(step)).ticket_ids
    assert ids is not None
    await ledger.payloads(ids)
    await ledger.commit(step, ids)
    await ledger.trim(step + 1)


def ticket(ticket_id: int) -> Ticket:
    """A ticket as a small job has it."""
    return Ticket(ticket_id, tuple(range(40)), "question", {"answer": "4"}, 8, ticket_id)


def main() -> None:
    """Prints one JSON object as its last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--redis", help="a server's URL; default: an embedded Valkey")
    parser.add_argument("--groups", type=int, default=4000)
    parser.add_argument("--payload-kib", type=int, default=8)
    parser.add_argument("--nodes", type=int, default=8)
    args = parser.parse_args()
    payload = os.urandom(args.payload_kib * 1024)
    with ExitStack() as stack:
        url = args.redis
        if url is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            url = stack.enter_context(EmbeddedValkey(folder)).url
        rates = asyncio.run(measure(url, args.groups, payload, args.nodes))
    baseline = rates["plain_sets_per_s"]
    figures = {
        name: {"value": round(rate), "ratio": round(rate / baseline, 2)}
        for name, rate in rates.items()
    }
    print(json.dumps({"bench": "ledger", **vars(args), "redis": bool(args.redis), **figures}))


if __name__ == "__main__":
    main()
