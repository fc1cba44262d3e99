"""What is measured of graders that ask outside."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

ASKS = Counter(
    "headway_reward_asks",
    "Requests that graders needed, by how they came out: ok, cached, joined (one alike was on its"
    " way), unavailable, refused, unparsable, cancelled",
    ["grader", "outcome"],
)
TRIES = Counter(
    "headway_reward_tries", "HTTP requests made, by endpoint and result", ["endpoint", "result"]
)
TRY_SECONDS = Histogram(
    "headway_reward_try_seconds", "Time of one HTTP request", ["endpoint"],
    buckets=(0.01, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 600),
)  # fmt: skip
ASKING = Gauge("headway_reward_asking", "Requests waiting for, or at, an endpoint")
CACHE_BYTES = Gauge("headway_reward_ask_cache_bytes", "Size of the answers remembered")
