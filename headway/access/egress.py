"""Requests to URLs that a job names: to public addresses only, wherever a name leads.

A job must not reach what is inside of the fleet's network, a cloud's metadata service above
all. A host is resolved once, every address it has is checked, and the connection goes to a
checked address: a name that changes its mind in between wins nothing. Redirects pass the
same check.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Collection
from typing import Any

import httpx

from headway.errors import InvalidSpec, Unavailable

SCHEMES = ("https", "http")
Resolve = Callable[..., Collection[Any]]
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def is_public(address: str) -> bool:
    """Whether an IP address is one of the open internet, also behind IPv6's wrappings of IPv4."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
        if ip.is_site_local:
            return False
    return ip.is_global and not ip.is_multicast


def public_address(url: httpx.URL, resolve: Resolve = socket.getaddrinfo) -> str:
    """An address to connect to for this URL.

    InvalidSpec: no http(s), a login in it, or a host of which any address is not public.
    Unavailable: the name is not known.
    """
    if url.scheme not in SCHEMES or not url.host:
        raise InvalidSpec(f"only http and https URLs are fetched, not {str(url)[:120]!r}")
    if url.userinfo:
        raise InvalidSpec(f"a URL with a login is not fetched (host {url.host[:120]!r})")
    port = url.port or (443 if url.scheme == "https" else 80)
    try:
        found = [entry[4][0] for entry in resolve(url.host, port, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError):
        raise Unavailable(f"the host {url.host[:120]!r} is not known") from None
    for address in found:
        if not is_public(address):
            raise InvalidSpec(
                f"the host {url.host[:120]!r} is {address}, which is not on the open internet"
            )
    if not found:
        raise Unavailable(f"the host {url.host[:120]!r} has no address")
    return str(found[0])


class PublicTransport(httpx.AsyncBaseTransport):
    """For `httpx.AsyncClient(transport=PublicTransport())`: every request, redirects included."""

    def __init__(
        self, resolve: Resolve = socket.getaddrinfo, inner: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self._resolve = resolve
        # no proxy of the environment: it would resolve the name again, by itself
        self._inner = inner or httpx.AsyncHTTPTransport(trust_env=False)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Sends a request to the address that was checked, under the name it was meant for."""
        name = request.url.host
        address = await asyncio.to_thread(public_address, request.url, self._resolve)
        pinned = httpx.Request(
            request.method,
            request.url.copy_with(host=address),
            headers=request.headers,  # Host is the name's
            stream=request.stream,
            extensions={**request.extensions, "sni_hostname": name},
        )
        return await self._inner.handle_async_request(pinned)

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._inner.aclose()
