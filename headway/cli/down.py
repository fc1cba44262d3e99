"""`headway down`: ends the fleet on this machine, and nothing else."""

from __future__ import annotations

import click

from headway.cli.exits import SUCCEEDED
from headway.fleet.state import default_state_dir, read_state, stop_recorded

_PATIENCE_S = 75.0  # a run cancels its job (40 s), then stops its children (25 s)


@click.command("down")
def command() -> int:
    """End the fleet on this machine; jobs that run are cancelled first.

    Only the recorded processes are ended, and only if they are still the same.
    """
    state_dir = default_state_dir()
    if read_state(state_dir) is not None:
        click.echo("ending the fleet; jobs that run are cancelled first", err=True)
    ended = stop_recorded(state_dir, _PATIENCE_S)
    click.echo(f"ended {', '.join(ended)}" if ended else "nothing is up")
    return SUCCEEDED
