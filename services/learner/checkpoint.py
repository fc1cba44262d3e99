"""Checkpoints that are there whole or not at all.

`torch.distributed.checkpoint` writes every rank's shards into a temporary folder
while training goes on. When all have landed, rank 0 adds `manifest.json` and
renames the folder to `step-<n>`: a folder of that name is complete, whatever
was killed when. Any number of ranks can load it.

State in host memory is written from where it lies, without a copy: nothing changes it
until the next optimiser update, a forward and a backward pass away, and that waits for
`Writing.taken`. State on a GPU is copied to the host first.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import async_save

from headway.data.stream import Cursor
from headway.errors import Conflict, InvalidSpec
from services.learner.run_folder import storage_failed, write_whole

FORMAT = 1
_DRAFT = ".tmp-step-"


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint holds: the state after `step` optimiser steps."""

    step: int  # also the ledger's next step and the weights' version
    job_digest: str
    world_size: int  # ranks that wrote it
    cursor: Cursor  # where the stream of prompts stood
    num_nonfinite: int = 0  # steps skipped in a row when it was made
    format: int = FORMAT


def newest(folder: Path, job_digest: str) -> tuple[Path, Manifest] | None:
    """The newest complete checkpoint, or None. Removes what a crash left half-written.

    Conflict when it belongs to another job; InvalidSpec when its format is unknown.
    """
    if not folder.is_dir():
        return None
    for debris in folder.glob(f"{_DRAFT}*"):
        shutil.rmtree(debris, ignore_errors=True)
    steps = sorted(_steps(folder))
    if not steps:
        return None
    path = folder / f"step-{steps[-1]}"
    manifest = read_manifest(path)
    if manifest.job_digest != job_digest:
        raise Conflict(f"{path} belongs to another job than the one in {folder.parent}/job.yaml")
    return path, manifest


def read_manifest(path: Path) -> Manifest:
    """A checkpoint's manifest. InvalidSpec when it is unreadable or of an unknown format."""
    try:
        fields = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        if fields["format"] != FORMAT:
            raise InvalidSpec(f"{path}: checkpoint format {fields['format']} is not known here")
        return Manifest(**{**fields, "cursor": Cursor(**fields["cursor"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidSpec(f"{path}: unreadable manifest: {error}") from None


@dataclass(frozen=True, slots=True)
class Writing:
    """A rank's part of a checkpoint on its way."""

    taken: Future[Any]  # done when the state may change again
    durable: Future[None]  # done when every rank's part is on the disk


class _InPlace(AsyncStager):
    """Stages nothing: what is written is the live state."""

    _synchronize_after_execute = False

    def stage(self, state_dict: Any, **kwargs: Any) -> Any:
        """The state itself."""
        return state_dict

    def synchronize_staging(self) -> None:
        """Nothing is under way."""
        return

    def close(self) -> None:
        """Nothing is held."""
        return


class Checkpointer:
    """Saves and loads a trainer's state. Every rank has one and makes the same calls.

    `group` is a process group of its own, with a CPU backend: the saving threads talk
    through it while training uses the default one. None: a single rank.
    """

    def __init__(self, folder: Path, *, keep: int, group: Any = None) -> None:
        self._folder = folder
        self._keep = keep
        self._group = group
        self._rank = 0 if group is None else dist.get_rank(group)
        self._syncer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def begin(self, step: int, state: dict[str, Any]) -> Writing:
        """Starts writing a state, which must not change before the answer's `taken` is done.

        A collective over `group`: all ranks, same step, one at a time.
        """
        draft = self._draft(step)
        taken = async_save(
            state,
            storage_writer=FileSystemWriter(draft, sync_files=False),
            process_group=self._group,
            async_stager=None if _on_gpu(state) else _InPlace(),
            no_dist=self._group is None,
        )
        assert isinstance(taken, Future)  # the other kind comes with other stagers only
        durable = self._syncer.submit(self._make_durable, taken, draft)
        return Writing(_copied() if _on_gpu(state) else taken, durable)

    async def finish(self, writing: Writing, manifest: Manifest) -> Path:
        """Rank 0: waits for the parts, then makes the checkpoint count; older ones go.

        StorageFailed, with the path, when any rank's part could not be written.
        """
        try:
            await asyncio.wrap_future(writing.durable)
        except CheckpointException as error:  # a BaseException: nobody else would catch it
            why = "; ".join(f"rank {r}: {e}" for r, (e, _) in error.failures.items())
            raise storage_failed(self._draft(manifest.step), why) from error
        except (OSError, RuntimeError) as error:
            raise storage_failed(self._draft(manifest.step), error) from error
        try:
            return await asyncio.to_thread(self._publish, manifest)
        except OSError as error:
            raise storage_failed(self._draft(manifest.step), error) from error

    def _make_durable(self, taken: Future[Any], draft: Path) -> None:
        """Puts this rank's files on the disk; returns when all ranks have."""
        taken.result()
        mine = list(draft.glob(f"__{self._rank}_*"))
        for file in [*mine, draft / ".metadata"] if self._rank == 0 else mine:
            _sync(file)
        if self._group is not None:
            dist.barrier(self._group)

    def load(self, path: Path, state: dict[str, Any]) -> None:
        """Fills `state` in place from a checkpoint; a collective over all ranks."""
        from torch.distributed.checkpoint.state_dict_loader import load

        load(state, checkpoint_id=path, process_group=self._group, no_dist=self._group is None)

    def _publish(self, manifest: Manifest) -> Path:
        draft = self._draft(manifest.step)
        final = self._folder / f"step-{manifest.step}"
        write_whole(draft / "manifest.json", json.dumps(asdict(manifest), indent=2) + "\n")
        _sync(draft)
        if final.exists():  # a retraced step: the same state again
            shutil.rmtree(final)
        draft.rename(final)
        _sync(self._folder)
        for step in sorted(_steps(self._folder))[: -self._keep]:
            doomed = self._folder / f"{_DRAFT}{step}-old"
            (self._folder / f"step-{step}").rename(doomed)  # incomplete from here on
            shutil.rmtree(doomed, ignore_errors=True)
        return final

    def _draft(self, step: int) -> Path:
        return self._folder / f"{_DRAFT}{step}"


def _steps(folder: Path) -> list[int]:
    names = [path.name.removeprefix("step-") for path in folder.glob("step-*")]
    return [int(name) for name in names if name.isdecimal()]


def _on_gpu(state: dict[str, Any]) -> bool:
    return any(
        _on_gpu(value) if isinstance(value, dict) else value.device.type != "cpu"
        for value in state.values()
    )


def _copied() -> Future[Any]:
    done: Future[Any] = Future()
    done.set_result(None)
    return done


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
