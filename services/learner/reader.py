"""Reads checkpoints without running what may be in them.

torch.distributed.checkpoint keeps its index (`.metadata`) as a pickle and loads what is no
tensor by unpickling. Here an index may hold only the classes that an index is made of, and a
state only tensors. This file is the one place where anything is unpickled.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from headway.errors import InvalidSpec

_ALLOWED = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "pathlib": {"PosixPath"},
    "collections": {"OrderedDict"},
}  # fmt: skip


class TensorReader(FileSystemReader):
    """A folder's reader that believes nothing but an index in its index."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index. InvalidSpec when it holds anything else."""
        path = self._get_metadata_path(kwargs.get("rank"))
        with self.fs.create_stream(path, "rb") as stream:
            metadata = read_index(stream.read())
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class TensorPlanner(DefaultLoadPlanner):
    """Loads tensors only."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """InvalidSpec: what is no tensor would have to be unpickled."""
        raise InvalidSpec(f"the checkpoint's {read_item.dest_index.fqn} is no tensor")


def read_index(data: bytes) -> Metadata:
    """An index from its bytes. InvalidSpec when it is none."""
    try:
        metadata = _IndexUnpickler(io.BytesIO(data)).load()
    except InvalidSpec:
        raise
    except Exception as error:
        raise InvalidSpec(f"the checkpoint's index is damaged: {error}") from None
    if not isinstance(metadata, Metadata):
        raise InvalidSpec(f"the checkpoint's index is a {type(metadata).__name__}")
    return metadata


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise InvalidSpec(f"the checkpoint's index holds {module}.{name}, which is no part of one")
