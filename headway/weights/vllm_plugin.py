"""The `vllm.general_plugins` entry point: makes our weight transfer known to vLLM."""

from __future__ import annotations

BACKEND = "headway"


def register() -> None:
    """Registers the transfer engine; vLLM calls this in each of its processes. Repeatable."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "headway.weights.vllm_transfer", "HeadwayTransferEngine"
        )
