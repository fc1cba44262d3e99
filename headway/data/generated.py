"""Problems from reasoning_gym's generators: any of its data sets by name."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from headway.data.plain import plain
from headway.data.source import Row
from headway.errors import InvalidSpec, Unavailable

_OURS = {"seed": "data.seed", "size": "data.size"}


class ReasoningGym:
    """`size` problems of one generator; problem i depends on (seed, i) alone."""

    def __init__(self, name: str, config: dict[str, Any], *, seed: int, size: int) -> None:
        """Checks name and config. InvalidSpec names the nearest known one."""
        try:
            from reasoning_gym import create_dataset
            from reasoning_gym.factory import DATASETS
        except ImportError:
            raise Unavailable("reasoning_gym is not installed: pip install reasoning-gym") from None
        if name not in DATASETS:
            raise InvalidSpec(
                f"data.name {name!r} is no reasoning_gym data set{_nearest(name, list(DATASETS))}"
            )
        config_class = DATASETS[name][1]
        known = [f.name for f in dataclasses.fields(config_class) if f.name not in _OURS]
        for key in config:
            if key in _OURS:
                raise InvalidSpec(f"data.config.{key}: write {_OURS[key]} instead")
            if key not in known:
                raise InvalidSpec(f"unknown key data.config.{key}{_nearest(key, known)}")
        self._name, self._config, self._seed, self._size = name, config, seed, size
        try:
            given = _composed(config) if name == "composite" else config
            self._dataset = create_dataset(name, seed=seed, size=size, **given)
            first = self._dataset[0]
        except Exception as error:  # a generator given what it cannot use raises anything
            raise InvalidSpec(f"data.config of {name}: {error or type(error).__name__}") from None
        if not isinstance(first.get("question"), str):
            raise InvalidSpec(f"data.name {name!r} makes no text questions")

    def __len__(self) -> int:
        return self._size

    def row(self, index: int) -> Row:
        """The question as a user's message; answer and metadata in the item."""
        entry = self._dataset[index]
        item: dict[str, Any] = plain(entry)
        item["dataset"] = self._name
        return Row([{"role": "user", "content": entry["question"]}], item)

    def describe(self) -> dict[str, Any]:
        """Generator, config, seed, size and the version that generated."""
        import reasoning_gym

        return {
            "source": "reasoning_gym",
            "name": self._name,
            "config": plain(self._config),
            "seed": self._seed,
            "size": self._size,
            "version": str(reasoning_gym.__version__),
        }


def _composed(config: dict[str, Any]) -> dict[str, Any]:
    from reasoning_gym.composite import DatasetSpec

    return {**config, "datasets": [DatasetSpec(**part) for part in config.get("datasets", [])]}


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f" (did you mean {near[0]}?)" if near else f" (known: {', '.join(sorted(known)[:200])})"
