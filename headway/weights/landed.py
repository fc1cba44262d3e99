"""Proof that new weights are the ones that sample: the running model against what arrived.

Tensors that vLLM keeps as they were sent (norms, embeddings) are compared bit by bit. Linear
layers are fused, and on a CPU packed for its matrix units, so they are asked instead: a
one-hot input makes a layer return one column of its weight, exactly, whatever its kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from headway.errors import WeightMismatch

_COLUMNS = 2  # asked of each linear layer, others at each version


@torch.no_grad()
def verify_landed(model: Any, sent: Mapping[str, Tensor], version: int) -> int:
    """How many of the sent tensors were found in the model. WeightMismatch names one that differs.

    `sent` holds what arrived, on the host, by checkpoint name. Tensors that the engine
    quantises have no counterpart; for them what was received counts. It is an error when
    nothing at all could be compared.
    """
    found = 0
    for name, is_there, expected in _pairs(model, sent, version):
        if not torch.equal(is_there.cpu(), expected.to(is_there.dtype)):
            raise WeightMismatch(
                f"tensor {name}: the running model does not hold what was sent"
                f" (version {version}); restart the node"
            )
        found += name.count("+") + 1
    if found == 0:
        raise WeightMismatch(
            f"version {version}: none of its tensors can be found in the running model, so"
            " nothing proves that it landed"
        )
    return found


def _pairs(
    model: Any, sent: Mapping[str, Tensor], version: int
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(name, what the model holds, what was sent) of all that can be compared."""
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        UnquantizedEmbeddingMethod,
    )

    fused: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for prefix, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(module, ParallelLMHead):
            names = [f"{prefix}.weight"]
            if names[0] not in sent:
                names = ["model.embed_tokens.weight"]  # a tied head
            asked = isinstance(method, UnquantizedEmbeddingMethod)
        elif isinstance(module, LinearBase):
            names = _unfused(prefix, fused)
            asked = isinstance(method, UnquantizedLinearMethod)
        else:
            yield from _kept(prefix, module, sent)
            continue
        if asked and all(name in sent for name in names):
            weights = [sent[name] for name in names]
            columns = _columns(weights[0].shape[1], version)
            expected = torch.cat([weight[:, columns] for weight in weights]).t()
            answer = _ask(module, method, columns, weights[0].shape[1])
            # vocabularies are padded at their end
            yield "+".join(names), answer[:, : expected.shape[1]], expected


def _kept(
    prefix: str, module: Any, sent: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    for leaf, parameter in module.named_parameters(recurse=False):
        name = f"{prefix}.{leaf}" if prefix else leaf
        expected = sent.get(name)
        if expected is None or parameter.ndim == 0:
            continue
        if parameter.shape[1:] == expected.shape[1:]:
            yield name, parameter[: expected.shape[0]], expected


def _unfused(prefix: str, fused: Mapping[str, list[str]]) -> list[str]:
    parent, _, leaf = prefix.rpartition(".")
    return [f"{parent}.{part}.weight" for part in fused.get(leaf, [leaf])]


def _columns(width: int, version: int) -> list[int]:
    """Spread over the width; as versions go by, all columns have their turn."""
    return [(version + i * (width // _COLUMNS)) % width for i in range(_COLUMNS)]


def _ask(module: Any, method: Any, columns: list[int], width: int) -> Tensor:
    reference = next(p for p in module.parameters(recurse=False))
    probe = torch.zeros(len(columns), width, dtype=reference.dtype, device=reference.device)
    probe[range(len(columns)), columns] = 1.0
    answer: Tensor = method.apply(module, probe, None)
    return answer
