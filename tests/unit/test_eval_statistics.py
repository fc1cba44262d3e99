"""Figures of an evaluation against values worked out by hand and by brute force over subsets."""

import itertools
import math
import random
from collections import Counter
from fractions import Fraction

import pytest

from headway.evaluation.estimators import best_at_k, maj_at_k, pass_at_k, worst_at_k
from headway.evaluation.intervals import estimate, standard_error, t_quantile
from headway.evaluation.paired import permutation_test, sign_test

near = pytest.approx


def mean_over_subsets(values, k, reduce):
    found = [reduce(subset) for subset in itertools.combinations(values, k)]
    return sum(found) / len(found)


# --- one prompt ---


@pytest.mark.parametrize(
    ("graded", "right", "k", "expected"),
    [
        (4, 1, 1, 0.25),
        (4, 1, 2, 0.5),  # 1 - C(3,2)/C(4,2) = 1 - 3/6
        (4, 2, 2, 5 / 6),  # 1 - 1/6
        (4, 1, 4, 1.0),
        (4, 0, 4, 0.0),
        (4, 4, 1, 1.0),
        (10, 3, 5, 11 / 12),  # 1 - C(7,5)/C(10,5) = 1 - 21/252
        (3, 2, 4, None),  # fewer graded than k
        (0, 0, 1, None),
    ],
)
def test_pass_at_k_by_hand(graded, right, k, expected):
    assert pass_at_k(graded, right, k) == (None if expected is None else near(expected))


def test_pass_at_k_is_stable_where_binomials_overflow_a_float():
    exact = 1 - Fraction(math.comb(9_999, 5_000), math.comb(10_000, 5_000))
    assert pass_at_k(10_000, 1, 5_000) == near(float(exact)) == near(0.5)
    assert pass_at_k(10_000, 3, 1) == near(3e-4, rel=1e-9)


def test_estimators_equal_the_mean_over_all_subsets():
    draw = random.Random(7)
    for _ in range(150):
        n = draw.randint(1, 8)
        k = draw.randint(1, n)
        rewards = [draw.choice([0.0, 0.0, 0.5, 1.0, -1.0]) for _ in range(n)]
        votes = [draw.choice("abc") for _ in range(n)]
        right = sum(r == 1.0 for r in rewards)
        anyone = mean_over_subsets(rewards, k, lambda s: float(any(r == 1.0 for r in s)))
        assert pass_at_k(n, right, k) == near(anyone)
        assert best_at_k(rewards, k) == near(mean_over_subsets(rewards, k, max))
        assert worst_at_k(rewards, k) == near(mean_over_subsets(rewards, k, min))
        worth = {v: [r for w, r in zip(votes, rewards, strict=True) if w == v] for v in votes}

        def majority(subset, worth=worth):
            counts = Counter(subset)
            winners = [v for v in counts if counts[v] == max(counts.values())]
            return sum(sum(worth[v]) / len(worth[v]) for v in winners) / len(winners)

        assert maj_at_k(votes, rewards, k) == near(mean_over_subsets(votes, k, majority))


def test_maj_by_hand():
    votes, rewards = ["7", "7", "8", "9"], [1.0, 1.0, 0.0, 0.0]
    assert maj_at_k(votes, rewards, 1) == near(0.5)
    # pairs: 77 wins; 78 x2, 79 x2 tie at 1/2; 89 loses: (1 + 4/2) / 6
    assert maj_at_k(votes, rewards, 2) == near(0.5)
    # triples: 778, 779 win; 789 x2 tie at 1/3: (2 + 2/3) / 4
    assert maj_at_k(votes, rewards, 3) == near(2 / 3)
    assert maj_at_k(votes, rewards, 4) == 1.0
    assert maj_at_k(votes, rewards, 5) is None
    assert maj_at_k(["a", "b"], [1.0, 0.0], 2) == 0.5  # a tie
    assert maj_at_k(["a", "a"], [1.0, 0.5], 2) == 0.75  # one answer, two rewards


def test_maj_of_many_completions_is_near_its_exact_value_and_repeatable():
    votes = ["r"] * 60 + ["w"] * 40
    rewards = [1.0] * 60 + [0.0] * 40
    exact = sum(
        math.comb(60, i) * math.comb(40, 9 - i) / math.comb(100, 9) for i in range(5, 10)
    )  # nine drawn: the right answer wins with five
    found = maj_at_k(votes, rewards, 9)
    assert found == near(exact, abs=0.1)
    assert found == maj_at_k(votes, rewards, 9)
    assert maj_at_k(votes, rewards, 100) == 1.0


# --- over prompts ---


def test_student_t_has_the_tabled_quantiles():
    table = {1: 12.7062, 2: 4.30265, 3: 3.18245, 4: 2.77645, 10: 2.22814, 29: 2.04523, 100: 1.98397}
    for degrees, quantile in table.items():
        assert t_quantile(0.975, degrees) == near(quantile, abs=1e-5)
    assert t_quantile(0.975, 5000) == near(1.95996, abs=1e-5)


def test_interval_of_graded_rewards_by_hand():
    # mean 2, squares 4 + 0 + 4 = 8, SE = sqrt(8 / 3 / 2), t(2) = 4.30265
    found = estimate([0.0, 2.0, 4.0])
    assert (found.value, found.num_prompts) == (2.0, 3)
    assert found.stderr == near(math.sqrt(4 / 3))
    assert found.high - 2 == near(4.30265 * math.sqrt(4 / 3), rel=1e-5) == near(2 - found.low)


def test_interval_of_rewards_between_0_and_1_is_wilsons():
    # 8 of 10 right: SE^2 = 0.16 / 9, so 9 effective observations; z = t(9) = 2.262157
    found = estimate([1.0] * 8 + [0.0] * 2)
    share = 2.262157**2 / 9
    middle = (0.8 + share / 2) / (1 + share)
    reach = math.sqrt(share * 0.16 + share**2 / 4) / (1 + share)
    assert found.stderr == near(math.sqrt(0.16 / 9))
    assert (found.low, found.high) == (
        near(middle - reach, abs=1e-6),
        near(middle + reach, abs=1e-6),
    )
    assert 0 < found.low < 0.8 < found.high < 1


def test_an_interval_stays_open_where_all_prompts_are_alike():
    share = t_quantile(0.975, 19) ** 2 / 20
    right, wrong = estimate([1.0] * 20), estimate([0.0] * 20)
    assert (right.stderr, right.high, right.low) == (0.0, 1.0, near(1 / (1 + share)))
    assert (wrong.stderr, wrong.low, wrong.high) == (0.0, 0.0, near(share / (1 + share)))
    assert estimate([1.0000000000000002] * 3).high == 1.0  # a last bit is not beyond 1
    half = estimate([0.5] * 3)
    assert (half.stderr, half.low, half.high) == (0.0, 0.5, 0.5)
    beyond = estimate([3.0] * 3)
    assert (beyond.stderr, beyond.low, beyond.high) == (0.0, 3.0, 3.0)


def test_one_prompt_has_no_error_and_none_has_no_mean():
    one = estimate([0.25])
    assert (one.value, one.stderr, one.low, one.high, one.num_prompts) == (
        0.25,
        None,
        None,
        None,
        1,
    )
    assert estimate([]) is None


def test_the_standard_error_is_that_of_clusters():
    """Miller's clustered formula over all completions, with the factor C / (C - 1)."""
    draw = random.Random(3)
    prompts = [[float(draw.random() < p) for _ in range(4)] for p in (0.1, 0.3, 0.5, 0.9, 0.9)]
    everything = [r for rewards in prompts for r in rewards]
    mean = sum(everything) / len(everything)
    clusters = sum((a - mean) * (b - mean) for rewards in prompts for a in rewards for b in rewards)
    expected = math.sqrt(clusters) / len(everything) * math.sqrt(5 / 4)
    assert standard_error([sum(r) / len(r) for r in prompts]) == near(expected)


# --- two models ---


@pytest.mark.parametrize(
    ("wins", "losses", "p"),
    [(0, 0, 1.0), (1, 0, 1.0), (5, 0, 0.0625), (6, 0, 0.03125), (8, 2, 0.109375), (3, 3, 1.0)],
)
def test_sign_test_by_hand(wins, losses, p):
    assert sign_test([0.5] * wins + [-1.0] * losses + [0.0] * 7) == near(p)


def test_permutation_test_equals_all_sign_patterns():
    draw = random.Random(5)
    for _ in range(60):
        gaps = [draw.randint(-3, 3) / 3 for _ in range(draw.randint(0, 9))]
        moved = [g for g in gaps if g]
        sums = [
            abs(sum(sign * g for sign, g in zip(signs, moved, strict=True)))
            for signs in itertools.product((1, -1), repeat=len(moved))
        ]
        expected = sum(s >= abs(sum(gaps)) - 1e-9 for s in sums) / len(sums)
        assert permutation_test(gaps) == (near(expected), True)


def test_with_one_size_of_difference_both_tests_are_the_same():
    gaps = [1.0] * 120 + [-1.0] * 80 + [0.0] * 800
    p, exact = permutation_test(gaps)
    assert exact and p == near(sign_test(gaps), rel=1e-12)
    assert 0.004 < p < 0.007


def test_permutation_test_of_differences_that_share_no_fraction_is_drawn():
    draw = random.Random(9)
    gaps = [draw.gauss(0.3, 1.0) for _ in range(12)]
    sums = [
        abs(sum(sign * g for sign, g in zip(signs, gaps, strict=True)))
        for signs in itertools.product((1, -1), repeat=len(gaps))
    ]
    expected = sum(s >= abs(sum(gaps)) for s in sums) / len(sums)
    p, exact = permutation_test(gaps)
    assert not exact and p == near(expected, abs=0.02)
    assert permutation_test(gaps) == (p, exact)
    assert permutation_test([math.pi] * 40)[0] >= 1 / 10_001  # never 0
