"""The two doors of a reward service as one interface: what goes for one goes for the other."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager

import grpc
import httpx

from headway.pb import reward_pb2, reward_pb2_grpc
from headway.rpc import channel


class Refused(Exception):
    """An error answer: its status, kind, message, and the seconds after which to ask again."""

    def __init__(self, status, kind, message, retry_after_s):
        super().__init__(f"{kind}: {message}")
        self.status, self.kind, self.message = status, kind, message
        self.retry_after_s = retry_after_s


class GrpcDoor:
    def __init__(self, link):
        self._stub = reward_pb2_grpc.RewardServiceStub(link)

    async def score(self, grader, items, request_id="", job_id=""):
        request = reward_pb2.ScoreRequest(
            request_id=request_id, job_id=job_id, grader_json=json.dumps(grader)
        )
        for item in items:
            request.items.add(
                completion=item["completion"],
                prompt_json=json.dumps(item.get("prompt")),
                item_json=json.dumps(item.get("item", {})),
                group=item.get("group", ""),
                num_tokens=item.get("num_tokens"),
            )
        answer = await self._call(self._stub.Score, request)
        return [
            {
                "reward": result.reward if result.HasField("reward") else None,
                "parts": dict(result.parts),
                "error_kind": result.error_kind,
                "error_message": result.error_message,
            }
            for result in answer.results
        ]

    async def validate(self, grader, item=None):
        request = reward_pb2.ValidateRequest(grader_json=json.dumps(grader))
        if item is not None:
            request.item_json = json.dumps(item)
        answer = await self._call(self._stub.Validate, request)
        resolved = json.loads(answer.grader_json) if answer.grader_json else None
        return resolved, [(fault.path, fault.message) for fault in answer.faults]

    async def graders(self):
        answer = await self._call(self._stub.ListGraders, reward_pb2.ListGradersRequest())
        return {g.type: (g.description, json.loads(g.schema_json)) for g in answer.graders}

    async def _call(self, method, request):
        try:
            return await method(request, timeout=60)
        except grpc.aio.AioRpcError as error:
            facts = dict(error.trailing_metadata() or ())
            after = facts.get("retry-after-ms")
            raise Refused(
                error.code().name, facts.get("headway-kind"), error.details(),
                None if after is None else int(after) / 1000,
            ) from None  # fmt: skip


class RestDoor:
    def __init__(self, http):
        self._http = http

    async def score(self, grader, items, request_id="", job_id=""):
        body = {"grader": grader, "items": items, "request_id": request_id, "job_id": job_id}
        answer = await self._call("POST", "/v1/score", body)
        return [{k: v for k, v in r.items() if k != "duration_s"} for r in answer["results"]]

    async def validate(self, grader, item=None):
        body = {"grader": grader} | ({} if item is None else {"item": item})
        answer = await self._call("POST", "/v1/validate", body)
        return answer["grader"], [(fault["path"], fault["message"]) for fault in answer["faults"]]

    async def graders(self):
        answer = await self._call("GET", "/v1/graders")
        return {g["type"]: (g["description"], g["schema"]) for g in answer["graders"]}

    async def _call(self, method, path, body=None):
        # httpx's own JSON has no NaN and no surrogates
        content = None if body is None else json.dumps(body)
        head = {"content-type": "application/json"}
        answer = await self._http.request(method, path, content=content, headers=head, timeout=60)
        if answer.is_error:
            error, after = answer.json()["error"], answer.headers.get("retry-after")
            raise Refused(
                answer.status_code, error["kind"], error["message"], after and float(after)
            )
        return answer.json()


@asynccontextmanager
async def both_doors(server):
    """(gRPC, REST) of one service."""
    async with (
        channel(server.address) as link,
        httpx.AsyncClient(base_url=server.http_address) as http,
    ):
        yield GrpcDoor(link), RestDoor(http)
