"""The Megatron strategy: a Hugging Face model on tensor-parallel ranks, proved to be the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from headway.errors import InvalidSpec
from headway.jobspec import JobSpec
from headway.rl.packing import pack
from services.learner.megatron.architecture import Architecture, architecture_of
from services.learner.megatron.build import build, megatron_core
from services.learner.megatron.layout import Field, check_names, fill, layout
from services.learner.megatron.masters import ShardedMasters
from services.learner.megatron.policy import MegatronPolicy
from services.learner.model import (
    CHECK_TOLERANCE,
    DeviceRow,
    Policy,
    check_samples,
    decoder_shape,
    load_policy,
)
from services.learner.placed import Placed
from services.learner.totals import Totals
from services.learner.trained import WholeModel
from services.learner.vocabulary import Vocabulary

_MESH = ("dp", "pp", "cp", "tp")  # Megatron wants a group of each


def place_megatron(
    path: Path, spec: JobSpec, dtype: torch.dtype, rank: int, world: int, device: torch.device
) -> Placed:
    """See `placed.Place`. Neighbouring ranks share layers and train on the same groups.

    InvalidSpec also when megatron-core is not installed.
    """
    megatron_core()  # without it, nothing is begun
    mesh = mesh_of(world, spec.actor.megatron.tensor_model_parallel_size, device)
    source = load_policy(path)
    part = _Part.of(source, mesh)
    again = spec.actor.gradient_checkpointing
    policy = part.policy(source, device, gradient_checkpointing=again)
    weights = ShardedMasters(policy.model, part.fields, part.tensors, mesh["dp", "tp"])
    policy.model.to(dtype)
    policy.train()
    data = mesh["dp"]
    return Placed(
        policy=policy,
        reference=part.reference(source, dtype, device) if spec.needs_reference else None,
        weights=weights,
        shape=decoder_shape(source),
        totals=Totals(data.size(), device, data.get_group()),
        named=lambda tensors: tensors,  # the masters have the files' names
        written=WholeModel(path),
    )


def mesh_of(world: int, tensor_parallel: int, device: torch.device) -> DeviceMesh:
    """All ranks, the neighbours that share layers in a row.

    A collective over the ranks. One rank alone gets a process group of its own.
    """
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    shape = (world // tensor_parallel, 1, 1, tensor_parallel)
    return init_device_mesh(device.type, shape, mesh_dim_names=_MESH)


@dataclass(frozen=True, slots=True)
class _Part:
    """What one rank has of a model."""

    arch: Architecture
    mesh: DeviceMesh
    fields: list[Field]
    tensors: Mapping[str, Tensor]  # whole, by Hugging Face name
    vocabulary: Vocabulary
    rows: int  # of the vocabulary, on this rank

    @staticmethod
    def of(source: Policy, mesh: DeviceMesh) -> _Part:
        """InvalidSpec when the model is of a kind that Megatron's cannot be."""
        ranks, rank = mesh["tp"].size(), mesh.get_local_rank("tp")
        arch = architecture_of(source.lm, ranks)
        fields = layout(arch, ranks)
        tensors = dict(source.lm.named_parameters())
        if (odd := check_names(fields, tensors)) is not None:
            raise InvalidSpec(
                f"actor.strategy megatron cannot train {type(source.lm).__name__}: {odd}"
            )
        (table,) = fields[0].parts
        width = table.width(ranks)
        group = mesh.get_group("tp") if ranks > 1 else None
        vocabulary = Vocabulary(rank * width, width, group)
        return _Part(arch, mesh, fields, tensors, vocabulary, table.local_shape(rank, ranks)[0])

    def policy(
        self, source: Policy, device: torch.device, *, gradient_checkpointing: bool = False
    ) -> MegatronPolicy:
        """A model with the weights of `source`, in float32, which says the same of a packed row.

        InvalidSpec when it does not, or megatron-core is missing; a collective over the ranks.
        """
        model = build(
            self.arch,
            self.mesh,
            padded_vocabulary=self.vocabulary.widest * self.mesh["tp"].size(),
            gradient_checkpointing=gradient_checkpointing,
        ).to(device)
        ranks, rank = self.mesh["tp"].size(), self.mesh.get_local_rank("tp")
        parts = [part for field in self.fields for part in field.parts]
        slices = {part.name: part.cut(self.tensors[part.name], rank, ranks) for part in parts}
        parameters = dict(model.named_parameters())
        assert parameters.keys() == {field.parameter for field in self.fields}
        fill(parameters, self.fields, slices)
        policy = MegatronPolicy(model, self.arch, self.vocabulary, self.rows).to(device)
        check_same(policy, source, device)
        return policy

    def reference(self, source: Policy, dtype: torch.dtype, device: torch.device) -> MegatronPolicy:
        """The same in `dtype`, and frozen."""
        policy = self.policy(source, device)
        policy.model.to(dtype)
        return policy.requires_grad_(False)


@torch.no_grad()
def check_same(policy: MegatronPolicy, source: Policy, device: torch.device) -> None:
    """Compares log-probs of a packed row with the Hugging Face model's. InvalidSpec: they differ.

    Both in float32; a collective over the ranks.
    """
    (row,) = pack(check_samples(source.lm.config.get_text_config().vocab_size), row_tokens=64)
    theirs = source(DeviceRow.of(row, torch.device("cpu")), 1.0, _nothing).logprobs
    ours = policy(DeviceRow.of(row, device), 1.0, _nothing).logprobs.cpu()
    gap = float((ours - theirs).abs().max())
    if not gap <= CHECK_TOLERANCE * float(theirs.abs().max()):
        raise InvalidSpec(
            f"{type(source.lm).__name__} cannot be trained with actor.strategy megatron: its"
            f" log-probs differ by {gap:.3g} from Megatron's"
        )


def _nothing(logprobs: Tensor, part: slice) -> Tensor:
    return logprobs.sum() * 0.0
