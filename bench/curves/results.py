"""What a finished run comes to."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

WINDOW = 5  # steps that a curve is averaged over
TARGET = 0.5


@dataclass(frozen=True)
class Result:
    """One run. Of every step: the mean reward, and the seconds since the first step began."""

    name: str
    seed: int
    rewards: tuple[float, ...]
    seconds: tuple[float, ...]
    lag_max: float
    grad_norm: float  # median

    @property
    def smooth(self) -> list[float]:
        """Rewards, each averaged with the few before it."""
        rewards = self.rewards
        return [
            statistics.mean(rewards[max(0, i + 1 - WINDOW) : i + 1]) for i in range(len(rewards))
        ]

    @property
    def steps_to_target(self) -> int | None:
        """Steps until the averaged reward first reached the target."""
        return next((i + 1 for i, reward in enumerate(self.smooth) if reward >= TARGET), None)

    def figures(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "name": self.name,
            "seed": self.seed,
            "reward_first_3": round(statistics.mean(self.rewards[:3]), 3),
            "reward_last_5": round(statistics.mean(self.rewards[-5:]), 3),
            "steps_to_half": self.steps_to_target,
            "seconds": round(self.seconds[-1]),
            "lag_max": self.lag_max,
            "grad_norm": round(self.grad_norm, 2),
        }


def read_result(name: str, seed: int, folder: Path) -> Result | None:
    """The run below `folder`; None when there is none that was finished."""
    for run in sorted(folder.glob("*/")):
        job, metrics = run / "job.yaml", run / "metrics.jsonl"
        if not (run / "model").is_dir() or not job.is_file():
            continue  # the model is written at a job's end
        rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
        began = rows[0]["time"] - rows[0]["timing_s/step"]
        return Result(
            name,
            seed,
            tuple(row["critic/score/mean"] for row in rows),
            tuple(row["time"] - began for row in rows),
            max(row["lag/max"] for row in rows),
            statistics.median(row["actor/grad_norm"] for row in rows),
        )
    return None


def load(file: Path) -> list[Result]:
    """The results of a file; none where there is no file."""
    if not file.is_file():
        return []
    rows = json.loads(file.read_text(encoding="utf-8"))
    return [
        Result(**{**row, "rewards": tuple(row["rewards"]), "seconds": tuple(row["seconds"])})
        for row in rows
    ]


def save(results: Sequence[Result], file: Path) -> None:
    """Writes results down, a line each."""
    lines = []
    for result in results:
        row = asdict(result)
        row["rewards"] = [round(reward, 4) for reward in result.rewards]
        row["seconds"] = [round(second, 1) for second in result.seconds]
        lines.append(json.dumps(row))
    file.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def table(results: Sequence[Result]) -> str:
    """A Markdown table, one row a variant, its seeds beside each other."""
    names = list(dict.fromkeys(result.name for result in results))
    lines = [
        "| algorithm | reward, steps 1–3 | last 5 | steps to 0.5 | seconds | largest lag |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in names:
        of_name = [result.figures() for result in results if result.name == name]
        cells = [
            " / ".join(str(found[key]) if found[key] is not None else "–" for found in of_name)
            for key in ("reward_first_3", "reward_last_5", "steps_to_half", "seconds", "lag_max")
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)
