"""From a body to what the engine is asked, under the limits of its model."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from headway.errors import InvalidSpec
from services.rollout.door.bodies import ChatBody, CompletionBody, SamplingBody
from services.rollout.engine import Engine, Look, Sampling, SeenToken
from services.rollout.visits import Ask, seed_of

_CHAT_TOKENS = 1024  # where neither request nor engine has a limit


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request wants: choice i is completion i % n of prompt i // n."""

    asks: tuple[Ask, ...]
    prompts: tuple[str, ...]  # their texts, for `echo`; empty in chats
    num_prompt_tokens: int
    heads: tuple[str, ...] = ()  # the text of each prompt's first token, for `echo`

    def with_head(self, which: int, prompt: Sequence[SeenToken]) -> list[SeenToken]:
        """A prompt's tokens; the first has no log-prob, so engines may not say its text."""
        return [replace(token, text=self.heads[which]) for token in prompt[:1]] + [*prompt[1:]]


async def of_chat(body: ChatBody, engine: Engine) -> Asked:
    """InvalidSpec: no chat template, or too long."""
    words = await engine.words()
    messages = [message.plain() for message in body.messages]
    ids = await asyncio.to_thread(words.encode_chat, messages)
    context = engine.context_tokens
    limit = body.token_limit or (_CHAT_TOKENS if context is None else context - len(ids))
    look = Look(body.top_logprobs if body.logprobs else None, None, body.stream)
    _check_fits(engine, ids, limit)
    return Asked(_asks(body, [ids], limit, look), (), len(ids))


async def of_completion(body: CompletionBody, engine: Engine) -> Asked:
    """InvalidSpec: ids that are none, or too long."""
    words = await engine.words()

    def encoded() -> list[tuple[tuple[int, ...], str]]:
        found = []
        for prompt in body.prompts:
            if isinstance(prompt, str):
                found.append((words.encode(prompt), prompt))
            else:
                found.append((tuple(prompt), words.decode(tuple(prompt))))
        return found

    pairs = await asyncio.to_thread(encoded)
    limit = max(1, body.max_tokens)  # the prompt's log-probs come with a first token
    for ids, _ in pairs:
        _check_fits(engine, ids, limit)
    of_prompt = body.logprobs if body.echo else None
    look = Look(body.logprobs, of_prompt, body.stream)
    asks = _asks(body, [ids for ids, _ in pairs], limit, look)
    heads = tuple(_head(text, words.decode(ids[:1])) for ids, text in pairs)
    return Asked(asks, tuple(text for _, text in pairs), sum(len(i) for i, _ in pairs), heads)


def _head(text: str, first: str) -> str:
    """What of a prompt's text is its first token's: nothing, where the tokenizer put it there."""
    return first if text.startswith(first) else ""


def _asks(
    body: SamplingBody, prompts: Sequence[tuple[int, ...]], limit: int, look: Look
) -> tuple[Ask, ...]:
    if body.min_tokens > limit:
        raise InvalidSpec(f"min_tokens {body.min_tokens} is more than the {limit} tokens there are")
    sampling = Sampling(
        max_tokens=limit,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=max(0, body.top_k),
        min_tokens=body.min_tokens,
        stop=body.stop,
    )
    seed = secrets.randbits(63) if body.seed is None else body.seed
    every = [ids for ids in prompts for _ in range(body.n)]
    return tuple(Ask(ids, sampling, seed_of(seed, i), look) for i, ids in enumerate(every))


def _check_fits(engine: Engine, ids: tuple[int, ...], limit: int) -> None:
    context = engine.context_tokens
    if not ids:
        raise InvalidSpec("the prompt is empty")
    if context is not None and (limit < 1 or len(ids) + limit > context):
        raise InvalidSpec(
            f"the model's context is {context} tokens: the prompt has {len(ids)}, and"
            f" {max(1, limit)} were asked for besides"
        )
