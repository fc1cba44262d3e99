"""From records to tables: one row a data source, and the names that people plot.

A prompt counts with the mean over its graded completions, whatever their number; a table's mean
is over prompts. A completion without a reward (null) is in no mean: it is counted, and
`null_bounds` says where the mean would lie had all nulls of the table been the worst and the best
reward that is possible. A prompt with no graded completion is in no mean either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from headway.evaluation.estimators import best_at_k, is_right, maj_at_k, pass_at_k, worst_at_k
from headway.evaluation.intervals import Estimate, estimate
from headway.evaluation.records import PromptRecord
from headway.evaluation.votes import Voter

ALL = "all"
"""The table over every data source, one prompt one vote."""

_LARGEST = 1e100

Pick = Callable[["Prompt"], "float | None"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What statistics need of a record: of each graded completion its reward, vote and parts."""

    n: int  # completions, graded or not
    rewards: tuple[float, ...]  # of the graded ones
    votes: tuple[str, ...]  # of the graded ones
    parts: tuple[Mapping[str, float], ...]  # of the graded ones
    null_kinds: tuple[str, ...]  # of the others
    num_tokens: tuple[int, ...]  # of all
    num_cut: int  # completions that reached the limit of tokens

    @property
    def mean(self) -> float | None:
        """Over the graded completions; None where there are none."""
        return fmean(self.rewards) if self.rewards else None


@dataclass(frozen=True, slots=True)
class Table:
    """One data source. `estimates` are named as verl names them, `mean@4`, `best@2/mean`."""

    data_source: str
    n: int  # completions a prompt, the most of any
    num_prompts: int  # asked
    num_skipped: int  # not asked
    num_completions: int
    num_graded: int
    null_kinds: Mapping[str, int]
    null_bounds: tuple[float, float] | None  # of the mean; None without nulls
    estimates: Mapping[str, Estimate]
    parts: Mapping[str, Estimate]  # mean@n of each part of a composed grader
    mean_tokens: float | None
    cut_ratio: float | None  # of completions that reached the limit

    @property
    def mean(self) -> Estimate | None:
        """The mean reward; None where nothing was graded."""
        return self.estimates.get(f"mean@{self.n}")


def tables(
    records: Iterable[PromptRecord],
    voter_of: Callable[[str], Voter | None] = lambda _: None,
    pass_reward: float = 1.0,
) -> list[Table]:
    """One table a data source, by name; behind more than one, the one over all of them.

    `voter_of` says how answers of a data source are read; None: there are no votes on it. A
    completion is right when its reward is at least `pass_reward`.
    """
    by_source: dict[str, list[Prompt]] = {}
    voters: dict[str, Voter | None] = {}
    skipped: Counter[str] = Counter()
    for record in records:
        if record.data_source not in voters:
            voters[record.data_source] = voter_of(record.data_source)
        prompts = by_source.setdefault(record.data_source, [])
        if record.completions:
            prompts.append(outcome(record, voters[record.data_source]))
        else:
            skipped[record.data_source] += 1
    found = [
        _table(name, prompts, skipped[name], voters[name] is not None, pass_reward)
        for name, prompts in sorted(by_source.items())
    ]
    if len(found) > 1 and ALL not in by_source:
        everything = [prompt for prompts in by_source.values() for prompt in prompts]
        voted = None not in voters.values()
        found.append(_table(ALL, everything, skipped.total(), voted, pass_reward))
    return found


def outcome(record: PromptRecord, vote: Voter | None) -> Prompt:
    """What statistics need of one record."""
    graded = [c for c in record.completions if c.reward is not None]
    return Prompt(
        n=len(record.completions),
        rewards=tuple(_bounded(c.reward) for c in graded if c.reward is not None),
        votes=tuple(vote(c.text) for c in graded) if vote is not None else (),
        parts=tuple({name: _bounded(part) for name, part in c.parts.items()} for c in graded),
        null_kinds=tuple(c.error_kind or "unknown" for c in record.completions if c.reward is None),
        num_tokens=tuple(c.num_tokens for c in record.completions),
        num_cut=sum(c.finish_reason == "length" for c in record.completions),
    )


def _bounded(reward: float) -> float:
    """A reward whose square can be summed: beyond 1e100 it counts as that."""
    return max(-_LARGEST, min(_LARGEST, reward))


def sizes(n: int) -> list[int]:
    """The k of best@k, as verl's: 2, 4, 8, … below n, and n; none for n = 1."""
    ks = [2**i for i in range(1, n.bit_length()) if 2**i < n]
    return [*ks, n] if n > 1 else []


def _table(
    name: str, prompts: Sequence[Prompt], skipped: int, voted: bool, pass_reward: float
) -> Table:
    n = max((prompt.n for prompt in prompts), default=0)
    tokens = [count for prompt in prompts for count in prompt.num_tokens]
    return Table(
        data_source=name,
        n=n,
        num_prompts=len(prompts),
        num_skipped=skipped,
        num_completions=len(tokens),
        num_graded=sum(len(prompt.rewards) for prompt in prompts),
        null_kinds=dict(Counter(kind for prompt in prompts for kind in prompt.null_kinds)),
        null_bounds=_null_bounds(prompts),
        estimates=_over(prompts, _picks(n, voted, pass_reward)),
        parts=_over(prompts, _part_picks(prompts)),
        mean_tokens=fmean(tokens) if tokens else None,
        cut_ratio=sum(prompt.num_cut for prompt in prompts) / len(tokens) if tokens else None,
    )


def _picks(n: int, voted: bool, pass_reward: float) -> dict[str, Pick]:
    """Every metric of a table: its name, and its value for one prompt."""
    picks: dict[str, Pick] = {f"mean@{n}": lambda p: p.mean}

    def add(k: int) -> None:
        picks[f"pass@{k}"] = lambda p: pass_at_k(
            len(p.rewards), sum(is_right(reward, pass_reward) for reward in p.rewards), k
        )
        if k == 1:
            return
        picks[f"best@{k}/mean"] = lambda p: best_at_k(p.rewards, k)
        picks[f"worst@{k}/mean"] = lambda p: worst_at_k(p.rewards, k)
        if voted:
            picks[f"maj@{k}/mean"] = lambda p: maj_at_k(p.votes, p.rewards, k)

    for k in (1, *sizes(n)):
        add(k)
    if n > 1:
        picks[f"std@{n}"] = lambda p: pstdev(p.rewards) if p.rewards else None
    return picks


def _part_picks(prompts: Sequence[Prompt]) -> dict[str, Pick]:
    names = sorted({name for prompt in prompts for parts in prompt.parts for name in parts})

    def pick(name: str) -> Pick:
        def mean_of_part(prompt: Prompt) -> float | None:
            values = [parts[name] for parts in prompt.parts if name in parts]
            return fmean(values) if values else None

        return mean_of_part

    return {name: pick(name) for name in names}


def _over(prompts: Sequence[Prompt], picks: Mapping[str, Pick]) -> dict[str, Estimate]:
    """Each metric over the prompts that have a value for it; those that none has are left out."""
    found: dict[str, Estimate] = {}
    for name, pick in picks.items():
        mean = estimate([value for prompt in prompts if (value := pick(prompt)) is not None])
        if mean is not None:
            found[name] = mean
    return found


def _null_bounds(prompts: Sequence[Prompt]) -> tuple[float, float] | None:
    """The mean with every null as the least and as the largest reward that is possible.

    That is 0 and 1, or the least and the largest seen where they lie beyond.
    """
    if not any(prompt.null_kinds for prompt in prompts):
        return None
    seen = [reward for prompt in prompts for reward in prompt.rewards]
    least, largest = min([0.0, *seen]), max([1.0, *seen])
    low, high = (
        fmean((sum(p.rewards) + len(p.null_kinds) * null) / p.n for p in prompts)
        for null in (least, largest)
    )
    return low, high
