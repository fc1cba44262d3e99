"""The prompts of an evaluation: data sets in order, each prompt with its table and grader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.data.chat import compose
from headway.data.source import Source, open_source
from headway.errors import InvalidSpec
from headway.evaluation.spec import EvalDataSpec

MAX_NAME = 200
"""Characters of a table's name."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt of an evaluation. `data_source` and `index` are its own in all data sets."""

    data_source: str
    index: int  # row in its data set
    prompt: Any  # as it is asked: chat messages or a string
    item: Mapping[str, Any]
    grader: Mapping[str, Any]


class HeldOut:
    """One data set of an evaluation, with random access."""

    def __init__(self, spec: EvalDataSpec, grader: Mapping[str, Any], key: str) -> None:
        """Opens and checks it. `grader` is for where it has none; `key` is the job's, for messages.

        InvalidSpec when it does not exist or is damaged.
        """
        self._spec = spec
        self._grader = spec.grader if spec.grader is not None else grader
        self.source: Source = open_source(spec, key)

    def __len__(self) -> int:
        rows = len(self.source)
        return min(rows, self._spec.limit or rows)

    def row(self, index: int) -> Asked:
        """Row `index`, `0 <= index < len`."""
        row = self.source.row(index)
        return Asked(
            data_source=table_of(self._spec, row.item),
            index=index,
            prompt=compose(row.prompt, self._spec.system_prompt, self._spec.suffix),
            item=row.item,
            grader=self._grader,
        )


def open_held_out(data: Sequence[EvalDataSpec], grader: Mapping[str, Any]) -> list[HeldOut]:
    """All data sets of a job's `evaluation.data`; `grader` is the job's own."""
    return [HeldOut(spec, grader, f"evaluation.data.{i}") for i, spec in enumerate(data)]


def asked(data: Sequence[HeldOut]) -> Iterator[Asked]:
    """Every prompt, one data set after the other.

    InvalidSpec when two data sets have a table and a row in common: their prompts could not be
    told apart.
    """
    seen: set[tuple[str, int]] = set()
    for each in data:
        for index in range(len(each)):
            prompt = each.row(index)
            if (prompt.data_source, index) in seen:
                raise InvalidSpec(
                    f"evaluation.data: two data sets are in the table {prompt.data_source!r}: give"
                    " one a data_source of its own"
                )
            seen.add((prompt.data_source, index))
            yield prompt


def table_of(spec: EvalDataSpec, item: Mapping[str, Any]) -> str:
    """The table that a row counts in: as the job says, or the row, or the data set's name.

    Its name can be shown: what no terminal prints becomes `?`.
    """
    own, file = item.get("data_source"), spec.name.rstrip("/")
    if spec.data_source is not None:
        name = spec.data_source
    elif isinstance(own, str) and own:
        name = own
    else:
        name = file if spec.source == "reasoning_gym" else file.rpartition("/")[2]
    return "".join(c if c.isprintable() else "?" for c in name[:MAX_NAME])
