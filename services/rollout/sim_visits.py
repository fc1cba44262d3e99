"""What visitors see of the sim engine: its words, its log-probs, its completions in pieces."""

from __future__ import annotations

import random

import xxhash

from headway.data.chat import Messages
from headway.errors import InvalidSpec
from headway.messages import VersionSpan
from services.rollout.engine import Look, Piece, SeenToken
from services.rollout.sim_content import ALPHABET, EOS_ID, Content, SimSettings

_LIKELIEST = -0.05  # log-prob of an alternative; sampled tokens have -3 … 0


class SimWords:
    """Bytes are token ids, as far as the vocabulary goes. Completions read otherwise."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def encode(self, text: str) -> tuple[int, ...]:
        """One id a byte; never the special one."""
        return tuple(1 + (byte - 1) % (self._vocab_size - 1) for byte in text.encode())

    def encode_chat(self, messages: Messages) -> tuple[int, ...]:
        """Roles and contents, line by line."""
        return self.encode("".join(f"{m['role']}: {m['content']}\n" for m in messages))

    def decode(self, token_ids: tuple[int, ...]) -> str:
        """The bytes again."""
        if any(not 0 <= token < self._vocab_size for token in token_ids):
            raise InvalidSpec(f"token ids here are 0 … {self._vocab_size - 1}")
        return bytes(token for token in token_ids if 0 < token < 256).decode(errors="replace")


def part(
    content: Content, start: int, end: int, look: Look, spans: tuple[VersionSpan, ...] = ()
) -> Piece:
    """Tokens `start:end` of a completion; with spans it is the last piece."""
    ids, logprobs, reason, text = content
    seen: tuple[SeenToken, ...] = ()
    if look.alternatives is not None:
        seen = tuple(
            SeenToken(t, _letter(t), p, _others(t, _letter(t), p, look.alternatives))
            for t, p in zip(ids[start:end], logprobs[start:end], strict=True)
        )
    return Piece(
        text[start:end], end - start, seen, finish_reason=reason if spans else None, spans=spans
    )


def seen_prompt(
    settings: SimSettings, prompt_ids: tuple[int, ...], look: Look
) -> tuple[SeenToken, ...]:
    """The prompt's tokens with made-up log-probs, which depend on what stands before each."""
    if look.prompt_alternatives is None:
        return ()
    words, seen = SimWords(settings.vocab_size), []
    prefix = xxhash.xxh3_64(str(settings.seed).encode())
    for place, token in enumerate(prompt_ids):
        prefix.update(b"%d," % token)
        logprob = -3.0 * random.Random(prefix.intdigest()).random() if place else None
        text = words.decode((token,))
        others = () if logprob is None else _others(token, text, logprob, look.prompt_alternatives)
        seen.append(SeenToken(token, text, logprob, others))
    return tuple(seen)


def _letter(token: int) -> str:
    return "" if token == EOS_ID else ALPHABET[(token - 1) % len(ALPHABET)]


def _others(token: int, text: str, logprob: float, count: int) -> tuple[tuple[str, float], ...]:
    """The token and one that is likelier or less likely, by whether its id is even."""
    other = chr(ord("a") + token % 26)
    rival = (other, logprob + _LIKELIEST if token % 2 else min(0.0, logprob - _LIKELIEST))
    return tuple(sorted(((text, logprob), rival), key=lambda pair: -pair[1])[:count])
