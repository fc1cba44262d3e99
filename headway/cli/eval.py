"""`headway eval MODEL`: a model or a run on data sets, in one command."""

from __future__ import annotations

import json
import sys
from contextlib import closing, redirect_stdout
from pathlib import Path
from typing import Any

import click

from headway.cli.compare import show_comparison
from headway.cli.evaluated import show_evaluation
from headway.cli.exits import FAILED, SUCCEEDED, exit_code_of_job
from headway.cli.interrupts import counting_interrupts
from headway.cli.options import (
    as_json,
    fleet_options,
    fleet_spec,
    overrides,
    parse_override,
    read_job,
)
from headway.cli.running import run_jobs, tell_end
from headway.errors import InvalidSpec, NotFound
from headway.evaluation.build import Wishes, job_of, same_for
from headway.evaluation.finished import Evaluation, is_eval_job, read_evaluation
from headway.evaluation.names import val_metrics
from headway.evaluation.request import data_of, find, subject
from headway.graders import validate_grader
from headway.graders.sources import with_sources
from headway.jobs import JobRecord
from headway.jobspec import JobSpec
from headway.yamls import load_yaml

_SAID = ("n", "temperature", "top_p", "max_tokens", "limit", "seed", "system_prompt")


@click.command("eval")
@click.argument("model", metavar="MODEL_OR_RUN")
@click.option("--data", multiple=True, help="A file, folder[:SPLIT] or reasoning_gym name. Repeat.")
@click.option("--job", type=click.Path(path_type=Path), help="An eval job to take the rest from.")
@click.option("--grader", help="JSON, or a file with it. Default: the run's, or the data's own.")
@click.option("-n", "n", type=click.IntRange(1), help="Completions a prompt. Default: 1.")
@click.option("--temperature", type=click.FloatRange(0), help="Default: 0 (greedy); 1 with -n.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), help="Default: 1.")
@click.option("--max-tokens", type=click.IntRange(1), help="Of a completion. Default: 256.")
@click.option("--limit", type=click.IntRange(1), help="Only so many prompts of each data set.")
@click.option("--seed", type=click.IntRange(0), help="Of the sampling. Default: 0.")
@click.option("--system-prompt", help="Before each conversation.")
@click.option("--compare", "other", metavar="OTHER", help="A model, run or evaluation to beat.")
@click.option("--url", help="The coordinator of another fleet. Default: as `headway run`.")
@overrides
@as_json
@fleet_options
def command(
    model: str,
    data: tuple[str, ...],
    job: Path | None,
    grader: str | None,
    other: str | None,
    url: str | None,
    overrides: tuple[str, ...],
    as_json: bool,
    **more: Any,
) -> int:
    """Evaluate a model, or what a run has trained, on data sets.

    MODEL_OR_RUN is a model as in `model.path`, a run folder or a run's id. Without --data and
    --job a run is asked its own held-out data, or problems of its generator from another seed.
    Uses the fleet that is up on this machine, or starts one, as `headway run` does.
    """
    said = {name: more.pop(name) for name in _SAID}
    wishes = Wishes(
        job=None if job is None else _eval_job(job),
        data=tuple(data_of(text) for text in data),
        grader=None if grader is None else grader_of(grader),
        overrides=tuple(parse_override(text) for text in overrides),
        **said,
    )
    runs_dir: Path = more["runs_dir"]
    jobs = [job_of(subject(model, runs_dir), wishes)]
    rival = find(other, runs_dir) if other is not None else None
    base = read_evaluation(rival) if rival is not None and is_eval_job(rival) else None
    if other is not None and base is None:
        jobs.append(same_for(jobs[0], subject(other, runs_dir)))
    with counting_interrupts() as interrupts:
        running = run_jobs(fleet_spec(**more, ephemeral=True), jobs, interrupts, url)
        with closing(running), redirect_stdout(sys.stderr if as_json else sys.stdout):
            records = list(running)
    found = [_finished(each, as_json) for each in records if each.state == "succeeded"]
    if len(found) < len(jobs):
        tell_end(records[-1])
        return exit_code_of_job(records[-1]) or FAILED
    if other is not None:
        show_comparison(base or found[1], found[0], None, as_json)
    elif as_json:
        click.echo(json.dumps(_plain(found[0]), indent=2))
    return SUCCEEDED


def grader_of(text: str) -> dict[str, Any]:
    """A grader from JSON (or YAML), or from the file of that name. InvalidSpec.

    The `path` of a function counts from that file's folder, or else from where we are.
    """
    source, folder = text, Path()
    if not text.lstrip().startswith("{"):
        try:
            file = Path(text).expanduser()
            source, folder = file.read_text(encoding="utf-8-sig"), file.parent
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidSpec(f"--grader {text}: neither JSON nor a file: {error}") from None
    try:
        raw = load_yaml(source)
    except InvalidSpec as error:
        raise InvalidSpec(f"--grader is not JSON: {error}") from None
    grader: dict[str, Any] = with_sources(raw, folder)
    validate_grader(grader, path="--grader")
    return grader


def _eval_job(path: Path) -> JobSpec:
    job = read_job(path, ())
    if job.kind != "eval":
        raise InvalidSpec(f"--job {path}: a job that trains; one of `kind: eval` is wanted")
    return job


def _finished(record: JobRecord, quiet: bool) -> Evaluation:
    """The evaluation that a job has left. NotFound when its run folder is on another machine."""
    run_dir = Path(record.run_dir or "")
    if not record.run_dir or not run_dir.is_dir():
        raise NotFound(
            f"job {record.job_id} succeeded, and its run folder {record.run_dir} is not on this"
            " machine: `headway report` makes the tables where it is"
        )
    return show_evaluation(run_dir, quiet)


def _plain(evaluation: Evaluation) -> dict[str, Any]:
    return {
        "run_dir": str(evaluation.run_dir),
        "model": evaluation.model,
        "metrics": val_metrics(evaluation.tables),
    }
