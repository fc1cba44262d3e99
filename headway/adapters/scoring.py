"""Scores for harnesses that wait for them: one blocking call to a reward service.

Over HTTP, where `headway.reward_blocking` has gRPC: harnesses fork, which gRPC does not survive.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import httpx

from headway.adapters.own_service import OwnService
from headway.errors import HeadwayError, InvalidSpec, Unavailable
from headway.graders import parse_grader_json
from headway.messages import Score, ScoreItem
from headway.rest import client_options
from headway.reward_blocking import requests_of

SERVICE_VARIABLE = "HEADWAY_REWARD"
_ITEM_TIMEOUT_S = 10.0  # the service's own where a grader names none
_SLACK_S = 60.0
_PATIENCE_S = 60.0  # for a service that is full or away
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_LATER = frozenset({429, 502, 503, 504})


class Grading:
    """One grader at one reward service. It can be copied and pickled; links are made when used."""

    def __init__(self, grader: Mapping[str, Any] | str, address: str | None = None) -> None:
        """`grader`: as docs/graders.md has it, a mapping or its JSON.

        `address`: `http://host:port`, shown the token of HEADWAY_TOKEN or HEADWAY_TOKEN_FILE. None:
        HEADWAY_REWARD, and when that is empty a service of this process's own. InvalidSpec for a
        faulty grader or address.
        """
        text = grader if isinstance(grader, str) else json.dumps(dict(grader))
        self._spec = parse_grader_json(text)
        self.grader: dict[str, Any] = json.loads(text)
        given = address or os.environ.get(SERVICE_VARIABLE, "")
        if given and not given.startswith(("http://", "https://")):
            raise InvalidSpec(f"{given[:120]!r} is no reward service: write http://host:port")
        self.address = given.rstrip("/")

    def score(self, items: Sequence[ScoreItem]) -> list[Score]:
        """One score an item, in order; one that could not be scored has reward None and a kind.

        InvalidSpec: the service refuses the grader. Unavailable: no service answered for so long.
        """
        found: dict[int, Score] = {}
        for positions in requests_of(items):
            scores = self._call([items[position] for position in positions])
            found.update(zip(positions, scores, strict=True))
        return [found[position] for position in range(len(items))]

    def _call(self, items: Sequence[ScoreItem]) -> list[Score]:
        rows = [_row(item) for item in items]
        body = {"grader": self.grader, "items": rows, "request_id": secrets.token_hex(12)}
        text = json.dumps(body, default=str).encode("utf-8", "replace")
        limit_s = (self._spec.timeout_s or _ITEM_TIMEOUT_S) * (len(items) + 1) + _SLACK_S
        results = _post(self.address, text, limit_s)["results"]
        if len(results) != len(items):
            raise HeadwayError(f"the reward service gave {len(results)} scores for {len(items)}")
        return [Score(**result) for result in results]


def mean_of_scored(rewards: Sequence[float | None]) -> float:
    """The mean of what was scored; NaN when nothing was. A null is left out, never a zero."""
    scored = [r for r in rewards if r is not None and not math.isnan(r)]
    return sum(scored) / len(scored) if scored else math.nan


def null_fraction(rewards: Sequence[float | None]) -> float:
    """The part of them that could not be scored."""
    nulls = sum(r is None or math.isnan(r) for r in rewards)
    return nulls / len(rewards) if rewards else 0.0


def _row(item: ScoreItem) -> dict[str, Any]:
    known = {"group": item.group, "num_tokens": item.num_tokens}
    row = {"completion": item.completion, "item": item.item, "prompt": item.prompt}
    return row | {name: value for name, value in known.items() if value not in ("", None)}


# -- links: one a process and address, so that a fork makes its own

_links: dict[tuple[int, str], tuple[httpx.Client, OwnService | None]] = {}
_lock = threading.Lock()


def _link(address: str) -> httpx.Client:
    key = (os.getpid(), address)
    with _lock:
        client, own = _links.get(key, (None, None))
        if client is not None and (own is None or own.alive):
            return client
        if address:
            client, own = httpx.Client(**client_options(address, None)), None
        else:
            own = OwnService()
            own.ready()
            client = httpx.Client(**client_options(own.address, own.token))
        _links[key] = client, own
        return client


def _post(address: str, body: bytes, limit_s: float) -> Any:
    """The service's answer; asked again, under the same request id, while it is full or away."""
    give_up, pause_s = time.monotonic() + _PATIENCE_S, _FIRST_PAUSE_S
    timeout = httpx.Timeout(limit_s, connect=5.0)
    headers = {"Content-Type": "application/json"}
    while True:
        link, hint_s = _link(address), 0.0
        try:
            answer = link.post("/v1/score", content=body, headers=headers, timeout=timeout)
            if answer.is_success:
                return answer.json()
            if answer.status_code not in _LATER or time.monotonic() > give_up:
                _refused(answer)
            hint = answer.headers.get("retry-after", "")
            hint_s = min(float(hint), _LONGEST_PAUSE_S) if hint.isdecimal() else 0.0
        except httpx.HTTPError as error:
            if time.monotonic() > give_up:
                where = address or "the reward service of this process"
                raise Unavailable(f"{where}: {error or type(error).__name__}") from None
        time.sleep(hint_s or pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _refused(answer: httpx.Response) -> NoReturn:
    try:
        message = str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = answer.text[:200]
    kind = InvalidSpec if answer.status_code == InvalidSpec.http_status else Unavailable
    raise kind(f"the reward service answers {answer.status_code}: {message}")
