"""text_similarity, json_schema, length and overlong: what they refuse, and what they score."""

import json

import pytest
import torch

from headway.errors import InvalidSpec
from headway.graders import validate_grader
from headway.rl.shaping import overlong_penalty
from services.reward.grading.evaluate import build
from services.reward.grading.outcome import BadInput
from services.reward.grading.sample import Sample


def grade(spec, completion, item=None, num_tokens=None):
    grader = validate_grader(spec).model_dump(mode="json")
    return build(grader)(Sample(completion, item or {}, None, num_tokens=num_tokens)).reward


def alike(metric, text, reference):
    return grade({"type": "text_similarity", "evaluation_metric": metric}, text, reference)


CAT = {"answer": "the cat sat on the mat"}


@pytest.mark.parametrize(
    ("metric", "text", "wanted"),
    [
        # indel distance: 22 characters against 11 that are all in them: 2·11 / 33
        ("fuzzy_match", "the cat sat", 2 / 3),
        # all precisions 1, brevity penalty exp(1 − 6/3)
        ("bleu", "the cat sat", 0.36787944),
        # 3 + 2 + 1 n-grams match; the reference has 6 + 5 + 4 + 3
        ("gleu", "the cat sat", 6 / 18),
        # words: 3 of 3 and 3 of 6; pairs: 2 of 2 and 2 of 5; triples: 1 of 1 and 1 of 4
        ("rouge_1", "the cat sat", 2 * 0.5 / 1.5),
        ("rouge_2", "the cat sat", 2 * 0.4 / 1.4),
        ("rouge_3", "the cat sat", 2 * 0.25 / 1.25),
        ("rouge_4", "the cat sat", 0.0),
        ("rouge_5", "the cat sat on the rug", 1 / 2),
        # longest common subsequence: "cat sat the mat", 4 of 4 and 4 of 6
        ("rouge_l", "cat sat the mat", 2 * (2 / 3) / (5 / 3)),
    ],
)
def test_similarities_worked_out_by_hand(metric, text, wanted):
    assert alike(metric, text, CAT) == pytest.approx(wanted, abs=1e-7)
    assert alike(metric, CAT["answer"], CAT) == pytest.approx(1.0)
    assert alike(metric, CAT["answer"], CAT) <= 1.0
    assert alike(metric, "", CAT) == 0.0


def test_letters_of_other_scripts_count_for_rouge():
    greek = {"answer": "η γάτα κάθεται"}
    assert alike("rouge_1", "ο σκύλος τρέχει", greek) == 0.0
    assert alike("rouge_1", "η γάτα τρέχει", greek) == pytest.approx(2 / 3)
    assert alike("rouge_2", "猫坐下", {"answer": "猫坐着"}) == pytest.approx(1 / 2)
    assert alike("rouge_1", "don't stop_it!", {"answer": "DON T stop it"}) == pytest.approx(1.0)


def test_the_likest_of_several_references_counts():
    assert alike("fuzzy_match", "abc", {"answer": ["xyz", "abc"]}) == 1.0
    assert alike("fuzzy_match", "3", {"answer": 3}) == 1.0
    spec = {"type": "text_similarity", "evaluation_metric": "rouge_1",
            "reference": ["{{item.a}}", "{{item.b}}"]}  # fmt: skip
    assert grade(spec, "one two", {"a": "two", "b": "one two"}) == 1.0


@pytest.mark.parametrize("answer", ["", " \n", [], None, True, {}, ["a", ""]])
def test_a_reference_that_nothing_can_be_like_is_no_zero(answer):
    with pytest.raises(BadInput):
        alike("rouge_1", "a", {"answer": answer})


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"evaluation_metric": "cosine"}, "cosine is not to be had: it compares embeddings"),
        ({"evaluation_metric": "meteor"}, "meteor is not to be had: it counts synonyms"),
        ({"evaluation_metric": "rouge_6"}, "(did you mean rouge_"),
        ({"evaluation_metric": "rouge_l", "reference": []}, "grader.reference: empty"),
        ({"evaluation_metric": "rouge_l", "input": "{{itm.x}}"}, "{{itm.x}} is not"),
        ({}, "missing key grader.evaluation_metric"),
    ],
)
def test_similarity_refuses_by_name(spec, message):
    with pytest.raises(InvalidSpec) as refused:
        validate_grader({"type": "text_similarity", **spec})
    assert message in str(refused.value)


# --- json_schema ---------------------------------------------------------------------------

POINT = {
    "type": "object",
    "properties": {"x": {"$ref": "#/$defs/number"}, "y": {"type": "integer"}},
    "required": ["x", "y"],
    "additionalProperties": False,
    "$defs": {"number": {"type": "number"}},
}
GOOD = '{"x": 1.5, "y": 2}'


@pytest.mark.parametrize(
    ("text", "auto", "whole", "fenced"),
    [
        (GOOD, 1, 1, 0),
        (f"\n {GOOD} \n", 1, 1, 0),
        (f"Here:\n```json\n{GOOD}\n```\nDone.", 1, 0, 1),
        (f"```\n{GOOD}\n```", 1, 0, 1),
        (f"```json\n{{}}\n```\nNo, wait:\n```json\n{GOOD}\n```", 1, 0, 1),  # the last one wins
        (f"```json\n{GOOD}\n```\n```\nno json\n```", 0, 0, 0),
        (f"```json\n{GOOD}", 0, 0, 0),  # cut off
        (f"<think>```\n{GOOD}\n```</think>\nI do not know.", 0, 0, 0),
        (f"<think>hm</think>{GOOD}", 1, 1, 0),
        (f"<think>```\n{GOOD}\n```", 0, 0, 0),
        ('{"x": 1.5, "y": 2.5}', 0, 0, 0),
        ('{"x": NaN, "y": 2}', 0, 0, 0),
        ('{"x": 1, "y": 2, "z": 3}', 0, 0, 0),
        ("{'x': 1, 'y': 2}", 0, 0, 0),
        ("", 0, 0, 0),
        ("[" * 100_000, 0, 0, 0),
        ("[" * 400 + "]" * 400, 0, 0, 0),
        ("9" * 100_000, 0, 0, 0),
    ],
)
def test_json_schema_reads_the_whole_or_the_last_block(text, auto, whole, fenced):
    for extract, wanted in (("auto", auto), ("whole", whole), ("fenced", fenced)):
        spec = {"type": "json_schema", "schema": POINT, "extract": extract}
        assert grade(spec, text) == wanted, extract


def test_json_may_quote_the_marks_of_reasoning():
    spec = {"type": "json_schema", "schema": {"type": "object"}}
    assert grade(spec, '{"a": "<think>x</think> y"}') == 1.0


def test_drafts_and_references_within_the_schema():
    tree = {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}
    assert grade({"type": "json_schema", "schema": tree}, "[[],[[]]]") == 1.0
    assert grade({"type": "json_schema", "schema": tree}, "[[1]]") == 0.0
    named = {"$id": "http://x/a", "$ref": "b", "$defs": {"b": {"$id": "b", "type": "integer"}}}
    assert grade({"type": "json_schema", "schema": named}, "3") == 1.0
    draft4 = {"$schema": "http://json-schema.org/draft-04/schema#", "maximum": 3,
              "exclusiveMaximum": True}  # fmt: skip
    assert grade({"type": "json_schema", "schema": draft4}, "3") == 0.0
    assert grade({"type": "json_schema", "schema": {}}, "null") == 1.0
    kept = json.loads(validate_grader({"type": "json_schema", "schema": tree}).canonical_json())
    assert kept["schema"] == tree


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"$ref": "http://127.0.0.1:9/x.json"}, "is not in the schema, and nothing is fetched"),
        ({"anyOf": [{"$ref": "file:///etc/passwd"}]}, "'file:///etc/passwd' is not in the schema"),
        ({"$ref": "#/$defs/nope"}, "'#/$defs/nope' is not in the schema"),
        ({"type": "objct"}, "grader.schema: type: 'objct' is not valid"),
        ({"$schema": "http://example.org/mine"}, "is no draft that is known"),
        ({"pattern": "("}, "grader.schema: pattern"),
        ([], "grader.schema"),
    ],
)
def test_a_schema_that_cannot_hold_is_refused(schema, message):
    with pytest.raises(InvalidSpec) as refused:
        validate_grader({"type": "json_schema", "schema": schema})
    assert message in str(refused.value)
    with pytest.raises(InvalidSpec, match=r"did you mean grader\.schema\?"):
        validate_grader({"type": "json_schema", "shema": {}, "schema": {}})


# --- lengths -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "rewards"),  # of 0, 1, 5, 10, 12, 15, 20, 30 tokens
    [
        ({"target": 10}, [0, 0.1, 0.5, 1, 0.8, 0.5, 0, 0]),
        ({"target": 10, "margin": 4}, [0, 0, 0, 1, 0.5, 0, 0, 0]),
        ({"max": 10}, [1, 1, 1, 1, 0, 0, 0, 0]),
        ({"max": 10, "margin": 10}, [1, 1, 1, 1, 0.8, 0.5, 0, 0]),
        ({"min": 10}, [0, 0, 0, 1, 1, 1, 1, 1]),
        ({"min": 10, "max": 15, "margin": 5}, [0, 0, 0, 1, 1, 1, 0, 0]),
    ],
)
def test_length_is_a_plateau_with_slopes(options, rewards):
    spec = {"type": "length", **options}
    found = [grade(spec, "x", None, n) for n in (0, 1, 5, 10, 12, 15, 20, 30)]
    assert found == pytest.approx(rewards)


def test_lengths_in_characters_and_words():
    assert grade({"type": "length", "unit": "characters", "max": 3}, "äö😀") == 1.0
    assert grade({"type": "length", "unit": "characters", "max": 3}, "äö😀.") == 0.0
    assert grade({"type": "length", "unit": "words", "target": 3}, " one two\n three ") == 1.0
    spec = {"type": "overlong", "unit": "words", "max_length": 4, "len": 2, "input": "{{item.why}}"}
    assert grade(spec, "", {"why": "one two three"}) == -0.5


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_overlong_is_the_formula_of_the_learner(factor):
    spec = {"type": "overlong", "max_length": 10, "len": 4, "penalty_factor": factor}
    for n in range(14):
        wanted = overlong_penalty(torch.tensor(n), max_tokens=10, buffer=4, factor=factor)
        assert grade(spec, "x", None, n) == float(wanted)
    assert grade(spec, "x", None, 8) == -factor / 2


def test_tokens_that_nobody_counted_are_no_zero():
    for spec in ({"type": "length", "max": 3}, {"type": "overlong", "max_length": 3, "len": 1}):
        with pytest.raises(BadInput, match="send num_tokens"):
            grade(spec, "x")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"type": "length"}, "either target, or min or max"),
        ({"type": "length", "target": 3, "max": 4}, "either target, or min or max"),
        ({"type": "length", "min": 0}, "either target, or min or max"),
        ({"type": "length", "min": 5, "max": 4}, "max 4 is below min 5"),
        ({"type": "length", "max": 4, "unit": "bytes"}, "not 'bytes'"),
        ({"type": "length", "max": 4, "input": "{{item.why}}"}, "only the completion itself has"),
        ({"type": "overlong", "max_length": 4, "len": 5}, "len 5 is more than max_length 4"),
    ],
)
def test_lengths_that_cannot_be_are_refused(spec, message):
    with pytest.raises(InvalidSpec) as refused:
        validate_grader(spec)
    assert message in str(refused.value)
