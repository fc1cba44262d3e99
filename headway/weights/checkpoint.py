"""Names, shapes and places of a Hugging Face folder's tensors, read from the file headers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from headway.errors import InvalidSpec

_MAX_HEADER = 100 << 20  # the format's own limit


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a safetensors file; `start` and `end` are bytes of the file."""

    file: Path
    dtype: str  # as the format names it, such as BF16
    shape: tuple[int, ...]
    start: int
    end: int


def checkpoint_tensors(folder: Path | str) -> dict[str, Stored]:
    """Tensor name -> where it lies, over all `*.safetensors` of a folder; reads headers only.

    InvalidSpec when there are none or one is damaged.
    """
    tensors: dict[str, Stored] = {}
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise InvalidSpec(f"{folder}: no *.safetensors in it; save the model as safetensors")
    for file in files:
        tensors.update(_header(file))
    return tensors


def checkpoint_shapes(folder: Path | str) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape; errors as `checkpoint_tensors`."""
    return {name: stored.shape for name, stored in checkpoint_tensors(folder).items()}


def ties_embeddings(folder: Path | str) -> bool:
    """Whether a model shares its output head with its embedding, by its config.json."""
    config = json.loads((Path(folder) / "config.json").read_text())
    return bool(config.get("tie_word_embeddings", False))


def _header(file: Path) -> dict[str, Stored]:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 0 < length <= _MAX_HEADER:
            raise InvalidSpec(f"{file}: not a safetensors file")
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise InvalidSpec(f"{file}: damaged safetensors header") from error
    data = 8 + length
    return {
        name: Stored(
            file, v["dtype"], tuple(v["shape"]), *(data + offset for offset in v["data_offsets"])
        )
        for name, v in header.items()
        if name != "__metadata__"
    }
