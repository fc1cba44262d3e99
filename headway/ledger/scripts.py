"""The transitions' Lua scripts, each put together from its file and what all share."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Final

from headway.ledger.keys import KEYS

TRANSITIONS: Final = (
    "open", "issue", "claim", "renew", "release", "deliver", "fail", "take", "commit",
    "trim", "counts", "look", "announce", "withdraw", "members", "close",
)  # fmt: skip

UNOPENED_OK: Final = frozenset({"open", "announce", "withdraw", "members"})
"""A node may announce itself before the learner has opened the ledger."""

ALLOW_OOM: Final = frozenset(
    {
        "announce",
        "renew",
        "release",
        "fail",
        "take",
        "commit",
        "trim",
        "counts",
        "look",
        "withdraw",
        "members",
        "close",
    }
)
"""What frees memory, or needs none to speak of, goes on when the server is full.

The others are refused by the server before their first line: no half-made move."""


@cache
def script(transition: str) -> str:
    """The whole text of one transition. Its first line tells the server how to run it."""
    flags = " flags=allow-oom" if transition in ALLOW_OOM else ""
    names = ", ".join(key.name.upper() for key in KEYS)
    unopened_ok = "true" if transition in UNOPENED_OK else "false"
    return "\n".join(
        (
            f"#!lua{flags}",
            f"local {names} = unpack(KEYS)",
            f"local MAY_BE_UNOPENED = {unopened_ok}",
            _read("common"),
            _read(transition),
        )
    )


def _read(name: str) -> str:
    return (files("headway.ledger") / f"{name}.lua").read_text(encoding="utf-8")
