"""Prefix-tree rows: layout, positions, masks and targets, by hand and by property."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.rl.packing import Row, Sample, blocks, pack


def test_a_group_is_prompt_then_completions():
    # prompt 7 8; completions 1 2 3 and 4 5: the last token of each is not an input
    (row,) = pack([Sample((7, 8), (1, 2, 3)), Sample((7, 8), (4, 5))], 100)
    assert row.tokens.tolist() == [7, 8, 1, 2, 4]
    assert row.positions.tolist() == [0, 1, 2, 3, 2]  # restart at the prompt's length
    assert row.sources.tolist() == [1, 2, 3, 4]
    # both first tokens come from the last prompt token
    assert row.source_of.tolist() == [0, 0, 1, 2, 3]
    assert row.targets.tolist() == [1, 4, 2, 3, 5]
    assert row.flat.tolist() == [0, 3, 1, 2, 4]
    assert row.mask().int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],  # the second completion does not see the first
    ]


def test_what_completions_share_is_computed_once():
    # 1 2 | 3 and 1 2 | 4: after the prompt 9 the row has 1 2 once; the same answer twice is free
    samples = [Sample((9,), (1, 2, 3, 0)), Sample((9,), (1, 2, 4, 0)), Sample((9,), (1, 2, 3, 0))]
    (row,) = pack(samples, 100)
    assert row.tokens.tolist() == [9, 1, 2, 3, 4]
    assert row.positions.tolist() == [0, 1, 2, 3, 3]
    assert len(row.flat) == 12 and row.flat.sort().values.tolist() == list(range(12))


def test_groups_share_the_start_of_their_prompts():
    (row,) = pack([Sample((5, 6, 1), (8,)), Sample((5, 6, 2), (8,))], 100)
    assert row.tokens.tolist() == [5, 6, 1, 2]
    assert row.sources.tolist() == [2, 3]


def test_one_token_and_empty_completions():
    samples = [Sample((1, 2), ()), Sample((1, 2), (3,)), Sample((4,), ())]
    (row,) = pack(samples, 100)
    assert row.tokens.tolist() == [1, 2]
    assert (row.sources.tolist(), row.targets.tolist(), row.flat.tolist()) == ([1], [3], [0])
    assert pack([Sample((1,), ())], 100) == []
    assert pack([], 100) == []


def test_targets_come_from_lengths_not_from_token_ids_s063():
    # the padding token equals the end token 0, and both stand inside the answers too:
    # the end of a finished answer is a target, a cut answer has none, nothing is dropped
    finished, cut = Sample((0, 5), (0, 6, 0)), Sample((0, 5), (0, 6))
    (row,) = pack([finished, cut], 100)
    by_flat = dict(zip(row.flat.tolist(), row.targets.tolist(), strict=True))
    assert by_flat == {0: 0, 1: 6, 2: 0, 3: 0, 4: 6}
    assert row.tokens.tolist() == [0, 5, 0, 6]


def test_empty_prompt_is_an_error():
    with pytest.raises(ValueError, match="sample 0 has an empty prompt"):
        pack([Sample((), (1, 2))], 100)


def test_rows_keep_their_bound_and_repeat_the_prompt():
    samples = [Sample((1, 2, 3), (10 + i, 0, 0)) for i in range(4)]  # 3 + 2 tokens each
    rows = pack(samples, 7)
    assert [row.tokens.tolist() for row in rows] == [
        [1, 2, 3, 10, 0, 11, 0],
        [1, 2, 3, 12, 0, 13, 0],
    ]
    assert [len(row.tokens) for row in pack(samples, 2)] == [5, 5, 5, 5]  # longer: a row each


SAMPLES = st.lists(
    st.builds(
        Sample,
        st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple),
        st.lists(st.integers(0, 2), max_size=6).map(tuple),
    ),
    max_size=8,
)


def seen(row: Row, i: int) -> list[int]:
    """The tokens position i attends to, in the order of their positions."""
    keys = torch.nonzero(row.mask()[i]).flatten()
    assert row.positions[keys].tolist() == list(range(len(keys)))
    return row.tokens[keys].tolist()


@given(SAMPLES, st.integers(1, 30))
def test_every_target_is_predicted_from_exactly_its_own_history(samples, row_tokens):
    histories = [
        (list(s.prompt + s.completion[:i]), target)
        for s in samples
        for i, target in enumerate(s.completion)
    ]
    found: dict[int, tuple[list[int], int]] = {}
    for row in pack(samples, row_tokens):
        longest = max(len(s.prompt + s.completion) - 1 for s in samples if s.completion)
        assert len(row.tokens) <= max(row_tokens, longest)
        assert row.source_of.tolist() == sorted(row.source_of.tolist())
        for rank, target, flat in zip(row.source_of, row.targets, row.flat, strict=True):
            assert int(flat) not in found
            found[int(flat)] = (seen(row, int(row.sources[rank])), int(target))
    assert [found[i] for i in range(len(histories))] == histories


@given(SAMPLES, st.integers(1, 30), st.integers(1, 6))
def test_blocks_see_what_the_whole_mask_lets_them(samples, row_tokens, block_tokens):
    for row in pack(samples, row_tokens):
        whole = row.mask()
        at = 0
        for block in blocks(row, block_tokens):
            assert block.start == at and 0 < block.end - block.start <= block_tokens
            expected = torch.zeros_like(whole[block.start : block.end])
            expected[:, block.keys] = block.mask
            assert torch.equal(expected, whole[block.start : block.end])
            at = block.end
        assert at == len(row.tokens)


@given(SAMPLES, st.randoms(use_true_random=False))
def test_the_order_of_samples_does_not_change_the_rows(samples, random):
    shuffled = list(samples)
    random.shuffle(shuffled)
    a, b = pack(samples, 12), pack(shuffled, 12)
    assert [r.tokens.tolist() for r in a] == [r.tokens.tolist() for r in b]
    assert [r.targets.tolist() for r in a] == [r.targets.tolist() for r in b]
