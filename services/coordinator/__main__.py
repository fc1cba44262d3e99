"""`python -m services.coordinator`: parses, checks Redis, then loads the rest."""

from __future__ import annotations

import argparse
import sys

from headway.errors import InvalidSpec
from headway.lifecycle import Lifecycle, run
from headway.redis_client import ping
from headway.settings import add_service_flags, service_settings
from headway.telemetry import configure_logging, get_logger

log = get_logger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Runs the coordinator; returns the exit code of headway.lifecycle.run."""
    parser = argparse.ArgumentParser("services.coordinator", description="Headway's control plane")
    add_service_flags(parser, "coordinator")
    parser.add_argument(
        "--heartbeat-s", type=float, default=1.0, help="seconds between the fleet's heartbeats"
    )
    parser.add_argument(
        "--lost-after-s", type=float, default=15.0, help="silence after which a process is lost"
    )
    namespace = parser.parse_args(argv)
    configure_logging("coordinator", namespace.log_level)

    async def serve(lifecycle: Lifecycle) -> None:
        settings = service_settings(namespace)
        heartbeat_s, lost_after_s = namespace.heartbeat_s, namespace.lost_after_s
        if not 0 < heartbeat_s < lost_after_s:
            raise InvalidSpec("--heartbeat-s must be above 0 and below --lost-after-s")
        await ping(settings.redis_url)
        from services.coordinator.service import serve as serve_coordinator

        await serve_coordinator(settings, heartbeat_s, lost_after_s, lifecycle)

    return run(serve)


if __name__ == "__main__":
    sys.exit(main())
