"""`gate` and `formula`: what they combine, what they leave out, what they refuse."""

import math

import pytest

from headway.arithmetic import BadFormula, CannotCompute, compiled
from headway.errors import InvalidSpec
from headway.graders import validate_grader
from services.reward.grading.evaluate import build
from services.reward.grading.outcome import BadInput
from services.reward.grading.sample import Sample

INTEGER = {"type": "regex", "pattern": r"^\s*-?\d+\s*$"}
RIGHT = {"type": "numeric", "extract": "last"}
GATE = {"type": "gate", "condition": INTEGER, "then": RIGHT, "else": -0.5}


def grade(spec, completion, item=None):
    data = validate_grader(spec).model_dump(mode="json")
    return build(data)(Sample(completion, item or {}, None))


def number(text, **values):
    return compiled(text, values)(values)


# --- gate ----------------------------------------------------------------------------------


def test_a_closed_gate_gives_its_else_and_leaves_the_rest_out():
    open_ = grade(GATE, "3", {"answer": "3"})
    assert (open_.reward, open_.parts) == (1.0, {"condition": 1.0, "then": 1.0})
    assert grade(GATE, "4", {"answer": "3"}).reward == 0.0
    # the item has no answer, which `then` would be null for: it is never asked
    closed = grade(GATE, "three", {})
    assert (closed.reward, closed.parts) == (-0.5, {"condition": 0.0})


def test_a_gate_opens_at_its_threshold_and_a_null_is_passed_on_by_name():
    some = {"type": "sum", "graders": {"a": INTEGER, "b": RIGHT}, "weights": {"a": 0.25, "b": 0.25}}
    spec = {"type": "gate", "condition": some, "threshold": 0.5, "then": RIGHT}
    assert grade(spec, "3", {"answer": "3"}).parts == {
        "condition": 0.5, "condition/a": 1.0, "condition/b": 1.0, "then": 1.0,
    }  # fmt: skip
    assert grade(spec, "4", {"answer": "3"}).reward == 0.0  # 0.25 is below
    with pytest.raises(BadInput, match=r"^condition: b: item\.answer does not exist"):
        grade(spec, "3")
    with pytest.raises(BadInput, match=r"^then: item\.answer does not exist"):
        grade(GATE, "3")


def test_a_gate_is_read_back_as_it_was_written():
    grader = validate_grader(GATE)
    assert validate_grader(grader.model_dump(mode="json")) == grader


@pytest.mark.parametrize(
    "spec, message",
    [
        ({**GATE, "then": {"type": "numric"}}, "grader.then.type: unknown grader 'numric'"),
        ({**GATE, "otherwise": 1}, "unknown key grader.otherwise"),
        ({**GATE, "els": 1}, "unknown key grader.els (did you mean grader.else?)"),
        ({**GATE, "else": None}, "grader.else"),
        ({"type": "gate", "condition": INTEGER}, "missing key grader.then"),
        ({**GATE, "condition": {**INTEGER, "timeout_s": 3}}, "condition.timeout_s: set it on the"),
        ({**GATE, "condition": 1}, "grader.condition: a grader is a JSON object"),
    ],
)
def test_faulty_gates_are_refused(spec, message):
    with pytest.raises(InvalidSpec) as refused:
        validate_grader(spec)
    assert message in str(refused.value)
    assert "mean grader.otherwise" not in str(refused.value)  # a name that no user writes


def test_references_inside_of_a_gate_are_looked_for_in_the_data():
    with pytest.raises(InvalidSpec, match=r"grader\.then\.reference: .*did you mean item\.answr"):
        validate_grader(GATE, {"answr": 1})


# --- formula -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, value",
    [
        ("1 + 2 * 3 - 4 / 8", 6.5),
        ("2 ^ 3 ^ 2", 512.0),
        ("-2 ^ 2", -4.0),
        ("(-2) ** 2", 4.0),
        ("2 ^ -1", 0.5),
        ("2 ^ 2 + 1", 5.0),
        ("min(a, b, 0.1) + max(a, b)", 2.1),
        ("abs(-b) + floor(0.5 * 3) + ceil(0.2)", 4.0),
        ("exp(0) + sqrt(16) + log(1)", 5.0),
        ("where(a > 0.4, b, 1 / 0)", 2.0),
        ("where(a > 0.5, 1 / 0, +b)", 2.0),
        ("(a == 0.5) + (b != 2) + (0 <= a < 1) + (b >= 3)", 2.0),
        (" a\n + b ", 2.5),
        ("1e-3", 0.001),
    ],
)
def test_values_worked_out_by_hand(text, value):
    assert math.isclose(number(text, a=0.5, b=2.0), value, rel_tol=1e-12)


@pytest.mark.parametrize(
    "text, message",
    [
        ("b / (a - 0.5)", "b / (a - 0.5) has no finite value for 2, 0"),
        ("sqrt(-b)", "sqrt(-b) has no finite value for -2"),
        ("log(a - a)", "log(a - a) has no"),
        ("(-b) ^ a", "(-b) ^ a has no finite value for -2, 0.5"),
        ("9 ^ 9 ^ 9 ^ 9", "has no finite value"),
        ("min(exp(1000), 1)", "exp(1000) has no"),
        ("min(1e200 * 1e200, 1)", "1e+200 * 1e+200 has no"),
    ],
)
def test_what_has_no_finite_value_is_said_and_never_a_number(text, message):
    with pytest.raises(CannotCompute) as said:
        number(text, a=0.5, b=2.0)
    assert message in str(said.value)


@pytest.mark.parametrize(
    "text, message",
    [
        ("a +", "not a formula"),
        ("", "not a formula"),
        ("c", "c names none of the graders"),
        ("rigt", "(did you mean right?)"),
        ("mim(a, b)", "there is no function mim (did you mean min?)"),
        ("a.real", "a.real is not part of a formula"),
        ("min", "min names none"),
        ("a if b else 1", "not part of a formula"),
        ("(lambda: 1)()", "numbers, names"),
        ("().__class__", "not part of a formula"),
        ("__import__(a)", "there is no function __import__"),
        ("a(b)", "there is no function a"),
        ("min(a)(b)", "there is no function min(a)"),
        ("min(*a)", "plain arguments"),
        ("min(key=a)", "plain arguments"),
        ("abs(a, b)", "abs takes 1 arguments"),
        ("where(a, b)", "where takes 3"),
        ("a % b", "numbers, names"),
        ("a // b", "not part of a formula"),
        ("a << b", "not part of a formula"),
        ("a and b", "not part of a formula"),
        ("not a", "not part of a formula"),
        ("a is b", "not part of a formula"),
        ("True + a", "'True' is no number"),
        ("1j", "is no number"),
        ("'x'", "numbers, names"),
        ("a = 1", "not a formula"),
        ("(a := 1)", "numbers, names"),
        ("1e999", "too large"),
        ("9" * 400, "too large"),
        ("9" * 1001, "at most 1000"),
        ("(" * 499 + "a" + ")" * 499, "not a formula"),
        ("-" * 999 + "a", ""),
        ("+".join(["a"] * 400), "more than 300"),
        ("a\0", "numbers, names"),
    ],
)
def test_no_more_than_arithmetic_is_taken(text, message):
    with pytest.raises(BadFormula) as refused:
        compiled(text, {"a": 0, "b": 0, "right": 0})
    assert message in str(refused.value)


def test_a_formula_over_graders():
    spec = {
        "type": "formula",
        "graders": {"right": RIGHT, "short": INTEGER},
        "formula": "right * (0.8 + 0.2 * short)",
    }
    assert grade(spec, "It is 3", {"answer": 3}).reward == 0.8
    graded = grade(spec, "3", {"answer": 3})
    assert (graded.reward, graded.parts) == (1.0, {"right": 1.0, "short": 1.0})
    with pytest.raises(BadInput, match=r"^right: "):
        grade(spec, "3")
    with pytest.raises(BadInput, match=r"^formula: 1 / short has no finite value for 1, 0"):
        grade({**spec, "formula": "1 / short"}, "It is 3", {"answer": 3})


@pytest.mark.parametrize(
    "change, message",
    [
        ({"formula": "rigt"}, "rigt names none of the graders (did you mean right?)"),
        ({"graders": {"min": RIGHT}}, "'min' cannot stand in a formula"),
        ({"graders": {"a b": RIGHT}}, "'a b' cannot stand"),
        ({"graders": {"if": RIGHT}}, "'if' cannot stand"),
        ({"formula": None}, "grader.formula"),
    ],
)
def test_faulty_formulas_are_refused(change, message):
    with pytest.raises(InvalidSpec) as refused:
        validate_grader({"type": "formula", "graders": {"right": RIGHT}, "formula": "1"} | change)
    assert message in str(refused.value)
