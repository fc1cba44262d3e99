"""One request to one endpoint, and what came of it. Nothing is tried twice here.

Redirects are not followed, an answer is read up to a limit, all of a request has one time
limit, and what is said of a failure never holds a key.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import ssl
import time
from dataclasses import dataclass
from http.cookiejar import DefaultCookiePolicy
from typing import Any

import httpx

from headway.access.egress import PublicTransport
from headway.errors import InvalidSpec, Unavailable
from services.reward.outside.endpoints import Endpoint

MAX_RESPONSE_BYTES = 4 << 20
_MAX_SAID = 200
_RETRIED_STATUS = frozenset({408, 409, 425, 429})


class Failed(Exception):
    """A request that came to nothing.

    `kind`: unavailable, refused or unparsable; `again`: whether to try once more; `after_s`:
    what the endpoint asked to wait; `label`: for metrics.
    """

    def __init__(
        self, message: str, label: str, *, kind: str = "unavailable", again: bool = True,
        after_s: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.kind, self.label, self.again, self.after_s = kind, label, again, after_s


@dataclass(frozen=True, slots=True)
class Target:
    """Where a grader's requests go."""

    endpoint: Endpoint
    url: str
    timeout_s: float  # of one request, its last byte included


class Door:
    """The HTTP clients, one for each endpoint, made when first needed."""

    def __init__(self) -> None:
        self._clients: dict[Any, httpx.AsyncClient] = {}

    async def post(self, target: Target, body: Any) -> Any:
        """The answer's JSON. Failed for anything else."""
        try:
            async with asyncio.timeout(target.timeout_s):
                return await self._post(target, body)
        except (TimeoutError, httpx.TimeoutException):
            raise Failed(f"no answer within {target.timeout_s:g} s", "timeout") from None
        except Unavailable as error:
            raise Failed(str(error), "connect") from None
        except InvalidSpec as error:
            raise Failed(str(error), "refused", kind="refused", again=False) from None
        except httpx.RequestError as error:
            if _is_certificate(error):
                message = f"its certificate is not trusted: {_inmost(error)}"
                raise Failed(message, "tls", kind="refused", again=False) from None
            raise Failed(f"{type(error).__name__}: {error}"[:_MAX_SAID], "connect") from None

    async def close(self) -> None:
        """Closes all connections."""
        clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            await client.aclose()

    async def _post(self, target: Target, body: Any) -> Any:
        endpoint = target.endpoint
        headers = {"content-type": "application/json", "accept": "application/json"}
        request = self._client(endpoint).stream(
            "POST", target.url, content=json.dumps(body).encode(),
            headers={**headers, "accept-encoding": "identity", **endpoint.headers()},
        )  # fmt: skip
        async with request as response:
            text = await _read(response)
            if not response.is_success:
                raise _refusal(response, text, endpoint.key)
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise Failed("answered with what is no JSON", "garbage", kind="unparsable") from None

    def _client(self, endpoint: Endpoint) -> httpx.AsyncClient:
        known = (endpoint.name, endpoint.ca_file, endpoint.proxy, endpoint.public_only)
        if known not in self._clients:
            verify = ssl.create_default_context(cafile=endpoint.ca_file)
            self._clients[known] = httpx.AsyncClient(
                transport=PublicTransport() if endpoint.public_only else None,
                verify=verify,
                proxy=endpoint.proxy,
                trust_env=False,  # neither a proxy nor a login of the environment
                follow_redirects=False,
                timeout=None,  # the whole of a request has a limit above
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=32),
            )
            self._clients[known].cookies.jar.set_policy(DefaultCookiePolicy(allowed_domains=[]))
        return self._clients[known]


async def _read(response: httpx.Response) -> bytes:
    if response.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise Failed("answered in an encoding it was not asked for", "garbage", kind="unparsable")
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > MAX_RESPONSE_BYTES:
            message = f"answered with more than {MAX_RESPONSE_BYTES >> 20} MiB"
            raise Failed(message, "garbage", kind="unparsable", again=False)
    return bytes(body)


def _refusal(response: httpx.Response, text: bytes, key: str) -> Failed:
    status = response.status_code
    said = f"answered {status}{_excerpt(status, text, key)}"
    if status in _RETRIED_STATUS or status >= 500:
        return Failed(said, str(status), after_s=_retry_after_s(response.headers))
    if response.is_redirect:
        said = f"answered {status}: redirects are not followed"
    return Failed(said, str(status), kind="refused", again=False)


def _excerpt(status: int, text: bytes, key: str) -> str:
    """What the endpoint said, for people; of a login that failed, nothing: it may quote the key."""
    if status in (401, 403, 407):
        return ""
    said = "".join(c if c.isprintable() else " " for c in text[:4096].decode("utf-8", "replace"))
    if key:
        said = said.replace(key, "***")
    return f": {said.strip()[:_MAX_SAID]}" if said.strip() else ""


def _retry_after_s(headers: httpx.Headers) -> float:
    """Seconds that a Retry-After header asks for; 0 without one, or with nonsense."""
    text = headers.get("retry-after", "").strip()
    if text.isascii() and text.isdecimal():
        return float(text[:9])
    try:
        moment = email.utils.parsedate_to_datetime(text)
        return max(0.0, moment.timestamp() - time.time())
    except (ValueError, TypeError, IndexError, OverflowError):
        return 0.0


def _is_certificate(error: BaseException) -> bool:
    return isinstance(_inmost(error), ssl.SSLCertVerificationError)


def _inmost(error: BaseException) -> BaseException:
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return error
