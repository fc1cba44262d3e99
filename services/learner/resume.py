"""Where a job starts: afresh, after its newest checkpoint, or not at all."""

from __future__ import annotations

from dataclasses import dataclass

from headway.data.stream import PromptStream
from headway.errors import LedgerViolation, NoCheckpoint, NotFound
from headway.jobspec import JobSpec
from headway.ledger.api import Ledger
from headway.patience import patiently
from services.learner.checkpoint import newest
from services.learner.crew import Crew
from services.learner.events import Events
from services.learner.run_folder import RunFolder


@dataclass(frozen=True, slots=True)
class Start:
    """`step`: the first to train. `committed`: steps the ledger knows were trained before."""

    step: int
    committed: int
    saved: int  # step of the checkpoint loaded, -1 for none
    nonfinite: int = 0


async def find_start(
    spec: JobSpec,
    ledger: Ledger,
    crew: Crew,
    stream: PromptStream,
    folder: RunFolder,
    events: Events,
) -> Start:
    """Loads the newest checkpoint and drops the rows of steps that will be retraced.

    The ledger must be open. NoCheckpoint when trained steps can neither be loaded nor
    retraced; LedgerViolation when the ledger knows less than the checkpoint.
    """
    committed = (await patiently(ledger.counts)).step
    found = newest(folder.checkpoints, spec.digest())
    if found is None:
        if committed:
            await _check_retraceable(ledger, committed, folder)
            events.add(
                "starting",
                f"no checkpoint yet: retracing {committed} steps from the start with the same"
                " groups",
                step=0,
            )
        folder.truncate(0)
        return Start(0, committed, -1)
    path, manifest = found
    if manifest.step > committed:
        raise LedgerViolation(
            f"{path} is of step {manifest.step} and the ledger in Redis knows {committed} steps:"
            " Redis lost this job's data. Submit a new job whose model.path is an export"
        )
    await crew.load(path, manifest.step)
    stream.seek(manifest.cursor)
    folder.truncate(manifest.step)
    events.add(
        "starting",
        f"resumed from the checkpoint of step {manifest.step}"
        + (f"; retracing steps up to {committed}" if committed > manifest.step else ""),
        step=manifest.step,
    )
    return Start(manifest.step, committed, manifest.step, manifest.num_nonfinite)


async def _check_retraceable(ledger: Ledger, committed: int, folder: RunFolder) -> None:
    """Whether every trained step's groups are still there; NoCheckpoint when not."""
    try:
        for step in range(committed):
            took = await patiently(lambda s=step: ledger.take(s))  # type: ignore[misc]
            await patiently(lambda ids=took.ticket_ids: ledger.payloads(ids or ()))  # type: ignore[misc]
    except (NotFound, LedgerViolation) as error:
        raise NoCheckpoint(
            f"the job has trained {committed} steps, {folder.checkpoints} holds no complete"
            f" checkpoint, and the steps cannot be retraced ({error}). It does not start again"
            " at step 0 by itself: bring the checkpoints back, or submit a new job"
        ) from None
