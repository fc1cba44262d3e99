"""Any sequence of calls and crashes: the scripts do as the reference, and all invariants hold."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from headway.ledger.api import Lease, LedgerConfig
from tests.support.ledger_machine import LedgerMachine


@pytest.mark.parametrize(("server", "examples"), [("valkey", 30), ("redis", 10)])
def test_calls_and_crashes_in_any_order(
    server: str, examples: int, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue(f"{server}_url")
    run_state_machine_as_test(
        lambda: LedgerMachine(url),
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def lively_fleet(machine: LedgerMachine, seed: int, on_late: Any) -> Counter[str]:
    """A run whose every eighth lease is a straggler, and whose learner dies now and then."""
    chance = random.Random(seed)
    machine.open(LedgerConfig(chance.randint(1, 3), chance.randint(1, 3), on_late, 3600.0, 2))
    waiting: list[Lease] = []
    for _ in range(120):
        known = len(machine.leases)
        machine.issue(4, 0, "answered")
        fate = chance.choice(["answered"] * 9 + ["unanswered"])
        machine.claim("a", chance.choice([0, 0, 1]), chance.randint(1, 3), fate)
        waiting += machine.leases[known:]
        chance.shuffle(waiting)
        for lease in waiting[:]:
            if chance.random() < (0.03 if lease.token % 8 == 0 else 0.6):
                waiting.remove(lease)
                place = len(machine.leases) - 1 - machine.leases.index(lease)
                reason = "dull" if lease.token % 11 == 0 else ""
                machine.deliver(place, 10, reason, chance.choice(["answered", "twice"]))
        machine.take("answered")
        if machine.took is not None:
            machine.commit("answered")
        if chance.random() < 0.1 and machine.position > machine.saved[-1]:
            machine.save("answered")
        if chance.random() < 0.03:
            machine.learner_dies(chance.choice([-1, 0]))
        if chance.random() < 0.04:
            machine.leases_end(None)
    counts = machine.counts()
    machine.teardown()
    return Counter({k: v for k, v in dataclasses.asdict(counts).items() if isinstance(v, int)})


@pytest.mark.parametrize("on_late", ["wait", "mask", "drop"])
def test_a_long_run_in_which_some_are_late(valkey_url: str, on_late: str) -> None:
    total: Counter[str] = Counter()
    for seed in range(3):
        total += lively_fleet(LedgerMachine(valkey_url), seed, on_late)
    assert total["consumed"] > 60
    assert total["filtered"] > 3
    assert {
        "wait": total["stalled_steps"] > 5 and not total["late"] and not total["dropped"],
        "mask": total["late"] > 5 and not total["dropped"],
        "drop": total["dropped"] > 5 and not total["late"],
    }[on_late]
