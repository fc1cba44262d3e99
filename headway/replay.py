"""Replays of a run: what may be changed, and how the two compare. No torch, no IO but reading.

A replay trains again from the groups that a run recorded. What decided which groups there
are (data, sampling, rewards, lag) is past and cannot be changed; how they are trained on can.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from headway.errors import InvalidSpec
from headway.jobspec import JobSpec
from headway.report_data import Row, number_of
from headway.report_svg import nice

CHANGEABLE: Final = ("algorithm.", "actor.", "critic.", "trainer.critic_warmup", "trainer.export")
"""Beginnings of the keys that a replay may set, save for those in FIXED."""

FIXED: Final = (
    "algorithm.dynamic_sampling",
    "algorithm.max_num_gen_batches",
    "algorithm.max_policy_lag",
    "algorithm.on_late",
    "actor.num_ranks",
    "actor.strategy",
    "actor.megatron.tensor_model_parallel_size",
)
"""What decided which groups there are, or how sums over ranks are rounded."""

WITHOUT_EFFECT: Final = ("trainer.export", "actor.gradient_checkpointing", "actor.max_nonfinite")
"""Of the changeable keys, the ones that leave every bit as it is."""

DIGEST: Final = "actor/weights_digest"

COMPARED: Final = (
    "actor/pg_loss",
    "actor/grad_norm",
    "actor/entropy",
    "actor/pg_clipfrac",
    "actor/ppo_kl",
    "critic/vf_loss",
    "critic/vf_explained_var",
    "rollout_corr/kl",
    "rollout_corr/rollout_is_eff_sample_size",
    "rollout_corr/rollout_rs_masked_fraction",
    "training/rollout_probs_diff_mean",
)
"""Figures that say how the same groups were trained on; rewards and lengths are the same."""

Verdict = Literal["equal", "differs", "unknown"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One metric of both, over the steps that both have; None where one lacks it."""

    name: str
    run_mean: float | None
    replay_mean: float | None
    run_last: float | None
    replay_last: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """A replay beside its run. Steps count from 1.

    `verdict` is about the weights after each step: `unknown` where the run kept no digests
    (on GPUs).
    """

    run_steps: int
    replay_steps: int
    changed: Mapping[str, tuple[Any, Any]]  # key -> its value in the run, and here
    verdict: Verdict
    first_difference: int | None
    figures: tuple[Figure, ...]


def changes(run: JobSpec, replay: JobSpec) -> dict[str, tuple[Any, Any]]:
    """The dotted keys in which two jobs differ, with both values.

    InvalidSpec for one that a replay cannot change.
    """
    before, after = _flat(run.model_dump(mode="json")), _flat(replay.model_dump(mode="json"))
    found = {
        key: (before.get(key), after.get(key))
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key)
    }
    for key in found:
        if key in FIXED or not key.startswith(CHANGEABLE):
            raise InvalidSpec(
                f"{key} cannot be set in a replay: the recorded groups were made with"
                f" {found[key][0]}. What can be set is how they are trained on:"
                f" algorithm.*, actor.* and critic.*, except {', '.join(FIXED)}"
            )
    return found


def compare(
    run_rows: Sequence[Row], replay_rows: Sequence[Row], changed: Mapping[str, tuple[Any, Any]]
) -> Comparison:
    """Both runs' metrics rows, step by step; a later row of a step counts."""
    run = {int(row["step"]): row for row in run_rows}
    replay = {int(row["step"]): row for row in replay_rows}
    both = sorted(run.keys() & replay.keys())
    digests = [(step, run[step].get(DIGEST), replay[step].get(DIGEST)) for step in both]
    different = [step for step, a, b in digests if a and b and a != b]
    verdict: Verdict = "differs" if different else "equal"
    if not digests or not all(a and b for _, a, b in digests):
        verdict = "differs" if different else "unknown"
    pairs = [(run[step], replay[step]) for step in both]
    return Comparison(
        run_steps=max(run, default=0),
        replay_steps=len(replay),
        changed=changed,
        verdict=verdict,
        first_difference=min(different, default=None),
        figures=tuple(figure for name in COMPARED if (figure := _figure(name, pairs)) is not None),
    )


def as_text(comparison: Comparison, weights: Mapping[str, float] | None) -> list[str]:
    """The comparison for people. `weights` are distances of the exported models."""
    c = comparison
    lines = [f"{key}: {was} in the run, {now} here" for key, (was, now) in c.changed.items()]
    if c.figures:
        width = max(len(figure.name) for figure in c.figures)
        lines += [
            f"{'':{width}}  {'mean: run':>12} {'replay':>12} {'last: run':>12} {'replay':>12}"
        ]
        lines += [
            f"{f.name:{width}}  {nice(f.run_mean):>12} {nice(f.replay_mean):>12}"
            f" {nice(f.run_last):>12} {nice(f.replay_last):>12}"
            for f in c.figures
        ]
    if weights is not None:
        lines.append(
            f"weights moved by {nice(weights['run_moved'])} in the run, by"
            f" {nice(weights['replay_moved'])} here, and lie {nice(weights['apart'])} apart"
        )
    return [*lines, _sentence(c)]


def _sentence(c: Comparison) -> str:
    steps = f"{c.replay_steps} of {c.run_steps} steps"
    if c.verdict == "unknown":
        return f"replayed {steps}; the run kept no digests to compare weights with"
    if c.verdict == "equal":
        return f"replayed {steps}: the weights are equal, bit for bit, after each"
    return f"replayed {steps}: the weights first differ after step {c.first_difference}"


def _figure(name: str, pairs: Sequence[tuple[Row, Row]]) -> Figure | None:
    run = [number_of(a.get(name)) for a, _ in pairs]
    replay = [number_of(b.get(name)) for _, b in pairs]
    if not any(value is not None for value in (*run, *replay)):
        return None
    return Figure(name, _mean(run), _mean(replay), run[-1], replay[-1])


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            flat |= _flat(item, f"{prefix}{key}.")
        else:
            flat[prefix + key] = item
    return flat
