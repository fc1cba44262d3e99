"""The base model of a job that trains adapters: as every machine has it in its own folder.

It never travels. That a node's is the learner's is known by one digest over its tensors,
whatever files they are cut into and whatever else is in the folder. No torch at import.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from headway.errors import WeightMismatch
from headway.models import kept_digest
from headway.weights.checkpoint import Stored, checkpoint_tensors, ties_embeddings

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64",
    "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip


def base_tensors(folder: Path | str) -> dict[str, Stored]:
    """A folder's tensors by name, in the order of names. A head that is tied is not among them."""
    stored = checkpoint_tensors(folder)
    if ties_embeddings(folder):
        stored.pop("lm_head.weight", None)
    return dict(sorted(stored.items()))


def base_digest(folder: Path | str, cache_dir: Path | None = None) -> str:
    """xxh3-128 over name, dtype, shape and bytes of every tensor; kept as `kept_digest` does."""
    folder = Path(folder)
    files = sorted(folder.glob("*.safetensors"))
    return kept_digest("tensors", folder, files, lambda: _read(folder), cache_dir)


class BaseTensors(Mapping[str, "Tensor"]):
    """A base model's tensors on the host in one dtype, read from the folder when asked for.

    `changed` holds those that are not as in the folder. A tensor that the folder has in the
    dtype is a view of its file; nobody may write to it.
    """

    def __init__(
        self, folder: Path | str, dtype: torch.dtype, changed: Mapping[str, Tensor] | None = None
    ) -> None:
        self._stored = base_tensors(folder)
        self._dtype = dtype
        self._changed = changed or {}
        self._files = {file: _mapped(file) for file in {s.file for s in self._stored.values()}}

    def stored(self, name: str) -> Tensor:
        """A tensor as the folder has it. WeightMismatch: in a dtype that is not known here."""
        import torch

        place = self._stored[name]
        if place.dtype not in _DTYPES:
            raise WeightMismatch(f"tensor {name}: the base has it in {place.dtype}; that is no"
                                 " dtype that adapters can be added to")  # fmt: skip
        dtype = getattr(torch, _DTYPES[place.dtype])
        count = math.prod(place.shape)
        if not count:
            return torch.empty(place.shape, dtype=dtype)
        flat = torch.frombuffer(
            self._files[place.file], dtype=dtype, count=count, offset=place.start
        )
        return flat.reshape(place.shape)

    def __getitem__(self, name: str) -> Tensor:
        if name in self._changed:
            return self._changed[name]
        tensor = self.stored(name)
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def _read(folder: Path) -> str:
    total = xxhash.xxh3_128()
    files: dict[Path, mmap.mmap] = {}
    for name, place in base_tensors(folder).items():
        if place.file not in files:
            files[place.file] = _mapped(place.file)
        with memoryview(files[place.file]) as data:
            digest = xxhash.xxh3_128_hexdigest(data[place.start : place.end])
        total.update(f"{name}\0{place.dtype}\0{list(place.shape)}\0{digest}\n".encode())
    return total.hexdigest()


def _mapped(file: Path) -> mmap.mmap:
    # a private copy that nobody writes to: torch takes no memory that cannot be written
    with file.open("rb") as stream:
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
