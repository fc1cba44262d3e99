"""Where a job starts: afresh, after its newest checkpoint, or not at all."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from headway.data.stream import PromptStream
from headway.errors import InvalidSpec, LedgerViolation, NoCheckpoint, NotFound
from headway.jobspec import JobSpec
from headway.ledger.api import Ledger
from headway.patience import patiently
from services.learner.checkpoint import Manifest, cleaned, set_aside, verified
from services.learner.crew import Crew
from services.learner.events import Events
from services.learner.recording import Recording
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
    recording: Recording,
    events: Events,
) -> Start:
    """Loads the newest usable checkpoint and drops the rows of steps that will be retraced.

    The ledger must be open. NoCheckpoint when trained steps can neither be loaded nor
    retraced; LedgerViolation when the ledger knows less than the checkpoint; InvalidSpec when
    it holds adapters of another base model.
    """
    committed = (await patiently(ledger.counts)).step
    found, damaged = await asyncio.to_thread(_newest_usable, spec, folder)
    step = found[1].step if found else 0
    if step > committed:
        raise LedgerViolation(
            f"{folder.checkpoints} holds a checkpoint of step {step} and the ledger in Redis knows"
            f" {committed} steps: Redis lost this job's data. Submit a new job whose model.path is"
            " an export"
        )
    if committed > step:
        await _check_retraceable(ledger, step, committed, folder, damaged)
    for path, reason in damaged.items():
        set_aside(path)
        events.add("checkpoint_damaged", f"{reason}; the one before is used", path=str(path))
    if found is not None:
        _check_base(spec, folder)
        path, manifest = found
        await crew.load(path, step)
        stream.seek(manifest.cursor)
    folder.truncate(step)
    await asyncio.to_thread(recording.resume, step)
    if found is None and not committed:
        return Start(0, 0, -1)
    said = f"resumed from the checkpoint of step {step}" if found else "no checkpoint yet"
    if committed > step:
        said += f": retracing steps {step + 1} to {committed} with the same groups"
    events.add("starting", said, step=step)
    if found is None:
        return Start(0, committed, -1)
    return Start(step, committed, step, manifest.num_nonfinite)


def _newest_usable(
    spec: JobSpec, folder: RunFolder
) -> tuple[tuple[Path, Manifest] | None, dict[Path, str]]:
    """The newest checkpoint whose bytes are right, and what is wrong with each newer one."""
    damaged: dict[Path, str] = {}
    for path in cleaned(folder.checkpoints):
        try:
            return (path, verified(path, spec.digest())), damaged
        except NoCheckpoint as error:
            damaged[path] = str(error)
    return None, damaged


def _check_base(spec: JobSpec, folder: RunFolder) -> None:
    if spec.model.lora_rank and len(_models(folder, "model")) > 1:
        raise InvalidSpec(
            f"the checkpoints in {folder.checkpoints} hold adapters, and the files of model.path"
            f" {spec.model.path} have changed since they were trained: bring the files back"
        )


def _models(folder: RunFolder, what: str) -> set[str]:
    """SHA-256 of the files that the policy (`model`) or critic had at each start of the job."""
    return {start[what]["sha256"] for start in folder.starts() if what in start}


async def _check_retraceable(
    ledger: Ledger, step: int, committed: int, folder: RunFolder, damaged: dict[Path, str]
) -> None:
    """NoCheckpoint unless the groups of all trained steps from `step` on are still there.

    Only whole steps are freed, oldest first: where the first is, the others are. Step 0
    starts from the base model, which must be the one that the job started from.
    """
    why = ""
    try:
        await patiently(lambda: ledger.take(step))
    except NotFound as error:
        why = str(error)
    for what, key in (("model", "model.path"), ("critic", "critic.model.path")):
        if step == 0 and len(_models(folder, what)) > 1:
            why = why or f"the files of {key} have changed since the job started"
    if not why:
        return
    what = f"usable checkpoint later than step {step}" if step else "usable checkpoint"
    raise NoCheckpoint(
        f"the job has trained {committed} steps, {folder.checkpoints} holds no {what}"
        + "".join(f" ({reason})" for reason in damaged.values())
        + f", and the steps cannot be retraced: {why}. It does not start again at step {step} by"
        " itself: bring the checkpoints back, or submit a new job"
    )
