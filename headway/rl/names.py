"""The names of everything here that a job can choose. No torch."""

from __future__ import annotations

from typing import Literal

ADVANTAGES = (
    "grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax",
    "opo", "grpo_passk", "gae",
)  # fmt: skip
WITHOUT_GROUPS = ("reinforce_plus_plus", "remax", "gae")
"""Advantages that do not compare the completions of one prompt."""
PER_TOKEN = ("reinforce_plus_plus", "gae")
"""Advantages that differ from token to token."""

POLICY_LOSSES = ("ppo_clip", "gspo", "cispo", "sapo", "gmpo", "gpg", "reinforce")
SEQUENCE_MEANS = ("gspo", "sapo", "gmpo")
"""Losses that are published with an aggregation of their own: seq-mean-token-mean."""

Aggregation = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]  # fmt: skip
KlForm = Literal["k1", "k2", "k3", "abs"]
Correction = Literal["none", "tis", "icepop", "decoupled"]
Level = Literal["token", "sequence"]
Proximal = Literal["recompute", "log_linear", "bypass"]
Rejection = Literal[
    "token_k1", "token_k2", "token_k3",
    "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
    "seq_mean_k1", "seq_mean_k2", "seq_mean_k3",
    "seq_max_k2", "seq_max_k3", "geometric",
]  # fmt: skip

ALIASES = {
    "vanilla": "ppo_clip", "geo_mean": "gmpo",
    "low_var_kl": "k3", "mse": "k2", "kl": "k1",
}  # fmt: skip
"""verl's names of the same things."""
