"""TRL: a Headway grader as a reward function.

    trainer = GRPOTrainer(..., reward_funcs=HeadwayReward({"type": "numeric"}, "http://reward:8080"))

The data set's columns are the item. A completion that cannot be scored gets None, which TRL leaves
out; completions of one prompt are one group, for graders that compare them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from headway.adapters.scoring import Grading, null_fraction
from headway.messages import ScoreItem

# What TRL passes besides the data set's columns.
_NOT_COLUMNS = frozenset({"trainer_state", "environments", "log_extra"})


class HeadwayReward:
    """TRL's `f(prompts, completions, **columns) -> list[float | None]`."""

    def __init__(
        self,
        grader: Mapping[str, Any] | str,
        address: str | None = None,
        name: str = "headway_reward",
    ) -> None:
        """`name`: TRL logs the reward as `rewards/<name>`. See `Grading` for the rest."""
        self._grading = Grading(grader, address)
        self.__name__ = name

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """One reward a completion, None where there is none; those are logged as a fraction."""
        rows = {
            name: values
            for name, values in columns.items()
            if name not in _NOT_COLUMNS
            and isinstance(values, (list, tuple))
            and len(values) == len(completions)
        }
        items = []
        for place, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            item = {name: values[place] for name, values in rows.items()}
            group = json.dumps([prompt, item], sort_keys=True, default=str)
            length = len(completion_ids[place]) if completion_ids is not None else None
            items.append(ScoreItem(prompt, _text(completion), item, group, length))
        rewards = [score.reward for score in self._grading.score(_numbered(items))]
        if log_metric is not None:
            log_metric(f"rewards/{self.__name__}/null", null_fraction(rewards))
        return rewards


def _numbered(items: Sequence[ScoreItem]) -> list[ScoreItem]:
    """The same with short names of groups."""
    numbers: dict[str, int] = {}
    return [
        replace(item, group=f"g{numbers.setdefault(item.group, len(numbers))}") for item in items
    ]


def _text(completion: Any) -> str:
    """What was said: a text, or the assistant's messages of a conversation."""
    if isinstance(completion, str):
        return completion
    said = [m.get("content") for m in completion if m.get("role") == "assistant"]
    return "".join(_content(content) for content in said)


def _content(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content or "")
