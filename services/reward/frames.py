"""Frames on the pipes between the service and its workers: a length, then JSON.

JSON and not pickle: a worker that ran hostile text must not be able to run
anything here. ASCII JSON and not msgpack: it carries lone surrogates and big
integers, which completions and data sets do have.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
from typing import Any

_LENGTH = struct.Struct("!I")
MAX_ANSWER_BYTES = 1 << 20
_NAP_S = 0.001


class BrokenFrame(Exception):
    """The peer wrote what is no frame."""


def encode(message: dict[str, Any]) -> bytes:
    """One frame."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return _LENGTH.pack(len(body)) + body


def read_blocking(fd: int, max_bytes: int | None = None) -> dict[str, Any] | None:
    """The next frame of a blocking pipe; None at its end. BrokenFrame: longer than it may be."""
    head = _read_exactly(fd, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if max_bytes is not None and length > max_bytes:
        raise BrokenFrame(f"a frame of {length} bytes")
    body = _read_exactly(fd, length)
    return None if body is None else json.loads(body)


def write_blocking(fd: int, message: dict[str, Any]) -> None:
    """Writes one frame whole."""
    write_frame(fd, encode(message))


def write_frame(fd: int, frame: bytes) -> None:
    """Writes what `encode` gave."""
    view = memoryview(frame)
    while view:
        view = view[os.write(fd, view) :]


class FrameReader:
    """Frames from a non-blocking pipe of an asyncio process. A cancelled `next` loses nothing.

    A worker writes each result at once, so that it counts even if the next item hangs;
    reading each at once would wake this process for each. `patient` reads sleep first.
    """

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._buffer = bytearray()
        self._ended = False

    async def next(self, patient: bool = False) -> dict[str, Any] | None:
        """The next frame; None at the end. BrokenFrame for anything else."""
        while (frame := self.arrived()) is None and not self._ended:
            if patient:
                await asyncio.sleep(_NAP_S)
                patient = False
            else:
                await self._readable()
        return frame

    def arrived(self) -> dict[str, Any] | None:
        """A frame that is already here, if any."""
        frame = self._decode()
        while frame is None and self._receive():
            frame = self._decode()
        return frame

    def close(self) -> None:
        """Closes the pipe."""
        os.close(self._fd)

    def _receive(self) -> bool:
        if self._ended:
            return False
        try:
            chunk = os.read(self._fd, 1 << 16)
        except BlockingIOError:
            return False
        self._buffer += chunk
        self._ended = not chunk
        return bool(chunk)

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        readable: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self._fd, _settle, readable)
        try:
            await readable
        finally:
            loop.remove_reader(self._fd)

    def _decode(self) -> dict[str, Any] | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > MAX_ANSWER_BYTES:
            raise BrokenFrame(f"a frame of {length} bytes")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        try:
            message = json.loads(body)
        except ValueError as error:
            raise BrokenFrame(str(error)) from None
        if not isinstance(message, dict):
            raise BrokenFrame("a frame that is no object")
        return message


def _settle(readable: asyncio.Future[None]) -> None:
    if not readable.done():
        readable.set_result(None)


def _read_exactly(fd: int, length: int) -> bytes | None:
    chunks = bytearray()
    while len(chunks) < length:
        chunk = os.read(fd, min(length - len(chunks), 1 << 20))
        if not chunk:
            return None
        chunks += chunk
    return bytes(chunks)
