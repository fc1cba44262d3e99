"""One step's figures, from the groups it trained on. Pure: values in, values out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headway.ledger.api import Counts
from headway.messages import Completion, Group

Row = dict[str, float]


def lag_metrics(version: int, groups: Sequence[Group]) -> Row:
    """Policy lag of the trained tokens, in versions; the step starts at `version`.

    A token's lag is `version` minus the version that sampled it. The part up to the
    newest version in its group is in flight (the policy moved while the group was
    being sampled), the rest in queue (the finished group waited).
    """
    total = in_flight = in_queue = largest = tokens = 0
    for group in groups:
        spans = [span for c in group.completions for span in c.spans if span.end > span.start]
        newest = max((span.version for span in spans), default=version)
        for span in spans:
            length = span.end - span.start
            tokens += length
            total += length * (version - span.version)
            in_flight += length * (newest - span.version)
            in_queue += length * (version - newest)
            largest = max(largest, version - span.version)
    count = max(tokens, 1)
    return {
        "lag/mean": total / count,
        "lag/max": float(largest),
        "lag/in_flight_mean": in_flight / count,
        "lag/in_queue_mean": in_queue / count,
    }


def group_metrics(groups: Sequence[Group]) -> Row:
    """Rewards, lengths and finish reasons of a batch, in verl's names."""
    completions = [c for group in groups for c in group.completions]
    rewards = [c.reward for c in completions if c.reward is not None]
    lengths = [float(len(c.token_ids)) for c in completions]
    row: Row = {}
    row.update(_spread("critic/score", rewards))
    row.update(_spread("critic/rewards", rewards))
    row.update(_spread("response_length", lengths))
    row.update(_spread("prompt_length", [float(len(g.ticket.prompt_ids)) for g in groups]))
    baselines = [g.baseline.reward for g in groups if g.baseline is not None]
    row.update(_spread("critic/baseline", baselines))
    row["response_length/clip_ratio"] = _fraction(completions, "length")
    row["response/aborted_ratio"] = _fraction(completions, "aborted")
    row["response/mixed_versions_ratio"] = mean([float(len(c.spans) > 1) for c in completions])
    row["rollout/generate_s_mean"] = mean([g.generate_s for g in groups])
    row["rollout/score_s_mean"] = mean([g.score_s for g in groups])
    row["data/epoch"] = float(max((g.ticket.data_epoch for g in groups), default=0))
    for name in sorted({name for c in completions for name in c.parts}):
        row[f"reward/{name}/mean"] = mean([c.parts[name] for c in completions if name in c.parts])
    return row


def ledger_metrics(counts: Counts) -> Row:
    """Where all tickets are."""
    names = (
        "issued", "leased", "delivered", "taken", "consumed", "filtered", "dropped",
        "abandoned", "refused_deliveries", "expired_leases", "payload_bytes",
    )  # fmt: skip
    row = {f"ledger/{name}": float(getattr(counts, name)) for name in names}
    row.update({f"ledger/reason/{name}": float(n) for name, n in sorted(counts.reasons.items())})
    return row


def count_tokens(groups: Sequence[Group]) -> int:
    """Response tokens in a batch."""
    return sum(len(c.token_ids) for group in groups for c in group.completions)


def mfu(row: Mapping[str, float], peak: float) -> Row:
    """Model FLOPs utilisation of a step's update, 0..1; nothing where either side is unknown.

    `row` has the model's work (perf/model_tflop, 1e12 operations) and timing_s/train;
    `peak` is what all ranks together could do in a second.
    """
    work, seconds = row.get("perf/model_tflop", 0.0), row["timing_s/train"]
    return {"perf/mfu/actor": work * 1e12 / (seconds * peak)} if work and peak else {}


@dataclass(slots=True)
class Busy:
    """Adds up the time in which something worked, and reads it off step by step."""

    seconds: float = 0.0
    _read_at: float = field(default=0.0)
    _read: float = field(default=0.0)

    def start(self, now: float) -> None:
        """Begins the first interval."""
        self._read_at, self._read = now, self.seconds

    def fraction(self, now: float) -> float:
        """The busy fraction since the last reading, 0..1."""
        wall = now - self._read_at
        busy = self.seconds - self._read
        self.start(now)
        return min(1.0, busy / wall) if wall > 0 else 0.0


@dataclass(frozen=True, slots=True)
class NodeReading:
    """What one rollout node said of itself at one moment."""

    at: float  # our clock, seconds
    busy_s: float
    num_tokens: int


def rollout_metrics(before: Mapping[str, NodeReading], after: Mapping[str, NodeReading]) -> Row:
    """Busy fraction (mean over nodes) and sampled tokens/s (sum) between two readings."""
    pairs = [(before[name], reading) for name, reading in after.items() if name in before]
    pairs = [(a, b) for a, b in pairs if b.at > a.at and b.num_tokens >= a.num_tokens]
    if not pairs:
        return {}
    busy = [min(1.0, (b.busy_s - a.busy_s) / (b.at - a.at)) for a, b in pairs]
    rates = [(b.num_tokens - a.num_tokens) / (b.at - a.at) for a, b in pairs]
    return {"pool/rollout_busy": mean(busy), "rollout/tokens_per_s": sum(rates)}


def _spread(name: str, values: Sequence[float]) -> Row:
    if not values:
        return {}
    return {f"{name}/mean": mean(values), f"{name}/max": max(values), f"{name}/min": min(values)}


def _fraction(completions: Sequence[Completion], reason: str) -> float:
    return mean([float(c.finish_reason == reason) for c in completions])


def mean(values: Sequence[float]) -> float:
    """The mean; 0 of nothing."""
    return sum(values) / len(values) if values else 0.0
