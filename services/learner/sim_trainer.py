"""A trainer that imitates training: set step time, a few numbers for a model.

For tests and benchmarks of the framework. Its update is an exact function of the groups,
their order, their spans and the step, so that weights equal bit by bit mean that the same
work was trained; who sampled a group, and at which attempt, does not go in. Batches are
made as for a real model, so a token that lags too much is found here too.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import msgpack
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from headway.errors import InvalidSpec
from headway.jobspec import JobSpec
from headway.messages import Group
from services.learner.batch import label
from services.learner.trainer_settings import TrainerSettings

SIZE = 64  # numbers in the model
_MIB = (1 << 20) // 4  # float32


class SimTrainer:
    """Keeps the Trainer protocol: momentum on pseudo-random gradients, float32 masters."""

    peak_flops = 0.0

    def __init__(self, spec: JobSpec, rank: int, world: int, settings: TrainerSettings) -> None:
        self._spec = spec
        self._rank, self._world = rank, world
        self._settings = settings
        self._model = torch.linspace(-1.0, 1.0, SIZE)
        self._momentum = torch.zeros(SIZE)
        self._held: Future[Any] | None = None

    def train_step(
        self, step: int, groups: Sequence[Group], late: frozenset[int] = frozenset()
    ) -> dict[str, float]:
        """See `Trainer`. Takes `sim_step_s`."""
        began = time.monotonic()
        labelled = label(groups, step, late, self._spec.algorithm.max_policy_lag)
        gradient = torch.zeros(SIZE, dtype=torch.float64)
        for i, group in enumerate(groups):
            place = i * self._world + self._rank + 1
            gradient += place * _gradient(group, step, group.ticket.ticket_id in late)
        tokens = torch.stack([item.lengths().sum() for item in labelled]).sum().double()
        if self._world > 1:
            dist.all_reduce(gradient)
            dist.all_reduce(tokens)
        if self._held is not None:
            wait([self._held])
        lr = self._spec.actor.optim.lr
        self._momentum.mul_(0.9).add_(gradient.float())
        self._model.add_(torch.tanh(self._momentum), alpha=-lr)
        time.sleep(max(0.0, began + self._settings.sim_step_s - time.monotonic()))
        return {
            "actor/skipped": 0.0,
            "actor/lr": lr,
            "actor/grad_norm": float(gradient.norm()),
            "training/num_tokens": float(tokens),
        }

    def digest(self) -> str:
        """See `Trainer`. Every rank has the whole model."""
        return xxhash.xxh3_128_hexdigest(self._model.numpy().tobytes())

    def weights(self) -> list[tuple[str, Tensor]]:
        """See `Trainer`. The ballast is a function of the model."""
        if self._rank != 0:
            return []
        ballast = torch.full((round(self._settings.sim_weight_mib * _MIB),), float(self._model[0]))
        return [("sim.model", self._model.clone()), ("sim.ballast", ballast)]

    def state(self) -> dict[str, Any]:
        """See `Trainer`."""
        return {"model": self._model, "momentum": self._momentum}

    def load_state(self, state: dict[str, Any]) -> None:
        """See `Trainer`. InvalidSpec when the state is of another model."""
        for name, tensor in self.state().items():
            if name not in state:
                raise InvalidSpec(f"the checkpoint is of another model: it has no {name}")
            tensor.copy_(state[name])

    def hold(self, until: Future[Any]) -> None:
        """See `Trainer`."""
        self._held = until

    def export(self, path: Path) -> None:
        """Writes the numbers as `model.safetensors`."""
        if self._rank == 0:
            from safetensors.torch import save_file

            path.mkdir(parents=True, exist_ok=True)
            draft = path / ".model.safetensors.tmp"
            save_file({"sim.model": self._model}, draft)
            draft.replace(path / "model.safetensors")
        if self._world > 1:
            dist.barrier()


class SimTokenizer:
    """A byte a token, 1 to 256; conversations are their lines."""

    chat_template = "sim"
    added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012 - as transformers names it
    all_special_tokens: tuple[str, ...] = ()

    def encode(self, text: str, **_: Any) -> list[int]:
        """UTF-8 bytes, each plus 1."""
        return [byte + 1 for byte in text.encode()]

    def apply_chat_template(self, messages: Sequence[dict[str, Any]], **_: Any) -> str:
        """`role: content`, a line a message."""
        return "".join(f"{message['role']}: {message['content']}\n" for message in messages)


def _gradient(group: Group, step: int, late: bool) -> Tensor:
    """float64 [SIZE], a function of all that is trained on in a group."""
    facts = (
        group.ticket.ticket_id, step, late,
        [
            (c.token_ids, c.logprobs, c.reward, [(s.version, s.start, s.end) for s in c.spans])
            for c in group.completions
        ],
    )  # fmt: skip
    seed = xxhash.xxh3_64_intdigest(msgpack.packb(facts)) >> 1
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(SIZE, dtype=torch.float64, generator=draw)
