"""What a user names in an evaluation: models, runs and data sets. Nothing is fetched or started."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.data.layout import read_layout
from headway.errors import InvalidSpec, NotFound
from headway.jobspec import JobSpec, load_job
from headway.models import check_model
from headway.plan_data import reasoning_gym_datasets
from headway.suggestions import near
from headway.yamls import load_yaml

HELD_OUT_SEED = 987_654_321
"""Of generated problems that a run is asked and was not trained on."""

_SUFFIXES = {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
_PREFERRED_SPLITS = ("test", "validation")


@dataclass(frozen=True, slots=True)
class Subject:
    """What is evaluated: a model's path, and the run that it comes from, if any."""

    path: str
    run_dir: Path | None = None
    job: JobSpec | None = None  # the run's


def subject(name: str, runs_dir: Path) -> Subject:
    """A run (its folder or id) or a model (as in `model.path`).

    A run that trains is its exported model, an eval job's the model that it asked. InvalidSpec
    when there is no such thing, or the run has no model yet.
    """
    run_dir = find(name, runs_dir)
    if run_dir is None:
        if check_model(name, "MODEL") == "folder":
            name = str(Path(name).expanduser().absolute())
        return Subject(name)
    job = load_job(run_dir / "job.yaml")
    if job.kind == "eval":
        return Subject(job.model.path, run_dir, job)
    for folder in (run_dir / "model", run_dir / "export"):
        if (folder / "config.json").is_file():
            return Subject(str(folder), run_dir, job)
    raise InvalidSpec(
        f"{run_dir} has no model yet: write one of its checkpoints by `headway export {name}`"
    )


def find(name: str, runs_dir: Path) -> Path | None:
    """The run folder of that path or id; None when there is none."""
    folders = (Path(name), runs_dir / name)
    found = next((each for each in folders if (each / "job.yaml").is_file()), None)
    return found.absolute() if found is not None else None


def data_of(text: str) -> dict[str, Any]:
    """One `--data`: a file, a data set's folder (`FOLDER:SPLIT`), a reasoning_gym name, or a
    mapping in YAML with the keys of `evaluation.data`. InvalidSpec names what it could be.
    """
    if text.lstrip().startswith("{"):
        return _mapping(text)
    path, colon, split = text.rpartition(":")
    given = Path(text).expanduser()
    folder = Path(path).expanduser() if colon and not given.exists() else given
    if folder.is_dir():
        return _folder(folder, split if folder != given else None)
    if given.suffix in _SUFFIXES:
        if not given.is_file():
            raise NotFound(f"--data {text}: there is no such file")
        return {"source": _SUFFIXES[given.suffix], "name": str(given.absolute())}
    return _generated(text)


def held_out_of(job: JobSpec, limit: int | None) -> list[dict[str, Any]]:
    """What a run that names no held-out data is evaluated on: problems of its generator from a
    seed of their own. InvalidSpec when its data is a file.
    """
    if job.data.source != "reasoning_gym":
        raise InvalidSpec(
            f"the run was trained on {job.data.name} and names no held-out data: say --data"
        )
    return [
        {
            "source": "reasoning_gym",
            "name": job.data.name,
            "config": dict(job.data.config),
            "seed": HELD_OUT_SEED,
            "size": limit or 200,
            "system_prompt": job.data.system_prompt,
            "suffix": job.data.suffix,
        }
    ]


def _mapping(text: str) -> dict[str, Any]:
    try:
        value = load_yaml(text)
    except InvalidSpec as error:
        raise InvalidSpec(f"--data {text[:80]}: not YAML: {error}") from None
    if not isinstance(value, dict):
        raise InvalidSpec(f"--data {text[:80]}: not a mapping")
    source, name = value.get("source"), value.get("name")
    if source != "reasoning_gym" and isinstance(name, str):
        value["name"] = str(Path(name).expanduser().absolute())
    return value


def _folder(folder: Path, split: str | None) -> dict[str, Any]:
    """A data set's folder; of several splits the test split, or validation, where none is named."""
    layout = read_layout(folder)
    config: dict[str, Any] = {}
    if len(layout) == 1 and split is None:
        splits = next(iter(layout.values()))
        split = next((s for s in _PREFERRED_SPLITS if len(splits) > 1 and s in splits), None)
    if split is not None:
        config["split"] = split
    return {"source": "huggingface", "name": str(folder.absolute()), "config": config}


def _generated(name: str) -> dict[str, Any]:
    name = name.removeprefix("reasoning_gym:")
    spec = importlib.util.find_spec("reasoning_gym")
    if spec is not None and spec.origin is not None:
        known = reasoning_gym_datasets(Path(spec.origin).parent)
        if name not in known:
            raise InvalidSpec(
                f"--data {name}: no file, no folder, and no data set of reasoning_gym"
                f"{near(name, known)}"
            )
    return {"source": "reasoning_gym", "name": name}
