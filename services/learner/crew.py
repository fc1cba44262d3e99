"""The calls that all ranks of a job make together, and the one thread they run in.

Rank 0 gives orders (`Crew`), the others follow (`follow`). All torch work of a
process happens in one thread, so that collectives meet in the same order on
every rank and the event loop stays free.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from headway.errors import TrainingDiverged
from headway.messages import Group
from headway.payloads import unpack_group
from services.learner import collective
from services.learner.checkpoint import Checkpointer, Writing
from services.learner.collective import Order, What
from services.learner.metrics import Busy
from services.learner.run_folder import RunFolder
from services.learner.trainer import Trainer

T = TypeVar("T")
State = dict[str, Any]


Share = Callable[[Sequence[int], int], list[int]]  # (a batch's ids, rank) -> that rank's ids
Fetch = Callable[[int, Sequence[int]], Coroutine[Any, Any, Sequence[bytes]]]  # (step, ids)


class Crew:
    """Rank 0's hold on all ranks. Each call returns when rank 0's part is done."""

    def __init__(
        self, trainer: Trainer, share: Share, checkpointer: Checkpointer, world: int
    ) -> None:
        self._trainer = trainer
        self._share = share
        self._checkpointer = checkpointer
        self._world = world
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="torch")
        self.busy = Busy()
        self.peak_flops = trainer.peak_flops * world  # all ranks are on machines alike

    async def train(
        self, step: int, groups: Mapping[int, Group], late: frozenset[int]
    ) -> tuple[dict[str, float], str]:
        """One optimiser step on the batch, ids in order: its figures, the weights' digest."""
        ids = tuple(groups)
        mine = [groups[ticket_id] for ticket_id in self._share(ids, 0)]
        order = Order(What.TRAIN, step, ids, late)
        return await self._run(
            order, lambda: (self._trainer.train_step(step, mine, late), self._trainer.digest())
        )

    async def weights(self, version: int) -> dict[str, Tensor]:
        """A staging copy of the weights. TrainingDiverged when one is not finite."""
        return await self._run(
            Order(What.WEIGHTS, version), lambda: checked_finite(self._trainer.weights(), version)
        )

    async def save(self, step: int) -> Writing:
        """Begins to write the state."""
        return await self._run(
            Order(What.SAVE, step), lambda: begin_save(self._trainer, self._checkpointer, step)
        )

    async def load(self, path: Path, step: int) -> None:
        """Every rank loads the checkpoint of `step`."""
        await self._run(
            Order(What.LOAD, step), lambda: load(self._trainer, self._checkpointer, path)
        )

    async def export(self, path: Path) -> None:
        """Writes the Hugging Face folder."""
        await self._run(Order(What.EXPORT), lambda: self._trainer.export(path))

    async def idle(self) -> None:
        """Keeps the other ranks' wait alive."""
        if self._world > 1:
            await self._run(Order(What.IDLE), lambda: None)

    async def dismiss(self) -> None:
        """Ends the other ranks."""
        await self._run(Order(What.STOP), lambda: None)
        self._thread.shutdown(wait=False)

    async def _run(self, order: Order, call: Callable[[], T]) -> T:
        def work() -> T:
            began = time.monotonic()
            try:
                collective.send(order, self._world)
                return call()
            finally:
                self.busy.seconds += time.monotonic() - began

        # Shielded: a collective that has begun is finished even when nobody waits any more.
        loop = asyncio.get_running_loop()
        return await asyncio.shield(loop.run_in_executor(self._thread, work))


def follow(
    trainer: Trainer,
    share: Share,
    checkpointer: Checkpointer,
    fetch: Fetch,
    folder: RunFolder,
    rank: int,
    runner: asyncio.Runner,
) -> None:
    """Ranks above 0: does what rank 0 orders until it says stop.

    `fetch` gets this rank's own payloads of a step.
    """
    writing: Writing | None = None
    while True:
        order = collective.receive()
        match order.what:
            case What.TRAIN:
                mine = share(order.ids, rank)
                payloads = runner.run(fetch(order.step, mine))
                trainer.train_step(order.step, [unpack_group(p) for p in payloads], order.late)
                trainer.digest()
            case What.WEIGHTS:
                for _ in trainer.weights():
                    pass
            case What.SAVE:
                if writing is not None:
                    writing.durable.result()
                writing = begin_save(trainer, checkpointer, order.step)
            case What.LOAD:
                load(trainer, checkpointer, folder.checkpoints / f"step-{order.step}")
            case What.EXPORT:
                trainer.export(folder.model)
            case What.STOP:
                if writing is not None:
                    writing.durable.result()
                return


def begin_save(trainer: Trainer, checkpointer: Checkpointer, step: int) -> Writing:
    """Starts writing a rank's state; the trainer's next update waits until it may change it."""
    state = {"trainer": trainer.state(), "rng": torch.get_rng_state()}
    writing = checkpointer.begin(step, state)
    trainer.hold(writing.taken)
    return writing


def load(trainer: Trainer, checkpointer: Checkpointer, path: Path) -> None:
    """Loads a rank's state, and the random state, from a checkpoint."""
    state: State = {"trainer": trainer.state(), "rng": torch.get_rng_state()}
    checkpointer.load(path, state)
    trainer.load_state(state["trainer"])
    torch.set_rng_state(state["rng"])


def checked_finite(weights: Iterable[tuple[str, Tensor]], version: int) -> dict[str, Tensor]:
    """The weights, or TrainingDiverged naming the first that holds a NaN or an infinity."""
    staged = dict(weights)
    for name, tensor in staged.items():
        # The extremes show NaN and infinity alike, in a small part of isfinite's time.
        if tensor.numel() and not all(map(torch.isfinite, tensor.aminmax())):
            raise TrainingDiverged(
                f"weights of version {version} are not finite ({name}): lower actor.optim.lr"
            )
    return staged
