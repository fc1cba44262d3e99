"""Where graders may ask: the operator's endpoints by name, and the URLs that the operator allows.

A job names an endpoint or a URL and never a key. Keys come from the environment or from files.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from headway.access.secrets import read_secret
from headway.errors import Fault, InvalidSpec
from headway.suggestions import near
from headway.yamls import load_yaml

PUBLIC = "public"  # as an allowed URL: whatever is on the open internet
_MAX_FILE_BYTES = 1 << 20
_URL_CONCURRENCY = 8


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One place that answers."""

    name: str  # for people and metrics
    base_url: str
    key: str = field(default="", repr=False)
    key_header: str = "Authorization"  # with Authorization, the key is a bearer's
    model: str | None = None
    max_concurrent: int = 16
    ca_file: str | None = None
    proxy: str | None = field(default=None, repr=False)
    public_only: bool = False  # reached through `headway.access.egress`

    @property
    def desk(self) -> str:
        """Who shares slots and failures with it: of the open internet, its own host alone."""
        return f"{self.name}, {_origin(self.base_url)}" if self.public_only else self.name

    def headers(self) -> dict[str, str]:
        """The headers that hold the key."""
        if not self.key:
            return {}
        bearer = self.key_header.casefold() == "authorization"
        return {self.key_header: f"Bearer {self.key}" if bearer else self.key}


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    base_url: str
    key_env: str | None = None
    key_file: str | None = None
    key_header: str = Field(default="Authorization", pattern=r"^[A-Za-z0-9-]{1,64}$")
    model: str | None = None
    max_concurrent: int = Field(default=16, ge=1, le=4096)
    ca_file: str | None = None
    proxy_env: str | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        _checked_url(self.base_url)
        if self.key_env and self.key_file:
            raise ValueError("give either key_env or key_file")
        return self


@dataclass(frozen=True, slots=True)
class Endpoints:
    """All that graders may ask."""

    named: Mapping[str, Endpoint] = field(default_factory=dict)
    allowed_urls: tuple[str, ...] = ()  # prefixes; PUBLIC

    def find(self, spec: Mapping[str, Any], path: str) -> Endpoint:
        """Where a grader (plain data) asks. InvalidSpec, said of `path`, when it may not."""
        if spec["url"] is not None:
            return self._by_url(spec["url"], f"{path}.url")
        name = spec["endpoint"]
        if name not in self.named:
            known = ", ".join(self.named) or "none"
            raise _fault(
                f"{path}.endpoint",
                f"this service has no endpoint {name!r}{near(name, self.named)} (there are:"
                f" {known}; see --endpoints)",
            )
        return self.named[name]

    def _by_url(self, text: str, path: str) -> Endpoint:
        try:
            url = _checked_url(text)
        except ValueError as error:
            raise _fault(path, str(error)) from None
        for allowed in self.allowed_urls:
            if allowed != PUBLIC and _below(url, httpx.URL(allowed)):
                return Endpoint(allowed, text, max_concurrent=_URL_CONCURRENCY)
        if PUBLIC in self.allowed_urls:
            return Endpoint(PUBLIC, text, max_concurrent=_URL_CONCURRENCY, public_only=True)
        raise _fault(
            path,
            "this service does not ask URLs of that host and path: its operator allows them with"
            " --allow-url, or names an endpoint",
        )


def _fault(path: str, message: str) -> InvalidSpec:
    return InvalidSpec(faults=[Fault(path, f"{path}: {message}")])


def load_endpoints(
    file: str, allowed_urls: Sequence[str], env: Mapping[str, str] = os.environ
) -> Endpoints:
    """The settings of a file (YAML: name -> base_url, key_env, …) and the allowed URLs.

    InvalidSpec names what is wrong, and never a key.
    """
    for allowed in allowed_urls:
        if allowed != PUBLIC:
            try:
                _checked_url(allowed)
            except ValueError as error:
                raise InvalidSpec(f"--allow-url: {error}") from None
    named = {}
    for name, raw in (_read(Path(file)) if file else {}).items():
        where = f"--endpoints {file}: {name}"
        try:
            settings = _Settings.model_validate(raw)
        except ValidationError as error:
            faults = "; ".join(
                ".".join(map(str, fault["loc"])) + f" {fault['msg'].removeprefix('Value error, ')}"
                for fault in error.errors()
            )
            raise InvalidSpec(f"{where}: {faults}") from None
        named[name] = _endpoint(name, settings, where, env)
    return Endpoints(named, tuple(allowed_urls))


def _endpoint(name: str, settings: _Settings, where: str, env: Mapping[str, str]) -> Endpoint:
    key = ""
    if settings.key_env:
        key = _from_env(settings.key_env, where, env)
    if settings.key_file:
        key = read_secret(Path(settings.key_file), f"{where}: key_file")
    if not key.isascii() or not key.isprintable():
        raise InvalidSpec(f"{where}: the key has characters that no header can hold")
    if settings.ca_file is not None and not Path(settings.ca_file).is_file():
        raise InvalidSpec(f"{where}: no file {settings.ca_file}")
    return Endpoint(
        name=name,
        base_url=settings.base_url,
        key=key,
        key_header=settings.key_header,
        model=settings.model,
        max_concurrent=settings.max_concurrent,
        ca_file=settings.ca_file,
        proxy=_from_env(settings.proxy_env, where, env) if settings.proxy_env else None,
    )


def _from_env(name: str, where: str, env: Mapping[str, str]) -> str:
    value = env.get(name, "").strip()
    if not value:
        raise InvalidSpec(f"{where}: the environment has no {name}")
    return value


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open(encoding="utf-8") as source:
            loaded = load_yaml(source.read(_MAX_FILE_BYTES))
    except OSError as error:
        raise InvalidSpec(f"--endpoints {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidSpec(f"--endpoints {path} holds no text") from None
    except InvalidSpec as error:
        raise InvalidSpec(f"--endpoints {path}: {error}") from None
    if not isinstance(loaded, dict) or not all(isinstance(name, str) for name in loaded):
        raise InvalidSpec(f"--endpoints {path}: a mapping of names to settings is expected")
    return loaded


def _checked_url(text: str) -> httpx.URL:
    """The URL; ValueError for one that is not plainly scheme, host, port and path."""
    try:
        url = httpx.URL(text)
    except (httpx.InvalidURL, ValueError):
        raise ValueError("not a URL") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError("not an http or https URL")
    if url.userinfo or url.query or url.fragment or "?" in text or "#" in text:
        raise ValueError("a URL has no login, query or fragment here")
    if "%" in text or "\\" in text or {".", ".."} & set(text.split("/")):
        raise ValueError("a URL's path is written plainly here: no %, \\, . or ..")
    return url


def _below(url: httpx.URL, allowed: httpx.URL) -> bool:
    """Whether it is the allowed URL, or one whose path goes on from it."""
    same = (url.scheme, url.host, _port(url)) == (allowed.scheme, allowed.host, _port(allowed))
    root = allowed.path.rstrip("/")
    return same and (url.path.rstrip("/") == root or url.path.startswith(f"{root}/"))


def _origin(text: str) -> str:
    url = httpx.URL(text)
    return f"{url.scheme}://{url.host}:{_port(url)}"


def _port(url: httpx.URL) -> int:
    return url.port or (443 if url.scheme == "https" else 80)
