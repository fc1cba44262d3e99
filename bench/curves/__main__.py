"""Runs the quickstart once for each algorithm and seed, then writes a table and a picture.

    python -m bench.curves [--only grpo rloo] [--seeds 0 1] [--runs runs/curves] [--docs docs]

Results are kept in `learning.json` beside the picture, and a run that is there, or finished in
`--runs`, is not made again: an interrupted series goes on where it was. Needs the `curves` extra.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from bench.curves.draw import draw
from bench.curves.results import Result, load, read_result, save, table

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "examples/quickstart.yaml"
VARIANTS: dict[str, tuple[str, ...]] = {
    "grpo": (),
    "grpo, lag 0": ("algorithm.max_policy_lag=0",),
    "grpo, lag 4": ("algorithm.max_policy_lag=4",),
    "dr_grpo": (
        "algorithm.adv_estimator=dr_grpo",
        "algorithm.loss_agg_mode=seq-mean-token-sum-norm",
        "algorithm.loss_scale_factor=12",
    ),
    "rloo": ("algorithm.adv_estimator=rloo",),
    "reinforce_plus_plus": ("algorithm.adv_estimator=reinforce_plus_plus",),
    "gspo": (
        "algorithm.policy_loss=gspo",
        "algorithm.loss_agg_mode=seq-mean-token-mean",
        "algorithm.clip_ratio_low=0.0003",
        "algorithm.clip_ratio_high=0.0004",
    ),
    "cispo": ("algorithm.policy_loss=cispo",),
    "ppo": ("algorithm.adv_estimator=gae",),
}


def main() -> None:
    """Prints one JSON object as its last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs/curves")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="where results lie")
    args = parser.parse_args()
    data = args.docs / "learning.json"
    results = {(result.name, result.seed): result for result in load(data)}
    for seed in args.seeds:
        for name in args.only:
            if (name, seed) not in results:
                results[name, seed] = made(name, seed, folder_of(args.runs, name, seed))
                keep(results, data)
    ordered = keep(results, data)
    print(table(ordered))
    print(json.dumps({"curves": [result.figures() for result in ordered]}))


def keep(results: Mapping[tuple[str, int], Result], data: Path) -> list[Result]:
    """Writes results and their picture; returns them by variant and seed."""
    ordered = [
        results[key] for key in sorted(results, key=lambda k: ([*VARIANTS].index(k[0]), k[1]))
    ]
    save(ordered, data)
    draw(ordered, data.with_suffix(".svg"))
    return ordered


def made(name: str, seed: int, folder: Path) -> Result:
    """The result of a run that is finished in `folder`, or is made now."""
    found = read_result(name, seed, folder)
    if found is None:
        train(folder, (*VARIANTS[name], f"seed={seed}"))
        found = read_result(name, seed, folder)
    assert found is not None, folder
    return found


def train(folder: Path, changes: tuple[str, ...]) -> None:
    """One run; its folder is the only one below `folder`."""
    command = [sys.executable, "-m", "headway.cli", "run", str(JOB), "--runs-dir", str(folder)]
    command += [f"--set={change}" for change in changes]
    done = subprocess.run(command, cwd=ROOT, stdout=sys.stderr)
    if done.returncode:
        raise SystemExit(f"the run in {folder} ended with code {done.returncode}")


def folder_of(runs: Path, name: str, seed: int) -> Path:
    """Where a variant's run with a seed lies."""
    return runs / f"{slug(name)}-seed-{seed}"


def slug(name: str) -> str:
    """A variant's name as part of a file name."""
    return name.replace(", ", "-").replace(" ", "-")


if __name__ == "__main__":
    main()
