"""Follows a job to its end and shows it: bars on a terminal, plain lines elsewhere.

The coordinator is asked twice a second rather than streamed from, so that Ctrl-C and
the children's deaths are noticed at once whatever the network does.
"""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import click

from headway.errors import Conflict, Interrupted, NotFound, Unavailable
from headway.jobs import JobRecord
from headway.report_data import is_validation

if TYPE_CHECKING:
    from headway.client import HeadwayClient

_POLL_S = 0.5
_NAP_S = 0.1
_PATIENCE_S = 30.0  # the coordinator may be away for so long
_CANCEL_PATIENCE_S = 40.0  # the learner finishes its run folder in this time

Row = Mapping[str, Any]


class View(Protocol):
    """Shows a job to a person."""

    def event(self, row: Row) -> None:
        """Something happened."""

    def step(self, row: Row) -> None:
        """A step's metrics."""

    def record(self, record: JobRecord) -> None:
        """The job as it stands."""

    def say(self, text: str) -> None:
        """A remark of the command itself."""

    def close(self) -> None:
        """Leaves the terminal as it was."""


class Deaf:
    """A view whose reader may leave: the pipe is closed, the terminal gone.

    `unheard` says so; from then on nothing is shown, and nothing fails.
    """

    def __init__(self, view: View) -> None:
        self._view = view
        self.unheard = False

    def event(self, row: Row) -> None:
        """As the view's."""
        self.tell(lambda: self._view.event(row))

    def step(self, row: Row) -> None:
        """As the view's."""
        self.tell(lambda: self._view.step(row))

    def record(self, record: JobRecord) -> None:
        """As the view's."""
        self.tell(lambda: self._view.record(record))

    def say(self, text: str) -> None:
        """As the view's."""
        self.tell(lambda: self._view.say(text))

    def close(self) -> None:
        """As the view's."""
        self.tell(self._view.close)

    def tell(self, say: Callable[[], object]) -> None:
        """Says something else to the same reader."""
        if self.unheard:
            return
        try:
            say()
        except OSError as error:  # a full disk behind a log costs lines, not the job
            self.unheard = error.errno in (errno.EPIPE, errno.EIO)


def follow(
    client: HeadwayClient,
    job_id: str,
    view: Deaf,
    interrupted: Callable[[], int],
    tick: Callable[[], None] = lambda: None,
) -> JobRecord:
    """Shows a job until it has ended; returns its last record.

    `interrupted` counts Ctrl-C: at the first, or when nobody reads any more, the job is
    cancelled and its end awaited, at the second Interrupted is raised. `tick` is called at
    every look. Unavailable when the coordinator stays away.
    """
    cursors = {"events": "", "metrics": ""}
    away_since: float | None = None  # from the first call without an answer: we may have slept
    give_up: float | None = None
    while True:
        tick()
        if (interrupted() or view.unheard) and give_up is None:
            give_up = time.monotonic() + _CANCEL_PATIENCE_S
            view.say("cancelling; once more to stop at once")
            _cancel(client, job_id)
        try:
            record = client.job(job_id)
            _show_news(client, job_id, view, cursors)
            away_since = None
            view.record(record)
            if record.ended:
                return record
        except Unavailable:
            away_since = away_since or time.monotonic()
            if time.monotonic() - away_since > _PATIENCE_S:
                raise
        _nap(interrupted, give_up)


def _show_news(client: HeadwayClient, job_id: str, view: Deaf, cursors: dict[str, str]) -> None:
    while True:
        events = client.events(job_id, after=cursors["events"])
        metrics = client.metrics(job_id, after=cursors["metrics"])
        for row in events.rows:
            view.event(row)
        for row in metrics.rows:
            view.step(row)
        cursors["events"] = events.next_after or cursors["events"]
        cursors["metrics"] = metrics.next_after or cursors["metrics"]
        if not events.rows and not metrics.rows:
            return


def _cancel(client: HeadwayClient, job_id: str) -> None:
    try:
        client.cancel(job_id)
    except (Conflict, NotFound, Unavailable):
        return  # it has ended, or nobody is there to be asked: the fleet's stop ends it


def _nap(interrupted: Callable[[], int], give_up: float | None) -> None:
    """Half a second, cut short by Ctrl-C."""
    end, before = time.monotonic() + _POLL_S, interrupted()
    while time.monotonic() < end:
        if interrupted() > 1 or (give_up is not None and time.monotonic() > give_up):
            raise Interrupted("stopped before the job had ended")
        if interrupted() > before:
            return
        time.sleep(_NAP_S)


def open_view(total_steps: int) -> Deaf:
    """Bars where stdout is a terminal, plain lines elsewhere; without steps, of prompts."""
    if not total_steps:
        from headway.follow_eval import open_eval_view

        return open_eval_view()
    if sys.stdout.isatty():
        from headway.follow_live import LiveView

        return Deaf(LiveView(total_steps))
    return Deaf(PlainView(total_steps))


class PlainView:
    """One line an event and one a step, for logs and pipes."""

    def __init__(self, total_steps: int) -> None:
        self._total = total_steps
        self._waiting = ""

    def event(self, row: Row) -> None:
        """One line."""
        click.echo(event_line(row))

    def step(self, row: Row) -> None:
        """One line."""
        click.echo(validation_line(row) if is_validation(row) else step_line(row, self._total))

    def record(self, record: JobRecord) -> None:
        """A line when what the job waits for has changed."""
        if record.waiting_for and record.waiting_for != self._waiting:
            click.echo(f"waiting: {record.waiting_for}")
        self._waiting = record.waiting_for

    def say(self, text: str) -> None:
        """One line on stderr."""
        click.echo(text, err=True)

    def close(self) -> None:
        """Nothing to restore."""


def event_line(row: Row) -> str:
    """An event for people: its local time and message, or its kind where it has none."""
    moment = time.strftime("%H:%M:%S", time.localtime(float(row.get("time") or 0.0)))
    return f"{moment} {row.get('message') or row.get('kind', '')}"


def step_line(row: Row, total: int) -> str:
    """A step for people: reward, lag, rate, both pools' busy share, seconds."""
    return (
        f"step {row.get('step', '?')}/{total}"
        f"  reward {reward_of(row)}"
        f"  lag {figure(row, 'lag/mean', 2)} (max {figure(row, 'lag/max', 0)})"
        f"  {figure(row, 'rollout/tokens_per_s', 0)} tokens/s"
        f"  busy: rollout {share(row, 'pool/rollout_busy')},"
        f" learner {share(row, 'pool/learner_busy')}"
        f"  {figure(row, 'timing_s/step', 1)} s"
    )


def validation_line(row: Row) -> str:
    """A validation, or an eval job's end, for people: its version and the core figures."""
    core = sorted(name for name in row if name.startswith("val-core/"))
    figures = "  ".join(f"{name.removeprefix('val-core/')} {figure(row, name, 3)}" for name in core)
    return f"version {row.get('version', '?')}  {figures}"


def reward_of(row: Row) -> str:
    """The step's mean reward; a dash where there is none."""
    key = "critic/score/mean" if row.get("critic/score/mean") is not None else "critic/rewards/mean"
    return figure(row, key, 3)


def figure(row: Row, key: str, digits: int) -> str:
    """A number with so many digits after the point; a dash where there is none."""
    value = row.get(key)
    return f"{value:.{digits}f}" if isinstance(value, int | float) else "–"


def share(row: Row, key: str) -> str:
    """A fraction as a percentage; a dash where there is none."""
    value = row.get(key)
    return f"{value:.0%}" if isinstance(value, int | float) else "–"
