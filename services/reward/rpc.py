"""The gRPC door: RewardService."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from headway.codec import score_to_pb
from headway.pb import reward_pb2, reward_pb2_grpc
from services.reward.scoring import Request, Scorer
from services.reward.waiting import WireItem

SERVICE = "headway.v1.RewardService"


class RewardServicer(reward_pb2_grpc.RewardServiceServicer):
    """Answers Score."""

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


def _wire_item(item: reward_pb2.ScoreItem) -> WireItem:
    num_tokens = item.num_tokens if item.HasField("num_tokens") else None
    return WireItem(item.prompt_json, item.completion, item.item_json, item.group, num_tokens)


def register(scorer: Scorer, server: grpc.aio.Server) -> Sequence[str]:
    """Adds the servicer; returns its full name."""
    reward_pb2_grpc.add_RewardServiceServicer_to_server(RewardServicer(scorer), server)
    return [SERVICE]
