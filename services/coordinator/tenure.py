"""One coordinator, one Redis: two would take each other's jobs for orphans and start them again.

    hw:coordinator    string    JSON of the Holder; lives for TENURE_S after the last renewal

A successor on the same machine sees that its predecessor has ended and follows at once;
elsewhere it waits until the predecessor's time is up, TENURE_S at most. The key is a
guard against a mistake, not a fence: what is written to the jobs' records is guarded by
itself (`store`).
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
from dataclasses import asdict, dataclass
from typing import Any

from redis.asyncio import Redis

from headway.errors import Conflict, HeadwayError, StoreFull
from headway.pids import is_running, pid_space, started
from headway.redis_client import command
from headway.telemetry import get_logger

log = get_logger(__name__)

COORDINATOR_KEY = "hw:coordinator"
TENURE_S, RENEW_S = 30.0, 2.0  # a machine may be slow
_LEAVE_S = 1.0
_LOOK_S = 0.25
# PEXPIRE alone would lengthen another's life; a full Redis still takes it.
_RENEW = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""


@dataclass(frozen=True, slots=True)
class Holder:
    """Which process holds a Redis."""

    tenure_id: str
    host: str
    pid_space: str  # where the pid means this process
    pid: int
    started: int  # clock ticks after boot


class Tenure:
    """This process's hold on a Redis. `take` before anything is read, `keep` for ever."""

    def __init__(self, redis: Redis, tenure_s: float = TENURE_S, renew_s: float = RENEW_S) -> None:
        self._redis = redis
        self._tenure_s, self._renew_s = tenure_s, renew_s
        me = os.getpid()
        holder = Holder(secrets.token_hex(8), socket.gethostname(), pid_space(), me, started(me))
        self._mine = json.dumps(asdict(holder)).encode()

    async def take(self) -> None:
        """Returns when this process has the Redis; Conflict when another works there."""
        said = False
        known, left_before = b"", 0
        while not await self._set():
            held: bytes | None = await command(self._redis, "GET", COORDINATOR_KEY)
            if held is None:
                continue
            holder = _parse(held)
            left: int = await command(self._redis, "PTTL", COORDINATOR_KEY)  # ms; -1: for ever
            if holder is None or left == -1 or _has_ended(holder):
                await self._expire(held, 0.0)
                continue
            if held == known and left > left_before:  # it was renewed
                raise Conflict(
                    f"another coordinator (host {holder.host}, pid {holder.pid}) works with this"
                    " Redis: end its fleet, or give this one a database of its own (…/1)"
                )
            known, left_before = held, left
            if not said:
                log.info("waiting for the coordinator before (%s, pid %d)", holder.host, holder.pid)
            said = True
            await asyncio.sleep(_LOOK_S)

    async def keep(self) -> None:
        """Renews for ever. Conflict when another coordinator has the Redis meanwhile."""
        while True:
            await asyncio.sleep(self._renew_s)
            try:
                if not await self._renew(self._tenure_s):
                    await self.take()
            except Conflict:
                raise
            except HeadwayError:
                log.debug("not renewed while Redis is away")

    async def leave(self) -> None:
        """Lets a successor follow at once."""
        try:
            async with asyncio.timeout(_LEAVE_S):
                await self._renew(0.0)
        except (HeadwayError, TimeoutError):
            log.debug("not given back: Redis is away")

    async def _set(self) -> bool:
        try:
            answer = await command(
                self._redis, "SET", COORDINATOR_KEY, self._mine, "NX", "PX", _ms(self._tenure_s)
            )
        except StoreFull:
            return await command(self._redis, "GET", COORDINATOR_KEY) is None
        return answer is not None

    async def _renew(self, seconds: float) -> bool:
        return await self._expire(self._mine, seconds)

    async def _expire(self, value: bytes, seconds: float) -> bool:
        done: Any = await command(
            self._redis, "EVAL", _RENEW, 1, COORDINATOR_KEY, value, _ms(seconds)
        )
        return bool(done)


def _has_ended(holder: Holder) -> bool:
    """Whether a process of this machine is gone; False for what another machine's does."""
    return holder.pid_space == pid_space() and not is_running(holder.pid, holder.started)


def _parse(held: bytes) -> Holder | None:
    """None for what no coordinator of this version wrote."""
    try:
        holder = Holder(**json.loads(held))
    except (ValueError, TypeError):
        return None
    return holder if isinstance(holder.pid, int) else None


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
