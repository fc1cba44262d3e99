"""What the OpenAI door tells of prompts, beside transformers' forward over the same token ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from headway.access.process import Access
from headway.web import make_app
from services.rollout.door.routes import router
from services.rollout.engine import Engine
from services.rollout.visits import Policy, Visits

# several words, markup, characters of several bytes, and one token alone
TEXTS = (
    "what is 1 + 2? the answer is 3.",
    "<|im_start|>user\nlazy dog<|im_end|>\n",
    "déjà 🙂",
    "x",
)


def forward_logprobs(model: Any, ids: Sequence[int]) -> list[float | None]:
    """Log-prob of each token after those before it; None for the first."""
    import torch

    with torch.no_grad():
        rows = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)  # [tokens, vocabulary]
    return [None, *(float(rows[i - 1, ids[i]]) for i in range(1, len(ids)))]


async def check_echo(engine: Engine, folder: Path, tolerance: float) -> None:
    """`echo` and `logprobs` as harnesses ask for them, by text and by ids.

    `engine` holds the weights of `folder`; `tolerance` is of one log-prob.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    prompts = [tokenizer(text).input_ids for text in TEXTS]
    visits = Visits(8, 4)
    visits.open(Policy("policy", str(folder), engine, lambda: engine.version))
    app = make_app("door", lambda: True, max_body_bytes=1 << 20, access=Access())
    app.include_router(router(visits))
    there = httpx.ASGITransport(app)
    async with httpx.AsyncClient(
        transport=there, base_url="http://127.0.0.1", timeout=120
    ) as client:
        for asked, new in (
            ({"prompt": prompts, "max_tokens": 1, "temperature": 0}, 1),
            ({"prompt": prompts, "max_tokens": 0, "temperature": 0.3, "top_k": 2}, 0),
            ({"prompt": list(TEXTS), "max_tokens": 0}, 0),
        ):
            fields = {"model": "policy", "echo": True, "logprobs": 1, **asked}
            answer = await client.post("/v1/completions", json=fields)
            assert answer.status_code == 200, answer.text
            choices = answer.json()["choices"]
            assert [choice["index"] for choice in choices] == list(range(len(TEXTS)))
            for choice, ids, text in zip(choices, prompts, TEXTS, strict=True):
                seen = choice["logprobs"]
                assert len(seen["token_logprobs"]) == len(ids) + new
                assert seen["token_logprobs"][0] is None
                expected = forward_logprobs(model, ids)
                assert seen["token_logprobs"][1 : len(ids)] == pytest.approx(
                    expected[1:], abs=tolerance
                )
                assert choice["text"].startswith(text)
                if text.isascii():  # of a character of several bytes a token has but a part
                    _check_offsets(seen, choice["text"], tokenizer, ids)


def _check_offsets(seen: dict[str, Any], text: str, tokenizer: Any, ids: Sequence[int]) -> None:
    pieces = [tokenizer.decode([token]) for token in ids]
    assert seen["tokens"][: len(ids)] == pieces
    for piece, offset in zip(pieces, seen["text_offset"], strict=False):
        assert text[offset : offset + len(piece)] == piece
