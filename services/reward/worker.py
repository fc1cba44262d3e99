"""One worker process as its parent sees it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from services.reward.frames import BrokenFrame, FrameReader, encode
from services.reward.waiting import Batch

# A worker gets no secrets: it may run on what a model wrote.
_KEPT_ENVIRONMENT = (
    "PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV",
    "LD_LIBRARY_PATH",
)  # fmt: skip
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


_END_S = 1.0  # from the end of its pipe to its own


class WorkerDied(Exception):
    """The process ended, or wrote nonsense, when an answer was due."""


class Worker:
    """A warm process that scores batches; killed and replaced, never repaired."""

    def __init__(self, process: asyncio.subprocess.Process, answers: int) -> None:
        assert process.stdin is not None
        self._process = process
        self._stdin = process.stdin
        self._frames = FrameReader(answers)
        self.num_scored = 0

    @classmethod
    async def start(
        cls, memory_bytes: int, imports: Sequence[str], flags: Sequence[str], timeout_s: float
    ) -> Worker:
        """A loaded worker. WorkerDied or TimeoutError when it does not come up.

        `flags` are further ones of worker_main.
        """
        kept = {name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ}
        answers, sink = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "services.reward.worker_main",
                f"--memory-bytes={memory_bytes}",
                *(f"--import={module}" for module in imports),
                *flags,
                stdin=asyncio.subprocess.PIPE,
                stdout=sink,
                env={**kept, **_ONE_THREAD},
                start_new_session=True,
            )
        except BaseException:
            os.close(answers)
            raise
        finally:
            os.close(sink)
        worker = cls(process, answers)
        try:
            await worker.answer(timeout_s)
        except BaseException:
            await worker.stop()
            raise
        return worker

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """False once the process is known to have ended."""
        return self._process.returncode is None

    async def send(self, batch: Batch) -> None:
        """Hands over a whole batch. WorkerDied when the process is gone."""
        units = [
            [
                (i.prompt_json, i.completion, i.item_json, i.num_tokens, i.given_json)
                for _, i in unit
            ]
            for unit in batch.units
        ]
        try:
            message = {"grader": batch.grader, "timeout_s": batch.timeout_s, "units": units}
            self._stdin.write(encode(message))
            await self._stdin.drain()
        except OSError as error:
            raise WorkerDied(f"worker {self.pid}: {error}") from None

    async def answer(self, timeout_s: float, patient: bool = False) -> dict[str, Any]:
        """The next frame. TimeoutError after timeout_s; WorkerDied at the end of the pipe.

        `patient`: more answers are to follow soon, take several at a time.
        """
        try:
            frame = self._frames.arrived() or await self._within(timeout_s, patient)
        except BrokenFrame as error:
            raise WorkerDied(f"worker {self.pid} wrote nonsense: {error}") from None
        if frame is None:
            raise WorkerDied(f"worker {self.pid} ended")
        return frame

    async def was_killed(self) -> bool:
        """Whether the process, at the end of its pipe, was ended by a signal from outside."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await self._process.wait()
        return self._process.returncode in (-signal.SIGKILL, -signal.SIGTERM)

    async def stop(self) -> None:
        """Kills the process and what it started, and waits for its end."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._stdin.close()
        await self._process.wait()
        self._frames.close()

    async def _within(self, timeout_s: float, patient: bool) -> dict[str, Any] | None:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._frames.next(patient)
        except TimeoutError:
            # The answer may have come in time while this loop was busy elsewhere.
            frame = self._frames.arrived()
            if frame is None:
                raise
            return frame
