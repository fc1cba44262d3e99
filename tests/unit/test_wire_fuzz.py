"""What comes over the wire, at random: a value, or InvalidSpec, and never anything else."""

import math
from contextlib import suppress
from itertools import pairwise

import msgpack
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.codec import invite_from_pb, manifest_from_pb, score_from_pb
from headway.errors import InvalidSpec
from headway.messages import Baseline, Completion, Group, Ticket, VersionSpan
from headway.payloads import (
    MAX_TICKET_BYTES,
    check_sizes,
    pack_group,
    pack_ticket,
    unpack_group,
    unpack_ticket,
)
from headway.pb import fleet_pb2, reward_pb2, rollout_pb2
from services.coordinator.rpc import _node, _report

EXAMPLES = settings(max_examples=100, derandomize=True, deadline=None)
UNPACK = pytest.mark.parametrize("unpack", [unpack_ticket, unpack_group])

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
real = st.floats(-1e300, 1e300)
small = st.integers(0, 2**31)
token = st.integers(0, 2**31 - 1)
foreign = st.binary(max_size=9) | st.builds(
    msgpack.ExtType, st.integers(0, 127), st.binary(max_size=9)
)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | real | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
tickets = st.builds(
    Ticket, small, st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4).map(tuple), plain,
    st.dictionaries(text, plain, max_size=3), st.just(2), small, small,
)  # fmt: skip


@st.composite
def completions(draw):
    """With spans that cover its tokens in one to three pieces."""
    length = draw(st.integers(0, 6))
    cuts = sorted(draw(st.sets(st.integers(1, max(1, length - 1)), max_size=2)))
    edges = [0, *(c for c in cuts if 0 < c < length), length] if length else [0]
    return Completion(
        token_ids=tuple(draw(st.lists(token, min_size=length, max_size=length))),
        logprobs=tuple(draw(st.lists(real, min_size=length, max_size=length))),
        finish_reason=draw(st.sampled_from(["stop", "length", "aborted"])),
        spans=tuple(VersionSpan(draw(small), a, b) for a, b in pairwise(edges)),
        text=draw(text),
        reward=draw(st.none() | real),
        parts=draw(st.dictionaries(text, real, max_size=2)),
        error_kind=draw(text),
        error_message=draw(text),
    )  # fmt: skip


groups = st.builds(
    Group, tickets, st.lists(completions(), min_size=2, max_size=2).map(tuple), text, small,
    small, real, real, st.none() | st.builds(Baseline, real, small),
)  # fmt: skip


# -- msgpack ---------------------------------------------------------------------------


@EXAMPLES
@given(tickets, groups)
def test_what_is_packed_comes_back(ticket, group):
    assert unpack_ticket(pack_ticket(ticket)) == ticket
    assert unpack_group(pack_group(group)) == group


@UNPACK
@EXAMPLES
@given(st.binary(max_size=64))
def test_bytes_at_random(unpack, data):
    with suppress(InvalidSpec):
        unpack(data)


@UNPACK
@EXAMPLES
@given(st.recursive(
    plain | foreign,
    lambda inner: st.lists(inner, max_size=9),
    max_leaves=12,
))  # fmt: skip
def test_other_values_than_ours(unpack, value):
    for whole in (
        value,
        [1, value],
        [1, [value] * 7],
        [1, [[value] * 7, [[value] * 9], *[value] * 5]],
    ):
        with suppress(InvalidSpec):
            unpack(msgpack.packb(whole))


@EXAMPLES
@given(groups, st.data())
def test_a_payload_with_a_damaged_byte(group, data):
    payload = bytearray(pack_group(group))
    at = data.draw(st.integers(0, len(payload) - 1))
    payload[at] = data.draw(st.integers(0, 255))
    with suppress(InvalidSpec):
        unpack_group(bytes(payload))
    with suppress(InvalidSpec):
        unpack_group(bytes(payload[:at]))


@UNPACK
@pytest.mark.parametrize(
    "head", [b"\x91", b"\xdd\x00\x00\xff\xff", b"\xdf\x00\x00\xff\xff\xa1x", b"\x81\xa1x"]
)
def test_deep_nests_and_long_claims_cost_nothing(unpack, head):
    with pytest.raises(InvalidSpec):
        unpack(head * 100_000)
    with pytest.raises(InvalidSpec, match="damaged payload"):
        unpack(b"\x92\x01" + head * 400)
    with pytest.raises(InvalidSpec, match="damaged payload"):
        unpack(b"\x92\x01\xdd\x7f\xff\xff\xff" + b"\xc0" * 100)


def deep(levels: int) -> list:
    value: list = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ({"x": deep(100)}, "nested more than 64 deep"),
        ({"x": [0] * 70_000}, "a list or mapping of 70000"),
        ({"x": b"raw"}, "holds a bytes"),
        ({"x": 2**64}, "cannot be stored"),
        ({"x": "\ud800"}, "cannot be stored"),
        ({3: "x"}, "no mapping of texts"),
        ({"x": "y" * MAX_TICKET_BYTES}, "the ledger takes at most"),
    ],
)
def test_what_could_not_be_read_is_not_written(item, said):
    with pytest.raises(InvalidSpec, match=said):
        pack_ticket(Ticket(0, (1,), "p", item, 2, 0))


def test_sizes():
    check_sizes((), 1, "x")
    with pytest.raises(InvalidSpec, match="a group of 3 bytes: the ledger takes at most 2"):
        check_sizes((b"1", b"123"), 2, "a group")


def test_spans_that_do_not_cover():
    whole = Completion((1, 2), (0.0, 0.0), "stop", (VersionSpan(0, 0, 2),), "")
    for spans in ((), (VersionSpan(0, 0, 1),), (VersionSpan(0, 0, 3),), (VersionSpan(0, 1, 2),),
                  (VersionSpan(0, 0, 1), VersionSpan(1, 0, 2))):  # fmt: skip
        holed = Completion((1, 2), (0.0, 0.0), "stop", spans, "")
        group = Group(Ticket(0, (1,), "p", {}, 2, 0), (whole, holed), "n", 1, 0, 0.0, 0.0)
        with pytest.raises(InvalidSpec, match="do not cover 2 tokens"):
            unpack_group(pack_group(group))


# -- protobuf --------------------------------------------------------------------------

DECODERS = [
    (rollout_pb2.WeightManifest, manifest_from_pb),
    (rollout_pb2.JoinWeightGroupRequest, invite_from_pb),
    (reward_pb2.ScoreResult, score_from_pb),
    (fleet_pb2.Node, _node),
    (fleet_pb2.JobStatus, _report),
]
KINDS = {
    "string": text | st.sampled_from(["float32", "gloo", "h:1", "running", "0" * 32]),
    "bytes": st.binary(max_size=9),
    "bool": st.booleans(),
    "double": st.floats() | st.sampled_from([math.nan, math.inf, -1.0, 0.0]),
}  # fmt: skip


def values(field):
    """Values of one field, by its descriptor."""
    if field.message_type is not None:
        return messages(field.message_type._concrete_class)
    kind = {9: "string", 12: "bytes", 8: "bool", 1: "double", 2: "double"}.get(field.type)
    if kind is not None:
        return KINDS[kind]
    bits = 32 if field.cpp_type in (1, 3, 8) else 64
    if field.cpp_type in (3, 4):
        return st.integers(0, 2**bits - 1) | st.integers(0, 3)
    return st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) | st.integers(0, 3)


@st.composite
def messages(draw, cls):
    """A message of this class with some of its fields set."""
    message = cls()
    for field in cls.DESCRIPTOR.fields:
        if not draw(st.booleans()):
            continue
        slot = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            slot[draw(text)] = draw(KINDS["double"])
        elif field.is_repeated:
            slot.extend(draw(st.lists(values(field), max_size=3)))
        elif field.message_type is not None:
            slot.CopyFrom(draw(values(field)))
        else:
            setattr(message, field.name, draw(values(field)))
    return message


@pytest.mark.parametrize(("cls", "decode"), DECODERS, ids=lambda x: getattr(x, "__name__", ""))
@EXAMPLES
@given(data=st.data())
def test_messages_at_random(cls, decode, data):
    with suppress(InvalidSpec):
        decode(data.draw(messages(cls)))


@pytest.mark.parametrize(("cls", "decode"), DECODERS, ids=lambda x: getattr(x, "__name__", ""))
@EXAMPLES
@given(data=st.binary(max_size=48))
def test_bytes_at_random_as_messages(cls, decode, data):
    with suppress(InvalidSpec, DecodeError):
        decode(cls.FromString(data))
