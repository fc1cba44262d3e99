"""The reward service's client, as rollout nodes and evaluation use it."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import grpc

from headway.codec import score_from_pb, score_item_to_pb
from headway.errors import HeadwayError, NoCapacity, Unavailable
from headway.messages import Score, ScoreItem
from headway.pb import reward_pb2, reward_pb2_grpc
from headway.rpc import channel, raise_headway

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_SLACK_S = 30.0  # of a call, beyond the time its items may take


class RewardClient:
    """Scores through any of several reward services, in turn."""

    def __init__(self, addresses: Sequence[str] = (), patience_s: float = 60.0) -> None:
        """`patience_s`: how long an unreachable or full service is asked again."""
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._addresses: tuple[str, ...] = ()
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
        deadline follows from it. A full or unreachable service is asked again, or another,
        with the same request id, for up to `patience_s`. Raises InvalidSpec for a faulty
        grader, Unavailable or NoCapacity when patience ends, DeadlineExceeded.
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
        response = await self._patiently(request, deadline_s)
        if len(response.results) != len(items):
            raise HeadwayError(
                f"the reward service answered {len(response.results)} scores for {len(items)}"
                f" items (grader {spec.get('type')!r})"
            )
        return tuple(score_from_pb(result) for result in response.results)

    async def close(self) -> None:
        """Closes all connections."""
        channels, self._channels = list(self._channels.values()), {}
        for link in channels:
            await link.close()

    async def _patiently(
        self, request: reward_pb2.ScoreRequest, deadline_s: float
    ) -> reward_pb2.ScoreResponse:
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self._patience_s
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return await self._once(request, deadline_s)
            except (Unavailable, NoCapacity):
                if loop.time() + pause_s > give_up:
                    raise
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)

    async def _once(
        self, request: reward_pb2.ScoreRequest, deadline_s: float
    ) -> reward_pb2.ScoreResponse:
        if not self._addresses:
            raise Unavailable("no reward service is known: start one with `headway up`")
        address = self._addresses[next(self._turn) % len(self._addresses)]
        if address not in self._channels:
            self._channels[address] = channel(address)
        stub = reward_pb2_grpc.RewardServiceStub(self._channels[address])
        try:
            response: reward_pb2.ScoreResponse = await stub.Score(request, timeout=deadline_s)
        except grpc.aio.AioRpcError as error:
            raise_headway(error, f"reward service {address}")
        return response
