"""The graders that find and compare answers, on answers with their right verdicts."""

import json
import random
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import InvalidSpec
from headway.graders import validate_grader
from services.reward.grading.evaluate import build
from services.reward.grading.limits import TookTooLong, processor_time
from services.reward.grading.outcome import BadInput
from services.reward.grading.sample import Sample

CASES = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "cases" / "answers.jsonl").read_text().splitlines()
]


def graded(kind, completion, gold, item=None, **options):
    spec = validate_grader({"type": kind, **options}).model_dump(mode="json")
    return build(spec)(Sample(completion, {"answer": gold, **(item or {})}, None)).reward


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_the_verdict_is_right(case):
    if case["verdict"] is None:
        with pytest.raises(BadInput):
            graded(case["grader"], case["completion"], case["gold"])
    else:
        reward = graded(case["grader"], case["completion"], case["gold"])
        assert reward == case["verdict"], case["why"]


def test_the_table_is_as_large_and_wide_as_promised():
    assert sum(case["grader"] in ("math", "numeric") for case in CASES) >= 150
    assert len({case["id"] for case in CASES}) == len(CASES)
    tags = {tag for case in CASES for tag in case["tags"]}
    assert tags >= {
        "fraction", "percent", "units", "interval", "set", "matrix", "latex", "several-boxes",
        "empty", "huge", "adversarial", "withdrawn", "gold-format", "trailing-dot", "spaced",
        "base", "ellipsis", "tower", "prose", "currency",
    }  # fmt: skip


# --- options ---------------------------------------------------------------------------------


def test_math_tolerates_what_it_is_told_to():
    assert graded("math", "\\boxed{3.14}", "\\pi") == 0.0
    assert graded("math", "\\boxed{3.14}", "\\pi", abs_tol=0.01) == 1.0
    assert graded("math", "\\boxed{3.2}", "\\pi", abs_tol=0.01) == 0.0
    assert graded("math", "\\boxed{101}", "100", rel_tol=0.01) == 1.0
    assert graded("math", "\\boxed{102}", "100", rel_tol=0.01) == 0.0
    assert graded("math", "\\boxed{(1.001, 2)}", "(1,2)", abs_tol=0.01) == 1.0
    assert graded("math", "\\boxed{x+1.001}", "x+1", abs_tol=0.01) == 0.0  # constants only


def test_math_reads_percent_as_it_is_told_to():
    assert graded("math", "\\boxed{35\\%}", "35", percent="value") == 0.0
    assert graded("math", "\\boxed{35\\%}", "0.35", percent="value") == 1.0
    assert graded("math", "\\boxed{35\\%}", "0.35", percent="unit") == 0.0
    assert graded("math", "\\boxed{0.5\\%}", "0.5", percent="unit") == 1.0


def test_gsm8k_may_insist_on_its_mark():
    assert graded("gsm8k", "The answer is 18.", "18", strict=True) == 0.0
    assert graded("gsm8k", "\\boxed{18}", "18", strict=True) == 0.0
    assert graded("gsm8k", "#### 18", "18", strict=True) == 1.0
    assert graded("gsm8k", "#### 18\n\\boxed{19}", "18", strict=True) == 1.0


def test_multiple_choice_knows_the_options_texts():
    cities = ["Rome", "New York", "Paris"]
    assert graded("multiple_choice", "The answer is Paris.", "C", options=cities) == 1.0
    assert graded("multiple_choice", "\\boxed{\\text{new york}}", "B", options=cities) == 1.0
    assert graded("multiple_choice", "\\boxed{\\text{Rome}}", "B", options=cities) == 0.0
    assert graded("multiple_choice", "B) Paris", "C", options=cities) == 0.0  # letter against text
    assert graded("multiple_choice", "C", "Paris", options=cities) == 1.0
    item = {"choices": {"text": cities, "label": ["A", "B", "C"]}}
    assert graded("multiple_choice", "Paris", "C", item, options="{{item.choices}}") == 1.0
    with pytest.raises(BadInput, match="options"):
        graded("multiple_choice", "Paris", "C", {"choices": "Paris"}, options="{{item.choices}}")


def test_multiple_choice_counts_from_the_index_it_is_told():
    assert graded("multiple_choice", "C", 2, first_index=0) == 1.0
    assert graded("multiple_choice", "C", "3", first_index=1) == 1.0
    assert graded("multiple_choice", "C", 2, first_index=1) == 0.0
    with pytest.raises(BadInput, match="no choice's number"):
        graded("multiple_choice", "C", 10, first_index=0)
    assert graded("multiple_choice", "The answer is F.", "F", choices="ABCDEF") == 1.0
    with pytest.raises(BadInput, match="none of ABCD"):
        graded("multiple_choice", "E", "E", choices="ABCD")


@pytest.mark.parametrize(
    "spec, complaint",
    [
        ({"type": "math", "tolerance": 1}, "unknown key grader.tolerance"),
        ({"type": "math", "reference": []}, "grader.reference: an empty list"),
        ({"type": "gsm8k", "strct": True}, "did you mean grader.strict?"),
        ({"type": "multiple_choice", "choices": "abc"}, "grader.choices"),
        ({"type": "multiple_choice", "options": "{{itm.a}}"}, "{{itm.a}} is not"),
        ({"type": "multiple_choice", "first_index": 2}, "grader.first_index"),
        ({"type": "multiple_chioce"}, "did you mean multiple_choice?"),
    ],
)
def test_faulty_specs_are_refused(spec, complaint):
    with pytest.raises(InvalidSpec) as refusal:
        validate_grader(spec)
    assert complaint in str(refusal.value)


# --- time ------------------------------------------------------------------------------------


def test_an_item_that_takes_too_long_ends_as_a_timeout():
    def think():
        with processor_time(0.05, "thinking"):
            while True:
                pass

    with pytest.raises(TookTooLong, match=r"thinking took more than 0\.05 s") as caught:
        think()
    assert caught.value.kind == "timeout"
    with processor_time(0.05, "thinking"):
        time.process_time()


# --- rubbish ---------------------------------------------------------------------------------

PIECES = [
    "\\boxed{", "}", "{", "\\frac", "\\sqrt", "^", "_", "$", "\\(", "\\]", "(", ")", "[", "|", ",",
    "\\begin{pmatrix}", "\\end{pmatrix}", "&", "\\\\", "\\text{", "9", "0.", "7/0", "!", "\\pm",
    "<", "=", "≤", "∪", "\\{", "\\}", " or ", "\\in", "…", "%", "°", "\\left", "\\right.", "٣", "²",
    "½", "\u202e", "\x00", "\x08", "\ud800", "\n", "####", "<answer>", "</answer>", "</think>",
    "the answer is ", "x", "i", "\\infty", "\\log_", "\\sin", "\\binom", "10^{99}", "\\int_0^1 ",
]  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=40).map("".join), st.booleans())
def test_no_rubbish_raises_or_is_right(rubbish, boxed):
    text = f"\\boxed{{{rubbish}}}" if boxed else rubbish
    assert graded("math", text, "\\text{zebra}") == 0.0
    assert graded("math", text, "\\frac{5417}{3}") == 0.0
    assert graded("numeric", text, "5417") == 0.0
    assert graded("gsm8k", text, "5417") == 0.0
    assert graded("multiple_choice", text, "J") == 0.0
    try:
        reward = graded("math", text, rubbish)
    except BadInput:
        return
    assert reward in (0.0, 1.0)


def test_long_rubbish_is_answered_in_time():
    source = random.Random(1)
    texts = ["".join(source.choices(PIECES, k=30_000)), *(piece * 4_000 for piece in PIECES)]
    for text in texts:
        assert graded("math", text, "5417") == 0.0
        assert graded("multiple_choice", text, "J") == 0.0
