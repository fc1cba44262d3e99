"""A rollout worker as its own process, told what to do by lines on stdin.

`python -m tests.support.ledger_worker URL JOB NODE CLOCK_OFFSET_S`; commands `claim`,
`deliver`, `renew`; each is answered by one JSON line.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from functools import partial
from typing import Any

from headway.ledger.redis_ledger import RedisLedger
from headway.redis_client import connect
from tests.support.ledgers import persist


class Worker:
    """The test's side of one worker process."""

    def __init__(self, url: str, job_id: str, node_id: str, clock_offset_s: float = 0.0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__, url, job_id, node_id, str(clock_offset_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def say(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    async def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(await asyncio.to_thread(self.process.stdout.readline))

    async def ask(self, command: str) -> Any:
        self.say(command)
        return await self.answer()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def shift_clocks(offset_s: float) -> None:
    """Every clock that Python code can read goes wrong by so much."""
    for name in ("time", "monotonic"):
        right = getattr(time, name)
        setattr(time, name, lambda right=right: right() + offset_s)
        right_ns = getattr(time, name + "_ns")
        setattr(time, name + "_ns", lambda right_ns=right_ns: right_ns() + int(offset_s * 1e9))


async def work(url: str, job_id: str, node_id: str) -> None:
    client = connect(url)
    ledger = RedisLedger(client, job_id)
    leases = []
    for line in iter(sys.stdin.readline, ""):
        answer: Any
        if line == "claim\n":
            claimed = await persist(partial(ledger.claim, node_id, 0))
            leases += claimed.leases
            answer = [lease.ticket.ticket_id for lease in claimed.leases]
        elif line == "deliver\n":
            answer = await persist(partial(ledger.deliver, leases[-1], node_id.encode()))
        else:
            answer = len(await persist(partial(ledger.renew, node_id, leases)))
        print(json.dumps(answer), flush=True)
    await client.aclose()


if __name__ == "__main__":
    shift_clocks(float(sys.argv[4]))
    asyncio.run(work(*sys.argv[1:4]))
