"""One rank of a replay: `python -m services.learner.replay`. Started by `headway replay`.

Trains the groups that a run recorded, from the run's own base model, into a folder like a
run's. Needs neither fleet nor Redis. Exit codes: 0 trained to the end, 1 not, 2 it cannot be
trained from what is here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headway.errors import HeadwayError, InvalidSpec, TrainingDiverged
from headway.jobspec import JobSpec, load_job
from headway.lifecycle import die_with_parent
from headway.replay import DIGEST, changes, compare
from headway.report_data import is_validation, json_lines
from headway.telemetry import configure_logging
from services.learner.recording import RecordedStep, count_steps, read_steps
from services.learner.run_folder import RunFolder, write_whole
from services.learner.train import RankSettings
from services.learner.trainer_settings import TrainerSettings

TRAINED, FAILED, BAD = 0, 1, 2


def main(argv: list[str] | None = None) -> int:
    """Runs one rank to its end; returns its exit code."""
    parser = argparse.ArgumentParser(prog="services.learner.replay", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True, help="the run to train again")
    parser.add_argument(
        "--replay-dir", type=Path, required=True, help="holds the replay's job.yaml"
    )
    parser.add_argument("--steps", type=int, default=None, help="only so many")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--store-port", type=int, default=0, help="needed with several ranks")
    args = parser.parse_args(argv)
    die_with_parent()
    configure_logging("replay", "warning")
    run, target = RunFolder(args.run_dir), RunFolder(args.replay_dir)
    try:
        spec = load_job(target.job)
        started = _first_start(run)
        settings = RankSettings(
            job_id=args.run_dir.name,
            redis_url="",
            run_dir=args.replay_dir,
            rank=args.rank,
            world=spec.actor.num_ranks,
            store_port=args.store_port,
            host="127.0.0.1",
            trainer=TrainerSettings(started["learner"].get("trainer", "fsdp")),
        )
        # Heavy imports come after the settings are known to be good.
        import torch

        if threads := started["learner"].get("threads"):
            torch.set_num_threads(threads)  # sums are split by it, and rounded accordingly
        if args.rank:
            _follow(spec, settings, run)
        else:
            asyncio.run(_lead(spec, settings, run, target, args.steps))
        return TRAINED
    except HeadwayError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD if error.kind in ("invalid", "not_found") else FAILED


def _first_start(run: RunFolder) -> Mapping[str, Any]:
    """What the run's first start found. InvalidSpec when there is nothing to train again."""
    starts = run.starts()
    if not starts:
        raise InvalidSpec(f"{run.environment} is missing: it says which base model the run had")
    if not count_steps(run.groups):
        raise InvalidSpec(
            f"{run.groups} holds no step: the run recorded none (trainer.max_record_gib)"
        )
    return starts[0]


async def _lead(
    spec: JobSpec, settings: RankSettings, run: RunFolder, target: RunFolder, limit: int | None
) -> None:
    from services.learner.crew import Crew
    from services.learner.lead import checkpointer
    from services.learner.seat import seat
    from services.learner.trainers import base_folder, build_trainer, critic_facts

    folder = base_folder(spec, settings)
    critic = critic_facts(spec, settings)
    _check_base(folder, critic, settings, run)
    seat(spec, settings)
    trainer, share = build_trainer(spec, settings, folder)
    crew = Crew(trainer, share, checkpointer(spec, target), settings.world)
    _write_environment(spec, settings, folder, critic, run, target)
    known = {int(row["step"]): row for row in json_lines(run.metrics) if not is_validation(row)}
    total = min(count_steps(run.groups), len(known), limit or spec.trainer.total_training_steps)
    nonfinite = 0
    for step, recorded in zip(range(total), read_steps(run.groups), strict=False):
        row = await _train(crew, step, recorded)
        target.append_metrics(row)
        print(f"step {step + 1} of {total}: {_judged(row, known.get(step + 1, {}))}", flush=True)
        nonfinite = nonfinite + 1 if row["actor/skipped"] else 0
        if nonfinite >= spec.actor.max_nonfinite_steps:
            raise TrainingDiverged(f"loss or gradient was not finite in {nonfinite} steps in a row")
    if spec.trainer.export:
        await crew.export(target.model)
    await crew.dismiss()
    _write_comparison(spec, folder, run, target)


async def _train(crew: Any, step: int, recorded: RecordedStep) -> dict[str, Any]:
    from headway.payloads import unpack_group
    from services.learner.metrics import group_metrics, lag_metrics

    began = time.monotonic()
    groups = {
        ticket_id: unpack_group(payload)
        for ticket_id, payload in zip(recorded.ticket_ids, recorded.payloads, strict=True)
    }
    figures, digest = await crew.train(step, groups, recorded.late)
    batch = list(groups.values())
    return {
        "step": step + 1,
        "version": step,
        "time": time.time(),
        **group_metrics(batch),
        **lag_metrics(step, batch),
        **figures,
        **({DIGEST: digest} if digest else {}),
        "training/late_groups": float(len(recorded.late)),
        "timing_s/train": time.monotonic() - began,
        "timing_s/step": time.monotonic() - began,
    }


def _follow(spec: JobSpec, settings: RankSettings, run: RunFolder) -> None:
    from services.learner.crew import follow
    from services.learner.lead import checkpointer
    from services.learner.seat import seat
    from services.learner.trainers import base_folder, build_trainer

    seat(spec, settings)
    trainer, share = build_trainer(spec, settings, base_folder(spec, settings))
    target = RunFolder(settings.run_dir)
    steps = enumerate(read_steps(run.groups))

    async def fetch(step: int, ids: Sequence[int]) -> list[bytes]:
        recorded = next(recorded for at, recorded in steps if at == step)
        payloads = dict(zip(recorded.ticket_ids, recorded.payloads, strict=True))
        return [payloads[ticket_id] for ticket_id in ids]

    with asyncio.Runner() as runner:
        follow(trainer, share, checkpointer(spec, target), fetch, target, settings.rank, runner)


def _check_base(
    folder: Path, critic: Mapping[str, str] | None, settings: RankSettings, run: RunFolder
) -> None:
    from headway.models import model_digest

    if settings.trainer.kind == "sim":
        return
    model = run.starts()[0]["model"]
    if model_digest(folder) != model["sha256"]:
        raise InvalidSpec(
            f"{folder} is not the model that the run started from: its files have changed"
            f" (SHA-256 {model_digest(folder)[:12]}…, the run had {model['sha256'][:12]}…)"
        )
    known = run.starts()[0].get("critic")
    if critic is None or known is None or critic["path"] != known["path"]:
        return
    if critic["sha256"] != known["sha256"]:
        raise InvalidSpec(
            f"{critic['folder']} is not what the run's critic started from: its files have changed"
        )


def _write_environment(
    spec: JobSpec,
    settings: RankSettings,
    folder: Path,
    critic: Mapping[str, str] | None,
    run: RunFolder,
    target: RunFolder,
) -> None:
    from services.learner import environment

    first = run.starts()[0]
    target.write_environment(
        {
            "replay_of": str(run.path),
            **environment.software(),
            "learner": environment.learner(spec, settings.trainer.kind),
            "model": {**first["model"], "folder": str(folder)},
            **({"critic": dict(critic)} if critic else {}),
            "data": first["data"],
            "custom": environment.custom_code(spec.algorithm.custom),
            "job": {"sha256": spec.digest()},
        }
    )


def _write_comparison(spec: JobSpec, folder: Path, run: RunFolder, target: RunFolder) -> None:
    from services.learner.export import distance

    rows = [
        [row for row in json_lines(path) if not is_validation(row)]
        for path in (run.metrics, target.metrics)
    ]
    comparison = compare(rows[0], rows[1], changes(load_job(run.job), spec))
    whole = comparison.replay_steps == comparison.run_steps
    weights = None
    if whole and run.model.is_dir() and target.model.is_dir() and (folder / "config.json").exists():
        weights = {
            "run_moved": distance(run.model, folder),
            "replay_moved": distance(target.model, folder),
            "apart": distance(run.model, target.model),
        }
    facts = {**asdict(comparison), "weights": weights, "elsewhere": _elsewhere(run, target)}
    write_whole(target.path / "comparison.json", json.dumps(facts, indent=2) + "\n")


def _elsewhere(run: RunFolder, target: RunFolder) -> list[str]:
    """What was not the same when the run was made, and can change a bit."""
    here = target.starts()[-1]
    said = [
        f"{what}: {start[section].get(name)} in the run, {here[section].get(name)} here"
        for start in run.starts()
        for what, section, name in (
            ("torch", "packages", "torch"),
            ("processor", "machine", "processor"),
            ("threads a rank", "learner", "threads"),
            ("compute dtype", "learner", "compute_dtype"),
        )
        if start[section].get(name) != here[section].get(name)
    ]
    if any(start.get("custom") != here.get("custom") for start in run.starts()):
        said.append("the code of algorithm.custom")
    return list(dict.fromkeys(said))


def _judged(row: Mapping[str, Any], known: Mapping[str, Any]) -> str:
    said = ", ".join(
        f"{what} {row[name]:.4g}"
        for what, name in (("loss", "actor/pg_loss"), ("gradient norm", "actor/grad_norm"))
        if name in row
    )
    if not (known.get(DIGEST) and row.get(DIGEST)):
        return said
    same = known[DIGEST] == row[DIGEST]
    return f"{said}; weights {'as in the run' if same else 'differ from the run'}"


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a thread of torch or a broken collective must not hold the process back
