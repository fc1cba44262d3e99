"""Tables and comparisons of evaluations as lines of text."""

from __future__ import annotations

from collections.abc import Sequence

from headway.evaluation.compare import Comparison, Contrast
from headway.evaluation.intervals import Estimate
from headway.evaluation.metrics import Table

_SHOWN = 5


def table_lines(tables: Sequence[Table]) -> list[str]:
    """One line a data source, under a head; then what was not graded or not asked."""
    names = metric_names(tables)
    head = ["data source", "prompts", *names, "95 % of the mean", "tokens", "cut"]
    rows = [head]
    for table in tables:
        rows.append(
            [
                table.data_source,
                str(table.num_prompts),
                *(figure(table.estimates.get(name)) for name in names),
                interval(table.mean),
                "–" if table.mean_tokens is None else f"{table.mean_tokens:.0f}",
                "–" if table.cut_ratio is None else f"{table.cut_ratio:.0%}",
            ]
        )
    return [*aligned(rows), *(line for table in tables if (line := nulls(table)))]


def metric_names(tables: Sequence[Table]) -> list[str]:
    """What a table for people shows: the mean, then pass@k, best@k and maj@k of the largest k.

    best@k is left out where it says the same as pass@k.
    """
    largest = max(tables, key=lambda table: table.n, default=None)
    if largest is None:
        return []
    n = largest.n
    wanted = [f"mean@{n}", "pass@1", f"pass@{n}", f"best@{n}/mean", f"maj@{n}/mean"]
    there = {name for table in tables for name in table.estimates}
    shown: list[str] = []
    for name in wanted:
        same = any(_column(tables, name) == _column(tables, other) for other in shown)
        if name in there and not (same and name.startswith(("pass@", "best@"))):
            shown.append(name)
    return shown


def _column(tables: Sequence[Table], name: str) -> list[float | None]:
    found = [table.estimates.get(name) for table in tables]
    return [None if estimate is None else round(estimate.value, 9) for estimate in found]


def nulls(table: Table) -> str:
    """What of a table is in no mean, and how far it could move the mean; empty if nothing is."""
    said = []
    if table.null_kinds:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(table.null_kinds.items()))
        said.append(
            f"{table.num_graded} of {table.num_completions} completions graded ({kinds});"
            f" were those without a reward all wrong or all right, the mean would be"
            f" {'–' if table.null_bounds is None else f'{table.null_bounds[0]:.3f}'} or"
            f" {'–' if table.null_bounds is None else f'{table.null_bounds[1]:.3f}'}"
        )
    if table.num_skipped:
        said.append(f"{table.num_skipped} prompts were not sampled")
    line = f"{table.data_source}: {'; '.join(said)}" if said else ""
    return "".join(c if c.isprintable() else "?" for c in line)


def comparison_lines(comparison: Comparison, name_a: str, name_b: str) -> list[str]:
    """B against A, one line a data source and metric; then what could not be compared."""
    rows = [
        ["data source", "metric", "prompts", "A", "B", "B - A", "95 %", "won/tied/lost", "p sign",
         "p permutation"]
    ]  # fmt: skip
    rows += [
        [
            c.data_source,
            c.metric,
            str(c.num_pairs),
            f"{c.mean_a:.3f}",
            f"{c.mean_b:.3f}",
            f"{c.difference.value:+.3f}",
            interval(c.difference, signed=True),
            f"{c.wins}/{c.ties}/{c.losses}",
            p_value(c.sign_p),
            p_value(c.permutation_p),
        ]
        for c in comparison.contrasts
    ]
    return [
        f"A: {name_a}",
        f"B: {name_b}",
        *aligned(rows),
        *left_out(comparison),
        verdict(comparison),
    ]


def left_out(comparison: Comparison) -> list[str]:
    """What is in one evaluation only, or differs between them."""
    lines = []
    if comparison.different:
        shown = "; ".join(comparison.different[:_SHOWN])
        lines.append(
            f"{len(comparison.different)} rows asked different things and are left out: {shown}"
            + (" …" if len(comparison.different) > _SHOWN else "")
        )
    if comparison.only_a or comparison.only_b:
        lines.append(f"{comparison.only_a} prompts are in A only and {comparison.only_b} in B only")
    if comparison.ungraded:
        lines.append(f"{comparison.ungraded} pairs lack a graded completion on one side")
    return lines


def verdict(comparison: Comparison) -> str:
    """One sentence about the mean over everything that was compared."""
    means = [c for c in comparison.contrasts if c.metric == "mean"]
    if not means:
        return "nothing was graded on both sides"
    return sentence(means[-1])


def sentence(c: Contrast) -> str:
    """What a contrast says, by its permutation test at the level of 5 %."""
    if c.permutation_p < 0.05:
        better = "B" if c.difference.value > 0 else "A"
        return f"{better} is better, beyond what chance explains ({_p(c)})"
    return f"no difference beyond what chance explains ({_p(c)})"


def _p(c: Contrast) -> str:
    return "p < 0.001" if c.permutation_p < 0.001 else f"p = {c.permutation_p:.3f}"


def figure(estimate: Estimate | None) -> str:
    """A mean with three digits; a dash where there is none."""
    return "–" if estimate is None else f"{estimate.value:.3f}"


def interval(estimate: Estimate | None, signed: bool = False) -> str:
    """`low to high`; a dash where there is none."""
    if estimate is None or estimate.low is None or estimate.high is None:
        return "–"
    sign = "+" if signed else ""
    return f"{estimate.low:{sign}.3f} to {estimate.high:{sign}.3f}"


def p_value(p: float) -> str:
    """Two digits, or a bound."""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines, columns two blanks apart: the first to the left, numbers to the right.

    What no terminal prints is shown as `?`: names come from data.
    """
    rows = [["".join(c if c.isprintable() else "?" for c in cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
