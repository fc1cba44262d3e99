"""lm-evaluation-harness: a Headway grader as `process_results`, or as a filter that scores at once.

`utils.py` beside the task's YAML:

    from headway.adapters.lm_eval import HeadwayMetric
    score = HeadwayMetric({"type": "numeric", "reference": "{{item.answer}}"})

and in the YAML `process_results: !function utils.score`, with the metric `reward` aggregated by
lm-eval's `nanmean`. A completion that cannot be scored is NaN there: `nanmean` leaves it out,
`mean` shows it as NaN, neither makes it a zero. `reward_null` is how many there were.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from headway.adapters.scoring import Grading, mean_of_scored, null_fraction
from headway.messages import ScoreItem

Doc = Mapping[str, Any]


class HeadwayMetric:
    """`process_results` of a task: the reward of a document's responses."""

    def __init__(
        self,
        grader: Mapping[str, Any] | str,
        address: str | None = None,
        name: str = "reward",
        parts: Sequence[str] = (),
    ) -> None:
        """`parts`: sub-rewards to report besides, each under its own name. See `Grading`."""
        self._grading = Grading(grader, address)
        self._metric = name
        self._parts = tuple(parts)
        self.__name__ = f"headway_{name}"

    def __call__(self, doc: Doc, results: Sequence[Any]) -> dict[str, float]:
        """Means over the responses (one, or as many as the task's filter leaves).

        `reward`, NaN when none could be scored; `reward_null`, the fraction that could not be.
        """
        scores = self._grading.score(_answers(results, doc))
        found = _report(self._metric, [score.reward for score in scores])
        for part in self._parts:
            found[part] = mean_of_scored([score.parts.get(part) for score in scores])
        return found


class HeadwayFilter:
    """For `function: custom` of a filter: all responses of a task are scored in a few calls.

    Each response becomes its reward, NaN where there is none; `rewards_given` reports them.
    """

    def __init__(self, grader: Mapping[str, Any] | str, address: str | None = None) -> None:
        self._grading = Grading(grader, address)
        self.__name__ = "headway_filter"

    def __call__(self, resps: Sequence[Any], docs: Sequence[Doc]) -> list[list[float]]:
        """Rewards in the responses' places."""
        rows = [_answers(row, doc) for row, doc in zip(resps, docs, strict=True)]
        scores = iter(self._grading.score([answer for row in rows for answer in row]))
        rewards = [[next(scores).reward for _ in row] for row in rows]
        return [[math.nan if r is None else r for r in row] for row in rewards]


def rewards_given(doc: Doc, results: Sequence[Any]) -> dict[str, float]:
    """`process_results` behind `HeadwayFilter`."""
    return _report("reward", _flat(results))


def _report(name: str, rewards: Sequence[float | None]) -> dict[str, float]:
    return {name: mean_of_scored(rewards), f"{name}_null": null_fraction(rewards)}


def _answers(results: Sequence[Any], doc: Doc) -> list[ScoreItem]:
    return [ScoreItem(None, str(text), dict(doc)) for text in _flat(results)]


def _flat(results: Any) -> list[Any]:
    """Responses; with repeats lm-eval puts them into a list within."""
    if not isinstance(results, (list, tuple)):
        return [results]
    return [one for result in results for one in _flat(result)]
