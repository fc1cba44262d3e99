"""Rows of a JSON-lines, parquet or Arrow file, in verl's columns or TRL's.

Both have a column `prompt`: a chat (list of `{role, content}`) or a string. Every
other column goes to the grader as it is: verl's `data_source`, `ability`,
`reward_model`, `extra_info`, or whatever a TRL reward function would be given.
"""

from __future__ import annotations

import hashlib
import json
import os
from io import BufferedReader
from pathlib import Path
from typing import Any

from headway.data.plain import plain
from headway.data.source import Row
from headway.errors import InvalidSpec

_BOM = b"\xef\xbb\xbf"


class JsonLines:
    """A JSON-lines file; a BOM, CRLF and blank lines are tolerated.

    Every line is checked when the file is opened; only offsets are kept in memory. The file
    must stay as it was then: what has changed under a job is not read as if it had not.
    """

    def __init__(self, path: Path, prompt_key: str = "prompt") -> None:
        """Reads the file once. InvalidSpec names file and line of a damaged row."""
        self._path, self._prompt_key = path, prompt_key
        self._where: list[tuple[int, int]] = []  # byte offset, line number in the file
        digest = hashlib.sha256()
        offset = 0
        with path.open("rb") as stream:
            self._stamp = _stamp(stream)
            for number, raw in enumerate(stream, start=1):
                digest.update(raw)
                if raw.removeprefix(_BOM if number == 1 else b"").strip():
                    _row(_parse(raw, path, number), f"{path}:{number}", prompt_key)
                    self._where.append((offset, number))
                offset += len(raw)
        if not self._where:
            raise InvalidSpec(f"{path} has no rows")
        self._sha256 = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._where)

    def row(self, index: int) -> Row:
        """One row, read again from the file. InvalidSpec when the file is another by now."""
        offset, number = self._where[index]
        try:
            stream = self._path.open("rb")
        except OSError as error:
            raise InvalidSpec(f"{self._path}: {error.strerror} since it was opened") from None
        with stream:
            self._check_unchanged(stream)
            stream.seek(offset)
            raw = stream.readline()
        where = f"{self._path}:{number}"
        return _row(_parse(raw, self._path, number), where, self._prompt_key)

    def _check_unchanged(self, stream: BufferedReader) -> None:
        now = _stamp(stream)
        if now == self._stamp:
            return
        if hashlib.file_digest(stream, "sha256").hexdigest() != self._sha256:
            raise InvalidSpec(
                f"{self._path} has changed since it was opened: bring it back, or submit a new job"
            )
        self._stamp = now  # touched, or copied: the same bytes

    def describe(self) -> dict[str, Any]:
        """File, rows, SHA-256 of its bytes."""
        return _described("jsonl", self._path, len(self), self._sha256)


class Parquet:
    """A parquet file, whichever library wrote it; nested values become lists and dicts."""

    kind = "parquet"

    def __init__(self, path: Path, prompt_key: str = "prompt") -> None:
        """Reads and checks the file. InvalidSpec names file and row."""
        self._path, self._prompt_key = path, prompt_key
        table = self._read(path)
        if prompt_key not in table.column_names:
            raise InvalidSpec(
                f"{path} has no column {prompt_key} (columns: {', '.join(table.column_names)})"
            )
        index = [c for c in table.column_names if c.startswith("__index_level_")]
        self._table = table.drop_columns(index)
        if not len(self):
            raise InvalidSpec(f"{path} has no rows")
        for number in range(len(self)):
            self.row(number)
        with path.open("rb") as stream:
            self._sha256 = hashlib.file_digest(stream, "sha256").hexdigest()

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def row(self, index: int) -> Row:
        """One row as plain values."""
        columns = self._table.slice(index, 1).to_pydict(maps_as_pydicts="strict")
        values = {name: plain(column[0]) for name, column in columns.items()}
        return _row(values, f"{self._path}, row {index}", self._prompt_key)

    def describe(self) -> dict[str, Any]:
        """File, rows, SHA-256 of its bytes."""
        return _described(self.kind, self._path, len(self), self._sha256)

    def _read(self, path: Path) -> Any:
        import_pyarrow(path)
        import pyarrow
        import pyarrow.parquet

        try:
            return pyarrow.parquet.read_table(path)
        except (pyarrow.ArrowException, OSError) as error:
            raise InvalidSpec(f"{path} is not a readable parquet file: {_first(error)}") from None


class Arrow(Parquet):
    """An Arrow file, of the stream or the file format, as the `datasets` library writes it."""

    kind = "arrow"

    def _read(self, path: Path) -> Any:
        return read_arrow(path)


def read_arrow(path: Path) -> Any:
    """The table of an Arrow file. InvalidSpec when it is none."""
    import_pyarrow(path)
    import pyarrow

    try:
        with pyarrow.memory_map(str(path)) as file:
            try:
                return pyarrow.ipc.open_stream(file).read_all()
            except pyarrow.ArrowInvalid:
                return pyarrow.ipc.open_file(file).read_all()
    except (pyarrow.ArrowException, OSError) as error:
        raise InvalidSpec(f"{path} is not a readable Arrow file: {_first(error)}") from None


def import_pyarrow(path: Path) -> None:
    """InvalidSpec, with what to install, where pyarrow is not."""
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise InvalidSpec(f"reading {path} needs pyarrow: pip install pyarrow") from None


def _first(error: Exception) -> str:
    """The first line of an error."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def _stamp(stream: BufferedReader) -> tuple[int, int, int, int]:
    """What changes when a file does."""
    facts = os.fstat(stream.fileno())
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns


def _described(source: str, path: Path, rows: int, sha256: str) -> dict[str, Any]:
    return {"source": source, "file": str(path), "rows": rows, "sha256": sha256}


def _parse(raw: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        text = raw.removeprefix(_BOM if number == 1 else b"").decode("utf-8")
        value = json.loads(text)
    except UnicodeDecodeError as error:
        raise InvalidSpec(f"{path}:{number}: not UTF-8 at byte {error.start} of the line") from None
    except json.JSONDecodeError as error:
        raise InvalidSpec(
            f"{path}:{number}: not JSON: {error.msg} (column {error.colno})"
        ) from None
    except RecursionError:
        raise InvalidSpec(f"{path}:{number}: nested too deeply") from None
    if b"\\u" in raw and _has_half_a_pair(value):
        raise InvalidSpec(f"{path}:{number}: half of a surrogate pair is not a character")
    if not isinstance(value, dict):
        raise InvalidSpec(f"{path}:{number}: a row is a JSON object, not {type(value).__name__}")
    row: dict[str, Any] = plain(value)
    return row


def _has_half_a_pair(value: Any) -> bool:
    """Only an escape can say half a character; it fits into nothing that travels."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _row(values: dict[str, Any], where: str, prompt_key: str) -> Row:
    if prompt_key not in values:
        columns = ", ".join(values) or "none"
        raise InvalidSpec(f"{where}: no column {prompt_key} (columns: {columns})")
    item = {name: value for name, value in values.items() if name != prompt_key}
    prompt = _messages(values[prompt_key])
    if isinstance(prompt, str):
        if not prompt:
            raise InvalidSpec(f"{where}: {prompt_key} is empty")
        return Row(prompt, item)
    if not isinstance(prompt, list) or not prompt:
        raise InvalidSpec(f"{where}: {prompt_key} must be a string or a list of chat messages")
    return Row([_message(message, where) for message in prompt], item)


def _messages(prompt: Any) -> Any:
    """The prompt; a chat that came by columns (`{role: […], content: […]}`, as the `datasets`
    library stores a sequence of mappings) as a list of messages.
    """
    if not isinstance(prompt, dict) or not prompt:
        return prompt
    columns = list(prompt.values())
    if not all(isinstance(column, list) and len(column) == len(columns[0]) for column in columns):
        return prompt
    return [dict(zip(prompt, message, strict=True)) for message in zip(*columns, strict=True)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if (
        not isinstance(message, dict)
        or not isinstance(message.get("role"), str)
        or not isinstance(message.get("content"), str)
    ):
        raise InvalidSpec(f"{where}: a chat message is {{role: text, content: text}}")
    # A columnar writer fills keys that only other rows have with nulls.
    return {name: value for name, value in message.items() if value is not None}
