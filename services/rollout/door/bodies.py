"""What may be asked: the bodies of OpenAI's two calls, as far as this door goes.

A field that is unknown is ignored, as OpenAI-compatible servers do. A field that is known to
change an answer and that this door does not have is refused, unless its value asks for nothing:
no answer is quietly another than the one that was asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

MAX_CHOICES = 1024
"""Prompts times n of one request."""

# What is refused, and the values that ask for nothing. null is one for every field.
_NOT_HERE: Final[Mapping[str, tuple[Any, ...]]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "suffix": ("",),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "documents": ([],),
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "return_tokens_as_token_ids": (False,),
}
_Stop = Annotated[str, Field(min_length=1, max_length=1000)]
_TokenIds = list[Annotated[int, Field(ge=0)]]


class StreamOptions(BaseModel):
    """What a stream carries besides."""

    include_usage: bool = False


class SamplingBody(BaseModel):
    """What both calls have."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = Field(default=None, description="its name here; the one there is, if null")
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    temperature: float = Field(default=1.0, ge=0, le=2, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1, lt=2**31, description="0 or -1: off")
    min_tokens: int = Field(default=0, ge=0)
    stop: tuple[_Stop, ...] = Field(default=(), max_length=16)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @model_validator(mode="before")
    @classmethod
    def _without_what_is_not_here(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        try:
            json.dumps(raw, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("a text holds half a surrogate pair, which is no character") from None
        given = {key: value for key, value in raw.items() if value is not None}
        for key in given.keys() & _NOT_HERE.keys():
            if given[key] not in _NOT_HERE[key]:
                raise ValueError(f"{key} is not possible here")
        return given

    @field_validator("stop", mode="before")
    @classmethod
    def _one_is_a_list(cls, raw: Any) -> Any:
        return (raw,) if isinstance(raw, str) else raw

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return self.stream_options.include_usage


class TextPart(BaseModel):
    """A part of a message; there is only text."""

    type: Literal["text"]
    text: str


class MessageBody(BaseModel):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None = None

    def plain(self) -> dict[str, str]:
        """As chat templates take it; `developer` is OpenAI's newer name for `system`."""
        content = self.content
        text = content if isinstance(content, str) else "".join(p.text for p in content or ())
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    messages: list[MessageBody] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1, description="null: all there are")
    max_tokens: int | None = Field(default=None, ge=1, description="its older name")
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=20)
    add_special_tokens: Literal[False] = Field(default=False, description="the template has them")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self

    @property
    def token_limit(self) -> int | None:
        """Tokens a completion at most; None: as many as fit."""
        return self.max_completion_tokens or self.max_tokens


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    prompt: str | list[str] | _TokenIds | list[_TokenIds] = Field(
        description="text, token ids, or a list of either"
    )
    max_tokens: int = Field(default=16, ge=0, description="0: with echo, only the prompt")
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool = False
    add_special_tokens: bool = Field(default=True, description="to a text; ids stay as they are")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if not self.max_tokens and not self.echo:
            raise ValueError("max_tokens 0 needs echo: true")
        if len(self.prompts) * self.n > MAX_CHOICES:
            raise ValueError(f"prompts times n is at most {MAX_CHOICES}")
        if not self.prompts:
            raise ValueError("there is no prompt")
        if not self.add_special_tokens and any(isinstance(p, str) for p in self.prompts):
            raise ValueError("add_special_tokens false is not possible here: send token ids")
        return self

    @property
    def prompts(self) -> list[str | _TokenIds]:
        """One or several."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)  # type: ignore[arg-type]
