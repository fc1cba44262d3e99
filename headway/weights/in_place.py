"""Writes a version to where a whole reload has put the one before.

vLLM's reload opens every layer, loads it through the model's own code and processes it anew:
right for every model, and slow while nothing is sampled. After one that left every tensor in
the model just as it was sent, as `landed.verify_landed` has found, the next versions are
written to those places at once. Anything else is left to the reload.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from headway.weights.landed import Tenant, ask, tenants

VERIFIED_PART = 4  # of the places, one in so many is looked at after each version
# whether a packed weight is a copy, by the method that packs it, dtype and shape
_PACKED_APART: dict[tuple[type, torch.dtype, tuple[int, ...]], bool] = {}


def can_write(model: Any, sent: Mapping[str, Tensor], landed: Collection[str]) -> bool:
    """Whether the sent tensors that `landed` are all there are, and all that the model has."""
    known = {id(getattr(t.module, t.leaf)) for t in tenants(model, sent)}
    return set(landed) == set(sent) and all(id(p) in known for p in model.parameters())


@torch.no_grad()
def write(model: Any, sent: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Writes a version of the tensors that `can_write` was asked about; sampling must pause.

    `dtype` is the model's. A failure leaves the model half written: a reload must follow.
    """
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    found = list(tenants(model, sent))
    heads = {id(t.module.weight) for t in found if t.asked}
    written: set[int] = set()
    for tenant in found:
        place = getattr(tenant.module, tenant.leaf)
        if place.numel() == 0:
            _pack(tenant.module, tenant.sent(sent))
            continue
        if id(place) not in written:  # a head may share it
            fused = tenant.sent(sent)
            place[: fused.shape[0]].copy_(fused)
            written.add(id(place))
        if place.device.type == "cpu" and tenant.leaf == "weight" and _is_packed(tenant, heads):
            tenant.module.quant_method.process_weights_after_loading(tenant.module)
    for layer in model.modules():
        if is_deferred_attention_layer(layer):
            layer.process_weights_after_loading(dtype)


def _pack(module: Any, sent: Tensor) -> None:
    """A linear layer of which vLLM keeps a packed form only."""
    gone = module.weight
    weight = sent.to(gone.dtype)
    if weight is sent and not _is_packed_apart(module, sent):
        weight = sent.clone()  # the next version comes to the memory of this one
    try:
        _process(module, weight)
    except BaseException:
        module.weight = gone  # as a reload expects it
        raise


def _is_packed_apart(module: Any, sent: Tensor) -> bool:
    """Whether the packed form of such a weight is a copy of it: tried once for each shape."""
    key = (type(module.quant_method), sent.dtype, tuple(sent.shape))
    if key not in _PACKED_APART:
        trial = torch.ones_like(sent)
        _process(module, trial)
        trial.zero_()
        answer = ask(module, [0], sent.shape[1])
        _PACKED_APART[key] = bool((answer == 1).all())
    return _PACKED_APART[key]


def _process(module: Any, weight: Tensor) -> None:
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    module.quant_method.process_weights_after_loading(module)


def _is_packed(tenant: Tenant, heads: Collection[int]) -> bool:
    """Whether a module has a packed form of its weight that is used.

    An embedding has one too, but nobody asks it for products where a head shares its weight.
    """
    if tenant.asked:
        return True
    return hasattr(tenant.module, "cpu_linear") and id(tenant.module.weight) not in heads
