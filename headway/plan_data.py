"""Whether a job's data can be had.

reasoning_gym takes over a second to import, so a misspelt name or setting is found in
its source text, and the data itself is opened with the module of its data set alone.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headway.data.one_of_gym import only_data_set
from headway.data.source import open_source
from headway.errors import InvalidSpec
from headway.graders import GraderSpec, ReasoningGym
from headway.jobspec import DataSpec, EvalDataSpec
from headway.suggestions import near

_PATIENCE_S = 5.0  # of processor time

# `NAME = "word"` at the top level, and `register_dataset(NAME, Dataset, Settings, …)`.
_CONSTANT = re.compile(r"""^(\w+)\s*=\s*["'](\w+)["']""", re.MULTILINE)
_REGISTRATION = re.compile(
    r"""^\s*register_dataset\(\s*(["']?\w+["']?),\s*\w+,\s*(\w+)""", re.MULTILINE
)


def first_item(data: DataSpec | EvalDataSpec, key: str = "data") -> Mapping[str, Any] | None:
    """The first row's item, as graders see it: proof that the data set under `key` can be read.

    InvalidSpec, with the nearest known name, when it cannot. None when reasoning_gym is
    not installed here: then only the fleet can tell.
    """
    if data.source == "reasoning_gym":
        spec = importlib.util.find_spec("reasoning_gym")
        if spec is None or spec.origin is None:
            return None
        package = Path(spec.origin).parent
        with only_data_set(_check_names(data, package, key), package), _soon(data.name, key):
            return open_source(data, key).row(0).item
    return open_source(data, key).row(0).item


class _TooLong(BaseException):
    """Not an Exception: a generator may try again after those."""


@contextmanager
def _soon(name: str, key: str) -> Iterator[None]:
    """InvalidSpec when making the first problem takes too much of the processor.

    Works in the main thread; elsewhere there is no limit.
    """

    def end(*_: object) -> None:
        raise _TooLong

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, _PATIENCE_S)
    try:
        yield
    except _TooLong:
        raise InvalidSpec(
            f"{key}.config of {name}: no problem is made within {_PATIENCE_S:g} s; ask for less"
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def check_grader_data_sets(grader: GraderSpec, path: str) -> None:
    """InvalidSpec when a reasoning_gym grader names a data set that is not there."""
    for where, part in grader.inner().items():
        check_grader_data_sets(part, f"{path}.{where}")
    if isinstance(grader, ReasoningGym) and grader.dataset is not None:
        spec = importlib.util.find_spec("reasoning_gym")
        if spec is not None and spec.origin is not None:
            known = reasoning_gym_datasets(Path(spec.origin).parent)
            if grader.dataset not in known:
                raise InvalidSpec(
                    f"{path}.dataset: reasoning_gym has no data set {grader.dataset!r}"
                    f"{near(grader.dataset, known)}"
                )


def reasoning_gym_datasets(package: Path) -> dict[str, tuple[Path, str]]:
    """Every registered data set: name -> (source file, name of its settings class)."""
    found: dict[str, tuple[Path, str]] = {}
    for file in sorted(package.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        constants = dict(_CONSTANT.findall(text))
        for name, settings in _REGISTRATION.findall(text):
            key = constants.get(name, name.strip("\"'"))
            found[key] = (file, settings)
    return found


def settings_of(file: Path, class_name: str) -> tuple[str, ...]:
    """The fields of a settings dataclass, from its source; empty when it is not in the file."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            return tuple(
                item.target.id
                for item in node.body
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
            )
    return ()


def _check_names(data: DataSpec | EvalDataSpec, package: Path, path: str) -> Path:
    """The file of the data set; InvalidSpec when it or a setting is unknown."""
    known = reasoning_gym_datasets(package)
    if data.name not in known:
        raise InvalidSpec(
            f"{path}.name: reasoning_gym has no data set {data.name!r}{near(data.name, known)}"
        )
    file, settings = known[data.name]
    fields = settings_of(file, settings)
    for key in data.config:
        if key in ("seed", "size"):
            raise InvalidSpec(f"{path}.config.{key}: write {path}.{key} instead")
        if fields and key not in fields:
            has = ", ".join(field for field in fields if field not in ("seed", "size"))
            raise InvalidSpec(
                f"unknown key {path}.config.{key}{near(key, fields)}; {data.name} has {has}"
            )
    return file
