"""What a model's configuration says of its attention and head, and which kinds are refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from headway.errors import InvalidSpec

_KINDS = {"full_attention", "sliding_attention", "attention"}
_WINDOWS = ("sliding_window", "attention_chunk_size")


def refuse(lm: nn.Module) -> None:
    """InvalidSpec for a model that is no decoder of attention layers alone, by its name."""
    config: Any = lm.config
    text, name = config.get_text_config(), type(lm).__name__
    if config.is_encoder_decoder:
        raise InvalidSpec(f"{name} is an encoder-decoder model: only decoders can be trained")
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or []
    others = sorted(set(kinds) - _KINDS)
    if others or getattr(text, "num_attention_heads", None) is None:
        what = f"layers of kind {', '.join(others)}" if others else "no attention"
        raise InvalidSpec(
            f"{name} has {what}: packed rows need attention in every layer, for a state-space or"
            " recurrent layer would carry its state from one completion into the next"
        )


def logit_cap(lm: nn.Module) -> float | None:
    """The bound of the head's logits, cap · tanh(logits / cap); None without one."""
    config: Any = lm.config
    cap: float | None = getattr(config.get_text_config(), "final_logit_softcapping", None)
    return cap


@contextmanager
def short_windows(lm: nn.Module, tokens: int) -> Iterator[None]:
    """Makes every attention window at most `tokens` long, so that few tokens show what it does.

    Configuration and modules both know the window: models mask by the one and tell their
    attention function the other.
    """
    owners = {id(m): m for m in lm.modules()}
    owners |= {id(c): c for m in lm.modules() if (c := getattr(m, "config", None)) is not None}
    changed = []
    for owner in owners.values():
        for name in _WINDOWS:
            value = getattr(owner, name, None)
            if isinstance(value, int) and value > tokens:
                changed.append((owner, name, value))
                setattr(owner, name, tokens)
    try:
        yield
    finally:
        for owner, name, value in changed:
            setattr(owner, name, value)
