"""Which engine a job gets on this node, and the one engine that a node keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Literal

from headway.jobspec import JobSpec
from headway.models import resolve_model
from headway.precision import DtypeOrAuto
from headway.telemetry import get_logger
from services.rollout.engine import Engine, Sampling
from services.rollout.sim_engine import SimEngine, SimSettings

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What the node, not the job, decides about its engine."""

    kind: Literal["vllm", "sim"] = "vllm"
    cores: tuple[int, ...] = ()  # CPU cores; empty: those the process may use
    sim: SimSettings = field(default_factory=SimSettings)
    num_visitors: int = 8  # completions for others at once, beside the job's


def engine_key(settings: EngineSettings, spec: JobSpec) -> Hashable:
    """Equal for jobs that can share one running engine."""
    if settings.kind == "sim":
        return settings
    rollout = spec.rollout
    return (
        settings,
        spec.model.path,
        spec.model.max_model_len,
        rollout.dtype,
        rollout.enforce_eager,
        rollout.kv_cache_gib,
        rollout.max_num_seqs,
        rollout.gpu_memory_utilization,
    )


async def make_engine(settings: EngineSettings, spec: JobSpec) -> Engine:
    """An engine that has yet to start. InvalidSpec or Unavailable: the model is not to be had."""
    if settings.kind == "sim" and settings.sim.broadcast:
        from services.rollout.sim_broadcast import BroadcastSimEngine

        return BroadcastSimEngine(settings.sim)
    if settings.kind == "sim":
        return SimEngine(settings.sim)
    from services.rollout.vllm_engine import VllmConfig, VllmEngine

    model = await asyncio.to_thread(resolve_model, spec.model.path)
    config = VllmConfig(
        dtype=spec.rollout.dtype,
        max_model_len=spec.model.max_model_len,
        enforce_eager=spec.rollout.enforce_eager,
        kv_cache_gib=spec.rollout.kv_cache_gib,
        max_num_seqs=spec.rollout.max_num_seqs,
        num_visitors=settings.num_visitors,
        gpu_memory_utilization=spec.rollout.gpu_memory_utilization,
        cpu_cores=settings.cores or None,
    )
    return VllmEngine(model, config)


async def standing_engine(
    settings: EngineSettings,
    path: str,
    max_model_len: int | None,
    dtype: DtypeOrAuto,
    kv_cache_gib: float,
) -> Engine:
    """An engine for visitors alone, yet to start. InvalidSpec or Unavailable as `make_engine`."""
    if settings.kind == "sim":
        return SimEngine(settings.sim)
    from services.rollout.vllm_engine import VllmConfig, VllmEngine

    model = await asyncio.to_thread(resolve_model, path, key="the model")
    config = VllmConfig(
        dtype=dtype,
        max_model_len=max_model_len,
        kv_cache_gib=kv_cache_gib,
        max_num_seqs=1,
        num_visitors=settings.num_visitors,
        cpu_cores=settings.cores or None,
    )
    return VllmEngine(model, config)


def sampling_of(spec: JobSpec) -> Sampling:
    """How a job's completions are drawn."""
    rollout = spec.rollout
    return Sampling(
        max_tokens=rollout.max_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop=rollout.stop,
    )


def greedy_of(spec: JobSpec) -> Sampling:
    """How the completion that a job's groups are compared with is drawn."""
    return replace(sampling_of(spec), temperature=0.0, top_p=1.0, top_k=0)


class EngineKeeper:
    """The node's one engine: started when a job needs it, kept while the next can use it."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._key: Hashable = None
        self._starting: asyncio.Task[Engine] | None = None
        self.engine: Engine | None = None

    async def engine_for(self, spec: JobSpec) -> Engine:
        """A running engine that fits the job; raises what its start failed with.

        A start, once begun, is never cut short: a half-started engine has processes
        that nobody would end. Cancelling this call leaves it to the next one.
        """
        if self._settings.kind == "vllm" and spec.model.lora_rank:
            await asyncio.to_thread(_know_base, spec.model.path)
        key = engine_key(self._settings, spec)
        if self._starting is not None and self._key != key:
            await self.discard()
        if self._starting is None:
            self._key = key
            self._starting = asyncio.create_task(self._start(spec), name="engine-start")
        try:
            return await asyncio.shield(self._starting)
        except Exception:  # the start's own error, whatever it is: the next call starts anew
            self._starting = None
            raise

    async def discard(self) -> None:
        """Ends the engine, if there is one; safe to repeat."""
        starting, self._starting = self._starting, None
        if starting is not None:
            await asyncio.wait({starting})
            if not starting.cancelled() and (error := starting.exception()) is not None:
                log.warning("the engine that nobody waited for did not start: %s", error)
        engine, self.engine = self.engine, None
        if engine is not None:
            await engine.close()

    async def _start(self, spec: JobSpec) -> Engine:
        engine = await make_engine(self._settings, spec)
        try:
            await engine.start()
        except BaseException:
            await engine.close()
            raise
        self.engine = engine
        return engine


def _know_base(path: str) -> None:
    """Reads the base model's digest before the first adapters come, which must not wait for it."""
    from headway.weights.base import base_digest

    base_digest(resolve_model(path))
