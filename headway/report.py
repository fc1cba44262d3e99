"""The report of a run: one self-contained HTML file with the curves, no scripts.

Written from the run folder alone, so it can be made again at any time, also for a
job that was cancelled half-way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from headway import __version__
from headway.errors import NotFound
from headway.report_data import Row, RunData, number_of, read_run, sample_lines
from headway.report_style import STYLE
from headway.report_svg import Band, Series, finite, line_chart, nice, stack_chart
from headway.report_validation import validation_charts
from headway.whole_file import write_whole

_SAMPLES_A_STEP = 6
_EDGE_STEPS = 5


def write_report(run_dir: Path) -> Path:
    """Writes report.html into a run folder and returns its path.

    NotFound when there is no such folder or nothing of a run is in it, StorageFailed when
    it takes no more. Missing files and missing, null or NaN values are shown as such.
    """
    try:
        run = read_run(run_dir)
    except FileNotFoundError:
        raise NotFound(f"there is no run folder {run_dir}") from None
    if not (run.job or run.metrics):
        raise NotFound(f"{run_dir} is no run folder: it has neither job.yaml nor metrics.jsonl")
    target = run_dir / "report.html"
    write_whole(target, render(run))
    return target


def render(run: RunData) -> str:
    """The page. Everything that came from outside is escaped."""
    title = escape(f"{run.name} – Headway")
    charts = "".join(_charts(run)) if run.metrics else '<p class="none">No step was finished.</p>'
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{title}</title><style>{STYLE}</style></head><body><main>"
        f"<header><h1>{escape(run.name)}</h1><p>{_subtitle(run)}</p></header>"
        f'<section class="tiles">{_tiles(run)}</section>'
        f'<section class="charts">{charts}</section>'
        f"<section><h2>Samples</h2>{_samples(run)}</section>"
        f'<section class="tables">{_counts(run)}{_environment(run)}{_job(run)}</section>'
        f"<footer>Headway {escape(__version__)}</footer></main></body></html>\n"
    )


def mean_of_edge(values: Sequence[float | None], last: bool) -> float | None:
    """Mean of the first or last five steps; None where they hold no number."""
    edge = finite(values[-_EDGE_STEPS:] if last else values[:_EDGE_STEPS])
    return sum(edge) / len(edge) if edge else None


def _charts(run: RunData) -> list[str]:
    steps, col = run.steps, run.column

    def lines(*named: tuple[str, str]) -> list[Series]:
        return [
            Series(name, col(key), f"s{i}")
            for i, (name, key) in enumerate(named, start=1)
            if finite(col(key)) or i == 1
        ]

    reward_key = "critic/score/mean" if finite(col("critic/score/mean")) else "critic/rewards/mean"
    prefix = reward_key.removesuffix("mean")
    spread = Band("min to max", col(prefix + "min"), col(prefix + "max"), "s1")
    lengths = Band("min to max", col("response_length/min"), col("response_length/max"), "s1")
    eta = number_of(_at(run.job, "algorithm", "max_policy_lag"))
    return [
        line_chart("Reward", steps, lines(("mean", reward_key)), band=spread),
        *validation_charts(run),
        *_reward_parts(run),
        line_chart(
            "Response length (tokens)", steps, lines(("mean", "response_length/mean")), lengths
        ),
        line_chart(
            "Policy lag (versions)",
            steps,
            lines(
                ("largest", "lag/max"),
                ("mean", "lag/mean"),
                ("in flight, mean", "lag/in_flight_mean"),
            ),
            limit=None if eta is None else ("bound", eta),
            floor=0.0,
        ),
        line_chart(
            "Throughput (tokens/s)",
            steps,
            lines(("sampled", "rollout/tokens_per_s"), ("trained", "perf/throughput")),
            floor=0.0,
        ),
        stack_chart("Time of a step (s)", steps, _phases(run)),
        line_chart(
            "Busy (fraction of the wall-clock)",
            steps,
            lines(("rollout", "pool/rollout_busy"), ("learner", "pool/learner_busy")),
            floor=0.0,
            ceiling=1.0,
        ),
        line_chart(
            "Sampler against learner: difference of probabilities",
            steps,
            lines(
                ("mean", "training/rollout_probs_diff_mean"),
                ("largest", "training/rollout_probs_diff_max"),
            ),
            floor=0.0,
        ),
        line_chart("Gradient norm", steps, lines(("norm", "actor/grad_norm")), floor=0.0),
        line_chart("Entropy (nats a token)", steps, lines(("mean", "actor/entropy")), floor=0.0),
        line_chart(
            "Clipped tokens (fraction)", steps, lines(("clipped", "actor/pg_clipfrac")), floor=0.0
        ),
    ]


def _reward_parts(run: RunData) -> list[str]:
    """The parts of a composed grader, four at most; nothing where there is one grader only."""
    keys = {key for row in run.metrics for key in row}
    names = sorted(k.split("/")[1] for k in keys if k.startswith("reward/") and k.endswith("/mean"))
    parts = [
        Series(name, run.column(f"reward/{name}/mean"), f"s{i}")
        for i, name in enumerate(names[:4], start=1)
    ]
    if len(parts) < 2:
        return []
    return [line_chart("Reward by part (mean)", run.steps, parts, floor=0.0)]


def _phases(run: RunData) -> list[Series]:
    """take, train, stage and the rest of the step; publishing overlaps and is not in it."""
    parts = {
        "wait for groups": run.column("timing_s/take"),
        "train": run.column("timing_s/train"),
        "stage weights": run.column("timing_s/stage"),
    }
    whole = run.column("timing_s/step")
    other: list[float | None] = []
    for i, total in enumerate(whole):
        known = sum(finite(column[i] for column in parts.values()))
        other.append(None if total is None else max(0.0, total - known))
    layers = [Series(n, v, f"s{i}") for i, (n, v) in enumerate(parts.items(), start=1)]
    return [*layers, Series("other", other, "s4")]


def _subtitle(run: RunData) -> str:
    job = run.job
    bits = [
        _at(job, "model", "path"),
        " / ".join(str(v) for v in (_at(job, "data", "source"), _at(job, "data", "name")) if v),
        _at(job, "algorithm", "adv_estimator"),
        f"seed {job['seed']}" if "seed" in job else None,
    ]
    return " · ".join(escape(str(bit)) for bit in bits if bit)


def _tiles(run: RunData) -> str:
    reward = run.column("critic/score/mean")
    reward = reward if finite(reward) else run.column("critic/rewards/mean")
    early, late = mean_of_edge(reward, last=False), mean_of_edge(reward, last=True)
    planned = number_of(_at(run.job, "trainer", "total_training_steps"))
    done = int(run.steps[-1]) if run.steps else 0
    busy = [_mean(run.column(f"pool/{pool}_busy")) for pool in ("rollout", "learner")]
    lags = finite(run.column("lag/max"))
    tiles = [
        ("reward, first → last 5 steps", f"{nice(early)} → {nice(late)}"),
        ("steps", f"{done} of {nice(planned)}" if planned is not None else f"{done}"),
        ("seconds a step, mean", nice(_mean(run.column("timing_s/step")))),
        ("wall-clock", _duration(_elapsed(run))),
        ("tokens/s, sampled and trained", _pair(run, "rollout/tokens_per_s", "perf/throughput")),
        (
            "lag, mean and largest",
            f"{nice(_mean(run.column('lag/mean')))} / {nice(max(lags, default=None))}",
        ),
        ("busy, rollout and learner", " / ".join(_percent(value) for value in busy)),
    ]
    return "".join(f"<div><b>{escape(v)}</b><span>{escape(k)}</span></div>" for k, v in tiles)


def _samples(run: RunData) -> str:
    lines = sample_lines(run.samples, _SAMPLES_A_STEP)
    if not lines:
        return '<p class="none">nothing was recorded</p>'
    rows = "".join(
        f"<tr><td>{line.step}</td><td><pre>{escape(line.prompt)}</pre></td>"
        f"<td><pre>{escape(line.completion)}</pre></td><td>{nice(line.reward)}</td></tr>"
        for line in lines
    )
    return (
        '<div class="scroll"><table class="samples"><thead><tr><th>step</th><th>prompt</th>'
        f"<th>completion</th><th>reward</th></tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _counts(run: RunData) -> str:
    if not run.metrics:
        return ""
    row = run.metrics[-1]
    wanted = ("ledger/", "rollout_corr/", "response/", "weights/")
    found = {k: row[k] for k in sorted(row) if k.startswith(wanted)}
    return mapping_table("At the last step", {k: nice(number_of(v)) for k, v in found.items()})


def _environment(run: RunData) -> str:
    return mapping_table("Environment", flatten(run.environment))


def _job(run: RunData) -> str:
    return mapping_table("Job", flatten(run.job))


def flatten(value: Row, prefix: str = "") -> dict[str, str]:
    """Nested mappings as dotted keys; lists as they would be written."""
    flat: dict[str, str] = {}
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, Mapping) and item:
            flat.update(flatten(item, f"{name}."))
        else:
            flat[name] = "–" if item is None else str(item)
    return flat


def mapping_table(title: str, rows: Mapping[str, str]) -> str:
    """Keys and values, folded away under a title; nothing where there are none."""
    if not rows:
        return ""
    body = "".join(
        f"<tr><th>{escape(key)}</th><td>{escape(value)}</td></tr>" for key, value in rows.items()
    )
    return f"<details><summary>{escape(title)}</summary><table>{body}</table></details>"


def _pair(run: RunData, first: str, second: str) -> str:
    return f"{nice(_mean(run.column(first)))} / {nice(_mean(run.column(second)))}"


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = finite(values)
    return sum(numbers) / len(numbers) if numbers else None


def _elapsed(run: RunData) -> float | None:
    """Seconds from the start of the first step to the end of the last."""
    times = finite(run.column("time"))
    if not times:
        return None
    return times[-1] - times[0] + (number_of(run.metrics[0].get("timing_s/step")) or 0.0)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _at(job: Row, section: str, key: str) -> object:
    part = job.get(section)
    return part.get(key) if isinstance(part, Mapping) else None
