"""One process's settings: flags, with the environment behind them.

Secrets come from the environment or from files only (`HEADWAY_REDIS_URL`, `HEADWAY_TOKEN`),
so that they stand in no process list.
"""

from __future__ import annotations

import argparse
import os
import secrets
import socket
from dataclasses import dataclass

from headway.access.secrets import check_no_password
from headway.errors import InvalidSpec
from headway.ports import address_towards, checked_address, is_host, is_loopback, is_wildcard

DEFAULT_REDIS_URL = "redis://127.0.0.1:6379/0"
LEVELS = ("debug", "info", "warning", "error", "critical")
_MAX_CORES = 8192  # as many as a kernel knows

# Flags that name who we are and whom we let in. They are put into the environment, so that
# the processes which a service starts are the same to others (`headway.access.process`).
_ACCESS_FLAGS = {
    "--token-file": "file with the token that this process shows to others",
    "--tokens": "file of the tokens that are let in (made by `headway token create`)",
    "--allow-paths": "folders, joined by ':', under which jobs may name paths; default: anywhere"
    " (*) on loopback, nowhere beyond",
    "--tls-dir": "folder with tls.crt, tls.key and ca.crt",
    "--tls-cert": "this process's certificate (PEM)",
    "--tls-key": "its key (PEM)",
    "--tls-ca": "the CA of the fleet's certificates (PEM)",
    "--tls-name": "what the other services' certificates are made out to, if not their address",
}


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """What every service is told at its start."""

    role: str  # coordinator, rollout, learner or reward
    node_id: str
    host: str  # the address bound
    advertise: str  # the address told to the fleet; the weight group binds it
    port: int  # gRPC; 0: a free one
    http_port: int  # REST, health and metrics; 0: a free one
    coordinator: str  # host:port of the FleetService; empty: on its own
    redis_url: str
    log_level: str


def add_service_flags(parser: argparse.ArgumentParser, role: str) -> None:
    """Adds the flags that all services share."""
    env = os.environ
    parser.add_argument("--node-id", default="", help="unique name in the fleet; default: made up")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; beyond loopback: with tokens"
    )
    parser.add_argument(
        "--advertise",
        default="",
        help="address told to the fleet; default: --host, or our own on the way to the coordinator",
    )
    parser.add_argument("--port", type=_port, default=0, help="gRPC port; 0: a free one")
    parser.add_argument("--http-port", type=_port, default=0, help="HTTP port; 0: a free one")
    if role != "coordinator":
        parser.add_argument(
            "--coordinator",
            default=env.get("HEADWAY_COORDINATOR", ""),
            help="host:port of the coordinator's FleetService (env HEADWAY_COORDINATOR)",
        )
    parser.add_argument(
        "--redis",
        default=env.get("HEADWAY_REDIS_URL", DEFAULT_REDIS_URL),
        help="Redis or Valkey URL; in env HEADWAY_REDIS_URL when it holds a password",
    )
    for flag, text in _ACCESS_FLAGS.items():
        name = _env_name(flag)
        parser.add_argument(flag, default=env.get(name, ""), help=f"{text} (env {name})")
    parser.add_argument(
        "--log-level",
        type=_level,
        default=env.get("HEADWAY_LOG_LEVEL") or "info",
        help=f"{', '.join(LEVELS)} (env HEADWAY_LOG_LEVEL)",
    )
    parser.set_defaults(role=role)


def service_settings(namespace: argparse.Namespace) -> ServiceSettings:
    """Settings from parsed flags.

    InvalidSpec when a bind would be open to the network, a token or certificate cannot be
    used, or a password stands on the command line.
    """
    from headway.access.process import process_access  # what a bad job need not wait for
    from headway.access.reach import ANYWHERE, SETTING, allowed_roots

    for flag in _ACCESS_FLAGS:
        os.environ[_env_name(flag)] = getattr(namespace, flag[2:].replace("-", "_"))
    access = process_access()
    if not os.environ[SETTING]:
        os.environ[SETTING] = ANYWHERE if is_loopback(namespace.host) else ""
    allowed_roots()
    host, coordinator = namespace.host, getattr(namespace, "coordinator", "")
    if not is_loopback(host) and access.gate is None:
        raise InvalidSpec(
            f"--host {host} is not a loopback address: without --tokens or a token of its own"
            " (HEADWAY_TOKEN) a service listens on 127.0.0.1 only"
        )
    if coordinator:
        checked_address(coordinator)
    if namespace.redis != os.environ.get("HEADWAY_REDIS_URL", DEFAULT_REDIS_URL):
        check_no_password(namespace.redis)
    role = namespace.role
    return ServiceSettings(
        role=role,
        node_id=namespace.node_id or f"{role}-{socket.gethostname()}-{secrets.token_hex(3)}",
        host=host,
        advertise=_advertised(namespace.advertise, host, coordinator),
        port=namespace.port,
        http_port=namespace.http_port,
        coordinator=coordinator,
        redis_url=namespace.redis,
        log_level=namespace.log_level,
    )


def _advertised(given: str, host: str, coordinator: str) -> str:
    if given:
        if not is_host(given) or is_wildcard(given):
            raise InvalidSpec(f"--advertise {given!r} is no address that others can reach")
        return given
    if not is_wildcard(host):
        return host
    name, _, port = coordinator.rpartition(":")
    try:
        return address_towards(name.strip("[]"), int(port)) if coordinator else "127.0.0.1"
    except OSError as error:
        raise InvalidSpec(f"--coordinator {coordinator}: {error.strerror}") from None


def parse_cores(text: str) -> tuple[int, ...]:
    """CPU cores from `0,2-3`. InvalidSpec when malformed."""
    cores: set[int] = set()
    try:
        for part in filter(None, text.split(",")):
            first, _, last = part.partition("-")
            low, high = int(first), int(last or first)
            if not 0 <= low <= high < _MAX_CORES:
                raise ValueError
            cores.update(range(low, high + 1))
    except ValueError:
        raise InvalidSpec(f"cores {text!r} are not of the form 0,2-3") from None
    return tuple(sorted(cores))


def _env_name(flag: str) -> str:
    return "HEADWAY_" + flag[2:].replace("-", "_").upper()


def check_level(text: str) -> str:
    """The level in lower case; InvalidSpec for any but those of `LEVELS`."""
    if text.lower() not in LEVELS:
        raise InvalidSpec(f"log level {text[:40]!r} is none of {', '.join(LEVELS)}")
    return text.lower()


def _level(text: str) -> str:
    try:
        return check_level(text)
    except InvalidSpec as error:
        raise argparse.ArgumentTypeError(f"{error} (env HEADWAY_LOG_LEVEL)") from None


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"port {port} is not in 0..65535")
    return port
