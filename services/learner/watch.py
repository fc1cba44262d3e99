"""What is watched beside the steps: the rollout nodes' own figures, and failing rewards."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import grpc

from headway.errors import InvalidSpec, JobFailed
from headway.ledger.api import Counts, Ledger
from headway.patience import patiently
from headway.pb import rollout_pb2, rollout_pb2_grpc
from headway.rpc import channel
from headway.telemetry import get_logger
from services.learner.events import Events
from services.learner.metrics import NodeReading, Row, rollout_metrics

log = get_logger(__name__)
_CALL_TIMEOUT_S = 1.0
_LOOK_EVERY_S = 0.5
REWARD_REASON = "reward"  # filter reasons that begin so are failed scorings
HOPELESS_BATCHES = 4


class RolloutMeter:
    """Reads busy time and token counts off the members between steps."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._last: dict[str, NodeReading] = {}

    async def read(self) -> Row:
        """Busy fraction and tokens/s since the last reading; empty before there are two."""
        members = await patiently(self._ledger.members)
        addresses = {m.node_id: m.address for m in members if m.address}
        readings = await asyncio.gather(*(self._ask(a) for a in addresses.values()))
        now = {
            node: reading
            for node, reading in zip(addresses, readings, strict=True)
            if reading is not None
        }
        row = rollout_metrics(self._last, now)
        self._last = now
        return row

    async def close(self) -> None:
        """Closes the channels."""
        for link in self._channels.values():
            await link.close()

    async def _ask(self, address: str) -> NodeReading | None:
        try:
            if address not in self._channels:
                self._channels[address] = channel(address)
            stub = rollout_pb2_grpc.RolloutServiceStub(self._channels[address])
            answer = await stub.GetStatus(rollout_pb2.GetStatusRequest(), timeout=_CALL_TIMEOUT_S)
        except (grpc.aio.AioRpcError, InvalidSpec) as error:
            log.debug("no status from %s: %s", address, error)
            return None
        return NodeReading(time.monotonic(), answer.busy_s, answer.num_tokens_sampled)


class RewardWatch:
    """Ends a job whose rewards fail, instead of letting it sample for ever."""

    def __init__(self, batch_groups: int, *, fail_at_once: bool) -> None:
        self._limit = 1 if fail_at_once else HOPELESS_BATCHES * batch_groups
        self._good = 0
        self._errors = 0
        self._since_good = 0

    def look(self, counts: Counts) -> int:
        """New failed groups since the last look. JobFailed when too many came in a row."""
        errors = reward_errors(counts.reasons)
        good = counts.delivered + counts.taken + counts.consumed
        fresh = errors - self._errors
        self._since_good = fresh if good > self._good else self._since_good + fresh
        self._good, self._errors = max(good, self._good), errors
        if fresh and self._since_good >= self._limit:
            why = top_reasons(counts.reasons, REWARD_REASON)
            raise JobFailed(
                f"{self._since_good} groups in a row could not be scored ({why}): see the reward"
                " service's log and reward.grader"
            )
        return fresh

    async def run(self, ledger: Ledger, events: Events) -> None:
        """Looks for ever; an event whenever groups were lost to failed scoring."""
        self.start(await patiently(ledger.counts))
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            counts = await patiently(ledger.counts)
            fresh = self.look(counts)
            if fresh:
                why = top_reasons(counts.reasons, REWARD_REASON)
                text = f"{fresh} groups could not be scored ({why})"
                events.add("reward_errors", text, groups=fresh)

    def start(self, counts: Counts) -> None:
        """Takes what was there before as given."""
        self._errors = reward_errors(counts.reasons)
        self._good = counts.delivered + counts.taken + counts.consumed


def reward_errors(reasons: Mapping[str, int]) -> int:
    """Groups filtered because they could not be scored."""
    return sum(n for name, n in reasons.items() if name.startswith(REWARD_REASON))


def top_reasons(reasons: Mapping[str, int], prefix: str = "") -> str:
    """The three most frequent reasons that begin so, with their counts, for people."""
    named = {name: n for name, n in reasons.items() if name.startswith(prefix)}
    ranked = sorted(named.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{name}: {n}" for name, n in ranked)
