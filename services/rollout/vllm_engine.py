"""The engine that samples a language model: vLLM's AsyncLLM in this process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import xxhash

from headway import errors
from headway.errors import DeadlineExceeded, EpochBroken, HeadwayError, InvalidSpec, Unavailable
from headway.messages import (
    Completion,
    EpochInvite,
    FinishReason,
    InstallReport,
    VersionSpan,
    WeightManifest,
)
from headway.precision import DtypeOrAuto, resolve_dtype
from headway.telemetry import get_logger
from services.rollout.engine import Sampling

log = get_logger(__name__)
_FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "aborted"}
_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class VllmConfig:
    """How vLLM is set up. `cpu_cores` None: the cores this process may use."""

    dtype: DtypeOrAuto = "auto"
    max_model_len: int | None = None
    enforce_eager: bool = True
    kv_cache_gib: float = 1.0  # of the CPU's memory; a GPU is filled to gpu_memory_utilization
    max_num_seqs: int = 256
    gpu_memory_utilization: float = 0.85
    cpu_cores: tuple[int, ...] | None = None
    seed: int = 0


class BusyClock:
    """Seconds in which something was in flight and not held."""

    def __init__(self) -> None:
        self._total_s = 0.0
        self._since: float | None = None
        self._held = False
        self.in_flight = 0

    def change(self, in_flight: int = 0, held: bool | None = None) -> None:
        """Adds to what is in flight, or holds and releases all of it."""
        now = time.monotonic()
        if self._since is not None:
            self._total_s += now - self._since
        self.in_flight += in_flight
        self._held = self._held if held is None else held
        self._since = now if self.in_flight and not self._held else None

    @property
    def busy_s(self) -> float:
        """Seconds so far."""
        running = 0.0 if self._since is None else time.monotonic() - self._since
        return self._total_s + running


class VllmEngine:
    """The Engine protocol over vLLM. One worker; CPU or GPU as vLLM was installed."""

    transport: Literal["broadcast", "none"] = "broadcast"

    def __init__(self, model: Path | str, config: VllmConfig | None = None) -> None:
        self._model = Path(model)
        self._config = config or VllmConfig()
        self._llm: Any = None
        self._version: int | None = None
        self._open = asyncio.Event()  # set while new requests may enter vLLM
        self._admission = asyncio.Lock()  # a request enters wholly before or after an update
        self._weights = asyncio.Lock()  # one join or install at a time
        self._slots = asyncio.Semaphore(self._config.max_num_seqs)
        self._clock = BusyClock()
        self._num_tokens = 0

    async def start(self) -> None:
        """Loads the model and starts vLLM's processes. InvalidSpec: no usable folder."""
        if not (self._model / "config.json").is_file():
            raise InvalidSpec(f"{self._model} is no Hugging Face folder: no config.json in it")
        _set_environment(self._config)
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

    async def join(self, invite: EpochInvite) -> None:
        """Takes a seat in a weight group epoch while sampling goes on. EpochBroken."""
        async with self._weights:
            await self._call("headway_begin_join", asdict(invite))
            await self._wait_done(invite.timeout_s, f"epoch {invite.epoch}")

    async def install(self, manifest: WeightManifest, timeout_s: float) -> InstallReport:
        """Receives while sampling goes on, then pauses, loads, verifies and resumes.

        After WeightMismatch or EpochBroken nothing is sampled until a later install succeeds.
        """
        async with self._weights:
            try:
                rows = [[t.name, t.dtype, list(t.shape), t.digest] for t in manifest.tensors]
                await self._call(
                    "headway_begin_receive", manifest.version, manifest.bucket_bytes, rows
                )
                digest = await self._wait_done(timeout_s, f"version {manifest.version}")
                pause_s = await self._load(manifest.version)
            except BaseException:
                await asyncio.shield(self._stop_sampling())
                raise
        log.info("weights installed", extra={"version": manifest.version, "pause_s": pause_s})
        return InstallReport(manifest.version, digest, pause_s)

    async def leave(self) -> None:
        """Leaves the weight group; safe to repeat."""
        if self._llm is not None:
            await self._call("headway_leave")

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

    # -- sampling

    def _build(self) -> None:
        # set from the thread itself: a result would keep the engine alive in its future
        self._llm = _build(str(self._model), self._config)

    async def _complete(
        self, request_id: str, prompt_ids: tuple[int, ...], sampling: Sampling, seed: int
    ) -> Completion:
        params = _sampling_params(sampling, seed)
        async with self._slots, self._admitted(request_id, prompt_ids, params) as queue:
            output = await _final_output(queue)
        completion = _completion(output.outputs[0])
        self._num_tokens += len(completion.token_ids)
        return completion

    @contextlib.asynccontextmanager
    async def _admitted(
        self, request_id: str, prompt_ids: tuple[int, ...], params: Any
    ) -> AsyncIterator[Any]:
        while True:
            await self._open.wait()
            async with self._admission:
                if not self._open.is_set():
                    continue
                # salted by version: keys and values of older weights are never found again
                prompt = {"prompt_token_ids": list(prompt_ids), "cache_salt": f"v{self._version}"}
                queue = await _translated(self._llm.add_request(request_id, prompt, params))
                break
        self._clock.change(in_flight=+1)
        try:
            yield queue
        except asyncio.CancelledError:
            if self._llm is not None:
                await asyncio.shield(self._llm.abort(queue.request_id, internal=True))
            raise
        finally:
            self._clock.change(in_flight=-1)

    # -- weights

    async def _load(self, version: int) -> float:
        """Installs the staged version; the seconds in which sampling stood still."""
        async with self._admission:
            self._open.clear()
            started = time.monotonic()
            self._clock.change(held=True)
            # requests in flight keep their keys and values and go on under the new weights
            await _translated(self._llm.pause_generation(mode="keep", clear_cache=False))
            await self._call("headway_install", version)
            await _translated(self._llm.update_weight_version(str(version)))
            await _translated(self._llm.resume_generation())
            self._version = version
            self._clock.change(held=False)
            self._open.set()
            return time.monotonic() - started

    async def _stop_sampling(self) -> None:
        self._version = None
        self._open.clear()
        self._clock.change(held=True)
        if self._llm is not None and not self._llm.errored:
            await self._llm.pause_generation(mode="keep", clear_cache=False)

    async def _wait_done(self, timeout_s: float, what: str) -> str:
        """Polls the worker until what was begun there is done; its result."""
        # the group has its own deadline for each transfer; this one is for the whole
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    reply = await self._call("headway_poll")
                    if reply["done"]:
                        return str(reply["digest"])
                    await asyncio.sleep(_POLL_S)
        except TimeoutError as error:
            await self.leave()
            raise EpochBroken(f"{what} was not complete after {timeout_s:g} s") from error

    async def _call(self, method: str, *args: Any) -> dict[str, Any]:
        if self._llm is None:
            raise Unavailable("the engine is not running")
        reply: dict[str, Any] = (
            await _translated(self._llm.collective_rpc(method, args=tuple(args)))
        )[0]
        if not reply["ok"]:
            raise _error(reply["kind"], reply["message"])
        return reply


def completion_seed(seed: int, index: int) -> int:
    """The seed of one completion of a ticket: a hash, so that neighbours share nothing."""
    return xxhash.xxh3_64_intdigest(struct.pack("<QI", seed & (2**64 - 1), index)) >> 1


def _set_environment(config: VllmConfig) -> None:
    cores = config.cpu_cores or tuple(sorted(os.sched_getaffinity(0)))
    os.environ.update(
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        HF_HUB_OFFLINE="1",  # the model is a folder here
        VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, cores)),
    )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if config.enforce_eager:
        # vLLM would still compile two small sampling kernels at the first request: seconds
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def _build(model: str, config: VllmConfig) -> Any:
    from vllm import AsyncEngineArgs
    from vllm.config import WeightTransferConfig
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    from headway.weights import vllm_plugin

    on_cpu = current_platform.is_cpu()
    args = AsyncEngineArgs(
        model=model,
        dtype=resolve_dtype(config.dtype, on_gpu=not on_cpu),
        max_model_len=config.max_model_len,
        enforce_eager=config.enforce_eager,
        max_num_seqs=config.max_num_seqs,
        seed=config.seed,
        logprobs_mode="processed_logprobs",
        enable_prefix_caching=True,
        # vLLM's CPU runner dies when a seeded request's prompt is cut into chunks
        enable_chunked_prefill=not on_cpu,
        # the CPU's smallest: completions of one prompt share its whole blocks, and vLLM's
        # default of 128 would share nothing of a short prompt
        block_size=32 if on_cpu else None,
        disable_log_stats=True,
        enable_log_requests=False,
        kv_cache_memory_bytes=int(config.kv_cache_gib * 2**30) if on_cpu else None,
        gpu_memory_utilization=config.gpu_memory_utilization,
        worker_extension_cls="headway.weights.vllm_worker.WeightWorker",
        weight_transfer_config=WeightTransferConfig(backend=vllm_plugin.BACKEND),
    )
    return AsyncLLM.from_engine_args(args)


def _sampling_params(sampling: Sampling, seed: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=1,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop=list(sampling.stop) or None,
        seed=seed,
        logprobs=0,  # of the sampled token alone
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


async def _final_output(queue: Any) -> Any:
    while True:
        output = queue.get_nowait() or await _translated(queue.get())
        if output.finished:
            return output


def _completion(output: Any) -> Completion:
    """vLLM's output as it was sampled. HeadwayError when a token lacks log-prob or version."""
    token_ids = tuple(output.token_ids)
    flat = output.logprobs
    first = list(flat.start_indices) if flat is not None else []
    logprobs = tuple(flat.logprobs[i] for i in first)
    if tuple(flat.token_ids[i] for i in first) != token_ids:
        raise HeadwayError(f"{len(token_ids)} sampled tokens, but log-probs of others")
    spans = tuple(
        VersionSpan(_version(span.version), span.start, span.end)
        for span in output.weight_versions or ()
    )
    ends = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != ends[:-1] or ends[-1] != len(token_ids):
        raise HeadwayError(f"{len(token_ids)} sampled tokens, but version spans {spans}")
    finish = _FINISH.get(str(output.finish_reason))
    if finish is None:
        raise Unavailable(f"vLLM ended a request with {output.finish_reason!r}")
    return Completion(token_ids, logprobs, finish, spans, output.text)


def _version(label: str) -> int:
    try:
        return int(label)
    except ValueError as error:
        raise HeadwayError(f"tokens were sampled by weights without a version: {label}") from error


def _error(kind: str, message: str) -> HeadwayError:
    for cls in (errors.WeightMismatch, errors.EpochBroken, errors.InvalidSpec, DeadlineExceeded):
        if cls.kind == kind:
            return cls(message)
    return HeadwayError(message)


async def _translated(call: Any) -> Any:
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        return await call
    except EngineDeadError:
        raise Unavailable("the vLLM engine died; restart this node") from None
