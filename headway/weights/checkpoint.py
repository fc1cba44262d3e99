"""Names and shapes of a Hugging Face folder's tensors, read from the file headers."""

from __future__ import annotations

import json
from pathlib import Path

from headway.errors import InvalidSpec

_MAX_HEADER = 100 << 20  # the format's own limit


def checkpoint_shapes(folder: Path | str) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape over all `*.safetensors` of a folder; reads headers only.

    InvalidSpec when there are none or one is damaged.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise InvalidSpec(f"{folder}: no *.safetensors in it; save the model as safetensors")
    for file in files:
        shapes.update(_header(file))
    return shapes


def ties_embeddings(folder: Path | str) -> bool:
    """Whether a model shares its output head with its embedding, by its config.json."""
    config = json.loads((Path(folder) / "config.json").read_text())
    return bool(config.get("tie_word_embeddings", False))


def _header(file: Path) -> dict[str, tuple[int, ...]]:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 0 < length <= _MAX_HEADER:
            raise InvalidSpec(f"{file}: not a safetensors file")
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise InvalidSpec(f"{file}: damaged safetensors header") from error
    return {name: tuple(v["shape"]) for name, v in header.items() if name != "__metadata__"}
