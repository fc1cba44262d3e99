"""The gRPC door: RewardService."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import grpc

from headway.codec import score_to_pb
from headway.errors import InvalidSpec, sayable
from headway.pb import reward_pb2, reward_pb2_grpc
from services.reward.checking import grader_types
from services.reward.request import Request
from services.reward.scoring import Scorer
from services.reward.waiting import WireItem

SERVICE = "headway.v1.RewardService"


class RewardServicer(reward_pb2_grpc.RewardServiceServicer):
    """Answers Score, Validate and ListGraders."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer

    async def Score(
        self, request: reward_pb2.ScoreRequest, context: grpc.aio.ServicerContext
    ) -> reward_pb2.ScoreResponse:
        """Scores a batch; errors as in headway/errors.py."""
        items = [_wire_item(item) for item in request.items]
        scores = await self._scorer.score(
            Request(request.request_id, request.job_id, request.grader_json, items),
            context.time_remaining(),
        )
        return reward_pb2.ScoreResponse(results=[score_to_pb(score) for score in scores])

    async def Validate(
        self, request: reward_pb2.ValidateRequest, context: grpc.aio.ServicerContext
    ) -> reward_pb2.ValidateResponse:
        """The grader with its defaults, or its faults; InvalidSpec for an item that is none."""
        verdict = self._scorer.validate(request.grader_json, _item_of(request.item_json))
        return reward_pb2.ValidateResponse(
            grader_json="" if verdict.grader is None else json.dumps(verdict.grader),
            faults=[
                reward_pb2.GraderFault(path=sayable(fault.path), message=sayable(fault.message))
                for fault in verdict.faults
            ],
        )

    async def ListGraders(
        self, request: reward_pb2.ListGradersRequest, context: grpc.aio.ServicerContext
    ) -> reward_pb2.ListGradersResponse:
        """Every type with its schema."""
        return reward_pb2.ListGradersResponse(
            graders=[
                reward_pb2.GraderType(type=t.type, description=t.description,
                                      schema_json=json.dumps(t.schema))
                for t in grader_types()
            ]
        )  # fmt: skip


def _item_of(item_json: str) -> Mapping[str, Any] | None:
    if not item_json:
        return None
    try:
        item = json.loads(item_json)
    except (ValueError, RecursionError) as error:
        raise InvalidSpec(f"item_json is not JSON: {error}") from None
    if not isinstance(item, dict):
        raise InvalidSpec(f"item_json is {type(item).__name__}, not a JSON object")
    return item


def _wire_item(item: reward_pb2.ScoreItem) -> WireItem:
    num_tokens = item.num_tokens if item.HasField("num_tokens") else None
    return WireItem(item.prompt_json, item.completion, item.item_json, item.group, num_tokens)


def register(scorer: Scorer, server: grpc.aio.Server) -> Sequence[str]:
    """Adds the servicer; returns its full name."""
    reward_pb2_grpc.add_RewardServiceServicer_to_server(RewardServicer(scorer), server)
    return [SERVICE]
