"""An eval job as people watch it: a bar over its prompts, or a line now and then."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import click

from headway.follow import Deaf, event_line, validation_line
from headway.jobs import JobRecord

_LINES = 10  # progress lines of a whole job

Row = Mapping[str, Any]


def open_eval_view() -> Deaf:
    """A bar where stdout is a terminal, plain lines elsewhere."""
    return Deaf(EvalBar() if sys.stdout.isatty() else EvalLines())


class EvalLines:
    """One line an event, and ten over the prompts of the job."""

    def __init__(self) -> None:
        self._total = 0  # prompts; 0: not known yet
        self._told = 0
        self._waiting = ""

    def event(self, row: Row) -> None:
        """One line."""
        self._total = total_of(row) or self._total
        click.echo(event_line(row))

    def step(self, row: Row) -> None:
        """The core figures at the end, in one line."""
        click.echo(validation_line(row))

    def record(self, record: JobRecord) -> None:
        """How many prompts are done, when it is a tenth more than it was."""
        if record.waiting_for and record.waiting_for != self._waiting:
            click.echo(f"waiting: {record.waiting_for}")
        self._waiting = record.waiting_for
        if record.step - self._told >= max(1, self._total / _LINES):
            self._told = record.step
            click.echo(f"{record.step} of {self._total or '?'} prompts")

    def say(self, text: str) -> None:
        """One line on stderr."""
        click.echo(text, err=True)

    def close(self) -> None:
        """Nothing to restore."""


class EvalBar:
    """A bar that is redrawn in place; events scroll by above it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._console = Console(highlight=False)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("prompts"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            expand=True,
        )
        self._task = self._progress.add_task("starting", total=None)
        self._progress.start()

    def event(self, row: Row) -> None:
        """A line above the bar; the one that says how many prompts there are sets its end."""
        if total := total_of(row):
            self._progress.update(self._task, total=total)
        self._line(event_line(row), "dim")

    def step(self, row: Row) -> None:
        """The core figures at the end, in one line above the bar."""
        self._line(validation_line(row), "green")

    def record(self, record: JobRecord) -> None:
        """The bar, and its caption."""
        caption = record.state + (f" ({record.waiting_for})" if record.waiting_for else "")
        self._progress.update(self._task, description=caption, completed=record.step)

    def say(self, text: str) -> None:
        """A line above the bar."""
        self._line(text, "yellow")

    def close(self) -> None:
        """Stops redrawing; the last state stays."""
        self._progress.stop()

    def _line(self, text: str, style: str) -> None:
        from rich.text import Text

        self._console.print(Text(text, style=style))


def total_of(row: Row) -> int:
    """The prompts of the job, from the event that counts them; 0 in all others."""
    prompts = row.get("prompts")
    counted = row.get("kind") == "starting" and isinstance(prompts, int)
    return int(prompts) if counted and prompts is not None else 0
