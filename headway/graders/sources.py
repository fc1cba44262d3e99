"""Files that a job names and that travel inside it: the source of `python` graders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.errors import InvalidSpec
from headway.graders.python import MAX_SOURCE_BYTES


def with_sources(raw: Any, folder: Path) -> Any:
    """Plain data in which every `python` grader's `path` has become its `source`.

    Relative paths count from `folder`. InvalidSpec: no such file, too long, not text. What is
    no grader, or has no path, stays as it is: services never read a path that was sent to them.
    """
    if isinstance(raw, list):
        return [with_sources(value, folder) for value in raw]
    if not isinstance(raw, Mapping):
        return raw
    if raw.get("type") == "python" and "path" in raw:
        return _with_source(raw, folder)
    return {key: with_sources(value, folder) for key, value in raw.items()}


def _with_source(raw: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    name = raw["path"]
    if not isinstance(name, str) or not name:
        raise InvalidSpec("a python grader's path is the name of a file")
    if "source" in raw:
        raise InvalidSpec(f"a python grader has path {name} and source: give one of them")
    file = folder / Path(name).expanduser()
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_SOURCE_BYTES + 1)
        source = data.decode("utf-8-sig")
    except OSError as error:
        raise InvalidSpec(f"a python grader's path {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidSpec(f"a python grader's path {file} is not a text in UTF-8") from None
    if len(data) > MAX_SOURCE_BYTES:
        raise InvalidSpec(
            f"a python grader's path {file} has more than {MAX_SOURCE_BYTES >> 10} KiB: install"
            " what is large as a package where the reward service runs"
        )
    rest = {key: value for key, value in raw.items() if key != "path"}
    return {"file": file.name, **rest, "source": source.replace("\r\n", "\n")}
