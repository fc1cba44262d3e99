"""`headway report RUN_DIR`: writes a run's report again."""

from __future__ import annotations

from pathlib import Path

import click

from headway.cli.exits import SUCCEEDED
from headway.cli.runs import runs_dir
from headway.evaluation.finished import is_eval_job, read_evaluation, write_metrics
from headway.evaluation.report import write_eval_report
from headway.report import write_report


@click.command("report")
@click.argument("run", metavar="RUN")
@runs_dir
def command(run: str, runs_dir: Path) -> int:
    """Write report.html of a run folder from what the folder holds, and print its path.

    RUN is a run folder or a job's id; of an eval job's the tables are written too.
    """
    given = Path(run)
    named = runs_dir / run
    folder = named if named.is_dir() and not given.exists() else given
    if is_eval_job(folder):
        evaluation = read_evaluation(folder)
        write_metrics(evaluation)
        click.echo(str(write_eval_report(evaluation)))
    else:
        click.echo(str(write_report(folder)))
    return SUCCEEDED
