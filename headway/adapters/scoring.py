"""Scores for harnesses that wait for them: one blocking call to a reward service."""

from __future__ import annotations

import json
import math
import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import httpx

from headway.adapters.own_service import OwnService
from headway.errors import HeadwayError, InvalidSpec, Unavailable
from headway.graders import parse_grader_json
from headway.messages import Score
from headway.rest import client_options

SERVICE_VARIABLE = "HEADWAY_REWARD"
_ITEMS_A_CALL = 512
_ITEM_TIMEOUT_S = 10.0  # the service's own where a grader names none
_SLACK_S = 60.0
_PATIENCE_S = 60.0  # for a service that is full or away
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_LATER = frozenset({429, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion to score. `group`: the same for all completions of one prompt."""

    completion: str
    item: Mapping[str, Any] = field(default_factory=dict)
    prompt: Any = None
    group: str = ""


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

    def score(self, answers: Sequence[Answer]) -> list[Score]:
        """One score an answer, in order; one that could not be scored has reward None and a kind.

        InvalidSpec: the service refuses the grader. Unavailable: no service answered for so long.
        """
        scores: list[Score] = []
        for part in _parts(answers):
            scores += self._call(part)
        return scores

    def _call(self, answers: Sequence[Answer]) -> list[Score]:
        items = [_item(answer) for answer in answers]
        body = {"grader": self.grader, "items": items, "request_id": secrets.token_hex(12)}
        text = json.dumps(body, default=str).encode("utf-8", "replace")
        limit_s = (self._spec.timeout_s or _ITEM_TIMEOUT_S) * (len(items) + 1) + _SLACK_S
        rows = _post(self.address, text, limit_s)["results"]
        if len(rows) != len(items):
            raise HeadwayError(f"the reward service gave {len(rows)} scores for {len(items)}")
        return [Score(**row) for row in rows]


def mean_of_scored(rewards: Sequence[float | None]) -> float:
    """The mean of what was scored; NaN when nothing was. A null is left out, never a zero."""
    scored = [r for r in rewards if r is not None and not math.isnan(r)]
    return sum(scored) / len(scored) if scored else math.nan


def null_fraction(rewards: Sequence[float | None]) -> float:
    """The part of them that could not be scored."""
    nulls = sum(r is None or math.isnan(r) for r in rewards)
    return nulls / len(rewards) if rewards else 0.0


def _item(answer: Answer) -> dict[str, Any]:
    row = {"completion": answer.completion, "item": answer.item, "prompt": answer.prompt}
    return row | ({"group": answer.group} if answer.group else {})


def _parts(answers: Sequence[Answer]) -> Iterator[Sequence[Answer]]:
    """Pieces of about `_ITEMS_A_CALL`; a group that stands together stays together."""
    first = 0
    while first < len(answers):
        last = first + _ITEMS_A_CALL
        while 0 < last < len(answers) and answers[last].group and (
            answers[last].group == answers[last - 1].group
        ):  # fmt: skip
            last += 1
        yield answers[first:last]
        first = last


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
        link = _link(address)
        try:
            answer = link.post("/v1/score", content=body, headers=headers, timeout=timeout)
            if answer.is_success:
                return answer.json()
            if answer.status_code not in _LATER or time.monotonic() > give_up:
                _refused(answer)
        except httpx.HTTPError as error:
            if time.monotonic() > give_up:
                where = address or "the reward service of this process"
                raise Unavailable(f"{where}: {error or type(error).__name__}") from None
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _refused(answer: httpx.Response) -> NoReturn:
    try:
        message = str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = answer.text[:200]
    kind = InvalidSpec if answer.status_code == InvalidSpec.http_status else Unavailable
    raise kind(f"the reward service answers {answer.status_code}: {message}")
