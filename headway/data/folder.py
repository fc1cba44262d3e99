"""A Hugging Face data set's folder as one source: its split's files, one after the other."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Any

from headway.data.files import Arrow, JsonLines, Parquet
from headway.data.layout import Files
from headway.data.source import Row, Source
from headway.errors import InvalidSpec


class Folder:
    """The rows of all files of a split."""

    def __init__(self, folder: Path, files: Files, prompt_key: str = "prompt") -> None:
        """Reads and checks all files. InvalidSpec names file and row."""
        self._folder = folder
        self._parts: list[Source] = [_open(path, prompt_key) for path in files]
        self._ends = list(accumulate(len(part) for part in self._parts))

    def __len__(self) -> int:
        return self._ends[-1]

    def row(self, index: int) -> Row:
        """One row as plain values."""
        part = bisect_right(self._ends, index)
        return self._parts[part].row(index - (self._ends[part - 1] if part else 0))

    def describe(self) -> dict[str, Any]:
        """Folder, rows, and each file with its SHA-256."""
        files = [part.describe() for part in self._parts]
        return {
            "source": "huggingface",
            "folder": str(self._folder),
            "rows": len(self),
            "files": files,
        }


def _open(path: Path, prompt_key: str) -> Source:
    if not path.is_file():
        raise InvalidSpec(f"{path}: there is no such file")
    kinds = {".parquet": Parquet, ".arrow": Arrow}
    return kinds.get(path.suffix, JsonLines)(path, prompt_key)
