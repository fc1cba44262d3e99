"""Does the main job learn, on every seed, and is the exported model better than its base?

Runs `headway run examples/quickstart.yaml` once a seed, watches the memory of all its
processes, and then answers 200 held-out problems greedily with the base model and with
each exported model, by transformers and by vLLM.

    python bench/quickstart.py [--seeds 0 1 2] [--rollouts 1] [--problems 200]

`ratio` of a seed = held-out score of its exported model / that of the base model.
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
HELD_OUT_SEED = 987_654_321


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
    """One run of the job: its figures and its exported model."""
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
    return figures, run_dir / "model"


def main() -> None:
    """Prints one JSON object as its last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", type=Path, default=ROOT / "examples/quickstart.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rollouts", type=int, default=1)
    parser.add_argument("--problems", type=int, default=200)
    args = parser.parse_args()

    from headway.jobspec import load_job
    from headway.models import resolve_model

    base = resolve_model(load_job(args.job).model.path)
    with tempfile.TemporaryDirectory() as tmp:
        trained = [
            train(args.job, seed, args.rollouts, Path(tmp, f"seed-{seed}")) for seed in args.seeds
        ]
        held_out = {
            str(path): score_held_out(args.job, path, args.problems)
            for path in [base, *(model for _, model in trained)]
        }
    base_score = held_out[str(base)]
    runs = []
    for figures, model in trained:
        score = held_out[str(model)]
        runs.append({**figures, "held_out": score, "ratio": ratio(score, base_score)})
    print(json.dumps({"base_held_out": base_score, "runs": runs}))


def ratio(score: dict[str, float], base: dict[str, float]) -> float:
    """The trained model's mean score over the base model's."""
    return round(statistics.mean(score.values()) / statistics.mean(base.values()), 2)


def score_held_out(job: Path, model: Path, problems: int) -> dict[str, float]:
    """Mean reward of greedy answers, by transformers and by vLLM, each in its own process."""
    scores = {}
    for engine in ("transformers", "vllm"):
        command = [sys.executable, str(ROOT / "bench/support/held_out.py"), str(job), str(model)]
        command += ["--engine", engine, "--problems", str(problems), "--seed", str(HELD_OUT_SEED)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        # vLLM's processes say on stdout that they end, after the result
        result = [line for line in done.stdout.splitlines() if line.startswith("{")][-1]
        scores[engine] = float(json.loads(result)["mean_reward"])
    return scores


if __name__ == "__main__":
    main()
