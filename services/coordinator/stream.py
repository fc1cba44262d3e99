"""Server-sent events: a job's journal as it grows, resumable at any entry.

An id names the entry after which to go on. Where two feeds share a stream the id is
`<event id>/<metrics id>`. The last message is `end`, with the job's record; a stream
that closes without one was interrupted and is to be taken up again.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

from headway.errors import HeadwayError, InvalidSpec
from headway.jobs import ENDED, record_to_dict
from headway.journal import ENTRY_ID, START, Journal
from headway.patience import woken
from headway.telemetry import get_logger
from services.coordinator.controller import Coordinator

log = get_logger(__name__)

Feed = Literal["event", "metrics"]
_POLL_S = 0.25
_KEEP_ALIVE_S = 10.0
_PAGE = 500
# The record says that a job has ended a moment before the journal does.
_LAST_WORDS_S = 2.0


def check_cursor(after: str) -> str:
    """A journal position from a request; "" is the beginning. InvalidSpec when malformed."""
    if after and not ENTRY_ID.fullmatch(after):
        raise InvalidSpec(f"after: {after[:80]!r} is not the id of an event or a metrics row")
    return after or START


def check_cursors(after: str, num_feeds: int) -> list[str]:
    """One position a feed from a stream's id; "" is the beginning."""
    parts = after.split("/") if after else [""] * num_feeds
    if len(parts) != num_feeds:
        raise InvalidSpec(f"Last-Event-ID: {after[:80]!r} is not an id of this stream")
    return [check_cursor(part) for part in parts]


async def read_feed(journal: Journal, feed: Feed, after: str, limit: int) -> list[dict[str, Any]]:
    """Rows of one feed after a position, oldest first."""
    if feed == "event":
        return await journal.read_events(after, limit)
    return await journal.read_metrics(after, limit)


async def stream(
    coordinator: Coordinator,
    job_id: str,
    feeds: Sequence[Feed],
    cursors: list[str],
    stopping: asyncio.Event,
) -> AsyncIterator[str]:
    """The text of the stream. It ends after `end`, or when the service stops or loses Redis."""
    journal = coordinator.journal(job_id)
    end_logged = False
    last_sent = time.monotonic()
    yield "retry: 500\n\n"
    try:
        while not stopping.is_set():
            # Read before the rows: once it has ended, the rows read after it are all.
            record = await coordinator.store.get(job_id)
            num_rows = 0
            for place, feed in enumerate(feeds):
                for row in await read_feed(journal, feed, cursors[place], _PAGE):
                    cursors[place] = row["id"]
                    end_logged |= feed == "event" and row["kind"] in ENDED
                    num_rows += 1
                    yield _message(feed, row, "/".join(cursors))
            if num_rows:
                last_sent = time.monotonic()
                continue
            if record.ended and _all_said(feeds, end_logged, record.ended_at):
                yield _message("end", record_to_dict(record), "/".join(cursors))
                return
            if time.monotonic() - last_sent > _KEEP_ALIVE_S:
                last_sent = time.monotonic()
                yield ": still here\n\n"
            await woken(stopping, _POLL_S)
    except HeadwayError as error:
        log.warning("a stream of %s is broken off: %s", job_id, error, extra={"job_id": job_id})


def _all_said(feeds: Sequence[Feed], end_logged: bool, ended_at: float | None) -> bool:
    return "event" not in feeds or end_logged or time.time() - (ended_at or 0.0) > _LAST_WORDS_S


def _message(kind: str, row: dict[str, Any], cursor: str) -> str:
    # One line: json.dumps writes no newline.
    return f"id: {cursor}\nevent: {kind}\ndata: {json.dumps(row, separators=(',', ':'))}\n\n"
