"""Tables and comparisons from records: nulls, skips, votes, and what does not match."""

import dataclasses
import math

import pytest

from headway.errors import InvalidSpec
from headway.evaluation.compare import compare
from headway.evaluation.metrics import sizes, tables
from headway.evaluation.names import val_metrics
from headway.evaluation.records import CompletionRecord
from headway.evaluation.votes import voter
from tests.support.eval_records import prompt

near = pytest.approx


def values(table):
    return {name: estimate.value for name, estimate in table.estimates.items()}


def test_a_table_by_hand():
    records = [
        prompt(0, [1.0, 0.0, 0.0, 1.0], texts=["7", "8", "8", "8"]),
        prompt(1, [0.0, 0.0, 0.0, 0.0], texts=["1", "2", "3", "4"]),
        prompt(2, [], skipped="prompt of 900 tokens"),
    ]
    (table,) = tables(records, lambda _: voter({"type": "numeric"}))
    assert (table.data_source, table.n, table.num_prompts, table.num_skipped) == ("sums", 4, 2, 1)
    assert (table.num_completions, table.num_graded, table.null_bounds) == (8, 8, None)
    found = values(table)
    assert found == {
        "mean@4": 0.25,
        "std@4": 0.25,  # of the prompts 0.5 and 0
        "pass@1": 0.25,
        "pass@2": near(5 / 12),  # (1 - C(2,2)/C(4,2)) / 2
        "pass@4": 0.5,
        "best@2/mean": near(5 / 12),
        "best@4/mean": 0.5,
        "worst@2/mean": near(1 / 12),
        "worst@4/mean": 0.0,
        # 8 answers 3 times with rewards 0, 0, 1, 7 once with 1: pairs 88 x3 give 1/3, 78 x3 tie
        "maj@2/mean": near((3 * (1 / 3) + 3 * (2 / 3)) / 6 / 2),
        "maj@4/mean": near(1 / 3 / 2),
    }
    assert table.mean.stderr == near(0.25)


def test_a_null_is_counted_and_never_a_zero():
    records = [
        prompt(0, [1.0, None, 1.0, None]),
        prompt(1, [0.0, 0.0, 0.0, None]),
        prompt(2, [None, None, None, None]),
    ]
    (table,) = tables(records)
    assert (table.num_prompts, table.num_completions, table.num_graded) == (3, 12, 5)
    assert table.null_kinds == {"timeout": 7}
    assert table.mean.value == 0.5  # of the two prompts that have graded completions
    assert table.mean.num_prompts == 2
    # nulls as 0: (2/4 + 0 + 0) / 3; as 1: (4/4 + 1/4 + 4/4) / 3
    assert table.null_bounds == (near(1 / 6), near(0.75))
    # pass@2 from 2 and 3 graded ones: 1 and 0; pass@4 from none
    assert values(table)["pass@2"] == 0.5
    assert not {"pass@4", "best@4/mean", "maj@2/mean"} & values(table).keys()


def test_bounds_reach_as_far_as_the_rewards_seen():
    (table,) = tables([prompt(0, [-2.0, None]), prompt(1, [3.0, 3.0])])
    assert table.null_bounds == (near((-2 - 2) / 2 / 2 + 1.5), near((-2 + 3) / 2 / 2 + 1.5))


def test_absurd_rewards_overflow_nothing():
    records = [prompt(i, [1e308, 1e308, -1e308, None]) for i in range(3)]
    row = val_metrics(tables(records, lambda _: str))
    assert all(math.isfinite(value) for value in row.values())
    assert row["val-core/sums/reward/mean@4"] == near(1e100 / 3)
    (mean, *_) = compare(records, [prompt(i, [-1e308]) for i in range(3)]).contrasts
    assert mean.difference.value == near(-4e100 / 3) and mean.losses == 3


def test_nothing_graded_is_no_figure():
    (table,) = tables([prompt(0, [None]), prompt(1, [], skipped="abandoned")])
    assert (table.mean, dict(table.estimates)) == (None, {})
    assert val_metrics([table]) == {
        "val-aux/sums/graded_ratio": 0.0,
        "val-aux/sums/num_prompts": 1.0,
        "val-aux/sums/num_skipped": 1.0,
        "val-aux/sums/response_length/mean": 3.0,
        "val-aux/sums/response_length/clip_ratio": 0.0,
    }
    (empty,) = tables([prompt(1, [], skipped="abandoned")])
    assert (empty.num_prompts, empty.mean_tokens, empty.mean) == (0, None, None)


def test_sources_have_tables_of_their_own_and_one_together():
    records = [prompt(0, [1.0]), prompt(1, [0.0]), prompt(0, [1.0], source="logic")]
    found = tables(records)
    assert [(t.data_source, t.mean.value) for t in found] == [
        ("logic", 1.0),
        ("sums", 0.5),
        ("all", near(2 / 3)),
    ]
    records.append(prompt(0, [1.0], source="all"))
    assert [t.data_source for t in tables(records)] == ["all", "logic", "sums"]


def test_names_are_verls():
    (table,) = tables([prompt(0, [1.0, 0.0, 0.0, 0.0]), prompt(1, [0.0] * 4)], lambda _: str)
    row = val_metrics([table])
    assert {name for name in row if name.startswith("val-core/")} == {
        "val-core/sums/reward/mean@4",
        "val-core/sums/reward/best@4/mean",
        "val-core/sums/reward/maj@4/mean",
        "val-core/sums/reward/pass@4",
    }
    assert row["val-core/sums/reward/mean@4"] == 0.125
    assert row["val-aux/sums/reward/mean@4/stderr"] == near(0.125)
    assert row["val-aux/sums/reward/pass@1"] == 0.125
    assert {"val-aux/sums/reward/best@2/mean", "val-aux/sums/reward/worst@4/mean"} <= row.keys()


def test_parts_have_means_of_their_own():
    record = prompt(0, [])
    completions = (
        CompletionRecord("a", 1.0, 1, "stop", {"form": 1.0, "right": 1.0}),
        CompletionRecord("b", 0.2, 1, "length", {"form": 1.0, "right": 0.0}),
        CompletionRecord("c", None, 1, "stop", {"form": 1.0}, "timeout"),
    )
    (table,) = tables([dataclasses.replace(record, completions=completions)])
    assert {name: e.value for name, e in table.parts.items()} == {"form": 1.0, "right": 0.5}
    assert table.cut_ratio == near(1 / 3)
    assert val_metrics([table])["val-aux/sums/right/mean@3"] == 0.5


def test_a_reward_is_right_from_the_threshold_on():
    records = [prompt(0, [0.2, 0.8]), prompt(1, [0.2, 0.2])]
    assert values(tables(records)[0])["pass@2"] == 0.0
    assert values(tables(records, pass_reward=0.8)[0])["pass@2"] == 0.5
    assert values(tables([prompt(0, [0.7 + 0.2 + 0.1])])[0])["pass@1"] == 1.0  # 0.9999999999999999


@pytest.mark.parametrize(("n", "ks"), [(1, []), (2, [2]), (3, [2, 3]), (4, [2, 4]), (6, [2, 4, 6])])
def test_sizes_double_up_to_n(n, ks):
    assert sizes(n) == ks


@pytest.mark.parametrize(
    ("kind", "text", "vote"),
    [
        ("numeric", "It is 1,000.50.", "2001/2"),
        ("numeric", "1000.5", "2001/2"),
        ("numeric", "first 3, then −4", "-4"),
        ("numeric", "3 < 4 </think> so 5", "5"),
        ("numeric", "no idea", ""),
        ("numeric", "1/0", "1/0"),
        ("numeric", "9" * 5000, "9" * 5000),
        ("math", "so \\boxed{\\frac{1}{2}} or 3", "\\frac{1}{2}"),
        ("math", "\\boxed{1} no, \\boxed{ 2 }", "2"),
        ("math", "\\boxed{1", "1"),
        ("gsm8k", "4 + 3\n#### 7\n", "7"),
        ("multiple_choice", "A is wrong, so (B).", "b"),
        ("string_check", " Paris. ", "paris"),
        ("string_check", "<answer> Paris</answer> 7", "paris"),
    ],
)
def test_votes(kind, text, vote):
    assert voter({"type": kind})(text) == vote
    assert (
        voter({"type": "gate", "when": [{"type": "length"}], "then": {"type": kind}})(text) == vote
    )
    assert (
        voter({"type": "sum", "graders": {"a": {"type": "regex"}, "b": {"type": kind}}})(text)
        == vote
    )


# --- two models ---


def test_a_comparison_by_hand():
    a = [prompt(0, [0.0, 0.0]), prompt(1, [1.0, 0.0]), prompt(2, [1.0, 1.0]), prompt(3, [0.0])]
    b = [prompt(0, [1.0, 1.0]), prompt(1, [1.0, 1.0]), prompt(2, [1.0, 1.0]), prompt(9, [0.0])]
    found = compare(a, b)
    assert (found.num_pairs, found.only_a, found.only_b, found.different) == (3, 1, 1, ())
    mean, passed = found.contrasts
    assert (mean.metric, mean.num_pairs, mean.mean_a, mean.mean_b) == ("mean", 3, 0.5, 1.0)
    assert (mean.wins, mean.ties, mean.losses) == (2, 1, 0)
    assert mean.difference.value == 0.5  # of 1, 0.5 and 0: SE = sqrt(0.5 / 6)
    assert mean.difference.stderr == near((0.5 / 6) ** 0.5)
    assert mean.difference.high == near(0.5 + 4.302653 * (0.5 / 6) ** 0.5, rel=1e-5)
    assert (mean.sign_p, mean.permutation_p, mean.permutation_exact) == (0.5, 0.5, True)
    assert (passed.metric, passed.mean_a, passed.mean_b) == ("pass@2", near(2 / 3), 1.0)


def test_pairs_ask_the_same_thing_or_are_named():
    a = [prompt(0, [1.0]), prompt(1, [1.0]), prompt(2, [None])]
    b = [prompt(0, [1.0]), prompt(1, [0.0], item={"answer": "2"}), prompt(2, [1.0])]
    found = compare(a, b)
    assert (found.num_pairs, found.different, found.ungraded) == (2, ("sums, row 1",), 1)
    assert [(c.num_pairs, c.difference.value, c.difference.stderr) for c in found.contrasts] == [
        (1, 0.0, None)
    ]


@pytest.mark.parametrize(
    ("b", "message"),
    [
        ([prompt(0, [1.0], prompt="other?")], "asked different things in all 1 rows"),
        ([prompt(5, [1.0])], "share no row: the first has data from sums, the second from sums"),
        ([prompt(0, [1.0], source="logic")], "the second from logic"),
        ([prompt(0, [], skipped="too long")], "the second evaluation has no sampled prompt"),
        ([], "the second evaluation has no sampled prompt"),
    ],
)
def test_nothing_in_common_is_refused(b, message):
    with pytest.raises(InvalidSpec, match=message):
        compare([prompt(0, [1.0])], b)


def test_a_last_bit_is_no_win_and_a_model_equals_itself():
    a = [prompt(i, [0.1, 0.2, 0.3]) for i in range(5)]
    b = [prompt(i, [0.3, 0.2, 0.1]) for i in range(5)]
    for contrast in compare(a, b).contrasts:
        assert (contrast.ties, contrast.sign_p, contrast.permutation_p) == (5, 1.0, 1.0)
        assert (contrast.difference.value, contrast.difference.stderr) == (0.0, 0.0)


def test_sources_are_compared_apart_and_together():
    a = [prompt(0, [0.0]), prompt(0, [1.0], source="logic")]
    b = [prompt(0, [1.0]), prompt(0, [0.0], source="logic")]
    assert [(c.data_source, c.difference.value) for c in compare(a, b).contrasts] == [
        ("logic", -1.0),
        ("sums", 1.0),
        ("all", 0.0),
    ]
