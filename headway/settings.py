"""One process's settings: flags, with the environment behind them.

Secrets come from the environment only (`HEADWAY_REDIS_URL`), so that they stand
in no process list.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import secrets
import socket
from dataclasses import dataclass

from headway.errors import InvalidSpec

DEFAULT_REDIS_URL = "redis://127.0.0.1:6379/0"


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """What every service is told at its start."""

    role: str  # coordinator, rollout, learner or reward
    node_id: str
    host: str  # the address bound, and told to the fleet
    port: int  # gRPC; 0: a free one
    http_port: int  # REST, health and metrics; 0: a free one
    coordinator: str  # host:port of the FleetService; empty: on its own
    redis_url: str
    log_level: str


def add_service_flags(parser: argparse.ArgumentParser, role: str) -> None:
    """Adds the flags that all services share."""
    env = os.environ
    parser.add_argument("--node-id", default="", help="unique name in the fleet; default: made up")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
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
        help="Redis or Valkey URL; prefer env HEADWAY_REDIS_URL when it holds a password",
    )
    parser.add_argument("--log-level", default=env.get("HEADWAY_LOG_LEVEL", "info"))
    parser.set_defaults(role=role)


def service_settings(namespace: argparse.Namespace) -> ServiceSettings:
    """Settings from parsed flags. InvalidSpec when a bind would be open to the network."""
    if not is_loopback(namespace.host):
        raise InvalidSpec(
            f"--host {namespace.host} is not a loopback address: services without a token listen"
            " on 127.0.0.1 only"
        )
    role = namespace.role
    return ServiceSettings(
        role=role,
        node_id=namespace.node_id or f"{role}-{socket.gethostname()}-{secrets.token_hex(3)}",
        host=namespace.host,
        port=namespace.port,
        http_port=namespace.http_port,
        coordinator=getattr(namespace, "coordinator", ""),
        redis_url=namespace.redis,
        log_level=namespace.log_level,
    )


def is_loopback(host: str) -> bool:
    """True for `localhost` and addresses of the loopback range."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def parse_cores(text: str) -> tuple[int, ...]:
    """CPU cores from `0,2-3`. InvalidSpec when malformed."""
    cores: set[int] = set()
    try:
        for part in filter(None, text.split(",")):
            first, _, last = part.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
    except ValueError:
        raise InvalidSpec(f"cores {text!r} are not of the form 0,2-3") from None
    return tuple(sorted(cores))


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"port {port} is not in 0..65535")
    return port
