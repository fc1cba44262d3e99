"""The run folder: whole lines, rows replaced after a resume, safe names."""

import json

import pytest

from headway.errors import InvalidSpec, StorageFailed
from headway.messages import Completion, Group, Ticket, VersionSpan
from services.learner.run_folder import RunFolder, append_lines, run_path, write_whole
from tests.support.small_disk import files_end_at


def group(ticket_id=0):
    ticket = Ticket(ticket_id, (1, 2), "What?\u2028", {"answer": "4"}, 1, 7, data_epoch=1)
    completion = Completion(
        token_ids=(5, 6, 7),
        logprobs=(-0.5, -0.25, -1.0),
        finish_reason="stop",
        spans=(VersionSpan(2, 0, 1), VersionSpan(3, 1, 3)),
        text="4",
        reward=1.0,
        parts={"correct": 1.0},
    )
    return Group(ticket, (completion,), "node", 1, 2, 0.5, 0.25)


def rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def test_a_sample_says_who_sampled_what_when(tmp_path):
    folder = RunFolder(tmp_path)
    folder.append_samples(4, [group(9)])
    (row,) = rows(folder.samples)
    assert (row["step"], row["ticket_id"], row["start_version"]) == (4, 9, 2)
    assert row["completions"] == [
        {
            "text": "4",
            "reward": 1.0,
            "parts": {"correct": 1.0},
            "error_kind": "",
            "num_tokens": 3,
            "finish_reason": "stop",
            "spans": [[2, 0, 1], [3, 1, 3]],
        }
    ]


def test_rows_after_the_checkpoint_and_a_torn_line_go(tmp_path):
    folder = RunFolder(tmp_path)
    for step in (1, 2, 3, 4):
        folder.append_metrics({"step": step, "x": step / 2})
        folder.append_samples(step, [group(step)])
    with folder.metrics.open("a") as torn:
        torn.write('{"step": 2, "x"')
    folder.truncate(2)
    folder.append_metrics({"step": 3, "x": 9.0})
    assert [(r["step"], r["x"]) for r in rows(folder.metrics)] == [(1, 0.5), (2, 1.0), (3, 9.0)]
    assert [r["step"] for r in rows(folder.samples)] == [1, 2]  # the line separator split none
    assert {p.name for p in tmp_path.iterdir()} == {"metrics.jsonl", "samples.jsonl"}


def test_numbers_that_json_lacks_become_null(tmp_path):
    append_lines(tmp_path / "a.jsonl", [{"step": 1, "x": float("nan"), "y": [float("inf")]}])
    assert (tmp_path / "a.jsonl").read_text() == '{"step": 1, "x": null, "y": [null]}\n'


def test_the_environment_of_earlier_starts_is_kept(tmp_path):
    folder = RunFolder(tmp_path)
    for start in ("one", "two", "three"):
        folder.write_environment({"host": start})
    facts = json.loads(folder.environment.read_text())
    assert facts["host"] == "three"
    assert [e["host"] for e in facts["earlier"]] == ["one", "two"]


@pytest.mark.parametrize("job_id", ["../x", "a/b", "", "A", ".", "a b", "x" * 64, "a\n"])
def test_a_job_id_that_is_no_plain_name_never_becomes_a_path(tmp_path, job_id):
    with pytest.raises(InvalidSpec):
        run_path(tmp_path, job_id)


def test_a_plain_job_id_is_a_folder_of_the_runs(tmp_path):
    assert run_path(tmp_path, "quickstart-1a2b") == tmp_path / "quickstart-1a2b"


def test_a_full_disk_is_named_with_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for write in (lambda: append_lines(path, [{"x": "y" * 100}]), lambda: write_whole(path, "y")):
        with files_end_at(0), pytest.raises(StorageFailed, match=r"metrics\.jsonl: File too large"):
            write()


@pytest.mark.parametrize("damaged", ["", "{", "[]", "5", '{"earlier": 5}', '{"earlier": ["x"]}'])
def test_a_damaged_environment_is_named(tmp_path, damaged):
    folder = RunFolder(tmp_path)
    folder.environment.write_text(damaged)
    with pytest.raises(InvalidSpec, match=r"environment\.json is damaged"):
        folder.starts()
    with pytest.raises(InvalidSpec, match=r"environment\.json is damaged"):
        folder.write_environment({"host": "h"})
    assert folder.environment.read_text() == damaged


def test_lines_that_are_no_rows_go_like_a_torn_one(tmp_path):
    folder = RunFolder(tmp_path)
    folder.metrics.write_text('5\n[1]\n{"x": 1}\n{"step": "1"}\nnull\n{"step": 1}\n{"step": 2}\n')
    folder.truncate(1)
    assert rows(folder.metrics) == [{"step": 1}]
