"""`headway report RUN_DIR`: writes a run's report again."""

from __future__ import annotations

from pathlib import Path

import click

from headway.cli.exits import SUCCEEDED
from headway.report import write_report


@click.command("report")
@click.argument("run_dir", metavar="RUN_DIR", type=click.Path(path_type=Path))
def command(run_dir: Path) -> int:
    """Write report.html of a run folder from what the folder holds, and print its path."""
    click.echo(str(write_report(run_dir)))
    return SUCCEEDED
