"""Where each sent tensor lies in the running model, and proof that it is the one that samples.

Tensors that vLLM keeps as they were sent (norms, embeddings, biases) are compared bit by bit.
Linear layers are fused, and on a CPU packed for its matrix units, so they are asked instead: a
one-hot input makes a layer return one column of its weight, exactly, whatever its kernel.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headway.errors import WeightMismatch

_COLUMNS = 2  # asked of each linear layer, others at each version


@dataclass(frozen=True, slots=True)
class Tenant:
    """Sent tensors, one after the other along their first dimension, in one of vLLM's modules."""

    module: Any
    leaf: str  # the parameter's name in the module
    names: tuple[str, ...]  # of the sent tensors
    asked: bool  # a weight for products, which may lie there in another form

    def sent(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """What was sent, fused; not copied when the tensors lie side by side."""
        return _side_by_side([tensors[name] for name in self.names])


def tenants(model: Any, sent: Mapping[str, Tensor]) -> Iterator[Tenant]:
    """All that can be found. Tensors that the engine quantises have no counterpart."""
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        UnquantizedEmbeddingMethod,
    )

    fused: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for prefix, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        parts = _unfused(prefix, fused) if isinstance(module, LinearBase) else [prefix]
        asked = False
        if isinstance(module, ParallelLMHead):
            if f"{prefix}.weight" not in sent:
                parts = ["model.embed_tokens"]  # a tied head
            asked = isinstance(method, UnquantizedEmbeddingMethod)
        elif isinstance(module, LinearBase):
            asked = isinstance(method, UnquantizedLinearMethod)
        for leaf, parameter in module.named_parameters(recurse=False):
            names = tuple(f"{part}.{leaf}" if part else leaf for part in parts)
            if all(name in sent for name in names):
                tenant = Tenant(module, leaf, names, asked and leaf == "weight")
                if tenant.asked or _is_kept(parameter, tenant.sent(sent)):
                    yield tenant


def fused_with(model: Any, weights: Collection[str]) -> frozenset[str]:
    """The weights, and those that lie in one of vLLM's modules with them."""
    groups = getattr(model, "packed_modules_mapping", {}).values()
    found = set(weights)
    for weight in weights:
        parent, _, leaf = weight.removesuffix(".weight").rpartition(".")
        for group in groups:
            if leaf in group:
                found.update(f"{parent}.{part}.weight" for part in group)
    return frozenset(found)


@torch.no_grad()
def verify_landed(
    model: Any, sent: Mapping[str, Tensor], version: int, part: int = 1
) -> frozenset[str]:
    """The sent tensors that were found in the model. WeightMismatch names one that differs.

    `sent` holds what arrived, on the host, by checkpoint name. For tensors that cannot be found
    what was received counts; it is an error when nothing at all could be compared. With `part`
    above 1 only every so manieth place is looked at, others at each version.
    """
    found: set[str] = set()
    for number, tenant in enumerate(tenants(model, sent)):
        if number % part != version % part:
            continue
        is_there, expected = _compared(tenant, tenant.sent(sent), version)
        if not torch.equal(is_there.cpu(), expected.to(is_there.dtype)):
            raise WeightMismatch(
                f"tensor {'+'.join(tenant.names)}: the running model does not hold what was sent"
                f" (version {version}); restart the node"
            )
        found.update(tenant.names)
    if not found and part == 1:
        raise WeightMismatch(
            f"version {version}: none of its tensors can be found in the running model, so"
            " nothing proves that it landed"
        )
    return frozenset(found)


def _compared(tenant: Tenant, sent: Tensor, version: int) -> tuple[Tensor, Tensor]:
    """What the module holds, or answers, and what that should be."""
    if not tenant.asked:
        # vocabularies are padded at their end
        return getattr(tenant.module, tenant.leaf)[: sent.shape[0]], sent
    columns = _columns(sent.shape[1], version)
    answer = ask(tenant.module, columns, sent.shape[1])
    return answer[:, : sent.shape[0]], sent[:, columns].t()


def _is_kept(parameter: Tensor, sent: Tensor) -> bool:
    return parameter.ndim > 0 and parameter.shape[1:] == sent.shape[1:]


def _unfused(prefix: str, fused: Mapping[str, list[str]]) -> list[str]:
    parent, _, leaf = prefix.rpartition(".")
    return [f"{parent}.{part}" for part in fused.get(leaf, [leaf])]


def _columns(width: int, version: int) -> list[int]:
    """Spread over the width; as versions go by, all columns have their turn."""
    return [(version + i * (width // _COLUMNS)) % width for i in range(_COLUMNS)]


def ask(module: Any, columns: list[int], width: int) -> Tensor:
    """What a linear layer answers to one-hot inputs: those columns of its weight, a row each."""
    reference = next(p for p in module.parameters(recurse=False))
    probe = torch.zeros(len(columns), width, dtype=reference.dtype, device=reference.device)
    probe[range(len(columns)), columns] = 1.0
    answer: Tensor = module.quant_method.apply(module, probe, None)
    return answer


def _side_by_side(parts: list[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    first, end = parts[0], parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != end or not part.is_contiguous() or part.dtype != first.dtype:
            return torch.cat(parts)
        end += part.numel() * part.element_size()
    if end - first.untyped_storage().data_ptr() > first.untyped_storage().nbytes():
        return torch.cat(parts)
    shape = (sum(part.shape[0] for part in parts), *first.shape[1:])
    return first.as_strided(shape, first.stride())
