"""Converts one GGUF file to a bf16 Hugging Face folder: weights, tokenizer, chat template.

A process of its own (`python -m headway.models_gguf IN.gguf OUT`): it needs torch
and transformers, its callers do not.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any


def convert(gguf: Path, target: Path) -> None:
    """Writes the folder `target`. ValueError when the file lacks a chat template or an eos."""
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    fields = GGUFReader(gguf).fields
    pre = fields.get("tokenizer.ggml.pre")
    _restore_pretokenizer(tokenizer, pre.contents() if pre is not None else None)
    tokenizer.model_max_length = model.config.max_position_embeddings
    if tokenizer.chat_template is None:
        raise ValueError(f"{gguf.name} has no chat template")
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{gguf.name} names no end-of-sequence token")
    _check_turn_end(tokenizer)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    _tidy(target / "config.json", drop=("_model_name_or_path",))
    _tidy(target / "tokenizer_config.json", drop=("is_local", "local_files_only"))
    for file in target.iterdir():
        file.chmod(0o644)  # the weights' writer makes them private; a cache may be shared


def _restore_pretokenizer(tokenizer: Any, kind: str | None) -> None:
    """Splits digits one by one where the model was trained so; the GGUF reader leaves it out."""
    if kind != "smollm":
        return
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def _check_turn_end(tokenizer: Any) -> None:
    """The template must end an assistant's turn with the eos, or no answer would ever stop."""
    turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    text = tokenizer.apply_chat_template(turn, tokenize=False)
    if not text.rstrip().endswith(tokenizer.eos_token):
        raise ValueError(f"the chat template does not end a turn with {tokenizer.eos_token}")


def _tidy(path: Path, drop: tuple[str, ...]) -> None:
    config = json.loads(path.read_text())
    for key in drop:
        config.pop(key, None)
    path.write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    logging.disable(logging.INFO)
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
