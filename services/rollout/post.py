"""The job that a rollout node serves, and how far it is with it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Literal

from headway.errors import Conflict, EpochBroken
from headway.messages import EpochInvite
from headway.pb import fleet_pb2
from headway.reward_client import RewardClient
from services.rollout.engine import Engine
from services.rollout.worker import JobRunner

Phase = Literal["starting", "running", "failed", "cancelled"]


@dataclass(slots=True)
class Post:
    """The job that the node serves, and how far it is."""

    assignment: fleet_pb2.Assignment
    scores: RewardClient
    phase: Phase = "starting"
    detail: str = "starting the engine"
    error_kind: str = ""
    engine: Engine | None = None
    runner: JobRunner | None = None
    task: asyncio.Task[None] | None = None
    invite: EpochInvite | None = None  # its seat in the weight group
    began_at: float = field(default_factory=lambda: asyncio.get_running_loop().time())

    @property
    def job_id(self) -> str:
        """Of the assignment."""
        return str(self.assignment.job_id)


def same_work(post: Post, wanted: fleet_pb2.Assignment | None) -> bool:
    """Whether a post goes on. One that failed is tried again with the job's next attempt."""
    if wanted is None or wanted.job_id != post.job_id:
        return False
    return post.phase != "failed" or wanted.attempt == post.assignment.attempt


def check_seat(post: Post, epoch: int) -> None:
    """EpochBroken: no seat in that epoch yet; Conflict: a later one was joined."""
    joined = post.invite.epoch if post.invite is not None else None
    if joined is None or epoch > joined:
        raise EpochBroken(f"this node has no seat in epoch {epoch}; invite it first")
    if epoch < joined:
        raise Conflict(f"epoch {epoch} is past: this node is in epoch {joined}")
