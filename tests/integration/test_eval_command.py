"""`headway eval` as a user runs it, on a fleet of its own (sim engines)."""

import json
import subprocess

import pytest

from headway.evaluation.finished import read_evaluation
from headway.ports import free_port
from tests.support.tiny_model import build_tiny_model
from tests.support.whole_job import command, environment

PROMPTS = 12


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return [build_tiny_model(folder / name, seed=i, dtype="float32") for i, name in enumerate("ab")]


def test_two_models_are_asked_the_same_and_compared(models, tmp_path):
    rows = [{"prompt": f"{i} + 1 =", "answer": str(i + 1)} for i in range(PROMPTS + 3)]
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = subprocess.run(
        command(
            tmp_path, "eval", str(models[0]), "--compare", str(models[1]), "--data", str(data),
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
    assert facts["num_pairs"] == PROMPTS
    assert (facts["only_a"], facts["only_b"], facts["not_the_same"]) == (0, 0, [])
    first = facts["contrasts"][0]
    assert (first["data_source"], first["num_pairs"]) == ("sums.jsonl", PROMPTS)
    for side, model in (("a", models[1]), ("b", models[0])):
        folder = tmp_path / "runs" / facts[side]["run_dir"].rpartition("/")[2]
        found = read_evaluation(folder)
        assert found.model == str(model)
        (table,) = found.tables
        assert (table.num_prompts, table.num_graded, table.n) == (PROMPTS, 2 * PROMPTS, 2)
        assert (folder / "report.html").is_file() and (folder / "eval/metrics.json").is_file()
        assert table.mean.value == pytest.approx(first[f"mean_{side}"])
    assert first["difference"]["value"] == pytest.approx(first["mean_b"] - first["mean_a"])
    assert (tmp_path / "runs").joinpath(facts["report"]).is_file()
