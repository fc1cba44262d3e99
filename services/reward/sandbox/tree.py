"""The processes of one sandbox: their start, their memory, and their sure end.

    this process -> bwrap -> first process of the namespace -> the program -> ...

bwrap ends with the program and leaves the namespace's first process behind, which the kernel
then kills with all others in it. That orphan is adopted and waited for here: after `end` nothing
of the sandbox runs, and no zombie is left to a container's first process, which may never look
after it.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress

from services.reward.sandbox.command import View, command
from services.reward.sandbox.limits import Limits

_PAGE = os.sysconf("SC_PAGE_SIZE")
_PR_SET_CHILD_SUBREAPER = 36
_num_running = 0


class Tree:
    """A sandbox that was started; `end` must be called."""

    def __init__(
        self, argv: Sequence[str], limits: Limits, view: View, files: Mapping[str, bytes],
        keep_stderr: bool,
    ) -> None:  # fmt: skip
        self._info, info = os.pipe()
        try:
            with command(argv, limits, view, files, keep_stderr, info) as (line, descriptors):
                _adopt(+1)
                self.process = subprocess.Popen(
                    line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                    pass_fds=[*descriptors, info], env={}, cwd="/", bufsize=0,
                )  # fmt: skip
        except BaseException:
            os.close(self._info)
            raise
        finally:
            os.close(info)
        self._first: int | None = None
        self._ended = False

    def end(self) -> int:
        """Ends what still runs and waits until all of it is gone; bwrap's exit code."""
        process = self.process
        if self._ended:
            return int(process.returncode)
        self._ended = True
        if process.poll() is None:
            process.kill()
            process.wait()
        first = self._first_process()
        os.close(self._info)
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        with suppress(ChildProcessError):  # it did not come that far, or bwrap has reaped it
            if first is not None and os.waitpid(first, os.WNOHANG) == (0, 0):
                os.kill(first, signal.SIGKILL)
                os.waitpid(first, 0)
        _adopt(-1)
        return int(process.returncode)

    def resident_bytes(self) -> int:
        """Private resident memory of all its processes, each by itself."""
        total = 0
        for pid in self._processes():
            with suppress(OSError, ValueError), open(f"/proc/{pid}/statm") as statm:
                _, resident, shared, *_ = statm.read().split()
                total += (int(resident) - int(shared)) * _PAGE
        return total

    def num_files(self) -> int:
        """Files in its /tmp, empty ones too: each is kernel memory that the size does not count."""
        for pid in reversed(self._processes()):
            with suppress(OSError):
                tmp = os.statvfs(f"/proc/{pid}/root/tmp")
                return tmp.f_files - tmp.f_ffree
        return 0

    def _processes(self) -> list[int]:
        found, waiting = [], [self.process.pid]
        while waiting:
            pid = waiting.pop()
            found.append(pid)
            with suppress(OSError, ValueError):
                for task in os.listdir(f"/proc/{pid}/task"):
                    with open(f"/proc/{pid}/task/{task}/children") as children:
                        waiting += [int(child) for child in children.read().split()]
        return found[1:]  # bwrap itself sees the machine

    def _first_process(self) -> int | None:
        os.set_blocking(self._info, False)
        with suppress(OSError, ValueError, KeyError):
            return int(json.loads(os.read(self._info, 4096))["child-pid"])
        return None


def _adopt(step: int) -> None:
    """While any sandbox runs, its orphans become our children."""
    global _num_running
    _num_running += step
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(_num_running > 0), 0, 0, 0)
