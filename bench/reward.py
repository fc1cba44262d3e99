"""How fast the reward service scores, beside the bare library in a plain loop.

    python bench/reward.py [--graders math code numeric] [--items 4000] [--rounds 5]

The service runs as a user starts it, with two workers; a client in this process sends requests of
64 items, eight at a time. The baseline calls the bare library on the same items in a plain loop in
this process: for `math` math-verify's parse and verify, for `code` one Python process a test case
without any sandbox, for `numeric` the grader's own function. Rounds take turns, so both meet the
same machine, and no item is sent twice: nothing comes from the cache.

`per_worker` is items a second through the service over twice the plain loop's: 1 where each of two
workers is as fast as the loop alone. On two cores the service and the client share them with
the workers, so `cpu_ratio` says the same of CPU time: seconds of the loop over those of
service, workers and client together. `own_cpu_ratio` compares with Headway's own grading function
in this process: what the way there and back costs. A last round kills workers, eight times
as it goes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from headway.graders import validate_grader
from headway.messages import Score, ScoreItem
from headway.reward_client import RewardClient
from services.reward.grading.evaluate import build
from services.reward.grading.sample import Sample

ROOT = Path(__file__).parents[1]
NUM_WORKERS = 2
REQUEST_ITEMS = 64
REQUESTS_AT_ONCE = 8
KILLS = 8


@dataclass(frozen=True)
class Load:
    """Items of one grader, the reward each must get, and the bare library's way to score one."""

    grader: dict[str, Any]
    item: Callable[[int], tuple[ScoreItem, float]]
    bare: Callable[[], Callable[[ScoreItem], float]]


def numeric_item(n: int) -> tuple[ScoreItem, float]:
    """A sum with its reasoning; every third is wrong."""
    right = 3 * n + 7
    said = right + (n % 3 == 0)
    text = f"We have {n} + {2 * n + 7}. Let us add them step by step.\nThe answer is {said}."
    return ScoreItem(f"{n} + {2 * n + 7}?", text, {"answer": str(right)}), float(said == right)


def bare_numeric() -> Callable[[ScoreItem], float]:
    """The grader's own function."""
    from services.reward.grading.numeric import grade_numeric

    spec = {"extract": "answer", "abs_tol": 0.0, "rel_tol": 0.0, "percent": "either"}
    return lambda item: grade_numeric(item.completion, [item.item["answer"]], spec)


def math_item(n: int) -> tuple[ScoreItem, float]:
    """An expression in a box against the same in another form; every third is wrong."""
    gold = f"\\frac{{{2 * n + 1}}}{{{n + 2}}}" if n % 2 else f"{n + 1}x^2 + {n}"
    said = f"\\frac{{{4 * n + 2}}}{{{2 * n + 4}}}" if n % 2 else f"{n} + {n + 1}x^2"
    if n % 3 == 0:
        said = f"\\sqrt{{{n + 2}}}"
    text = f"Let us work it out. First we simplify, then we collect terms. So \\boxed{{{said}}}."
    return ScoreItem("?", text, {"answer": gold}), float(n % 3 != 0)


def bare_math() -> Callable[[ScoreItem], float]:
    """math-verify as its page says."""
    from math_verify import parse, verify

    return lambda item: float(verify(parse(f"${item.item['answer']}$"), parse(item.completion)))


def code_item(n: int) -> tuple[ScoreItem, float]:
    """A program that adds what it reads; every third is off by one."""
    off = " + 1" if n % 3 == 0 else ""
    program = f"numbers = [int(part) for part in input().split()]\nprint(sum(numbers){off})  # {n}"
    cases = [{"input": f"{n} {k}\n", "output": f"{n + k}\n"} for k in (1, 2)]
    text = f"We read the numbers and add them.\n```python\n{program}\n```"
    return ScoreItem("Add the numbers.", text, {"cases": cases}), float(n % 3 != 0)


def bare_code() -> Callable[[ScoreItem], float]:
    """A Python process a case, with a time limit and nothing else."""

    def score(item: ScoreItem) -> float:
        program = item.completion.split("```python\n")[1].split("\n```")[0]
        for case in item.item["cases"]:
            command = [sys.executable, "-I", "-S", "-c", program]
            done = subprocess.run(
                command, input=case["input"], capture_output=True, text=True, timeout=10
            )
            if done.returncode or done.stdout.split() != case["output"].split():
                return 0.0
        return 1.0

    return score


LOADS = {
    "numeric": Load({"type": "numeric"}, numeric_item, bare_numeric),
    "math": Load({"type": "math"}, math_item, bare_math),
    "code": Load({"type": "code", "cases": "{{item.cases}}"}, code_item, bare_code),
}


def spent_cpu_s() -> float:
    """CPU seconds of this process so far, and of the processes that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def own_function(grader: dict[str, Any]) -> Callable[[ScoreItem], float]:
    """What a worker calls for an item, in this process."""
    grade = build(validate_grader(grader).model_dump(mode="json"))
    return lambda item: grade(Sample(item.completion, item.item, item.prompt)).reward


class Service:
    """The service as a user starts it."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self._process = psutil.Process(process.pid)
        self.address = address

    def workers(self) -> list[psutil.Process]:
        """Its worker processes."""
        return self._process.children()

    def cpu_s(self) -> float:
        """CPU seconds of it and its workers so far, of those that have ended too."""
        spent = 0.0
        for process in (self._process, *self.workers()):
            times = process.cpu_times()
            spent += times.user + times.system + times.children_user + times.children_system
        return spent


@contextmanager
def service() -> Iterator[Service]:
    """A reward service with two workers and no cache."""
    command = [sys.executable, "-m", "services.reward", "--workers", str(NUM_WORKERS)]
    process = subprocess.Popen(
        [*command, "--cache-items", "0"], stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stderr is not None
    try:
        ready = next(line for line in process.stderr if '"http_address"' in line)
        yield Service(process, json.loads(ready)["address"])
    finally:
        process.terminate()
        process.communicate()


async def through(
    address: str, load: Load, items: list[ScoreItem], on_answer: Callable[[], None] = lambda: None
) -> list[Score]:
    """All scores, in order; `on_answer` is called for each request's."""
    client = RewardClient([address])
    room = asyncio.Semaphore(REQUESTS_AT_ONCE)

    async def one(first: int) -> tuple[Score, ...]:
        async with room:
            part = items[first : first + REQUEST_ITEMS]
            scores = await client.score("", "bench", load.grader, part, 30.0)
        on_answer()
        return scores

    parts = await asyncio.gather(*(one(n) for n in range(0, len(items), REQUEST_ITEMS)))
    await client.close()
    return [score for part in parts for score in part]


def check(load: str, found: list[float | None], wanted: list[float]) -> None:
    """A rate of wrong scores is worth nothing."""
    wrong = [n for n, (f, w) in enumerate(zip(found, wanted, strict=True)) if f != w]
    if wrong:
        raise SystemExit(f"{load}: {len(wrong)} of {len(wanted)} rewards are not as they must be,"
                         f" the first at {wrong[0]}: {found[wrong[0]]}")  # fmt: skip


def measure(name: str, num_items: int, rounds: int) -> dict[str, Any]:
    """Rates of the service and of the plain loop in turns, then a round with kills."""
    load = LOADS[name]
    bare, own = load.bare(), own_function(load.grader)
    rows: list[dict[str, float]] = []
    with service() as server:
        for number in range(rounds + 1):  # the first warms up
            pairs = [load.item(number * num_items + n) for n in range(num_items)]
            items, wanted = [item for item, _ in pairs], [reward for _, reward in pairs]
            cpu, began = spent_cpu_s(), time.perf_counter()
            found: list[float | None] = [bare(item) for item in items]
            row = {"loop_s": time.perf_counter() - began, "loop_cpu_s": spent_cpu_s() - cpu}
            check(f"{name}, the plain loop", found, wanted)
            cpu = spent_cpu_s()
            check(f"{name}, its function", [own(item) for item in items], wanted)
            row["own_cpu_s"] = spent_cpu_s() - cpu
            cpu, began = spent_cpu_s() + server.cpu_s(), time.perf_counter()
            scores = asyncio.run(through(server.address, load, items))
            row["service_s"] = time.perf_counter() - began
            row["service_cpu_s"] = spent_cpu_s() + server.cpu_s() - cpu
            check(name, [score.reward for score in scores], wanted)
            rows.append(row)
        killed = asyncio.run(with_kills(server, load, (rounds + 1) * num_items, num_items))
    spent = {key: statistics.median(row[key] for row in rows[1:]) for key in rows[0]}
    return {
        "items_per_s": round(num_items / spent["service_s"], 1),
        "baseline": round(num_items / spent["loop_s"], 1),
        "ratio": round(spent["loop_s"] / spent["service_s"], 2),
        "per_worker": round(spent["loop_s"] / spent["service_s"] / NUM_WORKERS, 3),
        "cpu_ratio": round(spent["loop_cpu_s"] / spent["service_cpu_s"], 3),
        "own_cpu_ratio": round(spent["own_cpu_s"] / spent["service_cpu_s"], 3),
        "service_cpu_ms": round(1e3 * spent["service_cpu_s"] / num_items, 3),
        **killed,
    }


async def with_kills(server: Service, load: Load, first: int, num_items: int) -> dict[str, int]:
    """Scores a round while workers are killed; how many kills, and how many items were lost."""
    pairs = [load.item(first + n) for n in range(num_items)]
    kills, answered = 0, 0
    every = max(1, num_items // REQUEST_ITEMS // KILLS)

    def on_answer() -> None:
        nonlocal kills, answered
        answered += 1
        workers = server.workers()
        if answered % every == 0 and workers:
            os.kill(workers[kills % len(workers)].pid, signal.SIGKILL)
            kills += 1

    scores = await through(server.address, load, [item for item, _ in pairs], on_answer)
    right = sum(s.reward == wanted for s, (_, wanted) in zip(scores, pairs, strict=True))
    return {"kills": kills, "items_under_kills": num_items, "items_lost": num_items - right}


def main() -> None:
    """Prints one JSON object as its last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graders", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--items", type=int, default=4000, help="of a round")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    figures = {name: measure(name, args.items, args.rounds) for name in args.graders}
    print(json.dumps({"bench": "reward", **vars(args), **figures}))


if __name__ == "__main__":
    main()
