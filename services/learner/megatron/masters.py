"""float32 masters of a Megatron model, under Hugging Face names, cut over its ranks.

The optimiser, checkpoints, digests and publishes see these: `DTensor`s of whole Hugging Face
shapes, whatever the number of ranks. Megatron's own parameters are made from them after each
update, and each of its gradients is taken apart into theirs as soon as a backward pass has made
it. Ranks with the same tensor-parallel place and other data add their gradients up once an
update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from services.learner.megatron.layout import Field, Part, fill


class ShardedMasters:
    """Of one rank. `mesh` is [data-parallel, tensor-parallel]."""

    def __init__(
        self,
        model: nn.Module,
        fields: Sequence[Field],
        tensors: Mapping[str, Tensor],
        mesh: DeviceMesh,
    ) -> None:
        """`tensors` are the whole Hugging Face tensors, on any device; their slices are copied."""
        self._fields = fields
        self._mesh = mesh
        self._model = dict(model.named_parameters())
        parts = {part.name: part for field in fields for part in field.parts}
        device = next(model.parameters()).device
        self.parameters = {
            name: nn.Parameter(
                self._sharded(parts[name], self._copied(parts[name], tensor, device))
            )
            for name, tensor in tensors.items()
        }
        self._gradients: dict[str, Tensor] = {}
        for field in fields:
            self._model[field.parameter].register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self._into(field)
            )

    def refresh(self) -> None:
        """See `masters.Weights`."""
        fill(self._model, self._fields, {n: _own(m) for n, m in self.parameters.items()})

    @torch.no_grad()
    def collect(self) -> None:
        """See `masters.Weights`."""
        data, tensor = self._mesh.get_group("dp"), self._mesh.get_group("tp")
        for field in self._fields:
            for part in field.parts:
                master = self.parameters[part.name]
                gradient = self._gradients.pop(part.name, None)
                if gradient is None:
                    gradient = torch.zeros_like(_own(master))
                if data.size() > 1:
                    dist.all_reduce(gradient, group=data)
                if field.partial and tensor.size() > 1:
                    dist.all_reduce(gradient, group=tensor)
                master.grad = self._sharded(part, gradient)

    def _copied(self, part: Part, whole: Tensor, device: torch.device) -> Tensor:
        piece = part.cut(whole.detach(), self._mesh.get_local_rank("tp"), self._mesh["tp"].size())
        return piece.to(device, torch.float32, copy=True).contiguous()

    def _sharded(self, part: Part, piece: Tensor) -> DTensor:
        """A rank's slice as what it is of the whole."""
        cut = Replicate() if part.dim is None else Shard(part.dim)
        stride = torch.empty(part.shape, device="meta").stride()
        return DTensor.from_local(
            piece,
            self._mesh,
            [Replicate(), cut],
            run_check=False,
            shape=torch.Size(part.shape),
            stride=stride,
        )

    def _into(self, field: Field) -> Callable[[Tensor], None]:
        sizes = [len(_own(self.parameters[part.name])) for part in field.parts]

        def take(parameter: Tensor) -> None:
            joined, parameter.grad = parameter.grad, None
            assert joined is not None
            for part, piece in zip(field.parts, field.split(joined, sizes), strict=True):
                if part.name in self._gradients:
                    self._gradients[part.name].add_(piece)
                else:
                    self._gradients[part.name] = piece.float().contiguous()

        return take


def _own(master: Tensor) -> Tensor:
    assert isinstance(master, nn.Parameter)
    local = master.detach()
    assert isinstance(local, DTensor)
    return local.to_local()
