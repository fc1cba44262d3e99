"""Ledger payloads: tickets and groups as msgpack, and back. Nothing is unpickled.

What is read was written by another process, over a store that others may write to: every
field's type, the lengths and the nesting are checked, and what does not fit is InvalidSpec.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection
from typing import Any, Final, TypeVar

import msgpack

from headway import checked
from headway.errors import InvalidSpec
from headway.messages import Baseline, Completion, FinishReason, Group, Ticket, VersionSpan

T = TypeVar("T")
FORMAT = 1  # of ledger payloads; a reader refuses what it does not know
MAX_TICKET_BYTES: Final = 16 << 20
MAX_GROUP_BYTES: Final = 256 << 20  # half of what Redis takes as one value
# msgpack makes a list at the length that its head claims, before it has seen an item
_LIMITS = {
    "max_array_len": checked.MAX_ITEMS, "max_map_len": checked.MAX_ITEMS, "max_ext_len": 0,
}  # fmt: skip
_FINISHES: Final[dict[str, FinishReason]] = {
    "stop": "stop", "length": "length", "aborted": "aborted",
}  # fmt: skip


def pack_ticket(ticket: Ticket) -> bytes:
    """A ticket as msgpack. InvalidSpec when it is too large, or holds what msgpack cannot."""
    checked.plain(ticket.prompt, "prompt")
    checked.plain(dict(ticket.item), "item")
    return _pack(_ticket_fields(ticket), f"ticket {ticket.ticket_id}", MAX_TICKET_BYTES)


def unpack_ticket(data: bytes) -> Ticket:
    """A ticket from msgpack; InvalidSpec when damaged."""
    return _unpack(data, _ticket_from, MAX_TICKET_BYTES)


def pack_group(group: Group) -> bytes:
    """A group as msgpack; token ids and log-probs as packed arrays (int32, float64).

    InvalidSpec when it is too large, or holds what msgpack cannot.
    """
    fields = [
        _ticket_fields(group.ticket),
        [_completion_fields(c) for c in group.completions],
        group.node_id,
        group.attempt,
        group.start_version,
        group.generate_s,
        group.score_s,
    ]
    if group.baseline is not None:  # a group without one reads as it always did
        fields.append([group.baseline.reward, group.baseline.num_tokens])
    return _pack(fields, f"the group of ticket {group.ticket.ticket_id}", MAX_GROUP_BYTES)


def unpack_group(data: bytes) -> Group:
    """A group from msgpack; InvalidSpec when damaged."""
    return _unpack(data, _group_from, MAX_GROUP_BYTES)


def check_sizes(payloads: Collection[bytes], most: int, what: str) -> None:
    """InvalidSpec when one payload is larger than the ledger takes."""
    largest = max(map(len, payloads), default=0)
    if largest > most:
        raise InvalidSpec(f"{what} of {largest} bytes: the ledger takes at most {most}")


def _pack(fields: list[Any], what: str, most: int) -> bytes:
    try:
        packed: bytes = msgpack.packb([FORMAT, fields], use_bin_type=True)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidSpec(f"{what} cannot be stored: {error}") from None
    check_sizes((packed,), most, what)
    return packed


def _unpack(data: bytes, build: Callable[[Any], T], most: int) -> T:
    check_sizes((data,), most, "a payload")
    try:
        whole = msgpack.unpackb(data, strict_map_key=True, **_LIMITS)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise InvalidSpec(f"damaged payload: {error}") from None
    version, fields = checked.row(whole, "the payload", 2)
    if version != FORMAT or isinstance(version, bool):
        raise InvalidSpec(f"payload format {version!r:.80} is not known to this Headway ({FORMAT})")
    return build(fields)


def _array(values: tuple[int, ...] | tuple[float, ...], kind: str) -> bytes:
    return array(kind, values).tobytes()


def _array_from(data: Any, kind: str, name: str) -> tuple[Any, ...]:
    values = array(kind)
    if not isinstance(data, bytes) or len(data) % values.itemsize:
        raise InvalidSpec(f"{name} is no array of {values.itemsize}-byte numbers")
    values.frombytes(data)
    return tuple(values)


def _ticket_fields(ticket: Ticket) -> list[Any]:
    return [
        ticket.ticket_id,
        _array(ticket.prompt_ids, "i"),
        ticket.prompt,
        dict(ticket.item),
        ticket.n,
        ticket.seed,
        ticket.data_epoch,
    ]


def _ticket_from(fields: Any) -> Ticket:
    ticket_id, prompt_ids, prompt, item, n, seed, data_epoch = checked.row(fields, "a ticket", 7)
    return Ticket(
        ticket_id=checked.whole(ticket_id, "ticket_id"),
        prompt_ids=_array_from(prompt_ids, "i", "prompt_ids"),
        prompt=checked.plain(prompt, "prompt"),
        item=checked.plain(checked.mapping(item, "item"), "item"),
        n=checked.whole(n, "n", 1, checked.MAX_ITEMS),
        seed=checked.whole(seed, "seed", 0, 2**64 - 1),
        data_epoch=checked.whole(data_epoch, "data_epoch"),
    )


def _completion_fields(completion: Completion) -> list[Any]:
    return [
        _array(completion.token_ids, "i"),
        _array(completion.logprobs, "d"),
        completion.finish_reason,
        [[s.version, s.start, s.end] for s in completion.spans],
        completion.text,
        completion.reward,
        dict(completion.parts),
        completion.error_kind,
        completion.error_message,
    ]


def _completion_from(fields: Any) -> Completion:
    ids, logprobs, finish, spans, text, reward, parts, kind, message = checked.row(
        fields, "a completion", 9
    )
    token_ids = _array_from(ids, "i", "token_ids")
    completion = Completion(
        token_ids=token_ids,
        logprobs=_array_from(logprobs, "d", "logprobs"),
        finish_reason=_finish(finish),
        spans=tuple(_span(span) for span in checked.items(spans, "spans")),
        text=checked.text(text, "text"),
        reward=None if reward is None else checked.number(reward, "reward"),
        parts={
            name: checked.number(part, f"part {name[:80]}")
            for name, part in checked.mapping(parts, "parts").items()
        },
        error_kind=checked.text(kind, "error_kind"),
        error_message=checked.text(message, "error_message"),
    )
    if len(completion.logprobs) != len(token_ids):
        raise InvalidSpec(f"{len(completion.logprobs)} logprobs for {len(token_ids)} tokens")
    edges = [(span.start, span.end) for span in completion.spans]
    starts, ends = [start for start, _ in edges], [end for _, end in edges]
    if starts != [0, *ends[:-1]][: len(edges)] or (ends[-1:] or [0]) != [len(token_ids)]:
        raise InvalidSpec(f"spans {edges[:8]} do not cover {len(token_ids)} tokens once each")
    return completion


def _finish(value: Any) -> FinishReason:
    reason = _FINISHES.get(value) if isinstance(value, str) else None
    if reason is None:
        raise InvalidSpec(f"finish_reason {value!r:.80} is not known")
    return reason


def _span(fields: Any) -> VersionSpan:
    version, start, end = checked.row(fields, "a span", 3)
    return VersionSpan(
        checked.whole(version, "version"), checked.whole(start, "start"), checked.whole(end, "end")
    )


def _baseline_from(fields: Any) -> Baseline:
    reward, num_tokens = checked.row(fields, "a baseline", 2)
    return Baseline(
        checked.number(reward, "baseline reward"), checked.whole(num_tokens, "baseline tokens")
    )


def _group_from(fields: Any) -> Group:
    with_baseline = isinstance(fields, list) and len(fields) == 8
    ticket, completions, node_id, attempt, start_version, generate_s, score_s, *more = checked.row(
        fields, "a group", 8 if with_baseline else 7
    )
    group = Group(
        ticket=_ticket_from(ticket),
        completions=tuple(_completion_from(c) for c in checked.items(completions, "completions")),
        node_id=checked.text(node_id, "node_id"),
        attempt=checked.whole(attempt, "attempt"),
        start_version=checked.whole(start_version, "start_version"),
        generate_s=checked.number(generate_s, "generate_s"),
        score_s=checked.number(score_s, "score_s"),
        baseline=_baseline_from(more[0]) if more else None,
    )
    if len(group.completions) != group.ticket.n:
        raise InvalidSpec(f"{len(group.completions)} completions of {group.ticket.n}")
    return group
