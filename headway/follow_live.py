"""A job on a terminal: a bar over the steps, live figures, a reward line."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as Remaining
from rich.table import Table
from rich.text import Text

from headway.follow import event_line, figure, reward_of, share, validation_line
from headway.jobs import JobRecord
from headway.report_data import is_validation

_BLOCKS = "▁▂▃▄▅▆▇█"
_LINE_WIDTH = 48
_QUIET_EVENTS = {"weights_published"}  # one a step: the bar tells it


class LiveView:
    """Bars and figures that are redrawn in place; events scroll by above them."""

    def __init__(self, total_steps: int) -> None:
        self._console = Console(highlight=False)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TimeElapsedColumn(),
            TextColumn("left"),
            Remaining(),
            console=self._console,
            expand=True,
        )
        self._task = self._progress.add_task("starting", total=total_steps)
        self._rewards: deque[float] = deque(maxlen=_LINE_WIDTH)
        self._row: Mapping[str, Any] = {}
        self._live = Live(self._drawing(), console=self._console, refresh_per_second=4)
        self._live.start()

    def event(self, row: Mapping[str, Any]) -> None:
        """A line above the bars."""
        if row.get("kind") not in _QUIET_EVENTS:
            self._console.print(Text(event_line(row), style="dim"))

    def step(self, row: Mapping[str, Any]) -> None:
        """New figures; those of a validation as a line above the bars."""
        if is_validation(row):
            self._console.print(Text(validation_line(row), style="green"))
            return
        self._row = row
        reward = row.get("critic/score/mean", row.get("critic/rewards/mean"))
        if isinstance(reward, int | float):
            self._rewards.append(float(reward))
        self._progress.update(self._task, completed=int(row.get("step") or 0))
        self._live.update(self._drawing())

    def record(self, record: JobRecord) -> None:
        """The bar's caption."""
        caption = record.state + (f" ({record.waiting_for})" if record.waiting_for else "")
        self._progress.update(self._task, description=caption)

    def say(self, text: str) -> None:
        """A line above the bars."""
        self._console.print(Text(text, style="yellow"))

    def close(self) -> None:
        """Stops redrawing; the last state stays."""
        self._live.stop()

    def _drawing(self) -> Group:
        figures = Table.grid(padding=(0, 3))
        names = (
            "reward",
            "lag mean",
            "lag max",
            "tokens/s",
            "rollout busy",
            "learner busy",
            "s/step",
        )
        figures.add_row(*(Text(name, style="dim") for name in names))
        row = self._row
        figures.add_row(
            Text(reward_of(row), style="bold green"),
            figure(row, "lag/mean", 2),
            figure(row, "lag/max", 0),
            figure(row, "rollout/tokens_per_s", 0),
            share(row, "pool/rollout_busy"),
            share(row, "pool/learner_busy"),
            figure(row, "timing_s/step", 1),
        )
        return Group(figures, Text(spark_line(self._rewards), style="green"), self._progress)


def spark_line(values: deque[float]) -> str:
    """Values as a line of blocks, from their least to their greatest; empty when there are none."""
    if not values:
        return ""
    low, span = min(values), max(values) - min(values)
    top = len(_BLOCKS) - 1
    return "".join(_BLOCKS[round((v - low) / span * top) if span else 0] for v in values)
