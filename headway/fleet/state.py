"""What a local fleet leaves on disk, so that other commands find it and end it.

One folder an instance: `fleet.lock` (held by the command that runs the fleet, for as
long as it lives; says which process that is), `fleet.json` (addresses and processes;
mode 0600, since the Redis URL may hold a password), `tokens.json` (hashes of the tokens let
in), `admin.token` and `service.token` (mode 0600: ours and the processes'; made anew at each
start) and `logs/`.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from headway.access.secrets import write_secret
from headway.access.tokens import TokenFile, add_token
from headway.errors import Conflict, InvalidSpec
from headway.pids import boot, started


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """One process, named so that its pid cannot be mistaken for a later one's.

    By the kernel's count from boot: a time of day would move when the clock is set.
    """

    name: str
    pid: int
    started: int  # clock ticks after boot, as the kernel says
    boot: str = ""  # which boot of the machine
    log: str = ""
    http_address: str = ""  # http://host:port of /readyz; empty where there is none

    def process(self) -> psutil.Process | None:
        """The live process, or None when it ended or its pid is another's by now."""
        with suppress(psutil.Error, ProcessLookupError):
            process = psutil.Process(self.pid)
            same = (self.started, self.boot) == (started(self.pid), boot())
            if same and process.status() != psutil.STATUS_ZOMBIE:
                return process
        return None


@dataclass(frozen=True, slots=True)
class FleetState:
    """A local fleet: who runs it, where its REST API is, which processes it has."""

    supervisor: ProcessRecord
    api_url: str
    redis_url: str
    runs_dir: str
    ready: bool
    processes: tuple[ProcessRecord, ...]
    token_file: str = ""  # holds a token that may do everything here


def record_of(name: str, pid: int, log: str = "", http_address: str = "") -> ProcessRecord:
    """The record of a live process that we started."""
    return ProcessRecord(name, pid, started(pid), boot(), log, http_address)


def default_state_dir() -> Path:
    """$HEADWAY_STATE, else `headway/default` under the user's state folder (XDG).

    InvalidSpec when the user has no home either.
    """
    if chosen := os.environ.get("HEADWAY_STATE"):
        return Path(chosen).absolute()
    if base := os.environ.get("XDG_STATE_HOME"):
        return Path(base) / "headway" / "default"
    try:
        home = Path.home()
    except RuntimeError:
        raise InvalidSpec("this user has no home folder: name a folder in HEADWAY_STATE") from None
    return home / ".local" / "state" / "headway" / "default"


def tokens_file(state_dir: Path) -> Path:
    """The tokens that the fleet's services accept."""
    return state_dir / "tokens.json"


def make_tokens(state_dir: Path) -> tuple[Path, Path]:
    """Makes this start's tokens: files of the user's (admin) and of the processes' (service).

    Tokens that people made (`headway token create`) stay.
    """
    file = TokenFile(tokens_file(state_dir))
    paths: list[Path] = []
    for role in ("admin", "service"):
        token, _ = add_token(file, "admin" if role == "admin" else "service", role, only=True)
        paths.append(state_dir / f"{role}.token")
        write_secret(paths[-1], token + "\n")
    return paths[0], paths[1]


def write_state(state_dir: Path, state: FleetState) -> None:
    """Replaces fleet.json at once; a reader sees the old or the new one."""
    target, draft = state_dir / "fleet.json", state_dir / "fleet.json.tmp"
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(asdict(state), file, indent=2)
    draft.replace(target)


def read_state(state_dir: Path) -> FleetState | None:
    """The fleet that is up, or None: no file, a damaged one, or its supervisor is gone."""
    state = _read(state_dir)
    return state if state is not None and state.supervisor.process() is not None else None


def forget_state(state_dir: Path) -> None:
    """Removes fleet.json."""
    (state_dir / "fleet.json").unlink(missing_ok=True)


def make_folder(folder: Path, setting: str, mode: int = 0o700) -> None:
    """Makes a folder and its parents. InvalidSpec when nothing can be written into it;
    `setting` says where its name came from.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=mode)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"a full disk takes no byte")
            probe.flush()
    except OSError as error:
        raise InvalidSpec(
            f"{setting}: nothing can be written in {folder} ({error.strerror})"
        ) from None


@contextmanager
def instance_lock(state_dir: Path) -> Iterator[None]:
    """Held while the block runs. Conflict, naming the fleet, when another process holds it."""
    make_folder(state_dir, "the fleet's state (HEADWAY_STATE)")
    with (state_dir / "fleet.lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(_already_up(state_dir)) from None
        file.truncate(0)
        json.dump(asdict(record_of("headway", os.getpid())), file)
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def stop_recorded(state_dir: Path, patience_s: float) -> tuple[str, ...]:
    """Ends a fleet from outside; returns the names of the processes it ended.

    The supervisor is asked first (it cancels jobs and stops its children in order).
    What is left of the recorded processes after `patience_s` is killed. Only processes
    whose pid and start time are the recorded ones are touched, and never ourselves. A
    fleet that is only being started, or whose fleet.json is gone, is known by its lock.
    """
    state = _read(state_dir)
    holder = _holder(state_dir)
    if state is None and holder is None:
        return ()
    records = [*([holder] if holder else [state.supervisor] if state else [])]
    records += state.processes if state else ()
    alive = [(record.name, p) for record in records if (p := record.process()) is not None]
    family = [child for _, process in alive for child in _descendants(process)]
    supervisor = records[0].process()
    first = [supervisor] if supervisor is not None else [process for _, process in alive]
    _signal(first, signal.SIGTERM)
    left = wait_ended([process for _, process in alive], patience_s)
    _signal(left, signal.SIGKILL)
    _signal(family, signal.SIGKILL)
    wait_ended([*left, *family], 5.0)
    if _read(state_dir) == state:  # else another fleet has begun meanwhile
        forget_state(state_dir)
    return tuple(name for name, _ in alive)


def wait_gone(record: ProcessRecord, patience_s: float) -> bool:
    """True when the process ended within `patience_s`."""
    end = time.monotonic() + patience_s
    while record.process() is not None:
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def wait_ended(processes: Sequence[psutil.Process], patience_s: float) -> list[psutil.Process]:
    """Waits until processes have ended; those that have not, after `patience_s` at most.

    A zombie has ended: whether it is ever reaped is its parent's business, and the first
    process of a container often reaps nothing.
    """
    end = time.monotonic() + patience_s
    left = [process for process in processes if not _ended(process)]
    while left and time.monotonic() < end:
        time.sleep(0.05)
        left = [process for process in left if not _ended(process)]
    return left


def _ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return process.children(recursive=True)
    return []


def _signal(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.Error):  # psutil refuses a pid that is another process by now
            process.send_signal(number)


def _read(state_dir: Path) -> FleetState | None:
    """None for what is not there, not readable, or not what `write_state` writes."""
    try:
        raw: dict[str, Any] = json.loads((state_dir / "fleet.json").read_text(encoding="utf-8"))
        state = FleetState(
            supervisor=_record(raw.pop("supervisor")),
            processes=tuple(_record(record) for record in raw.pop("processes")),
            **raw,
        )
        texts = (state.api_url, state.redis_url, state.runs_dir, state.token_file)
        return state if all(isinstance(text, str) for text in texts) else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _holder(state_dir: Path) -> ProcessRecord | None:
    """Which process holds the lock; None when none does, or we ourselves."""
    try:
        record = _record(json.loads((state_dir / "fleet.lock").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return None
    return record if record.process() is not None and record.pid != os.getpid() else None


def _record(raw: Any) -> ProcessRecord:
    record = ProcessRecord(**raw)
    numbers = (record.pid, record.started)
    texts = (record.name, record.boot, record.log, record.http_address)
    if not all(type(n) is int and n >= 0 for n in numbers) or record.pid == 0:
        raise ValueError("no process")
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("no text")
    return record


def _already_up(state_dir: Path) -> str:
    state, holder = _read(state_dir), _holder(state_dir)
    if state is None or state.supervisor.process() is None:
        who = f" (pid {holder.pid})" if holder else ""
        return (
            f"a fleet is being started in {state_dir}{who}; wait for it or end it with"
            " `headway down`"
        )
    names = ", ".join(record.name for record in state.processes) or "nothing yet"
    return (
        f"a fleet is already up at {state.api_url} (pid {state.supervisor.pid}: {names});"
        " use it with `headway submit`, or end it with `headway down`"
    )
