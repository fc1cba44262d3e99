"""Losses, means, KL and corrections against a second implementation, values and gradients.

Ours: float64 tensors over flat tokens (weights of tokens are float32), autograd. The other:
plain Python over completions, central differences. Completions are ragged, with holes, one of
one token, one empty, one wholly masked.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headway.jobspec import AlgorithmSpec, CorrectionSpec
from headway.rl import losses
from headway.rl.aggregate import Counts, aggregate, denominator, token_weights
from headway.rl.corrections import correct, log_linear, reject
from headway.rl.kl import adapted, kl
from headway.rl.names import Aggregation, Rejection
from headway.rl.sequences import Sequences
from services.learner.objective import policy_loss
from tests.support import rl_reference as ref
from tests.support.rl_reference import Table

F64 = torch.float64
LENGTHS = (5, 1, 0, 3, 4, 2)
MASK = [
    [True, False, True, True, False],
    [True],
    [],
    [False, False, False],
    [True, True, True, True],
    [False, True],
]
MODES = (
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)  # fmt: skip


def table(seed: int, low: float, high: float) -> Table:
    rng = random.Random(seed)
    return [[rng.uniform(low, high) for _ in range(n)] for n in LENGTHS]


def near(at: Table, spread: float, seed: int) -> Table:
    rng = random.Random(seed)
    return [[x + rng.uniform(-spread, spread) for x in row] for row in at]


def flat(rows: Table) -> Tensor:
    return torch.tensor([x for row in rows for x in row], dtype=F64)


def sequences() -> Sequences:
    index = [i for i, n in enumerate(LENGTHS) for _ in range(n)]
    mask = torch.tensor([k for row in MASK for k in row])
    return Sequences(mask, torch.tensor(index), len(LENGTHS))


def poisoned(values: Tensor) -> Tensor:
    """Not a number where the mask hides it."""
    return torch.where(sequences().mask, values, torch.nan)


ADVANTAGES = [[1.5] * 5, [-0.7] * 1, [], [2.0] * 3, [-1.2] * 4, [0.9] * 2]
OLD = table(1, -3.0, -0.5)
NOW = near(OLD, 0.6, 2)
TIGHT = near(OLD, 0.001, 3)  # for gspo's narrow bounds


def ours(
    leaf: Tensor, algorithm: AlgorithmSpec, mode: Aggregation, cut: slice = slice(None)
) -> Tensor:
    """The objective, or the part of it that the tokens of a cut have."""
    seq, old, a = sequences(), flat(OLD), flat(ADVANTAGES)
    log_ratio = leaf.detach() - old
    if algorithm.policy_loss == "gmpo":
        clip = {"clip_low": algorithm.clip_ratio_low, "clip_high": algorithm.clip_ratio_high}
        log_ratio, _ = losses.gmpo_log_ratio(leaf.detach(), old, a, **clip)
    log_ratio = seq.spread(seq.mean(log_ratio))
    found = policy_loss(algorithm, leaf[cut], old[cut], a[cut], log_ratio[cut])
    weights = token_weights(mode, seq)
    counts = Counts(int(seq.mask.sum()), int((seq.lengths() > 0).sum()))
    divisor = denominator(mode, counts, 7)
    return aggregate(found.loss, seq.mask[cut], None if weights is None else weights[cut], divisor)


def theirs(name: str, mode: str, at: Table, **k: float) -> Callable[[Table], float]:
    """The objective as a function of log π; stopped gradients stay at `at`."""
    rows = list(zip(OLD, ADVANTAGES, MASK, at, strict=True))

    def tokens(lp: Table) -> float:
        made = [
            [ref.token_loss(name, *x, **k) for x in zip(row, frozen, old, a, strict=True)]
            for row, (old, a, _, frozen) in zip(lp, rows, strict=True)
        ]
        return ref.aggregate(mode, made, MASK, 7)

    def whole(lp: Table) -> float:
        made = [
            ref.sequence_loss(name, row, old, a[0] if a else 0.0, kept, **k)
            for row, (old, a, kept, _) in zip(lp, rows, strict=True)
            if any(kept)
        ]
        return ref.mean(made)

    return whole if name in ("gspo", "gmpo") else tokens


CASES = [
    ("ppo_clip", {}, {"dual": 3.0}, NOW),
    ("ppo_clip", {"clip_ratio_c": None}, {}, NOW),
    ("ppo_clip", {"clip_ratio_high": 0.28, "clip_ratio_c": 1.1}, {"high": 0.28, "dual": 1.1}, NOW),
    ("gspo", {}, {"low": 3e-4, "high": 4e-4}, TIGHT),
    ("gspo", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3}, {"low": 0.2, "high": 0.3}, NOW),
    ("gmpo", {}, {"low": 0.4, "high": 0.4}, NOW),
    ("gmpo", {"clip_ratio_low": 0.1, "clip_ratio_high": 0.2}, {"low": 0.1, "high": 0.2}, NOW),
    ("cispo", {}, {}, NOW),
    ("cispo", {"clip_ratio_low": 10.0, "clip_ratio_high": 0.3}, {"low": 10.0, "high": 0.3}, NOW),
    ("sapo", {}, {}, NOW),
    ("sapo", {"tau_pos": 2.0, "tau_neg": 0.5}, {"pos": 2.0, "neg": 0.5}, NOW),
    ("gpg", {}, {}, NOW),
    ("reinforce", {}, {}, NOW),
]


@pytest.mark.parametrize(("name", "settings", "k", "at"), CASES)
def test_losses_and_gradients(name, settings, k, at):
    algorithm = AlgorithmSpec(policy_loss=name, **settings)
    for mode in MODES if name == "ppo_clip" else (algorithm.loss_agg_mode,):
        leaf = flat(at).requires_grad_(True)
        loss = ours(leaf, algorithm, mode)
        loss.backward()
        objective = theirs(name, mode, at, **k)
        assert float(loss.detach()) == pytest.approx(objective(at), rel=1e-6)  # float32 weights
        assert leaf.grad is not None
        slopes = flat(ref.gradient(objective, at))
        assert leaf.grad.tolist() == pytest.approx(slopes.tolist(), abs=1e-7)
        assert (leaf.grad[sequences().mask] != 0).any()
        # parts add up to the whole
        parts = sum(
            float(ours(leaf, algorithm, mode, slice(i, i + 4)).detach()) for i in range(0, 15, 4)
        )
        assert parts == pytest.approx(float(loss.detach()), rel=1e-12)


def extreme(name: str, log_ratio: float, advantage: float) -> tuple[float, float]:
    """Loss and slope of a one-token completion with that log-ratio."""
    leaf = torch.tensor([log_ratio - 46.0], dtype=F64, requires_grad=True)
    old, a = torch.tensor([-46.0], dtype=F64), torch.tensor([advantage], dtype=F64)
    algorithm = AlgorithmSpec(policy_loss=name)
    moved = leaf.detach() - old
    if name == "gmpo":
        moved, _ = losses.gmpo_log_ratio(leaf.detach(), old, a)
    loss = policy_loss(algorithm, leaf, old, a, moved).loss
    loss.sum().backward()
    assert leaf.grad is not None
    return float(loss.detach()), float(leaf.grad)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [45.0, -45.0])
def test_a_log_ratio_of_45_stays_bounded(sign, log_ratio):
    top = math.exp(20.0)
    bound = {
        "ppo_clip": 3.0,
        "gspo": math.exp(10.0),
        "gmpo": top,
        "cispo": 1.2 * 46 * 2,
        "sapo": 4.0,
    }
    for name, most in bound.items():
        value, slope = extreme(name, log_ratio, sign)
        assert abs(value) <= most * (1 + 1e-12), name
        assert abs(slope) <= max(most, 1.2), name
    assert extreme("gspo", 45.0, -1.0) == pytest.approx((math.exp(10.0), 0.0))
    assert extreme("gmpo", 45.0, -1.0) == pytest.approx((top, 0.0))
    assert extreme("gmpo", 45.0, 1.0) == pytest.approx((-math.exp(0.4), 0.0))
    assert extreme("ppo_clip", 45.0, -1.0) == (3.0, 0.0)


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "gmpo", "cispo", "sapo", "gpg", "reinforce"])
def test_on_policy_every_loss_has_the_policy_gradient(name):
    for a in (1.5, -0.5):
        leaf = torch.tensor([-1.0], dtype=F64, requires_grad=True)
        old = leaf.detach().clone()
        algorithm = AlgorithmSpec(policy_loss=name)
        found = policy_loss(
            algorithm, leaf, old, torch.tensor([a], dtype=F64), torch.zeros(1, dtype=F64)
        )
        found.loss.sum().backward()
        assert leaf.grad is not None and float(leaf.grad) == pytest.approx(-a)
        assert not found.clipped.any() and not found.clipped_low.any()


def test_value_loss_table_and_gradient():
    # R 1, V_old 0, clip 0.5: V 0.2 -> (0.8)²/2; V 0.9 clips to 0.5 -> max(0.01, 0.25)/2, no slope
    v = torch.tensor([0.2, 0.9, -0.9], dtype=F64, requires_grad=True)
    zeros, ones = torch.zeros(3, dtype=F64), torch.ones(3, dtype=F64)
    loss, clipped = losses.value(v, zeros, ones, clip=0.5)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([0.32, 0.125, 1.805])  # -0.9 is worse than its bound
    assert clipped.tolist() == [False, True, False]
    assert v.grad is not None and v.grad.tolist() == pytest.approx([-0.8, 0.0, -1.9])


def test_means_count_what_is_not_empty():
    counts = Counts(tokens=9, sequences=4)
    wanted = {"token-mean": 9, "token-sum": 1, "seq-mean-token-sum": 4, "seq-mean-token-mean": 4}
    for mode, value in wanted.items():
        assert denominator(mode, counts) == value  # type: ignore[arg-type]
    assert denominator("seq-mean-token-sum-norm", counts, 100) == 400
    with pytest.raises(ValueError, match="scale factor"):
        denominator("seq-mean-token-sum-norm", counts)
    nothing = Counts(0, 0)
    assert all(denominator(mode, nothing, 3) >= 1 for mode in MODES)  # type: ignore[arg-type]


def test_sums_over_completions():
    seq = sequences()
    values = poisoned(torch.arange(15, dtype=F64))
    assert seq.lengths().tolist() == [3, 1, 0, 0, 4, 1]
    assert seq.sum(values).tolist() == [0 + 2 + 3, 5, 0, 0, 9 + 10 + 11 + 12, 14]
    assert seq.mean(values).tolist() == pytest.approx([5 / 3, 5, 0, 0, 10.5, 14])
    assert seq.max(-values).tolist() == [0, -5, 0, 0, -9, -14]


@pytest.mark.parametrize("form", ["k1", "k2", "k3", "abs"])
def test_kl_forms(form):
    for lp, other in ((-1.0, -2.5), (-2.5, -1.0), (-1.0, -1.0), (-1.0, -46.0), (-46.0, -1.0)):
        leaf = torch.tensor(lp, dtype=F64, requires_grad=True)
        value = kl(form, leaf, torch.tensor(other, dtype=F64))
        value.backward()
        assert float(value.detach()) == pytest.approx(ref.kl(form, lp, other))
        (slope,) = ref.gradient(lambda at, y=other: ref.kl(form, at[0][0], y), [[lp]])[0]
        assert leaf.grad is not None
        if lp != other:  # at zero |x| has none, and torch says 0
            assert float(leaf.grad) == pytest.approx(slope, abs=1e-6)


def test_adaptive_coefficient():
    # KL 0.05, half its target: error -0.5 clips to -0.2; 64 of 10000: 1 - 0.2 * 0.0064
    k = {"target": 0.1, "horizon": 10_000, "num_sequences": 64}
    assert adapted(1.0, 0.05, **k) == pytest.approx(1 - 0.2 * 0.0064)
    assert adapted(1.0, 0.11, **k) == pytest.approx(1 + 0.1 * 0.0064)
    assert adapted(0.5, 9.0, **k) == pytest.approx(0.5 * (1 + 0.2 * 0.0064))


MU = near(OLD, 1.5, 4)


@pytest.mark.parametrize("kind", ["none", "tis", "icepop", "decoupled"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_correction_weights(kind, level):
    seq = sequences()
    mu = torch.where(seq.mask, flat(MU), flat(OLD))
    got = correct(kind, flat(OLD), mu, sequences=seq if level == "sequence" else None)
    rows = zip(OLD, MU, MASK, strict=True)
    wanted = [ref.correction(kind, o, m, k, sequence=level == "sequence") for o, m, k in rows]
    assert got.weights[seq.mask].tolist() == pytest.approx(flat(wanted)[seq.mask].tolist())


RULES = [
    ("token_k1", 0.6, 1.5), ("token_k1", None, 1.5), ("token_k2", None, 0.2),
    ("token_k3", None, 0.2), ("seq_sum_k1", 0.5, 1.6), ("seq_sum_k2", None, 0.9),
    ("seq_sum_k3", None, 0.9), ("seq_mean_k1", 0.8, 1.2), ("seq_mean_k2", None, 0.3),
    ("seq_mean_k3", None, 0.3), ("seq_max_k2", None, 0.3), ("seq_max_k3", None, 0.3),
    ("geometric", 0.8, 1.2),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "low", "high"), RULES)
def test_rejections(rule: Rejection, low, high):
    seq = sequences()
    found = set()
    for seed in range(12):
        mu = near(OLD, 0.9, seed)
        got = reject(rule, flat(OLD), poisoned(flat(mu)), high=high, low=low, sequences=seq)
        rows = zip(OLD, mu, MASK, strict=True)
        wanted = [ref.keeps(rule, o, m, k, low, high) for o, m, k in rows]
        expected = [k for row in wanted for k in row]
        assert got[seq.mask].tolist() == [k for k, m in zip(expected, seq.mask, strict=True) if m]
        found |= set(got[seq.mask].tolist())
    assert found == {True, False}  # the bounds bite


def test_no_bound_hides_what_is_not_a_number_s083():
    nan, one = torch.tensor([math.nan], dtype=F64), torch.zeros(1, dtype=F64)
    alone = Sequences(torch.ones(1, dtype=torch.bool), torch.zeros(1, dtype=torch.int64), 1)
    for rule, _, high in RULES:
        assert reject(rule, one, nan, high=high, sequences=alone).tolist() == [True]
    for kind in ("tis", "icepop", "decoupled"):
        for sequences_ in (None, alone):
            assert correct(kind, one, nan, sequences=sequences_).weights.isnan().all()


def test_geometric_bounds_are_those_of_the_field():
    assert CorrectionSpec(rollout_rs="geometric").rejection_bounds == (0.99, 1.01)
    # mean log-ratio ±0.005 stays, 0.011 goes, whatever single tokens do
    seq = Sequences(torch.ones(4, dtype=torch.bool), torch.tensor([0, 0, 1, 1]), 2)
    x = torch.tensor([3.0, -2.99, 0.011, 0.011], dtype=F64)
    kept = reject("geometric", x, torch.zeros(4, dtype=F64), low=0.99, high=1.01, sequences=seq)
    assert kept.tolist() == [True, True, False, False]
    with pytest.raises(ValueError, match="judges completions"):
        reject("geometric", x, x, low=0.99, high=1.01)


def test_proximal_policies():
    now, mu = flat(NOW), flat(MU)
    assert log_linear(now, mu, 0.0).equal(mu)
    assert log_linear(now, mu, 1.0).tolist() == pytest.approx(now.tolist())
    half = log_linear(now, mu, 0.5)
    assert half.tolist() == pytest.approx(((now + mu) / 2).tolist())
    got = correct("decoupled", now, mu, proximal="log_linear", alpha=0.5)
    assert got.proximal.equal(half)
    assert got.weights.tolist() == pytest.approx(((now - mu) / 2).exp().tolist())
    assert correct("none", now, mu).proximal.equal(mu)
    assert correct("none", now, mu, proximal="recompute").proximal.equal(now)


def test_sequence_weights_are_clamped_after_the_sum():
    seq = Sequences(torch.ones(2, dtype=torch.bool), torch.tensor([0, 0]), 1)
    old, mu = torch.tensor([0.0, 0.0], dtype=F64), torch.tensor([-45.0, 44.0], dtype=F64)
    assert correct("decoupled", old, mu, sequences=seq).weights.tolist() == pytest.approx(
        [math.e] * 2
    )
    far = correct("decoupled", old, mu - 45.0, sequences=seq)
    assert far.weights.tolist() == pytest.approx([math.exp(20.0)] * 2)
