"""What the machine could do, and what it holds: the peak rate of its products, its memory."""

from __future__ import annotations

import time

import psutil
import torch

# dense bfloat16 products, operations a second, from NVIDIA's data sheets
_BF16_PEAK = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "A10": 125e12,
}
_SIZES, _REPEATS = (128, 256, 512, 1024, 2048, 4096, 8192), 5
_LONG_S = 0.02  # a product that takes longer is large enough: some CPUs are slow in bfloat16


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second that one rank's products can reach.

    A known GPU's data sheet for bfloat16; otherwise the fastest of a few square products,
    timed here and now.
    """
    if device.type == "cuda" and dtype == torch.bfloat16:
        name = torch.cuda.get_device_name(device)
        for model, peak in _BF16_PEAK.items():
            if model in name.replace("-", " ").split() or f" {model}" in name:
                return peak
    fastest = 0.0
    for size in _SIZES:
        seconds = min(_product_s(size, device, dtype) for _ in range(_REPEATS))
        fastest = max(fastest, 2 * size**3 / seconds)
        if seconds > _LONG_S:
            break
    return fastest


def _product_s(size: int, device: torch.device, dtype: torch.dtype) -> float:
    a = torch.ones(size, size, device=device, dtype=dtype)
    began = time.perf_counter()
    torch.mm(a, a).sum().item()  # waits for a GPU
    return time.perf_counter() - began


def memory_metrics() -> dict[str, float]:
    """GiB held by this rank, in verl's names: at most on its GPU, now in host memory."""
    gib = float(1 << 30)
    row = {"perf/cpu_memory_used_gb": psutil.Process().memory_info().rss / gib}
    if torch.cuda.is_available():
        row["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated() / gib
        row["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved() / gib
    return row
