"""Ties a process to the one that starts it: however the starter ends, the kernel ends the other."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

# Runs in the child before it becomes the program. The kernel's signal is asked for first and
# the parent looked at afterwards, so that a parent which ends in between is noticed too. A
# signal that the starter blocks would stay blocked in the program.
_TIE = """
import ctypes, os, signal, sys
signal.pthread_sigmask(signal.SIG_SETMASK, ())
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, int(sys.argv[2]))  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent ended before its child began")
os.execv(sys.argv[3], sys.argv[3:])
"""


def leashed(argv: Sequence[str], number: signal.Signals) -> list[str]:
    """The command line that runs `argv` (a path first), sent `number` when its starter ends.

    The starter is the *thread* that forks: start it from one that lives as long as the
    program shall. A stopped process hears SIGCONT and SIGKILL only.
    """
    tie = [sys.executable, "-I", "-S", "-c", _TIE, str(os.getpid()), str(int(number))]
    return [*tie, *argv]
