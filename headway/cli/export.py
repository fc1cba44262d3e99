"""`headway export RUN`: a run's checkpoint as a Hugging Face folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

from headway.cli.exits import BAD_USAGE, FAILED, SUCCEEDED
from headway.cli.runs import find_run, runs_dir
from headway.errors import Conflict


@click.command("export")
@click.argument("run", metavar="RUN")
@runs_dir
@click.option("--step", type=click.IntRange(min=0), help="Of which step. Default: the newest.")
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False),
    help="The folder to make. Default: RUN/export, or RUN/export-N with --step N.",
)  # fmt: skip
def command(run: str, runs_dir: Path, step: int | None, out: Path | None) -> int:
    """Write a run's checkpoint as a Hugging Face folder.

    RUN is a run folder or a job's id. Needs no fleet: the run may go on meanwhile. The weights
    are in the base model's own dtype, tokenizer and config are the base model's.
    """
    run_dir = find_run(run, runs_dir)
    target = out or run_dir / ("export" if step is None else f"export-{step}")
    if target.exists():
        raise Conflict(f"{target} is there already: choose another --out")
    argv = [
        sys.executable, "-P", "-m", "services.learner.export_run",
        "--run-dir", str(run_dir), "--out", str(target.absolute()),
    ]  # fmt: skip
    if step is not None:
        argv += ["--step", str(step)]
    done = subprocess.run(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is ours: we end it, without its last cry
    )
    if done.returncode:
        return BAD_USAGE if done.returncode == BAD_USAGE else FAILED
    click.echo(f"step {done.stdout.split()[-1]} of {run_dir.name} is in {target}")
    return SUCCEEDED
