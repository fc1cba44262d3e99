"""Ports and addresses of this machine."""

from __future__ import annotations

import ipaddress
import socket

from headway.errors import InvalidSpec

_MAX_HOST = 253


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on right now; somebody may before it is used."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def is_loopback(host: str) -> bool:
    """True for `localhost` and addresses of the loopback range."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_wildcard(host: str) -> bool:
    """True for the addresses that stand for all of a machine's, such as 0.0.0.0."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def with_port(host: str, port: int) -> str:
    """`host:port`; an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def checked_address(address: str) -> str:
    """The address, if it is `host:port` and nothing else. InvalidSpec otherwise.

    gRPC would also follow `unix:/path` and other schemes, wherever they lead.
    """
    host, colon, port = address.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    numbered = port.isascii() and port.isdigit() and len(port) < 6 and 0 < int(port) < 65536
    if not (colon and numbered and is_host(host)):
        raise InvalidSpec(f"{address[:120]!r} is no address of the form host:port")
    return address


def is_host(host: str) -> bool:
    """True for an IP address and for what could be a host's name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        labels = host.split(".")
        return len(host) <= _MAX_HOST and all(
            0 < len(label) < 64
            and label.isascii()
            and label.replace("-", "").replace("_", "").isalnum()
            for label in labels
        )
    return True


def address_towards(host: str, port: int) -> str:
    """This machine's own address on the way to another; sends nothing. OSError: no such host."""
    family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])
