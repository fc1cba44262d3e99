"""Whether the differences of two models on the same prompts could be chance. Pure.

Both tests take one difference a prompt (B minus A, each the mean of its completions) and ask how
often signs given by coin tosses come out as far from balance as the ones that were seen. They
are two-sided, and exact but where said.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from fractions import Fraction

_MAX_LATTICE = 1 << 21  # work of an exact permutation test: prompts x reachable sums
_DRAWS = 10_000


def sign_test(differences: Sequence[float]) -> float:
    """P-value of the sign test: as many prompts won as lost? Ties say nothing and are left out.

    Binomial(won + lost, 1/2), doubled, at most 1; 1 where nothing was won or lost. For one right
    or wrong answer a prompt this is McNemar's exact test.
    """
    won = sum(value > 0 for value in differences)
    lost = sum(value < 0 for value in differences)
    total = won + lost
    tail = sum(math.comb(total, i) for i in range(min(won, lost) + 1))
    return float(min(Fraction(1), Fraction(2 * tail, 2**total)))


def permutation_test(differences: Sequence[float]) -> tuple[float, bool]:
    """P-value of the paired permutation test of the mean, and whether it is exact.

    Under the null hypothesis each difference might as well have had the other sign: the p-value is
    the share of all 2^C sign patterns whose sum is at least as far from 0 as the observed one.
    Exact where the differences are multiples of a common fraction and few enough, as with rewards
    of 0 and 1; else from 10,000 patterns (fixed seed), the observed one among them (Phipson & Smyth
    2010, arXiv:1603.05766), so that it is never 0.
    """
    moved = [abs(value) for value in differences if value]
    if not moved:
        return 1.0, True
    seen = abs(math.fsum(differences))
    steps = _on_lattice(moved)
    if steps is not None:
        return _exact(steps[0], round(seen * steps[1])), True
    draw, within, tables = (
        random.Random("headway-permutation"),
        seen * (1 - 1e-9),
        _signed_sums(moved),
    )
    extreme = 0
    for _ in range(_DRAWS):
        signs = draw.randbytes(len(tables))
        total = sum(sums[byte % len(sums)] for sums, byte in zip(tables, signs, strict=True))
        extreme += abs(total) >= within
    return (extreme + 1) / (_DRAWS + 1), False


def _on_lattice(values: Sequence[float]) -> tuple[list[int], int] | None:
    """The values as whole multiples of 1 / scale, and the scale; None where that is too fine."""
    close = [Fraction(value).limit_denominator(10_000) for value in values]
    if any(abs(float(near) - value) > 1e-12 for near, value in zip(close, values, strict=True)):
        return None
    scale = math.lcm(*(near.denominator for near in close))
    steps = [int(near * scale) for near in close]
    return (steps, scale) if len(steps) * sum(steps) <= _MAX_LATTICE else None


def _exact(steps: Sequence[int], seen: int) -> float:
    """P(|sum of +-steps| >= seen), signs by fair coins.

    One big integer holds the distribution of the sum of the positive steps: a field of whole bytes,
    wide enough for 2^C, for each sum. Adding a step is then one shift and one addition.
    """
    num_bytes, total = len(steps) // 8 + 1, sum(steps)
    counts = 1
    for step in steps:
        counts += counts << (step * num_bytes * 8)
    fields = counts.to_bytes((total + 1) * num_bytes, "little")
    extreme = sum(
        int.from_bytes(fields[positive * num_bytes : (positive + 1) * num_bytes], "little")
        for positive in range(total + 1)
        if abs(2 * positive - total) >= seen
    )
    return float(Fraction(extreme, 2 ** len(steps)))


def _signed_sums(values: Sequence[float]) -> list[list[float]]:
    """For each eight values the sums under all patterns of their signs, by pattern."""
    tables = []
    for start in range(0, len(values), 8):
        sums = [0.0]
        for value in values[start : start + 8]:
            sums = [each - value for each in sums] + [each + value for each in sums]
        tables.append(sums)
    return tables
