"""Shared-prefix packing: tokens that several completions share are computed once.

The input tokens of a row form a prefix tree in preorder. A group whose completions
part at their first token is the row `[prompt][c1]…[cn]`; completions that share more
than the prompt, and groups that share the start of their prompts (a system prompt),
share more. A token attends to its ancestors and itself and its position is its
depth, so every completion sees exactly what it would see alone: sums of losses and
their gradients equal those of the padded batch, up to rounding.

Everything here comes from lengths and token ids as they were sampled. No token id
means padding, so a model whose padding token is its end token needs no special case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt with one completion, as token ids."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One forward pass: L input tokens, S of which predict T completion tokens.

    A completion's last token predicts nothing and is not among the inputs. The
    logits for a completion's first token come from the last prompt token.
    """

    tokens: Tensor  # [L] input ids, in preorder of the tree
    positions: Tensor  # [L] depth in the tree = position in the sequence
    ends: Tensor  # [L] j is i or an ancestor of i exactly when j <= i < ends[j]
    sources: Tensor  # [S] indices into tokens, ascending: positions that run the head
    source_of: Tensor  # [T] index into sources, ascending
    targets: Tensor  # [T] the token predicted
    flat: Tensor  # [T] index into the samples' completions, concatenated

    def mask(self, window: int | None = None) -> Tensor:
        """Who attends to whom, bool [L, L], for reference; rows are queries."""
        index = torch.arange(len(self.tokens))
        return visible(index, index, self, window)


@dataclass(frozen=True, slots=True)
class Block:
    """Queries `start:end` of a row and every key they can see.

    In preorder, ancestors of a run of tokens that lie before the run are all
    ancestors of its first token: one path. So the keys are that path (of a window: its
    end) and the run itself, and no mask of L x L is ever made.
    """

    start: int
    end: int
    keys: Tensor  # [K] indices into the row, ascending
    mask: Tensor  # bool [end - start, K]


def visible(queries: Tensor, keys: Tensor, row: Row, window: int | None = None) -> Tensor:
    """Whether each query attends to each key, bool [Q, K]; indices into the row.

    With a window a token sees itself and the `window - 1` ancestors nearest to it.
    """
    at = queries[:, None]
    seen = (keys <= at) & (at < row.ends[keys])
    if window is None:
        return seen
    return seen & (row.positions[at] - row.positions[keys] < window)


def pack(samples: Sequence[Sample], row_tokens: int) -> list[Row]:
    """Rows of at most `row_tokens` input tokens (a longer sample has its own row).

    Samples are sorted, so neighbours share the longest prefixes and the rows do not
    depend on the order given. A prefix that a row boundary cuts is computed again in
    the next row. Empty completions are left out. ValueError on an empty prompt.
    """
    starts = _completion_starts(samples)
    rows: list[Row] = []
    builder = _Builder()
    for index in sorted(range(len(samples)), key=lambda i: _inputs(samples[i])):
        if not samples[index].completion:
            continue
        if not samples[index].prompt:
            raise ValueError(
                f"sample {index} has an empty prompt: nothing predicts its first token"
            )
        if builder.tokens and builder.size_with(samples[index]) > row_tokens:
            rows.append(builder.build())
            builder = _Builder()
        builder.add(samples[index], starts[index])
    if builder.tokens:
        rows.append(builder.build())
    return rows


def lengthened(row: Row, multiple: int) -> Row:
    """The row with tokens added up to a multiple of a length: each sees itself alone."""
    length = len(row.tokens)
    more = -length % multiple
    if not more:
        return row
    zeros = torch.zeros(more, dtype=row.tokens.dtype)
    return replace(
        row,
        tokens=torch.cat([row.tokens, zeros]),
        positions=torch.cat([row.positions, zeros]),
        ends=torch.cat([row.ends, torch.arange(length + 1, length + more + 1)]),
    )


def blocks(row: Row, block_tokens: int, window: int | None = None) -> list[Block]:
    """Cuts a row into runs of at most `block_tokens` queries for attention.

    A cut falls where the tree is shallowest, so that a run's path is short.
    """
    depth = row.positions.tolist()
    parents = _parents(depth)
    made: list[Block] = []
    start, length = 0, len(depth)
    while start < length:
        end = length
        if length - start > block_tokens:
            choices = range(start + (block_tokens + 1) // 2, start + block_tokens + 1)
            end = min(choices, key=lambda i: depth[i])
        nearest = -1 if window is None else min(depth[start:end]) - window  # no query sees it
        path: list[int] = []
        node = parents[start]
        while node >= 0 and depth[node] > nearest:
            path.append(node)
            node = parents[node]
        keys = torch.tensor(path[::-1] + list(range(start, end)))
        mask = visible(torch.arange(start, end), keys, row, window)
        made.append(Block(start, end, keys, mask))
        start = end
    return made


class _Builder:
    """One row in the making; samples are added in sorted order."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.ends: list[int] = []
        self.last: tuple[int, ...] = ()  # inputs of the sample added last
        self.path: list[int] = []  # its tokens' indices in the row
        self.outputs: list[tuple[int, int, int]] = []  # source token, target, flat

    def size_with(self, sample: Sample) -> int:
        """Row length if `sample` were added."""
        inputs = _inputs(sample)
        return len(self.tokens) + len(inputs) - _common(self.last, inputs)

    def add(self, sample: Sample, start: int) -> None:
        inputs = _inputs(sample)
        shared = _common(self.last, inputs)
        self._leave(shared)
        for depth in range(shared, len(inputs)):
            self.path.append(len(self.tokens))
            self.tokens.append(inputs[depth])
            self.positions.append(depth)
            self.ends.append(0)
        self.last = inputs
        first = len(sample.prompt) - 1
        for offset, target in enumerate(sample.completion):
            self.outputs.append((self.path[first + offset], target, start + offset))

    def build(self) -> Row:
        self._leave(0)
        outputs = sorted(self.outputs)
        sources = sorted({source for source, _, _ in outputs})
        rank = {source: i for i, source in enumerate(sources)}
        return Row(
            tokens=torch.tensor(self.tokens),
            positions=torch.tensor(self.positions),
            ends=torch.tensor(self.ends),
            sources=torch.tensor(sources),
            source_of=torch.tensor([rank[source] for source, _, _ in outputs]),
            targets=torch.tensor([target for _, target, _ in outputs]),
            flat=torch.tensor([flat for _, _, flat in outputs]),
        )

    def _leave(self, depth: int) -> None:
        """Closes the subtrees of the current path below `depth`."""
        for node in self.path[depth:]:
            self.ends[node] = len(self.tokens)
        del self.path[depth:]


def _inputs(sample: Sample) -> tuple[int, ...]:
    return sample.prompt + sample.completion[:-1]


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Length of the longest common prefix."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def _completion_starts(samples: Sequence[Sample]) -> list[int]:
    starts, total = [], 0
    for sample in samples:
        starts.append(total)
        total += len(sample.completion)
    return starts


def _parents(depth: list[int]) -> list[int]:
    """Parent of each token of a preorder from the depths; -1 at a root."""
    path: list[int] = []
    parents = []
    for node, d in enumerate(depth):
        del path[d:]
        parents.append(path[-1] if path else -1)
        path.append(node)
    return parents
