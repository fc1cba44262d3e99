"""The formulas of the papers a second time: plain Python, float64, one token after another.

Written from the formulas, without a look at `headway.rl`; nothing here imports torch.
Sequences are lists of lists (a completion, its tokens); masks likewise. A reward that is None
was not graded. Gradients are central differences of whole objectives, so a straight-through
form is checked against the sequence-level objective that it stands for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Reward = float | None
Table = list[list[float]]
Mask = Sequence[Sequence[bool]]


def clamp(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def deviation(values: Sequence[float]) -> float:
    m = mean(values)
    return math.sqrt(math.fsum((v - m) ** 2 for v in values) / (len(values) - 1))


def group_advantages(name: str, rewards: Sequence[Reward], lengths: Sequence[int]) -> list[float]:
    """Advantages of one group by name, before any whitening."""
    known = [r for r in rewards if r is not None]
    if len(known) < 2 or all(r == known[0] for r in known):
        return [0.0] * len(rewards)
    out = []
    for i, r in enumerate(rewards):
        if r is None:
            out.append(0.0)
            continue
        others = [q for j, q in enumerate(rewards) if q is not None and j != i]
        if name == "grpo":
            out.append((r - mean(known)) / (deviation(known) + 1e-6))
        elif name in ("dr_grpo", "reinforce_plus_plus_baseline"):
            out.append(r - mean(known))
        elif name == "rloo":
            out.append(r - mean(others))
        elif name == "opo":
            total = sum(n for n, q in zip(lengths, rewards, strict=True) if q is not None)
            weighted = math.fsum(
                n * q for n, q in zip(lengths, rewards, strict=True) if q is not None
            )
            out.append(r - (weighted / total if total else 0.0))
        elif name == "grpo_passk":
            out.append(max(0.0, r - max(others)))
        else:
            raise AssertionError(name)
    return out


def returns(rewards: Sequence[float], mask: Sequence[bool], gamma: float) -> list[float]:
    """Discounted sums over the unmasked tokens of one completion; 0 at masked ones."""
    steps = [i for i, kept in enumerate(mask) if kept]
    out = [0.0] * len(rewards)
    for k, i in enumerate(steps):
        out[i] = math.fsum(gamma**d * rewards[j] for d, j in enumerate(steps[k:]))
    return out


def gae(
    rewards: Sequence[float],
    values: Sequence[float],
    mask: Sequence[bool],
    gamma: float,
    lam: float,
) -> list[float]:
    """Σ_k (γλ)^k δ_{t+k}, term by term."""
    steps = [i for i, kept in enumerate(mask) if kept]
    deltas = []
    for k, i in enumerate(steps):
        after = values[steps[k + 1]] if k + 1 < len(steps) else 0.0
        deltas.append(rewards[i] + gamma * after - values[i])
    out = [0.0] * len(rewards)
    for k, i in enumerate(steps):
        out[i] = math.fsum((gamma * lam) ** d * delta for d, delta in enumerate(deltas[k:]))
    return out


def whiten(values: Table, mask: Mask) -> Table:
    """To mean 0 and unbiased variance 1 over all unmasked tokens; 0 at masked ones."""
    flat = [
        v
        for row, kept in zip(values, mask, strict=True)
        for v, k in zip(row, kept, strict=True)
        if k
    ]
    m = mean(flat) if flat else 0.0
    variance = math.fsum((v - m) ** 2 for v in flat) / (len(flat) - 1) if len(flat) > 1 else 0.0
    scale = 1 / math.sqrt(variance + 1e-8)
    return [
        [(v - m) * scale if k else 0.0 for v, k in zip(row, kept, strict=True)]
        for row, kept in zip(values, mask, strict=True)
    ]


def overlong(length: int, limit: int, buffer: int) -> float:
    if length <= limit - buffer:
        return 0.0
    return -1.0 if length > limit else ((limit - buffer) - length) / buffer


def kl(form: str, lp: float, ref: float) -> float:
    x = clamp(lp - ref, -20, 20)
    if form == "k3":
        return clamp(math.exp(-x) - 1 + x, -10, 10)
    return {"k1": x, "k2": x * x / 2, "abs": abs(x)}[form]


def ratio(lp: float, old: float) -> float:
    return math.exp(clamp(lp - old, -20, 20))


def token_loss(name: str, lp: float, frozen: float, old: float, a: float, **k: float) -> float:
    """Losses of single tokens. `frozen` is lp where the formula stops the gradient."""
    r = ratio(lp, old)
    low, high = k.get("low", 0.2), k.get("high", 0.2)
    if name == "ppo_clip":
        value = -min(r * a, clamp(r, 1 - low, 1 + high) * a)
        return min(value, -k["dual"] * a) if a < 0 and "dual" in k else value
    if name == "cispo":
        return -clamp(ratio(frozen, old), 1 - low, 1 + high) * a * lp
    if name == "sapo":
        tau = k.get("pos", 1.0) if a > 0 else k.get("neg", 1.05)
        return -(4 / tau) / (1 + math.exp(-tau * (r - 1))) * a
    if name in ("gpg", "reinforce"):
        return -a * lp
    raise AssertionError(name)


def sequence_loss(
    name: str, lp: Sequence[float], old: Sequence[float], a: float, mask: Sequence[bool], **k: float
) -> float:
    """GSPO and GMPO as the papers have them: one loss a completion; 0 without tokens."""
    logs = [x - y for x, y, kept in zip(lp, old, mask, strict=True) if kept]
    if not logs:
        return 0.0
    low, high = k["low"], k["high"]
    if name == "gspo":
        s = math.exp(min(mean(logs), 10.0))
        return -min(s * a, clamp(s, 1 - low, 1 + high) * a)
    logs = [clamp(x, -20, 20) for x in logs]
    logs = [min(x, high) if a > 0 else max(x, -low) for x in logs]
    return -a * math.exp(mean(logs))


def aggregate(mode: str, loss: Table, mask: Mask, factor: int = 1) -> float:
    kept = [
        [v for v, k in zip(row, use, strict=True) if k] for row, use in zip(loss, mask, strict=True)
    ]
    full = [row for row in kept if row]
    tokens = sum(len(row) for row in full)
    sums = [math.fsum(row) for row in full]
    return {
        "token-mean": lambda: math.fsum(sums) / max(tokens, 1),
        "token-sum": lambda: math.fsum(sums),
        "seq-mean-token-sum": lambda: math.fsum(sums) / max(len(full), 1),
        "seq-mean-token-mean": lambda: math.fsum(map(mean, full)) / max(len(full), 1),
        "seq-mean-token-sum-norm": lambda: math.fsum(sums) / max(len(full), 1) / factor,
    }[mode]()


def correction(
    kind: str, old: Sequence[float], mu: Sequence[float], mask: Sequence[bool], *, sequence: bool
) -> list[float]:
    """Weights of one completion's tokens: cap 2, bounds 0.5 and 5."""
    logs = [clamp(o - m, -20, 20) if k else 0.0 for o, m, k in zip(old, mu, mask, strict=True)]
    if sequence:
        plain = [o - m for o, m, k in zip(old, mu, mask, strict=True) if k]
        logs = [clamp(math.fsum(plain), -20, 20)] * len(logs)
    weights = [math.exp(x) for x in logs]
    if kind == "none":
        return [1.0] * len(weights)
    if kind == "tis":
        return [min(w, 2.0) for w in weights]
    if kind == "icepop":
        return [w if 0.5 <= w <= 5.0 else 0.0 for w in weights]
    return weights


def keeps(
    rule: str,
    old: Sequence[float],
    mu: Sequence[float],
    mask: Sequence[bool],
    low: float | None,
    high: float,
) -> list[bool]:
    """Which tokens of one completion a rejection rule keeps."""
    level, form = rule.rsplit("_", 1) if rule != "geometric" else ("seq_mean", "k1")
    logs = [clamp(o - m, -20, 20) if k else 0.0 for o, m, k in zip(old, mu, mask, strict=True)]
    estimate = {
        "k1": lambda x: x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(x) - 1 - x
    }[form]  # fmt: skip
    values = [estimate(x) for x in logs]
    if level != "token":
        inside = [v for v, k in zip(values, mask, strict=True) if k] or [0.0]
        whole = {"seq_sum": math.fsum, "seq_mean": mean, "seq_max": max}[level](inside)
        values = [whole] * len(values)
    if form != "k1":
        return [v <= high for v in values]
    floor = 1 / high if low is None else low
    return [floor <= math.exp(clamp(v, -20, 20)) <= high for v in values]


def gradient(objective: Callable[[Table], float], at: Table, step: float = 1e-6) -> Table:
    """Central differences of an objective by each token."""
    out = []
    for i, row in enumerate(at):
        slopes = []
        for j in range(len(row)):
            sides = []
            for sign in (1, -1):
                moved = [list(other) for other in at]
                moved[i][j] += sign * step
                sides.append(objective(moved))
            slopes.append((sides[0] - sides[1]) / (2 * step))
        out.append(slopes)
    return out
