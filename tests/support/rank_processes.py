"""Training ranks as real processes, and what tests compare of their weights."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]
FAR_S = 280.0  # a deadline that only a hang reaches; a test's own is 300


def run_ranks(module: str, folder: Path, *arguments: str, world: int = 2) -> list[dict[str, Any]]:
    """What each rank of `python -m MODULE rank world store ARGUMENTS...` left in `folder`.

    A rank writes rank-<rank>.pt, tensors and plain values. One that fails ends them all.
    """
    command = [sys.executable, "-m", module]
    tail = [str(world), str(folder / "store"), *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([*command, str(rank), *tail], cwd=ROOT, env=env) for rank in range(world)
    ]
    ends = time.monotonic() + FAR_S
    try:
        codes = [rank.wait(max(0.0, ends - time.monotonic())) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0] * world
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=True) for rank in range(world)]


def largest_gap(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest difference of two sets of tensors with the same names."""
    assert a.keys() == b.keys()
    return max(float((a[n] - b[n]).abs().max()) for n in a)
