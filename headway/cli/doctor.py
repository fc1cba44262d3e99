"""`headway doctor JOB`: who waits for whom in a job."""

from __future__ import annotations

import json
from typing import Any

import click

from headway.cli.exits import FAILED, SUCCEEDED
from headway.cli.options import api, api_url, as_json, connect
from headway.errors import Unavailable
from headway.fleet.state import default_state_dir, read_state
from headway.jobs import progress

_MARKS = {"ok": "ok   ", "waits": "waits", "stuck": "STUCK"}


@click.command("doctor")
@click.argument("job_id")
@api
@click.option(
    "--limit",
    "limit_s",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds that anything may wait.",
)
@as_json
def command(job_id: str, url: str | None, limit_s: float, as_json: bool) -> int:
    """Say who waits for whom in a job, and for how long.

    Exit codes: 0 healthy, 1 something is stuck or waits longer than the limit, 2 no such
    job, 3 the coordinator is unreachable.
    """
    from headway.rest import understood  # httpx is slow to load: --help need not wait for it

    address = api_url(url)
    try:
        with connect(address) as client:
            seen = client.waits(job_id, limit_s)
    except Unavailable as error:
        raise Unavailable(f"{error}{_local_processes(url)}") from None
    with understood(address):
        text, healthy = _text(seen), seen["healthy"]
    click.echo(json.dumps(seen, indent=2) if as_json else text)
    return SUCCEEDED if healthy else FAILED


def _text(seen: dict[str, Any]) -> str:
    job = seen["job"]
    lines = [f"job {job['job_id']}: {job['state']}, {progress(job['step'], job['total_steps'])}"]
    for finding in seen["findings"]:
        waited = f"  [{finding['waited_s']:.0f} s]" if finding["waited_s"] else ""
        lines.append(f"{_MARKS[finding['level']]}  {finding['text']}{waited}")
    if job["events"]:
        lines.append("last events:")
        lines += [f"  {row.get('message') or row.get('kind', '')}" for row in job["events"]]
    return "\n".join(lines)


def _local_processes(url: str | None) -> str:
    """Of the fleet on this machine: which of its processes have ended."""
    state = None if url else read_state(default_state_dir())
    if state is None:
        return ""
    gone = [record.name for record in state.processes if record.process() is None]
    return f"; of the fleet on this machine {', '.join(gone)} ended" if gone else ""
