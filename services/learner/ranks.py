"""The training processes of one job: started together, watched, started again, ended.

All ranks live and die together. One that ends without a word (killed, crashed) or
with a failure that may pass takes the others down, and all start again from the
newest checkpoint, a few times; new steps done earn a fresh count. Any other failure that
was told is final.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import Process
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from headway.jobs import ENDED
from headway.ports import free_port
from headway.telemetry import get_logger
from services.learner.status import Status, parse_status
from services.learner.trainer_settings import TrainerSettings

log = get_logger(__name__)
MAX_RESTARTS = 3
_CANCEL_GRACE_S = 20.0  # rank 0 winds up within seconds; this is for one that hangs
_PEER_GRACE_S = 5.0
_LAST_LINES = 15


@dataclass(frozen=True, slots=True)
class RanksSpec:
    """How the ranks of one job are started."""

    job_id: str
    job_file: Path
    run_dir: Path
    log_file: Path
    redis_url: str
    host: str
    world: int
    cores: tuple[int, ...]  # all that the ranks may use; empty: any
    log_level: str = "info"
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    max_restarts: int = MAX_RESTARTS


class Ranks:
    """One job's ranks. `run` returns the final status; `cancel` asks rank 0 to end."""

    def __init__(self, spec: RanksSpec, changed: Callable[[], None]) -> None:
        self._spec = spec
        self._changed = changed
        self._processes: list[Process] = []
        self._cancelling = False
        self._restarts = 0
        self._best_step = 0
        self._passing: Status | None = None  # what this attempt failed with, if it may pass
        self.status = Status()

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks that run, rank 0 first."""
        return [p.pid for p in self._processes if p.returncode is None]

    async def run(self) -> Status:
        """Runs to the job's end. Cancelling the call kills the ranks."""
        try:
            while True:
                codes = await self._attempt()
                final = self._judge(codes)
                if final is not None:
                    self._set(final)
                    return final
                if (self.status.step or 0) > self._best_step:
                    self._best_step, self._restarts = self.status.step or 0, 0
                self._restarts += 1
                log.warning(
                    "ranks ended with %s: starting them again (%d of %d)",
                    codes, self._restarts, self._spec.max_restarts,
                    extra={"job_id": self._spec.job_id},
                )  # fmt: skip
                why = f"{self._passing.error_kind} failure" if self._passing else "crash"
                detail = f"restarted after a {why} ({self._restarts} of {self._spec.max_restarts})"
                self._set(Status("starting", detail, self.status.step))
        finally:
            await self._kill()

    def cancel(self) -> None:
        """Asks rank 0 to end the job; what hangs is killed a little later."""
        if self._cancelling:
            return
        self._cancelling = True
        self._signal_lead()
        loop = asyncio.get_running_loop()
        loop.call_later(_CANCEL_GRACE_S, self._signal_all, signal.SIGKILL)

    async def _attempt(self) -> list[int]:
        """Starts all ranks and returns their exit codes when all have ended."""
        self._passing = None
        reading, writing = os.pipe()
        try:
            port = free_port() if self._spec.world > 1 else 0
            self._processes = []
            for rank in range(self._spec.world):
                self._processes.append(await self._start(rank, port, writing))
        finally:
            os.close(writing)
        if self._cancelling:
            self._signal_lead()
        reader = asyncio.create_task(self._read(reading))
        waits = [asyncio.create_task(p.wait()) for p in self._processes]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if waits[0].done() and waits[0].result() == 0:
                await asyncio.wait(waits, timeout=_PEER_GRACE_S)  # the others were dismissed
            self._signal_all(signal.SIGKILL)
            codes = list(await asyncio.gather(*waits))
            await reader
            return codes
        finally:
            for task in (*waits, reader):
                task.cancel()

    async def _start(self, rank: int, port: int, status_fd: int) -> Process:
        spec = self._spec
        cores = spec.cores[rank :: spec.world] or spec.cores
        argv = [
            sys.executable, "-P", "-m", "services.learner.train",
            "--job-file", str(spec.job_file), "--job-id", spec.job_id,
            "--run-dir", str(spec.run_dir), "--rank", str(rank), "--world", str(spec.world),
            "--store-port", str(port), "--host", spec.host, "--parent-pid", str(os.getpid()),
            "--cores", ",".join(map(str, cores)), "--log-level", spec.log_level,
            *spec.trainer.flags(),
        ]  # fmt: skip
        if rank == 0:
            argv += ["--status-fd", str(status_fd)]
        available = len(cores) or max(1, (os.cpu_count() or 1) // spec.world)
        env = {
            **os.environ,
            "HEADWAY_REDIS_URL": spec.redis_url,  # not on the command line: it may hold a password
            "OMP_NUM_THREADS": str(available),
            "TOKENIZERS_PARALLELISM": "false",
        }
        with spec.log_file.open("ab") as log_file:
            return await asyncio.create_subprocess_exec(
                *argv,
                env=env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                pass_fds=(status_fd,) if rank == 0 else (),
                start_new_session=True,  # a terminal's Ctrl-C is for the agent to pass on
            )

    async def _read(self, fd: int) -> None:
        """Takes rank 0's statuses until it has ended."""
        stream = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        pipe = os.fdopen(fd, "rb", buffering=0)
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), pipe
        )
        try:
            while line := await stream.readline():
                with contextlib.suppress(ValueError, TypeError):  # a line torn by a kill
                    status = parse_status(line)
                    if status.phase == "failed" and status.retryable:
                        self._passing = status
                    else:
                        self._set(status)
        finally:
            transport.close()

    def _judge(self, codes: list[int]) -> Status | None:
        """The job's final status after all ranks have ended; None to start them again."""
        status = self.status
        if status.phase in ENDED:
            return status
        if self._cancelling:
            return Status("cancelled", "cancelled", status.step)
        if self._restarts < self._spec.max_restarts or (status.step or 0) > self._best_step:
            return None
        if (passing := self._passing) is not None:
            detail = f"{passing.detail} (after {self._restarts + 1} starts)"
            return Status("failed", detail, status.step, error_kind=passing.error_kind)
        detail = (
            f"the training processes ended with exit codes {codes} and were started"
            f" {self._restarts + 1} times; the end of {self._spec.log_file}:\n{self.last_words()}"
        )
        return Status("failed", detail, status.step, error_kind="crash")

    def last_words(self) -> str:
        """The last lines of the ranks' log."""
        try:
            with self._spec.log_file.open(encoding="utf-8", errors="replace") as lines:
                return "".join(deque(lines, maxlen=_LAST_LINES)).strip()
        except OSError:
            return "(no log)"

    def _set(self, status: Status) -> None:
        if status != self.status:
            self.status = status
            self._changed()

    def _signal_lead(self) -> None:
        if self._processes and self._processes[0].returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._processes[0].send_signal(signal.SIGTERM)

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(number)

    async def _kill(self) -> None:
        self._signal_all(signal.SIGKILL)
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                await asyncio.shield(process.wait())
