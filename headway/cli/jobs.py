"""`headway jobs [JOB]`: the jobs of a fleet, or one of them."""

from __future__ import annotations

import json
import time

import click

from headway.cli.exits import SUCCEEDED
from headway.cli.options import api, as_json, connect
from headway.jobs import JobRecord, record_to_dict


@click.command("jobs")
@click.argument("job_id", required=False)
@api
@as_json
def command(job_id: str | None, url: str | None, as_json: bool) -> int:
    """List jobs, newest first, or show one."""
    with connect(url) as client:
        records = [client.job(job_id)] if job_id else client.jobs()
    if as_json:
        plain = [record_to_dict(record) for record in records]
        click.echo(json.dumps(plain[0] if job_id else plain, indent=2))
    elif not records:
        click.echo("no jobs")
    else:
        click.echo(_table(records))
    return SUCCEEDED


def _table(records: list[JobRecord]) -> str:
    rows = [("JOB", "STATE", "STEP", "CREATED", "")]
    for record in records:
        created = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created_at))
        remark = record.error.message if record.error else record.waiting_for
        step = f"{record.step}/{record.total_steps}" if record.total_steps else f"{record.step}"
        rows.append((record.job_id, record.state, step, created, remark))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join(
        "  ".join([*(row[i].ljust(widths[i]) for i in range(4)), row[4]]).rstrip() for row in rows
    )
