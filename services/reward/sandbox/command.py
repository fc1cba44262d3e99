"""The command line that puts a program into the sandbox.

    bwrap (namespaces, file system, seccomp) -> setpriv (as root only: another user id)
        -> prlimit (resource limits) -> sh (the mark: all of this worked) -> the program

Where the service is not root, bwrap's user namespace takes the place of setpriv. Root cannot
use that way: inside a user namespace its processes would still be the machine's root to the
kernel, exempt from the limit on processes and the owner of /proc/sys.
"""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from services.reward.grading.outcome import SandboxUnavailable
from services.reward.sandbox.limits import Limits
from services.reward.sandbox.seccomp import filter_program

INSTALL = "install it: apt-get install bubblewrap libseccomp2 util-linux (or your system's names)"
START_S = 30.0  # for the sandbox itself, before the program's clock runs
STARTED = b"\x01"  # the first byte on stderr once everything is in place
_SCRIPT_ONCE = r'printf "\001" >&2; exec "$@"'
_SCRIPT_CHILD = r'printf "\001" >&2; exec 2>/dev/null; exec "$@"'
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_NOBODY = "65534"
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class View:
    """What of the machine a program sees beside the system and the interpreter, read-only.

    `packages` are importable names (`numpy`), found under /packages; `paths` are host folders or
    files as (host path, path inside).
    """

    packages: tuple[str, ...] = ()
    paths: tuple[tuple[str, str], ...] = ()


def python_argv(*arguments: str, site: bool = False) -> list[str]:
    """The interpreter as a program finds it: isolated, without site-packages unless asked."""
    return [_interpreter(), "-I", *([] if site else ["-S"]), "-X", "utf8", *arguments]


@contextmanager
def command(
    argv: Sequence[str], limits: Limits, view: View, files: Mapping[str, bytes], keep_stderr: bool,
    info: int,
) -> Iterator[tuple[list[str], list[int]]]:  # fmt: skip
    """The full command and the descriptors that it must inherit, open while the block runs.

    `files` appear under /box; bwrap tells the descriptor `info` about its first process.
    SandboxUnavailable when a part of the sandbox is not installed.
    """
    descriptors: list[int] = []
    try:
        descriptors.append(_in_memory("seccomp", filter_program()))
        tmp = ["--perms", "1777", "--size", str(limits.tmp_bytes), "--tmpfs", "/tmp"]
        options = [*tmp, *_view(view), *_folder("/box")]
        for folder in sorted({os.path.dirname(f"/box/{name}") for name in files}):
            options += _folder(folder)
        for name, content in files.items():
            descriptors.append(_in_memory("file", content))
            options += ["--perms", "0444", "--file", str(descriptors[-1]), f"/box/{name}"]
        script = _SCRIPT_ONCE if keep_stderr else _SCRIPT_CHILD
        yield (
            [
                *_bwrap(),
                *options,
                *("--remount-ro", "/", "--chdir", "/tmp", "--info-fd", str(info)),
                *("--seccomp", str(descriptors[0]), "--"),
                *_other_user(),
                *_prlimit(limits),
                *("/bin/sh", "-c", script, "sh", *argv),
            ],
            descriptors,
        )
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _bwrap() -> list[str]:
    options = [
        _tool("bwrap"), "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts",
        "--unshare-cgroup-try", "--hostname", "sandbox", "--die-with-parent", "--new-session",
        "--cap-drop", "ALL", "--clearenv",
    ]  # fmt: skip
    if os.geteuid() == 0:
        options += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        options += ["--unshare-user", "--uid", _NOBODY, "--gid", _NOBODY]
    for name, value in _ENVIRONMENT.items():
        options += ["--setenv", name, value]
    return options


def _other_user() -> list[str]:
    if os.geteuid() != 0:
        return []
    user = str(random.SystemRandom().choice(_free_ids()))
    return [
        _tool("setpriv"), "--reuid", user, "--regid", user, "--clear-groups",
        "--inh-caps=-all", "--ambient-caps=-all",
    ]  # fmt: skip


@lru_cache(maxsize=1)
def _free_ids() -> range:
    """User ids that no account has: the upper part of those that exist in our namespace."""
    mapped = Path("/proc/self/uid_map").read_text()
    rows = [[int(number) for number in row.split()] for row in mapped.splitlines()]
    first, _, count = max(rows, key=lambda row: row[2])
    if count < 4096:
        raise SandboxUnavailable(f"root of a user namespace of {count} ids: run it as another user")
    return range(first + count // 4, first + min(count, 1 << 31) - 2)


def _prlimit(limits: Limits) -> list[str]:
    # In a user namespace of its own, bwrap's first process counts too.
    processes = limits.processes + (os.geteuid() != 0)
    command = [
        _tool("prlimit"), "--core=0", f"--as={limits.memory_bytes}", f"--nproc={processes}",
        f"--fsize={limits.file_bytes}", f"--nofile={limits.open_files}",
    ]  # fmt: skip
    if limits.cpu_s is not None:
        command.append(f"--cpu={limits.cpu_s}:{limits.cpu_s + 1}")
    return [*command, "--"]


def _view(view: View) -> list[str]:
    options = [*_system(), *_folder("/dev")]
    for device in _DEVICES:
        options += ["--dev-bind", device, device]
    options += ["--symlink", "/tmp", "/dev/shm"]
    options += _folder("/packages") if view.packages else ()
    for name in view.packages:
        for path in _package(name):
            options += ["--ro-bind", path, f"/packages/{Path(path).name}"]
    for source, target in view.paths:
        options += [*_folder(os.path.dirname(target)), "--ro-bind", source, target]
    return options


def _folder(path: str) -> list[str]:
    """Folders that everyone may enter, whatever our umask."""
    parts = [str(part) for part in (*reversed(Path(path).parents), Path(path))]
    return [word for part in parts[1:] for word in ("--perms", "0755", "--dir", part)]


@lru_cache(maxsize=1)
def _system() -> tuple[str, ...]:
    options = ["--ro-bind", "/usr", "/usr"]
    for folder in ("/bin", "/lib", "/lib32", "/lib64", "/libx32"):
        if os.path.islink(folder):
            options += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            options += ["--ro-bind", folder, folder]
    for path in ("/etc/ld.so.cache", "/etc/alternatives"):
        options += ["--ro-bind-try", path, path]
    prefix = os.path.realpath(sys.base_prefix)
    if not prefix.startswith("/usr/") and prefix != "/usr":
        options += [*_folder(os.path.dirname(prefix)), "--ro-bind", prefix, prefix]
    return tuple(options)


@lru_cache(maxsize=1)
def _interpreter() -> str:
    return os.path.realpath(sys.executable)


@lru_cache(maxsize=64)
def _package(name: str) -> tuple[str, ...]:
    found = importlib.util.find_spec(name) if name.isidentifier() else None
    if found is None or found.origin is None:
        raise SandboxUnavailable(f"the service has no package {name!r} to show a program")
    where = os.path.realpath(found.origin)
    if not found.submodule_search_locations:
        return (where,)
    folder = os.path.dirname(where)
    libraries = f"{folder}.libs"
    return (folder, libraries) if os.path.isdir(libraries) else (folder,)


@lru_cache(maxsize=8)
def _tool(name: str) -> str:
    path = shutil.which(name) or shutil.which(name, path=os.path.dirname(sys.executable))
    if path is None:
        raise SandboxUnavailable(f"the sandbox needs {name}, which is not here; {INSTALL}")
    return path


def _in_memory(name: str, content: bytes) -> int:
    descriptor = os.memfd_create(name, 0)
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
