"""The held-out prompts of a job as tickets: the same ones, with the same seeds, each time."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headway.data.chat import PromptEncoder
from headway.evaluation.data import Asked, HeldOut, asked
from headway.jobspec import JobSpec
from headway.messages import Ticket


@dataclass(frozen=True, slots=True)
class Prompts:
    """What an evaluation asks. Ticket k is of `asked[k]`, k from 0."""

    tickets: tuple[Ticket, ...]
    asked: tuple[Asked, ...]
    too_long: tuple[tuple[Asked, int], ...]  # and their tokens: they have no room for an answer


def prompts_of(spec: JobSpec, data: Sequence[HeldOut], tokenizer: Any) -> Prompts:
    """Every prompt of the data sets, in their order. InvalidSpec as in `asked`."""
    encoder = PromptEncoder(tokenizer)
    numbers = [number for number, each in enumerate(data) for _ in range(len(each))]
    room = spec.model.max_model_len - spec.max_answer
    tickets: list[Ticket] = []
    kept: list[Asked] = []
    too_long = []
    for number, prompt in zip(numbers, asked(data), strict=True):
        ids = encoder.encode(prompt.prompt)
        if len(ids) > room:
            too_long.append((prompt, len(ids)))
            continue
        tickets.append(
            Ticket(
                ticket_id=len(tickets),
                prompt_ids=ids,
                prompt=prompt.prompt,
                item=prompt.item,
                n=spec.evaluation.n,
                seed=_seed(spec.evaluation.seed, prompt),
                data_epoch=number,  # its data set's number, by which a node finds its grader
            )
        )
        kept.append(prompt)
    return Prompts(tuple(tickets), tuple(kept), tuple(too_long))


def _seed(seed: int, prompt: Asked) -> int:
    """The sampling seed of a prompt, 31 bits: its own, whatever else is asked beside it."""
    text = f"headway-held-out:{seed}:{prompt.data_source}:{prompt.index}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") & 0x7FFFFFFF
