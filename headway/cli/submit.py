"""`headway submit JOB.yaml`: hands a job to a fleet that is up."""

from __future__ import annotations

import json
from pathlib import Path

import click

from headway.cli.exits import SUCCEEDED, exit_code_of_job
from headway.cli.interrupts import counting_interrupts
from headway.cli.options import (
    api,
    api_url,
    as_json,
    connect,
    is_local,
    job_file,
    overrides,
    read_job,
)
from headway.follow import follow, open_view
from headway.jobs import record_to_dict
from headway.plan_checks import check_job


@click.command("submit")
@job_file
@overrides
@api
@click.option("--id", "job_id", help="The job's id; the same id and job again is the same job.")
@click.option("--queue", is_flag=True, help="Let it wait when the fleet lacks what it needs.")
@click.option("--follow", "wait", is_flag=True, help="Show it until it has ended.")
@as_json
def command(
    job_file: Path,
    overrides: tuple[str, ...],
    url: str | None,
    job_id: str | None,
    queue: bool,
    wait: bool,
    as_json: bool,
) -> int:
    """Hand a job to a running fleet and print its id.

    With --follow, Ctrl-C cancels the job, and the exit code is the job's.
    """
    job = read_job(job_file, overrides)
    address = api_url(url)
    if is_local(address):
        check_job(job)
    with counting_interrupts() as interrupts, connect(address) as client:
        record = client.submit(job, job_id=job_id, queue=queue)
        said = json.dumps(record_to_dict(record)) if as_json else record.job_id
        if not wait:
            click.echo(said)
            return SUCCEEDED
        view = open_view(record.total_steps)
        view.tell(lambda: click.echo(said))
        try:
            return exit_code_of_job(follow(client, record.job_id, view, interrupts))
        finally:
            view.close()
