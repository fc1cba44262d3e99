"""How many weights LoRA adapters have and touch, from a model's shape alone."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from headway.errors import InvalidSpec
from headway.jobspec import JobSpec
from headway.jobspec_model import ALL_LINEAR
from headway.model_size import Matrix, ModelShape


def adapter_params(job: JobSpec, shape: ModelShape) -> int:
    """Weights of all adapters: rank x (in + out) for each adapted matrix."""
    found = _adapted(job, shape)
    return sum(job.model.lora_rank * (m.rows + m.columns) * count for m, count in found)


def adapted_params(job: JobSpec, shape: ModelShape) -> int:
    """Weights of the matrices that have an adapter."""
    return sum(m.rows * m.columns * count for m, count in _adapted(job, shape))


def check_targets(job: JobSpec, shape: ModelShape) -> None:
    """InvalidSpec when `model.target_modules` names no layer of a model whose weights are here."""
    if not job.model.lora_rank or not shape.counted or job.model.target_modules == (ALL_LINEAR,):
        return
    leaves = sorted({m.name.rpartition(".")[2] for m in shape.matrices})
    for name in job.model.target_modules:
        if not any(_count(name, m) for m in shape.matrices):
            near = difflib.get_close_matches(name, leaves, n=1, cutoff=0.6)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise InvalidSpec(
                f"model.target_modules: {job.model.path} has no layer {name} that could have an"
                f" adapter{hint}; it has {', '.join(leaves)}"
            )


def _adapted(job: JobSpec, shape: ModelShape) -> Iterator[tuple[Matrix, int]]:
    """Matrices that get adapters, and in how many layers."""
    if not job.model.lora_rank:
        return
    wanted = job.model.target_modules
    for matrix in shape.matrices:
        whole = wanted == (ALL_LINEAR,) or matrix.name.rpartition(".")[2] in wanted
        count = matrix.count if whole else sum(_count(name, matrix) for name in wanted)
        yield matrix, min(count, matrix.count)


def _count(name: str, matrix: Matrix) -> int:
    """In how many layers a target names a matrix: by the end of its name, or by a whole one."""
    if matrix.name == name or matrix.name.endswith(f".{name}"):
        return matrix.count
    return 1 if name.endswith(f".{matrix.name}") else 0
