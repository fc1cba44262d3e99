"""An eval job as people watch it."""

import dataclasses

import pytest

from headway.follow import open_view
from headway.follow_eval import EvalBar, EvalLines, total_of
from headway.jobs import JobRecord

STARTING = {"kind": "starting", "message": "40 prompts x 4 completions", "prompts": 40, "left": 40}
RECORD = JobRecord("eval-1", {}, "", 0.0, 0.0, state="running")


def at(done, **more):
    return dataclasses.replace(RECORD, step=done, **more)


def test_ten_lines_tell_the_way(capsys):
    view = open_view(0)
    view.event({"kind": "submitted", "message": "submitted: eval", "prompts": 9})
    view.record(at(0, waiting_for="rollout nodes"))
    view.record(at(0, waiting_for="rollout nodes"))
    view.event(STARTING)
    for done in range(41):
        view.record(at(done))
    view.step({"step": 0, "version": 0, "val-core/sums/reward/mean@4": 0.5, "val-aux/x": 1})
    view.close()
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "waiting: rollout nodes"
    assert lines[2].endswith("40 prompts x 4 completions")
    assert lines[3:-1] == [f"{done} of 40 prompts" for done in range(4, 41, 4)]
    assert lines[-1] == "version 0  sums/reward/mean@4 0.500"


def test_a_job_that_went_on_tells_where_it_is(capsys):
    view = EvalLines()
    view.record(at(30))
    view.event(STARTING)
    view.record(at(33))
    view.record(at(34))
    assert [line for line in capsys.readouterr().out.splitlines() if line.endswith("prompts")] == [
        "30 of ? prompts",
        "34 of 40 prompts",
    ]


@pytest.mark.parametrize(
    "row",
    [{}, {"kind": "starting"}, {"kind": "x", "prompts": 3}, {"kind": "starting", "prompts": "3"}],
)
def test_only_the_start_counts_prompts(row):
    assert total_of(row) == 0


def test_the_bar_ends_where_the_job_does(capsys):
    view = EvalBar()
    view.event(STARTING)
    view.record(at(40))
    view.say("cancelling")
    view.close()
    shown = capsys.readouterr().out
    assert "40/40" in shown and "cancelling" in shown and "running" in shown
