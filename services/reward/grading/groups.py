"""Graders that score all completions of a prompt in one go."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from services.reward.grading.outcome import Graded, GradingError
from services.reward.grading.sample import Grade, Sample


def once_a_group(score: Callable[[Sequence[Sample]], Sequence[Graded | GradingError]]) -> Grade:
    """A grade that calls `score` once a group, though each sample of it is graded in turn.

    `score` gives one result a sample, in order. What it raises is raised for each sample.
    """
    known: Sequence[Sample] | None = None
    results: Sequence[Graded | GradingError] = ()
    failure: BaseException | None = None

    def grade(sample: Sample) -> Graded:
        nonlocal known, results, failure
        group = sample.group or (sample,)
        if group is not known:
            known, results, failure = group, (), None
            try:
                results = score(group)
            except BaseException as error:  # a grader may raise anything; told to each sample
                failure = error
        if failure is not None:
            raise failure
        result = results[sample.position]
        if isinstance(result, GradingError):
            raise result
        return result

    return grade
