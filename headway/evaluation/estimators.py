"""What one prompt's graded completions say: pass@k, best@k, worst@k, maj@k.

Each is the exact expectation over all subsets of k of the g graded completions, drawn without
replacement, so it is unbiased for what k fresh completions would give (a bootstrap, which draws
with replacement, is not: for k = g it may draw the same completion g times). A completion
without a reward is not among the g. Fewer than k graded completions say nothing: None.
"""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Sequence
from functools import lru_cache

EXACT_VOTES = 32
"""Graded completions up to which maj@k is exact; beyond, it is estimated from random subsets."""

_DRAWS = 256  # random subsets a prompt


def is_right(reward: float, pass_reward: float) -> bool:
    """Whether a reward passes; weights that add up to 0.999… for 1 do."""
    return reward >= pass_reward - 1e-9


def pass_at_k(num_graded: int, num_right: int, k: int) -> float | None:
    """Chance that at least one of k completions is right: 1 - C(g - c, k) / C(g, k).

    Chen et al. 2021 (arXiv:2107.03374), equation 1, as the product
    1 - prod (1 - k / i) for i from g - c + 1 to g.
    """
    if num_graded < k:
        return None
    if num_graded - num_right < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(num_graded - num_right + 1, num_graded + 1))


def best_at_k(rewards: Sequence[float], k: int) -> float | None:
    """Expected largest reward of k completions: sum_i r_(i) C(i - 1, k - 1) / C(g, k), r_(i) the
    i-th smallest. For rewards of 0 and 1 it is pass@k.
    """
    g = len(rewards)
    if g < k:
        return None
    total, weight = 0.0, k / g  # C(g - 1, k - 1) / C(g, k)
    for i, reward in zip(range(g, k - 1, -1), sorted(rewards, reverse=True), strict=False):
        total += reward * weight
        weight *= (i - k) / (i - 1) if i > 1 else 0.0  # C(i - 2, k - 1) / C(i - 1, k - 1)
    return total


def worst_at_k(rewards: Sequence[float], k: int) -> float | None:
    """Expected smallest reward of k completions."""
    best = best_at_k([-reward for reward in rewards], k)
    return None if best is None else -best


def maj_at_k(votes: Sequence[Hashable], rewards: Sequence[float], k: int) -> float | None:
    """Expected reward of the answer that most of k completions give.

    `votes[i]` is what completion i answers; equal votes are one answer, whose reward is the mean
    of its completions'. Equally frequent answers win in equal shares. Exact up to EXACT_VOTES
    graded completions, beyond it the mean over 256 random subsets (fixed seed).
    """
    if len(votes) < k:
        return None
    by_answer: dict[Hashable, list[float]] = {}
    for vote, reward in zip(votes, rewards, strict=True):
        by_answer.setdefault(vote, []).append(reward)
    answers = sorted((len(r), sum(r) / len(r)) for r in by_answer.values())
    if k == len(votes):
        return _winners_reward(answers)
    if len(votes) > EXACT_VOTES:
        return _sampled_majority(answers, k)
    return _majority(tuple(answers), k)


def _winners_reward(counts: Sequence[tuple[int, float]]) -> float:
    """The mean reward of the most frequent answers, of (frequency, reward)."""
    most = max(count for count, _ in counts)
    winners = [reward for count, reward in counts if count == most]
    return sum(winners) / len(winners)


@lru_cache(maxsize=4096)
def _majority(answers: tuple[tuple[int, float], ...], k: int) -> float:
    """The expectation over all subsets of size k. `answers` are (completions, reward).

    For each number j of votes that could win, one pass over the answers counts the subsets in
    which no answer has more than j, by completions drawn and by answers tied at j, beside the sum
    of the tied answers' rewards.
    """
    total = 0.0
    for most in range(1, min(k, max(size for size, _ in answers)) + 1):
        # (drawn, tied) -> (number of subsets, sum of the tied answers' rewards over them)
        states: dict[tuple[int, int], tuple[int, float]] = {(0, 0): (1, 0.0)}
        left = sum(min(size, most) for size, _ in answers)
        for size, reward in answers:
            left -= min(size, most)
            after: dict[tuple[int, int], tuple[int, float]] = {}
            for (drawn, tied), (ways, rewards) in states.items():
                for take in range(max(0, k - drawn - left), min(size, most, k - drawn) + 1):
                    at_most = take == most
                    place = drawn + take, tied + at_most
                    choose = math.comb(size, take)
                    more = (rewards + (ways * reward if at_most else 0.0)) * choose
                    before = after.get(place, (0, 0.0))
                    after[place] = before[0] + ways * choose, before[1] + more
            states = after
        total += sum(r / tied for (drawn, tied), (_, r) in states.items() if drawn == k and tied)
    return total / math.comb(sum(size for size, _ in answers), k)


def _sampled_majority(answers: Sequence[tuple[int, float]], k: int) -> float:
    """The mean over random subsets, the same ones whenever it is asked."""
    draw = random.Random(f"headway-majority:{k}")
    pool = [answer for answer, (size, _) in enumerate(answers) for _ in range(size)]
    total = 0.0
    for _ in range(_DRAWS):
        counts: dict[int, int] = {}
        for answer in draw.sample(pool, k):
            counts[answer] = counts.get(answer, 0) + 1
        total += _winners_reward([(n, answers[answer][1]) for answer, n in counts.items()])
    return total / _DRAWS
