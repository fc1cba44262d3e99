"""What commands do with a finished evaluation: its table, `metrics.json` and `report.html`."""

from __future__ import annotations

from pathlib import Path

import click

from headway.evaluation.finished import Evaluation, read_evaluation, write_metrics
from headway.evaluation.report import write_eval_report
from headway.evaluation.text import table_lines


def show_evaluation(run_dir: Path, quiet: bool = False) -> Evaluation:
    """Prints an eval job's table and writes its files. NotFound when nothing was recorded."""
    evaluation = read_evaluation(run_dir)
    metrics, report = write_metrics(evaluation), write_eval_report(evaluation)
    if not quiet:
        lines = [evaluation.model, *table_lines(evaluation.tables)]
        click.echo("\n".join([*lines, f"metrics {metrics}", f"report {report}"]))
    return evaluation
