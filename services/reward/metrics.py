"""What the reward service measures."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

REQUESTS = Counter("headway_reward_requests", "Requests, by how they ended", ["outcome"])
ITEMS = Counter(
    "headway_reward_items", "Items scored, by grader and outcome (ok or error kind)",
    ["grader", "outcome"],
)  # fmt: skip
ITEM_SECONDS = Histogram(
    "headway_reward_item_seconds", "Time of one item in its worker", ["grader"],
    buckets=(1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1, 10, 60),
)  # fmt: skip
QUEUE_SECONDS = Histogram(
    "headway_reward_queue_seconds", "Time that a batch of items waited for a worker", ["grader"],
    buckets=(1e-3, 1e-2, 0.1, 1, 10, 60, 300),
)  # fmt: skip
CACHE = Counter(
    "headway_reward_cache_lookups", "Looks for a known reward, by outcome (hit or miss)",
    ["grader", "outcome"],
)  # fmt: skip
CACHED_ITEMS = Gauge("headway_reward_cached_items", "Rewards kept in the cache")
QUEUED_ITEMS = Gauge("headway_reward_queued_items", "Items accepted and not yet scored")
WORKER_STARTS = Counter("headway_reward_worker_starts", "Worker processes started", ["reason"])
SANDBOX_HOLDS = Gauge(
    "headway_reward_sandbox_holds", "1 where code may be run: the sandbox was tried and held"
)
