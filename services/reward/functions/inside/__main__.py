"""A user's function in a process of its own: loads its source, then answers calls.

    parent -> {"id": n, "source": ..., "file": ..., "function": ..., "call": ..., "kwargs": {...}}
    child  -> {"id": n, "error": text or null}
    parent -> {"id": n, "samples": [[completion, prompt, item], ...]}
    child  -> {"id": n, "results": [{"reward": 1.0, "parts": {}}, ...]}

A result may be {"error": kind, "message": text} instead.

This folder imports the standard library only: it is all of ours that a sandbox is given. The
function may do to this process what it likes; the parent checks again what comes out of it.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
from typing import Any

from services.reward.functions.inside.arguments import Sample
from services.reward.functions.inside.function import Function, Unfit, described

_LENGTH = struct.Struct("!I")
# Our own: a function that replaces `json.dumps` or `os.write` has no part in our answers.
_read, _write, _getpid, _exit = os.read, os.write, os.getpid, os._exit
_loads, _dumps = json.loads, json.dumps


def main() -> None:
    """Loads, then serves until the pipe ends."""
    if "--die-with-parent" in sys.argv and sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)
    source, sink = os.dup(0), os.dup(1)
    silence = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(silence, fd)
    # What the function imports as json is a fresh copy, for it to do with as it likes.
    for name in [name for name in sys.modules if name.partition(".")[0] == "json"]:
        del sys.modules[name]
    sys.path += [flag.partition("=")[2] for flag in sys.argv if flag.startswith("--packages=")]
    own, spec = _getpid(), _frame(source)
    function, fault = _loaded(spec)
    answer: dict[str, Any] = {"id": spec["id"], "error": fault}
    while True:
        if _getpid() != own:
            _exit(0)  # a copy of us that the function forked and let go on: it does not answer
        _answer(sink, answer)
        if function is None:
            return
        asked = _frame(source)
        results = function.scores([Sample(*sample) for sample in asked["samples"]])
        answer = {"id": asked["id"], "results": results}


def _loaded(spec: dict[str, Any]) -> tuple[Function | None, str | None]:
    """The function, or why there is none."""
    try:
        return Function(spec), None
    except BaseException as error:  # whatever the source raises
        text = str(error) if isinstance(error, Unfit) else described(error, spec["file"])
        return None, text


def _frame(fd: int) -> Any:
    (length,) = _LENGTH.unpack(_exactly(fd, _LENGTH.size))
    return _loads(_exactly(fd, length))


def _exactly(fd: int, length: int) -> bytes:
    chunks = bytearray()
    while len(chunks) < length:
        chunk = _read(fd, min(length - len(chunks), 1 << 20))
        if not chunk:
            _exit(0)  # the parent is gone; whatever threads the function has left go too
        chunks += chunk
    return bytes(chunks)


def _answer(fd: int, message: dict[str, Any]) -> None:
    body = _dumps(message).encode()
    view = memoryview(_LENGTH.pack(len(body)) + body)
    while view:
        view = view[_write(fd, view) :]


if __name__ == "__main__":
    main()
