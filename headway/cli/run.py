"""`headway run JOB.yaml`: a whole job in one command."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from headway.cli.exits import exit_code_of_job
from headway.cli.interrupts import Interrupts, counting_interrupts
from headway.cli.options import connect, fleet_options, fleet_spec, job_file, overrides, read_job
from headway.cli.plan import require_runnable
from headway.errors import Interrupted, NotFound, StorageFailed
from headway.fleet.spec import LocalFleetSpec
from headway.fleet.state import read_state
from headway.follow import follow, open_view
from headway.jobs import JobRecord
from headway.jobspec import JobSpec
from headway.plan_checks import check_job
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
        up = read_state(spec.state_dir)
        if up is not None and up.ready:
            click.echo(f"using the fleet at {up.api_url}; fleet options have no effect", err=True)
            check_job(job)
            return _finish(_run_on(up.api_url, job, interrupts))
        require_runnable(job, spec)
        return _finish(_run_on_own(spec, job, interrupts))


def _run_on_own(spec: LocalFleetSpec, job: JobSpec, interrupts: Interrupts) -> JobRecord:
    from headway.fleet.local import local_fleet  # what a bad job need not wait for

    with local_fleet(spec, interrupts, say) as fleet:
        return _run_on(fleet.api_url, job, interrupts, lambda: fleet.supervise(say), queue=True)


def _run_on(
    url: str,
    job: JobSpec,
    interrupts: Interrupts,
    tick: Callable[[], None] = lambda: None,
    queue: bool = False,
) -> JobRecord:
    with connect(url) as client:
        if interrupts():
            raise Interrupted("stopped before the job was submitted")
        record = client.submit(job, queue=queue)
        view = open_view(record.total_steps)
        view.tell(lambda: click.echo(f"job {record.job_id}: {url}/v1/jobs/{record.job_id}"))
        try:
            return follow(client, record.job_id, view, interrupts, tick)
        finally:
            view.close()


def _finish(record: JobRecord) -> int:
    """Says how it ended; the exit code is the job's, also when nobody listens any more."""
    with suppress(OSError):
        _say_end(record)
    return exit_code_of_job(record)


def _say_end(record: JobRecord) -> None:
    """Makes sure that the report is there, too."""
    if record.error is not None:
        click.echo(f"job {record.job_id} failed: {record.error.message}", err=True)
    else:
        click.echo(f"job {record.job_id} {record.state} after {record.step} steps")
    run_dir = Path(record.run_dir) if record.run_dir else None
    if run_dir is not None and run_dir.is_dir():
        try:
            report = run_dir / "report.html"
            click.echo(f"run folder {run_dir}")
            click.echo(f"report {report if report.exists() else write_report(run_dir)}")
        except NotFound:
            click.echo("nothing was recorded")
        except StorageFailed as error:
            click.echo(f"no report: {error}", err=True)


def say(text: str) -> None:
    """Progress of the fleet itself: on stderr, so that stdout holds the job's lines only."""
    click.echo(text, err=True)
