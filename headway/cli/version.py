"""`headway version`."""

from __future__ import annotations

import click

from headway import __version__
from headway.cli.exits import SUCCEEDED


@click.command("version")
def command() -> int:
    """Show the version."""
    click.echo(f"headway {__version__}")
    return SUCCEEDED
