"""How well the two pools overlap: one asynchronous step against its slower phase alone.

Runs the quickstart job twice on this machine, each pool on its own core(s): once with
`max_policy_lag: 0`, where sampling and training take turns and each phase is therefore
timed alone on its own core, and once with the job's own lag. The learning rate is near
zero, so that both runs sample from the same policy and answers keep their length.

    python bench/overlap.py [--steps 20] [--job examples/quickstart.yaml]

`ratio` = median asynchronous step / median slower phase; 1.0 is perfect overlap.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WARM_UP = 4  # steps in which pipelines fill and kernels are chosen


def run(job: Path, steps: int, lag: int, folder: Path, rollouts: int) -> list[dict[str, Any]]:
    """The metrics rows of one job run with `headway run`."""
    settings = {
        "algorithm.max_policy_lag": lag,
        "trainer.total_training_steps": steps,
        "trainer.save_freq": 0,
        "trainer.export": "false",
        "actor.optim.lr": 1e-9,
    }
    flags = [f"--set={key}={value}" for key, value in settings.items()]
    command = [sys.executable, "-m", "headway.cli", "run", str(job), *flags]
    command += ["--runs-dir", str(folder), "--rollouts", str(rollouts)]
    subprocess.run(command, check=True, cwd=ROOT, stdout=sys.stderr)
    (metrics,) = folder.glob("*/metrics.jsonl")
    return [json.loads(line) for line in metrics.read_text().splitlines()][WARM_UP:]


def median(rows: list[dict[str, Any]], of: Callable[[dict[str, Any]], float]) -> float:
    """Median over the rows."""
    return statistics.median(of(row) for row in rows)


def main() -> None:
    """Prints one JSON object as its last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", type=Path, default=ROOT / "examples/quickstart.yaml")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lag", type=int, default=2)
    parser.add_argument("--rollouts", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as tmp:
        alone = run(args.job, args.steps, 0, Path(tmp, "alone"), args.rollouts)
        together = run(args.job, args.steps, args.lag, Path(tmp, "together"), args.rollouts)
    generate_s = median(alone, lambda row: row["pool/rollout_busy"] * row["timing_s/step"])
    train_s = median(alone, lambda row: row["timing_s/train"])
    step_s = median(together, lambda row: row["timing_s/step"])
    figures = {
        "generate_alone_s": round(generate_s, 3),
        "train_alone_s": round(train_s, 3),
        "synchronous_step_s": round(median(alone, lambda row: row["timing_s/step"]), 3),
        "asynchronous_step_s": round(step_s, 3),
        "learner_busy": round(median(together, lambda row: row["pool/learner_busy"]), 3),
        "rollout_busy": round(median(together, lambda row: row["pool/rollout_busy"]), 3),
        "lag_mean": round(median(together, lambda row: row["lag/mean"]), 3),
        "lag_max": max(row["lag/max"] for row in together),
        "ratio": round(step_s / max(generate_s, train_s), 3),
    }
    print(json.dumps({"overlap": figures}))


if __name__ == "__main__":
    main()
