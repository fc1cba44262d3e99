"""A tiny random Llama with a real tokenizer, built in the test, as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

CORPUS = (
    "the quick brown fox jumps over the lazy dog. ",
    "what is 1 + 2? the answer is 3. what is 40 + 2? the answer is 42. ",
    "def add(a, b):\n    return a + b\n",
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tiny_tokenizer(path: Path, *, vocab_size: int = 320) -> None:
    """Saves a byte-level BPE tokenizer (any string round-trips) with a chat template.

    `<|endoftext|>` is padding, `<|im_end|>` ends a turn and is the eos token.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=1,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=SPECIAL[0], eos_token=SPECIAL[2]
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(path)


def build_tiny_model(
    path: Path | str,
    *,
    seed: int = 0,
    vocab_size: int = 320,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    intermediate_size: int = 128,
    max_positions: int = 512,
    tie_embeddings: bool = True,
    dtype: str = "float32",
    init_scale: float = 0.2,
) -> Path:
    """Saves a random Llama and its tokenizer under `path` and returns that folder.

    Head dimension is 32 whatever the hidden size, the smallest that vLLM's CPU
    attention takes. `init_scale` is the standard deviation of the weights: large enough that
    the next-token distribution is far from uniform, so that greedy text depends on the seed.
    Seconds: about half of one. Same arguments, same bytes.
    """
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    build_tiny_tokenizer(folder, vocab_size=min(vocab_size, 320))
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=32,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tie_embeddings,
        initializer_range=init_scale,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0)
    model.save_pretrained(folder)
    return folder
