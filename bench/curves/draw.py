"""The picture: one panel a variant, reward against steps and against seconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

from bench.curves.results import WINDOW, Result

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "headway"  # the same runs give the same file
REFERENCE = "grpo"


def draw(results: Sequence[Result], path: Path) -> None:
    """Writes an SVG; the mean of the reference's seeds is grey in every panel."""
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(result.name for result in results))
    figure, axes = plt.subplots(
        len(names), 2, figsize=(8, 1.7 * len(names)), sharey=True, squeeze=False
    )
    reference = [result for result in results if result.name == REFERENCE]
    for row, name in zip(axes, names, strict=True):
        for axis, over in zip(row, ("steps", "seconds"), strict=True):
            for result in reference:
                axis.plot(_across(result, over), result.smooth, color="0.8", linewidth=2.5)
            for result in (result for result in results if result.name == name):
                axis.plot(
                    _across(result, over), result.smooth, linewidth=1.2, label=f"seed {result.seed}"
                )
            axis.set_ylim(0, 1)
            axis.grid(alpha=0.3)
        row[0].set_title(name, loc="left", fontsize=9)
        row[0].set_ylabel("reward")
    axes[-1][0].set_xlabel(f"steps (mean of {WINDOW}; grey: {REFERENCE})")
    axes[-1][1].set_xlabel("seconds")
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _across(result: Result, over: str) -> Sequence[float]:
    return range(1, len(result.rewards) + 1) if over == "steps" else result.seconds
