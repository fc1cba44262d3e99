"""LoRA by peft: a frozen model with small trained factors beside its linear layers.

The layers are peft's, put into the policy in place, so that packed rows, sharding and the head
see the model they know. The base stays in the compute dtype; adapters have float32 masters like
any trained parameter. With the adapters off, the policy is the one that the job started from.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headway.errors import InvalidSpec
from headway.jobspec import JobSpec
from headway.jobspec_model import ALL_LINEAR
from headway.weights.adapter import adapted_weights, merged, pair_names
from headway.weights.base import BaseTensors
from headway.weights.checkpoint import checkpoint_shapes
from services.learner.export import write_model
from services.learner.head import HeadOutput, LossOf
from services.learner.model import DeviceRow, Policy, RunsRows

FOLDER = "adapter"  # in an exported folder, in peft's format
_NAME = "default"  # peft's for the only adapter
_PEFT_PREFIX = "base_model.model."


class Adapters:
    """The adapters of a policy; see `Trained`."""

    dtype = torch.float32

    def __init__(self, policy: Policy, spec: JobSpec, source: Path) -> None:
        """Puts adapters into the policy: A is drawn by the job's seed, B is 0.

        InvalidSpec when `model.target_modules` names no linear layer of the model.
        """
        from peft import LoraConfig, inject_adapter_in_model

        self._policy, self._source = policy, source
        self._scale = spec.model.lora_scale
        self._modules = find_targets(policy.lm, spec.model.target_modules)
        _check_stored(policy.lm, self._modules, source)
        leaves = sorted({name.rpartition(".")[2] for name in self._modules})
        everything = spec.model.target_modules == (ALL_LINEAR,)
        self._config = LoraConfig(
            task_type="CAUSAL_LM",
            base_model_name_or_path=spec.model.path,
            r=spec.model.lora_rank,
            lora_alpha=spec.model.lora_alpha,
            lora_dropout=0.0,
            target_modules=leaves if everything else list(spec.model.target_modules),
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(spec.seed)
            inject_adapter_in_model(self._config, policy.lm)
        self._layers = _layers(policy.lm)
        if self._layers.keys() != set(self._modules):
            odd = min(self._layers.keys() ^ set(self._modules))
            raise InvalidSpec(f"model.target_modules: peft does not take {odd} as it is named")

    def freeze(self, dtype: torch.dtype) -> None:
        """See `Trained`."""
        for parameter in self._policy.lm.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.detach().to(dtype)

    def reference(self, dtype: torch.dtype, world: int, device: torch.device) -> RunsRows:
        """See `Trained`. The policy itself, with its adapters off while it runs."""

        def run(
            row: DeviceRow,
            temperature: float,
            loss_of: LossOf,
            entropy_weights: Tensor | None = None,
        ) -> HeadOutput:
            with self.off():
                out: HeadOutput = self._policy(row, temperature, loss_of, entropy_weights)
                return out

        return run

    @contextmanager
    def off(self) -> Iterator[None]:
        """The base model, inside the block."""
        # by their factor: switching layers off would make peft touch what FSDP watches
        for layer in self._layers.values():
            layer.scale_layer(0.0)
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.unscale_layer()

    def named(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """See `Trained`. `<layer>.lora_A.weight` and `<layer>.lora_B.weight`."""
        return {name.replace(f".{_NAME}.", "."): tensor for name, tensor in tensors.items()}

    def write(self, target: Path, tensors: Mapping[str, Tensor]) -> None:
        """See `Trained`. The sums as the model's folder, and in it `FOLDER` with the adapters."""
        base = BaseTensors(self._source, torch.float32)
        weights = {name: base.stored(name) for name in base}
        for name in adapted_weights(tensors):
            a, b = pair_names(name)
            whole = merged(weights[name], tensors[a], tensors[b], self._scale)
            weights[name] = whole.to(weights[name].dtype)
        write_model(self._source, target, weights, lambda folder: self._save(folder, tensors))

    def _save(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        from safetensors.torch import save_file

        target = folder / FOLDER
        target.mkdir()
        plain = replace(self._config, inference_mode=True).to_dict()
        config = {k: sorted(v) if isinstance(v, set) else v for k, v in plain.items()}
        (target / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
        named = {_PEFT_PREFIX + name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(named, target / "adapter_model.safetensors", {"format": "pt"})


def find_targets(lm: Any, wanted: Sequence[str]) -> list[str]:
    """The linear layers that get adapters, by full name, in the model's order.

    InvalidSpec names what is no linear layer, and the nearest that is.
    """
    head = lm.get_output_embeddings()
    linear = {n: m for n, m in lm.named_modules() if type(m) is nn.Linear and m is not head}
    if tuple(wanted) == (ALL_LINEAR,):
        return list(linear)
    found: set[str] = set()
    for name in wanted:
        matching = [n for n, _ in lm.named_modules() if n == name or n.endswith(f".{name}")]
        if not matching or not linear.keys() >= set(matching):
            leaves = sorted({n.rpartition(".")[2] for n in linear})
            near = difflib.get_close_matches(name, leaves, n=1, cutoff=0.6)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise InvalidSpec(
                f"model.target_modules: {name} is no linear layer of {type(lm).__name__} that can"
                f" have an adapter{hint}; it has {', '.join(leaves)}"
            )
        found.update(matching)
    return [name for name in linear if name in found]


def _check_stored(lm: Any, modules: Sequence[str], source: Path) -> None:
    """InvalidSpec unless a folder has the layers' weights by the names that layers have here."""
    shapes = checkpoint_shapes(source)
    for name in modules:
        if shapes.get(f"{name}.weight") != tuple(lm.get_submodule(name).weight.shape):
            raise InvalidSpec(
                f"model.lora_rank: {source} does not hold the weight of {name} as"
                f" {type(lm).__name__} has it, so adapters cannot be added to it: train all weights"
            )


def _layers(lm: Any) -> dict[str, Any]:
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in lm.named_modules() if isinstance(module, LoraLayer)}
