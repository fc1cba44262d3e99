"""Puts a model on its device: whole on one rank, sharded by FSDP2 on several."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from headway.precision import DtypeOrAuto, resolve_dtype
from services.learner.model import Backbone


def compute_dtype(wanted: DtypeOrAuto, device: torch.device) -> torch.dtype:
    """The dtype of matrix products on this device."""
    dtype: torch.dtype = getattr(torch, resolve_dtype(wanted, on_gpu=device.type != "cpu"))
    return dtype


def place(model: Backbone, dtype: torch.dtype, world: int, device: torch.device) -> None:
    """Moves a float32 model to its device; its parameters stay float32 masters.

    One rank has them whole; several share them.
    """
    if world == 1:
        model.to(device)
    else:
        shard(model, dtype, world, device)


def shard(model: Backbone, dtype: torch.dtype, world: int, device: torch.device) -> None:
    """Shares a float32 model's parameters among the ranks of the process group.

    FSDP2 casts them for compute, gathers and scatters, and adds gradients up in float32 across
    ranks: as sums, so the loss must already be divided.
    """
    mesh = init_device_mesh(device.type, (world,))
    mixed = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    # Host memory is plenty: gather once a row, not again for its backward pass.
    again = device.type != "cpu"
    layers = set(getattr(model.lm, "_no_split_modules", None) or ())
    for module in model.lm.modules():
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh, mp_policy=mixed, reshard_after_forward=again)
    fully_shard(model, mesh=mesh, mp_policy=mixed, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def last_backward(policy: object, last: bool, device: torch.device) -> None:
    """Says whether the next backward pass is the update's last.

    On a CPU gradients of rows are added up whole and scattered once an update. On a GPU
    every row scatters: whole gradients would not fit.
    """
    if isinstance(policy, FSDPModule):
        policy.set_is_last_backward(last)
        policy.set_requires_gradient_sync(last or device.type != "cpu")


def own(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, detached, not copied."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The full tensor on every rank (a collective when sharded), detached, not copied."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
