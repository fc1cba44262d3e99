"""How vLLM is set up for a node: its settings, environment and arguments."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from headway.malloc import KEEP_FREED
from headway.precision import DtypeOrAuto, resolve_dtype


@dataclass(frozen=True, slots=True)
class VllmConfig:
    """How vLLM is set up. `cpu_cores` None: the cores this process may use."""

    dtype: DtypeOrAuto = "auto"
    max_model_len: int | None = None
    enforce_eager: bool = True
    kv_cache_gib: float = 1.0  # of the CPU's memory; a GPU is filled to gpu_memory_utilization
    max_num_seqs: int = 256  # completions of the job
    num_visitors: int = 8  # and of others, beside them
    gpu_memory_utilization: float = 0.85
    cpu_cores: tuple[int, ...] | None = None
    seed: int = 0


# by its path: the name "uni" is refused on CPUs, where each worker has to be bound to its cores
# before it starts; with one core there is nothing to bind, it is this process's own
_IN_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


def _cores(config: VllmConfig) -> tuple[int, ...]:
    return config.cpu_cores or tuple(sorted(os.sched_getaffinity(0)))


def set_environment(config: VllmConfig) -> None:
    """Environment variables that vLLM reads at import: no network, quiet, these cores."""
    os.environ.update(
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        HF_HUB_OFFLINE="1",  # the model is a folder here
        VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, _cores(config))),
    )
    for name, value in KEEP_FREED.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its warnings are about tuning
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    if config.enforce_eager:
        # vLLM would still compile two small sampling kernels at the first request: seconds
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def build(model: str, config: VllmConfig) -> Any:
    """A running AsyncLLM; blocks for the half minute that vLLM takes."""
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
        max_num_seqs=config.max_num_seqs + config.num_visitors,
        scheduling_policy="priority",  # visitors wait, and give memory back, before tickets do
        seed=config.seed,
        logprobs_mode="processed_logprobs",
        enable_prefix_caching=True,
        # vLLM's CPU runner dies when a seeded request's prompt is cut into chunks
        enable_chunked_prefill=not on_cpu,
        # the CPU's smallest: completions of one prompt share its whole blocks, and vLLM's
        # default of 128 would share nothing of a short prompt
        block_size=32 if on_cpu else None,
        # with one core, vLLM's scheduler and its worker would only wait for it in turns, spinning
        distributed_executor_backend=_IN_PROCESS if on_cpu and len(_cores(config)) == 1 else None,
        disable_log_stats=True,
        enable_log_requests=False,
        kv_cache_memory_bytes=int(config.kv_cache_gib * 2**30) if on_cpu else None,
        gpu_memory_utilization=config.gpu_memory_utilization,
        worker_extension_cls="headway.weights.vllm_worker.WeightWorker",
        weight_transfer_config=WeightTransferConfig(backend=vllm_plugin.BACKEND),
    )
    return AsyncLLM.from_engine_args(args)
