"""Runs whole jobs through the real command, for tests that look at what is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from headway.leash import leashed
from headway.ports import free_port


def tiny_job(model: Path | str, **changes: Any) -> dict[str, Any]:
    """A small job on a tiny model; `changes` are dotted keys with __ for the dot."""
    job: dict[str, Any] = {
        "name": "tiny",
        "seed": 3,
        "model": {"path": str(model), "max_model_len": 128},
        "data": {
            "source": "reasoning_gym",
            "name": "chain_sum",
            "config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
            "size": 64,
            "train_batch_size": 2,
            "max_prompt_length": 96,
        },
        # Length of the answer, in effect: random weights never give a right number.
        "reward": {"grader": {"type": "regex", "pattern": "[a-m]", "match": "search"}},
        "algorithm": {"max_policy_lag": 2},
        "actor": {"optim": {"lr": 1e-3}, "compute_dtype": "float32"},
        "rollout": {"n": 4, "max_tokens": 24, "dtype": "float32", "kv_cache_gib": 0.25},
        "trainer": {"total_training_steps": 4, "save_freq": 2},
    }
    for key, value in changes.items():
        *path, leaf = key.split("__")
        section = job
        for part in path:
            section = section[part]
        section[leaf] = value
    return job


@dataclass(frozen=True)
class Run:
    """A finished command and the folder it left."""

    code: int
    output: str
    folder: Path

    def rows(self, name: str) -> list[dict[str, Any]]:
        text = (self.folder / name).read_text()
        return [json.loads(line) for line in text.splitlines()]


def command(tmp: Path, *args: str) -> list[str]:
    """Ends in good order, with its fleet, if the tests are killed."""
    return leashed([sys.executable, "-m", "headway.cli", *args], signal.SIGTERM)


def environment(tmp: Path) -> dict[str, str]:
    """State and runs of a test are under `tmp`, and no server of the machine is used."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("HEADWAY_")}
    return {**env, "HEADWAY_STATE": str(tmp / "state"), "OMP_NUM_THREADS": "1"}


def run_job(tmp: Path, job: dict[str, Any], *flags: str, timeout_s: float = 280) -> Run:
    """`headway run` on this job, to its end."""
    path = tmp / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    runs = tmp / "runs"
    done = subprocess.run(
        command(tmp, "run", str(path), "--runs-dir", str(runs), "--port", str(free_port()), *flags),
        env=environment(tmp),
        cwd=tmp,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=timeout_s,
    )
    folders = sorted(runs.glob("tiny-*")) if runs.is_dir() else []
    return Run(done.returncode, done.stdout, folders[0] if folders else runs)
