"""`headway run JOB.yaml`: a whole job in one command."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from headway.cli.evaluated import show_evaluation
from headway.cli.exits import exit_code_of_job
from headway.cli.interrupts import counting_interrupts
from headway.cli.options import fleet_options, fleet_spec, job_file, overrides, read_job
from headway.cli.running import run_jobs, tell_end
from headway.errors import NotFound, StorageFailed
from headway.evaluation.finished import is_eval_job
from headway.jobs import JobRecord
from headway.report import write_report


@click.command("run")
@job_file
@overrides
@fleet_options
def command(job_file: Path, overrides: tuple[str, ...], **fleet: Any) -> int:
    """Run a job from its start to its end, and show it live.

    Uses the fleet that is up on this machine; where none is, starts one and ends it
    afterwards. Ctrl-C cancels the job, a second one stops everything at once.
    """
    job = read_job(job_file, overrides)
    spec = fleet_spec(**fleet, ephemeral=True)
    with counting_interrupts() as interrupts:
        (record,) = run_jobs(spec, [job], interrupts)
    with suppress(OSError):  # the exit code is the job's, also when nobody listens any more
        _say_end(record)
    return exit_code_of_job(record)


def _say_end(record: JobRecord) -> None:
    """Makes sure that the report is there, too."""
    tell_end(record)
    run_dir = Path(record.run_dir) if record.run_dir else None
    if run_dir is None or not run_dir.is_dir():
        return
    try:
        click.echo(f"run folder {run_dir}")
        if is_eval_job(run_dir):
            show_evaluation(run_dir)
            return
        report = run_dir / "report.html"
        click.echo(f"report {report if report.exists() else write_report(run_dir)}")
    except NotFound:
        click.echo("nothing was recorded")
    except StorageFailed as error:
        click.echo(f"no report: {error}", err=True)
