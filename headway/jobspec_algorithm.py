"""The algorithm of a job: advantage, loss, mean, KL, correction, lag; what does not go together.

Names come from `headway.rl.names`; verl's other names for the same things are taken too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BeforeValidator, Field, model_validator

from headway.jobspec_section import Section
from headway.rl import names
from headway.suggestions import near

_CLIPS = {"gspo": (3e-4, 4e-4), "gmpo": (0.4, 0.4)}  # as published; others 0.2, 0.2


def _one_of(known: Sequence[str]) -> BeforeValidator:
    def check(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        value = names.ALIASES.get(value, value)
        if value not in known:
            raise ValueError(
                f"there is no {value}{near(value, known)}; there are {', '.join(known)}"
            )
        return value

    return BeforeValidator(check)


Aggregation = Annotated[names.Aggregation, _one_of(get_args(names.Aggregation))]
KlForm = Annotated[names.KlForm, _one_of(get_args(names.KlForm))]
_Kind = Annotated[names.Correction, _one_of(get_args(names.Correction))]
_Rejection = Annotated[names.Rejection | None, _one_of(get_args(names.Rejection))]


class CorrectionSpec(Section):
    """Correction of the off-policy distribution; see docs/algorithms.md."""

    type: _Kind = Field(default="tis", description="the weight of a token")
    level: names.Level = Field(default="token", description="what a weight belongs to")
    tis_cap: float = Field(default=2.0, gt=0, description="C in min(w, C)")
    icepop_low: float = Field(default=0.5, gt=0)
    icepop_high: float = Field(default=5.0, gt=0)
    rollout_rs: _Rejection = Field(
        default=None, description="rejection by a divergence estimate of tokens or completions"
    )
    rs_low: float | None = Field(
        default=None, gt=0, description="k1: of the ratio; null: 1 / rs_high (geometric: 0.99)"
    )
    rs_high: float | None = Field(
        default=None, gt=0, description="k1: of the ratio; k2, k3: of the estimate"
    )
    proximal: names.Proximal = Field(
        default="recompute", description="what the clip compares with; bypass with type none"
    )
    proximal_alpha: float = Field(
        default=0.5, ge=0, le=1, description="log_linear: 0 is the sampler, 1 the policy itself"
    )

    @model_validator(mode="before")
    @classmethod
    def _proximal_of_the_type(cls, raw: Any) -> Any:
        if isinstance(raw, dict) and raw.get("type") == "none":
            return {"proximal": "bypass", **raw}
        return raw

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.icepop_low >= self.icepop_high:
            raise ValueError(
                f"icepop_low {self.icepop_low} is not below icepop_high {self.icepop_high}"
            )
        if self.type == "none" and self.level == "sequence":
            raise ValueError("level sequence has no weight to make: type is none")
        if self.proximal == "bypass" and (self.type != "none" or self.rollout_rs):
            what = f"rollout_rs {self.rollout_rs}" if self.rollout_rs else f"type {self.type}"
            raise ValueError(
                f"proximal bypass takes the sampler for the proximal policy, so {what} would find"
                " every ratio to be 1: use proximal recompute"
            )
        if self.proximal == "log_linear" and self.by_sequence:
            raise ValueError(
                "proximal log_linear is known token by token: level sequence, and rollout_rs of"
                " completions, need proximal recompute"
            )
        self._check_rejection()
        return self

    def _check_rejection(self) -> None:
        rule, low, high = self.rollout_rs, self.rs_low, self.rs_high
        if rule is None:
            if low is not None or high is not None:
                raise ValueError("rs_low and rs_high are bounds of rollout_rs, which is not set")
            return
        if rule != "geometric" and high is None:
            raise ValueError(f"rollout_rs {rule} needs rs_high")
        if low is not None and rule != "geometric" and not rule.endswith("k1"):
            raise ValueError(f"rollout_rs {rule} has no lower bound: leave rs_low out")
        bounds = self.rejection_bounds
        if bounds[0] is not None and bounds[0] >= bounds[1]:
            raise ValueError(f"rs_low {bounds[0]:g} is not below rs_high {bounds[1]:g}")

    @property
    def by_sequence(self) -> bool:
        """Whether a token's correction depends on its whole completion."""
        rule = self.rollout_rs
        return self.level == "sequence" or (rule is not None and not rule.startswith("token"))

    @property
    def rejection_bounds(self) -> tuple[float | None, float]:
        """Lower (k1 only) and upper bound of the rejection."""
        low, high = self.rs_low, self.rs_high
        if self.rollout_rs == "geometric":
            return 0.99 if low is None else low, 1.01 if high is None else high
        assert high is not None
        if low is None and self.rollout_rs is not None and self.rollout_rs.endswith("k1"):
            return 1 / high, high
        return low, high


class KlCtrlSpec(Section):
    """The coefficient of a KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    kl_coef: float = Field(default=0.001, ge=0, description="adaptive: of the first step")
    horizon: int = Field(default=10_000, ge=1, description="adaptive: completions")
    target_kl: float = Field(default=0.1, gt=0, description="adaptive: nats a token")


class AlgorithmSpec(Section):
    """Advantage, loss and lag."""

    adv_estimator: str = Field(default="grpo", description=", ".join(names.ADVANTAGES))
    norm_adv_by_std_in_grpo: bool = Field(default=True, description="grpo; false: dr_grpo")
    gamma: float = Field(default=1.0, ge=0, le=1, description="gae, reinforce_plus_plus: discount")
    lam: float = Field(default=1.0, ge=0, le=1, description="gae: λ; 0 is one step ahead")
    policy_loss: str = Field(default="ppo_clip", description=", ".join(names.POLICY_LOSSES))
    clip_ratio_low: float = Field(
        default=0.2, gt=0, description="gspo: 0.0003; gmpo: 0.4, of the log-ratio"
    )
    clip_ratio_high: float = Field(default=0.2, gt=0, description="gspo: 0.0004; gmpo: 0.4")
    clip_ratio_c: float | None = Field(
        default=3.0, gt=1, description="dual clip of ppo_clip; null: off"
    )
    tau_pos: float = Field(default=1.0, gt=0, description="sapo, A > 0")
    tau_neg: float = Field(default=1.05, gt=0, description="sapo, A <= 0")
    loss_agg_mode: Aggregation = Field(
        default="token-mean", description="gspo, sapo, gmpo: seq-mean-token-mean"
    )
    loss_scale_factor: int | None = Field(
        default=None, ge=1, description="the constant of seq-mean-token-sum-norm, in tokens"
    )
    use_kl_in_reward: bool = False
    kl_penalty: KlForm = Field(default="k1", description="form of the KL in the reward")
    kl_ctrl: KlCtrlSpec = KlCtrlSpec()
    rollout_correction: CorrectionSpec = CorrectionSpec()
    dynamic_sampling: bool = Field(default=False, description="filter zero-variance groups")
    max_num_gen_batches: int = Field(
        default=10, ge=1, description="batches sampled for one batch that dynamic_sampling fills"
    )
    custom: str | None = Field(
        default=None, description="Python file on the learner's machine with names of your own"
    )
    max_policy_lag: int = Field(default=2, ge=0, description="eta; 0 is synchronous training")
    on_late: Literal["wait", "mask", "drop"] = "wait"

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_loss(cls, raw: Any) -> Any:
        """verl's names, and the clip and the mean that a loss was published with."""
        if not isinstance(raw, dict) or not isinstance(raw.get("policy_loss", ""), str):
            return raw
        loss = raw.get("policy_loss", "ppo_clip")
        loss = names.ALIASES.get(loss, loss)
        made: dict[str, Any] = {}
        if loss in _CLIPS:
            made["clip_ratio_low"], made["clip_ratio_high"] = _CLIPS[loss]
        if loss != "ppo_clip":
            made["clip_ratio_c"] = None
        if loss in names.SEQUENCE_MEANS:
            made["loss_agg_mode"] = "seq-mean-token-mean"
        return {**made, **raw, **({"policy_loss": loss} if "policy_loss" in raw else {})}

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        self._check_names()
        self._check_advantage()
        self._check_loss()
        if self.kl_ctrl.type == "adaptive" and not self.use_kl_in_reward:
            raise ValueError(
                "kl_ctrl.type adaptive steers the KL in the reward: set use_kl_in_reward, or use"
                " actor.use_kl_loss, whose coefficient is fixed"
            )
        return self

    def _check_names(self) -> None:
        if self.custom is not None:
            if "://" in self.custom or not self.custom.endswith(".py"):
                raise ValueError(f"custom '{self.custom}' is not the path of a local .py file")
            return  # the learner, which loads the file, knows the names
        for key, known in (
            ("adv_estimator", names.ADVANTAGES),
            ("policy_loss", names.POLICY_LOSSES),
        ):
            name = getattr(self, key)
            if name not in known:
                raise ValueError(
                    f"{key}: there is no {name}{near(name, known)}; there are {', '.join(known)},"
                    " and what algorithm.custom adds"
                )

    def _check_advantage(self) -> None:
        name = self.adv_estimator
        if not self.norm_adv_by_std_in_grpo and name not in ("grpo", "dr_grpo"):
            raise ValueError(f"norm_adv_by_std_in_grpo belongs to grpo, not to {name}")
        if self.gamma != 1.0 and name not in names.PER_TOKEN:
            raise ValueError(
                f"gamma {self.gamma:g} discounts {' and '.join(names.PER_TOKEN)}, not {name}"
            )
        if self.lam != 1.0 and name != "gae":
            raise ValueError(f"lam {self.lam:g} belongs to gae, not to {name}")

    def _check_loss(self) -> None:
        loss, mode = self.policy_loss, self.loss_agg_mode
        if loss in names.SEQUENCE_MEANS and mode != "seq-mean-token-mean":
            raise ValueError(
                f"policy_loss {loss} is a mean over completions: loss_agg_mode {mode} is another"
                " loss (leave it out)"
            )
        if (mode == "seq-mean-token-sum-norm") != (self.loss_scale_factor is not None):
            raise ValueError(
                "loss_agg_mode seq-mean-token-sum-norm divides by loss_scale_factor, a constant"
                " such as rollout.max_tokens: set both or neither"
            )
        if self.clip_ratio_c is not None and loss != "ppo_clip":
            raise ValueError(f"clip_ratio_c is the dual clip of ppo_clip, not of {loss}")
        if self.clip_ratio_low >= 1 and loss in ("ppo_clip", "gspo"):
            raise ValueError(
                f"clip_ratio_low {self.clip_ratio_low:g} bounds no ratio from below with {loss}:"
                " it is less than 1"
            )

    @property
    def greedy_baseline(self) -> bool:
        """Whether each group is compared with the greedy completion of its prompt."""
        return self.adv_estimator == "remax"

    @property
    def sequence_ratio(self) -> bool:
        """Whether the loss of a token depends on π of its whole completion."""
        return self.policy_loss in ("gspo", "gmpo")
