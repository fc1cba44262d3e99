"""OpenAI's grader documents: taken as they are written, or refused by the key."""

import pytest

from headway.errors import InvalidSpec
from headway.graders import validate_grader
from headway.graders.openai import translated
from headway.graders.outside import outside_limit_s
from headway.templates import NotInOutput, TemplateError, references, render
from services.reward.grading.evaluate import build
from services.reward.grading.outcome import BadInput
from services.reward.grading.sample import Sample

ASK = [
    {"role": "developer", "content": "Grade."},
    {
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": "{{item.q}}"}, "{{sample.output_text}}"],
    },
]
SCORE = {
    "type": "score_model", "name": "quality", "input": ASK, "model": "gpt-5-mini", "range": [0, 10],
    "sampling_params": {"temperature": 1, "top_p": 0.9, "seed": 42, "max_completions_tokens": 64},
}  # fmt: skip
ENDING = "\n\nEnd with a line of its own: Verdict: a number from 0 to 10"
LABEL = {
    "type": "label_model", "name": "polite", "input": [{"role": "user", "content": "{{item.q}}"}],
    "model": "o4-mini", "labels": ["yes", "no", "so so"], "passing_labels": ["yes", "so so"],
}  # fmt: skip
CHECK = {
    "type": "string_check", "name": "exact", "input": "{{sample.output_json.answer}}",
    "reference": "{{item.answer}}", "operation": "eq",
}  # fmt: skip


def grade(document, text, **item):
    spec = validate_grader(document).model_dump(mode="json")
    return build(spec)(Sample(text, item, None))


def test_a_score_model_is_a_judge():
    assert translated(SCORE) == {
        "type": "judge", "name": "quality", "endpoint": "openai", "model": "gpt-5-mini",
        "messages": [
            {"role": "developer", "content": "Grade."},
            {"role": "user", "content": "{{item.q}}\n{{sample.output_text}}" + ENDING},
        ],
        "range": [0, 10], "temperature": 1, "max_tokens": 64, "seed": 42, "extra": {"top_p": 0.9},
    }  # fmt: skip
    assert "endpoint" not in translated(SCORE | {"url": "http://127.0.0.1:1/v1"})
    assert translated(SCORE | {"endpoint": "big", "samples": 3})["samples"] == 3
    assert validate_grader(SCORE).model == "gpt-5-mini"
    two = {"type": "multi", "graders": [SCORE], "calculate_output": "quality / 10"}
    for document in (SCORE, two):  # of 2 items: patience, and a minute a request
        assert outside_limit_s(document, 2) == 300 + 2 * 60


def test_a_label_model_is_a_judge_whose_passing_labels_are_worth_1():
    judge = translated(LABEL)
    assert judge["labels"] == {"yes": 1.0, "no": 0.0, "so so": 1.0}
    assert (judge["type"], judge["temperature"], judge["max_tokens"]) == ("judge", None, None)
    assert "range" not in judge
    assert judge["messages"][-1]["content"].endswith("Verdict: one of yes, no, so so")
    assert validate_grader(LABEL).labels == judge["labels"]


def test_multi_is_a_formula():
    parts = {"exact": CHECK, "form": {"type": "regex", "pattern": "{"}}
    multi = {
        "type": "multi",
        "name": "all",
        "graders": parts,
        "calculate_output": "0.5 * exact + form ^ 2",
    }
    assert translated(multi) == {
        "type": "formula", "name": "all", "graders": parts, "formula": "0.5 * exact + form ^ 2",
    }  # fmt: skip
    graded = grade(multi, '{"answer": "4"}', answer="4")
    assert (graded.reward, graded.parts) == (1.5, {"exact": 1.0, "form": 1.0})
    listed = multi | {"graders": [CHECK, {"type": "regex", "name": "form", "pattern": "{"}]}
    assert grade(listed, '{"answer": "5"}', answer="4").reward == 1.0


def test_a_python_document_calls_grade_and_needs_no_image():
    source = "def helper(x): ...\ndef other(y): ...\ndef grade(sample, item): return 1.0\n"
    document = {"type": "python", "name": "mine", "source": source, "image_tag": "2025-05-08"}
    for raw in (document, {k: v for k, v in document.items() if k != "image_tag"}):
        spec = validate_grader(raw)
        assert (spec.function, spec.call, spec.name) == ("grade", "openai", "mine")


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (SCORE | {"rnage": [0, 1]}, r"unknown key grader.rnage \(did you mean grader.range\?\)"),
        (SCORE | {"sampling_params": {"top_k": 3}}, r"unknown key grader.sampling_params.top_k"),
        (SCORE | {"sampling_params": 3}, "grader.sampling_params: a JSON object"),
        ({k: v for k, v in SCORE.items() if k != "model"}, "missing key grader.model"),
        (SCORE | {"range": 3}, "grader.range: a list of two numbers"),
        (SCORE | {"input": "grade this"}, "grader.input: a list of messages"),
        (SCORE | {"input": [{"role": "user"}]}, "grader.input.0: a message has role and content"),
        (
            SCORE | {"input": [{"role": "user", "content": {"type": "input_image"}}]},
            "grader.input.0.content: input_image is not taken",
        ),
        (SCORE | {"input": [{"role": "user", "content": [3]}]}, "content.0: int is not taken"),
        (LABEL | {"passing_labels": ["maybe"]}, "passing_labels: 'maybe' is none of labels"),
        (LABEL | {"labels": []}, "grader.labels: a list of texts"),
        ({"type": "multi", "graders": {"a": CHECK}}, "missing key grader.calculate_output"),
        (
            {"type": "multi", "graders": [{"type": "regex"}], "calculate_output": "1"},
            "in a list each grader has a name",
        ),
        (
            {"type": "multi", "graders": {"a": {"type": "multi"}}, "calculate_output": "a"},
            "missing key grader.graders.a.graders",
        ),
        (CHECK | {"input": "{{sample.output_tools}}"}, "sample.output_tools}} is not"),
        (CHECK | {"input": "{{sample.output_jsonx}}"}, "sample.output_jsonx}} is not"),
    ],
)
def test_what_is_not_taken_is_refused_by_its_key(document, message):
    with pytest.raises(InvalidSpec, match=message):
        validate_grader(document)


def test_templates_read_the_completion_as_json():
    text = '{"a": {"b": [1, {"c": "x"}]}, "n": 0.5}'
    paths = {
        "{{sample.output_json.a.b[1].c}}": "x", "{{ sample.output_json.a.b.0 }}": 1,
        "{{sample.output_json.n}}": 0.5, "<{{sample.output_json.a.b}}>": '<[1, {"c": "x"}]>',
        "{{sample.choices[0].message.content}}": text, "{{item.rows[1]}}": 8,
        "{{sample.output_text}}": text,
    }  # fmt: skip
    for template, value in paths.items():
        references(template)
        assert render(template, text, {"rows": [7, 8]}) == value
    for lacking in ("{{sample.output_json.z}}", "{{sample.output_json.a.b[5]}}"):
        with pytest.raises(NotInOutput):
            render(lacking, text, {})
    with pytest.raises(TemplateError, match=r"sample\.choices has 1 entries, none at 1"):
        render("{{sample.choices[1]}}", text, {})


def test_a_completion_that_is_not_the_wanted_json_is_wrong_and_an_items_lack_is_an_error():
    for text, reward in {
        '{"answer": "4"}': 1.0, '{"answer": "5"}': 0.0, '{"nswer": "4"}': 0.0, '["4"]': 0.0,
        "4": 0.0, "": 0.0, '```json\n{"answer": "4"}\n```': 0.0, "[" * 100_000: 0.0,
    }.items():  # fmt: skip
        assert grade(CHECK, text, answer="4").reward == reward
        both = {"type": "sum", "graders": {"json": CHECK, "any": {"type": "regex", "pattern": ""}}}
        assert grade(both, text, answer="4").reward == reward + 1.0
    with pytest.raises(BadInput, match=r"item\.answer does not exist"):
        grade(CHECK, '{"answer": "4"}')
