"""Memory that a job needs, in bytes, worked out before anything is started.

Pure arithmetic. Estimates err on the high side; each term says what it counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headway.adapter_size import adapted_params, adapter_params
from headway.jobspec import JobSpec
from headway.model_size import ModelShape
from headway.precision import DtypeOrAuto, has_gpu, resolve_dtype
from headway.row_budget import row_budget

GIB = 1 << 30
_DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
_HEAD_CHUNK_TOKENS = 1024  # completion positions whose logits are held at once
_LEARNER_PROCESS_BYTES = int(0.7 * GIB)  # interpreter, torch, transformers
_ROLLOUT_PROCESS_BYTES = int(1.8 * GIB)  # vLLM's front end and engine processes
_SIM_PROCESS_BYTES = int(0.15 * GIB)
SMALL_SERVICES_BYTES = int(0.6 * GIB)  # coordinator, reward service with its workers, Redis


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """One process's share: `terms` name -> bytes."""

    terms: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes of all terms."""
        return sum(self.terms.values())


def _width(dtype: DtypeOrAuto) -> int:
    """Bytes of one value on this machine, which is taken to be like the fleet's."""
    return _DTYPE_BYTES[resolve_dtype(dtype, on_gpu=has_gpu())]


def learner_rank_memory(
    job: JobSpec, shape: ModelShape, critic: ModelShape | None = None
) -> PoolMemory:
    """One training process; sharded terms are divided by the ranks that share, rounded up.

    `critic` is the model that a job's critic starts from, counted with its head of tokens.
    """
    ranks, params = job.actor.model_ranks, trained_params(job, shape)
    shard, base = -(-params // ranks), -(-shape.num_params // ranks)
    critic_shard = -(-critic.num_params // ranks) if critic is not None else 0
    compute = _width(job.actor.compute_dtype)
    copied = compute < 4 or job.actor.strategy == "megatron"
    tokens, lora = longest_row(job), bool(job.model.lora_rank)
    terms = {
        "base weights": compute * base if lora else 0,
        "base weights in float32, while they are loaded": (4 - compute) * base if lora else 0,
        "master weights (float32)": 4 * shard,
        "compute copy": compute * shard if copied else 0,
        # adapters have theirs in the policy
        "reference policy": compute * base if job.needs_reference and not lora else 0,
        "gradients (float32)": 4 * shard,
        "AdamW moments (float32)": 8 * shard,
        "critic: masters, gradients, AdamW moments (float32)": 16 * critic_shard,
        "critic: compute copy": compute * critic_shard if compute < 4 else 0,
        "staging copy for publishing": _width(job.rollout.dtype) * params,
        f"activations, one row of {tokens} tokens": max(  # one model's at a time
            activation_bytes(job, each, tokens) for each in (shape, critic) if each is not None
        ),
        "process": _LEARNER_PROCESS_BYTES,
    }
    return PoolMemory({name: size for name, size in terms.items() if size})


def eval_lead_memory(job: JobSpec, shape: ModelShape) -> PoolMemory:
    """The lead process of an eval job: the weights as they are sent, and nothing to train them."""
    width = _width(job.rollout.dtype)
    return PoolMemory(
        {"weights to be sent": width * shape.num_params, "process": _LEARNER_PROCESS_BYTES}
    )


def trained_params(job: JobSpec, shape: ModelShape) -> int:
    """Weights that are trained, kept in checkpoints and published: adapters, or all."""
    return adapter_params(job, shape) if job.model.lora_rank else shape.num_params


def activation_bytes(job: JobSpec, shape: ModelShape, tokens: int) -> int:
    """What the backward pass of one row keeps, plus one chunk of logits and their gradient.

    Per token and layer of a gated decoder: 6 vectors of hidden size (block inputs, norms,
    attention and MLP outputs), the query, key and value heads, 4 MLP vectors. With
    gradient checkpointing: each layer's input, and one layer's full set.
    """
    width = _width(job.actor.compute_dtype)
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    layer = 6 * shape.hidden_size + heads + 4 * shape.intermediate_size
    if job.actor.gradient_checkpointing:
        kept = shape.num_layers * shape.hidden_size + layer
    else:
        kept = shape.num_layers * layer
    chunk = min(_HEAD_CHUNK_TOKENS, job.rollout.n * job.rollout.max_tokens)
    return tokens * kept * width + 2 * 4 * chunk * shape.vocab_size


def rollout_node_memory(job: JobSpec, shape: ModelShape, engine: str) -> PoolMemory:
    """One rollout node on CPUs, all its processes together. The sim engine holds no model."""
    if engine == "sim":
        return PoolMemory({"process": _SIM_PROCESS_BYTES})
    width = _width(job.rollout.dtype)
    # adapters are added to their weights on the host
    incoming = trained_params(job, shape) + adapted_params(job, shape)
    return PoolMemory(
        {
            f"weights ({resolve_dtype(job.rollout.dtype, on_gpu=has_gpu())})": width
            * shape.num_params,
            "incoming weights": width * incoming,
            "KV cache": int(job.rollout.kv_cache_gib * GIB),
            "process": _ROLLOUT_PROCESS_BYTES,
        }
    )


def kv_bytes_per_token(job: JobSpec, shape: ModelShape) -> int:
    """Keys and values of one token in all layers."""
    width = _width(job.rollout.dtype)
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * width


def longest_row(job: JobSpec) -> int:
    """Tokens of the longest training row: a rank's groups, up to the row budget."""
    prompt, answer = job.data.max_prompt_length, job.rollout.max_tokens
    groups = job.mini_batch_size // job.actor.data_ranks
    budget = row_budget(job.actor.ppo_max_token_len_per_gpu, on_gpu=has_gpu())
    return min(groups * (prompt + job.rollout.n * answer), max(budget, prompt + answer))


def checkpoint_bytes(job: JobSpec, shape: ModelShape, critic: ModelShape | None = None) -> int:
    """One checkpoint: float32 weights and both AdamW moments of what is trained, a critic too."""
    values = critic.num_params if critic is not None else 0
    return 12 * (trained_params(job, shape) + values)


def export_bytes(job: JobSpec, shape: ModelShape) -> int:
    """The exported Hugging Face folder, in the rollout dtype, and float32 adapters in it."""
    adapters = 4 * adapter_params(job, shape)
    return _width(job.rollout.dtype) * shape.num_params + adapters
