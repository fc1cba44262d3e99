"""YAML of people and for people: plain values only, and what is doubtful is refused."""

from __future__ import annotations

import math
from collections.abc import Hashable
from itertools import count
from typing import Any

import yaml

from headway.errors import InvalidSpec

MAX_DEPTH = 40
_MAX_VALUES = 100_000  # a few hundred bytes of aliases stand for gigabytes


class StrictLoader(yaml.SafeLoader):
    """PyYAML's safe loader, without its habit that the last of two equal keys wins."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """A mapping. A YAML error when a key stands in it twice; `<<` may be overridden."""
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if (key.tag, key.value) in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value} stands here twice", key.start_mark
                    )
                seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


class ReadableDumper(yaml.SafeDumper):
    """PyYAML's safe dumper, with texts of several lines as blocks."""


ReadableDumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)


def dump_yaml(data: Any) -> str:
    """Plain data as YAML, keys in their order."""
    return yaml.dump(data, Dumper=ReadableDumper, sort_keys=False, allow_unicode=True)


def load_yaml(text: str, loader: type[StrictLoader] = StrictLoader) -> Any:
    """The one document in `text`. InvalidSpec, without the file's name, when it is not YAML."""
    try:
        return yaml.load(text, loader)
    except RecursionError:
        raise InvalidSpec("it is nested too deep") from None
    except (ValueError, yaml.YAMLError, AttributeError) as error:
        # AttributeError: PyYAML on a few malformed tags and timestamps.
        raise InvalidSpec(str(error)) from None


def check_plain(value: Any, what: str) -> None:
    """Refuses what JSON cannot say: dates, bytes, sets, NaN, lone surrogates, deep nests.

    Also what aliases make endless or huge. InvalidSpec names the path; `what` is the whole.
    """
    _check(value, "", what, 0, count(1))


def _check(value: Any, path: str, what: str, depth: int, seen: count[int]) -> None:
    if depth > MAX_DEPTH:
        raise InvalidSpec(f"{what} is nested more than {MAX_DEPTH} deep")
    if next(seen) > _MAX_VALUES:
        raise InvalidSpec(f"{what} has more than {_MAX_VALUES} values, aliases written out")
    where = path or what
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise InvalidSpec(f"{where}: the key {key!r} is not a text")
            _check(key, where, what, depth + 1, seen)
            _check(item, f"{path}.{key}" if path else key, what, depth + 1, seen)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check(item, f"{path}.{index}", what, depth + 1, seen)
    else:
        _check_leaf(value, where)


def _check_leaf(value: Any, where: str) -> None:
    if isinstance(value, str):
        if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
            raise InvalidSpec(f"{where!a}: half of a surrogate pair is not a character")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidSpec(f"{where}: {value} is not a number")
    elif value is not None and not isinstance(value, bool | int):
        kind = type(value).__name__
        raise InvalidSpec(f"{where}: a {kind} cannot stand here; put it in quotes")
