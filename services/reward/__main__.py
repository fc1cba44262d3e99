"""python -m services.reward: parse first, then the heavy imports."""

from __future__ import annotations

import argparse
import os
import sys

from headway.errors import InvalidSpec
from headway.settings import add_service_flags, service_settings


def main(argv: list[str] | None = None) -> int:
    """Runs the reward service; returns its exit code (2: bad settings)."""
    parser = argparse.ArgumentParser(prog="reward", description="Headway's reward service")
    add_service_flags(parser, "reward")
    add = parser.add_argument
    add("--workers", type=_positive(int), default=os.cpu_count() or 1, help="grader processes")
    add("--item-timeout-s", type=_positive(float), default=10.0, help="limit for one item")
    add("--worker-memory-mib", type=_positive(int), default=2048, help="limit for one worker")
    add("--items-per-worker", type=_positive(int), default=20_000, help="then it is replaced")
    add("--max-queued-items", type=_positive(int), default=16_384, help="beyond: refused")
    add("--cache-items", type=_whole, default=200_000, help="rewards kept by content; 0: none")
    add("--cache-mib", type=_whole, default=128, help="memory for them")
    add(
        "--trust-functions",
        action="store_true",
        default=os.environ.get("HEADWAY_TRUST_FUNCTIONS") == "1",
        help="graders with sandbox: false run outside the sandbox (env HEADWAY_TRUST_FUNCTIONS=1)",
    )
    add(
        "--endpoints",
        default=os.environ.get("HEADWAY_REWARD_ENDPOINTS", ""),
        help="YAML file of what graders may ask by name (env HEADWAY_REWARD_ENDPOINTS)",
    )
    add(
        "--allow-url",
        action="append",
        default=os.environ.get("HEADWAY_REWARD_ALLOW_URLS", "").split(),
        help="URL below which graders may ask, or `public`; repeatable; none by default"
        " (env HEADWAY_REWARD_ALLOW_URLS, separated by blanks)",
    )
    add("--ask-cache-mib", type=_whole, default=64, help="answers kept; 0: none")
    namespace = parser.parse_args(argv)
    try:
        settings = service_settings(namespace)
        from services.reward.outside.endpoints import load_endpoints

        endpoints = load_endpoints(namespace.endpoints, namespace.allow_url)
    except InvalidSpec as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    from headway.lifecycle import run
    from headway.telemetry import configure_logging
    from services.reward import serve
    from services.reward.outside.lane import LaneSettings
    from services.reward.request import ServiceLimits
    from services.reward.workers import PoolSettings

    configure_logging("reward", settings.log_level)
    pool = PoolSettings(
        num_workers=namespace.workers,
        memory_bytes=namespace.worker_memory_mib << 20,
        items_per_worker=namespace.items_per_worker,
        trust_functions=namespace.trust_functions,
    )
    limits = ServiceLimits(
        item_timeout_s=namespace.item_timeout_s,
        max_item_timeout_s=max(300.0, namespace.item_timeout_s),
        max_queued_items=namespace.max_queued_items,
        max_cached=namespace.cache_items,
        max_cached_bytes=namespace.cache_mib << 20,
    )
    asking = LaneSettings(endpoints, cache_bytes=namespace.ask_cache_mib << 20)
    return run(lambda lifecycle: serve.main(settings, pool, limits, asking, lifecycle))


def _whole(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value


def _positive(kind: type[int] | type[float]):  # type: ignore[no-untyped-def]
    def positive(text: str) -> float:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    positive.__name__ = kind.__name__
    return positive


if __name__ == "__main__":
    sys.exit(main())
