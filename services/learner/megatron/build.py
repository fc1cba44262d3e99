"""Megatron's model of an architecture. The one place that imports megatron-core."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from headway.errors import InvalidSpec
from services.learner.attention import Plan, tree_attention
from services.learner.megatron.architecture import Architecture


class TreeCore(nn.Module):
    """Attention of a rank's heads over a packed row, in the place of Megatron's core attention.

    Megatron passes what its caller gave as attention mask on unseen: here the row's plan.
    """

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, tree: Plan, **_: Any) -> Tensor:
        """query [L, 1, H, D], key and value [L, 1, KV, D]; returns [L, 1, H D]."""
        q, k, v = (states.permute(1, 2, 0, 3) for states in (query, key, value))
        out, _weights = tree_attention(self, q, k, v, None, tree=tree)
        return out.flatten(2).transpose(0, 1)


def megatron_core() -> SimpleNamespace:
    """What is used of megatron-core. InvalidSpec when it is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that Apex and Transformer Engine are not here
            from megatron.core.models.gpt import GPTModel
            from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
            from megatron.core.process_groups_config import ProcessGroupCollection
            from megatron.core.transformer.transformer_config import TransformerConfig
    except ImportError as error:
        raise InvalidSpec(
            "actor.strategy megatron needs megatron-core on the learner's machine"
            f" (pip install 'headway[megatron]'): {error}"
        ) from None
    return SimpleNamespace(
        GPTModel=GPTModel,
        layer_spec=get_gpt_layer_local_spec,
        Groups=ProcessGroupCollection,
        Config=TransformerConfig,
    )


def build(
    arch: Architecture, mesh: DeviceMesh, *, padded_vocabulary: int, gradient_checkpointing: bool
) -> Any:
    """A rank's `GPTModel` in float32 on the CPU, its weights not set yet.

    `mesh` has the dimensions pp, cp and tp. InvalidSpec when megatron-core is not installed.
    """
    core = megatron_core()
    config = core.Config(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        ffn_hidden_size=arch.intermediate_size,
        num_attention_heads=arch.num_heads,
        num_query_groups=arch.num_kv_heads,
        kv_channels=arch.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=arch.query_bias,
        qk_layernorm=arch.query_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=mesh["tp"].size(),
        params_dtype=torch.float32,
        use_cpu_initialization=True,
        perform_initialization=False,
        # fused kernels are for GPUs with Apex or Transformer Engine
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )
    spec = core.layer_spec(qk_layernorm=arch.query_norm, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = TreeCore
    groups = {name: mesh[name].get_group() for name in ("tp", "pp", "cp")}
    model = core.GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=padded_vocabulary,
        max_sequence_length=0,  # positions are rotary and made by the policy
        share_embeddings_and_output_weights=arch.tied,
        position_embedding_type="none",
        pg_collection=core.Groups(**groups, embd=None, pos_embd=None),
    )
    if gradient_checkpointing:
        for layer in model.decoder.layers:
            layer.forward = _checkpointed(layer.forward)
    return model


def _checkpointed(forward: Any) -> Any:
    def again(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return again
