"""The job's one finite clock: take → train → commit → stage → publish → checkpoint.

Consumes delivered groups, produces weight versions. Waits for a step's groups and,
before staging, for the publish before; is unblocked by deliveries. A publish (`outbox.py`)
and what is written down about a step run beside the next one; a checkpoint waits for the latter.
Every other task lives as long as the loop does: its end is an error.

Step s (from 0) starts at version s and makes version s + 1. After a restart the
steps between the checkpoint and the ledger are retraced with the same groups, and
nothing is published until the ledger's step is reached again: nodes may hold that
version, and a version never goes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from headway.errors import TrainingDiverged
from headway.lifecycle import end_tasks
from headway.patience import patiently, store_is_full
from headway.payloads import unpack_group
from headway.telemetry import get_logger
from services.learner.collective import IDLE_EVERY_S
from services.learner.machine import memory_metrics
from services.learner.metrics import (
    count_tokens,
    group_metrics,
    lag_metrics,
    ledger_metrics,
    mean,
    mfu,
)
from services.learner.outbox import Outbox
from services.learner.parts import Batch, Parts
from services.learner.recording import RecordedStep
from services.learner.sampling_watch import SamplingWatch
from services.learner.waits import WaitWatch
from services.learner.watch import RewardWatch, RolloutMeter

log = get_logger(__name__)
_POLL_S = 0.01
_MAX_POLL_S = 0.1
_LATE_SHARE = 0.05  # of a wait: how much longer it may be for the looks being apart
_CANCEL_PATIENCE_S = 2.0
_SAVE_PATIENCE_S = 60.0


class Cancelled(Exception):
    """The job was asked to stop."""


class Loop:
    """Trains one job from step `start` to its end."""

    def __init__(self, parts: Parts, start: int, published: int, nonfinite: int = 0) -> None:
        """`published`: versions below it may have been sent before and are not sent again."""
        self._p = parts
        self._start = start
        self._published = published
        self._nonfinite = nonfinite  # skipped steps in a row
        self._to_record: Callable[[], Coroutine[Any, Any, None]] | None = None
        self._recording: asyncio.Task[None] | None = None
        self._meter = RolloutMeter(parts.ledger)
        self._row_at = 0.0
        meanwhile = parts.validation.meanwhile if parts.validation is not None else str
        self._waits = WaitWatch(parts.spec, parts.ledger, parts.events, parts.reporter, meanwhile)
        self._outbox = Outbox(parts, self._waits)

    async def run(self, stopping: asyncio.Event) -> None:
        """Returns when all steps are done. Cancelled after `stopping`; else what went wrong."""
        spec = self._p.spec
        watch = RewardWatch(spec.data.train_batch_size, fail_at_once=spec.reward.on_error == "fail")
        steps = asyncio.create_task(self._steps(stopping), name="steps")
        stop = asyncio.create_task(stopping.wait(), name="stop")
        helpers = [
            _task(self._p.feeder.run(), "feeder"),
            _task(self._outbox.admit(), "admit"),
            _task(self._waits.run(), "watchdog"),
            _task(watch.run(self._p.ledger, self._p.events), "reward watch"),
        ]
        if self._p.validation is not None:
            helpers.append(_task(self._p.validation.run(), "validation"))
        if spec.algorithm.dynamic_sampling:
            rounds = spec.algorithm.max_num_gen_batches
            sampling = SamplingWatch(spec.data.train_batch_size, rounds)
            helpers.append(_task(sampling.run(self._p.ledger), "sampling watch"))
        try:
            await asyncio.wait({steps, stop, *helpers}, return_when=asyncio.FIRST_COMPLETED)
            if stop.done() and not steps.done():
                await asyncio.wait({steps}, timeout=_CANCEL_PATIENCE_S)
            for task in (*helpers, steps):
                if task.done():
                    with contextlib.suppress(Cancelled):
                        task.result()  # raises what it failed with
            if not steps.done() and not stopping.is_set():
                ended = next(task.get_name() for task in helpers if task.done())
                raise RuntimeError(f"the task {ended} ended before the steps did")
            if stopping.is_set():
                if steps.done():
                    await self._save_if_cheap()
                raise Cancelled
        finally:
            await end_tasks([steps, stop, *helpers, *filter(None, [self._outbox.sending])])
            if (recording := self._begin_recording()) is not None:
                await asyncio.wait({recording}, timeout=_CANCEL_PATIENCE_S)
                await end_tasks([recording])
            # A checkpoint under way is of a good state: a failed job keeps it too.
            patience_s = _CANCEL_PATIENCE_S if stopping.is_set() else _SAVE_PATIENCE_S
            await self._p.saver.settle(patience_s)
            await self._meter.close()

    async def _steps(self, stopping: asyncio.Event) -> None:
        clock = time.monotonic
        if self._start >= self._published:
            await self._outbox.stage(self._start)
            with self._waits.on("publish", self._start):
                await self._outbox.sent()  # there is nothing to overlap it with
        self._row_at = clock()
        self._p.crew.busy.start(self._row_at)
        await self._meter.read()
        for step in range(self._start, self._p.spec.trainer.total_training_steps):
            if stopping.is_set():
                return
            began = clock()
            with self._waits.on("groups", step):
                batch = await self._take(step, stopping)
            took = batch.took
            self._p.feeder.wake()
            self._p.reporter.update(phase="running", step=step, detail="")
            at_take = clock()
            metrics = await self._train(step, batch)
            at_train = clock()
            await self._close(step, took.ticket_ids or ())
            at_stage = clock()
            timing = {
                "timing_s/take": at_take - began,
                "timing_s/train": at_train - at_take,
                "timing_s/stage": at_stage - at_train,
                "timing_s/publish": self._outbox.seconds,
            }
            await self._recorded()
            row = {**metrics, **timing, **self._tempo(batch)}
            self._to_record = partial(self._record, step, batch, row)
            if self._p.saver.is_due(step + 1):
                self._outbox.begin()
                await self._recorded()
                # a learner that starts from this checkpoint could not send older versions
                await self._outbox.validated(step, older_than=step + 1)
            with self._waits.on("checkpoint", step):
                await self._p.saver.after_step(step + 1, self._p.feeder.cursor, self._nonfinite)
        await self._recorded()
        if self._p.validation is not None and self._p.validation.under_way:
            await patiently(self._p.ledger.close)  # nodes have the last validation to do, no more
        await self._outbox.sent()
        await self._outbox.validated(self._p.spec.trainer.total_training_steps)

    async def _close(self, step: int, ticket_ids: Sequence[int]) -> None:
        """Commits a step while its weights are being copied.

        What is staged leaves with the next step: never before the commit is known.
        """
        committing = _task(self._commit(step, ticket_ids), "commit")
        try:
            if step + 1 >= self._published:
                await self._outbox.stage(step + 1)
            await committing
        finally:
            await end_tasks([committing])

    async def _commit(self, step: int, ticket_ids: Sequence[int]) -> None:
        await patiently(lambda: self._p.ledger.commit(step, ticket_ids))
        self._p.reporter.update(step=step + 1)

    async def _save_if_cheap(self) -> None:
        """A cancelled job's last state, unless that would keep the user waiting."""
        step = self._p.reporter.status.step or 0
        if self._p.saver.is_cheap(step):
            await self._recorded()
            await self._p.saver.save(step, self._p.feeder.cursor, self._nonfinite)
            await self._p.saver.wait()

    async def _take(self, step: int, stopping: asyncio.Event) -> Batch:
        """The step's batch in order."""
        began = kept_alive = time.monotonic()
        while True:
            await self._outbox.send_what_waited()
            took = await patiently(lambda: self._p.ledger.take(step))
            if took.ticket_ids is not None:
                break
            self._outbox.begin()
            self._begin_recording()
            if stopping.is_set():
                raise Cancelled
            if store_is_full():
                await self._recorded()
                await self._p.saver.make_room(step, self._p.feeder.cursor, self._nonfinite)
            if time.monotonic() - kept_alive > IDLE_EVERY_S:
                await self._p.crew.idle()
                kept_alive = time.monotonic()
            self._outbox.check()  # a publish that failed ends the wait
            waited_s = time.monotonic() - began
            await asyncio.sleep(min(max(_POLL_S, _LATE_SHARE * waited_s), _MAX_POLL_S))
        ids = took.ticket_ids
        payloads = await patiently(lambda: self._p.ledger.payloads(ids))
        groups = {k: unpack_group(data) for k, data in zip(ids, payloads, strict=True)}
        return Batch(took, groups, tuple(payloads))

    async def _train(self, step: int, batch: Batch) -> dict[str, Any]:
        """One optimiser step. A skipped one still makes a version: the same weights again."""
        self._outbox.begin()
        self._begin_recording()
        metrics, digest = await self._p.crew.train(step, batch.groups, batch.took.late)
        skipped = bool(metrics["actor/skipped"])
        self._nonfinite = self._nonfinite + 1 if skipped else 0
        if skipped:
            limit = self._p.spec.actor.max_nonfinite_steps
            self._p.events.add(
                "step_skipped",
                f"step {step + 1}: loss or gradient is not finite; weights unchanged"
                f" ({self._nonfinite} in a row, {limit} end the job)",
                step=step + 1,
            )
            if self._nonfinite >= limit:
                raise TrainingDiverged(
                    f"loss or gradient was not finite in {limit} steps in a row, last in step"
                    f" {step + 1}: lower actor.optim.lr, or look at rewards and log-probs"
                )
        return {**metrics, "actor/weights_digest": digest} if digest else dict(metrics)

    def _begin_recording(self) -> asyncio.Task[None] | None:
        """Starts to write the last step down, once there is time for it."""
        if self._to_record is not None:
            self._recording = asyncio.create_task(self._to_record(), name="record")
            self._to_record = None
        return self._recording

    async def _recorded(self) -> None:
        """Returns when the last step is written down; raises what that failed with."""
        if (recording := self._begin_recording()) is not None:
            await recording

    def _tempo(self, batch: Batch) -> dict[str, float]:
        """The time since the last step, and what was done in it."""
        now = time.monotonic()
        wall, self._row_at = now - self._row_at, now
        return {
            "pool/learner_busy": self._p.crew.busy.fraction(now),
            "perf/throughput": count_tokens(list(batch.groups.values())) / wall,
            "perf/time_per_step": wall,
            "timing_s/step": wall,
            "time": time.time(),
        }

    async def _record(self, step: int, taken: Batch, extra: Mapping[str, Any]) -> None:
        """Writes the step's row, samples and record. Steps count from 1 for readers."""
        p, took = self._p, taken.took
        batch = list(taken.groups.values())
        counts = await patiently(p.ledger.counts)
        row: dict[str, Any] = {
            "step": step + 1,
            "version": step,
            **group_metrics(batch),
            **lag_metrics(step, batch),
            **extra,
            **mfu(extra, p.crew.peak_flops),
            **memory_metrics(),
            **ledger_metrics(counts),
            **await self._meter.read(),
            "rollout/queue_s_mean": mean(list(took.queue_s.values())),
            "training/late_groups": float(len(took.late)),
            "training/replayed": float(took.replayed),
        }
        p.folder.append_samples(step + 1, batch)
        p.folder.append_metrics(row)
        p.events.metrics(step + 1, row)
        recorded = RecordedStep(tuple(taken.groups), took.late, taken.payloads)
        await p.recorder.add(step, recorded)


def _task(coro: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    return asyncio.create_task(coro, name=name)
