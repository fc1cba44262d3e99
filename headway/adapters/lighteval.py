"""lighteval: a Headway grader as a sample-level metric.

In a file of tasks:

    from headway.adapters.lighteval import headway_metric
    metrics=[headway_metric({"type": "numeric", "reference": "{{item.answer}}"})]

A document is the item: `specific` as it is, and `answer`, its gold (a list of them when there are
several). A completion that cannot be scored is NaN for its sample and left out of the mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from headway.adapters.scoring import Grading, mean_of_scored
from headway.messages import ScoreItem


class HeadwayComputation:
    """lighteval's `SampleLevelComputation`, for one sample or a batch of them."""

    def __init__(self, grader: Mapping[str, Any] | str, address: str | None = None) -> None:
        self.grading = Grading(grader, address)

    def compute(
        self,
        doc: Any = None,
        model_response: Any = None,
        docs: Sequence[Any] = (),
        responses: Sequence[Any] = (),
        **_: Any,
    ) -> float | list[float]:
        """The mean reward of a document's completions, NaN when none could be scored.

        A list of them for `docs` and `responses`, scored in a few calls.
        """
        if doc is not None:
            return self._batch([doc], [model_response])[0]
        return self._batch(docs, responses)

    def _batch(self, docs: Sequence[Any], responses: Sequence[Any]) -> list[float]:
        rows = [_answers(d, response) for d, response in zip(docs, responses, strict=True)]
        scores = iter(self.grading.score([answer for row in rows for answer in row]))
        return [mean_of_scored([next(scores).reward for _ in row]) for row in rows]

    def __str__(self) -> str:
        return f"Headway({self.grading.grader.get('type')})"


def headway_metric(
    grader: Mapping[str, Any] | str, address: str | None = None, name: str = "headway_reward"
) -> Any:
    """A `SampleLevelMetric` of generated text. ImportError without lighteval."""
    from lighteval.metrics.metrics_sample import SampleLevelComputation
    from lighteval.metrics.utils.metric_utils import SampleLevelMetric
    from lighteval.tasks.requests import SamplingMethod

    SampleLevelComputation.register(HeadwayComputation)
    return SampleLevelMetric(
        metric_name=name,
        higher_is_better=True,
        category=SamplingMethod.GENERATIVE,
        sample_level_fn=HeadwayComputation(grader, address),
        corpus_level_fn=mean_reward,
        batched_compute=True,
    )


def mean_reward(rewards: Sequence[float]) -> float:
    """The mean over the samples that were scored; NaN when none was."""
    return mean_of_scored([None if math.isnan(r) else r for r in rewards])


def _answers(doc: Any, response: Any) -> list[ScoreItem]:
    golds = list(doc.get_golds())
    answer = golds[0] if len(golds) == 1 else golds
    item = {"answer": answer, **(doc.specific or {})}
    return [ScoreItem(doc.query, str(text), item) for text in response.final_text]
