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
MAX_FRAME_BYTES = 512 << 20
MAX_ANSWER_BYTES = 1 << 20


class BrokenFrame(Exception):
    """The peer wrote what is no frame."""


def encode(message: dict[str, Any]) -> bytes:
    """One frame."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return _LENGTH.pack(len(body)) + body


def read_blocking(fd: int) -> dict[str, Any] | None:
    """The next frame of a blocking pipe; None at its end."""
    head = _read_exactly(fd, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    body = _read_exactly(fd, length)
    return None if body is None else json.loads(body)


def write_blocking(fd: int, message: dict[str, Any]) -> None:
    """Writes one frame whole."""
    view = memoryview(encode(message))
    while view:
        view = view[os.write(fd, view) :]


class FrameReader:
    """Frames from an asyncio stream. A cancelled `next` loses nothing."""

    def __init__(self, stream: asyncio.StreamReader) -> None:
        self._stream = stream
        self._buffer = bytearray()

    async def next(self) -> dict[str, Any] | None:
        """The next frame; None at the end. BrokenFrame for anything else."""
        while True:
            frame = self.buffered()
            if frame is not None:
                return frame
            chunk = await self._stream.read(1 << 16)
            if not chunk:
                return None
            self._buffer += chunk

    def buffered(self) -> dict[str, Any] | None:
        """A frame that has already arrived, if any."""
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


def _read_exactly(fd: int, length: int) -> bytes | None:
    chunks = bytearray()
    while len(chunks) < length:
        chunk = os.read(fd, min(length - len(chunks), 1 << 20))
        if not chunk:
            return None
        chunks += chunk
    return bytes(chunks)
