"""The curves of validations: what held-out prompts earned, over the steps that were evaluated."""

from __future__ import annotations

import re

from headway.report_data import RunData
from headway.report_svg import Series, line_chart

_CORE = re.compile(r"val-core/(?P<source>.+)/reward/(?P<metric>(?:mean|pass|maj)@\d+(?:/mean)?)")
_ORDER = ("mean", "pass", "maj")
_MAX_SOURCES = 4


def validation_charts(run: RunData) -> list[str]:
    """One chart for each of mean@n, pass@n and maj@n, with four data sources at most."""
    keys = sorted({key for row in run.metrics for key in row if key.startswith("val-core/")})
    by_metric: dict[str, list[tuple[str, str]]] = {}
    for key in keys:
        if (match := _CORE.fullmatch(key)) is not None:
            by_metric.setdefault(match["metric"], []).append((match["source"], key))
    return [
        _chart(run, metric, by_metric[metric][:_MAX_SOURCES])
        for metric in sorted(
            by_metric, key=lambda name: ("mean", "pass", "maj").index(name.partition("@")[0])
        )
    ]


def _chart(run: RunData, metric: str, columns: list[tuple[str, str]]) -> str:
    """Lines over the evaluated steps alone: between them nothing is missing."""
    values = {source: run.column(key) for source, key in columns}
    places = [
        place
        for place in range(len(run.metrics))
        if any(column[place] is not None for column in values.values())
    ]
    series = [
        Series(source, [column[place] for place in places], f"s{i}")
        for i, (source, column) in enumerate(values.items(), start=1)
    ]
    return line_chart(f"Validation: {metric}", [run.steps[place] for place in places], series)
