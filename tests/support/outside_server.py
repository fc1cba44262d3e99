"""A server on loopback that graders ask: it answers as a test says, and notes what it was asked."""

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from services.reward.outside.endpoints import Endpoint, Endpoints
from services.reward.outside.lane import LaneSettings
from services.reward.outside.line import Backoff

QUICK = Backoff(first_s=0.001, longest_s=0.01)


@dataclass
class Asked:
    """One request as it came in."""

    path: str
    headers: dict
    body: object


@dataclass
class OutsideServer:
    """`answer(asked) -> (status, headers, body)`, body a str, bytes or JSON; or a coroutine.

    What it gives may also be a callable of the writer, to misbehave with.
    """

    answer: object
    url: str = ""
    asked: list = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    server: object = None
    writers: set = field(default_factory=set)
    tasks: set = field(default_factory=set)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    news: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def serve(self, reader, writer):
        self.writers.add(writer)
        self.tasks.add(asyncio.current_task())
        try:
            while (head := await reader.readuntil(b"\r\n\r\n")) != b"":
                await self.one(head.decode("latin-1"), reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.writers.discard(writer)
            writer.close()

    async def one(self, head, reader, writer):
        first, *lines = head.split("\r\n")
        headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        asked = Asked(first.split()[1], headers, json.loads(body) if body else None)
        async with self.news:
            self.asked.append(asked)
            self.news.notify_all()
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            said = self.answer(asked)
            if asyncio.iscoroutine(said):
                said = await said
        finally:
            self.at_once -= 1
        if callable(said):
            await said(writer)
            return
        status, extra, body = said
        text = body if isinstance(body, bytes) else (
            body.encode() if isinstance(body, str) else json.dumps(body).encode()
        )  # fmt: skip
        lines = [f"HTTP/1.1 {status} x", f"content-length: {len(text)}"]
        lines += [f"{name}: {value}" for name, value in extra.items()]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + text)
        await writer.drain()

    async def hang(self):
        """For an answer that never comes."""
        await self.stopped.wait()
        return 500, {}, ""

    async def until_asked(self, times):
        """Waits until so many requests have come in."""
        async with self.news:
            await self.news.wait_for(lambda: len(self.asked) >= times)

    async def stop(self):
        """As when it is killed: nobody listens, connections break."""
        self.stopped.set()
        self.server.close()
        for writer in list(self.writers):
            writer.transport.abort()
        await asyncio.wait(self.tasks | {asyncio.ensure_future(asyncio.sleep(0))})

    @property
    def bodies(self):
        return [asked.body for asked in self.asked]

    def endpoint(self, name="judge", **settings):
        return Endpoint(name, self.url + settings.pop("path", ""), **settings)


@asynccontextmanager
async def outside_server(answer, ssl=None, port=0):
    server = OutsideServer(answer)
    server.server = await asyncio.start_server(
        server.serve, "127.0.0.1", port, ssl=ssl, limit=1 << 26
    )
    port = server.server.sockets[0].getsockname()[1]
    server.url = f"{'https' if ssl else 'http'}://127.0.0.1:{port}"
    try:
        yield server
    finally:
        await server.stop()


def said(text, finish_reason="stop"):
    """A chat completion."""
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
    return 200, {}, {"choices": [choice]}


def asking(*endpoints, backoff=QUICK, allowed_urls=(), **settings):
    named = {endpoint.name: endpoint for endpoint in endpoints}
    return LaneSettings(Endpoints(named, allowed_urls), backoff=backoff, **settings)
