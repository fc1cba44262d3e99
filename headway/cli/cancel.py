"""`headway cancel JOB`: asks for a job's end."""

from __future__ import annotations

import json

import click

from headway.cli.exits import SUCCEEDED
from headway.cli.options import api, as_json, connect
from headway.jobs import record_to_dict


@click.command("cancel")
@click.argument("job_id")
@api
@as_json
def command(job_id: str, url: str | None, as_json: bool) -> int:
    """Cancel a job; its run folder is completed first. Safe to repeat."""
    with connect(url) as client:
        record = client.cancel(job_id)
    click.echo(json.dumps(record_to_dict(record)) if as_json else f"{job_id} {record.state}")
    return SUCCEEDED
