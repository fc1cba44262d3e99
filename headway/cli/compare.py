"""`headway compare RUN_A RUN_B`: two evaluations, prompt by prompt."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from headway.cli.exits import SUCCEEDED
from headway.cli.options import as_json
from headway.cli.runs import find_run, runs_dir
from headway.errors import InvalidSpec
from headway.evaluation.compare import Comparison, compare
from headway.evaluation.finished import Evaluation, differences, read_evaluation
from headway.evaluation.report import write_comparison
from headway.evaluation.text import comparison_lines


@click.command("compare")
@click.argument("run_a", metavar="RUN_A")
@click.argument("run_b", metavar="RUN_B")
@runs_dir
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False),
    help="The page to write. Default: compare-RUN_A.html in the folder of RUN_B.",
)  # fmt: skip
@as_json
def command(run_a: str, run_b: str, runs_dir: Path, out: Path | None, as_json: bool) -> int:
    """Compare two evaluations on the prompts that both were asked: B against A.

    A run is a run folder or a job's id; RUN:V is the evaluation of weight version V of a
    training run, by default its newest. Needs no fleet.
    """
    a, b = evaluation_of(run_a, runs_dir), evaluation_of(run_b, runs_dir)
    show_comparison(a, b, out, as_json)
    return SUCCEEDED


def evaluation_of(run: str, folder: Path) -> Evaluation:
    """The evaluation that `RUN` or `RUN:VERSION` means."""
    path, colon, version = run.rpartition(":")
    if colon and version.isdecimal() and not Path(run).exists():
        return read_evaluation(find_run(path, folder), int(version))
    return read_evaluation(find_run(run, folder))


def show_comparison(a: Evaluation, b: Evaluation, out: Path | None, as_json: bool) -> None:
    """Prints the comparison and writes its page. InvalidSpec when nothing can be compared."""
    if a.run_dir == b.run_dir and a.version == b.version:
        raise InvalidSpec(f"{a.name} is both: name two evaluations")
    found = compare(a.records(), b.records(), b.pass_reward)
    target = out or b.run_dir / f"compare-{a.run_dir.name}{_at(a, b)}.html"
    write_comparison(target, a, b, found)
    if as_json:
        click.echo(json.dumps(_plain(a, b, found, target), indent=2))
        return
    for line in comparison_lines(found, f"{a.name} ({a.model})", f"{b.name} ({b.model})"):
        click.echo(line)
    for line in differences(a, b):
        click.echo(f"not the same in both: {line}")
    click.echo(f"report {target}")


def _at(a: Evaluation, b: Evaluation) -> str:
    """What keeps the pages of several versions of a run apart."""
    return f"-{a.version}-{b.version}" if a.version or b.version else ""


def _plain(a: Evaluation, b: Evaluation, found: Comparison, target: Path) -> dict[str, object]:
    return {
        "a": {"run_dir": str(a.run_dir), "version": a.version, "model": a.model},
        "b": {"run_dir": str(b.run_dir), "version": b.version, "model": b.model},
        **asdict(found),
        "not_the_same": differences(a, b),
        "report": str(target),
    }
