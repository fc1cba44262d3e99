"""A TCP link that can be cut, stalled, deafened and delayed while processes talk through it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Literal

from headway.lifecycle import end_tasks

Weather = Literal["fair", "cut", "stalled", "deaf", "slow"]
_CHUNK = 1 << 16


class Link:
    """Listens on 127.0.0.1 and forwards to `target` (host, port), as the weather is.

    cut: connections are reset, new ones at once. stalled: nothing moves, as when packets
    are lost, until it is fair again. deaf: requests arrive, answers are swallowed and the
    connection is reset in the end. slow: each piece takes `delay_s` longer.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.port = 0
        self.delay_s = 0.1
        self._weather: Weather = "fair"
        self._moves = asyncio.Event()  # not stalled
        self._moves.set()
        self._server: asyncio.Server | None = None
        self._links: set[asyncio.Task[None]] = set()

    async def open(self) -> Link:
        """Starts to listen on a port of its own, and keeps it."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def close(self) -> None:
        """Ends all connections."""
        if self._server is not None:
            self._server.close()
        await end_tasks(list(self._links))

    async def turn(self, weather: Weather) -> None:
        """Changes the weather. After `deaf`, what was swallowed is lost with its connections."""
        was, self._weather = self._weather, weather
        if weather == "stalled":
            self._moves.clear()
        else:
            self._moves.set()
        if weather == "cut" or was == "deaf":
            await end_tasks(list(self._links))

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._links.add(task)
        upstream: asyncio.StreamWriter | None = None
        try:
            await self._moves.wait()
            if self._weather == "cut":
                return
            from_server, upstream = await asyncio.open_connection(*self.target)
            ends = [
                asyncio.create_task(self._pump(reader, upstream, answers=False)),
                asyncio.create_task(self._pump(from_server, writer, answers=True)),
            ]
            try:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await end_tasks(ends)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._links.discard(task)
            for side in (writer, upstream):
                if side is not None:
                    side.transport.abort()

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, answers: bool
    ) -> None:
        with suppress(OSError):
            while data := await source.read(_CHUNK):
                if self._weather == "slow":
                    await asyncio.sleep(self.delay_s)
                await self._moves.wait()
                if answers and self._weather == "deaf":
                    continue
                sink.write(data)
                await sink.drain()
