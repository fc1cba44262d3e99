"""Does the main job learn, on every seed, and is the exported model better than its base?

Runs `headway run examples/quickstart.yaml` once a seed, watches the memory of all its
processes, and then asks the exported model and its base 200 held-out problems, greedily, with
`headway eval RUN --compare BASE`.

    python bench/quickstart.py [--seeds 0 1 2] [--rollouts 1] [--problems 200]

`ratio` of a seed = held-out mean reward of its exported model / that of the base model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]


class MemoryWatch(threading.Thread):
    """The largest proportional set size (PSS) of a process and all its descendants."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._root = psutil.Process(pid)
        self._stopped = threading.Event()
        self.peak_bytes = 0

    def run(self) -> None:
        """Looks once a second."""
        while not self._stopped.wait(1.0):
            self.peak_bytes = max(self.peak_bytes, self._now())

    def stop(self) -> None:
        """Ends the watch."""
        self._stopped.set()

    def _now(self) -> int:
        total = 0
        try:
            for process in [self._root, *self._root.children(recursive=True)]:
                try:
                    total += process.memory_full_info().pss
                except psutil.Error:
                    continue
        except psutil.Error:
            return 0
        return total


def train(job: Path, seed: int, rollouts: int, folder: Path) -> tuple[dict[str, Any], Path]:
    """One run of the job: its figures and its run folder."""
    command = [sys.executable, "-m", "headway.cli", "run", str(job), f"--set=seed={seed}"]
    command += ["--runs-dir", str(folder), "--rollouts", str(rollouts)]
    started = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, stdout=sys.stderr)
    watch = MemoryWatch(process.pid)
    watch.start()
    code = process.wait()
    wall_s = time.monotonic() - started
    watch.stop()
    if code:
        raise SystemExit(f"the job with seed {seed} ended with code {code}")
    (run_dir,) = folder.iterdir()
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steady = rows[5:]
    figures = {
        "seed": seed,
        "wall_s": round(wall_s, 1),
        "reward_first_3": round(statistics.mean(r["critic/rewards/mean"] for r in rows[:3]), 3),
        "reward_last_5": round(statistics.mean(r["critic/rewards/mean"] for r in rows[-5:]), 3),
        "step_s_median": round(statistics.median(r["timing_s/step"] for r in steady), 2),
        "learner_busy": round(statistics.mean(r["pool/learner_busy"] for r in steady), 3),
        "rollout_busy": round(statistics.mean(r["pool/rollout_busy"] for r in steady), 3),
        "lag_max": max(r["lag/max"] for r in rows),
        "mixed_version_completions": round(
            statistics.mean(r["response/mixed_versions_ratio"] for r in steady), 3
        ),
        "peak_pss_gib": round(watch.peak_bytes / 2**30, 2),
    }
    return figures, run_dir


def main() -> None:
    """Prints one JSON object as its last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", type=Path, default=ROOT / "examples/quickstart.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rollouts", type=int, default=1)
    parser.add_argument("--problems", type=int, default=200)
    args = parser.parse_args()

    from headway.jobspec import load_job

    base = load_job(args.job).model.path  # from the second seed on, its evaluation
    runs = []
    with tempfile.TemporaryDirectory() as tmp:
        for seed in args.seeds:
            figures, run_dir = train(args.job, seed, args.rollouts, Path(tmp, f"seed-{seed}"))
            held_out = against(base, run_dir, args.problems, Path(tmp, "evaluations"))
            base = held_out["a"]["run_dir"]
            runs.append({**figures, **summary(held_out)})
    print(json.dumps({"runs": runs}))


def against(base: str, run_dir: Path, problems: int, runs_dir: Path) -> dict[str, Any]:
    """What `headway eval RUN --compare BASE` says; the base is a model, or an evaluation of it."""
    command = [sys.executable, "-m", "headway.cli", "eval", str(run_dir), "--compare", base]
    command += ["--limit", str(problems), "--runs-dir", str(runs_dir), "--json"]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def summary(held_out: dict[str, Any]) -> dict[str, Any]:
    """Both models' means, their paired difference with its interval, and the ratio."""
    (found,) = (c for c in held_out["contrasts"] if c["metric"] == "mean")
    difference = found["difference"]
    return {
        "base_held_out": round(found["mean_a"], 4),
        "held_out": round(found["mean_b"], 4),
        "difference_95": [round(difference["low"], 3), round(difference["high"], 3)],
        "p": found["permutation_p"],
        "ratio": round(found["mean_b"] / found["mean_a"], 2),
    }


if __name__ == "__main__":
    main()
