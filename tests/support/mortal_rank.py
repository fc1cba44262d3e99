"""A learner's ranks as real processes that kill themselves (SIGKILL) at a named point.

They are forked from a server that has imported everything, so that one start costs a
second and not ten.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

# What the server has imported, its forks have.
import reasoning_gym  # noqa: F401
import transformers.core_model_loading
import transformers.models.llama.modeling_llama  # noqa: F401
from huggingface_hub import save_torch_state_dict  # noqa: F401
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

import services.learner.lead  # noqa: F401
from headway.ledger.redis_ledger import RedisLedger
from headway.ports import free_port
from headway.weights.publisher import Publisher
from services.learner import checkpoint, recording, replay, train
from services.learner.checkpoint import Checkpointer
from services.learner.crew import Crew
from services.learner.run_folder import RunFolder
from services.learner.trainer import FsdpTrainer


@dataclass(frozen=True)
class Death:
    """Where a rank dies: `point` is one of POINTS, `step` the number its call is given."""

    point: str
    step: int
    rank: int = 0


# point -> the call in which it dies, which argument is the step, before or after the work
POINTS: dict[str, tuple[Any, str, Callable[..., int], str]] = {
    "after take": (RedisLedger, "take", lambda _, step: step, "after"),
    "mid-step": (FsdpTrainer, "train_step", lambda _, step, *__: step, "after"),
    "before commit": (RedisLedger, "commit", lambda _, step, __: step, "before"),
    "after commit": (RedisLedger, "commit", lambda _, step, __: step, "after"),
    "before staging": (Crew, "weights", lambda _, version: version, "before"),
    "mid-publish": (Publisher, "publish", lambda _, version, __: version, "before"),
    "before the row": (RunFolder, "append_metrics", lambda _, row: row["step"], "before"),
    "writing a checkpoint": (Checkpointer, "begin", lambda _, step, __: step, "after"),
    "before the rename": (Checkpointer, "_publish", lambda _, manifest: manifest.step, "before"),
    "before trim": (Checkpointer, "_publish", lambda _, manifest: manifest.step, "after"),
    "in the manifest": (checkpoint, "_digests", lambda folder: _step_in(folder), "after"),
    "in the record": (recording, "append_bytes", lambda path, _: recording.count_steps(path), ""),
}


class MortalRanks:
    """Starts all ranks of a job again and again, as an agent does; counts the starts."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        self.num_starts = 0

    async def run(self, flags: Sequence[str], world: int, death: Death | None = None) -> list[int]:
        """One start of all ranks; their exit codes once all have ended. One death ends all."""
        self.num_starts += 1
        port = free_port() if world > 1 else 0
        ranks: list[BaseProcess] = []
        for rank in range(world):
            own = ["--rank", str(rank), "--store-port", str(port)]
            mine = death if death is not None and death.rank == rank else None
            process = self._context.Process(target=_rank, args=([*flags, *own], mine))
            process.start()
            ranks.append(process)
        ended = [asyncio.create_task(asyncio.to_thread(process.join)) for process in ranks]
        try:
            await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
            if all(process.exitcode in (0, None) for process in ranks):
                await asyncio.wait(ended)
        finally:
            for process in ranks:  # also when the test has failed meanwhile
                process.kill()
            await asyncio.gather(*ended)
        return [process.exitcode or 0 for process in ranks]


def _rank(argv: list[str], death: Death | None) -> None:
    """A rank of a job, or of a replay where the flags are those of one."""
    if death is not None:
        _arm(death)
    main = replay.main if "--replay-dir" in argv else train.main
    log = Path(argv[argv.index("--run-dir") + 1]) / "learner.log"
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os._exit(main(argv))


def _arm(death: Death) -> None:
    owner, name, step_of, when = POINTS[death.point]
    work = getattr(owner, name)

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    @functools.wraps(work)
    async def slow(*args: Any) -> Any:
        here = step_of(*args) == death.step
        if here and when == "before":
            die()
        result = await work(*args)
        if here and getattr(result, "ticket_ids", ()) is not None:
            die()
        return result

    @functools.wraps(work)
    def quick(*args: Any, **kwargs: Any) -> Any:
        here = step_of(*args, **kwargs) == death.step
        if here and when == "before":
            die()
        if here and not when:  # half-way through a write
            work(args[0], args[1][: len(args[1]) // 2])
            die()
        result = work(*args, **kwargs)
        if here:
            die()
        return result

    setattr(owner, name, slow if inspect.iscoroutinefunction(work) else quick)


def _step_in(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])
