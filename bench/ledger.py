"""How fast the work ledger moves groups, beside a bare stream of the same payloads.

    python bench/ledger.py [--redis URL] [--seconds 4] [--payload-kib 4 64 1024] [--nodes 8]

A round is 128 groups. Through the ledger: four steps of a job at lag 2, whose nodes, each with a
connection of its own, claim and deliver one group after the other while a learner issues, takes,
reads, commits and trims. The baseline: as many connections that each add a payload to one stream
(XADD), read one as a consumer group (XREADGROUP) and acknowledge it (XACK). Rounds take turns, so
both meet the same machine; `ratio` is groups a second through the ledger over the baseline's, from
the medians of the rounds. Server and clients share this machine, and all clients one process:
lower bounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
import uuid
from contextlib import ExitStack

from redis.asyncio import Redis

from headway.ledger.api import LedgerConfig
from headway.ledger.redis_ledger import RedisLedger
from headway.messages import Ticket
from headway.redis_client import connect
from headway.valkey import EmbeddedValkey

BATCH_GROUPS = 32
ROUND_STEPS = 4
ROUND_GROUPS = BATCH_GROUPS * ROUND_STEPS
LAG = 2
POLL_S = 0.005
WARM_UP_ROUNDS = 2


class Ledgers:
    """One job's ledger as its nodes and its learner use it."""

    def __init__(self, clients: list[Redis], payload: bytes) -> None:
        job = f"bench-{uuid.uuid4().hex[:8]}"
        self._learner = RedisLedger(clients[0], job)
        self._nodes = [RedisLedger(client, job) for client in clients]
        self._payload = payload
        self._step = 0

    async def open(self) -> None:
        """Before the first round."""
        await self._learner.open(LedgerConfig(BATCH_GROUPS, LAG, max_outstanding_bytes=1 << 40))

    async def round(self) -> None:
        """Four steps of a job, save for the sampling and the training."""
        last = self._step + ROUND_STEPS
        await asyncio.gather(self._train(last), *(self._node(one, last) for one in self._nodes))

    async def _train(self, last: int) -> None:
        learner = self._learner
        issued = self._step * BATCH_GROUPS
        while self._step < last:
            more = [ticket(i) for i in range(issued, last * BATCH_GROUPS)][:BATCH_GROUPS]
            issued += await learner.issue(more)
            ids = (await learner.take(self._step)).ticket_ids
            if ids is None:
                await asyncio.sleep(POLL_S)
                continue
            await learner.payloads(ids)
            await learner.commit(self._step, ids)
            self._step += 1
            await learner.trim(self._step)

    async def _node(self, ledger: RedisLedger, last: int) -> None:
        while self._step < last:
            claimed = await ledger.claim("node", self._step)
            if not claimed.leases:
                await asyncio.sleep(POLL_S)
            for lease in claimed.leases:
                assert await ledger.deliver(lease, self._payload)


class Streams:
    """The same payloads through one stream and a consumer group, without any rule."""

    def __init__(self, clients: list[Redis], payload: bytes) -> None:
        self._clients = clients
        self._payload = payload
        self._stream = f"bench-{uuid.uuid4().hex[:8]}"

    async def open(self) -> None:
        """Before the first round, and after each: acknowledged entries stay in a stream."""
        await self._clients[0].delete(self._stream)
        await self._clients[0].xgroup_create(self._stream, "learner", id="0", mkstream=True)

    async def round(self) -> None:
        """As many payloads as a round of the ledger has groups."""
        share = ROUND_GROUPS // len(self._clients)
        await asyncio.gather(*(self._loop(client, share) for client in self._clients))

    async def _loop(self, client: Redis, num: int) -> None:
        for _ in range(num):
            await client.xadd(self._stream, {"payload": self._payload})
            found = await client.xreadgroup("learner", "one", {self._stream: ">"}, count=1)
            ((_, entries),) = found.items() if isinstance(found, dict) else found
            entry = entries[0][0] if isinstance(entries[0][0], bytes) else entries[0][0][0]
            await client.xack(self._stream, "learner", entry)


async def measure(url: str, payload: bytes, num_nodes: int, seconds: float) -> dict[str, float]:
    """Groups a second through the ledger and through the bare stream."""
    clients = [connect(url) for _ in range(num_nodes)]
    ledgers, streams = Ledgers(clients, payload), Streams(clients, payload)
    await ledgers.open()
    times: dict[str, list[float]] = {"ledger": [], "stream": []}
    until = time.monotonic() + seconds
    while time.monotonic() < until or len(times["ledger"]) < WARM_UP_ROUNDS + 3:
        await streams.open()
        for name, one in (("ledger", ledgers), ("stream", streams)):
            began = time.perf_counter()
            await one.round()
            times[name].append(time.perf_counter() - began)
    for client in clients:
        await client.aclose()
    return {
        name: ROUND_GROUPS / statistics.median(spent[WARM_UP_ROUNDS:])
        for name, spent in times.items()
    }


def ticket(ticket_id: int) -> Ticket:
    """A ticket as a small job has it."""
    return Ticket(ticket_id, tuple(range(40)), "question", {"answer": "4"}, 8, ticket_id)


def main() -> None:
    """Prints one JSON object as its last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--redis", help="a server's URL; default: an embedded Valkey")
    parser.add_argument("--seconds", type=float, default=4.0, help="for each size")
    parser.add_argument("--payload-kib", type=int, nargs="+", default=[4, 64, 1024])
    parser.add_argument("--nodes", type=int, choices=(1, 2, 4, 8, 16), default=8)
    args = parser.parse_args()
    figures = {}
    with ExitStack() as stack:
        url = args.redis
        if url is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            url = stack.enter_context(EmbeddedValkey(folder)).url
        for kib in args.payload_kib:
            rates = asyncio.run(measure(url, os.urandom(kib * 1024), args.nodes, args.seconds))
            figures[f"groups_per_s_{kib}_kib"] = {
                "value": round(rates["ledger"], 1),
                "baseline": round(rates["stream"], 1),
                "ratio": round(rates["ledger"] / rates["stream"], 2),
            }
    print(json.dumps({"bench": "ledger", **vars(args), "redis": bool(args.redis), **figures}))


if __name__ == "__main__":
    main()
