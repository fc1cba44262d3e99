"""`headway replay RUN`: trains a run again from the groups it recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from headway.cli.exits import BAD_USAGE, CANCELLED, FAILED, SUCCEEDED
from headway.cli.interrupts import counting_interrupts
from headway.cli.options import as_json, overrides, parse_override
from headway.cli.runs import find_run, runs_dir
from headway.errors import Conflict
from headway.jobs import check_job_id
from headway.jobspec import JobSpec, load_job
from headway.ports import free_port
from headway.replay import WITHOUT_EFFECT, Comparison, Figure, as_text, changes
from headway.report import write_report

_LOOK_EVERY_S = 0.1


@click.command("replay")
@click.argument("run", metavar="RUN")
@runs_dir
@overrides
@click.option("--steps", type=click.IntRange(min=1), help="Only the first N steps.")
@click.option("--name", help="Name of the replay's folder. Default: replay-1, replay-2, …")
@as_json
def command(
    run: str,
    runs_dir: Path,
    overrides: tuple[str, ...],
    steps: int | None,
    name: str | None,
    as_json: bool,
) -> int:
    """Train a run again from its recorded groups, bit for bit; or, with --set, otherwise.

    RUN is a run folder or a job's id. Needs no fleet and no Redis. Without --set, exit
    code 1 means that the weights differ from the run's.
    """
    run_dir = find_run(run, runs_dir)
    original = load_job(run_dir / "job.yaml")
    job = load_job(run_dir / "job.yaml", [parse_override(text) for text in overrides])
    changed = changes(original, job)
    target = _make_folder(run_dir / "replays", name)
    (target / "job.yaml").write_text(job.to_yaml(), encoding="utf-8")
    click.echo(f"replay folder {target}", err=True)
    code = _train(job, run_dir, target, steps, quiet=as_json)
    if code != SUCCEEDED:
        return code
    facts = json.loads((target / "comparison.json").read_text(encoding="utf-8"))
    report = write_report(target)
    if as_json:
        click.echo(json.dumps({**facts, "folder": str(target)}, indent=2))
    else:
        _show(facts, report)
    exact = all(key.startswith(WITHOUT_EFFECT) for key in changed)
    return FAILED if exact and facts["verdict"] == "differs" else SUCCEEDED


def _make_folder(replays: Path, name: str | None) -> Path:
    """A new folder. Conflict when the name is taken."""
    names = [check_job_id(name)] if name else (f"replay-{i}" for i in range(1, 10_000))
    replays.mkdir(exist_ok=True)
    for each in names:
        try:
            (replays / each).mkdir()
        except FileExistsError:
            continue
        return replays / each
    raise Conflict(f"{replays / str(name)} is there already: choose another --name")


def _train(job: JobSpec, run_dir: Path, target: Path, steps: int | None, *, quiet: bool) -> int:
    """Runs all ranks to their end; one that fails ends the others. The exit code of the first."""
    world = job.actor.num_ranks
    argv = [
        sys.executable, "-P", "-m", "services.learner.replay", "--run-dir", str(run_dir),
        "--replay-dir", str(target), "--store-port", str(free_port() if world > 1 else 0),
        *(("--steps", str(steps)) if steps else ()),
    ]  # fmt: skip
    env = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    out: Any = subprocess.DEVNULL if quiet else None
    with counting_interrupts() as interrupts:
        ranks = [
            subprocess.Popen(
                [*argv, "--rank", str(rank)],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                start_new_session=True,
            )
            for rank in range(world)
        ]
        try:
            while (code := _ended(ranks)) is None:
                if interrupts():
                    return CANCELLED
                time.sleep(_LOOK_EVERY_S)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    return code if code in (SUCCEEDED, BAD_USAGE) else FAILED


def _ended(ranks: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """The first failure, 0 when all have ended well, None while they work."""
    codes = [process.poll() for process in ranks]
    failed = next((code for code in codes if code), None)
    return failed if failed is not None else None if None in codes else SUCCEEDED


def _show(facts: dict[str, Any], report: Path) -> None:
    figures = tuple(Figure(**figure) for figure in facts["figures"])
    comparison = Comparison(
        run_steps=facts["run_steps"],
        replay_steps=facts["replay_steps"],
        changed={key: (was, now) for key, (was, now) in facts["changed"].items()},
        verdict=facts["verdict"],
        first_difference=facts["first_difference"],
        figures=figures,
    )
    for line in as_text(comparison, facts["weights"]):
        click.echo(line)
    if comparison.verdict == "differs":
        for line in facts["elsewhere"]:
            click.echo(f"not the same as in the run: {line}")
    click.echo(f"report {report}")
