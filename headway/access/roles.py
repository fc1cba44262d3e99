"""The roles a token can have, and which door each opens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, get_args

Role = Literal["admin", "user", "viewer", "service"]
ROLES: Final[tuple[Role, ...]] = get_args(Role)
Roles = frozenset[Role]

ANY_ROLE: Final[Roles] = frozenset(ROLES)
_FLEET: Final[Roles] = frozenset({"service", "admin"})
_READERS: Final[Roles] = frozenset({"viewer", "user", "admin"})
_SUBMITTERS: Final[Roles] = frozenset({"user", "admin"})
_SCORERS: Final[Roles] = frozenset({"service", "user", "admin"})
_SAMPLE_PATHS: Final = frozenset({"/v1/chat/completions", "/v1/completions"})

OPEN_PATHS: Final = frozenset({"/healthz", "/readyz", "/openapi.json", "/docs"})
"""HTTP that is answered without a token: probes, and the description of the API."""

OPEN_SERVICES: Final = frozenset({"grpc.health.v1.Health"})

_SCORING_PATHS: Final = frozenset({"/v1/score", "/v1/validate", "/v1/graders"})

_GRPC: Final[Mapping[str, Roles]] = {
    "headway.v1.FleetService": _FLEET,
    "headway.v1.RolloutService": _FLEET,
    "headway.v1.LearnerService": _FLEET,
    "headway.v1.RewardService": _SCORERS,
    "grpc.reflection.v1alpha.ServerReflection": ANY_ROLE,
}


def http_roles(method: str, path: str) -> Roles | None:
    """Who may send this request; None: anybody."""
    if path in OPEN_PATHS:
        return None
    if path in _SCORING_PATHS or path in _SAMPLE_PATHS:
        return _SCORERS
    return _READERS if method in ("GET", "HEAD", "OPTIONS") else _SUBMITTERS


def grpc_roles(method: str) -> Roles | None:
    """Who may make this call (`/package.Service/Method`); None: anybody.

    A service that is not in the table is for the fleet itself.
    """
    service = method.strip("/").partition("/")[0]
    return None if service in OPEN_SERVICES else _GRPC.get(service, _FLEET)
