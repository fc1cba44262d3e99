"""Runs jobs to their end on the fleet at hand: another's, the one on this machine, or one's own."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress

import click

from headway.cli.interrupts import Interrupts
from headway.cli.options import connect
from headway.cli.plan import require_runnable
from headway.errors import Interrupted
from headway.fleet.spec import LocalFleetSpec
from headway.fleet.state import read_state
from headway.follow import follow, open_view
from headway.jobs import JobRecord
from headway.jobspec import JobSpec
from headway.plan_checks import check_job

Tick = Callable[[], None]


def run_jobs(
    spec: LocalFleetSpec, jobs: Sequence[JobSpec], interrupts: Interrupts, url: str | None = None
) -> Generator[JobRecord]:
    """Each job's last record, one after the other; none after one that did not succeed.

    They run on the fleet at `url`, or the one that is up on this machine; where none is, one is
    started for all of them and ended afterwards. InvalidSpec before anything is started when one
    of them cannot run. Consume it whole, or close it: it holds the fleet.
    """
    up = read_state(spec.state_dir)
    if url is not None:
        yield from _each(url, jobs, interrupts)
    elif up is not None and up.ready:
        click.echo(f"using the fleet at {up.api_url}; fleet options have no effect", err=True)
        for job in jobs:
            check_job(job)
        yield from _each(up.api_url, jobs, interrupts)
    else:
        for job in jobs:
            require_runnable(job, spec)
        yield from _on_own(spec, jobs, interrupts)


def _on_own(
    spec: LocalFleetSpec, jobs: Sequence[JobSpec], interrupts: Interrupts
) -> Iterator[JobRecord]:
    from headway.fleet.local import local_fleet  # what a bad job need not wait for

    with local_fleet(spec, interrupts, say) as fleet:
        yield from _each(fleet.api_url, jobs, interrupts, lambda: fleet.supervise(say), queue=True)


def _each(
    url: str,
    jobs: Sequence[JobSpec],
    interrupts: Interrupts,
    tick: Tick = lambda: None,
    queue: bool = False,
) -> Iterator[JobRecord]:
    for job in jobs:
        record = _run_on(url, job, interrupts, tick, queue)
        yield record
        if record.state != "succeeded":
            return


def _run_on(url: str, job: JobSpec, interrupts: Interrupts, tick: Tick, queue: bool) -> JobRecord:
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


def tell_end(record: JobRecord) -> None:
    """One line about how a job ended; nothing is wrong when nobody listens any more."""
    with suppress(OSError):
        if record.error is not None:
            click.echo(f"job {record.job_id} failed: {record.error.message}", err=True)
        elif record.total_steps:
            click.echo(f"job {record.job_id} {record.state} after {record.step} steps")
        else:
            click.echo(f"job {record.job_id} {record.state}")


def say(text: str) -> None:
    """Progress of the fleet itself: on stderr, so that stdout holds the job's lines only."""
    click.echo(text, err=True)
