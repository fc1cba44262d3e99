"""What Megatron's parameters are made of, which models it can be, and what is refused by name."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headway.errors import InvalidSpec
from services.learner.megatron.architecture import Architecture, architecture_of
from services.learner.megatron.layout import Field, Part, check_names, layout
from services.learner.megatron.trainer import MegatronTrainer
from tests.support.families import SIZES
from tests.support.learning import job
from tests.support.tiny_model import build_tiny_model


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values)[:, None]


def arch(**changes: Any) -> Architecture:
    sizes: dict[str, Any] = {
        "num_layers": 1, "hidden_size": 1, "intermediate_size": 4, "num_heads": 4,
        "num_kv_heads": 2, "head_dim": 1, "vocab_size": 5, "norm_eps": 1e-6, "query_bias": True,
        "query_norm": True, "tied": False, "inv_freq": torch.zeros(0),
    }  # fmt: skip
    return Architecture(**(sizes | changes))


def found(ranks: int, name: str) -> Field:
    (field,) = [f for f in layout(arch(), ranks) if f.parameter.endswith(name)]
    return field


# heads 0 to 3 ask, heads 0 and 1 share the first key and value
WHOLE = {
    "self_attn.q_proj": column(0, 1, 2, 3),
    "self_attn.k_proj": column(10, 11),
    "self_attn.v_proj": column(20, 21),
    "mlp.gate_proj": column(0, 1, 2, 3),
    "mlp.up_proj": column(10, 11, 12, 13),
    "mlp.down_proj": torch.tensor([[0.0, 1.0, 2.0, 3.0]]),
    "embed_tokens": column(1, 2, 3, 4, 5),
}


def whole(part: Part) -> torch.Tensor:
    (tensor,) = [t for name, t in WHOLE.items() if name in part.name]
    return tensor[:, 0] if part.name.endswith("bias") else tensor


@pytest.mark.parametrize(
    ("name", "ranks", "rank", "joined"),
    [
        ("linear_qkv.weight", 1, 0, [0, 1, 10, 20, 2, 3, 11, 21]),
        ("linear_qkv.weight", 2, 0, [0, 1, 10, 20]),
        ("linear_qkv.weight", 2, 1, [2, 3, 11, 21]),
        ("linear_qkv.bias", 2, 1, [2, 3, 11, 21]),
        ("linear_fc1.weight", 1, 0, [0, 1, 2, 3, 10, 11, 12, 13]),
        ("linear_fc1.weight", 2, 1, [2, 3, 12, 13]),
        ("linear_fc2.weight", 2, 1, [2, 3]),
        ("word_embeddings.weight", 1, 0, [1, 2, 3, 4, 5]),
        ("word_embeddings.weight", 2, 0, [1, 2, 3]),
        ("word_embeddings.weight", 2, 1, [4, 5, 0]),
    ],
)
def test_a_parameter_is_joined_from_slices_and_taken_apart_again(name, ranks, rank, joined):
    field = found(ranks, name)
    slices = [part.cut(whole(part), rank, ranks) for part in field.parts]
    for part, piece in zip(field.parts, slices, strict=True):
        assert part.local_shape(rank, ranks) == tuple(piece.shape)
    rows = 3 if "word" in name and ranks == 2 else sum(len(piece) for piece in slices)
    made = field.join(slices, rows)
    assert made.flatten().tolist() == joined
    again = field.split(made, [len(piece) for piece in slices])
    assert all(torch.equal(a, b) for a, b in zip(again, slices, strict=True))


def test_a_rank_may_have_no_tokens_at_all():
    field = found(4, "word_embeddings.weight")  # two tokens a rank: 2, 2, 1, 0
    (part,) = field.parts
    assert [part.local_shape(rank, 4)[0] for rank in range(4)] == [2, 2, 1, 0]
    assert field.join([part.cut(whole(part), 3, 4)], 2).flatten().tolist() == [0, 0]


def test_only_norms_of_a_rank_s_own_heads_have_partial_gradients():
    partial = [field.parameter for field in layout(arch(), 2) if field.partial]
    start = "decoder.layers.0.self_attention."
    assert partial == [f"{start}q_layernorm.weight", f"{start}k_layernorm.weight"]


def model_of(kind: str, **changes: Any) -> Any:
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(sizes | changes)))


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_layout_has_every_tensor_of_a_family(kind):
    lm = model_of(kind, **({"sliding_window": None} if kind == "mistral" else {}))
    fields = layout(architecture_of(lm, 2), 2)
    tensors = dict(lm.named_parameters())
    assert check_names(fields, tensors) is None
    del tensors["model.norm.weight"]
    assert check_names(fields, tensors) == "model.norm.weight is missing"
    tensors["model.norm.weight"] = torch.zeros(3)
    assert check_names(fields, tensors) == "model.norm.weight has the shape (3,), not (64,)"
    tensors["model.norm.bias"] = tensors["model.norm.weight"]
    assert check_names(fields, tensors) == "model.norm.bias is not known"


@pytest.mark.parametrize(
    ("kind", "changes", "ranks", "said"),
    [
        ("gpt2", {}, 1, "cannot train a gpt2 model: it knows llama, mistral, qwen2, qwen3"),
        ("gemma", {}, 1, "cannot train a gemma model"),
        ("llama", {"attention_bias": True}, 1, "its attention_bias is True"),
        ("llama", {"mlp_bias": True}, 1, "its mlp_bias is True"),
        ("llama", {"hidden_act": "gelu"}, 1, "its hidden_act is gelu"),
        ("mistral", {"sliding_window": 64}, 1, "its sliding_window is 64"),
        (
            "qwen2",
            {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 64},
            1,
            "its layer_types is ['full_attention', 'sliding_attention']",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
            1,
            "no rotary positions of type yarn",
        ),
        ("llama", {}, 4, "tensor_model_parallel_size 4 does not divide the model's num_key_value"),
        ("llama", {}, 3, "tensor_model_parallel_size 3 does not divide the model's num_attention"),
        ("llama", {"intermediate_size": 97}, 2, "does not divide the model's intermediate_size 97"),
    ],
)
def test_models_that_megatron_is_no_home_for(kind, changes, ranks, said):
    with pytest.raises(InvalidSpec) as caught:
        architecture_of(model_of(kind, **changes), ranks)
    assert said in str(caught.value)


def test_without_megatron_core_the_job_is_told_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.core.models.gpt", None)
    model = build_tiny_model(tmp_path / "model")
    spec = job(model, actor__strategy="megatron")
    with pytest.raises(InvalidSpec, match=r"pip install 'headway\[megatron\]'"):
        MegatronTrainer(model, spec, 0, 1, torch.device("cpu"))
    assert not torch.distributed.is_initialized()
