"""Where the files of a Hugging Face data set lie in its folder.

Three layouts: what `Dataset.save_to_disk` and `DatasetDict.save_to_disk` leave, a folder whose
README.md lists its files by configuration and split (`configs:` in its YAML head), and files that
tell by their names, as most on the hub do (`data/test-00000-of-00001.parquet`,
`main/train.jsonl`). The `datasets` library is not needed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from headway.errors import InvalidSpec
from headway.suggestions import near
from headway.yamls import load_yaml

SUFFIXES = (".parquet", ".jsonl", ".json", ".arrow")
_NOT_ROWS = {"state.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json"}
_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}")
_WORDS = {
    "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation",
    "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
    "train": "train", "training": "train",
}  # fmt: skip
_UNNAMED = "train"  # the split of files that name none, as in the datasets library
_MAX_HEAD_BYTES = 1 << 20
_MAX_ENTRIES = 100_000


Files = tuple[Path, ...]
"""The files of one split, in order."""

Layout = Mapping[str, Mapping[str, Files]]
"""Configuration -> split -> files."""


def pick(folder: Path, name: str | None, split: str | None, key: str = "data") -> Files:
    """The files of a configuration and a split.

    InvalidSpec: none are there, or there are several and none was named; `key` is the job's.
    """
    layout = read_layout(folder)
    config = layout[_one(f"{key}.config.name", "configuration", name, layout, folder)]
    return config[_one(f"{key}.config.split", "split", split, config, folder)]


def read_layout(folder: Path) -> Layout:
    """What the folder holds. InvalidSpec when that is no data set."""
    if not folder.is_dir():
        raise InvalidSpec(f"{folder} is no folder")
    layout = _saved(folder) or _listed(folder) or _named(folder)
    if not layout:
        raise InvalidSpec(
            f"{folder} is no folder of a data set: no {', '.join(SUFFIXES)} files in it, nor what"
            " save_to_disk leaves"
        )
    return layout


def _one(key: str, what: str, wanted: str | None, known: Mapping[str, Any], folder: Path) -> str:
    if wanted is None and len(known) == 1:
        return next(iter(known))
    there = ", ".join(sorted(known))
    if wanted is None:
        raise InvalidSpec(f"{folder} has more than one {what}: set {key} to one of {there}")
    if wanted not in known:
        hint = near(wanted, known) or f" (there are: {there})"
        raise InvalidSpec(f"{key}: {folder} has no {what} {wanted!r}{hint}")
    return wanted


def _saved(folder: Path) -> Layout:
    """The layout of save_to_disk; empty where it is another."""
    if (folder / "dataset_dict.json").is_file():
        splits = _json(folder / "dataset_dict.json").get("splits")
        if not isinstance(splits, list) or not splits:
            raise InvalidSpec(f"{folder / 'dataset_dict.json'} lists no splits")
        return {"default": {str(s): _state(folder / _plain_name(s, folder)) for s in splits}}
    if (folder / "state.json").is_file():
        split = str(_json(folder / "state.json").get("_split") or _UNNAMED)
        return {"default": {split: _state(folder)}}
    return {}


def _state(folder: Path) -> Files:
    state = _json(folder / "state.json")

    listed = state.get("_data_files")
    if not isinstance(listed, list) or not listed or not all(isinstance(f, dict) for f in listed):
        raise InvalidSpec(f"{folder / 'state.json'} lists no files")
    if state.get("_indices_data_files"):
        raise InvalidSpec(
            f"{folder} holds a selection of its rows apart from them: save it once more after"
            " flatten_indices()"
        )
    return tuple(folder / _plain_name(file.get("filename"), folder) for file in listed)


def _plain_name(name: object, folder: Path) -> str:
    """A name that leads into the folder itself and nowhere else."""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        raise InvalidSpec(f"{folder}: {name!r} is no name of a file or folder in it")
    return name


def _listed(folder: Path) -> Layout:
    """The layout that the README's head lists; empty where it lists none."""
    layout: dict[str, dict[str, Files]] = {}
    for config in _configs(folder / "README.md"):
        splits: dict[str, Files] = {}
        for split, pattern in _patterns(config.get("data_files")):
            if pattern.startswith("/") or ".." in pattern.split("/"):
                raise InvalidSpec(f"{folder / 'README.md'}: {pattern!r} leads out of the folder")
            paths = tuple(sorted(p for p in folder.glob(pattern) if p.suffix in SUFFIXES))
            if paths:
                splits[split] = splits.get(split, ()) + paths
        if splits:
            layout[str(config.get("config_name", "default"))] = splits
    return layout


def _configs(readme: Path) -> Iterator[dict[str, Any]]:
    try:
        with readme.open(encoding="utf-8", errors="replace") as file:
            text = file.read(_MAX_HEAD_BYTES)
        head = load_yaml(text.split("---", 2)[1]) if text.startswith("---") else {}
    except (OSError, InvalidSpec, IndexError):
        return  # no README, or none with a head: names tell
    configs = head.get("configs") if isinstance(head, dict) else None
    for config in configs if isinstance(configs, list) else []:
        if isinstance(config, dict):
            yield config


def _patterns(data_files: object) -> Iterator[tuple[str, str]]:
    """(split, pattern) of one configuration: a pattern, or a list with splits."""
    if isinstance(data_files, str):
        yield _UNNAMED, data_files
    for entry in data_files if isinstance(data_files, list) else []:
        if isinstance(entry, str):
            yield _UNNAMED, entry
        elif isinstance(entry, dict):
            paths = entry.get("path")
            for path in paths if isinstance(paths, list) else [paths]:
                if isinstance(path, str):
                    yield str(entry.get("split", _UNNAMED)), path


def _named(folder: Path) -> Layout:
    """The layout that names of files and folders tell."""
    found: dict[str, dict[str, list[Path]]] = {}
    entries = list(islice(folder.rglob("*"), _MAX_ENTRIES + 1))
    if len(entries) > _MAX_ENTRIES:
        raise InvalidSpec(f"{folder} holds more than {_MAX_ENTRIES} files: is it a data set?")
    for path in sorted(entries):
        parts = path.relative_to(folder).parts
        hidden = any(part.startswith((".", "__")) for part in parts)
        if path.suffix not in SUFFIXES or path.name in _NOT_ROWS or hidden or not path.is_file():
            continue
        own = parts[0] if len(parts) > 1 and parts[0] != "data" and not _word(parts[0]) else ""
        config = found.setdefault(own or "default", {})
        config.setdefault(_split_of(parts[1:] if own else parts), []).append(path)
    return {
        config: {split: tuple(paths) for split, paths in splits.items()}
        for config, splits in found.items()
    }


def _split_of(parts: tuple[str, ...]) -> str:
    *folders, file = parts
    stem = file.rpartition(".")[0]
    shard = _SHARD.fullmatch(stem)
    if shard is not None and re.fullmatch(r"\w+", shard[1]):
        return _WORDS.get(shard[1], shard[1])
    return next((word for part in (stem, *reversed(folders)) if (word := _word(part))), _UNNAMED)


def _word(name: str) -> str | None:
    """The split that a name mentions; the last mention counts."""
    words = [_WORDS[word] for word in re.split(r"[^a-z]+", name.lower()) if word in _WORDS]
    return words[-1] if words else None


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidSpec(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise InvalidSpec(f"{path} is no JSON object")
    return value
