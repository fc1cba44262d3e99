"""Which dtype this machine multiplies fast, for keys of a job that say `auto`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Literal

Dtype = Literal["bfloat16", "float32"]
DtypeOrAuto = Literal["auto", "bfloat16", "float32"]

_CPU_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # the last is Arm's


def resolve_dtype(wanted: DtypeOrAuto, *, on_gpu: bool) -> Dtype:
    """The dtype of matrix products: `auto` is bfloat16 where the machine multiplies it.

    A CPU without such instructions emulates bfloat16 at a tenth of float32's speed and
    less (docs/adr/0005), so there `auto` is float32, which is only more exact.
    """
    if wanted != "auto":
        return wanted
    return "bfloat16" if on_gpu or cpu_multiplies_bfloat16() else "float32"


@functools.cache
def cpu_multiplies_bfloat16() -> bool:
    """Whether this CPU has bfloat16 instructions (Linux; False where it cannot be told)."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return False
    words = {
        word
        for line in lines
        if line.partition(":")[0].strip() in ("flags", "Features")
        for word in line.partition(":")[2].split()
    }
    return bool(words & _CPU_FLAGS)


def has_gpu() -> bool:
    """Whether this machine shows an NVIDIA GPU, without loading a driver library."""
    return Path("/dev/nvidia0").exists()
