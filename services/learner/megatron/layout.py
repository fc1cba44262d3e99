"""Which Hugging Face tensors make up a parameter of Megatron's model on a tensor-parallel rank.

A rank holds a slice of each Hugging Face tensor: of its rows, of its columns, or all of it.
Megatron joins some slices into one parameter:

    linear_qkv   per group of heads: its queries' rows, its key's, its value's
    linear_fc1   the gate's rows, then the up projection's
    embedding    the rows, then zeros up to what every rank has

Everything here is arithmetic on shapes; no communication.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.learner.megatron.architecture import Architecture


@dataclass(frozen=True, slots=True)
class Part:
    """A Hugging Face tensor and how it is cut over T ranks."""

    name: str
    shape: tuple[int, ...]  # of the whole
    dim: int | None = 0  # the dimension that is cut; None: every rank has it whole

    def width(self, ranks: int) -> int:
        """Rows or columns of the widest slice; the last ranks may have fewer, or none."""
        return -(-self.shape[self.dim or 0] // ranks)

    def local_shape(self, rank: int, ranks: int) -> tuple[int, ...]:
        """The shape of a rank's slice."""
        if self.dim is None:
            return self.shape
        start, end = self._bounds(rank, ranks)
        return (*self.shape[: self.dim], end - start, *self.shape[self.dim + 1 :])

    def cut(self, whole: Tensor, rank: int, ranks: int) -> Tensor:
        """A rank's slice, a view."""
        if self.dim is None:
            return whole
        start, end = self._bounds(rank, ranks)
        return whole.narrow(self.dim, start, end - start)

    def _bounds(self, rank: int, ranks: int) -> tuple[int, int]:
        assert self.dim is not None
        size, width = self.shape[self.dim], self.width(ranks)
        return min(rank * width, size), min((rank + 1) * width, size)


@dataclass(frozen=True, slots=True)
class Field:
    """A parameter of Megatron's model, made of the slices of one or more tensors."""

    parameter: str
    parts: tuple[Part, ...]
    groups: int = 1  # runs in which the parts' rows take turns, on this rank
    partial: bool = False  # its gradient is a sum over the tensor-parallel ranks

    def join(self, slices: Sequence[Tensor], rows: int) -> Tensor:
        """The parameter of `rows` rows from its parts' slices."""
        if len(slices) == 1:
            (only,) = slices
            missing = rows - len(only)
            return (
                only if not missing else torch.cat([only, only.new_zeros(missing, *only.shape[1:])])
            )
        runs = [s.reshape(self.groups, -1, *s.shape[1:]) for s in slices]
        return torch.cat(runs, dim=1).flatten(0, 1)

    def split(self, joined: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """The slices, of `sizes` rows, that a parameter (or its gradient) was joined from."""
        if len(sizes) == 1:
            return [joined[: sizes[0]]]
        runs = joined.reshape(self.groups, -1, *joined.shape[1:])
        parts = torch.split(runs, [size // self.groups for size in sizes], dim=1)
        return [part.flatten(0, 1) for part in parts]


def layout(arch: Architecture, ranks: int) -> list[Field]:
    """Every parameter of a rank's model, in the order of the Hugging Face model."""
    hidden, vocabulary = arch.hidden_size, arch.vocab_size
    embedding = Part("model.embed_tokens.weight", (vocabulary, hidden))
    fields = [Field("embedding.word_embeddings.weight", (embedding,))]
    for layer in range(arch.num_layers):
        fields += _layer(arch, layer, ranks)
    fields.append(
        Field("decoder.final_layernorm.weight", (Part("model.norm.weight", (hidden,), None),))
    )
    if not arch.tied:
        fields.append(Field("output_layer.weight", (Part("lm_head.weight", (vocabulary, hidden)),)))
    return fields


def _layer(arch: Architecture, layer: int, ranks: int) -> list[Field]:
    ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
    hidden, wide = arch.hidden_size, arch.intermediate_size
    queries, keys = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    rows = {"q": queries, "k": keys, "v": keys}
    groups = arch.num_kv_heads // ranks

    def norm(parameter: str, name: str, size: int, partial: bool = False) -> Field:
        return Field(ours + parameter, (Part(theirs + name, (size,), None),), partial=partial)

    attention = [
        Field(
            f"{ours}self_attention.linear_qkv.weight",
            tuple(Part(f"{theirs}self_attn.{x}_proj.weight", (rows[x], hidden)) for x in rows),
            groups,
        ),
        Field(
            f"{ours}self_attention.linear_proj.weight",
            (Part(f"{theirs}self_attn.o_proj.weight", (hidden, queries), 1),),
        ),
    ]
    if arch.query_bias:
        parts = tuple(Part(f"{theirs}self_attn.{x}_proj.bias", (rows[x],)) for x in rows)
        attention.append(Field(f"{ours}self_attention.linear_qkv.bias", parts, groups))
    if arch.query_norm:  # of a rank's own heads only
        for x in "qk":
            names = f"self_attention.{x}_layernorm.weight", f"self_attn.{x}_norm.weight"
            attention.append(norm(*names, arch.head_dim, partial=True))
    return [
        *attention,
        Field(
            f"{ours}mlp.linear_fc1.weight",
            tuple(Part(f"{theirs}mlp.{x}_proj.weight", (wide, hidden)) for x in ("gate", "up")),
        ),
        Field(
            f"{ours}mlp.linear_fc2.weight",
            (Part(f"{theirs}mlp.down_proj.weight", (hidden, wide), 1),),
        ),
        norm("input_layernorm.weight", "input_layernorm.weight", hidden),
        norm("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", hidden),
    ]


@torch.no_grad()
def fill(
    parameters: Mapping[str, Tensor], fields: Sequence[Field], slices: Mapping[str, Tensor]
) -> None:
    """Sets a rank's parameters, by name and in their dtype, from its slices, by tensor."""
    for field in fields:
        target = parameters[field.parameter]
        target.copy_(field.join([slices[part.name] for part in field.parts], len(target)))


def check_names(fields: Sequence[Field], tensors: Mapping[str, Tensor]) -> str | None:
    """What differs between the layout's tensors and a model's; None: nothing."""
    parts = {part.name: part for field in fields for part in field.parts}
    for name in sorted(parts.keys() ^ tensors.keys()):
        return f"{name} is {'missing' if name in parts else 'not known'}"
    for name, part in parts.items():
        if part.shape != tuple(tensors[name].shape):
            return f"{name} has the shape {tuple(tensors[name].shape)}, not {part.shape}"
    return None
