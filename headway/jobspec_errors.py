"""What is wrong with a job as it was written, in words that name the key."""

from __future__ import annotations

import difflib
from typing import Any, get_args, get_origin

from pydantic import BaseModel


def explain(error: Any, job: type[BaseModel]) -> str:
    """One of pydantic's errors; an unknown key gets the nearest known one of `job`."""
    path = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"unknown key {path}{_suggest(error['loc'], job)}"
    if error["type"] == "missing":
        return f"missing key {path}"
    message = error["msg"].removeprefix("Value error, ")
    return f"{path}: {message}" if path else message


def known_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Every dotted key of a job, sections included; a section of a list is named as the list."""
    keys = []
    for name, info in model.model_fields.items():
        keys.append(prefix + name)
        section = section_of(info.annotation)
        if section is not None:
            keys += known_keys(section, f"{prefix}{name}.")
    return keys


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a key holds, also as a list of them."""
    if get_origin(annotation) in (tuple, list):
        annotation = get_args(annotation)[0]
    is_section = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return annotation if is_section else None


def _suggest(loc: tuple[str | int, ...], job: type[BaseModel]) -> str:
    keys = known_keys(job)
    path = ".".join(str(part) for part in loc if not isinstance(part, int))
    section, _, leaf = path.rpartition(".")
    siblings = [k for k in keys if k.rpartition(".")[0] == section]
    leaves = {k.rpartition(".")[2]: k for k in siblings}
    near = [k for k in keys if k.rpartition(".")[2] == leaf]
    near = near or [leaves[k] for k in difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.6)]
    near = near or difflib.get_close_matches(path, keys, n=1, cutoff=0.6)
    return f" (did you mean {near[0]}?)" if near else ""
