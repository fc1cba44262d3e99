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
QUEUED_ITEMS = Gauge("headway_reward_queued_items", "Items accepted and not yet scored")
WORKER_STARTS = Counter("headway_reward_worker_starts", "Worker processes started", ["reason"])
