"""Rows of validations in metrics.jsonl, beside those of steps."""

from headway.report_data import read_run
from services.learner.run_folder import RunFolder
from services.learner.validation import validated


def test_they_outlive_the_retracing_of_steps_and_are_read_with_their_steps(tmp_path):
    folder = RunFolder(tmp_path)
    for step in (1, 2, 3):
        folder.append_metrics({"step": step, "version": step - 1, "critic/score/mean": step})
        if step == 2:
            folder.append_metrics({"step": 2, "version": 2, "val-core/x/reward/mean@1": 0.5})
    assert validated(folder) == {2}
    folder.truncate(1)
    assert validated(folder) == {2}
    folder.append_metrics({"step": 2, "version": 1, "critic/score/mean": 7.0})
    run = read_run(tmp_path)
    assert run.steps == (1.0, 2.0)
    assert run.column("val-core/x/reward/mean@1") == (None, 0.5)
    assert run.column("critic/score/mean") == (1.0, 7.0)
    assert [row["version"] for row in run.metrics] == [0, 1]  # the step's own
