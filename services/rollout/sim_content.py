"""What the sim engine says: how long, which tokens, which text. Pure functions of seeds."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Literal

from headway.errors import InvalidSpec
from headway.messages import FinishReason
from services.rollout.engine import Sampling

LengthKind = Literal["constant", "uniform", "lognormal", "geometric"]
EOS_ID = 0  # the one special token; it has no text
ALPHABET = "0123456789 "  # token t > 0 reads ALPHABET[(t - 1) % 11]: numbers that graders can judge
Content = tuple[tuple[int, ...], tuple[float, ...], FinishReason, str]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens a completion wants, before `max_tokens` cuts it. Mean `mean` for every kind.

    uniform: 1 … 2·mean − 1. lognormal: exp(N(ln mean − σ²/2, σ)). geometric: p = 1/mean.
    """

    kind: LengthKind = "constant"
    mean: float = 32.0
    sigma: float = 0.5

    def __post_init__(self) -> None:
        if self.mean < 1 or self.sigma < 0:
            raise InvalidSpec(f"sim lengths need mean >= 1 and sigma >= 0, not {self}")

    def draw(self, rng: random.Random) -> int:
        """One length, at least 1 token."""
        if self.kind == "constant":
            return round(self.mean)
        if self.kind == "uniform":
            return rng.randint(1, max(1, round(2 * self.mean - 1)))
        if self.kind == "lognormal":
            location = math.log(self.mean) - self.sigma**2 / 2
            return max(1, round(rng.lognormvariate(location, self.sigma)))
        if self.mean == 1:
            return 1
        return max(1, math.ceil(math.log(1 - rng.random()) / math.log(1 - 1 / self.mean)))


@dataclass(frozen=True, slots=True)
class SimSettings:
    """How the imitation behaves."""

    tokens_per_s: float = 1000.0
    shared: bool = False  # True: the rate is divided over the completions being sampled
    lengths: Lengths = field(default_factory=Lengths)
    vocab_size: int = 256
    seed: int = 0
    start_s: float = 0.0  # what loading the model takes
    install_pause_s: float = 0.0  # sampling stands still for so long at each install
    broadcast: bool = False  # True: weights really arrive, over a weight group

    def __post_init__(self) -> None:
        if self.tokens_per_s <= 0 or self.vocab_size < 2:
            raise InvalidSpec("a sim engine needs tokens_per_s > 0 and vocab_size >= 2")
        if self.start_s < 0 or self.install_pause_s < 0:
            raise InvalidSpec("sim start_s and install_pause_s are seconds, not negative")


def plan(
    settings: SimSettings, sampling: Sampling, seed: int, index: int
) -> tuple[random.Random, int, FinishReason]:
    """(what draws the rest, tokens before any stop string, finish reason).

    Greedy completions of one seed, which is then the prompt's, are all alike.
    """
    who = f"greedy:{seed}" if sampling.temperature == 0 else f"{seed}:{index}"
    rng = random.Random(f"{settings.seed}:{who}")
    wanted = max(settings.lengths.draw(rng), sampling.min_tokens)
    if wanted <= sampling.max_tokens:
        return rng, wanted, "stop"
    return rng, sampling.max_tokens, "length"


def compose(settings: SimSettings, sampling: Sampling, seed: int, index: int) -> Content:
    """What one completion says.

    A stop string ends the completion with the token that completes it; the text ends
    before it, as vLLM has it.
    """
    rng, length, reason = plan(settings, sampling, seed, index)
    ids = rng.choices(range(1, settings.vocab_size), k=length)
    text = "".join([ALPHABET[(token - 1) % len(ALPHABET)] for token in ids])
    if reason == "stop":
        ids[-1] = EOS_ID
        text = text[:-1]
    hits = [(found + len(stop), found) for stop in sampling.stop if (found := text.find(stop)) >= 0]
    if hits:
        end, begin = min(hits)
        ids, text, reason = ids[:end], text[:begin], "stop"
    return tuple(ids), tuple([-3.0 * rng.random() for _ in ids]), reason, text
