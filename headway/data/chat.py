"""From a row to prompt token ids: the chat template, and text that looks like its markers.

A row's own text is never read as a special token: a question that quotes
`<|im_end|>` reaches the model as those characters, and the border between prompt
and completion stays where the template put it. Plain string prompts are tokenised
as the tokenizer does it, special tokens included: there the author writes the markup.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from headway.errors import InvalidSpec

Messages = list[dict[str, Any]]


def compose(prompt: Messages | str, system_prompt: str | None, suffix: str) -> Messages | str:
    """The prompt with the job's system prompt before it and its suffix after the question.

    A string becomes a conversation when there is a system prompt. A row's own
    system message stays and the job's is not added.
    """
    if isinstance(prompt, str):
        if system_prompt is None:
            return prompt + suffix
        prompt = [{"role": "user", "content": prompt}]
    messages = [dict(message) for message in prompt]
    if suffix:
        asked = [i for i, m in enumerate(messages) if m["role"] == "user"]
        if asked:
            messages[asked[-1]]["content"] += suffix
    if system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


class PromptEncoder:
    """Token ids of prompts under one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.values()
        markers = {token.content for token in added if token.special}
        markers |= set(tokenizer.all_special_tokens)
        pattern = "|".join(re.escape(m) for m in sorted(markers, key=len, reverse=True) if m)
        self._marker = re.compile(pattern) if pattern else None

    def encode(self, prompt: Messages | str) -> tuple[int, ...]:
        """Prompt ids, generation prompt included. InvalidSpec when there is no chat template."""
        if isinstance(prompt, str):
            return tuple(self._tokenizer.encode(prompt, add_special_tokens=True))
        if self._tokenizer.chat_template is None:
            raise InvalidSpec(
                "the data holds conversations and the model's tokenizer has no chat template:"
                " use string prompts or an instruct model"
            )
        quoted: list[str] = []
        shield = _unused_character(prompt)
        shielded = [self._shield(message, shield, quoted) for message in prompt]
        text = self._tokenizer.apply_chat_template(
            shielded, add_generation_prompt=True, tokenize=False
        )
        return tuple(self._join(text.split(shield), quoted))

    def _shield(self, message: dict[str, Any], shield: str, quoted: list[str]) -> dict[str, Any]:
        """The message with each marker in its text replaced by a character it does not hold."""

        def stash(match: re.Match[str]) -> str:
            quoted.append(match.group())
            return shield

        if self._marker is None:
            return message
        return {**message, "content": self._marker.sub(stash, message["content"])}

    def _join(self, parts: Sequence[str], quoted: Sequence[str]) -> list[int]:
        if len(parts) != len(quoted) + 1:
            raise InvalidSpec("the chat template drops or repeats parts of a message's text")
        ids = list(self._tokenizer.encode(parts[0], add_special_tokens=False))
        for text, part in zip(quoted, parts[1:], strict=True):
            ids += self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
            ids += self._tokenizer.encode(part, add_special_tokens=False)
        return ids


def _unused_character(messages: Messages) -> str:
    text = "".join(str(message["content"]) for message in messages)
    return next(chr(c) for c in range(0xE000, 0xF8FF) if chr(c) not in text)
