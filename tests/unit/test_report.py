"""The report of a run folder made by hand; its numbers are looked up in the drawing."""

import json
import re
from pathlib import Path

import pytest

from headway.errors import NotFound
from headway.report import flatten, mean_of_edge, write_report
from headway.report_data import plain_prompt, read_run, sample_lines
from headway.report_svg import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Series,
    line_chart,
    nice,
    scale_of,
    stack_chart,
    step_marks,
)


def run_folder(path: Path, num_steps: int = 11) -> Path:
    path.mkdir()
    (path / "job.yaml").write_text(
        "model: {path: some/model}\nseed: 7\nalgorithm: {max_policy_lag: 2}\n"
        "trainer: {total_training_steps: 20}\n"
    )
    (path / "environment.json").write_text('{"packages": {"torch": "2.13.0"}, "commit": null}')
    rows = [
        {
            "step": step,
            "time": 1000.0 + 2 * step,
            "critic/score/mean": step / 10,
            "critic/score/min": 0.0,
            "critic/score/max": 1.0,
            "lag/mean": 1.0,
            "lag/max": 2,
            "timing_s/take": 0.5,
            "timing_s/train": 1.0,
            "timing_s/stage": 0.25,
            "timing_s/step": 2.0,
            "pool/rollout_busy": 0.75,
            "pool/learner_busy": 0.5,
            "actor/grad_norm": float("nan") if step == 3 else None if step == 4 else 1.5,
            "ledger/consumed": 8 * step,
        }
        for step in range(1, num_steps + 1)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    samples = [
        {
            "step": step,
            "prompt": [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": "1 < 2 & so on?"},
            ],
            "completions": [
                {"text": f"<script>alert({step})</script>", "reward": 0.25},
                {"text": "yes", "reward": None},
            ],
        }
        for step in (1, 5, 11)
    ]
    (path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    return path


def test_numbers_of_the_page(tmp_path):
    run = run_folder(tmp_path / "run")
    page = write_report(run).read_text()
    # mean of 0.1 … 0.5 and of 0.7 … 1.1
    assert "0.3 → 0.9" in page
    assert "11 of 20" in page
    assert "22.0 s" in page  # ten steps of 2 s between the rows, and the first one
    assert "1 / 2" in page
    assert "75% / 50%" in page
    assert 'class="limit"' in page
    assert "other</span>" not in page.split("Time of a step")[0]
    assert "other <b>0.25</b>" in page  # 2.0 - 0.5 - 1.0 - 0.25
    assert "<td>88</td>" in page  # ledger/consumed at the last step
    assert "torch" in page
    assert "2.13.0" in page


def test_the_page_stands_alone_and_escapes_what_models_say(tmp_path):
    page = write_report(run_folder(tmp_path / "run")).read_text()
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "1 &lt; 2 &amp; so on?" in page
    assert "alert(11)" in page
    assert "alert(5)" not in page  # early and late steps only
    assert not re.search(r"""(?:src|href)\s*=|url\(|@import|https?://""", page)
    assert "prefers-color-scheme:dark" in page


def test_the_reward_line_is_drawn_where_its_numbers_are(tmp_path):
    page = write_report(run_folder(tmp_path / "run")).read_text()
    figure = page.split("<h3>Reward</h3>")[1].split("</figure>")[0]
    points = re.search(r'polyline class="s1 line" points="([^"]+)"', figure).group(1).split()
    assert len(points) == 11
    # rewards 0.1 … 1.1, min 0, max 1: the axis runs from 0 to 1.5 in steps of 0.5
    x, y = (float(v) for v in points[0].split(","))
    assert x == pytest.approx(LEFT, abs=0.1)
    assert y == pytest.approx(TOP + (1.5 - 0.1) / 1.5 * (HEIGHT - TOP - BOTTOM), abs=0.1)
    x, y = (float(v) for v in points[-1].split(","))
    assert x == pytest.approx(WIDTH - RIGHT, abs=0.1)
    assert y == pytest.approx(TOP + (1.5 - 1.1) / 1.5 * (HEIGHT - TOP - BOTTOM), abs=0.1)


def test_nan_and_null_leave_a_gap_not_a_zero(tmp_path):
    page = write_report(run_folder(tmp_path / "run")).read_text()
    figure = page.split("<h3>Gradient norm</h3>")[1].split("</figure>")[0]
    lines = re.findall(r'polyline class="s1 line" points="([^"]+)"', figure)
    assert [len(line.split()) for line in lines] == [2, 7]  # steps 1-2 and 5-11


@pytest.mark.parametrize("missing", ["job.yaml", "environment.json", "samples.jsonl"])
def test_a_missing_file_is_no_error(tmp_path, missing):
    run = run_folder(tmp_path / "run")
    (run / missing).unlink()
    assert "0.3 → 0.9" in write_report(run).read_text()


def test_a_run_cancelled_before_its_first_step(tmp_path):
    run = run_folder(tmp_path / "run")
    (run / "metrics.jsonl").unlink()
    page = write_report(run).read_text()
    assert "No step was finished." in page
    assert "0 of 20" in page


def test_one_step_is_a_dot(tmp_path):
    page = write_report(run_folder(tmp_path / "run", num_steps=1)).read_text()
    figure = page.split("<h3>Reward</h3>")[1].split("</figure>")[0]
    assert 'circle class="s1 fill"' in figure


def test_a_torn_last_line_and_a_retraced_step(tmp_path):
    run = run_folder(tmp_path / "run", num_steps=3)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "critic/score/mean": 0.9}\n{"step": 4, "crit')
    data = read_run(run)
    assert data.steps == (1.0, 2.0, 3.0)
    assert data.column("critic/score/mean") == (0.1, 0.9, 0.3)  # the later row counts
    assert data.column("lag/max") == (2.0, None, 2.0)


def test_no_run_folder(tmp_path):
    with pytest.raises(NotFound, match="there is no run folder"):
        write_report(tmp_path / "absent")
    with pytest.raises(NotFound, match=r"neither job\.yaml nor metrics"):
        write_report(tmp_path)


def test_means_of_the_edges():
    values = [None, 1.0, 2.0, float("nan"), 3.0, 9.0, 9.0]
    assert mean_of_edge(values, last=False) == 2.0
    assert mean_of_edge(values, last=True) == pytest.approx((2 + 3 + 9 + 9) / 4)
    assert mean_of_edge([None], last=True) is None


def test_scale_holds_all_values_with_round_ticks():
    scale = scale_of([1, 30], [0.13, 0.87, None, float("inf")])
    assert scale.ticks == pytest.approx((0.0, 0.2, 0.4, 0.6, 0.8, 1.0))
    assert (scale.low, scale.high) == pytest.approx((0.0, 1.0))
    assert scale.x(1) == LEFT
    assert scale.y(scale.high) == TOP
    flat = scale_of([1, 2], [3.0, 3.0])
    assert flat.low < 3.0 < flat.high


def test_steps_under_the_axis_are_round():
    assert step_marks(1, 30) == [1, 10, 20, 30]
    assert step_marks(1, 4) == [1, 2, 3, 4]
    assert step_marks(1, 1) == [1]
    assert step_marks(401, 900) == [401, 500, 600, 700, 800, 900]


def test_parts_of_a_composed_reward_have_their_own_chart(tmp_path):
    run = run_folder(tmp_path / "run")
    assert "Reward by part" not in write_report(run).read_text()
    rows = [{"step": 1, "reward/format/mean": 0.75, "reward/correct/mean": 0.5}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = write_report(run).read_text()
    assert "Reward by part" in page
    assert "correct <b>0.5</b>" in page
    assert "format <b>0.75</b>" in page


def test_validations_have_charts_over_the_steps_that_were_evaluated(tmp_path):
    folder = run_folder(tmp_path / "run")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        if row["step"] in (5, 10):
            row["val-core/a/b/reward/mean@4"] = row["step"] / 10
            row["val-core/other/reward/mean@4"] = 0.25
            row["val-core/other/reward/best@4/mean"] = 0.3
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = write_report(folder).read_text()
    (figure,) = re.findall(r"<figure><h3>Validation: mean@4</h3>.*?</figure>", page)
    assert "best@4" not in page
    first, second = re.findall(r'<polyline class="s\d line" points="([^"]*)"', figure)
    # steps 5 and 10 span the whole axis: one line from edge to edge, nothing missing between
    assert [point.split(",")[0] for point in first.split()] == [
        f"{LEFT:.1f}",
        f"{WIDTH - RIGHT:.1f}",
    ]
    assert len({point.split(",")[1] for point in second.split()}) == 1
    assert "a/b <b>1</b>" in figure and "other <b>0.25</b>" in figure


def test_stacked_bars_add_up():
    chart = stack_chart("t", [1, 2], [Series("a", [1, None], "s1"), Series("b", [3, 2], "s2")])
    heights = [
        float(h) for h in re.findall(r'<rect class="s\d fill"[^>]* height="([\d.]+)"', chart)
    ]
    unit = (HEIGHT - TOP - BOTTOM) / 4  # the axis runs from 0 to 4
    assert heights == pytest.approx([unit, 3 * unit, 2 * unit], abs=0.1)


def test_a_chart_without_numbers_says_so():
    chart = line_chart("t", [1, 2], [Series("a", [None, float("nan")], "s1")])
    assert "nothing was recorded" in chart
    assert "<svg" not in chart


def test_small_helpers():
    assert [nice(v) for v in (None, 3.0, 0.123456, 12345.6, float("nan"))] == [
        "–", "3", "0.123", "12,346", "–",
    ]  # fmt: skip
    assert flatten({"a": {"b": 1, "c": {}}, "d": None}) == {"a.b": "1", "a.c": "{}", "d": "–"}
    assert plain_prompt("text") == "text"
    assert plain_prompt([{"role": "user", "content": "q"}, {"role": "tool", "content": "t"}]) == "q"
    rows = [
        {"step": 1, "prompt": p, "completions": ["x", "y"], "rewards": [1, 0]} for p in ("a", "b")
    ]
    told = [(line.prompt, line.completion) for line in sample_lines(rows, 3)]
    assert told == [("a", "x"), ("b", "x"), ("a", "y")]
