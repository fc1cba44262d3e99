"""A model's words at the door: what its tokenizer puts before a text, and markup in it."""

import asyncio

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from headway.errors import InvalidSpec
from services.rollout.door.asking import of_completion
from services.rollout.door.bodies import CompletionBody
from services.rollout.engine import SeenToken
from services.rollout.vllm_words import ModelWords
from tests.support.tiny_model import build_tiny_tokenizer

START, TURN = 0, 1  # <|endoftext|>, put before every text; <|im_start|>


class Folder:
    """An engine as far as words go."""

    context_tokens = 64

    def __init__(self, words):
        self._words = words

    async def words(self):
        return self._words


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    folder = tmp_path_factory.mktemp("words")
    build_tiny_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", START)]
    )
    tokenizer.save_pretrained(folder)
    return ModelWords(folder)


def test_a_text_gets_what_its_tokenizer_puts_before_it_and_ids_get_nothing(words):
    ids = words.encode("what is")
    assert ids[0] == START and words.decode(ids[1:]) == "what is"
    asked = asyncio.run(of_completion(CompletionBody(prompt=[list(ids[1:])]), Folder(words)))
    assert asked.asks[0].prompt_ids == ids[1:] and asked.prompts == ("what is",)
    with pytest.raises(InvalidSpec, match="token ids of this model"):
        words.decode((100_000,))


@pytest.mark.parametrize(
    ("prompt", "text", "head"),
    [
        ("what is", "what is", ""),  # the start is no part of what was sent
        ("<|im_start|>user", "<|im_start|>user", ""),
        ([START, 5, 6], "<|endoftext|>", "<|endoftext|>"),
        ([TURN, 5, 6], "<|im_start|>", "<|im_start|>"),
    ],
)
def test_the_first_token_has_its_text_where_the_prompt_has_it(words, prompt, text, head):
    body = CompletionBody(prompt=prompt if isinstance(prompt, str) else [prompt], echo=True)
    asked = asyncio.run(of_completion(body, Folder(words)))
    assert asked.prompts[0].startswith(text)
    first, second = asked.with_head(0, [SeenToken(START, "", None), SeenToken(5, "x", -1.0)])
    assert (first.text, second.text) == (head, "x")
