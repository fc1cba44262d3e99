"""Two models on the same prompts: differences prompt by prompt, with their interval and tests.

Pairs are found by data source and row, and must have asked the same thing: the content hash of
prompt and item is the same. Comparing prompt by prompt takes out what makes some prompts hard for
both, so that smaller differences can be seen (Miller 2024, arXiv:2411.00640, paired differences).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean

from headway.errors import InvalidSpec
from headway.evaluation.estimators import is_right, pass_at_k
from headway.evaluation.intervals import Estimate, difference
from headway.evaluation.metrics import ALL, Prompt, outcome
from headway.evaluation.paired import permutation_test, sign_test
from headway.evaluation.records import PromptRecord

_SHOWN = 5  # prompts named in a message


@dataclass(frozen=True, slots=True)
class Contrast:
    """One metric of one table: A, B, and B minus A over the prompts that both have a value for."""

    data_source: str
    metric: str
    num_pairs: int
    mean_a: float
    mean_b: float
    difference: Estimate
    wins: int  # prompts on which B is above A
    ties: int
    losses: int
    sign_p: float
    permutation_p: float
    permutation_exact: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """What two evaluations have in common and how they differ on it."""

    contrasts: tuple[Contrast, ...]
    num_pairs: int
    only_a: int  # prompts that B was not asked
    only_b: int
    different: tuple[str, ...]  # the same row, another prompt or item
    ungraded: int  # pairs of which one has no graded completion


@dataclass(slots=True)
class _Pairs:
    """The graded pairs of one data source."""

    a: list[Prompt] = field(default_factory=list)
    b: list[Prompt] = field(default_factory=list)


def compare(
    a: Iterable[PromptRecord], b: Iterable[PromptRecord], pass_reward: float = 1.0
) -> Comparison:
    """B against A. InvalidSpec when no prompt was asked in both, with the reason.

    Prompts that were skipped in either count as not asked there.
    """
    first = {(r.data_source, r.index): _kept(r) for r in a if r.completions}
    second = {(r.data_source, r.index): _kept(r) for r in b if r.completions}
    both = sorted(first.keys() & second.keys())
    different = [key for key in both if first[key][0] != second[key][0]]
    pairs = [key for key in both if first[key][0] == second[key][0]]
    if not pairs:
        raise InvalidSpec(_nothing_in_common(first, second, different))
    by_source: dict[str, _Pairs] = {}
    ungraded = 0
    for key in pairs:
        one, other = first[key][1], second[key][1]
        if not one.rewards or not other.rewards:
            ungraded += 1
            continue
        of_source = by_source.setdefault(key[0], _Pairs())
        of_source.a.append(one)
        of_source.b.append(other)
    if len(by_source) > 1 and ALL not in by_source:
        by_source[ALL] = _Pairs(
            [prompt for each in by_source.values() for prompt in each.a],
            [prompt for each in by_source.values() for prompt in each.b],
        )
    return Comparison(
        contrasts=tuple(
            contrast
            for name, each in by_source.items()
            for contrast in _contrasts(name, each, pass_reward)
        ),
        num_pairs=len(pairs),
        only_a=len(first.keys() - second.keys()),
        only_b=len(second.keys() - first.keys()),
        different=tuple(f"{source}, row {index}" for source, index in different),
        ungraded=ungraded,
    )


def _kept(record: PromptRecord) -> tuple[str, Prompt]:
    return record.content_hash, outcome(record, None)


def _contrasts(name: str, pairs: _Pairs, pass_reward: float) -> Iterable[Contrast]:
    """The mean, and where both have more than one completion a prompt pass@k of the smaller n."""

    def mean(prompt: Prompt) -> float | None:
        return prompt.mean

    def passed(prompt: Prompt) -> float | None:
        right = sum(is_right(reward, pass_reward) for reward in prompt.rewards)
        return pass_at_k(len(prompt.rewards), right, k)

    k = min(max(p.n for p in pairs.a), max(p.n for p in pairs.b))
    metrics: dict[str, Callable[[Prompt], float | None]] = {"mean": mean}
    if k > 1:
        metrics[f"pass@{k}"] = passed
    for metric, pick in metrics.items():
        values = [
            (one, other)
            for a, b in zip(pairs.a, pairs.b, strict=True)
            if (one := pick(a)) is not None and (other := pick(b)) is not None
        ]
        if values:
            yield _contrast(name, metric, values)


def _contrast(name: str, metric: str, values: list[tuple[float, float]]) -> Contrast:
    # Two means of the same rewards may differ in their last bit: no win, no loss.
    gaps = [0.0 if abs(b - a) <= 1e-12 * max(1.0, abs(a)) else b - a for a, b in values]
    spread = difference(gaps)
    assert spread is not None  # there are values
    p, exact = permutation_test(gaps)
    return Contrast(
        data_source=name,
        metric=metric,
        num_pairs=len(values),
        mean_a=fmean(a for a, _ in values),
        mean_b=fmean(b for _, b in values),
        difference=spread,
        wins=sum(gap > 0 for gap in gaps),
        ties=sum(gap == 0 for gap in gaps),
        losses=sum(gap < 0 for gap in gaps),
        sign_p=sign_test(gaps),
        permutation_p=p,
        permutation_exact=exact,
    )


def _nothing_in_common(
    first: Mapping[tuple[str, int], object],
    second: Mapping[tuple[str, int], object],
    different: list[tuple[str, int]],
) -> str:
    if not first or not second:
        return f"{'the first' if not first else 'the second'} evaluation has no sampled prompt"
    if different:
        shown = "; ".join(f"{source}, row {index}" for source, index in different[:_SHOWN])
        return (
            f"the two evaluations asked different things in all {len(different)} rows that they"
            f" share (such as {shown}): compare evaluations of the same data, seed, system prompt"
            " and suffix"
        )
    a, b = ({source for source, _ in keys} for keys in (first, second))
    return (
        "the two evaluations share no row: the first has data from"
        f" {', '.join(sorted(a)[:_SHOWN])}, the second from {', '.join(sorted(b)[:_SHOWN])}"
    )
