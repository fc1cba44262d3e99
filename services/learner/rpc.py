"""gRPC LearnerService: what the agent is doing."""

from __future__ import annotations

import grpc

from headway.pb import learner_pb2, learner_pb2_grpc
from services.learner.agent import LearnerAgent

SERVICE_NAME = learner_pb2.DESCRIPTOR.services_by_name["LearnerService"].full_name


class LearnerServicer(learner_pb2_grpc.LearnerServiceServicer):
    """Answers from the agent's present state."""

    def __init__(self, agent: LearnerAgent, node_id: str) -> None:
        self._agent = agent
        self._node_id = node_id

    async def GetLearnerStatus(
        self,
        request: learner_pb2.GetLearnerStatusRequest,
        context: grpc.aio.ServicerContext,
    ) -> learner_pb2.GetLearnerStatusResponse:
        """The job under way, its phase, steps and process ids."""
        work = self._agent.current
        if work is None:
            return learner_pb2.GetLearnerStatusResponse(node_id=self._node_id)
        return learner_pb2.GetLearnerStatusResponse(
            node_id=self._node_id,
            job_id=work.job_id,
            phase=work.status.phase,
            step=work.status.step,
            rank_pids=work.ranks.pids if work.ranks is not None else [],
        )
