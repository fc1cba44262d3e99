"""Runs a program on one case after the other, each in a fresh fork, and tells what came out.

Knows inputs and arguments, never what is expected: whatever a program does to this process, it
finds no answer here, and what it writes in its stead is compared like any other output.

    stdin  <- {"program", "function" or null, "cases": [{"stdin"} or {"args", "kwargs"}], limits}
    stdout -> one JSON line a case: {"out" or "value", "code", "late", "flood", "err"}
"""

from __future__ import annotations

import os
import resource
import select
import sys
import time

from services.reward.grading.inside.program import as_main, complain, execute, redirect
from services.reward.grading.inside.wire import NotPlain, decode, dumps, encode, loads

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType
    from typing import Any


_CHUNK = 1 << 16
_SIGKILL = 9
_ERROR_BYTES = 4096


def main() -> None:
    """Runs until the first case that breaks (`stop_at_break`) or the last."""
    job = loads(sys.stdin.buffer.read().decode())
    try:
        code: CodeType | None = compile(job["program"], "program.py", "exec")
        problem = ""
    except Exception as error:
        code, problem = None, f"{type(error).__name__}: {error}"
    for case in job["cases"]:
        if code is None:
            result: dict[str, Any] = {"code": 1, "err": problem}
        else:
            result = _Case(code, case, job).play()
        sys.stdout.write(dumps(result) + "\n")
        sys.stdout.flush()
        if job["stop_at_break"] and (result["code"] or "late" in result or "flood" in result):
            return


class _Case:
    """One fork of this process, its pipes and its clock."""

    def __init__(self, code: CodeType, case: dict[str, Any], job: dict[str, Any]) -> None:
        self._code, self._case, self._job = code, case, job
        self._pipes = [os.pipe() for _ in range(3)]  # stdin, stdout or the value, stderr
        self._out = {1: bytearray(), 2: bytearray()}

    def play(self) -> dict[str, Any]:
        """What came of it."""
        pid = os.fork()
        if pid == 0:
            try:
                self._be_the_program()
            finally:
                os._exit(1)
        (inward, feed), (out, outward), (err, errward) = self._pipes
        for descriptor in (inward, outward, errward):
            os.close(descriptor)
        ended = self._pump(os.pidfd_open(pid), feed, {out: 1, err: 2})
        try:  # noqa: SIM105  # contextlib is slow to import
            os.kill(-1, _SIGKILL)  # everything here but this process
        except OSError:
            pass
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        for descriptor, number in ((out, 1), (err, 2)):
            while ended == "done" and self._read(descriptor, number):
                ended = self._flooded() or ended
            os.close(descriptor)
        result: dict[str, Any] = {"code": code if ended == "done" else -_SIGKILL}
        name = "out" if self._job["function"] is None else "value"
        result[name] = bytes(self._out[1]).decode("utf-8", "replace")
        result["err"] = bytes(self._out[2][-_ERROR_BYTES:]).decode("utf-8", "replace")
        return result if ended == "done" else {**result, ended: True}

    def _pump(self, process: int, feed: int, sources: dict[int, int]) -> str:
        """Until the program has ended (what it left in the pipes is still to be read) or must."""
        left = memoryview(self._case.get("stdin", "").encode("utf-8", "replace"))
        os.set_blocking(feed, False)
        deadline = time.monotonic() + self._job["wall_s"]
        feeds = [feed]
        try:
            while True:
                wait = max(0.0, deadline - time.monotonic())
                readable, writable, _ = select.select([process, *sources], feeds, [], wait)
                if process in readable:
                    return "done"
                if time.monotonic() >= deadline:
                    return "late"
                if writable:
                    left = self._fed(feed, left)
                    if not left:
                        os.close(feeds.pop())
                for descriptor in readable:
                    if not self._read(descriptor, sources[descriptor]):
                        del sources[descriptor]
                    if self._flooded():
                        return "flood"
        finally:
            for descriptor in (process, *feeds):
                os.close(descriptor)

    def _read(self, descriptor: int, number: int) -> bool:
        chunk = os.read(descriptor, _CHUNK)
        self._out[number] += chunk
        return bool(chunk)

    def _flooded(self) -> str:
        limit = self._job["output_bytes"]
        return "flood" if any(len(out) > limit for out in self._out.values()) else ""

    @staticmethod
    def _fed(feed: int, left: memoryview) -> memoryview:
        try:
            return left[os.write(feed, left[:_CHUNK]) :]
        except BlockingIOError:
            return left
        except BrokenPipeError:
            return memoryview(b"")

    def _be_the_program(self) -> None:
        (inward, _), (_, outward), (_, errward) = self._pipes
        cpu_s = self._job["cpu_s"]
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
        if self._job["function"] is None:
            redirect(inward, outward, errward)
            os._exit(as_main(self._code))
        silence = os.open("/dev/null", os.O_WRONLY)
        redirect(inward, silence, errward, kept=(outward,))
        _answer(self._code, self._job["function"], self._case, outward)


def _answer(code: CodeType, function: str, case: dict[str, Any], sink: int) -> None:
    try:
        names = execute(code, "solution")
        target = names.get(function)
        if target is None and "Solution" in names:
            target = getattr(names["Solution"](), function)
        if target is None:
            raise NameError(f"the program defines no {function}")
        value = target(*decode(case["args"]), **decode(case["kwargs"]))
        try:
            data = dumps(encode(value)).encode()
        except (NotPlain, RecursionError, ValueError):
            data = b'["?", "no plain data"]'
        view = memoryview(data)
        while view:
            view = view[os.write(sink, view) :]
    except BaseException:
        complain()
        os._exit(1)
    os._exit(0)
