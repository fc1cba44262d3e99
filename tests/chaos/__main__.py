"""Hundreds of random kills, pauses and partitions on a fleet of real processes without a model.

    python -m tests.chaos [--seed 1] [--faults 200] [--keep FOLDER]

Prints one JSON object as its last line; exit code 1 when a ticket was lost or doubled, a
token lagged too much or a job did not finish.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

from tests.chaos.run import ChaosSettings, run_chaos


def main() -> int:
    """Runs the chaos; the exit code."""
    parser = argparse.ArgumentParser(prog="tests.chaos", description=__doc__)
    default = ChaosSettings()
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--faults", type=int, default=default.faults)
    parser.add_argument("--mean-gap-s", type=float, default=default.mean_gap_s)
    parser.add_argument("--nodes", type=int, default=default.nodes)
    parser.add_argument("--steps", type=int, default=default.steps, help="of one job")
    parser.add_argument("--step-s", type=float, default=default.step_s)
    parser.add_argument("--on-late", choices=("wait", "drop"), default=default.on_late)
    parser.add_argument("--keep", type=Path, help="a folder for logs and runs; default: none kept")
    args = vars(parser.parse_args())
    keep = args.pop("keep")
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
    with nullcontext(keep) if keep is not None else tempfile.TemporaryDirectory() as folder:
        outcome = asyncio.run(run_chaos(Path(folder), ChaosSettings(**args)))
    figures = outcome.figures()
    good = (
        not outcome.failed
        and figures["lost"] == figures["doubled"] == 0
        and figures["largest_lag"] <= figures["max_policy_lag"]
        and all(job.counts.conserved for job in outcome.jobs.values())
    )
    print(json.dumps({"chaos": figures, "seed": args["seed"], "good": good}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
