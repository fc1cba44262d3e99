"""`headway events JOB`: what happened in a job."""

from __future__ import annotations

import json

import click

from headway.cli.exits import SUCCEEDED
from headway.cli.options import api, as_json, connect
from headway.follow import event_line


@click.command("events")
@click.argument("job_id")
@api
@click.option("--follow", "wait", is_flag=True, help="Go on until the job has ended.")
@as_json
def command(job_id: str, url: str | None, wait: bool, as_json: bool) -> int:
    """Show what happened in a job, oldest first. --json: one object a line."""
    with connect(url) as client:
        if wait:
            for update in client.follow(job_id):
                if update.kind == "event":
                    _show(update.row, as_json)
            return SUCCEEDED
        after = ""
        while (page := client.events(job_id, after=after)).rows:
            for row in page.rows:
                _show(row, as_json)
            after = page.next_after
            if not after:
                break
    return SUCCEEDED


def _show(row: dict[str, object], as_json: bool) -> None:
    click.echo(json.dumps(row) if as_json else event_line(row))
