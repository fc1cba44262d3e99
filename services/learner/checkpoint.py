"""Checkpoints that are there whole or not at all.

`torch.distributed.checkpoint` writes every rank's shards into a temporary folder
while training goes on. When all have landed, rank 0 adds `manifest.json` and
renames the folder to `step-<n>`: a folder of that name is complete, whatever
was killed when. Any number of ranks can load it. The manifest has every file's size and
digest: what a disk did to a checkpoint later is seen before anything is loaded.

State in host memory is written from where it lies, without a copy: nothing changes it
until the next optimiser update, a forward and a backward pass away, and that waits for
`Writing.taken`. State on a GPU is copied to the host first.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
import xxhash
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import async_save

from headway.data.stream import Cursor
from headway.errors import Conflict, InvalidSpec, NoCheckpoint
from services.learner.run_folder import storage_failed, write_whole

FORMAT = 2
_DRAFT = ".tmp-step-"
_MANIFEST = "manifest.json"
_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint holds: the state after `step` optimiser steps."""

    step: int  # also the ledger's next step and the weights' version
    job_digest: str
    world_size: int  # ranks that wrote it
    cursor: Cursor  # where the stream of prompts stood
    num_nonfinite: int = 0  # steps skipped in a row when it was made
    format: int = FORMAT
    files: Mapping[str, tuple[int, str]] = field(default_factory=dict)  # bytes, xxh3-128


def cleaned(folder: Path) -> list[Path]:
    """All complete checkpoints, newest first. Removes what a crash left half-written."""
    for debris in folder.glob(f"{_DRAFT}*"):
        shutil.rmtree(debris, ignore_errors=True)
    return complete(folder)


def complete(folder: Path) -> list[Path]:
    """All complete checkpoints, newest first."""
    return [folder / f"step-{step}" for step in sorted(_steps(folder), reverse=True)]


def verified(path: Path, job_digest: str) -> Manifest:
    """A checkpoint's manifest, once every byte of the checkpoint is what was written.

    NoCheckpoint when it is damaged; Conflict when it belongs to another job; InvalidSpec
    when its format is unknown.
    """
    manifest = read_manifest(path)
    if manifest.job_digest != job_digest:
        raise Conflict(f"{path} belongs to another job than the one in its run folder's job.yaml")
    try:
        found = _digests(path)
    except OSError as error:
        raise NoCheckpoint(f"{path} cannot be read: {error}") from None
    for name, (size, digest) in manifest.files.items():
        if name not in found:
            raise NoCheckpoint(f"{path} is damaged: {name} is missing")
        if found[name][0] != size:
            raise NoCheckpoint(f"{path} is damaged: {name} has {found[name][0]} of {size} bytes")
        if found[name][1] != digest:
            raise NoCheckpoint(f"{path} is damaged: {name} has changed since it was written")
    return manifest


def read_manifest(path: Path) -> Manifest:
    """A checkpoint's manifest. NoCheckpoint: unreadable; InvalidSpec: of an unknown format."""
    try:
        fields = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        if fields["format"] != FORMAT:
            raise InvalidSpec(f"{path}: checkpoint format {fields['format']} is not known here")
        files = {name: (int(size), str(digest)) for name, (size, digest) in fields["files"].items()}
        return Manifest(**{**fields, "cursor": Cursor(**fields["cursor"]), "files": files})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise NoCheckpoint(f"{path} is damaged: unreadable manifest: {error}") from None


def set_aside(path: Path) -> None:
    """Renames a damaged checkpoint so that it counts no longer; whoever wonders can look at it."""
    target = path.with_name(f"damaged-{path.name}")
    shutil.rmtree(target, ignore_errors=True)
    path.rename(target)


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
        """Fills `state`, tensors only, from a checkpoint; a collective over all ranks."""
        from torch.distributed.checkpoint.state_dict_loader import load

        from services.learner.reader import TensorPlanner, TensorReader

        load(
            state,
            storage_reader=TensorReader(path),
            planner=TensorPlanner(),
            process_group=self._group,
            no_dist=self._group is None,
        )

    def oldest(self) -> int:
        """The step of the oldest checkpoint kept: groups from it on may be needed again."""
        return min(_steps(self._folder), default=0)

    def _publish(self, manifest: Manifest) -> Path:
        draft = self._draft(manifest.step)
        final = self._folder / f"step-{manifest.step}"
        manifest = replace(manifest, files=_digests(draft))
        write_whole(draft / _MANIFEST, json.dumps(asdict(manifest), indent=2) + "\n")
        _sync(draft)
        if final.exists():  # a retraced step: the same state again
            self._remove(manifest.step)
        draft.rename(final)
        _sync(self._folder)
        for step in sorted(_steps(self._folder))[: -self._keep]:
            self._remove(step)
        return final

    def _remove(self, step: int) -> None:
        doomed = self._folder / f"{_DRAFT}{step}-old"
        (self._folder / f"step-{step}").rename(doomed)  # incomplete from here on
        shutil.rmtree(doomed, ignore_errors=True)

    def _draft(self, step: int) -> Path:
        return self._folder / f"{_DRAFT}{step}"


def _steps(folder: Path) -> list[int]:
    names = [path.name.removeprefix("step-") for path in folder.glob("step-*")]
    return [int(name) for name in names if name.isdecimal() and name == str(int(name))]


def _on_gpu(state: dict[str, Any]) -> bool:
    return any(
        _on_gpu(value) if isinstance(value, dict) else value.device.type != "cpu"
        for value in state.values()
    )


def _copied() -> Future[Any]:
    done: Future[Any] = Future()
    done.set_result(None)
    return done


def _digests(folder: Path) -> dict[str, tuple[int, str]]:
    """Bytes and xxh3-128 of every file in a checkpoint but its manifest."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.name == _MANIFEST or not path.is_file():
            continue
        hasher = xxhash.xxh3_128()
        size = 0
        with path.open("rb", buffering=0) as stream:
            while chunk := stream.read(_CHUNK):
                hasher.update(chunk)
                size += len(chunk)
        found[str(path.relative_to(folder))] = (size, hasher.hexdigest())
    return found


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
