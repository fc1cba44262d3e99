"""The reward service's client, as rollout nodes and evaluation use it.

Where there is no event loop, `headway.reward_blocking` has the same.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from headway.codec import score_from_pb, score_item_to_pb
from headway.errors import Fault, HeadwayError, NoCapacity, Unavailable
from headway.graders.outside import outside_limit_s
from headway.messages import Score, ScoreItem
from headway.pb import reward_pb2, reward_pb2_grpc
from headway.rpc import channel, raise_headway

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_SLACK_S = 30.0  # of a call, beyond the time its items may take
_AVOIDED_S = 5.0  # a service that could not be reached is asked last for so long
# A name may stand for several services: each call goes to the next. One that swallows the
# attempt to connect is given up after 5 s, not gRPC's 20.
_BALANCED = (
    ("grpc.service_config", json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})),
    ("grpc.min_reconnect_backoff_ms", 5_000),
)


@dataclass(frozen=True, slots=True)
class Validation:
    """What a service says of a grader: it with all defaults, or None and its faults."""

    grader: dict[str, Any] | None
    faults: tuple[Fault, ...]


class RewardClient:
    """Scores through any of several reward services, in turn."""

    def __init__(self, addresses: Sequence[str] = (), patience_s: float = 60.0) -> None:
        """`patience_s`: how long an unreachable or full service is asked again."""
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._addresses: tuple[str, ...] = ()
        self._avoided_until: dict[str, float] = {}
        self._turn = itertools.count()
        self._patience_s = patience_s
        self.update_addresses(addresses)

    @property
    def addresses(self) -> tuple[str, ...]:
        """The services in use."""
        return self._addresses

    def update_addresses(self, addresses: Sequence[str]) -> None:
        """Replaces the services; calls in flight go on where they are."""
        self._addresses = tuple(dict.fromkeys(addresses))

    async def score(
        self,
        request_id: str,
        job_id: str,
        grader: Mapping[str, Any],
        items: Sequence[ScoreItem],
        timeout_s: float,
    ) -> tuple[Score, ...]:
        """One score an item, in order; an item that could not be scored has reward None.

        `timeout_s` is the limit for ONE item (unless the grader names its own); the call's
        deadline follows from it. Where a service is full or cannot be reached the others are
        asked, and then all again, with the same request id, for up to `patience_s`; a full one
        when it said that there will be room. Raises InvalidSpec for a faulty grader,
        Unavailable or NoCapacity when patience ends, DeadlineExceeded.
        """
        spec = dict(grader)
        if spec.get("timeout_s") is None:
            spec["timeout_s"] = timeout_s
        request = reward_pb2.ScoreRequest(
            request_id=request_id,
            job_id=job_id,
            grader_json=json.dumps(spec, sort_keys=True),
            items=[score_item_to_pb(item) for item in items],
        )
        deadline_s = spec["timeout_s"] * (len(items) + 1) + _SLACK_S
        deadline_s += outside_limit_s(spec, len(items))
        response = await self._patiently("Score", request, deadline_s)
        if len(response.results) != len(items):
            raise HeadwayError(
                f"the reward service answered {len(response.results)} scores for {len(items)}"
                f" items (grader {spec.get('type')!r})"
            )
        return tuple(score_from_pb(result) for result in response.results)

    async def validate(self, grader: Any, item: Mapping[str, Any] | None = None) -> Validation:
        """Checks a grader, and whether an item of the data fits it, without scoring."""
        request = reward_pb2.ValidateRequest(
            grader_json=json.dumps(grader),
            item_json="" if item is None else json.dumps(dict(item)),
        )
        answer = await self._patiently("Validate", request, _SLACK_S)
        resolved = json.loads(answer.grader_json) if answer.grader_json else None
        return Validation(resolved, tuple(Fault(f.path, f.message) for f in answer.faults))

    async def close(self) -> None:
        """Closes all connections."""
        channels, self._channels = list(self._channels.values()), {}
        for link in channels:
            await link.close()

    async def _patiently(self, method: str, request: Any, deadline_s: float) -> Any:
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self._patience_s
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return await self._anywhere(method, request, deadline_s)
            except (Unavailable, NoCapacity) as error:
                hint_s = error.retry_after_s
                wait_s = pause_s * random.uniform(0.5, 1.0)
                if hint_s is not None:
                    wait_s = hint_s * random.uniform(1.0, 1.2)  # not all at once
                if loop.time() + wait_s > give_up:
                    raise
            await asyncio.sleep(wait_s)
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)

    async def _anywhere(self, method: str, request: Any, deadline_s: float) -> Any:
        """Asks each service once, those that were away a moment ago last."""
        if not self._addresses:
            raise Unavailable("no reward service is known: start one with `headway up`")
        now = asyncio.get_running_loop().time()
        first = next(self._turn) % len(self._addresses)
        order = sorted(
            (*self._addresses[first:], *self._addresses[:first]),
            key=lambda address: self._avoided_until.get(address, 0.0) > now,
        )
        failures: list[Unavailable | NoCapacity] = []
        for address in order:
            try:
                answer = await self._once(address, method, request, deadline_s)
            except (Unavailable, NoCapacity) as error:
                failures.append(error)
                if isinstance(error, Unavailable):
                    self._avoided_until[address] = now + _AVOIDED_S
                continue
            self._avoided_until.pop(address, None)
            return answer
        hints = [error for error in failures if error.retry_after_s is not None]
        raise min(hints, key=lambda e: e.retry_after_s or 0.0) if hints else failures[-1]

    async def _once(self, address: str, method: str, request: Any, deadline_s: float) -> Any:
        if address not in self._channels:
            self._channels[address] = channel(address, options=_BALANCED)
        stub = reward_pb2_grpc.RewardServiceStub(self._channels[address])
        try:
            return await getattr(stub, method)(request, timeout=deadline_s)
        except grpc.aio.AioRpcError as error:
            raise_headway(error, f"reward service {address}")
