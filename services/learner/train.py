"""One training rank: `python -m services.learner.train`. Started by the agent, never by hand.

Exit codes: 0 the job succeeded, 1 it failed, 75 it failed in a way that may pass
(the agent starts the ranks again), 130 it was cancelled. Anything else is a crash.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from headway.errors import HeadwayError
from headway.jobspec import JobSpec, load_job
from headway.lifecycle import die_with_parent
from headway.settings import DEFAULT_REDIS_URL, parse_cores
from headway.telemetry import configure_logging
from services.learner.status import Reporter
from services.learner.trainer_settings import (
    TrainerSettings,
    add_trainer_flags,
    trainer_settings,
)

SUCCEEDED, FAILED, RETRY, CANCELLED = 0, 1, 75, 130


@dataclass(frozen=True, slots=True)
class RankSettings:
    """What one rank is told."""

    job_id: str
    redis_url: str
    run_dir: Path
    rank: int
    world: int
    store_port: int  # where rank 0 opens the ranks' meeting point, on 127.0.0.1
    host: str  # where rollout nodes reach this machine
    trainer: TrainerSettings = field(default_factory=TrainerSettings)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags of one rank."""
    parser = argparse.ArgumentParser(prog="services.learner.train", description=__doc__)
    parser.add_argument("--job-file", type=Path, required=True)
    parser.add_argument("--job-id", required=True)
    parser.add_argument("--redis", default=os.environ.get("HEADWAY_REDIS_URL", DEFAULT_REDIS_URL))
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--store-port", type=int, default=0, help="needed when --world > 1")
    parser.add_argument("--host", default="127.0.0.1", help="where rollout nodes reach the learner")
    parser.add_argument("--cores", default="", help="CPU cores of this rank, such as 0,2-3")
    parser.add_argument("--status-fd", type=int, default=None)
    parser.add_argument("--parent-pid", type=int, default=None, help="end when this one ends")
    parser.add_argument("--log-level", default="info")
    add_trainer_flags(parser)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Runs one rank to its end; returns its exit code."""
    args = parse(argv)
    die_with_parent()
    if args.parent_pid is not None and os.getppid() != args.parent_pid:
        return FAILED  # the agent ended before we were bound to it
    configure_logging("learner", args.log_level)
    settings = RankSettings(
        job_id=args.job_id,
        redis_url=args.redis,
        run_dir=args.run_dir,
        rank=args.rank,
        world=args.world,
        store_port=args.store_port,
        host=args.host,
        trainer=trainer_settings(args),
    )
    reporter = Reporter(args.status_fd)
    try:
        cores = parse_cores(args.cores)
        if cores:
            os.sched_setaffinity(0, cores)
        spec = load_job(args.job_file)
        return _run(settings, spec, reporter)
    except HeadwayError as error:
        print(f"error: {error}", file=sys.stderr)
        reporter.update(
            phase="failed", detail=str(error), error_kind=error.kind, retryable=error.retryable
        )
        return RETRY if error.retryable else FAILED


def _run(settings: RankSettings, spec: JobSpec, reporter: Reporter) -> int:
    # Heavy imports come after the settings are known to be good.
    if settings.rank == 0:
        if spec.kind == "eval":
            from services.learner.eval_lead import EvalLead

            return asyncio.run(EvalLead(settings, spec, reporter).run())
        from services.learner.lead import lead

        return lead(settings, spec, reporter)
    from services.learner.lead import follow_rank

    return follow_rank(settings, spec)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a thread of torch or a broken collective must not hold the process back
