"""How a job trains: the policy's and the critic's updates, the length of the job, what it keeps."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from headway.jobspec_algorithm import KlForm
from headway.jobspec_ranks import RanksSpec
from headway.jobspec_section import Gib, Section
from headway.precision import DtypeOrAuto

Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimSpec(Section):
    """AdamW on float32 master weights."""

    lr: float = Field(default=1e-6, gt=0)
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    lr_warmup_steps: int = Field(default=0, ge=0)
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip: float = Field(default=1.0, gt=0, description="largest gradient norm")


class ActorSpec(RanksSpec):
    """How the policy is trained."""

    optim: OptimSpec = OptimSpec()
    ppo_mini_batch_size: int | None = Field(
        default=None, ge=1, description="groups an optimiser update; default: the whole batch"
    )
    ppo_epochs: int = Field(default=1, ge=1)
    compute_dtype: DtypeOrAuto = Field(
        default="auto", description="auto: bfloat16 where the machine multiplies it, else float32"
    )
    ppo_max_token_len_per_gpu: int | None = Field(
        default=None,
        ge=1,
        description="input tokens a row (a forward and backward pass of one rank), on a CPU too;"
        " default: 2048 on a CPU, 8192 on a GPU",
    )
    gradient_checkpointing: bool = False
    use_kl_loss: bool = Field(default=False, description="KL to the first weights in the loss")
    kl_loss_coef: float = Field(default=0.001, ge=0)
    kl_loss_type: KlForm = "k3"
    entropy_coeff: float = Field(
        default=0.0, ge=0, description="times the entropy, taken from the loss"
    )
    max_nonfinite_steps: int = Field(default=3, ge=1, description="skipped steps before failure")


class CriticModelSpec(Section):
    """What the critic starts from; its head is new."""

    path: str | None = Field(
        default=None, description="a model as in model.path, of its vocabulary; default: model.path"
    )


class CriticOptimSpec(OptimSpec):
    """AdamW on float32 master weights."""

    lr: float = Field(default=1e-5, gt=0)


class CriticSpec(Section):
    """How the critic of `adv_estimator: gae` is trained; dtype, checkpointing, ranks: as the actor.

    It is a model of its own: a copy of a language model's body with a head for values.
    """

    model: CriticModelSpec = CriticModelSpec()
    optim: CriticOptimSpec = CriticOptimSpec()
    ppo_mini_batch_size: int | None = Field(
        default=None, ge=1, description="groups an optimiser update; default: the actor's"
    )
    ppo_epochs: int | None = Field(default=None, ge=1, description="default: the actor's")
    cliprange_value: float | None = Field(
        default=0.5, gt=0, description="how far a value may move in a step's loss; null: off"
    )


class TrainerSpec(Section):
    """Length of the job and what it keeps."""

    total_training_steps: int = Field(ge=1)
    critic_warmup: int = Field(
        default=0, ge=0, description="first steps, in which the critic alone is trained"
    )
    save_freq: int = Field(
        default=10, ge=0, description="steps between checkpoints; 0: only the last"
    )
    max_ckpt_to_keep: int = Field(default=2, ge=1)
    export: bool = Field(default=True, description="write model/ (Hugging Face) at the end")
    max_record_gib: Gib = Field(
        default=4.0, ge=0, description="size of groups.log, for `headway replay`; 0: none"
    )
