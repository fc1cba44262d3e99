"""Hundreds of random kills, pauses and partitions on a fleet of real processes without a model,
then one run with vLLM in which each process is killed.

    python -m tests.chaos [--seed 1] [--faults 200] [--skip-real] [--keep FOLDER]

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
from typing import Any

from tests.chaos.real import run_real
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
    parser.add_argument("--skip-real", action="store_true", help="no run with vLLM")
    args = vars(parser.parse_args())
    keep, skip_real = args.pop("keep"), args.pop("skip_real")
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
    with nullcontext(keep) if keep is not None else tempfile.TemporaryDirectory() as folder:
        outcome = asyncio.run(run_chaos(Path(folder, "sim"), ChaosSettings(**args)))
        real = None if skip_real else asyncio.run(run_real(Path(folder, "real")))
    figures = outcome.figures()
    good = not outcome.failed and _balances(figures) and (real is None or _balances(real))
    good = good and all(job.counts.conserved for job in outcome.jobs.values())
    good = good and (real is None or real["state"] == "succeeded")
    print(json.dumps({"chaos": figures, "real": real, "seed": args["seed"], "good": good}))
    return 0 if good else 1


def _balances(figures: dict[str, Any]) -> bool:
    lag_held = figures["largest_lag"] <= figures["max_policy_lag"]
    return bool(figures["lost"] == figures["doubled"] == 0 and lag_held)


if __name__ == "__main__":
    sys.exit(main())
