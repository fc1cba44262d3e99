"""Writes a trained model as the Hugging Face folder it came from, with new weights."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")


def own_dtype(source: Path) -> torch.dtype:
    """The dtype in which a model folder keeps its weights; float32 where it does not say."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    named = config.get("dtype") or config.get("torch_dtype") or "float32"
    dtype = getattr(torch, str(named).removeprefix("torch."))
    assert isinstance(dtype, torch.dtype)
    return dtype


def distance(one: Path, other: Path) -> float:
    """The Euclidean distance of two model folders' weights, over the tensors both have."""
    here, there = _files_of(one), _files_of(other)
    total = 0.0
    for name in here.keys() & there.keys():
        a, b = here[name].get_tensor(name), there[name].get_tensor(name)
        total += float((a.double() - b.double()).square().sum())
    return math.sqrt(total)


def _files_of(folder: Path) -> dict[str, Any]:
    import safetensors

    open_file: Any = safetensors.safe_open
    files = [open_file(path, framework="pt") for path in sorted(folder.glob("*.safetensors"))]
    return {name: file for file in files for name in file.keys()}  # noqa: SIM118 - no mapping


def write_model(
    source: Path,
    target: Path,
    weights: Mapping[str, Tensor],
    also: Callable[[Path], None] = lambda _: None,
) -> None:
    """Writes `target`: every file of `source` but its weights, then the new weights.

    Config, generation config and tokenizer are copied byte for byte. `also` writes what else
    belongs into the folder that it is given. The folder is written under a temporary name and
    renamed, so it is there whole or not at all; an older one of that name is replaced.
    """
    from huggingface_hub import save_torch_state_dict

    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        for file in sorted(source.iterdir()):
            hidden = file.name.startswith(".")
            if file.is_file() and not hidden and not file.name.endswith(WEIGHT_FILES):
                shutil.copyfile(file, draft / file.name)
        save_torch_state_dict(dict(weights), draft, metadata={"format": "pt"})
        also(draft)
        if target.exists():
            shutil.rmtree(target)
        draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
