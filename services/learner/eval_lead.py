"""The lead process of an eval job: it sends the weights once and records what comes back.

No optimiser, no gradient: the weights are read from the model's folder in the dtype they are
sent in. Started again after a death it sends them again and goes on in the ledger.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headway.evaluation.data import HeldOut, open_held_out
from headway.evaluation.finished import read_evaluation, write_metrics
from headway.evaluation.names import val_metrics
from headway.evaluation.records import samples_path
from headway.lifecycle import end_tasks
from headway.patience import patiently
from headway.precision import resolve_dtype
from headway.weights.base import BaseTensors
from headway.weights.publisher import Publisher
from services.learner import environment
from services.learner.held_out import prompts_of
from services.learner.lead import Lead, or_stop
from services.learner.round import Round
from services.learner.run_folder import append_lines
from services.learner.sim_trainer import SimTrainer
from services.learner.trainers import Base, load_base
from services.learner.waits import WaitWatch

_ADMIT_EVERY_S = 0.5
_LOOK_EVERY_S = 0.1
VERSION = 0  # of the weights as they were given


class EvalLead(Lead):
    """Rank 0, and the only one, of an eval job."""

    async def _job(self, stopping: asyncio.Event) -> None:
        # The data is read before torch has anything to do: bad input fails in a second.
        spec = self._spec
        data = open_held_out(spec.evaluation.data, spec.reward.grader)
        evaluation, weights = await or_stop(self._ready(data), stopping)
        await or_stop(self._evaluate(evaluation, weights), stopping)
        await patiently(self._ledger.close)  # nodes stop sampling
        await asyncio.to_thread(self._summarise)

    async def _ready(self, data: Sequence[HeldOut]) -> tuple[Round, Mapping[str, Tensor]]:
        spec, settings = self._spec, self._settings
        base = await asyncio.to_thread(load_base, spec, settings)
        self._folder.write_environment(
            environment.describe(
                spec,
                model=base.folder,
                model_sha256=base.sha256,
                source=environment.Together([each.source for each in data]),
                rank_cores=len(os.sched_getaffinity(0)),
                trainer=settings.trainer.kind,
            )
        )
        prompts = await asyncio.to_thread(prompts_of, spec, data, base.tokenizer)
        evaluation = Round(
            spec,
            self._ledger,
            prompts,
            VERSION,
            samples_path(self._folder.path),
            self._events,
            lambda done: self._reporter.update(step=done),
        )
        await evaluation.open()
        total, left = evaluation.num_prompts, evaluation.num_left
        said = f"{total} prompts x {spec.evaluation.n} completions"
        done = f", {total - left} are done" if left < total else ""
        self._events.add("starting", said + done, prompts=total, left=left)
        self._reporter.update(step=total - left)
        self._publisher = await self._new_publisher(base.folder)
        return evaluation, await asyncio.to_thread(self._weights, base)

    def _weights(self, base: Base) -> Mapping[str, Tensor]:
        spec, settings = self._spec, self._settings
        if settings.trainer.kind == "sim":
            return dict(SimTrainer(spec, 0, 1, settings.trainer).weights())
        on_gpu = torch.cuda.is_available()
        return BaseTensors(
            base.folder, getattr(torch, resolve_dtype(spec.rollout.dtype, on_gpu=on_gpu))
        )

    async def _evaluate(self, evaluation: Round, weights: Mapping[str, Tensor]) -> None:
        assert self._publisher is not None
        waits = WaitWatch(self._spec, self._ledger, self._events, self._reporter)
        watching = asyncio.create_task(waits.run(), name="watchdog")
        answers = asyncio.create_task(evaluation.run(), name="evaluation")
        sending = asyncio.create_task(self._send(self._publisher, weights, waits), name="weights")
        try:
            await asyncio.wait({answers, sending, watching}, return_when=asyncio.FIRST_COMPLETED)
            for task in (sending, watching):
                if task.done() and not answers.done():
                    task.result()
                    raise RuntimeError(f"the task {task.get_name()} ended before the evaluation")
            answers.result()
        finally:
            await end_tasks([answers, sending, watching])

    async def _send(
        self, publisher: Publisher, weights: Mapping[str, Tensor], waits: WaitWatch
    ) -> None:
        """Sends the weights to the nodes that are here, and for ever to who joins."""
        wanted = self._spec.rollout.min_nodes
        with waits.on("nodes", 0):
            while len(await patiently(self._ledger.members)) < wanted:  # noqa: ASYNC110
                await asyncio.sleep(_LOOK_EVERY_S)
        with waits.on("publish", VERSION):
            await publisher.publish(VERSION, weights)
        self._reporter.update(phase="running", detail="")
        while True:
            await asyncio.sleep(_ADMIT_EVERY_S)
            await publisher.admit()

    def _summarise(self) -> None:
        """Writes the figures: one row, `step` 0, and `eval/metrics.json`."""
        found = read_evaluation(self._folder.path, VERSION)
        write_metrics(found)
        row: dict[str, Any] = {
            "step": VERSION,
            "version": VERSION,
            "time": time.time(),
            **val_metrics(found.tables),
        }
        self._folder.metrics.unlink(missing_ok=True)  # of a start that died right here
        append_lines(self._folder.metrics, [row])
        self._events.metrics(VERSION, row)
