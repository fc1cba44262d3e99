"""How sure a mean over prompts is. Pure; nothing but the standard library.

The unit is the prompt: completions of one prompt are alike, so they are not so many independent
looks at the model. Each prompt counts with one value, whatever the number of its completions,
and the standard error is that of clusters of equal weight (Miller 2024, "Adding Error Bars to
Evals", arXiv:2411.00640, clustered standard errors), with the factor C / (C - 1) for C prompts:

    SE = sqrt( sum_c (x_c - mean)^2 / (C (C - 1)) )

It covers both which prompts are in the data set and what was sampled for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist, fmean

CONFIDENCE = 0.95
_ROUNDING = 1e-9

_NORMAL_FROM = 2000  # degrees of freedom from which Student's t is taken as normal


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over prompts, its standard error and 95 % interval; None: not to be had.

    One prompt has neither error nor interval.
    """

    value: float
    stderr: float | None
    low: float | None
    high: float | None
    num_prompts: int


def estimate(values: Sequence[float]) -> Estimate | None:
    """The mean of one value a prompt, with its interval; None without any.

    Where all values lie in 0 to 1 the interval is Wilson's score interval for the effective
    number of observations m (1 - m) / SE^2 (Korn & Graubard 1998), so that it stays within
    0 to 1 and is not empty when all prompts are right, or all wrong: then C counts. Elsewhere it
    is the mean plus and minus Student's t times the standard error.
    """
    if not values:
        return None
    count, mean = len(values), fmean(values)
    if count == 1:
        return Estimate(mean, None, None, None, 1)
    stderr = standard_error(values)
    t = t_quantile(0.5 + CONFIDENCE / 2, count - 1)
    if min(values) < -_ROUNDING or max(values) > 1 + _ROUNDING:
        return Estimate(mean, stderr, mean - t * stderr, mean + t * stderr, count)
    low, high = _wilson(min(1.0, max(0.0, mean)), stderr, count, t)
    return Estimate(mean, stderr, low, high, count)


def difference(values: Sequence[float]) -> Estimate | None:
    """The mean of one difference a prompt, plus and minus Student's t times its standard error."""
    if not values:
        return None
    mean = fmean(values)
    if len(values) == 1:
        return Estimate(mean, None, None, None, 1)
    stderr = standard_error(values)
    reach = t_quantile(0.5 + CONFIDENCE / 2, len(values) - 1) * stderr
    return Estimate(mean, stderr, mean - reach, mean + reach, len(values))


def standard_error(values: Sequence[float]) -> float:
    """Of the mean of two or more values, one a prompt; 0 where all are equal."""
    count, mean = len(values), fmean(values)
    if min(values) == max(values):
        return 0.0
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / count / (count - 1))


def _wilson(mean: float, stderr: float, count: int, z: float) -> tuple[float, float]:
    """Wilson's score interval with an effective number of observations."""
    spread = mean * (1 - mean)
    if spread == 0:
        effective = float(count)
    elif stderr == 0:
        return mean, mean  # every prompt has the same value, neither 0 nor 1
    else:
        effective = spread / stderr**2
    share = z * z / effective
    middle = (mean + share / 2) / (1 + share)
    reach = math.sqrt(share * spread + share * share / 4) / (1 + share)
    return max(0.0, middle - reach), min(1.0, middle + reach)


@lru_cache(maxsize=256)
def t_quantile(probability: float, degrees: int) -> float:
    """The value below which Student's t lies with a probability above one half."""
    normal = NormalDist().inv_cdf(probability)
    if degrees >= _NORMAL_FROM:
        return normal
    low, high = 0.0, 1.0
    while _t_within(high, degrees) < 2 * probability - 1:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if _t_within(middle, degrees) < 2 * probability - 1:
            low = middle
        else:
            high = middle
    return high


def _t_within(t: float, degrees: int) -> float:
    """P(|T| <= t): Abramowitz & Stegun 26.7.3 (odd degrees) and 26.7.4 (even)."""
    angle = math.atan2(t, math.sqrt(degrees))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    if degrees % 2 == 0:
        term = total = 1.0
        for i in range(1, degrees // 2):
            term *= square * (2 * i - 1) / (2 * i)
            total += term
        return sine * total
    if degrees == 1:
        return 2 * angle / math.pi
    term = total = math.cos(angle)
    for i in range(1, (degrees - 1) // 2):
        term *= square * (2 * i) / (2 * i + 1)
        total += term
    return 2 / math.pi * (angle + sine * total)
