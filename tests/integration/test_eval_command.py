"""`headway eval` as a user runs it, on a fleet of its own (sim engines)."""

import json
import subprocess

import pytest

from headway.evaluation.finished import read_evaluation
from headway.ports import free_port
from tests.support.eval_records import eval_run, prompt
from tests.support.tiny_model import build_tiny_model
from tests.support.whole_job import command, environment

PROMPTS = 12


def test_a_model_is_asked_and_compared_with_an_evaluation(tmp_path):
    model = build_tiny_model(tmp_path / "model", seed=1, dtype="float32")
    rows = [{"prompt": f"{i} + 1 =", "answer": str(i + 1)} for i in range(PROMPTS + 3)]
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = {"source": "sums.jsonl", "texts": ["3", "7"]}
    eval_run(
        tmp_path / "runs/before",
        [
            prompt(i, [1.0, 0.0], prompt=row["prompt"], item={"answer": row["answer"]}, **asked)
            for i, row in enumerate(rows)
        ],
        n=2,
        temperature=1.0,
        max_tokens=8,
    )
    done = subprocess.run(
        command(
            tmp_path, "eval", str(model), "--compare", "before", "--data", str(data),
            "--grader", '{"type": "regex", "pattern": "[0-4]"}', "-n", "2", "--max-tokens", "8",
            "--limit", str(PROMPTS), "--engine", "sim", "--port", str(free_port()), "--json",
            "--set", "model.max_model_len=64",
        ),
        cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=240,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)  # progress is on stderr
    assert f"{PROMPTS} of {PROMPTS} prompts" in done.stderr
    assert (facts["num_pairs"], facts["only_a"], facts["only_b"]) == (PROMPTS, 3, 0)
    found = read_evaluation(tmp_path / "runs" / facts["b"]["run_dir"].rpartition("/")[2])
    assert found.model == str(model)
    (table,) = found.tables
    assert (table.data_source, table.n) == ("sums.jsonl", 2)
    assert (table.num_prompts, table.num_graded) == (PROMPTS, 2 * PROMPTS)
    mean = facts["contrasts"][0]
    assert (mean["metric"], mean["mean_a"]) == ("mean", 0.5)
    assert mean["mean_b"] == pytest.approx(table.mean.value)
    assert mean["difference"]["value"] == pytest.approx(table.mean.value - 0.5)
    for name in ("report.html", "eval/metrics.json", "compare-before.html"):
        assert (found.run_dir / name).is_file()
