"""When checkpoints are made, and what happens once one is durable.

A checkpoint is written beside the next steps; the next one waits for it. When it
is durable the ledger frees what all checkpoints kept cover.
"""

from __future__ import annotations

import asyncio
import time

from headway.data.stream import Cursor
from headway.jobspec import JobSpec
from headway.ledger.api import Ledger
from headway.patience import patiently
from headway.telemetry import get_logger
from services.learner.checkpoint import Checkpointer, Manifest
from services.learner.crew import Crew
from services.learner.events import Events
from services.learner.recording import Recording

log = get_logger(__name__)
CHEAP_S = 2.0  # a cancelled job is saved once more if that takes no longer


class Saver:
    """Makes the checkpoints of one job; rank 0's part."""

    def __init__(
        self,
        spec: JobSpec,
        crew: Crew,
        checkpointer: Checkpointer,
        ledger: Ledger,
        events: Events,
        recording: Recording,
        *,
        saved: int,
    ) -> None:
        """`saved`: the step of the newest checkpoint, or -1."""
        self._spec = spec
        self._crew = crew
        self._checkpointer = checkpointer
        self._ledger = ledger
        self._events = events
        self._recording = recording
        self._task: asyncio.Task[None] | None = None
        self._saved = saved
        self._freed = 0  # steps whose groups were freed because Redis was full
        self._took_s: float | None = None

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is to be made after `step` steps."""
        every = self._spec.trainer.save_freq
        return self._is_last(step) or bool(every and step % every == 0)

    async def after_step(self, step: int, cursor: Cursor, nonfinite: int) -> None:
        """Begins a checkpoint if one is due after `step` steps."""
        if self._task is not None and self._task.done():
            self._task.result()
        if self.is_due(step):
            await self.save(step, cursor, nonfinite)
        if self._is_last(step):
            await self.wait()

    def _is_last(self, step: int) -> bool:
        return step == self._spec.trainer.total_training_steps

    async def save(self, step: int, cursor: Cursor, nonfinite: int) -> None:
        """Begins to write the state of `step` in the background."""
        await self.wait()
        began = time.monotonic()
        writing = await self._crew.save(step)
        manifest = Manifest(
            step=step,
            job_digest=self._spec.digest(),
            world_size=self._spec.actor.num_ranks,
            cursor=cursor,
            num_nonfinite=nonfinite,
        )

        async def finish() -> None:
            await asyncio.to_thread(self._recording.sync)
            path = await self._checkpointer.finish(writing, manifest)
            self._took_s = time.monotonic() - began
            self._saved = step
            # Should this checkpoint be damaged, the steps since an older one are retraced.
            freed = await patiently(lambda: self._ledger.trim(self._checkpointer.oldest()))
            self._events.add(
                "checkpoint_saved",
                f"checkpoint of step {step} in {self._took_s:.1f} s",
                step=step,
                path=str(path),
                groups_freed=freed,
            )

        self._task = asyncio.create_task(finish(), name=f"checkpoint {step}")

    async def make_room(self, step: int, cursor: Cursor, nonfinite: int) -> None:
        """Redis is full: frees the groups of all steps before `step`, once they are saved.

        Without it a job whose next checkpoint is far would wait for ever: what it has trained
        on fills the memory that the groups of its next step need. Should this very checkpoint
        be damaged later, there is none before it from which its steps could be retraced.
        """
        if step <= self._freed:
            return
        self._freed = step
        await self.wait()
        if self._saved < step:
            await self.save(step, cursor, nonfinite)
            await self.wait()
        freed = await patiently(lambda: self._ledger.trim(step))
        text = f"Redis is full: {freed} groups of the {step} steps that are saved were freed"
        self._events.add("store_full", text, step=step, groups_freed=freed)

    async def wait(self) -> None:
        """Returns when the checkpoint under way is durable; raises what it failed with."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def settle(self, patience_s: float) -> None:
        """Gives a checkpoint under way some time when the job ends otherwise; never raises."""
        if self._task is not None and not self._task.done():
            await asyncio.wait({self._task}, timeout=patience_s)
        if self._task is not None and self._task.done() and self._task.exception() is not None:
            log.warning("the last checkpoint failed: %s", self._task.exception())

    def is_cheap(self, step: int) -> bool:
        """Whether a cancelled job may be saved: something new, and saves are quick."""
        return step > max(self._saved, 0) and self._took_s is not None and self._took_s < CHEAP_S
