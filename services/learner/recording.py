"""The groups a job trained on, step by step and in order: what `headway replay` trains again.

`groups.log` in the run folder is one record a step, from step 0 on without a gap:

    length  u64, little-endian  bytes of the body
    digest  16 bytes            xxh3-128 of the body
    body    msgpack             [format, ticket ids, late ids, payloads as delivered]

Records are appended after their step is committed, and are on the disk before a checkpoint
that covers them counts. A resumed job cuts the file at its checkpoint and writes the steps it
retraces once more.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgpack
import xxhash

from headway.errors import InvalidSpec, StorageFailed
from services.learner.events import Events
from services.learner.run_folder import append_bytes

FORMAT = 1
_HEADER = struct.Struct("<Q16s")


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """What one step trained on: `payloads` are packed groups, in the order of `ticket_ids`."""

    ticket_ids: tuple[int, ...]
    late: frozenset[int]
    payloads: tuple[bytes, ...]


class Recording:
    """Writes one run's record. One process writes: rank 0 of the job's learner."""

    def __init__(self, path: Path, limit_bytes: int) -> None:
        """Nothing is recorded any more once the file would grow beyond `limit_bytes`."""
        self._path = path
        self.limit = limit_bytes
        self._num_steps = 0
        self._size = 0

    @property
    def num_steps(self) -> int:
        """How many steps are recorded."""
        return self._num_steps

    def resume(self, step: int) -> None:
        """Keeps the steps before `step`, which is trained next, and drops a torn record."""
        self._num_steps, self._size = 0, 0
        if not self._path.is_file():
            return
        with self._path.open("r+b") as stream:
            for end in _ends(stream):
                if self._num_steps == step:
                    break
                self._num_steps, self._size = self._num_steps + 1, end
            stream.truncate(self._size)

    def append(self, step: int, recorded: RecordedStep) -> bool:
        """Adds a step; False when it does not fit, or one before it did not.

        StorageFailed: nothing was added. A record that was written in part is taken back.
        """
        if step != self._num_steps:
            return False
        body: bytes = msgpack.packb(
            [FORMAT, recorded.ticket_ids, sorted(recorded.late), recorded.payloads]
        )
        record = _HEADER.pack(len(body), xxhash.xxh3_128_digest(body)) + body
        if self._size + len(record) > self.limit:
            return False
        try:
            append_bytes(self._path, record)
        except StorageFailed:
            with contextlib.suppress(OSError):
                os.truncate(self._path, self._size)
            raise
        self._num_steps, self._size = step + 1, self._size + len(record)
        return True

    def sync(self) -> None:
        """Returns when all that was appended is on the disk."""
        if not self._num_steps:
            return
        handle = os.open(self._path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


class Recorder:
    """Records a job's steps until the record is full or fails; training goes on then."""

    def __init__(self, recording: Recording, events: Events) -> None:
        self._recording = recording
        self._events = events
        self._ended = not recording.limit

    async def add(self, step: int, recorded: RecordedStep) -> None:
        """Adds a step's groups; says so once when it cannot."""
        if self._ended:
            return
        try:
            if await asyncio.to_thread(self._recording.append, step, recorded):
                return
            reason = "groups.log is full (trainer.max_record_gib)"
        except StorageFailed as error:
            reason = str(error)
        self._ended = True
        known = self._recording.num_steps
        self._events.add(
            "record_ended",
            f"{reason}: `headway replay` will know the first {known} steps only",
            step=step + 1,
        )


def count_steps(path: Path) -> int:
    """How many whole steps a record holds; 0 when there is none."""
    if not path.is_file():
        return 0
    with path.open("rb") as stream:
        return sum(1 for _ in _ends(stream))


def read_steps(path: Path) -> Iterator[RecordedStep]:
    """The recorded steps, one after the other. InvalidSpec at a record that is damaged."""
    with path.open("rb") as stream:
        begin = 0
        for step, end in enumerate(_ends(stream)):
            stream.seek(begin)
            yield _parse(stream.read(end - begin), f"{path}: the record of step {step + 1}")
            stream.seek(end)
            begin = end


def _ends(stream: BinaryIO) -> Iterator[int]:
    """The positions at which whole records end; the stream is left at each of them."""
    size = os.fstat(stream.fileno()).st_size
    position = stream.seek(0)
    while position + _HEADER.size <= size:
        length, _ = _HEADER.unpack(stream.read(_HEADER.size))
        position += _HEADER.size + length
        if position > size:
            return
        stream.seek(position)
        yield position


def _parse(record: bytes, what: str) -> RecordedStep:
    _, digest = _HEADER.unpack_from(record)
    body = memoryview(record)[_HEADER.size :]
    if xxhash.xxh3_128_digest(body) != digest:
        raise InvalidSpec(f"{what} is damaged")
    try:
        version, ids, late, payloads = msgpack.unpackb(body)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise InvalidSpec(f"{what} is damaged: {error}") from None
    if version != FORMAT:
        raise InvalidSpec(f"{what} has format {version}, which is not known here")
    return RecordedStep(tuple(ids), frozenset(late), tuple(payloads))
