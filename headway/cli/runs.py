"""Run folders, as commands are told of them."""

from __future__ import annotations

from pathlib import Path

import click

from headway.errors import InvalidSpec

runs_dir = click.option(
    "--runs-dir", type=click.Path(path_type=Path, file_okay=False), default=Path("runs"),
    show_default=True, help="Where run folders are.",
)  # fmt: skip


def find_run(run: str, folder: Path) -> Path:
    """The run folder that is meant: a path, or a job's id. InvalidSpec when there is none."""
    given = Path(run)
    found = given if (given / "job.yaml").is_file() else folder / run
    if not (found / "job.yaml").is_file():
        raise InvalidSpec(f"{run!r} is neither a run folder nor a job in {folder} (--runs-dir)")
    return found.absolute()
