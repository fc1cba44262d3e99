"""Errors as OpenAI's clients know them, for the paths of this door."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from headway.errors import HeadwayError, InvalidSpec, NotFound, sayable
from headway.telemetry import get_logger
from headway.web import fault_of

log = get_logger(__name__)
_RETRY_AFTER_S = 1.0


class Gone(HeadwayError):
    """Whoever asked does not wait for the answer any more."""

    kind = "gone"
    http_status = 499


def status_of(error: HeadwayError) -> int:
    """The HTTP status; a faulty request is 400, as OpenAI has it."""
    return int(HTTPStatus.BAD_REQUEST) if isinstance(error, InvalidSpec) else error.http_status


def body_of(error: HeadwayError) -> dict[str, Any]:
    """OpenAI's shape; `code` is the error's kind."""
    status = status_of(error)
    kind = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    code = "model_not_found" if isinstance(error, NotFound) else error.kind
    return {"error": {"message": sayable(str(error)), "type": kind, "param": None, "code": code}}


def event_of(error: HeadwayError) -> str:
    """The server-sent event that ends a stream with an error."""
    return f"data: {json.dumps(body_of(error))}\n\n"


def answer_of(error: HeadwayError) -> JSONResponse:
    """The whole answer."""
    after_s = math.ceil(error.retry_after_s or _RETRY_AFTER_S)
    headers = {"Retry-After": str(after_s)} if error.retryable else {}
    return JSONResponse(body_of(error), status_of(error), headers)


class OpenAIRoute(APIRoute):
    """A route whose errors have OpenAI's shape."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, and what becomes of what it raises."""
        handler = super().get_route_handler()

        async def answered(request: Request) -> Response:
            try:
                return await handler(request)
            except RequestValidationError as error:
                return answer_of(InvalidSpec("; ".join(map(fault_of, error.errors()))))
            except HTTPException as error:  # such as a body that is too long
                fault = InvalidSpec(str(error.detail))
                status = error.status_code
                return JSONResponse(body_of(fault), status, error.headers)
            except HeadwayError as error:
                return answer_of(error)
            except Exception as error:
                log.exception("a request from outside failed")
                return answer_of(HeadwayError(f"{type(error).__name__}: see the node's log"))

        return answered
