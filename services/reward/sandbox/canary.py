"""What the sandbox must withstand, tried from inside it. Run by `probe`; standard library only.

Prints a JSON object of what it found, each under the name of the promise it tests. The service
compares: this file passes no verdict.
"""

import json
import os
import resource
import socket
import sys
from collections.abc import Callable
from typing import Any


def attempt(deed: Callable[[], object]) -> str:
    """`done`, or the name of the error that stopped it."""
    try:
        deed()
    except BaseException as error:
        return type(error).__name__
    return "done"


def connect(family: int, address: Any) -> None:
    """A connection to what listens outside."""
    with socket.socket(family) as link:
        link.settimeout(2)
        link.connect(address)


def fill(path: str, size: int) -> None:
    """A file of that many bytes."""
    with open(path, "wb") as file:
        for _ in range(size >> 16):
            file.write(bytes(1 << 16))


def write(path: str) -> None:
    """A file where none may be written."""
    with open(path, "w"):
        pass


def count_forks(most: int) -> int:
    """How many processes can be beside this one."""
    read, hold = os.pipe()
    children: list[int] = []
    try:
        while len(children) < most:
            pid = os.fork()
            if pid == 0:
                os.close(hold)
                os.read(read, 1)
                os._exit(0)
            children.append(pid)
    except OSError:
        pass
    os.close(hold)
    for child in children:
        os.waitpid(child, 0)
    return len(children)


def main() -> None:
    """Tries everything once."""
    asked = json.loads(sys.argv[1])
    soft = {name: resource.getrlimit(getattr(resource, name))[0] for name in asked["limits"]}
    found = {
        "uid": os.getuid(),
        "pid": os.getpid(),
        "environment": sorted(os.environ),
        "become_root": attempt(lambda: os.setuid(0)),
        "chroot": attempt(lambda: os.chroot("/tmp")),
        "host_file": attempt(lambda: open(asked["host_file"]).close()),
        "proc": attempt(lambda: os.listdir("/proc")),
        "sys": attempt(lambda: os.listdir("/sys")),
        "write_root": attempt(lambda: write("/canary")),
        "write_usr": attempt(lambda: write("/usr/canary")),
        "write_interpreter": attempt(lambda: write(os.path.dirname(os.__file__) + "/canary.py")),
        "write_tmp": attempt(lambda: write("/tmp/canary")),
        "fill_tmp": attempt(lambda: fill("/tmp/full", asked["tmp_bytes"] * 2)),
        "network": attempt(lambda: connect(socket.AF_INET, tuple(asked["tcp"]))),
        "unix": attempt(lambda: connect(socket.AF_UNIX, "\0" + asked["unix"])),
        "uncounted_memory": attempt(lambda: os.memfd_create("canary")),
        "memory": attempt(lambda: bytearray(asked["memory_bytes"])),
        "limits": soft,
        "forks": count_forks(asked["processes"] * 4),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
