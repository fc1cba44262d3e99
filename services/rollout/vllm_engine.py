"""The engine that samples a language model: vLLM's AsyncLLM in this process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from headway.errors import InvalidSpec, Unavailable
from headway.messages import Completion, EpochInvite, InstallReport, WeightManifest
from headway.telemetry import get_logger
from services.rollout.busy import BusyClock
from services.rollout.engine import Look, Piece, Sampling
from services.rollout.vllm_calls import WorkerCalls
from services.rollout.vllm_outputs import (
    completion_of,
    completion_seed,
    final_output,
    manifest_rows,
    piece_of,
    sampling_params,
    translated,
    visitor_params,
)
from services.rollout.vllm_setup import VllmConfig, build, set_environment
from services.rollout.vllm_words import ModelWords

__all__ = ["VllmConfig", "VllmEngine"]

log = get_logger(__name__)
_OURS, _VISITORS = 0, 1  # vLLM serves the lower number first


class VllmEngine:
    """The Engine protocol over vLLM. One worker; CPU or GPU as vLLM was installed."""

    transport: Literal["broadcast", "none"] = "broadcast"

    def __init__(self, model: Path | str, config: VllmConfig | None = None) -> None:
        self._model = Path(model)
        self._config = config or VllmConfig()
        self._llm: Any = None
        self._worker = WorkerCalls(lambda: self._llm)
        self._version: int | None = None
        self._open = asyncio.Event()  # set while new requests may enter vLLM
        self._admission = asyncio.Lock()  # a request enters wholly before or after an update
        self._weights = asyncio.Lock()  # one join or install at a time
        self._slots = asyncio.Semaphore(self._config.max_num_seqs)
        self._words: asyncio.Task[ModelWords] | None = None
        self._clock = BusyClock()
        self._num_tokens = 0
        self._num_installs = 0

    async def start(self) -> None:
        """Loads the model and starts vLLM's processes. InvalidSpec: no usable folder."""
        if not (self._model / "config.json").is_file():
            raise InvalidSpec(f"{self._model} is no Hugging Face folder: no config.json in it")
        set_environment(self._config)
        await asyncio.to_thread(self._build)

    async def generate(
        self, request_id: str, prompt_ids: tuple[int, ...], n: int, sampling: Sampling, seed: int
    ) -> tuple[Completion, ...]:
        """n completions, in order; waits while there is no installed version.

        Each completion has a seed of its own, derived from `seed` and its place.
        Cancelling aborts them all. Unavailable: the engine died.
        """
        if self._llm is None:
            raise Unavailable(f"the vLLM engine is not running; request {request_id} is refused")
        tasks = [
            asyncio.create_task(
                self._complete(f"{request_id}-{i}", prompt_ids, sampling, completion_seed(seed, i))
            )
            for i in range(n)
        ]
        try:
            return tuple(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def visit(
        self,
        request_id: str,
        prompt_ids: tuple[int, ...],
        sampling: Sampling,
        seed: int,
        look: Look,
    ) -> AsyncGenerator[Piece]:
        """See `Engine`. vLLM has places for `num_visitors`, and serves them after tickets."""
        if self._llm is None:
            raise Unavailable(f"the vLLM engine is not running; request {request_id} is refused")
        params = visitor_params(sampling, completion_seed(seed, 0), look)
        sent = 0
        async with self._admitted(request_id, prompt_ids, params, _VISITORS) as queue:
            piece = None
            while piece is None or piece.finish_reason is None:
                output = queue.get_nowait() or await translated(queue.get())
                piece = piece_of(output, sent, look)
                sent += piece.num_tokens
                yield piece
        self._num_tokens += sent

    async def words(self) -> ModelWords:
        """The tokenizer of the model's folder; read once."""
        if self._words is None:
            self._words = asyncio.ensure_future(asyncio.to_thread(ModelWords, self._model))
        return await asyncio.shield(self._words)

    @property
    def context_tokens(self) -> int | None:
        """As vLLM has it: the job's, or the model's own."""
        return int(self._llm.model_config.max_model_len) if self._llm is not None else None

    async def adopt(self, version: int) -> None:
        """Samples what vLLM loaded from the folder."""
        if self._llm is None:
            raise Unavailable("the engine is not running")
        async with self._weights:
            await translated(self._llm.update_weight_version(str(version)))
            self._version = version
            self._open.set()

    async def join(self, invite: EpochInvite) -> None:
        """Takes a seat in a weight group epoch while sampling goes on. EpochBroken."""
        async with self._weights:
            await self._worker.call("headway_begin_join", asdict(invite))
            await self._worker.done(invite.timeout_s, f"epoch {invite.epoch}")

    async def install(self, manifest: WeightManifest, timeout_s: float) -> InstallReport:
        """Receives while sampling goes on, then pauses, loads, verifies and resumes.

        After WeightMismatch or EpochBroken nothing is sampled until a later install succeeds.
        """
        async with self._weights:
            try:
                await self._worker.call("headway_begin_receive", *manifest_rows(manifest))
                digest = await self._worker.done(timeout_s, f"version {manifest.version}")
                return await self._load(manifest.version, digest)
            except BaseException:
                await asyncio.shield(self._stop_sampling())
                raise

    async def install_snapshot(
        self, manifest: WeightManifest, path: Path, timeout_s: float
    ) -> InstallReport:
        """Reads and verifies while sampling goes on, then pauses, loads, verifies and resumes."""
        async with self._weights:
            await self._worker.call("headway_begin_read", str(path), *manifest_rows(manifest))
            digest = await self._worker.done(timeout_s, f"the snapshot of {manifest.version}")
            try:
                return await self._load(manifest.version, digest)
            except BaseException:
                await asyncio.shield(self._stop_sampling())
                raise

    async def leave(self) -> None:
        """Leaves the weight group; safe to repeat."""
        await self._worker.leave()

    @property
    def backends(self) -> tuple[str, ...]:
        """Gloo, and NCCL on a GPU."""
        from vllm.platforms import current_platform

        return ("gloo",) if current_platform.is_cpu() else ("gloo", "nccl")

    @property
    def version(self) -> int | None:
        """The installed version; None until the first install and after a failed one."""
        return self._version

    @property
    def num_completions_in_flight(self) -> int:
        """Completions that are inside vLLM now."""
        return self._clock.in_flight

    @property
    def num_tokens_sampled(self) -> int:
        """Tokens of the completions that have ended."""
        return self._num_tokens

    @property
    def busy_s(self) -> float:
        """Seconds in which at least one completion was being sampled."""
        return self._clock.busy_s

    async def close(self) -> None:
        """Ends vLLM's processes; safe to repeat."""
        llm, self._llm = self._llm, None
        self._version = None
        self._open.clear()
        if llm is not None:
            handler = llm.output_handler
            if handler is not None:  # it would report the end of vLLM's processes as a failure
                handler.cancel()
                await asyncio.wait([handler])
            await asyncio.to_thread(llm.shutdown)
            # AsyncLLM's finaliser shuts down a second time: let it run now, not from within
            # whatever happens to trigger the collector, or at the interpreter's end
            del llm, handler
            gc.collect()

    # -- sampling

    def _build(self) -> None:
        # set from the thread itself: a result would keep the engine alive in its future
        self._llm = build(str(self._model), self._config)

    async def _complete(
        self, request_id: str, prompt_ids: tuple[int, ...], sampling: Sampling, seed: int
    ) -> Completion:
        params = sampling_params(sampling, seed)
        async with self._slots, self._admitted(request_id, prompt_ids, params, _OURS) as queue:
            output = await final_output(queue)
        completion = completion_of(output.outputs[0])
        self._num_tokens += len(completion.token_ids)
        return completion

    @contextlib.asynccontextmanager
    async def _admitted(
        self, request_id: str, prompt_ids: tuple[int, ...], params: Any, priority: int
    ) -> AsyncIterator[Any]:
        while True:
            await self._open.wait()
            async with self._admission:
                if not self._open.is_set():
                    continue
                # salted by install: keys and values of older weights are never found again, nor
                # those of the same version of an earlier job
                salt = f"w{self._num_installs}"
                prompt = {"prompt_token_ids": list(prompt_ids), "cache_salt": salt}
                queue = await self._add(request_id, prompt, params, priority)
                break
        self._clock.change(in_flight=+1)
        try:
            yield queue
        except BaseException:  # cancelled, closed by a visitor, or its output cannot be used
            if self._llm is not None and not self._llm.errored:
                await asyncio.shield(self._llm.abort(queue.request_id, internal=True))
            raise
        finally:
            self._clock.change(in_flight=-1)

    async def _add(self, request_id: str, prompt: Any, params: Any, priority: int) -> Any:
        adding = self._llm.add_request(request_id, prompt, params, priority=priority)
        try:
            return await translated(adding)
        except ValueError as error:  # what vLLM refuses, before it has the request
            raise InvalidSpec(f"vLLM refuses the request: {error}") from None

    # -- weights

    async def _load(self, version: int, digest: str) -> InstallReport:
        """Installs the staged version."""
        async with self._admission:
            self._open.clear()
            # requests in flight keep their keys and values and go on under the new weights
            await translated(self._llm.pause_generation(mode="keep", clear_cache=False))
            started = time.monotonic()  # until here the step under way still sampled
            self._clock.change(held=True)
            done = await self._worker.call("headway_install", version)
            await translated(self._llm.update_weight_version(str(version)))
            await translated(self._llm.resume_generation())
            self._version = version
            self._num_installs += 1
            self._clock.change(held=False)
            self._open.set()
            pause_s = time.monotonic() - started
        log.info(
            "weights installed",
            extra={"version": version, "pause_s": pause_s, "in_place": done["in_place"]},
        )
        return InstallReport(version, digest, pause_s)

    async def _stop_sampling(self) -> None:
        self._version = None
        self._open.clear()
        self._clock.change(held=True)
        if self._llm is not None and not self._llm.errored:
            await self._llm.pause_generation(mode="keep", clear_cache=False)
