"""What a source of prompts is, and the one place that picks it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from headway.errors import InvalidSpec
from headway.jobspec import DataSpec, EvalDataSpec
from headway.messages import JsonObject
from headway.models import look_at


@dataclass(frozen=True, slots=True)
class Row:
    """One problem: chat messages or plain text to ask, and what a grader needs to know."""

    prompt: list[dict[str, Any]] | str
    item: JsonObject


class Source(Protocol):
    """A finite list of problems with random access; the same index, the same row."""

    def __len__(self) -> int:
        """How many rows."""

    def row(self, index: int) -> Row:
        """Row `index`, `0 <= index < len`."""

    def describe(self) -> dict[str, Any]:
        """What the data is, for the run's record: enough to know it again."""


def open_source(spec: DataSpec | EvalDataSpec, key: str = "data") -> Source:
    """The source a job names under `key`. InvalidSpec when it does not exist or is damaged."""
    if spec.source == "reasoning_gym":
        from headway.data.generated import ReasoningGym

        return ReasoningGym(spec.name, dict(spec.config), seed=spec.seed, size=spec.size)
    path = look_at(spec.name, f"{key}.name")
    if spec.source == "huggingface":
        from headway.data.folder import Folder
        from headway.data.layout import pick

        if not path.is_dir():
            raise InvalidSpec(f"{key}.name {spec.name!r}: there is no such folder")
        return Folder(path, pick(path, **_layout(spec, key), key=key), spec.prompt_key)
    if spec.config:
        raise InvalidSpec(f"{key}.config is for reasoning_gym; a {spec.source} file takes none")
    if not path.is_file():
        raise InvalidSpec(f"{key}.name {spec.name!r}: there is no such file")
    if spec.source == "jsonl":
        from headway.data.files import JsonLines

        return JsonLines(path, spec.prompt_key)
    from headway.data.files import Parquet

    return Parquet(path, spec.prompt_key)


def _layout(spec: DataSpec | EvalDataSpec, key: str) -> dict[str, str | None]:
    """Which part of a folder is meant: its `config.name` and `config.split`."""
    for name, value in spec.config.items():
        if name not in ("name", "split"):
            raise InvalidSpec(f"unknown key {key}.config.{name}: a folder takes name and split")
        if not isinstance(value, str):
            raise InvalidSpec(f"{key}.config.{name}: {value!r} is no text")
    return {"name": spec.config.get("name"), "split": spec.config.get("split")}
