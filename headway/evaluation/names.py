"""A table's figures under the names that verl's users plot.

`val-core/<data_source>/reward/…` has `mean@n`, `best@n/mean`, `maj@n/mean` (and ours, `pass@n`)
of the largest n; everything else is under `val-aux/`, as verl sorts them. `reward` is the
grader's; the parts of a composed grader have their own names. What we add: `…/stderr` of the
mean, `graded_ratio`, `num_prompts`, `num_skipped`.
"""

from __future__ import annotations

from collections.abc import Iterable

from headway.evaluation.metrics import Table

_CORE = ("mean@", "best@", "maj@", "pass@")


def val_metrics(found: Iterable[Table]) -> dict[str, float]:
    """The figures of all tables as one metrics row. What could not be graded has no figure."""
    row: dict[str, float] = {}
    for table in found:
        source, n = table.data_source, table.n
        for name, estimate in table.estimates.items():
            core = name.startswith(_CORE) and name.partition("/")[0].endswith(f"@{n}")
            row[f"{'val-core' if core else 'val-aux'}/{source}/reward/{name}"] = estimate.value
        if table.mean is not None and table.mean.stderr is not None:
            row[f"val-aux/{source}/reward/mean@{n}/stderr"] = table.mean.stderr
        for part, estimate in table.parts.items():
            row[f"val-aux/{source}/{part}/mean@{n}"] = estimate.value
        if table.num_completions:
            row[f"val-aux/{source}/graded_ratio"] = table.num_graded / table.num_completions
        row[f"val-aux/{source}/num_prompts"] = float(table.num_prompts)
        row[f"val-aux/{source}/num_skipped"] = float(table.num_skipped)
        if table.mean_tokens is not None and table.cut_ratio is not None:
            row[f"val-aux/{source}/response_length/mean"] = table.mean_tokens
            row[f"val-aux/{source}/response_length/clip_ratio"] = table.cut_ratio
    return row
