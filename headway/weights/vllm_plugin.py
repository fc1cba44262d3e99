"""The `vllm.general_plugins` entry point: makes our weight transfer known to vLLM."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

BACKEND = "headway"


def register() -> None:
    """Registers the transfer engine; vLLM calls this in each of its processes. Repeatable."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "headway.weights.vllm_transfer", "HeadwayTransferEngine"
        )
        _end_with_parent()


def _end_with_parent() -> None:
    """Lets a process that vLLM spawned end soon after its parent was killed.

    vLLM's own processes otherwise outlive a killed node, with the model's memory. Not by
    PR_SET_PDEATHSIG: that follows the thread that spawned, not the process.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    parent_pid = parent.pid

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()
