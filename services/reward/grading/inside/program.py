"""Executes the program under test in the present process, as its last deed or as a module."""

from __future__ import annotations

import builtins
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType
    from typing import Any


def execute(code: CodeType, name: str) -> dict[str, Any]:
    """Runs the program's top level as module `name`; its names."""
    module = type(sys)(name)
    module.__dict__["__file__"] = "/tmp/program.py"
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # which `site` would have brought
    sys.modules[name] = module
    exec(code, module.__dict__)
    return module.__dict__


def as_main(code: CodeType) -> int:
    """Runs it as `python program.py` would, with exit handlers and threads; the exit code."""
    exit_code = _guarded(lambda: execute(code, "__main__"))
    threading = sys.modules.get("threading")
    if threading is not None:
        exit_code = _guarded(threading._shutdown) or exit_code
    import atexit

    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        exit_code = _guarded(stream.flush) or exit_code
    return exit_code


def _guarded(deed: Any) -> int:
    try:
        deed()
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return (stop.code or 0) & 0xFF
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException:
        complain()
        return 1
    return 0


def complain() -> None:
    """The present exception on stderr."""
    import traceback

    traceback.print_exc(limit=-3)
    sys.stderr.flush()


def redirect(stdin: int, stdout: int, stderr: int, kept: tuple[int, ...] = ()) -> None:
    """Gives the process these streams and closes every other descriptor."""
    for target, source in enumerate((stdin, stdout, stderr)):
        os.dup2(source, target)
    first = 3
    for descriptor in sorted(kept):
        os.closerange(first, descriptor)
        first = descriptor + 1
    os.closerange(first, 4096)
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
