"""Fixtures that several integration tests share."""

from tests.support.coordinator import client, coordinator, http, nodes, process, redis
from tests.support.reward_stand import hostile
from tests.support.rollout_house import reward

__all__ = ["client", "coordinator", "hostile", "http", "nodes", "process", "redis", "reward"]
