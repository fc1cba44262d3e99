"""`python -m services.learner`: the learner agent. Parses first, then loads the rest."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from headway.errors import InvalidSpec
from headway.lifecycle import Lifecycle, run
from headway.redis_client import ping
from headway.settings import add_service_flags, parse_cores, service_settings
from headway.telemetry import configure_logging
from services.learner.trainer_settings import add_trainer_flags, trainer_settings


def main(argv: list[str] | None = None) -> int:
    """Runs the agent; returns the exit code of headway.lifecycle.run."""
    parser = argparse.ArgumentParser("services.learner", description="Headway's learner agent")
    add_service_flags(parser, "learner")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), help="where runs are kept")
    parser.add_argument("--cores", default="", help="CPU cores for training, such as 0,2-3")
    add_trainer_flags(parser)
    namespace = parser.parse_args(argv)
    configure_logging("learner", namespace.log_level)

    async def serve(lifecycle: Lifecycle) -> None:
        settings = service_settings(namespace)
        cores = parse_cores(namespace.cores)
        trainer = trainer_settings(namespace)
        if not settings.coordinator:
            raise InvalidSpec("--coordinator is missing: an agent trains what it is assigned")
        runs_dir = _writable(namespace.runs_dir)
        await ping(settings.redis_url)
        from services.learner.service import serve as serve_learner

        await serve_learner(settings, runs_dir, cores, trainer, lifecycle)

    return run(serve)


def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidSpec(f"--runs-dir {folder}: {error.strerror}") from None
    return folder.absolute()


if __name__ == "__main__":
    sys.exit(main())
