"""The seeded, endless order in which a job asks its problems.

Position p of the stream is row `permutation(seed, epoch)[p % len]` of epoch
`p // len`. Ticket k is the k-th position whose prompt is not too long, so ticket
ids never have gaps, and with no long prompts k = p. Nothing else goes in: two
streams with the same seed, data and tokenizer are equal, wherever they start.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from typing import Any

from headway.data.chat import PromptEncoder, compose
from headway.data.source import Source
from headway.errors import InvalidSpec
from headway.jobspec import JobSpec
from headway.messages import Ticket


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where a stream stands: ticket `ticket_id` is looked for from `position` on."""

    ticket_id: int = 0
    position: int = 0


def epoch_order(seed: int, epoch: int, num_rows: int, shuffle: bool) -> list[int]:
    """The rows of one epoch in the order asked; every row once."""
    order = list(range(num_rows))
    if shuffle:
        random.Random(f"headway-data:{seed}:{epoch}").shuffle(order)
    return order


def ticket_seed(seed: int, ticket_id: int) -> int:
    """The sampling seed of a ticket, 31 bits."""
    digest = hashlib.sha256(f"headway-ticket:{seed}:{ticket_id}".encode()).digest()
    return int.from_bytes(digest[:4], "big") & 0x7FFFFFFF


class PromptStream:
    """Tickets by id. Asking in rising order costs one tokenisation a ticket."""

    def __init__(self, source: Source, spec: JobSpec, tokenizer: Any) -> None:
        self._source = source
        self._spec = spec
        self._encoder = PromptEncoder(tokenizer)
        self._cursor = Cursor()
        self._order: tuple[int, list[int]] | None = None  # epoch, its order

    @property
    def cursor(self) -> Cursor:
        """Where the stream stands; kept in checkpoints, so that a resume need not search."""
        return self._cursor

    def seek(self, cursor: Cursor) -> None:
        """Goes on from a cursor that a stream with the same seed and data had."""
        self._cursor = cursor

    def ticket(self, ticket_id: int) -> Ticket:
        """Ticket `ticket_id`. InvalidSpec when no prompt of the data is short enough."""
        if ticket_id < self._cursor.ticket_id:
            self._cursor = Cursor()
        while True:
            ticket = self._next()
            if ticket.ticket_id == ticket_id:
                return ticket

    def _next(self) -> Ticket:
        position = self._cursor.position
        for place in range(position, position + 2 * len(self._source)):  # each row once at least
            ticket = self._try(self._cursor.ticket_id, place)
            if ticket is not None:
                self._cursor = Cursor(ticket.ticket_id + 1, place + 1)
                return ticket
        raise InvalidSpec(
            f"no prompt has at most data.max_prompt_length {self._spec.data.max_prompt_length}"
            " tokens: raise it"
        )

    def _try(self, ticket_id: int, position: int) -> Ticket | None:
        spec = self._spec
        epoch, place = divmod(position, len(self._source))
        row = self._source.row(self._rows(epoch)[place])
        prompt = compose(row.prompt, spec.data.system_prompt, spec.data.suffix)
        ids = self._encoder.encode(prompt)
        if len(ids) > spec.data.max_prompt_length:
            return None
        return Ticket(
            ticket_id=ticket_id,
            prompt_ids=ids,
            prompt=prompt,
            item=row.item,
            n=spec.rollout.n,
            seed=ticket_seed(spec.seed, ticket_id),
            data_epoch=epoch,
        )

    def _rows(self, epoch: int) -> list[int]:
        if self._order is None or self._order[0] != epoch:
            order = epoch_order(self._spec.seed, epoch, len(self._source), self._spec.data.shuffle)
            self._order = (epoch, order)
        return self._order[1]
