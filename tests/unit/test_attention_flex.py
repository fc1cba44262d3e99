"""FlexAttention's description of a row against the SDPA masks, element by element, on a CPU.

The kernels that a GPU runs are in tests/gpu; here the same plan runs unfused, forward only.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.rl.packing import Row, lengthened, pack
from services.learner.attention_blocks import BlockPlan
from services.learner.attention_flex import FlexPlan, mask_mod
from tests.support.packed import CPU, samples_of
from tests.unit.test_packing import SAMPLES

WINDOWS = st.one_of(st.none(), st.integers(1, 12))


def whole_mask(row: Row, window: int | None) -> torch.Tensor:
    """FlexAttention's mask function at every pair, bool [L, L]."""
    index = torch.arange(len(row.tokens))
    none = torch.zeros(())
    return mask_mod(row.ends, row.positions, window)(none, none, index[:, None], index)


@given(SAMPLES, st.integers(1, 30), WINDOWS)
def test_the_mask_function_is_the_sdpa_mask(samples, row_tokens, window):
    for row in pack(samples, row_tokens):
        assert torch.equal(whole_mask(row, window), row.mask(window))


def test_a_window_by_hand():
    (row,) = pack(samples_of()[:1], 100)
    seen = row.mask(3).int()
    assert seen.sum(dim=1).tolist() == [1, 2] + [3] * (len(row.tokens) - 2)
    assert seen[4].nonzero().flatten().tolist() == [2, 3, 4]


@pytest.mark.parametrize("window", [None, 5])
def test_no_block_that_a_query_needs_is_skipped(window):
    samples = [s for seed in range(12) for s in samples_of(seed)]
    (row,) = pack(samples, 10_000)
    row = lengthened(row, 128)
    assert len(row.tokens) % 128 == 0 and len(row.tokens) > 512
    blocks = FlexPlan.of(row, CPU).block_mask(window)
    kept = blocks.to_dense()[0, 0].bool()
    size = blocks.BLOCK_SIZE[0]
    tiles = row.mask(window).unflatten(0, (-1, size)).unflatten(2, (-1, size))
    assert torch.equal(kept, tiles.any(dim=3).any(dim=1))
    assert kept.float().mean() < 0.7  # preorder keeps most keys near: far blocks cost nothing


def test_added_tokens_see_themselves_and_nobody_sees_them():
    (row,) = pack(samples_of(), 1000)
    longer = lengthened(row, 128)
    count = len(row.tokens)
    mask = longer.mask()
    assert torch.equal(mask[:count, :count], row.mask())
    assert not mask[:count, count:].any()
    assert torch.equal(mask[count:], torch.eye(len(longer.tokens), dtype=torch.bool)[count:])
    assert torch.equal(longer.sources, row.sources)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (6, 2)])
def test_both_plans_attend_alike(window, cap, heads, kv_heads):
    (row,) = pack(samples_of(), 1000)
    rng = torch.Generator().manual_seed(0)
    length, size = len(row.tokens), 16
    query = torch.randn(1, heads, length, size, generator=rng)
    key, value = torch.randn(2, 1, kv_heads, length, size, generator=rng)
    for scaling in (None, 0.4):
        settings = {"scaling": scaling, "window": window, "cap": cap}
        flex = FlexPlan.of(row, CPU).attend(query, key, value, **settings)
        blocks = BlockPlan(row, CPU, 16).attend(query, key, value, **settings)
        assert torch.allclose(flex, blocks, atol=1e-5)
    plain = plain_attention(row, query, key, value, scaling=0.4, window=window, cap=cap)
    assert torch.allclose(blocks, plain, atol=1e-5)


def plain_attention(row, query, key, value, *, scaling, window, cap):
    """Query by query, key by key, in float64."""
    mask, repeat = row.mask(window), query.shape[1] // key.shape[1]
    out = torch.zeros(1, query.shape[2], query.shape[1], query.shape[3], dtype=torch.float64)
    for head in range(query.shape[1]):
        q, k, v = (
            x[0].double()
            for x in (query[:, head], key[:, head // repeat], value[:, head // repeat])
        )
        for i in range(len(mask)):
            near = mask[i].nonzero().flatten()
            scores = (k[near] * q[i]).sum(dim=1) * scaling
            if cap is not None:
                scores = cap * torch.tanh(scores / cap)
            out[0, i, head] = (scores.softmax(dim=0)[:, None] * v[near]).sum(dim=0)
    return out.float()
