"""The report of an evaluation, or of two compared: one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import islice
from pathlib import Path

from headway import __version__
from headway.evaluation.browser import BROWSER_STYLE, MAX_PROMPTS, browser, policy
from headway.evaluation.compare import Comparison
from headway.evaluation.finished import Evaluation
from headway.evaluation.intervals import Estimate
from headway.evaluation.metrics import Table
from headway.evaluation.records import PromptRecord
from headway.evaluation.text import (
    figure,
    interval,
    left_out,
    metric_names,
    nulls,
    p_value,
    sentence,
)
from headway.report import flatten, mapping_table
from headway.report_style import STYLE
from headway.report_svg import Series, line_chart, nice
from headway.whole_file import write_whole

_BAR = (320, 26)
_STYLE = """
td.bar{width:340px}td svg{width:320px}
.whisker{stroke:var(--s1);stroke-width:2}.zero{stroke:var(--rule)}.dot{fill:var(--s1)}
.verdict{font-size:16px}
"""


def write_eval_report(evaluation: Evaluation) -> Path:
    """Writes report.html into an eval job's run folder and returns its path. StorageFailed."""
    target = evaluation.run_dir / "report.html"
    write_whole(target, render(evaluation))
    return target


def write_comparison(target: Path, a: Evaluation, b: Evaluation, comparison: Comparison) -> Path:
    """Writes the page that compares B with A and returns its path. StorageFailed."""
    write_whole(target, render_comparison(a, b, comparison))
    return target


def render(evaluation: Evaluation) -> str:
    """The page of one evaluation. Everything that came from outside is escaped."""
    total = sum(1 for _ in evaluation.records())  # a data source may be named `all`
    samples = browser([("completions", evaluation.records())], evaluation.pass_reward, total)
    notes = "".join(
        f"<p>{escape(line)}</p>" for table in evaluation.tables if (line := nulls(table))
    )
    about = mapping_table("Environment", flatten(evaluation.environment))
    about += mapping_table("Job", flatten(evaluation.job))
    return _page(
        evaluation.name,
        escape(evaluation.model),
        f"{_tiles(evaluation.tables)}{_table(evaluation.tables)}{notes}"
        f'<section class="charts">{_chart(evaluation.tables)}</section>'
        f"<section><h2>Samples</h2>{samples}</section>"
        f'<section class="tables">{about}</section>',
    )


def render_comparison(a: Evaluation, b: Evaluation, comparison: Comparison) -> str:
    """The page of two evaluations: differences, and completions side by side."""
    pairs = _pairs(a, b)
    sides = [
        (f"A: {a.name}", (one for one, _ in pairs)),
        (f"B: {b.name}", (other for _, other in pairs)),
    ]
    notes = "".join(f"<p>{escape(line)}</p>" for line in left_out(comparison))
    return _page(
        f"{b.name} against {a.name}",
        f"A: {escape(a.model)} · B: {escape(b.model)}",
        f"{_contrasts(comparison)}{notes}<section><h2>Samples</h2>"
        f"{browser(sides, a.pass_reward, comparison.num_pairs)}</section>",
    )


def _pairs(a: Evaluation, b: Evaluation) -> list[tuple[PromptRecord, PromptRecord]]:
    """The prompts that both were asked, as many as a page shows; no more are held in memory."""
    first = {r.key[1:]: r for r in islice(_sampled(a), MAX_PROMPTS)}
    others = ((r, first.get(r.key[1:])) for r in _sampled(b))
    return [
        (one, other)
        for other, one in others
        if one is not None and one.content_hash == other.content_hash
    ]


def _sampled(evaluation: Evaluation) -> Iterator[PromptRecord]:
    return (record for record in evaluation.records() if record.completions)


def _page(title: str, subtitle: str, body: str) -> str:
    name = escape(title)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy())}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{name} – Headway</title><style>{STYLE}{BROWSER_STYLE}{_STYLE}</style></head>"
        f"<body><main><header><h1>{name}</h1><p>{subtitle}</p></header>{body}"
        f"<footer>Headway {escape(__version__)}</footer></main></body></html>\n"
    )


def _tiles(tables: Sequence[Table]) -> str:
    if not tables:
        return ""
    whole = tables[-1]
    graded = f"{whole.num_graded:,} of {whole.num_completions:,}"
    tiles = [
        (f"mean reward, {whole.data_source}", figure(whole.mean)),
        ("95 % interval", interval(whole.mean)),
        ("standard error", nice(whole.mean.stderr if whole.mean else None)),
        ("prompts", f"{whole.num_prompts:,}"),
        ("completions graded", graded),
        ("tokens a completion, mean", nice(whole.mean_tokens)),
    ]
    cells = "".join(f"<div><b>{escape(v)}</b><span>{escape(k)}</span></div>" for k, v in tiles)
    return f'<section class="tiles">{cells}</section>'


def _table(tables: Sequence[Table]) -> str:
    names = metric_names(tables)
    head = ["data source", "prompts", *names, "95 % of the mean", "", "graded", "tokens", "cut"]
    low, high = _range([table.mean for table in tables])
    rows = "".join(
        "<tr>"
        + _cells(
            [
                table.data_source,
                f"{table.num_prompts:,}",
                *(figure(table.estimates.get(name)) for name in names),
                interval(table.mean),
            ]
        )
        + f'<td class="bar">{_whisker(table.mean, low, high)}</td>'
        + _cells(
            [
                f"{table.num_graded:,} of {table.num_completions:,}",
                nice(table.mean_tokens),
                "–" if table.cut_ratio is None else f"{table.cut_ratio:.0%}",
            ]
        )
        + "</tr>"
        for table in tables
    )
    return _grid("By data source", head, rows)


def _contrasts(comparison: Comparison) -> str:
    head = ["data source", "metric", "prompts", "A", "B", "B − A", "95 %", "", "won / tied / lost",
            "p, sign test", "p, permutation"]  # fmt: skip
    low, high = _range([c.difference for c in comparison.contrasts])
    rows = "".join(
        "<tr>"
        + _cells(
            [
                c.data_source,
                c.metric,
                f"{c.num_pairs:,}",
                f"{c.mean_a:.3f}",
                f"{c.mean_b:.3f}",
                f"{c.difference.value:+.3f}",
                interval(c.difference, signed=True),
            ]
        )
        + f'<td class="bar">{_whisker(c.difference, low, high)}</td>'
        + _cells(
            [
                f"{c.wins} / {c.ties} / {c.losses}",
                p_value(c.sign_p),
                p_value(c.permutation_p) + ("" if c.permutation_exact else " (drawn)"),
            ]
        )
        + "</tr>"
        for c in comparison.contrasts
    )
    means = [c for c in comparison.contrasts if c.metric == "mean"]
    said = sentence(means[-1]) if means else "nothing was graded on both sides"
    return f'<p class="verdict">{escape(said)}</p>' + _grid("Differences by prompt", head, rows)


def _grid(title: str, head: Sequence[str], rows: str) -> str:
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    return (
        f'<section><h2>{escape(title)}</h2><div class="scroll"><table><thead><tr>{cells}</tr>'
        f"</thead><tbody>{rows}</tbody></table></div></section>"
    )


def _cells(texts: Sequence[str]) -> str:
    return "".join(f"<td>{escape(text)}</td>" for text in texts)


def _range(estimates: Sequence[Estimate | None]) -> tuple[float, float]:
    """What the whiskers span: 0 to 1, or wider."""
    edges = [
        edge
        for estimate in estimates
        if estimate is not None
        for edge in (estimate.low, estimate.high, estimate.value)
        if edge is not None
    ]
    return min([0.0, *edges]), max([1.0, *edges]) if not any(e < 0 for e in edges) else max(edges)


def _whisker(estimate: Estimate | None, low: float, high: float) -> str:
    """A mean as a dot on its interval."""
    if estimate is None:
        return ""
    width, height = _BAR
    span = (high - low) or 1.0

    def x(value: float) -> str:
        return f"{6 + (value - low) / span * (width - 12):.1f}"

    middle = height / 2
    line = ""
    if estimate.low is not None and estimate.high is not None:
        line = (
            f'<line class="whisker" x1="{x(estimate.low)}" x2="{x(estimate.high)}" y1="{middle}"'
            f' y2="{middle}"/>'
        )
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img"><title>{interval(estimate)}</title>'
        f'<line class="zero" x1="{x(0.0)}" x2="{x(0.0)}" y1="0" y2="{height}"/>'
        f'{line}<circle class="dot" cx="{x(estimate.value)}" cy="{middle}" r="4"/></svg>'
    )


def _chart(tables: Sequence[Table]) -> str:
    """pass@k, best@k and maj@k over k, of everything; nothing where one completion was sampled."""
    if not tables or tables[-1].n < 2:
        return ""
    whole = tables[-1].estimates
    ks = [int(name.removeprefix("pass@")) for name in whole if name.startswith("pass@")]
    wanted = {"pass@k": "pass@{}", "best@k": "best@{}/mean", "maj@k": "maj@{}/mean"}
    series = []
    for i, (name, form) in enumerate(wanted.items(), start=1):
        found = [whole.get(form.format(k)) for k in ks]
        if any(found):
            values = [None if each is None else each.value for each in found]
            series.append(Series(name, values, f"s{i}"))
    return line_chart("By number of completions k", [float(k) for k in ks], series, floor=0.0)
