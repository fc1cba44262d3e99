"""One evaluation: every held-out prompt is asked once at one version and recorded once.

Consumes prompts, produces lines of `eval/samples.jsonl`; waits for rollout nodes, and is done
when every prompt is recorded or was given up. Its ledger has one group a step and a bound on lag
that cannot be reached, so that groups are taken in the order of their arrival. A group is
recorded, synced to the disk, committed, and only then freed: whoever dies, the next one goes on
where the ledger stands, and a line that is there already is not written again.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from headway.errors import JobFailed
from headway.evaluation.data import Asked
from headway.evaluation.records import PromptRecord, RecordWriter, completion_record
from headway.jobspec import JobSpec
from headway.ledger.api import Ledger, LedgerConfig
from headway.messages import Completion, Group
from headway.patience import patiently
from headway.payloads import unpack_group
from headway.telemetry import get_logger
from services.learner.events import Events
from services.learner.held_out import Prompts
from services.learner.watch import top_reasons

log = get_logger(__name__)
_OUTSTANDING = 1024  # prompts that are issued and not yet recorded
_CHUNK = 64  # tickets a call, groups a sync
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.1
GIVEN_UP = "given up after so many attempts as rollout nodes make"
OTHER_WEIGHTS = "sampled by other weights"


class Round:
    """One version's evaluation. `samples` is the file that all of a run's are recorded in."""

    def __init__(
        self, spec: JobSpec, ledger: Ledger, prompts: Prompts, version: int, samples: Path,
        events: Events, on_progress: Callable[[int], None] = lambda _: None,
    ) -> None:  # fmt: skip
        """`on_progress` hears how many prompts are recorded."""
        self._spec, self._ledger, self._prompts = spec, ledger, prompts
        self.version = version
        self._samples, self._events, self._on_progress = samples, events, on_progress
        self._issued = 0
        self._step = 0  # of the ledger: groups taken
        self._recorded: list[tuple[int, int]] = []  # step and ticket: written, not yet committed

    @property
    def num_prompts(self) -> int:
        """Prompts that are asked."""
        return len(self._prompts.tickets)

    @property
    def num_left(self) -> int:
        """Prompts that are not yet recorded."""
        return self.num_prompts - self._step

    async def open(self) -> None:
        """Opens the ledger, new or as it was left. Nodes may be told of the version afterwards."""
        config = LedgerConfig(
            batch_groups=1,
            max_policy_lag=max(1, self.num_prompts),
            lease_s=self._spec.rollout.lease_s,
            max_outstanding_groups=max(1, min(self.num_prompts, _OUTSTANDING)),
        )
        await patiently(lambda: self._ledger.open(config))
        counts = await patiently(self._ledger.counts)
        self._step, self._issued = counts.step, counts.issued_total
        await self._issue()

    async def run(self) -> None:
        """Returns when every prompt has its line. JobFailed with `reward.on_error: fail`."""
        with await asyncio.to_thread(RecordWriter, self._samples) as writer:
            for prompt, tokens in self._prompts.too_long:
                writer.append(self._skipped(prompt, f"a prompt of {tokens} tokens"))
            pause_s = _FIRST_PAUSE_S
            while not await self._take(writer):
                await self._commit()
                if await self._is_over():
                    break
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                await self._issue()
            await self._account_for_all(writer)
        self._on_progress(self.num_prompts)

    async def close(self) -> None:
        """Nodes sample nothing of it any more; the ledger's keys go after some days."""
        await patiently(self._ledger.close)

    async def _issue(self) -> None:
        """Offers prompts until the ledger takes no more."""
        tickets = self._prompts.tickets
        while self._issued < len(tickets):
            chunk = tickets[self._issued : self._issued + _CHUNK]
            accepted = await patiently(lambda c=chunk: self._ledger.issue(c))  # type: ignore[misc]
            self._issued += accepted
            if accepted < len(chunk):
                return

    async def _take(self, writer: RecordWriter) -> bool:
        """Records all groups that have arrived; False when the last look found none."""
        while True:
            took = await patiently(lambda: self._ledger.take(self._step))
            if took.ticket_ids is None:
                return False
            ids = took.ticket_ids
            (payload,) = await patiently(lambda i=ids: self._ledger.payloads(i))  # type: ignore[misc]
            writer.append(self._record(unpack_group(payload)))
            self._recorded.append((self._step, ids[0]))
            self._step += 1
            self._on_progress(self._step)
            if len(self._recorded) >= _CHUNK:
                await self._commit()
                await self._issue()

    async def _commit(self) -> None:
        """What is recorded is on the disk, and done with in the ledger."""
        if not self._recorded:
            return
        await asyncio.to_thread(_sync, self._samples)
        for step, ticket_id in self._recorded:
            await patiently(lambda s=step, t=ticket_id: self._ledger.commit(s, (t,)))  # type: ignore[misc]
        self._recorded.clear()
        await patiently(lambda: self._ledger.trim(self._step))

    async def _is_over(self) -> bool:
        counts = await patiently(self._ledger.counts)
        under_way = counts.issued + counts.leased + counts.delivered
        return counts.issued_total == self.num_prompts and not under_way

    async def _account_for_all(self, writer: RecordWriter) -> None:
        """Prompts that were given up have a line that says so."""
        lost = [
            p for p in self._prompts.asked if (self.version, p.data_source, p.index) not in writer
        ]
        for prompt in lost:
            writer.append(self._skipped(prompt, GIVEN_UP))
        if lost:
            counts = await patiently(self._ledger.counts)
            text = f"{len(lost)} held-out prompts were given up: {top_reasons(counts.reasons)}"
            self._events.add("prompts_given_up", text, level="error", version=self.version)

    def _record(self, group: Group) -> PromptRecord:
        prompt = self._prompts.asked[group.ticket.ticket_id]
        spans = [span for c in group.completions for span in c.spans]
        if any(span.version != self.version for span in spans):
            text = f"prompt {prompt.index} of {prompt.data_source} was {OTHER_WEIGHTS}"
            self._events.add("evaluation_mixed", text, level="error", version=self.version)
            return self._skipped(prompt, OTHER_WEIGHTS)
        failed = next((c for c in group.completions if c.reward is None), None)
        if failed is not None and self._spec.reward.on_error == "fail":
            raise JobFailed(
                f"an answer to prompt {prompt.index} of {prompt.data_source} could not be scored"
                f" ({failed.error_kind}: {failed.error_message}) and reward.on_error is fail"
            )
        return self._line(prompt, group.completions)

    def _skipped(self, prompt: Asked, why: str) -> PromptRecord:
        return self._line(prompt, (), why)

    def _line(
        self, prompt: Asked, completions: tuple[Completion, ...], skipped: str = ""
    ) -> PromptRecord:
        return PromptRecord(
            data_source=prompt.data_source,
            index=prompt.index,
            version=self.version,
            prompt=prompt.prompt,
            item=prompt.item,
            completions=tuple(map(completion_record, completions)),
            skipped=skipped,
        )


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
