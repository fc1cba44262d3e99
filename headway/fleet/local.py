"""A whole fleet on this machine: Redis, coordinator, reward, learner, rollout nodes.

Everything that can be refused is refused before the first process is started. The
command that starts the fleet is its supervisor: when it ends, by whatever cause, so
do all of its children.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headway.errors import Conflict, HeadwayError, Interrupted, Unavailable
from headway.fleet.child import Child, ChildSpec, stop_children
from headway.fleet.spec import HOST, LocalFleetSpec, deal_cores
from headway.fleet.state import (
    FleetState,
    ProcessRecord,
    forget_state,
    instance_lock,
    make_folder,
    make_tokens,
    record_of,
    stop_recorded,
    tokens_file,
    write_state,
)
from headway.ports import free_port
from headway.redis_acl import Service
from headway.redis_client import ping
from headway.valkey import EmbeddedValkey

_READY_TIMEOUT_S = 90.0
_STOP_PATIENCE_S = 15.0
_MAX_RESTARTS = 3  # of one process within
_RESTARTS_WITHIN_S = 600.0
# Chosen anew at each start, so that a node started again is another one to its peers, with no
# failures of its predecessor held against it.
_ANY_PORT = 0
# A fleet on one machine listens on loopback only, where there is nothing to encrypt.
_TLS_SETTINGS = tuple(f"HEADWAY_TLS_{part}" for part in ("DIR", "CERT", "KEY", "CA", "NAME"))
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class StartFailed(HeadwayError):
    """A process of the fleet ended, or never got ready."""

    kind = "start_failed"


# A child's exit code (headway.lifecycle.run) -> what is wrong with the fleet then.
_START_FAILURES: dict[int, type[HeadwayError]] = {2: Conflict, 3: Unavailable}


def check_port(port: int, flag: str) -> None:
    """Conflict, naming the port, when something listens on it already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise Conflict(
                f"port {port} on {HOST} cannot be used ({error.strerror});"
                f" choose another with {flag}"
            ) from None


class LocalFleet:
    """The running fleet. Use `local_fleet`."""

    def __init__(self, spec: LocalFleetSpec, interrupted: Callable[[], int]) -> None:
        self.spec = spec
        self.api_url = f"http://{HOST}:{spec.api_port}"
        self._interrupted = interrupted
        self._children: list[Child] = []
        self._valkey: EmbeddedValkey | None = None
        self._valkey_record: ProcessRecord | None = None
        self._restarts: dict[str, list[float]] = {}  # monotonic times, by process
        self._redis_url = spec.redis_url or ""
        self._token_file, service_token = make_tokens(spec.state_dir)
        self._access_env = {
            **dict.fromkeys(_TLS_SETTINGS, ""),
            "HEADWAY_TOKEN": "",  # the user's, for another fleet
            "HEADWAY_TOKEN_FILE": str(service_token),
            "HEADWAY_TOKENS": str(tokens_file(spec.state_dir)),
        }
        self._supervisor = record_of("headway", os.getpid())

    def start(self, say: Callable[[str], None]) -> None:
        """Starts everything and waits until all of it is ready.

        StartFailed, with the process's last log lines, when one ends or stays unready
        (Conflict or Unavailable where its exit code says so); Interrupted when the user
        asks to stop.
        """
        self._note(ready=False)
        if self.spec.redis_url is None:
            say("starting Redis (embedded Valkey)")
            folder = self.spec.state_dir / ("valkey-run" if self.spec.ephemeral else "valkey")
            if self.spec.ephemeral:
                shutil.rmtree(folder, ignore_errors=True)
            self._valkey = EmbeddedValkey(folder)
            self._start_valkey(self._valkey)
        say("starting the coordinator")
        fleet_port = free_port()
        self._launch("coordinator", fleet_port, self.spec.api_port)
        self._wait_ready()
        say(f"starting reward, learner and {self.spec.num_rollouts} rollout node(s)")
        flag = ("--coordinator", f"{HOST}:{fleet_port}")
        self._launch("reward", _ANY_PORT, free_port(), flag)
        learner = _cores_text(self.spec.learner_cores)
        runs_dir = ("--runs-dir", str(self.spec.runs_dir))
        self._launch(
            "learner",
            _ANY_PORT,
            free_port(),
            (*flag, *runs_dir, "--cores", learner),
            threads=len(self.spec.learner_cores),
        )
        engine = ("--engine", self.spec.engine)
        dealt = deal_cores(self.spec.rollout_cores, self.spec.num_rollouts)
        for number, cores in enumerate(dealt):
            self._launch(
                "rollout",
                _ANY_PORT,
                free_port(),
                (*flag, *engine, "--cores", _cores_text(cores)),
                name=f"rollout-{number}",
                threads=len(cores),
            )
        self._wait_ready()
        self._note(ready=True)

    def supervise(self, say: Callable[[str], None]) -> None:
        """One look at the children: an ended one is started again.

        The embedded Redis too, on its data. StartFailed when one ends too often.
        """
        if self._valkey is not None and not self._valkey.alive():
            if not self._may_restart("valkey"):
                raise StartFailed("the embedded Redis server ended too often")
            say("the embedded Redis server ended; starting it again on its data")
            self._start_valkey(self._valkey)
            self._note(ready=True)
        for child in self._children:
            code = child.exit_code
            if code is None:
                continue
            words = f"{child.spec.name} ended with code {code}:\n{child.last_words()}"
            if not self._may_restart(child.spec.name):
                raise StartFailed(words)
            say(f"{words}\nstarting {child.spec.name} again")
            child.restart()
            self._note(ready=True)

    def _may_restart(self, name: str) -> bool:
        """Notes one more start of a process; False when there were too many of late."""
        now = time.monotonic()
        recent = [at for at in self._restarts.get(name, ()) if now - at < _RESTARTS_WITHIN_S]
        self._restarts[name] = [*recent, now]
        return len(recent) < _MAX_RESTARTS

    def stop(self) -> None:
        """Ends all children, the last started first, Redis last. Safe to repeat."""
        self._children.sort(key=_stop_rank)
        stop_children(self._children, _STOP_PATIENCE_S, lambda: self._interrupted() > 1)
        if self._valkey is not None:
            self._valkey.stop()

    def _start_valkey(self, valkey: EmbeddedValkey) -> None:
        self._redis_url = valkey.start()
        if valkey.pid is not None:
            self._valkey_record = record_of("valkey", valkey.pid)

    def _launch(
        self,
        service: Service,
        port: int,
        http_port: int,
        flags: tuple[str, ...] = (),
        name: str = "",
        threads: int = 1,
    ) -> None:
        name = name or service
        common = (
            *("--node-id", f"{name}-{os.getpid()}"),
            *("--host", HOST, "--port", str(port), "--http-port", str(http_port)),
        )
        env = {**_ONE_THREAD, **self._access_env, "PYTHONUNBUFFERED": "1"}
        env["HEADWAY_REDIS_URL"] = self._redis_for(service)
        env["OMP_NUM_THREADS"] = env["MKL_NUM_THREADS"] = str(max(1, threads))
        spec = ChildSpec(
            name=name,
            argv=(sys.executable, "-P", "-m", f"services.{service}", *common, *flags),
            env=env,
            log=self.spec.state_dir / "logs" / f"{name}.log",
            http_address=f"http://{HOST}:{http_port}",
        )
        self._children.append(Child(spec))
        self._note(ready=False)

    def _redis_for(self, service: Service) -> str:
        """The least that the service needs: of an embedded server its own user; reward none."""
        if service == "reward":
            return ""
        return self._valkey.url_of(service) if self._valkey is not None else self._redis_url

    def _wait_ready(self) -> None:
        end = time.monotonic() + _READY_TIMEOUT_S
        waiting = list(self._children)
        while waiting:
            if self._interrupted():
                raise Interrupted("stopped while the fleet was starting")
            for child in self._children:
                if child.exit_code is not None:
                    raise _START_FAILURES.get(child.exit_code, StartFailed)(
                        f"{child.spec.name} ended with code {child.exit_code} at its start:\n"
                        f"{child.last_words()}"
                    )
            waiting = [child for child in waiting if not child.ready()]
            if waiting and time.monotonic() > end:
                raise StartFailed(
                    f"{waiting[0].spec.name} is not ready after {_READY_TIMEOUT_S:.0f} s:\n"
                    f"{waiting[0].last_words()}"
                )
            if waiting:
                time.sleep(0.1)

    def _note(self, ready: bool) -> None:
        records = [child.record for child in self._children]
        if self._valkey_record is not None:
            records.append(self._valkey_record)
        write_state(
            self.spec.state_dir,
            FleetState(
                supervisor=self._supervisor,
                api_url=self.api_url,
                redis_url=self._redis_url,
                runs_dir=str(self.spec.runs_dir),
                token_file=str(self._token_file),
                ready=ready,
                processes=tuple(records),
            ),
        )


@contextmanager
def local_fleet(
    spec: LocalFleetSpec, interrupted: Callable[[], int], say: Callable[[str], None]
) -> Iterator[LocalFleet]:
    """A fleet that is up while the block runs; `interrupted` counts the user's Ctrl-C.

    Raises Conflict (a second fleet, a taken port), Unavailable or Unauthorized (Redis),
    InvalidSpec (a folder that takes nothing) before anything is started, StartFailed or
    Interrupted while starting.
    """
    with instance_lock(spec.state_dir):
        check_port(spec.api_port, "--port")
        if spec.redis_url is not None:
            asyncio.run(ping(spec.redis_url))
        make_folder(spec.runs_dir, "--runs-dir", 0o777)  # less the umask
        stop_recorded(spec.state_dir, patience_s=5)  # left over when a supervisor was killed
        fleet = LocalFleet(spec, interrupted)
        try:
            fleet.start(say)
            yield fleet
        finally:
            fleet.stop()
            forget_state(spec.state_dir)


def _cores_text(cores: tuple[int, ...]) -> str:
    return ",".join(str(core) for core in cores)


def _stop_rank(child: Child) -> int:
    """Learner first, so that it can finish its run folder while the others still serve."""
    order = ("learner", "rollout", "reward", "coordinator")
    return next(i for i, service in enumerate(order) if child.spec.name.startswith(service))
