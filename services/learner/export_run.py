"""A run's checkpoint as a Hugging Face folder: `python -m services.learner.export_run`.

Started by `headway export`. Needs no fleet and no GPU, whatever wrote the checkpoint. Exit
codes: 0 written, 1 not, 2 there is nothing to be exported.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from headway.errors import HeadwayError, InvalidSpec, NoCheckpoint, NotFound
from headway.jobspec import JobSpec, load_job
from headway.lifecycle import die_with_parent
from headway.telemetry import configure_logging
from services.learner.run_folder import RunFolder

WRITTEN, FAILED, BAD = 0, 1, 2


def main(argv: list[str] | None = None) -> int:
    """Exports one checkpoint; prints the step it is of. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="services.learner.export_run", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="the folder to be made")
    parser.add_argument("--step", type=int, default=None, help="default: the newest")
    args = parser.parse_args(argv)
    die_with_parent()
    configure_logging("export", "warning")
    run = RunFolder(args.run_dir)
    try:
        spec = load_job(run.job)
        starts = run.starts()
        if starts and starts[0]["learner"].get("trainer", "fsdp") == "sim":
            raise InvalidSpec(f"{run.path} was trained by the sim trainer, which has no model")
        print(export_checkpoint(spec, run, args.out, args.step))
        return WRITTEN
    except HeadwayError as error:
        print(f"error: {error}", file=sys.stderr)
        return (
            BAD if error.kind in ("invalid", "not_found", "no_checkpoint", "conflict") else FAILED
        )
    except OSError as error:
        print(f"error: {args.out} cannot be written: {error}", file=sys.stderr)
        return FAILED


def export_checkpoint(spec: JobSpec, run: RunFolder, target: Path, step: int | None) -> int:
    """Writes the weights of `step` (None: the newest whole checkpoint); gives the step.

    Config and tokenizer are the base model's. NotFound: no such checkpoint; NoCheckpoint:
    it is damaged; InvalidSpec: the base model is not the one that was trained.
    """
    from headway.models import model_digest, resolve_model

    path, found = _choose(spec, run, step)
    source = resolve_model(spec.model.path)
    for start in run.starts()[-1:]:
        if model_digest(source) != start["model"]["sha256"]:
            raise InvalidSpec(f"the files of model.path {spec.model.path} have changed since")
    # Heavy imports come once there is something to be exported.
    from services.learner.checkpoint import Checkpointer
    from services.learner.model import load_policy
    from services.learner.trained import trained_part

    policy = load_policy(source)
    trained = trained_part(policy, spec, source)
    parameters = policy.lm.named_parameters()
    state: dict[str, Any] = {n: p.detach() for n, p in parameters if p.requires_grad}
    Checkpointer(run.checkpoints, keep=1).load(path, {"trainer": {"model": state}})
    weights = {name: tensor.to(trained.dtype) for name, tensor in state.items()}
    trained.write(target, trained.named(weights))
    return found


def _choose(spec: JobSpec, run: RunFolder, step: int | None) -> tuple[Path, int]:
    from services.learner.checkpoint import complete, verified

    paths = complete(run.checkpoints)
    if not paths:
        raise NotFound(f"{run.checkpoints} holds no complete checkpoint")
    if step is not None:
        wanted = [path for path in paths if path.name == f"step-{step}"]
        if not wanted:
            kept = ", ".join(path.name.removeprefix("step-") for path in reversed(paths))
            raise NotFound(f"{run.checkpoints} holds no checkpoint of step {step}; it has {kept}")
        return wanted[0], verified(wanted[0], spec.digest()).step
    damaged: list[str] = []
    for path in paths:
        try:
            return path, verified(path, spec.digest()).step
        except NoCheckpoint as error:
            damaged.append(str(error))
    raise NoCheckpoint("; ".join(damaged))


if __name__ == "__main__":
    sys.exit(main())
