"""Tiny random models of several families, as Hugging Face folders without a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
}


def build_family(path: Path, kind: str, *, seed: int = 0, **changes: Any) -> Path:
    """Saves a random model of a `model_type`; biases and norms are random too, not 0 and 1."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **(SIZES | changes))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        lm = AutoModelForCausalLM.from_config(config)
        for name, parameter in lm.named_parameters():
            if parameter.ndim == 1:
                start = 0.0 if name.endswith("bias") else 1.0
                torch.nn.init.normal_(parameter, mean=start, std=0.2)
    lm.save_pretrained(path)
    return path
