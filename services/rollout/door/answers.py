"""OpenAI's shapes of answers, from what the engine told. Pure.

Beyond OpenAI's fields an answer has `weight_version`, the newest that sampled any of it, and each
choice `weight_versions`, which version sampled which of its tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.messages import FinishReason, VersionSpan
from services.rollout.engine import Piece, SeenToken

Json = dict[str, Any]
_LEAST = -9999.0  # stands for the log-prob of what cannot be, which JSON has no number for


@dataclass(slots=True)
class Told:
    """All that the engine told of one completion so far."""

    text: str = ""
    num_tokens: int = 0
    tokens: list[SeenToken] = field(default_factory=list)
    prompt: list[SeenToken] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    spans: tuple[VersionSpan, ...] = ()

    def add(self, piece: Piece) -> None:
        """Takes in the next piece."""
        self.text += piece.text
        self.num_tokens += piece.num_tokens
        self.tokens += piece.tokens
        self.prompt += piece.prompt
        self.finish_reason, self.spans = piece.finish_reason, piece.spans


def envelope(kind: str, answer_id: str, created: int, model: str, choices: list[Json]) -> Json:
    """The head of an answer or of a chunk."""
    return {
        "id": answer_id,
        "object": kind,
        "created": created,
        "model": model,
        "choices": choices,
    }


def newest(all_spans: Iterable[Sequence[VersionSpan]]) -> int | None:
    """The newest version that sampled any token."""
    return max((span.version for spans in all_spans for span in spans), default=None)


def version_rows(spans: Sequence[VersionSpan]) -> list[Json]:
    """Which version sampled which tokens of a choice."""
    return [{"version": s.version, "start": s.start, "end": s.end} for s in spans]


def usage(prompt_tokens: int, completion_tokens: int) -> Json:
    """Numbers of tokens."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def chat_choice(index: int, told: Told, *, logprobs: bool) -> Json:
    """A choice of a whole chat answer."""
    return {
        "index": index,
        "message": {"role": "assistant", "content": told.text, "refusal": None},
        "logprobs": chat_logprobs(told.tokens) if logprobs else None,
        "finish_reason": told.finish_reason,
        "weight_versions": version_rows(told.spans),
    }


def chat_delta(index: int, piece: Piece, *, logprobs: bool) -> Json:
    """A choice of a chunk of a chat answer."""
    choice: Json = {
        "index": index,
        "delta": {"content": piece.text},
        "logprobs": chat_logprobs(piece.tokens) if logprobs else None,
        "finish_reason": piece.finish_reason,
    }
    if piece.finish_reason:
        choice["weight_versions"] = version_rows(piece.spans)
    return choice


def text_choice(index: int, text: str, logprobs: Json | None, told: Told | Piece) -> Json:
    """A choice of a completion, or of a chunk of one."""
    choice: Json = {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": told.finish_reason,
    }
    if told.finish_reason:
        choice["weight_versions"] = version_rows(told.spans)
    return choice


def chat_logprobs(tokens: Sequence[SeenToken]) -> Json:
    """Log-probs as chat answers have them."""
    return {
        "content": [
            {
                **_token(token.text, token.logprob or 0.0),
                "top_logprobs": [_token(text, logprob) for text, logprob in token.others],
            }
            for token in tokens
        ],
        "refusal": None,
    }


def _token(text: str, logprob: float) -> Json:
    return {"token": text, "logprob": max(logprob, _LEAST), "bytes": list(text.encode())}


def text_logprobs(tokens: Sequence[SeenToken], offset: int = 0) -> Json:
    """Log-probs as completions have them; the first token of a prompt has none."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [
            None if token.logprob is None else max(token.logprob, _LEAST) for token in tokens
        ],
        "top_logprobs": [_ranked(token) for token in tokens],
        "text_offset": offsets,
    }


def _ranked(token: SeenToken) -> dict[str, float] | None:
    """Text to log-prob, the likeliest first, and the token that stands there besides.

    Of several tokens with one text the likeliest counts.
    """
    if token.logprob is None:
        return None
    found: dict[str, float] = {}
    for text, logprob in (*token.others, (token.text, token.logprob)):
        found[text] = max(logprob, found.get(text, _LEAST))
    return found
