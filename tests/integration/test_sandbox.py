"""Twenty hostile programs: none gets out, none harms, each is reported by its kind (S051)."""

import os
import socket
import subprocess
import sys

import psutil
import pytest

from services.reward import metrics, sandbox, serve
from services.reward.grading.outcome import SandboxUnavailable
from services.reward.sandbox import command, probe
from services.reward.sandbox.limits import Limits
from tests.support.reward_stand import ROOT
from tests.support.sandboxes import QUICK, grade, left_over, play, zombies

DENIED = "import ctypes; c = ctypes.CDLL(None, use_errno=True)\n"
HOSTILE = {
    "allocates 64 GB": ("bytearray(64 << 30)", "memory"),
    "allocates bit by bit": ("x = []\nwhile True: x.append(bytes(1 << 20))", "memory"),
    "allocates in many processes": (
        "import os, time\nfor _ in range(4):\n  if os.fork() == 0: break\n"
        "x = b'x' * (60 << 20)\ntime.sleep(60)", "memory"),
    "writes 2 GB": (
        "with open('/tmp/x', 'wb') as f:\n  while True: f.write(bytes(1 << 20))", "disk"),
    "writes many files": (
        "for i in range(9999): open(f'/tmp/{i}', 'wb').write(bytes(1 << 18))", "disk"),
    "makes empty files without end": (
        "import itertools\nfor i in itertools.count(): open(f'/tmp/{i}', 'w').close()", "disk"),
    "fills /dev/shm": (
        "for i in range(9999): open(f'/dev/shm/{i}', 'wb').write(bytes(1 << 18))", "disk"),
    "forks without end": ("import os\nwhile True: os.fork()", "processes"),
    "starts threads without end": (
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,),"
        " daemon=True).start()", "processes"),
    "prints 1 GB": ("while True: print('x' * 65536)", "output"),
    "floods stderr": ("import os\nwhile True: os.write(2, bytes(65536))", "output"),
    "spins": ("while True: pass", "timeout"),
    "ignores signals and sleeps": (
        "import signal, time\nfor n in range(1, 32):\n  try: signal.signal(n, signal.SIG_IGN)\n"
        "  except (OSError, ValueError): pass\ntime.sleep(60)", "timeout"),
    "closes its outputs and sleeps": (
        "import os, time\nfor n in (0, 1, 2): os.close(n)\ntime.sleep(60)", "timeout"),
    "stops itself": ("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", "timeout"),
    "kills its parent and everybody": (
        "import os\nfor p in (os.getppid(), 1, -1):\n  try: os.kill(p, 9)\n"
        "  except OSError: pass\nprint('alive', os.getppid())", "ok"),
    "leaves a daemon behind": (
        "import os, time\nif os.fork() == 0:\n  os.setsid()\n  for n in (0, 1, 2): os.close(n)\n"
        "  time.sleep(600)", "ok"),
    "segfaults": (DENIED + "ctypes.string_at(0)", "crash"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_ends_at_its_limit_and_leaves_nothing(name):
    source, kind = HOSTILE[name]
    mark = f"mark={name}"
    slow = name in ("spins", "ignores signals and sleeps", "closes its outputs and sleeps",
                    "stops itself")  # fmt: skip
    limits = Limits(
        wall_s=1.0 if slow else 30.0, cpu_s=1 if slow else 20, memory_bytes=QUICK.memory_bytes,
        processes=QUICK.processes, file_bytes=QUICK.file_bytes, tmp_bytes=QUICK.tmp_bytes,
        output_bytes=QUICK.output_bytes,
    )  # fmt: skip
    before = zombies()
    outcome = play(f"# {mark}\n{source}", limits)
    assert outcome.kind == kind, outcome
    assert len(outcome.stdout) <= QUICK.output_bytes
    assert left_over(mark, before) == []
    assert play("print(6 * 7)").stdout == b"42\n"


READS = {
    "host files": "open({secret!r}).read()",
    "the caller's environment": "open('/proc/1/environ').read()",
    "its own /proc": "open('/proc/self/maps').read()",
    "a home": "os.listdir({home!r})",
    "passwords": "open('/etc/passwd').read()",
    "a link to host files": "os.symlink({secret!r}, '/tmp/l') or open('/tmp/l').read()",
    "host files through ..": "open('/tmp/../../..' + {secret!r}).read()",
    "the network": "socket.create_connection({tcp!r}, 2)",
    "datagrams": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
    "abstract sockets": "socket.socket(socket.AF_UNIX).connect({unix!r})",
    "netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "the machine's host": "socket.socket(40, socket.SOCK_STREAM)",
    "uncounted memory": "os.memfd_create('x')",
    "root": "os.setuid(0)",
    "a new root folder": "os.chroot('/tmp')",
    "the system": "open('/usr/x', 'w')",
    "the root folder": "open('/x', 'w')",
    "devices": "os.mknod('/tmp/disk', 0o60666, os.makedev(8, 0))",
    "shared memory": "check(c.shmget(0, 1 << 20, 0o1600))",
    "other processes' memory": "check(c.ptrace(16, os.getppid(), 0, 0))",
    "new namespaces": "check(c.unshare(0x10000000))",
    "mounts": "check(c.mount(b'none', b'/tmp', b'tmpfs', 0, 0))",
    "kernel keys": "check(c.syscall(250, 0, 0, 0))",
}


def test_nothing_outside_can_be_had(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_TOKEN", "hw_secret")
    (tmp_path / "secret").write_text("secret")
    tmp_path.chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(f"\0headway-test-{os.getpid()}")
        unix.listen()
        asked = {
            "secret": str(tmp_path / "secret"), "home": os.path.expanduser("~"),
            "tcp": tcp.getsockname(), "unix": f"\0headway-test-{os.getpid()}",
        }  # fmt: skip
        tries = "".join(
            f"try:\n  {attempt.format(**asked)}\n  print({name!r})\nexcept OSError: pass\n"
            for name, attempt in READS.items()
        )
        outcome = play(
            DENIED + "import os, socket\ndef check(n):\n  if n < 0: raise OSError(n)\n" + tries
            + "print(os.environ.get('HEADWAY_TOKEN'), os.listdir('/tmp'))"
        )  # fmt: skip
        tcp.setblocking(False)
        unix.setblocking(False)
        for door in (tcp, unix):
            with pytest.raises(BlockingIOError):
                door.accept()
    assert outcome.stderr == b""
    # A home that holds the interpreter is there as a bare path; see below.
    assert outcome.stdout.decode().splitlines()[-1] == "None ['l']"
    assert set(outcome.stdout.decode().splitlines()[:-1]) <= {"a home"}


def test_a_home_shows_no_more_than_the_way_to_the_interpreter():
    where, home = os.path.realpath(sys.base_prefix), os.path.expanduser("~")
    listed = play(f"import os\nprint(os.listdir({home!r}))").stdout.decode().strip()
    inside = where.startswith(home)
    assert listed == (repr([os.path.relpath(where, home).split(os.sep)[0]]) if inside else "")


def test_input_output_files_and_exit_code_pass():
    outcome = play(
        "import sys; print(open('/box/a').read() + sys.stdin.read()); sys.exit(7)",
        files={"a": b"file "}, stdin=b"x" * 100_000,
    )  # fmt: skip
    assert (outcome.kind, outcome.exit_code) == ("output", None)
    outcome = play(
        "import sys; print(open('/box/a').read() + sys.stdin.read()); sys.exit(7)",
        files={"a": b"file "}, stdin=b"text",
    )  # fmt: skip
    assert (outcome.kind, outcome.exit_code, outcome.stdout) == ("crash", 7, b"file text\n")
    assert play("import os; os.kill(os.getpid(), 6)").exit_code == 128 + 6
    assert play("raise ValueError('no')").stderr.endswith(b"ValueError: no\n")


def test_a_program_that_does_not_read_or_exec_itself_away():
    assert play("pass", stdin=b"x" * (1 << 20)).kind == "ok"
    assert play("import os; os.execv('/usr/bin/true', ['true'])").kind == "ok"


def test_a_long_lived_child_answers_until_it_is_killed():
    before = psutil.Process().children(recursive=True)
    sandbox.require()
    source = "import sys\nfor line in sys.stdin: print(line.upper(), end='', flush=True)"
    with sandbox.sandboxed_child(sandbox.python_argv("-c", source)) as child:
        for text in (b"one\n", b"two\n"):
            child.stdin.write(text)
            assert child.stdout.read(4) == text.upper()
        assert child.resident_bytes > 1 << 20
        assert child.exit_code is None
        inside = set(psutil.Process().children(recursive=True)) - set(before)
        assert len(inside) >= 3
    assert not any(process.is_running() for process in inside)


def test_a_sandbox_dies_with_a_killed_caller():
    source = (
        "import os, sys, time\nfrom services.reward.sandbox import *\n"
        "with sandboxed_child(python_argv('-c', 'import time, os; os.fork(); print(1, flush=True);"
        " time.sleep(600) # orphaned')) as child:\n"
        "  child.stdout.read(2); print('up', flush=True); time.sleep(600)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-P", "-c", source], stdout=subprocess.PIPE, env=environment
    ) as caller:
        assert caller.stdout.read(3) == b"up\n"
        inside = psutil.Process(caller.pid).children(recursive=True)
        caller.kill()
    assert len(inside) >= 4
    assert psutil.wait_procs(inside, timeout=20)[1] == []


def test_what_is_not_installed_or_does_not_hold_is_never_run(monkeypatch):
    monkeypatch.setattr(probe, "_held", False)
    monkeypatch.setattr(probe, "_failure", None)
    with monkeypatch.context() as patch:
        command._tool.cache_clear()
        patch.setenv("PATH", "/nonexistent")
        patch.setattr(sys, "executable", "/nonexistent/python")
        with pytest.raises(SandboxUnavailable, match=r"needs bwrap.*apt-get install bubblewrap"):
            sandbox.require()
    with pytest.raises(SandboxUnavailable):  # remembered for a while
        sandbox.require()
    command._tool.cache_clear()
    monkeypatch.setattr(probe, "_failure", None)
    whole = command._prlimit
    with monkeypatch.context() as patch:
        patch.setattr(
            command, "_prlimit", lambda limits: [w for w in whole(limits) if "nproc" not in w]
        )
        with pytest.raises(SandboxUnavailable, match="does not hold: no process limit"):
            sandbox.require()
    monkeypatch.setattr(probe, "_failure", None)
    sandbox.require()


async def test_without_a_sandbox_the_service_says_so_and_code_is_null(monkeypatch, caplog):
    def missing(name):
        raise SandboxUnavailable(f"the sandbox needs {name}, which is not here")

    monkeypatch.setattr(command, "_tool", missing)
    monkeypatch.setattr(probe, "_held", False)
    monkeypatch.setattr(probe, "_failure", None)
    await serve._try_sandbox()
    assert metrics.SANDBOX_HOLDS._value.get() == 0
    assert "code is not run: the sandbox needs bwrap" in caplog.text
    with pytest.raises(SandboxUnavailable) as null:
        grade("print(1)", cases=[{"input": "", "output": "1"}])
    assert null.value.kind == "sandbox_unavailable"
    monkeypatch.undo()
    monkeypatch.setattr(probe, "_failure", None)
    await serve._try_sandbox()
    assert metrics.SANDBOX_HOLDS._value.get() == 1
