"""LoRA adapters: their names, and how a model takes them in.

An adapter of a linear layer's weight W [out, in] is two tensors, A [rank, in] and B [out, rank];
the layer then computes with W + scale · B A (LoRA, arXiv:2106.09685, section 4.1). Adapters
travel alone. A node adds them to the base of its own folder while it samples, and installs the
sums as it would any weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from headway.errors import WeightMismatch
from headway.messages import TensorSpec, WeightManifest
from headway.weights.base import BaseTensors, base_digest, base_tensors
from headway.weights.packing import Room

LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
_WHERE = "the rollout node's model"


def adapted_weights(names: Iterable[str]) -> tuple[str, ...]:
    """The weights that adapters of these names belong to, in the order of their A."""
    return tuple(f"{n.removesuffix(LORA_A)}.weight" for n in names if n.endswith(LORA_A))


def pair_names(weight: str) -> tuple[str, str]:
    """The names of a weight's A and B."""
    module = weight.removesuffix(".weight")
    return module + LORA_A, module + LORA_B


@torch.no_grad()
def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + scale · B A, float32. weight [out, in], a [rank, in], b [out, rank]."""
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=scale)


class AdaptedModel:
    """A base folder with the adapters of one version after the other added to it."""

    def __init__(self, folder: Path | str, dtype: torch.dtype) -> None:
        """`dtype` is the model's that samples."""
        self._folder = folder
        self._dtype = dtype
        self._room = Room()  # for the sums

    def merge(self, manifest: WeightManifest, adapters: Mapping[str, Tensor]) -> BaseTensors:
        """All tensors of the model with a version's adapters added.

        WeightMismatch: the folder holds another base, or the adapters fit none of its weights.
        """
        check_adapters(manifest, self._folder)
        base = manifest.base
        assert base is not None
        shapes = {n: t.shape for n, t in base_tensors(self._folder).items()}
        names = adapted_weights(adapters)
        places = self._room.lay_out({name: shapes[name] for name in names}, self._dtype)
        whole = BaseTensors(self._folder, self._dtype, places)
        for name, place in places.items():
            a, b = pair_names(name)
            place.copy_(merged(whole.stored(name), adapters[a], adapters[b], base.scale))
        return whole


def check_adapters(manifest: WeightManifest, folder: Path | str) -> None:
    """Raises WeightMismatch unless a publish holds adapters that fit a folder's model."""
    base = manifest.base
    if base is None:
        raise WeightMismatch(f"version {manifest.version} does not say what its adapters go with")
    if (own := base_digest(folder)) != base.digest:
        raise WeightMismatch(
            f"the base model in {folder} has digest {own}, the learner's {base.digest}: give both"
            " the same model folder"
        )
    sent = {spec.name: spec for spec in manifest.tensors}
    weights = adapted_weights(sent)
    if not weights or len(sent) != 2 * len(weights) or len(manifest.tensors) != len(sent):
        raise WeightMismatch(f"version {manifest.version} is no set of pairs of an A and a B")
    shapes = {name: stored.shape for name, stored in base_tensors(folder).items()}
    for weight in weights:
        _check_pair(weight, sent, shapes)


def _check_pair(
    weight: str, sent: Mapping[str, TensorSpec], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    a, b = pair_names(weight)
    if b not in sent:
        raise WeightMismatch(f"tensor {b}: the learner sends {a} without it")
    if weight not in shapes:
        raise WeightMismatch(f"tensor {weight}: the learner sends {a}, {_WHERE} has no such weight")
    if (sent[b].shape[:1] + sent[a].shape[1:], sent[a].shape[:1]) != (
        shapes[weight],
        sent[b].shape[1:],
    ):
        raise WeightMismatch(
            f"tensor {weight}: {list(sent[b].shape)} times {list(sent[a].shape)} is sent, {_WHERE}"
            f" has {list(shapes[weight])}; give both the same model folder"
        )


def check_landed(manifest: WeightManifest, landed: Collection[str]) -> None:
    """Raises WeightMismatch when an adapted weight was not found in the running model.

    What was not found may be sampled from without its adapter, and nobody would know.
    """
    for name in adapted_weights(spec.name for spec in manifest.tensors):
        if name not in landed:
            raise WeightMismatch(
                f"tensor {name}: cannot be found in the running model, so nothing proves that its"
                f" adapter landed (version {manifest.version})"
            )
