"""Grader specifications, templates, and what each grader says of one text."""

import json

import pytest

from headway.errors import InvalidSpec
from headway.graders import parse_grader_json, validate_grader
from headway.templates import TemplateError, render
from services.reward.grading.evaluate import build
from services.reward.grading.numeric import grade_numeric
from services.reward.grading.outcome import BadInput, GradingError, checked_reward
from services.reward.grading.sample import Sample

QUICKSTART = {
    "type": "sum",
    "graders": {
        "only_an_integer": {"type": "regex", "pattern": r"^\s*-?\d+\s*$"},
        "right": {"type": "numeric", "extract": "last"},
    },
    "weights": {"only_an_integer": 0.2, "right": 0.8},
}


def grade(spec, completion, item=None, prompt=None):
    grader = validate_grader(spec)
    return build(grader.model_dump(mode="json"))(Sample(completion, item or {}, prompt))


def numeric(completion, reference, **options):
    spec = {"type": "numeric", **options}
    return grade(spec, completion, {"answer": reference}).reward


# --- specifications ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec, message",
    [
        ({"type": "sun"}, "grader.type: unknown grader 'sun' (did you mean sum?)"),
        ({"type": "numerc"}, "did you mean numeric?"),
        ({}, "grader: missing key type"),
        ([], "a grader is a JSON object"),
        ({"type": ["sum"]}, "grader.type: unknown grader"),
        ({"type": 1}, "grader.type: unknown grader 1"),
        ({"type": {}}, "grader.type: unknown grader {}"),
        ({"type": "numeric", "abs_tl": 1}, "key grader.abs_tl (did you mean grader.abs_tol?)"),
        ({"type": "judge", "messages": [{"role": "user", "contnt": ""}]},
         "key grader.messages.0.contnt (did you mean grader.messages.0.content?)"),
        ({"type": "numeric", "extract": "lst"}, "not 'lst' (did you mean last?)"),
        ({"type": "numeric", "abs_tol": -1}, "grader.abs_tol"),
        ({"type": "numeric", "reference": []}, "grader.reference: an empty list"),
        ({"type": "numeric", "reference": True}, "True is neither a number nor a text"),
        ({"type": "numeric", "reference": "{{itm.answer}}"}, "{{itm.answer}} is not"),
        ({"type": "numeric", "input": "{{sample.text}}"}, "{{sample.text}} is not"),
        ({"type": "numeric", "timeout_s": 0}, "grader.timeout_s"),
        ({"type": "regex"}, "missing key grader.pattern"),
        ({"type": "regex", "pattern": "("}, "grader.pattern: not a regular expression"),
        ({"type": "string_check", "operation": "neq"}, "did you mean ne?"),
        ({"type": "reasoning_gym", "extract": "marker"}, "marker is given with, and only with"),
        ({"type": "sum", "graders": {}}, "grader.graders"),
        ({"type": "sum", "graders": {"a": {"type": "numric"}}}, "grader.graders.a.type"),
        ({"type": "sum", "graders": {"a/b": {"type": "numeric"}}}, "cannot be a name"),
        ({**QUICKSTART, "weights": {"rigt": 1}}, "weights.rigt names none of the graders (did you"),
        ({**QUICKSTART, "weights": {"right": float("nan")}}, "finite"),
        (
            {"type": "sum", "graders": {"a": {"type": "numeric", "timeout_s": 1}}},
            "graders.a.timeout_s: set it on the outermost grader",
        ),
    ],
)  # fmt: skip
def test_faulty_graders_are_refused_with_path_and_nearest_name(spec, message):
    with pytest.raises(InvalidSpec) as refused:
        validate_grader(spec)
    assert message in str(refused.value)


def test_an_item_of_the_data_shows_misspelt_references_before_anything_runs():
    with pytest.raises(InvalidSpec, match=r"graders\.right\.reference: .*did you mean item\.answr"):
        validate_grader(QUICKSTART, {"answr": "3"})
    with pytest.raises(InvalidSpec, match=r"grader\.dataset: item\.metadata does not exist"):
        validate_grader({"type": "reasoning_gym"}, {"answer": "3"})
    assert validate_grader(QUICKSTART, {"answer": "3"}).type == "sum"


def test_a_grader_survives_its_own_json():
    grader = validate_grader(QUICKSTART)
    assert parse_grader_json(grader.canonical_json()) == grader
    assert json.loads(grader.canonical_json())["graders"]["right"]["extract"] == "last"


def test_nested_and_oversized_graders_are_refused():
    spec = {"type": "numeric"}
    for _ in range(9):
        spec = {"type": "sum", "graders": {"deeper": spec}}
    with pytest.raises(InvalidSpec, match="nest at most 8 deep"):
        validate_grader(spec)
    with pytest.raises(InvalidSpec, match="bytes; at most"):
        parse_grader_json(" " * 70_000)
    with pytest.raises(InvalidSpec, match="not JSON"):
        parse_grader_json("[" * 60_000)


# --- templates -----------------------------------------------------------------------------


def test_a_completion_is_never_expanded_again():
    template = "<{{ sample.output_text }}> {{item.n}} {{item.list.1}} {{prompt}}"
    item = {"n": 3, "list": [1, "b"], "answer": "secret"}
    assert render(template, "{{item.answer}}", item, "why?") == "<{{item.answer}}> 3 b why?"
    assert render("{{item.list}}", "", item) == [1, "b"]
    with pytest.raises(TemplateError, match=r"item\.lst does not exist \(did you mean item\.list"):
        render("{{item.lst}}", "", item)
    cheat = {"type": "string_check", "operation": "eq"}
    assert grade(cheat, "{{item.answer}}", item).reward == 0.0


# --- graders -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "operation, completion, reward",
    [
        ("eq", "Paris", 1), ("eq", "paris", 0), ("eq", " Paris", 0), ("ne", "Rome", 1),
        ("ne", "Paris", 0), ("like", "It is Paris.", 1), ("like", "it is paris", 0),
        ("ilike", "it is PARIS", 1), ("ilike", "Rome", 0), ("eq", "", 0),
    ],
)  # fmt: skip
def test_string_check_compares_as_openai_does(operation, completion, reward):
    spec = {"type": "string_check", "operation": operation}
    assert grade(spec, completion, {"answer": "Paris"}).reward == reward


def test_string_check_strips_and_refuses_what_is_no_text():
    spec = {"type": "string_check", "operation": "eq", "strip": True}
    assert grade(spec, " 3\n", {"answer": "3"}).reward == 1.0
    assert grade(spec, "3", {"answer": 3}).reward == 1.0
    with pytest.raises(BadInput, match="NoneType"):
        grade(spec, "3", {"answer": None})


def test_regex_searches_or_matches_the_whole():
    assert grade({"type": "regex", "pattern": "b+"}, "abbc").reward == 1.0
    assert grade({"type": "regex", "pattern": "b+", "match": "full"}, "abbc").reward == 0.0
    assert grade({"type": "regex", "pattern": "B", "ignore_case": True}, "abc").reward == 1.0
    assert grade({"type": "regex", "pattern": "^b$", "multiline": True}, "a\nb\nc").reward == 1.0
    assert grade({"type": "regex", "pattern": "a.b"}, "a\nb").reward == 0.0
    assert grade({"type": "regex", "pattern": "a.b", "dot_all": True}, "a\nb").reward == 1.0


@pytest.mark.parametrize(
    "case, completion, gold, reward",
    [
        ("M033", "The answer is 72 because the square closes up", "72", 1),
        ("M038", "42", 42.0, 1),
        ("M045", "I get 0.5", ["1/2", "0.5"], 1),
        # Kinds that `numeric` shares with other graders.
        ("M003", "The probability is \\boxed{35\\%}.", "0.35", 1),
        ("M009", "He earns 9*2=18.\n#### $18", "18", 1),
        ("M016", "#### 10\nWait, I added wrongly.\n#### 12", "12", 1),
        ("M022", "It drops from 2 to 3 below zero, so -3.\n#### -3", "-3", 1),
        ("M029", "#### ", "16", 0),
        ("M049", "The chance is \\boxed{\\frac{3}{8}}", "3/8", 1),
        ("M058", "I would say ten.", "12", 0),
        ("M063", "\\boxed{016}", "16", 1),
        ("M068", "\\boxed{1, 2, 3, 4}", "3", 0),
        ("M072", "<think>maybe \\boxed{9}, no</think> The answer is \\boxed{11}.", "11", 1),
        ("M078", "\\boxed{42}", "$42$", 1),
        ("M091", "The angle is 45°, so the answer is $45°$.", "45", 1),
        ("M106", "\\boxed{100000000000000000000}", "100000000000000000001", 0),
        ("M141", "\\boxed{300000000}", "3\\times 10^{8}", 1),
        ("M162", "\\boxed{\\frac{2}{4}}", ["\\frac{1}{2}", "0.5"], 1),
    ],
)  # fmt: skip
def test_answers_that_the_field_judges_wrongly(case, completion, gold, reward):
    assert numeric(completion, gold) == reward, case


@pytest.mark.parametrize(
    "completion, gold, reward",
    [
        # signs and operators
        ("4 - 1 = 3", "3", 1), ("It is\n3.", 3, 1), ("x = -3", "-3", 1),
        ("4-1", -1, 0), ("= - 3", -3, 1),
        ("- 3 apples", 3, 1), ("−7", -7, 1), ("+7", 7, 1), ("so 5 -3 = 2", 2, 1),
        # separators, leading zeros, trailing marks
        ("1,234", 1234, 1), ("1 000 000", 1_000_000, 1), ("1{,}000", 1000, 1), ("1'000", 1000, 1),
        ("1\\,000", 1000, 1), ("007", 7, 1), ("5.", 5, 1), ("It is 5!", 5, 1), ("2.50", "2.5", 1),
        ("1,2,3", 3, 1), ("12,345,67", 67, 1),
        # fractions
        ("3 1/2", "3.5", 1), ("$3\\frac{1}{2}$", 3.5, 1), ("-\\frac12", "-0.5", 1), ("½", "0.5", 1),
        ("2½", "2.5", 1), ("\\boxed{\\frac{-3}{4}}", "-3/4", 1), ("1/0", 0, 0), ("1/3", "2/6", 1),
        # percent
        ("35%", "35", 1), ("35", "35%", 1), ("0.35%", "0.35", 0), ("50 percent", "1/2", 1),
        # exponents
        ("1e3", 1000, 1), ("1.5e-3", "0.0015", 1), ("It's 3×10^8 m", 300_000_000, 1),
        ("1e999999999", 1, 0),
        # what is not one number
        ("2^5", 5, 0), ("2^5", 2, 0), ("2^{3^{4+1}}", 1, 0), ("10²", 102, 0), ("10²", 10, 0),
        ("x2", 2, 0), ("5x", 5, 0), ("\\sqrt{23}", 23, 0), ("\\boxed{2\\pi}", 2, 0),
        ("\\boxed{5!}", 5, 0), ("0.333...", 0.333, 0), ("0.333...", "1/3", 1), ("x > 5", 5, 0),
        ("x \\le 5", 5, 0), ("12/3/2024", 2024, 0), ("1.2.3", 3, 0), ("12:30", 30, 0),
        ("0x1F", 1, 0), ("\\frac{x}{3}", 3, 0), ("\\frac{\\sqrt3}{3}", 3, 0), ("x_5", 5, 0),
        ("\\pm 12", 12, 0), ("100 million", 100, 0), ("3.14159", 3.14, 0),
        ("", 5, 0), ("9" * 5000, 9, 0), ("a" * 10_000, 5, 0),
        # stated answers
        ("The answer is 4 or 5", 5, 0), ("The answer is 4 or 5", 4, 0),
        ("The answer is 4 - 1 = 3", 3, 1), ("The answer is 72. Wait, 73", 72, 0),
        ("The answer is 72. Wait, 73", 73, 1), ("The answer is not 5, it is 7", 5, 0),
        ("Answer:\n**72**", 72, 1), ("Final answer: $1,234.50", 1234.5, 1),
        ("正确答案是72。", 72, 1),
        ("The answer is 8, not the 9 of before", 8, 1),
        # marked answers
        ("\\boxed{9} no, \\boxed{11}", 11, 1), ("\\boxed{9} no, \\boxed{11}", 9, 0),
        ("\\boxed{5", 5, 0), ("<answer>5</answer> of 7", 5, 1), ("#### 12 dollars", 12, 1),
        ("<answer> \\boxed{5} </answer>", 5, 1), ("#### Step 1: 7\n the result is 8", 8, 1),
        ("\\boxed{5\\text{ cm}^2}", 5, 1), ("\\boxed{x=5}", 5, 1), ("\\boxed{45^\\circ}", 45, 1),
        ("\\boxed{2+3}", 5, 0), ("<b>5</b>", 5, 1), ("=> 5", 5, 1), ("<think>it is 6", 6, 0),
    ],
)  # fmt: skip
def test_numbers_in_prose(completion, gold, reward):
    assert numeric(completion, gold) == reward


def test_numeric_extraction_tolerance_and_percent_options():
    text = "First 3, then 4."
    assert numeric(text, 3, extract="first") == 1.0
    assert numeric(text, 4, extract="last") == 1.0
    assert numeric(text, 4, extract="only") == 0.0
    assert numeric("It is 4.", 4, extract="only") == 1.0
    assert numeric("3.14", "3.14159") == 0.0
    assert numeric("3.14", "3.14159", abs_tol=0.002) == 1.0
    assert numeric("1010", 1000, rel_tol=0.01) == 1.0
    assert numeric("1011", 1000, rel_tol=0.01) == 0.0
    assert numeric("35%", 35, percent="value") == 0.0
    assert numeric("0.5%", 0.5, percent="unit") == 1.0
    assert numeric("0.35", "35%", percent="either") == 1.0


@pytest.mark.parametrize(
    "reference", [None, "many", "", "3 or 4", float("nan"), True, {}, [], "1/0"]
)
def test_a_reference_that_is_no_number_is_an_error_never_a_zero(reference):
    with pytest.raises(BadInput):
        numeric("3", reference)


def test_numeric_stays_linear_on_hostile_text():
    # Each of these took minutes if any pattern were quadratic; the test's limit is the check.
    hostile = ["-" * 300_000, "<answer>" * 40_000, "m" + " " * 300_000, "\\boxed{" * 40_000]
    hostile += ["1," * 40_000, "^{" * 150_000, "1 " * 40_000, "answer is " * 30_000]
    spec = {"extract": "answer", "abs_tol": 0, "rel_tol": 0, "percent": "either"}
    assert [grade_numeric(text, [7], spec) for text in hostile] == [0.0] * len(hostile)


def test_the_quickstart_grader_by_hand():
    item = {"answer": "3"}
    assert grade(QUICKSTART, "3", item).reward == 1.0
    assert grade(QUICKSTART, " -4\n", item).reward == 0.2
    shown = grade(QUICKSTART, "4 - 1 = 3", item)
    assert shown.reward == 0.8
    assert shown.parts == {"only_an_integer": 0.0, "right": 1.0}
    assert grade(QUICKSTART, "no idea", item).reward == 0.0


def test_a_null_part_makes_the_sum_null_and_says_which():
    with pytest.raises(BadInput, match=r"^right: item\.answer does not exist"):
        grade(QUICKSTART, "3", {})


def test_nested_sums_name_their_parts_by_path():
    spec = {"type": "sum", "graders": {"outer": QUICKSTART, "bonus": {"type": "numeric"}}}
    graded = grade({**spec, "weights": {"bonus": -0.5}}, "3", {"answer": 3})
    assert graded.reward == 0.5
    assert graded.parts == {
        "outer": 1.0, "outer/only_an_integer": 1.0, "outer/right": 1.0, "bonus": 1.0,
    }  # fmt: skip


def test_reasoning_gym_uses_the_data_sets_own_score():
    import reasoning_gym

    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=3)[0]
    answer = entry["answer"]
    wire = json.loads(json.dumps(entry))
    whole, spec = {"type": "reasoning_gym"}, {"type": "reasoning_gym", "extract": "last_line"}
    assert grade(whole, f" {answer}\n", wire).reward == 1.0
    assert grade(whole, f"It is {answer}", wire).reward < 1.0
    assert grade(spec, f"Well:\n{answer}\n", wire).reward == 1.0
    marker = {"type": "reasoning_gym", "extract": "marker", "marker": "Answer:"}
    assert grade(marker, f"Answer: 0 Answer: {answer}", wire).reward == 1.0
    assert grade(marker, f"{answer}", wire).reward < 1.0
    tag = {"type": "reasoning_gym", "extract": "tag"}
    assert grade(tag, f"<answer>{answer}</answer> yes", wire).reward == 1.0
    partial = reasoning_gym.create_dataset("caesar_cipher", size=1, seed=3)[0]
    longer = partial["answer"] + "!!"
    assert grade(whole, longer, partial).reward == (len(longer) - 2) / len(longer)
    assert grade({**whole, "strict": True}, longer, partial).reward == 0.0
    with pytest.raises(BadInput, match="did you mean chain_sum"):
        grade({**whole, "dataset": "chain_sun"}, "1", wire)
    with pytest.raises(BadInput, match="metadata"):
        grade(whole, "1", {"answer": "1"})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, [1.0], "1", (x for x in ())])
def test_s047_a_reward_that_is_no_finite_number_is_an_error_that_names_the_grader(value):
    with pytest.raises(GradingError, match="my grader"):
        checked_reward(value, "my grader")
