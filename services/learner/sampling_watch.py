"""Ends a job whose groups have no variance, instead of letting it sample for ever."""

from __future__ import annotations

import asyncio

from headway.errors import JobFailed
from headway.ledger.api import Counts, Ledger
from headway.patience import patiently

ZERO_VARIANCE = "zero_variance"  # the reason of a group whose rewards are all equal
_LOOK_EVERY_S = 0.5


class SamplingWatch:
    """Counts what `algorithm.dynamic_sampling` filters against the batches that get full.

    A round is a batch's worth of groups sampled, as in DAPO's dynamic sampling: when
    `max_num_gen_batches` rounds have not filled one batch, the prompts are all too easy or too
    hard, or the grader does not tell answers apart.
    """

    def __init__(self, batch_groups: int, max_num_gen_batches: int) -> None:
        self._batch = batch_groups
        self._limit = max_num_gen_batches * batch_groups
        self._good = 0
        self._flat = 0

    def start(self, counts: Counts) -> None:
        """Takes what was there before as given."""
        self._good, self._flat = _good(counts), counts.reasons.get(ZERO_VARIANCE, 0)

    def look(self, counts: Counts) -> None:
        """JobFailed when too many groups went into too few good ones."""
        good, flat = _good(counts) - self._good, counts.reasons.get(ZERO_VARIANCE, 0) - self._flat
        if good >= self._batch:
            self.start(counts)
        elif good + flat >= self._limit:
            raise JobFailed(
                f"of the last {good + flat} groups {flat} had equal rewards and were filtered"
                f" (algorithm.dynamic_sampling), too many to fill a batch of {self._batch} in"
                f" algorithm.max_num_gen_batches = {self._limit // self._batch} rounds: look at the"
                " rewards, choose other prompts, or raise the limit"
            )

    async def run(self, ledger: Ledger) -> None:
        """Looks for ever."""
        self.start(await patiently(ledger.counts))
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            self.look(await patiently(ledger.counts))


def _good(counts: Counts) -> int:
    return counts.delivered + counts.taken + counts.consumed
