"""`headway up`: a fleet on this machine, until Ctrl-C or `headway down`."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

import click

from headway.cli.exits import CANCELLED, FAILED, SUCCEEDED
from headway.cli.interrupts import Interrupts, counting_interrupts
from headway.cli.options import connect, fleet_options, fleet_spec
from headway.errors import HeadwayError
from headway.fleet.local import LocalFleet, local_fleet
from headway.fleet.spec import LocalFleetSpec
from headway.fleet.state import instance_lock, make_folder, read_state

_CANCEL_PATIENCE_S = 30.0


@click.command("up")
@fleet_options
@click.option("--detach", is_flag=True, help="Leave it running in the background.")
def command(detach: bool, **fleet: Any) -> int:
    """Start a fleet on this machine: Redis, coordinator, reward, learner, rollout nodes.

    Runs until Ctrl-C or `headway down`; jobs that run then are cancelled first.
    """
    spec = fleet_spec(**fleet)
    if detach:
        return _detached(spec)
    with counting_interrupts() as interrupts:
        with local_fleet(spec, interrupts, say) as running:
            click.echo(f"up: {running.api_url} (logs in {spec.state_dir / 'logs'})")
            sys.stdout.flush()
            try:
                while not interrupts():
                    running.supervise(say)
                    time.sleep(0.2)
            finally:
                _cancel_jobs(running, interrupts)
        click.echo("down")
        return CANCELLED if interrupts.by_terminal else SUCCEEDED


def say(text: str) -> None:
    """Progress, on stderr."""
    click.echo(text, err=True)


def _cancel_jobs(fleet: LocalFleet, interrupts: Interrupts) -> None:
    """Cancels what runs and waits, within limits, until the run folders are complete."""
    with suppress(HeadwayError), connect(fleet.api_url) as client:
        waiting = [job.job_id for job in client.jobs() if not job.ended]
        for job_id in waiting:
            say(f"cancelling job {job_id}")
            with suppress(HeadwayError):
                client.cancel(job_id)
        end = time.monotonic() + _CANCEL_PATIENCE_S
        while waiting and time.monotonic() < end and interrupts() < 2:
            time.sleep(0.2)
            waiting = [job_id for job_id in waiting if not client.job(job_id).ended]


def _detached(spec: LocalFleetSpec) -> int:
    """Runs the same command in the background and waits until its fleet is ready."""
    with instance_lock(spec.state_dir):  # a fleet that is up keeps its log
        log = spec.state_dir / "logs" / "up.log"
        make_folder(log.parent, "the fleet's state (HEADWAY_STATE)")
    arguments = [argument for argument in sys.argv[1:] if argument != "--detach"]
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "headway.cli", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    told = 0
    with counting_interrupts() as interrupts:
        while process.poll() is None:
            state = read_state(spec.state_dir)
            if not told and state and state.ready and state.supervisor.pid == process.pid:
                click.echo(f"up: {state.api_url} (end it with `headway down`)")
                return SUCCEEDED
            if interrupts() > told:
                if not told:
                    say("ending what was started; once more to stop at once")
                told += 1
                process.terminate()
            time.sleep(0.1)
        if told:
            return CANCELLED
    click.echo(log.read_text(errors="replace"), err=True, nl=False)
    return process.returncode or FAILED
