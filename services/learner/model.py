"""The policy: a `transformers` causal language model that runs packed rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from headway.errors import InvalidSpec
from headway.rl.flops import DecoderShape
from headway.rl.packing import Row, Sample, lengthened, pack
from services.learner import attention
from services.learner.architecture import logit_cap, refuse, short_windows
from services.learner.head import HeadOutput, LossOf, Targets, policy_head

CHECK_WINDOW = 3  # tokens; the check's longest sequence has 6
CHECK_TOLERANCE = 1e-3  # of the largest logit; float32 rounding stays far below


@dataclass(frozen=True)
class DeviceRow:
    """A packed row where the model is, with its attention plan."""

    tokens: Tensor  # [1, L]
    positions: Tensor  # [1, L]
    sources: Tensor  # [S]
    targets: Targets  # of T completion tokens
    flat: Tensor  # [T] index into the batch's completion tokens
    tree: attention.Plan

    @staticmethod
    def of(row: Row, device: torch.device) -> DeviceRow:
        """Moves a row to the device and plans its attention."""
        row = lengthened(row, attention.row_multiple(device))
        return DeviceRow(
            tokens=row.tokens[None].to(device),
            positions=row.positions[None].to(device),
            sources=row.sources.to(device),
            targets=Targets(row.source_of.to(device), row.targets.to(device)),
            flat=row.flat.to(device),
            tree=attention.plan(row, device),
        )


class RunsRows(Protocol):
    """A policy, or a rank's part of one."""

    def __call__(
        self,
        row: DeviceRow,
        temperature: float,
        loss_of: LossOf,
        entropy_weights: Tensor | None = None,
    ) -> HeadOutput:
        """Loss, log-probs and entropy of the row's completion tokens; see `policy_head`."""


class Backbone(nn.Module):
    """A language model, or its body alone, that runs packed rows."""

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm = lm

    def hidden(self, row: DeviceRow) -> Tensor:
        """Last hidden states of a row, [L, d]."""
        body = self.lm.base_model
        output = body(
            input_ids=row.tokens, position_ids=row.positions, use_cache=False, tree=row.tree
        )
        states: Tensor = output.last_hidden_state
        return states[0]


class Policy(Backbone):
    """A language model with the loss inside its forward pass.

    Everything that touches a weight happens in `forward`, so that FSDP, which gathers a
    module's weights around its forward and backward pass, needs no special case for the
    head.
    """

    def forward(
        self,
        row: DeviceRow,
        temperature: float,
        loss_of: LossOf,
        entropy_weights: Tensor | None = None,
    ) -> HeadOutput:
        """Loss, log-probs and entropy of the row's completion tokens; see `policy_head`."""
        hidden = self.hidden(row)
        head = self.lm.get_output_embeddings()
        return policy_head(
            hidden[row.sources],
            head.weight,
            head.bias,
            row.targets,
            temperature,
            loss_of,
            entropy_weights,
            cap=logit_cap(self.lm),
        )


def decoder_shape(policy: Policy) -> DecoderShape:
    """What the work of a step depends on; before the parameters are sharded or after."""
    config = policy.lm.config.get_text_config()
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    head = policy.lm.get_output_embeddings().weight
    tables = {id(policy.lm.get_input_embeddings().weight), id(head)}
    body = [p for p in policy.lm.parameters() if p.ndim > 1 and id(p) not in tables]
    return DecoderShape(
        body_params=sum(p.numel() for p in body),
        num_layers=config.num_hidden_layers,
        attention_width=heads * head_dim,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        frozen_params=sum(p.numel() for p in body if not p.requires_grad),
        frozen_head=not head.requires_grad,
    )


def load_policy(path: Path, *, gradient_checkpointing: bool = False) -> Policy:
    """The model of a Hugging Face folder with float32 weights, checked to run packed rows.

    Dropout is off: completions were sampled without, and a ratio of policies must not
    be noise. InvalidSpec when the folder or its architecture cannot be trained.
    """
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # a service's stderr is its log
    AttentionInterface.register(attention.NAME, attention.tree_attention)
    if not (path / "config.json").is_file():
        raise InvalidSpec(f"{path} is not a model folder: it has no config.json")
    try:
        lm = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=torch.float32,
            attn_implementation=attention.NAME,
            local_files_only=True,
        )
    except (OSError, ValueError) as error:
        raise InvalidSpec(f"cannot load the model in {path}: {error}") from None
    policy = prepare(lm)
    if gradient_checkpointing:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return policy


def prepare(lm: Any) -> Policy:
    """A policy from a loaded causal language model. InvalidSpec when it cannot be trained."""
    for module in lm.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for parameter in lm.parameters():
        parameter.requires_grad_(True)
    refuse(lm)
    policy = Policy(lm)
    with short_windows(lm, CHECK_WINDOW):
        check_packing(policy)
    policy.train()
    return policy


def check_samples(vocabulary: int) -> list[Sample]:
    """Completions that share a prompt and one that does not, of tokens all over a vocabulary."""
    a, b, c, d, e = (int(i * vocabulary / 7) for i in range(1, 6))
    return [Sample((a, b, c), (d, e, a, b)), Sample((a, b, c), (e, e, d)), Sample((d,), (b, a))]


@torch.no_grad()
def check_packing(policy: Policy) -> None:
    """Compares a packed row with the model's own forward pass on each sample alone.

    Whatever an architecture does differently (its attention, its positions, a scaled or
    capped head) shows here, before a step is trained. InvalidSpec says what differs.
    """
    name = type(policy.lm).__name__
    head = policy.lm.get_output_embeddings()
    if not isinstance(head, nn.Linear) or policy.lm.base_model is policy.lm:
        raise InvalidSpec(f"{name} cannot be trained: it has no linear lm_head over a base model")
    samples = check_samples(head.weight.shape[0])
    (row,) = pack(samples, row_tokens=64)
    policy.eval()
    try:
        packed = head(policy.hidden(DeviceRow.of(row, torch.device("cpu")))[row.sources]).float()
        cap = logit_cap(policy.lm)
        packed = packed if cap is None else cap * torch.tanh(packed / cap)
    except (TypeError, KeyError, AttributeError) as error:
        raise InvalidSpec(f"{name} cannot run packed rows: {error}") from error
    # alone, a sample is a row of its own: the model must then agree with its default attention
    own = policy.lm.config._attn_implementation
    policy.lm.set_attn_implementation("eager")
    try:
        alone = torch.cat(
            [
                policy.lm(input_ids=torch.tensor([s.prompt + s.completion[:-1]]), use_cache=False)
                .logits[0, len(s.prompt) - 1 :]
                .float()
                for s in samples
            ]
        )
    finally:
        policy.lm.set_attn_implementation(own)
    order = torch.argsort(row.flat)
    gap = (packed[row.source_of[order]] - alone).abs().max()
    if not gap <= CHECK_TOLERANCE * alone.abs().max():
        raise InvalidSpec(
            f"{name} cannot run packed rows: its logits differ by {gap:.3g} from its own forward"
            " pass, so its attention, positions or head are of a kind that is not supported"
        )
