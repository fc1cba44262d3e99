"""Runs programs that nobody vouches for: under bubblewrap, with limits, or not at all.

What a program finds inside:

- no network: a network namespace of its own, and no sockets but Unix ones (seccomp)
- a read-only system: /usr, the Python interpreter and the packages named, four plain devices;
  no /proc, no /sys, no host files, no user's home, nothing of the service's environment
- /tmp of its own, in memory, of a limited size, which is also HOME; it goes when the program ends
- its own pid, ipc, uts, mount, network and cgroup namespaces, and a user namespace of its own or,
  under a service that is root, a user id that nothing else on the machine has; no capability, no
  way to get one (no_new_privs), no debugging of other processes, no new namespaces
- limits (`Limits`): wall clock, CPU seconds and address space of a process, processes and threads,
  resident memory of all processes together, size of a file and of /tmp, files in it, bytes of
  output
- when it ends, is killed, or the caller dies, every process it left is killed with its namespace

`require()` makes the sandbox prove this in a canary program before anything else may run;
where it cannot, `SandboxUnavailable` is raised. Nothing ever runs unsandboxed.

What it does not promise:

- It is one kernel: a program with a working exploit against it gets out. Who runs code of an
  enemy, not merely of a model, gives the service a virtual machine of its own.
- It does not hide the time, the kernel's version, the load or the number of cores, nor defend
  against reading other processes' secrets through the processor's caches.
- World-readable files under /usr and the interpreter's folder can be read: keep no secrets there.
- Resident memory of several processes together, and the number of files, are looked at every 50 ms
  (by `run`; for a child its caller must), so they may be exceeded for as long; what always holds is
  `memory_bytes` times `processes`. Kernel buffers of sockets and pipes (below 1 MiB a descriptor)
  are not counted.
- CPU seconds are a process's, not the tree's; the wall clock bounds the tree.
- `Outcome.kind` is a report, not evidence: a program can make its own failure look like another.
- A program's output is data of an enemy: parse it with care, never evaluate it.
"""

from services.reward.grading.outcome import SandboxUnavailable
from services.reward.sandbox.child import SandboxedChild, sandboxed_child, start_child
from services.reward.sandbox.command import View, python_argv
from services.reward.sandbox.limits import KINDS, Kind, Limits, Outcome, kind_of
from services.reward.sandbox.once import run
from services.reward.sandbox.probe import require

__all__ = [
    "KINDS",
    "Kind",
    "Limits",
    "Outcome",
    "SandboxUnavailable",
    "SandboxedChild",
    "View",
    "kind_of",
    "python_argv",
    "require",
    "run",
    "sandboxed_child",
    "start_child",
]
