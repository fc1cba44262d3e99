"""`python` graders as they are written: which function, whose signature, what source."""

import json
import warnings

import pytest

from headway.cli.eval import grader_of
from headway.errors import InvalidSpec
from headway.graders import parse_grader_json, validate_grader
from headway.graders.python import MAX_SOURCE_BYTES
from headway.graders.sources import with_sources
from headway.jobspec import load_job
from headway.yamls import dump_yaml, load_yaml


def spec(source, **keys):
    return validate_grader({"type": "python", "source": source, **keys})


def of(arguments, body="return 1.0"):
    return f"def f({arguments}):\n    {body}\n"


@pytest.mark.parametrize(
    ("arguments", "call", "whole"),
    [
        ("data_source, solution_str, ground_truth, extra_info=None", "verl", False),
        ("solution_str, ground_truth, **kwargs", "verl", False),
        ("data_sources, solution_strs, ground_truths, extra_infos, **kw", "verl_batch", True),
        ("prompts, completions, **kwargs", "trl", True),
        ("completions, answer, **kwargs", "trl", True),
        ("completions, answers, states", "rubric_group", True),
        ("parser, completion, answer", "rubric", False),
        ("state, **kwargs", "rubric", False),
        ("*, completion", "rubric", False),
        ("sample, item", "openai", False),
        ("sample: dict, item: dict, /", "openai", False),
    ],
)
def test_the_arguments_names_say_whose_signature_it_is(arguments, call, whole):
    for line in (of(arguments), "async " + of(arguments)):
        grader = spec(line)
        assert (grader.function, grader.call, grader.whole_group()) == ("f", call, whole)
        again = parse_grader_json(grader.canonical_json())
        assert again == grader
        around = validate_grader({"type": "sum", "graders": {"a": grader.model_dump()}})
        assert around.whole_group() is whole


def test_which_function_is_meant():
    helper = "def helper(x):\n    return x\n"
    verl = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1\n"
    assert spec(helper + verl).function == "compute_score"
    assert spec("def _private(): ...\n" + of("completion")).function == "f"
    assert (
        spec(
            "try:\n    import x\nexcept ImportError:\n    pass\nelse:\n"
            + "    def g(sample, item): return 1\n"
        ).function
        == "g"
    )
    assert spec(helper + of("completions"), function="f").call == "trl"
    other = spec("import functools\nmine = functools.partial(int)\n", function="mine", call="verl")
    assert (other.function, other.call) == ("mine", "verl")


@pytest.mark.parametrize(
    ("source", "keys", "message"),
    [
        ("def f(:", {}, "source: not Python: line 1: invalid syntax"),
        ("x = 1", {}, "function: the source defines no function at its top level"),
        (of("completion") + "def g(completion): ...", {}, "function: name one of f, g"),
        (of("completion"), {"function": "ff"}, r"ff is not a def .* \(did you mean f\?\)"),
        ("mine = int", {"function": "mine"}, "mine is not a def of the source's top level"),
        (of("x, y"), {}, r"call: the arguments of f \(x, y\) are of no known signature"),
        (of(""), {}, r"the arguments of f \(none\)"),
        (of("completion"), {"call": "trll"}, r"not 'trll' \(did you mean trl\?\)"),
        (of("completion"), {"kwargs": {"a b": 1}}, "'a b' is no name of an argument"),
        ("#" * (MAX_SOURCE_BYTES + 1), {}, "source: String should have at most 49152"),
        (of("completion"), {"path": "f.py"}, "path is read where a job is written"),
        ("-" * 40_000 + "1", {}, "source: not Python: nested too deeply"),
        ("x" + "+x" * 20_000, {}, "source: not Python"),
        ("\0", {}, "source: not Python"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused_with_its_key(source, keys, message):
    with pytest.raises(InvalidSpec, match=message):
        spec(source, **keys)


def test_a_source_that_python_itself_would_warn_of_is_taken_in_silence():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert spec('def f(completion):\n    return "\\d" is 1\n').call == "rubric"


JOB = """
model: {path: /nowhere}
data: {source: reasoning_gym, name: chain_sum}
reward:
  grader:
    type: sum
    graders:
      mine: {type: python, path: %s, kwargs: {a: 1}}
      form: {type: regex, pattern: a}
trainer: {total_training_steps: 1}
"""


def test_a_path_is_read_beside_the_job_file_and_travels_as_source(tmp_path):
    folder = tmp_path / "jobs"
    folder.mkdir()
    (folder / "mine.py").write_bytes(
        b"\xef\xbb\xbf" + of("completions").replace("\n", "\r\n").encode()
    )
    (folder / "job.yaml").write_text(JOB % "mine.py")
    grader = load_job(folder / "job.yaml").reward.grader
    assert grader["graders"]["mine"] == {
        "type": "python", "file": "mine.py", "kwargs": {"a": 1}, "source": of("completions"),
    }  # fmt: skip
    assert grader["graders"]["form"] == {"type": "regex", "pattern": "a"}
    assert validate_grader(grader).whole_group()
    assert validate_grader(json.loads(json.dumps(grader))).graders["mine"].file == "mine.py"
    (folder / "job.yaml").write_text(JOB % (folder / "mine.py"))
    again = load_job(folder / "job.yaml")
    assert again.reward.grader == grader
    (folder / "job.yaml").write_text(again.to_yaml())
    assert load_job(folder / "job.yaml") == again
    assert "        source: |\n          def f(completions):\n" in again.to_yaml()


@pytest.mark.parametrize(
    "text",
    ["a\n", "a\n\n\n", "\n a\n  b", "a \nb", "\ta\n", "é\n\u2028", "a\r\nb\n", "---\n#", "\n"],
)
def test_texts_of_several_lines_come_back_from_yaml_as_they_were(text):
    assert load_yaml(dump_yaml({"a": {"b": [text]}})) == {"a": {"b": [text]}}


def test_headway_eval_reads_it_too(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(of("completions"))
    (tmp_path / "grader.json").write_text(json.dumps({"type": "python", "path": "mine.py"}))
    found = grader_of(str(tmp_path / "grader.json"))
    assert found == {"type": "python", "file": "mine.py", "source": of("completions")}
    monkeypatch.chdir(tmp_path)
    assert grader_of('{"type": "python", "path": "mine.py"}') == found


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"\xff\xfe\xff", "is not a text in UTF-8"),
        (b"#" * (MAX_SOURCE_BYTES + 1), "more than 48 KiB"),
    ],
)
def test_a_path_that_cannot_be_read_is_named(tmp_path, content, message):
    if content is not None:
        (tmp_path / "mine.py").write_bytes(content)
    (tmp_path / "job.yaml").write_text(JOB % "mine.py")
    with pytest.raises(InvalidSpec, match=message) as refused:
        load_job(tmp_path / "job.yaml")
    assert str(tmp_path / "mine.py") in str(refused.value)


def test_only_a_python_graders_path_is_read(tmp_path):
    (tmp_path / "f.py").write_text(of("completion"))
    other = {"type": "remote", "path": "f.py", "list": [{"path": "f.py"}, 3, None]}
    assert with_sources(other, tmp_path) == other
    for bad, message in (
        ({"path": 3}, "name of a file"),
        ({"path": "f.py", "source": ""}, "one of"),
    ):
        with pytest.raises(InvalidSpec, match=message):
            with_sources({"type": "python", **bad}, tmp_path)
    with pytest.raises(InvalidSpec, match="Is a directory"):
        with_sources([{"type": "python", "path": "."}], tmp_path)
