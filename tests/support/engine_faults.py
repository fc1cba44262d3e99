"""Faults in vLLM's worker process: functions for `collective_rpc`, called with the worker."""

from __future__ import annotations

from typing import Any


def lose_writes(worker: Any, leaf: str) -> None:
    """From now on, versions written in place leave the modules of this name as they are."""
    from headway.weights import in_place

    write = in_place.write

    def lossy(model: Any, sent: Any, dtype: Any) -> None:
        write(model, {name: t for name, t in sent.items() if f".{leaf}." not in name}, dtype)

    in_place.write = lossy
    worker.mend = lambda: setattr(in_place, "write", write)


def load_only_the_base(worker: Any) -> None:
    """From now on, a reload takes the model's folder, whatever adapters came."""
    from headway.weights.base import BaseTensors

    engine = worker.weight_transfer_engine
    model, load = engine.model, engine.model.load_weights
    base = BaseTensors(engine.model_config.model, engine.model_config.dtype)
    object.__setattr__(model, "load_weights", lambda _: load(base.items()))
    worker.mend = lambda: object.__delattr__(model, "load_weights")


def mend(worker: Any) -> None:
    """Ends the last fault."""
    worker.mend()
