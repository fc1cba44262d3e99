"""The door's three paths: body -> asks -> visit -> answer, whole or as a stream."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import ExitStack, aclosing
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Header, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from headway.errors import HeadwayError, NotFound
from headway.lifecycle import end_tasks
from services.rollout.door import answers
from services.rollout.door.answers import Json, Told
from services.rollout.door.asking import Asked, of_chat, of_completion
from services.rollout.door.bodies import ChatBody, CompletionBody, SamplingBody
from services.rollout.door.errors import Gone, OpenAIRoute, event_of
from services.rollout.engine import Piece
from services.rollout.visits import Policy, Visit, Visits

VERSION_HEADER = "x-headway-weight-version"
_Version = Annotated[
    int | None,
    Header(alias=VERSION_HEADER, ge=0, description="412 unless this version samples all of it"),
]
T = TypeVar("T")


def router(visits: Visits) -> APIRouter:
    """The paths, for the node's app."""
    routes = APIRouter(prefix="/v1", route_class=OpenAIRoute)

    @routes.get("/models", summary="The policy that the node holds")
    async def models() -> Json:
        return {"object": "list", "data": [_card(visits.policy)]}

    @routes.get("/models/{name:path}", summary="The same, by its name")
    async def model(name: str) -> Json:
        policy = visits.policy
        if name not in (policy.name, policy.model):
            raise NotFound(f"there is no model {name[:200]!r} here; there is {policy.name!r}")
        return _card(policy)

    @routes.post("/chat/completions", summary="Answer a conversation")
    async def chat(request: Request, body: ChatBody, version: _Version = None) -> Response:
        return await _answered(_Chat(body), visits, request, version)

    @routes.post("/completions", summary="Complete a text")
    async def completions(
        request: Request, body: CompletionBody, version: _Version = None
    ) -> Response:
        return await _answered(_Text(body), visits, request, version)

    return routes


class _Chat:
    """How a conversation is asked and answered."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def __init__(self, body: ChatBody) -> None:
        self.body: SamplingBody = body
        self._chat = body

    async def asked(self, policy: Policy) -> Asked:
        return await of_chat(self._chat, policy.engine)

    def choice(self, index: int, told: Told, asked: Asked) -> Json:
        return answers.chat_choice(index, told, logprobs=self._chat.logprobs)

    def opening(self, index: int) -> list[Json]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def chunk(self, index: int, piece: Piece, before: Told, asked: Asked) -> Json:
        return answers.chat_delta(index, piece, logprobs=self._chat.logprobs)


class _Text:
    """How a text is completed; with `echo` it stands before its completion."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl-"

    def __init__(self, body: CompletionBody) -> None:
        self.body: SamplingBody = body
        self._text = body

    async def asked(self, policy: Policy) -> Asked:
        return await of_completion(self._text, policy.engine)

    def choice(self, index: int, told: Told, asked: Asked) -> Json:
        return self._choice(index, told, "", asked, first=True)

    def opening(self, index: int) -> list[Json]:
        return []

    def chunk(self, index: int, piece: Piece, before: Told, asked: Asked) -> Json:
        return self._choice(index, piece, before.text, asked, first=before.num_tokens == 0)

    def _choice(
        self, index: int, part: Told | Piece, before: str, asked: Asked, *, first: bool
    ) -> Json:
        """`before`: the completion's text that was told; `first`: the prompt was not."""
        which = index // self._text.n
        prompt = asked.prompts[which] if self._text.echo else ""
        new = self._text.max_tokens > 0
        text = (prompt if first else "") + (part.text if new else "")
        seen = [*asked.with_head(which, part.prompt), *(part.tokens if new else ())]
        logprobs = None
        if self._text.logprobs is not None:
            logprobs = answers.text_logprobs(seen, 0 if first else len(prompt) + len(before))
        return answers.text_choice(index, text, logprobs, part)


_Form = _Chat | _Text


async def _answered(form: _Form, visits: Visits, request: Request, version: int | None) -> Response:
    """The whole answer, or one that is streamed; the visit lasts as long as it does."""
    inside = ExitStack()
    visit = inside.enter_context(visits.enter(form.body.model, version))
    with inside:
        asked = await form.asked(visit.policy)
        if not form.body.stream:
            told = await _while_connected(request, lambda: _collected(visit, asked, version))
            return _whole(form, visit.policy, asked, told)
        stay = inside.pop_all()
    head = {VERSION_HEADER: str(visit.policy.version), "Cache-Control": "no-cache"}
    return _Stream(_streamed(form, visit, asked, version), stay, head)


class _Stream(StreamingResponse):
    """Server-sent events; however they end, so does the visit."""

    def __init__(self, events: AsyncGenerator[str], stay: ExitStack, head: dict[str, str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers=head)
        self._events, self._stay = events, stay

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._stay:
            try:
                await super().__call__(scope, receive, send)
            finally:
                await self._events.aclose()


async def _collected(visit: Visit, asked: Asked, version: int | None) -> list[Told]:
    told = [Told() for _ in asked.asks]
    async with aclosing(visit.pieces(asked.asks, version)) as pieces:
        async for index, piece in pieces:
            told[index].add(piece)
    return told


def _whole(form: _Form, policy: Policy, asked: Asked, told: Sequence[Told]) -> Response:
    choices = [form.choice(index, one, asked) for index, one in enumerate(told)]
    answer = answers.envelope(form.kind, _new_id(form), int(time.time()), policy.name, choices)
    newest = answers.newest(one.spans for one in told)
    answer["usage"] = answers.usage(asked.num_prompt_tokens, sum(one.num_tokens for one in told))
    answer["weight_version"] = newest
    return JSONResponse(answer, headers={VERSION_HEADER: str(newest)})


async def _streamed(
    form: _Form, visit: Visit, asked: Asked, version: int | None
) -> AsyncGenerator[str]:
    answer_id, created, name = _new_id(form), int(time.time()), visit.policy.name
    told = [Told() for _ in asked.asks]

    def event(choices: list[Json], **more: Any) -> str:
        chunk = answers.envelope(form.chunk_kind, answer_id, created, name, choices)
        return f"data: {json.dumps(chunk | more)}\n\n"

    for index in range(len(asked.asks)):
        if opening := form.opening(index):
            yield event(opening)
    try:
        async with aclosing(visit.pieces(asked.asks, version)) as pieces:
            async for index, piece in pieces:
                chunk = form.chunk(index, piece, told[index], asked)
                told[index].add(piece)
                sampled_by = answers.newest([piece.spans])
                yield event(
                    [chunk], **({} if sampled_by is None else {"weight_version": sampled_by})
                )
    except HeadwayError as error:
        yield event_of(error)
        return
    if form.body.wants_usage:
        spent = answers.usage(asked.num_prompt_tokens, sum(one.num_tokens for one in told))
        yield event([], usage=spent)
    yield "data: [DONE]\n\n"


async def _while_connected(request: Request, work: Callable[[], Awaitable[T]]) -> T:
    """The work's result; its end, when whoever asked has hung up."""
    working = asyncio.ensure_future(work())
    hung_up = asyncio.ensure_future(_hang_up(request))
    try:
        await asyncio.wait({working, hung_up}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Gone("whoever asked has hung up")
        return working.result()
    finally:
        await end_tasks([working, hung_up])


async def _hang_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _new_id(form: _Form) -> str:
    return form.prefix + secrets.token_hex(12)


def _card(policy: Policy) -> Json:
    """OpenAI's model card, and what is known of the policy."""
    return {
        "id": policy.name,
        "object": "model",
        "created": int(policy.since),
        "owned_by": "headway",
        "root": policy.model,
        "max_model_len": policy.engine.context_tokens,
        "weight_version": policy.version,
    }
