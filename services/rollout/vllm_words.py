"""A language model's tokenizer, as visitors need it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headway.data.chat import Messages, PromptEncoder
from headway.errors import InvalidSpec


class ModelWords:
    """The words of a model's folder. Encoding and decoding block."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._prompts = PromptEncoder(self._tokenizer)
        self._size = len(self._tokenizer)

    def encode(self, text: str) -> tuple[int, ...]:
        """As the tokenizer does it: markup in the text is markup."""
        return self._prompts.encode(text)

    def encode_chat(self, messages: Messages) -> tuple[int, ...]:
        """By the model's chat template. InvalidSpec: there is none, or it refuses these."""
        from jinja2 import TemplateError

        try:
            return self._prompts.encode(messages)
        except (TemplateError, TypeError) as error:
            raise InvalidSpec(
                f"the model's chat template refuses these messages: {error}"
            ) from None

    def decode(self, token_ids: tuple[int, ...]) -> str:
        """Text, special tokens in their own words."""
        if any(not 0 <= token < self._size for token in token_ids):
            raise InvalidSpec(f"token ids of this model are 0 … {self._size - 1}")
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))
