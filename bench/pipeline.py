"""How much of the time the slower pool works: real processes, imitated sampling and training.

    python bench/pipeline.py [--steps 200] [--nodes 1 4 16] [--step-s 0.2]

Coordinator, learner agent and rank, reward service, rollout nodes, Redis, gRPC and the weight
group are real; an engine samples for a set time and an optimiser step takes a set time. For
each number of nodes the pool has the same 16 slots: once the learner is the slower pool and
once the rollout fleet, with constant lengths; `ratio` is that pool's busy share of the time,
1.0 being the whole of it. Then lengths with a long tail: `ratio` is the time that the
schedule's own simulation takes with the very same lengths (bench/support/schedule_sim.py)
over the time it took.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.support.schedule_sim import Shape, step_times  # noqa: E402
from headway.data.stream import ticket_seed  # noqa: E402
from services.rollout.engine import Sampling  # noqa: E402
from services.rollout.sim_content import Lengths, SimSettings, plan  # noqa: E402
from tests.support.accounts import rows  # noqa: E402
from tests.support.sim_fleet import FleetShape, SimFleet, sim_job  # noqa: E402

BATCH, LAG, SLOTS, N, TOKENS, MAX_TOKENS = 8, 4, 16, 2, 32, 512
WARM_UP = 5  # steps in which the pipeline fills


@dataclass(frozen=True)
class Case:
    """One run: how many nodes, how long an optimiser step and the sampling of a mean group take."""

    nodes: int
    train_s: float
    group_s: float
    lengths: str = f"constant:{TOKENS}"

    @property
    def tokens_per_s(self) -> float:
        """Speed of one completion."""
        return TOKENS / self.group_s

    def simulated(self, steps: int) -> list[float]:
        """When the schedule alone would have done each step."""
        kind, *numbers = self.lengths.split(":")
        lengths = Lengths(kind, *map(float, numbers))  # type: ignore[arg-type]
        settings = SimSettings(tokens_per_s=self.tokens_per_s, lengths=lengths)
        sampling = Sampling(max_tokens=MAX_TOKENS)

        def group_s(ticket: int) -> float:
            seed = ticket_seed(0, ticket)
            longest = max(plan(settings, sampling, seed, i)[1] for i in range(N))
            return longest / self.tokens_per_s

        return step_times(Shape(SLOTS, BATCH, LAG, self.train_s, steps), group_s)


async def measure(case: Case, steps: int, folder: Path) -> list[dict[str, Any]]:
    """The metrics rows of one job."""
    shape = FleetShape(
        nodes=case.nodes,
        step_s=case.train_s,
        lengths=case.lengths,
        tokens_per_s=case.tokens_per_s,
        lost_after_s=60.0,
    )
    job = sim_job(
        folder / "data.jsonl",
        data__train_batch_size=BATCH,
        algorithm__max_policy_lag=LAG,
        rollout__n=N,
        rollout__max_tokens=MAX_TOKENS,
        rollout__max_num_seqs=N * SLOTS // case.nodes,
        rollout__min_nodes=case.nodes,
        rollout__lease_s=30.0,
        rollout__update_timeout_s=20.0,
        trainer__total_training_steps=steps,
        trainer__save_freq=50,
    )
    async with SimFleet(folder, shape) as fleet:
        await fleet.submit(job, "pipeline")
        record = await fleet.ended("pipeline", 3600.0)
        assert record.state == "succeeded", record.error
        return rows(fleet.runs / "pipeline" / "metrics.jsonl")


def figures(case: Case, found: list[dict[str, Any]]) -> dict[str, float]:
    """What a run comes to, after its warm-up."""
    last, first = found[-1], found[WARM_UP - 1]
    step_s = (last["time"] - first["time"]) / (len(found) - WARM_UP)
    times = case.simulated(len(found))
    best_s = (times[-1] - times[WARM_UP - 1]) / (len(found) - WARM_UP)
    slower_s = max(case.train_s, BATCH * case.group_s / SLOTS)
    constant = case.lengths.startswith("constant")
    return {
        "nodes": case.nodes,
        "step_s": round(step_s, 4),
        "schedule_alone_s": round(best_s, 4),
        "lag_max": max(row["lag/max"] for row in found),
        "ratio": round((slower_s if constant else best_s) / step_s, 3),
    }


def main() -> None:
    """Prints one JSON object as its last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--step-s", type=float, default=0.2, help="of the slower pool")
    parser.add_argument("--only", choices=("learner_bound", "rollout_bound", "long_tail"))
    args = parser.parse_args()
    slow, fast = args.step_s, 0.4 * args.step_s
    pool_s = SLOTS / BATCH  # steps that are sampled at once
    cases = {
        "learner_bound": [Case(n, slow, fast * pool_s) for n in args.nodes],
        "rollout_bound": [Case(n, fast, slow * pool_s) for n in args.nodes],
        "long_tail": [Case(4, fast, fast * pool_s, f"lognormal:{TOKENS}:1.0")],
    }
    answer: dict[str, Any] = {}
    for name, of_kind in cases.items():
        if args.only not in (None, name):
            continue
        answer[name] = []
        for case in of_kind:
            with tempfile.TemporaryDirectory() as folder:
                found = asyncio.run(measure(case, args.steps, Path(folder)))
            answer[name].append(figures(case, found))
            print(name, answer[name][-1], file=sys.stderr)
    print(json.dumps({"pipeline": answer, "steps": args.steps, "step_s": args.step_s}))


if __name__ == "__main__":
    main()
