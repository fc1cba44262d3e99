"""Rank 0 of a job from start to end, and the other ranks' much shorter life."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from headway.data import PromptStream, Source, open_source
from headway.errors import HeadwayError
from headway.evaluation.data import HeldOut, open_held_out
from headway.jobspec import JobSpec
from headway.journal import Journal
from headway.ledger.keys import validation_room
from headway.ledger.redis_ledger import RedisLedger
from headway.lifecycle import end_tasks
from headway.memory import GIB
from headway.patience import patiently
from headway.ports import with_port
from headway.redis_client import connect
from headway.report import write_report
from headway.rpc import grpc_server
from headway.telemetry import get_logger
from headway.weights.publisher import Publisher
from headway.weights.snapshot import Offers, SharedFolder, SnapshotServer
from services.learner import environment
from services.learner.checkpoint import Checkpointer
from services.learner.crew import Crew, follow
from services.learner.events import Events
from services.learner.feeder import Feeder
from services.learner.held_out import prompts_of
from services.learner.loop import Cancelled, Loop
from services.learner.parts import Parts, ledger_config
from services.learner.recording import Recorder, Recording
from services.learner.resume import Start, find_start
from services.learner.run_folder import RunFolder
from services.learner.saver import Saver
from services.learner.seat import seat
from services.learner.status import Reporter
from services.learner.train import CANCELLED, FAILED, RETRY, SUCCEEDED, RankSettings
from services.learner.trainers import adapter_base, base_folder, build_trainer, device_of, load_base
from services.learner.validation import Validation

log = get_logger(__name__)
T = TypeVar("T")


def lead(settings: RankSettings, spec: JobSpec, reporter: Reporter) -> int:
    """Rank 0: runs the whole job; returns the exit code."""
    return asyncio.run(Lead(settings, spec, reporter).run())


def follow_rank(settings: RankSettings, spec: JobSpec) -> int:
    """Ranks above 0: load the model and follow rank 0's orders."""
    seat(spec, settings)
    trainer, share = build_trainer(spec, settings, base_folder(spec, settings))
    folder = RunFolder(settings.run_dir)
    with asyncio.Runner() as runner:
        redis = runner.run(_connected(settings.redis_url))
        ledger = RedisLedger(redis, settings.job_id)

        def fetch(_: int, ids: Sequence[int]) -> Coroutine[Any, Any, list[bytes]]:
            return patiently(lambda: ledger.payloads(ids))

        follow(trainer, share, checkpointer(spec, folder), fetch, folder, settings.rank, runner)
        runner.run(redis.aclose())
    return SUCCEEDED


class Lead:
    """Rank 0's resources, and how it ends."""

    def __init__(self, settings: RankSettings, spec: JobSpec, reporter: Reporter) -> None:
        self._settings = settings
        self._spec = spec
        self._reporter = reporter
        self._folder = RunFolder(settings.run_dir)
        self._redis = connect(settings.redis_url)
        self._ledger = RedisLedger(self._redis, settings.job_id)
        self._events = Events(Journal(self._redis, settings.job_id))
        self._publisher: Publisher | None = None
        self._validation: Validation | None = None
        self._open = AsyncExitStack()  # what is closed at the end

    async def run(self) -> int:
        """The job from start to end. Every way out leaves a readable run folder."""
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopping.set)
        self._folder.create(self._spec)
        writer = asyncio.create_task(self._events.run(), name="events")
        code = FAILED
        try:
            await self._job(stopping)
            code, ending = SUCCEEDED, {"phase": "succeeded", "detail": ""}
        except Cancelled:
            code, ending = CANCELLED, {"phase": "cancelled", "detail": "cancelled"}
        except HeadwayError as error:
            log.error("%s", error, extra={"kind": error.kind})
            code = RETRY if error.retryable else FAILED
            ending = {"phase": "failed", "detail": str(error), "error_kind": error.kind}
        except Exception as error:
            log.exception("training failed")
            detail = f"{type(error).__name__}: {error}"
            ending = {"phase": "failed", "detail": detail, "error_kind": HeadwayError.kind}
        await self._wind_up(code)
        await end_tasks([writer])
        await self._redis.aclose()
        self._reporter.update(**ending, retryable=code == RETRY)
        return code

    async def _job(self, stopping: asyncio.Event) -> None:
        # The data is checked before torch has anything to do: bad input fails in a second.
        source = open_source(self._spec.data)
        held_out = self._held_out()
        parts, loop = await or_stop(self._prepare(source, held_out), stopping)
        await loop.run(stopping)
        await patiently(self._ledger.close)  # nodes stop sampling; the cores are ours
        if self._spec.trainer.export:
            await or_stop(parts.crew.export(self._folder.model), stopping)
        await parts.crew.dismiss()
        await patiently(lambda: self._ledger.trim(self._spec.trainer.total_training_steps))

    def _held_out(self) -> list[HeldOut]:
        """The data that is validated on; none where nothing is."""
        spec = self._spec
        asked = spec.evaluation.data if spec.evaluation.test_freq else ()
        return open_held_out(asked, spec.reward.grader)

    async def _prepare(self, source: Source, held_out: Sequence[HeldOut]) -> tuple[Parts, Loop]:
        spec, settings, folder = self._spec, self._settings, self._folder
        await patiently(lambda: self._ledger.open(ledger_config(spec)))
        base = await asyncio.to_thread(load_base, spec, settings)
        facts = environment.describe(
            spec,
            model=base.folder,
            model_sha256=base.sha256,
            source=source,
            rank_cores=len(os.sched_getaffinity(0)),
            trainer=settings.trainer.kind,
            critic=base.critic,
        )
        if held_out:
            together = environment.Together([each.source for each in held_out])
            facts["held_out"] = together.describe()
        folder.write_environment(facts)
        stream = PromptStream(source, spec, base.tokenizer)
        await asyncio.to_thread(seat, spec, settings)
        trainer, share = await asyncio.to_thread(build_trainer, spec, settings, base.folder)
        saves = checkpointer(spec, folder)
        crew = Crew(trainer, share, saves, settings.world)
        recording = Recording(folder.groups, int(spec.trainer.max_record_gib * GIB))
        start = await find_start(spec, self._ledger, crew, stream, folder, recording, self._events)
        self._validation = await self._resumed_validation(held_out, base.tokenizer, start)
        self._publisher = await self._new_publisher(base.folder)
        parts = Parts(
            spec=spec,
            ledger=self._ledger,
            crew=crew,
            feeder=Feeder(self._ledger, stream, spec.data.train_batch_size),
            publisher=self._publisher,
            saver=Saver(
                spec, crew, saves, self._ledger, self._events, recording, saved=start.saved
            ),
            folder=folder,
            recorder=Recorder(recording, self._events),
            events=self._events,
            reporter=self._reporter,
            validation=self._validation,
        )
        self._reporter.update(step=start.step)
        published = start.committed
        if self._validation is not None:
            # nobody has anything newer than a version that is not validated to the end
            unfinished = self._validation.unfinished(published)
            published = published if unfinished is None else unfinished
        return parts, Loop(parts, start.step, published, start.nonfinite)

    async def _resumed_validation(
        self, data: Sequence[HeldOut], tokenizer: Any, start: Start
    ) -> Validation | None:
        """The job's validations, as they stand after a start; None where it has none."""
        if not data:
            return None
        prompts = await asyncio.to_thread(prompts_of, self._spec, data, tokenizer)

        def ledger_of(version: int) -> RedisLedger:
            return RedisLedger(self._redis, self._settings.job_id, validation_room(version))

        found = Validation(self._spec, ledger_of, prompts, self._folder, self._events)
        await found.tidy(start.committed)
        while (version := found.unfinished(start.committed)) is not None and version < start.step:
            found.give_up(version)
        return found

    async def _new_publisher(self, folder: Path) -> Publisher:
        async def on_event(kind: str, message: str, **fields: Any) -> None:
            self._events.add(kind, message, **fields)

        return Publisher(
            self._settings.job_id,
            lambda: patiently(self._ledger.members),
            on_event,
            await self._offers(),
            backends=("nccl", "gloo") if torch.cuda.is_available() else ("gloo",),
            device=device_of(0),
            host=self._settings.host,
            timeout_s=self._spec.rollout.update_timeout_s,
            base=await asyncio.to_thread(adapter_base, self._spec, self._settings, folder),
        )

    async def _offers(self) -> Offers:
        """How nodes that join late get at weights."""
        job_id, shared = self._settings.job_id, self._spec.rollout.snapshot_dir
        if shared is not None:
            return SharedFolder(Path(shared), job_id)
        server = SnapshotServer(job_id)
        host = self._settings.host
        port = await self._open.enter_async_context(grpc_server(host, 0, server.register))
        server.address = with_port(host, port)
        return server

    async def _wind_up(self, code: int) -> None:
        """Ends what is shared with others; each part is tried whatever befell the rest."""
        if code != RETRY:
            await _tried("closing the ledger", patiently(self._ledger.close))
            if self._validation is not None:
                await _tried("closing the validation", self._validation.close())
        if self._publisher is not None:
            await _tried("closing the weight group", self._publisher.close())
        await _tried("closing the snapshot server", self._open.aclose())
        await _tried("writing the journal", self._events.flush())
        await _tried("writing the report", asyncio.to_thread(write_report, self._folder.path))


async def or_stop(work: Coroutine[Any, Any, T], stopping: asyncio.Event) -> T:
    """The work's result, or Cancelled as soon as the job is asked to stop."""
    task = asyncio.create_task(work)
    stop = asyncio.create_task(stopping.wait())
    await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if task.done():
        return task.result()
    task.cancel()
    await asyncio.wait({task}, timeout=1.0)  # torch cannot be interrupted, and is not waited for
    raise Cancelled


def checkpointer(spec: JobSpec, folder: RunFolder) -> Checkpointer:
    """The checkpoints of a job; a collective when there are several ranks."""
    group = dist.new_group(backend="gloo") if dist.is_initialized() else None
    return Checkpointer(folder.checkpoints, keep=spec.trainer.max_ckpt_to_keep, group=group)


async def _connected(url: str) -> Any:
    return connect(url)


async def _tried(what: str, work: Awaitable[Any]) -> None:
    try:
        await asyncio.wait_for(work, timeout=5.0)
    except Exception as error:
        log.warning("%s failed: %s: %s", what, type(error).__name__, error)
