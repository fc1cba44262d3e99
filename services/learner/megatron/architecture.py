"""What Megatron has to know of a Hugging Face model, and which models it is no home for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from headway.errors import InvalidSpec

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")
_VARIABLE_ROPE = ("dynamic", "longrope")  # their frequencies change with the length


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder of the Llama and Qwen family: RMSNorm, SwiGLU, rotary positions."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    query_bias: bool  # biases of the query, key and value projections
    query_norm: bool  # RMSNorm of each head's query and key
    tied: bool  # the head is the embedding
    inv_freq: Tensor  # [head_dim / 2] of the rotary positions


def architecture_of(lm: Any, tensor_parallel: int) -> Architecture:
    """Reads a loaded causal language model. InvalidSpec names what cannot be trained, and why."""
    config = lm.config
    kind = config.model_type
    if kind not in SUPPORTED:
        raise InvalidSpec(
            f"actor.strategy megatron cannot train a {kind} model: it knows"
            f" {', '.join(SUPPORTED)}; actor.strategy fsdp trains any"
        )
    _check_layers(config)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    found = Architecture(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab_size=config.vocab_size,
        norm_eps=config.rms_norm_eps,
        query_bias=kind == "qwen2",
        query_norm=kind == "qwen3",
        tied=bool(config.tie_word_embeddings),
        inv_freq=_frequencies(lm),
    )
    for name, count in (
        ("num_attention_heads", heads),
        ("num_key_value_heads", kv_heads),
        ("intermediate_size", found.intermediate_size),
    ):
        if count % tensor_parallel:
            raise InvalidSpec(
                f"actor.megatron.tensor_model_parallel_size {tensor_parallel} does not divide the"
                f" model's {name} {count}"
            )
    return found


def _check_layers(config: Any) -> None:
    """InvalidSpec where a layer has something that the built model would lack."""
    wrong = {
        "attention_bias": config.model_type != "qwen2" and getattr(config, "attention_bias", False),
        "mlp_bias": getattr(config, "mlp_bias", False),
        "hidden_act": config.hidden_act not in ("silu", "swish"),
        "layer_types": any(
            kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()
        ),
        "sliding_window": config.model_type == "mistral"
        and getattr(config, "sliding_window", None) is not None,
    }
    for name, found in wrong.items():
        if found:
            raise InvalidSpec(
                f"actor.strategy megatron cannot train this {config.model_type} model: its"
                f" {name} is {getattr(config, name)}; actor.strategy fsdp may"
            )


def _frequencies(lm: Any) -> Tensor:
    rotary = lm.base_model.rotary_emb
    kind = rotary.rope_type
    if kind in _VARIABLE_ROPE or rotary.attention_scaling != 1.0:
        raise InvalidSpec(f"actor.strategy megatron has no rotary positions of type {kind}")
    inv_freq: Tensor = rotary.inv_freq
    return inv_freq.detach().float().clone()
