"""The reward service for code without an event loop: a script, a notebook, another trainer."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from headway.lifecycle import end_tasks
from headway.messages import Score, ScoreItem
from headway.reward_client import RewardClient, Validation

_REQUEST_ITEMS = 512
_REQUESTS_AT_ONCE = 8
T = TypeVar("T")


class BlockingRewardClient:
    """Scores any number of items through any of several reward services.

    May be shared by threads; not by a process and its forks. The token and the certificates
    are the process's own (HEADWAY_TOKEN_FILE, HEADWAY_TLS_DIR).
    """

    def __init__(self, addresses: str | Sequence[str], patience_s: float = 60.0) -> None:
        """`addresses`: host:port of their gRPC doors. `patience_s`: as RewardClient's."""
        known = [addresses] if isinstance(addresses, str) else list(addresses)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="rewards")
        self._thread.start()
        self._client = RewardClient(known, patience_s)

    def score(
        self,
        grader: Mapping[str, Any],
        items: Sequence[ScoreItem],
        *,
        request_id: str = "",
        job_id: str = "",
        timeout_s: float = 10.0,
    ) -> tuple[Score, ...]:
        """One score an item, in order; an item that could not be scored has reward None.

        More than 512 items become several requests; items of one `group` stay in one.
        `request_id`: a repeat with the same one is not scored again. `timeout_s`: for one item.
        Raises what RewardClient.score does.
        """
        return self._run(
            self._score(grader, items, request_id or uuid.uuid4().hex, job_id, timeout_s)
        )

    def validate(self, grader: Any, item: Mapping[str, Any] | None = None) -> Validation:
        """Checks a grader, and whether an item of the data fits it, without scoring."""
        return self._run(self._client.validate(grader, item))

    def close(self) -> None:
        """Closes the connections and ends the thread."""
        if self._loop.is_closed():
            return
        self._run(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # the caller was interrupted: nobody waits for the scores
            future.cancel()
            raise

    async def _score(
        self, grader: Mapping[str, Any], items: Sequence[ScoreItem], request_id: str, job_id: str,
        timeout_s: float,
    ) -> tuple[Score, ...]:  # fmt: skip
        room = asyncio.Semaphore(_REQUESTS_AT_ONCE)
        found: dict[int, Score] = {}

        async def one(number: int, positions: Sequence[int]) -> None:
            async with room:
                part = [items[position] for position in positions]
                name = f"{request_id}/{number}"
                scores = await self._client.score(name, job_id, grader, part, timeout_s)
                found.update(zip(positions, scores, strict=True))

        parts = enumerate(requests_of(items))
        tasks = [asyncio.create_task(one(number, positions)) for number, positions in parts]
        try:
            await asyncio.gather(*tasks)
        finally:
            await end_tasks(tasks)
        return tuple(found[position] for position in range(len(items)))


def requests_of(items: Sequence[ScoreItem], at_most: int = _REQUEST_ITEMS) -> list[list[int]]:
    """The positions of the items in runs of at most so many; a group is never split."""
    groups: dict[str | int, list[int]] = {}
    for position, item in enumerate(items):
        groups.setdefault(item.group or position, []).append(position)
    requests: list[list[int]] = []
    for positions in groups.values():
        if not requests or len(requests[-1]) + len(positions) > at_most:
            requests.append([])
        requests[-1] += positions
    return requests
