"""What an evaluation leaves behind: `eval/samples.jsonl` in the run folder, one prompt a line.

    {"data_source": "chain_sum", "index": 3, "version": 0,
     "prompt": [{"role": "user", "content": "4 + 3 ="}], "item": {"answer": "7"},
     "completions": [{"text": "7", "reward": 1.0, "parts": {}, "error_kind": "",
                      "error_message": "", "num_tokens": 2, "finish_reason": "stop"}, …],
     "skipped": ""}

`data_source` is the table that the prompt counts in, `index` its row in that data set, `version`
the weight version that sampled all its tokens (0: the model as it was given). The three together
name a line: one file holds every evaluation of a run. `reward: null` is a completion that could
not be graded, with its `error_kind`; it is never a zero. A prompt that was not sampled has no
completions and says why in `skipped`; it is part of no mean and is counted.

A line is appended by one write. A process that is killed leaves at most a torn last line: readers
pass over it, and a writer that goes on cuts it off, so that its prompt is asked again and no
other twice.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from headway import checked
from headway.errors import InvalidSpec, StorageFailed
from headway.finite import finite
from headway.messages import Completion

Key = tuple[int, str, int]
"""version, data_source, index: names one line of a file."""


@dataclass(frozen=True, slots=True)
class CompletionRecord:
    """One answer and its reward, or why there is none."""

    text: str
    reward: float | None
    num_tokens: int
    finish_reason: str  # as headway.messages.FinishReason
    parts: Mapping[str, float] = field(default_factory=dict)
    error_kind: str = ""
    error_message: str = ""


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """One prompt of a data set with everything that was sampled for it at one weight version."""

    data_source: str
    index: int  # row in its data set
    version: int
    prompt: Any  # as it was asked: chat messages or a string
    item: Mapping[str, Any]  # the data set's row, as graders see it
    completions: tuple[CompletionRecord, ...]
    skipped: str = ""

    @property
    def key(self) -> Key:
        """What names this line."""
        return self.version, self.data_source, self.index

    @property
    def content_hash(self) -> str:
        """SHA-256 of prompt and item: equal where two evaluations asked the same thing."""
        body = json.dumps([self.prompt, finite(self.item)], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(body.encode()).hexdigest()


def completion_record(completion: Completion) -> CompletionRecord:
    """What is kept of a completion: no token ids, no log-probs."""
    return CompletionRecord(
        text=completion.text,
        reward=completion.reward,
        num_tokens=len(completion.token_ids),
        finish_reason=completion.finish_reason,
        parts=dict(completion.parts),
        error_kind=completion.error_kind,
        error_message=completion.error_message,
    )


def samples_path(run_dir: Path) -> Path:
    """Where a run's evaluations are recorded."""
    return run_dir / "eval" / "samples.jsonl"


class RecordWriter:
    """Appends prompts to a file, each once. One process writes a file."""

    def __init__(self, path: Path) -> None:
        """Makes the file and its folder, or goes on with what is there but for a torn last line.

        InvalidSpec when a line before it is damaged, StorageFailed when the system refuses.
        """
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise _failed(path, error) from error
        try:
            os.ftruncate(self._handle, _whole_lines(path))
            self._keys = {record.key for record in read_records(path)}
        except BaseException:
            self.close()
            raise

    def __contains__(self, key: Key) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def append(self, record: PromptRecord) -> bool:
        """Adds a prompt; False, and nothing is written, when it is there already.

        StorageFailed when the disk takes no more: what was written of the line is taken back.
        """
        if record.key in self._keys:
            return False
        rest = memoryview(_line(record))
        size = os.fstat(self._handle).st_size
        try:
            while rest:
                rest = rest[os.write(self._handle, rest) :]
        except OSError as error:
            os.ftruncate(self._handle, size)
            raise _failed(self._path, error) from error
        self._keys.add(record.key)
        return True

    def close(self) -> None:
        """Flushes to the disk. Safe to repeat."""
        if self._handle >= 0:
            handle, self._handle = self._handle, -1
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read_records(path: Path, version: int | None = None) -> Iterator[PromptRecord]:
    """The prompts of a file, in the order of their arrival, each once; of one version or all.

    Nothing where there is no file. A torn last line is passed over; InvalidSpec names file and
    line of any other that is damaged.
    """
    if not path.is_file():
        return
    seen: set[Key] = set()
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            if not raw.endswith(b"\n"):
                return
            record = _parse(raw, f"{path}:{number}")
            if record.key in seen or (version is not None and record.version != version):
                continue
            seen.add(record.key)
            yield record


def _line(record: PromptRecord) -> bytes:
    row = finite(asdict(record))
    for completion in row["completions"]:
        completion["parts"] = {k: v for k, v in completion["parts"].items() if v is not None}
    return (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode(
        "utf-8", "backslashreplace"
    )


def _parse(raw: bytes, where: str) -> PromptRecord:
    try:
        row = checked.mapping(json.loads(raw), "the line")
        completions = checked.items(row.get("completions"), "completions")
        return PromptRecord(
            data_source=checked.text(row.get("data_source"), "data_source"),
            index=checked.whole(row.get("index"), "index"),
            version=checked.whole(row.get("version"), "version"),
            prompt=row.get("prompt"),
            item=checked.mapping(row.get("item"), "item"),
            completions=tuple(_completion(completion) for completion in completions),
            skipped=checked.text(row.get("skipped", ""), "skipped"),
        )
    except (ValueError, RecursionError) as error:
        raise InvalidSpec(f"{where}: no record of an evaluation: {error}") from None
    except InvalidSpec as error:
        raise InvalidSpec(f"{where}: {error}") from None


def _completion(value: Any) -> CompletionRecord:
    row = checked.mapping(value, "a completion")
    reward = row.get("reward")
    return CompletionRecord(
        text=checked.text(row.get("text"), "text"),
        reward=None if reward is None else checked.number(reward, "reward"),
        num_tokens=checked.whole(row.get("num_tokens"), "num_tokens"),
        finish_reason=checked.text(row.get("finish_reason"), "finish_reason"),
        parts={
            name: checked.number(part, f"part {name[:80]}")
            for name, part in checked.mapping(row.get("parts", {}), "parts").items()
        },
        error_kind=checked.text(row.get("error_kind", ""), "error_kind"),
        error_message=checked.text(row.get("error_message", ""), "error_message"),
    )


def _whole_lines(path: Path) -> int:
    """Bytes up to the end of the last whole line."""
    with path.open("rb") as stream:
        position = stream.seek(0, os.SEEK_END)
        while position:
            begin = max(0, position - (1 << 16))
            stream.seek(begin)
            found = stream.read(position - begin).rfind(b"\n")
            if found >= 0:
                return begin + found + 1
            position = begin
    return 0


def _failed(path: Path, error: OSError) -> StorageFailed:
    return StorageFailed(f"cannot write {path}: {error.strerror or error}")
