"""A job runner over the in-memory ledger and the sim engine, for tests in virtual time."""

import asyncio
from contextlib import asynccontextmanager

from headway.errors import (
    EpochBroken,
    Unavailable,
)
from headway.jobspec import parse_job
from headway.ledger.api import LedgerConfig
from headway.ledger.memory import MemoryLedger
from headway.messages import Score, Ticket, WeightManifest
from headway.payloads import unpack_group
from services.rollout.presence import WorkerSettings
from services.rollout.sim_engine import Lengths, SimEngine, SimSettings
from services.rollout.worker import JobRunner


def job(n=4, batch=2, lag=1, max_num_seqs=8, lease_s=3.0, dynamic=False, **reward):
    return parse_job(
        {
            "model": {"path": "/nowhere"},
            "data": {"source": "reasoning_gym", "name": "chain_sum", "train_batch_size": batch},
            "reward": {"grader": {"type": "string_check", "operation": "eq"}, **reward},
            "algorithm": {"max_policy_lag": lag, "dynamic_sampling": dynamic},
            "rollout": {"n": n, "max_num_seqs": max_num_seqs, "lease_s": lease_s, "max_tokens": 50},
            "trainer": {"total_training_steps": 9},
        }
    )


def tickets(start, stop, n=4):
    return [
        Ticket(i, (1, 2, i), f"question {i}", {"answer": str(i)}, n, 100 + i)
        for i in range(start, stop)
    ]


def digits_sum(item):
    return Score(float(sum(int(c) for c in item.completion if c.isdigit())))


class Graders:
    """Scores by a function of (item, call number); keeps what it was asked."""

    def __init__(self, rule=lambda item, call: digits_sum(item), takes_s=0.0):
        self.rule = rule
        self.takes_s = takes_s
        self.calls = []
        self.groups = []  # of each call, the items' groups

    async def score(self, request_id, job_id, grader, items, timeout_s):
        self.calls.append((request_id, [item.completion for item in items]))
        self.groups.append([item.group for item in items])
        call = len(self.calls)
        await asyncio.sleep(self.takes_s)
        return tuple(self.rule(item, call) for item in items)


class EventList:
    def __init__(self):
        self.rows = []

    async def append_event(self, kind, message, **fields):
        self.rows.append({"kind": kind, "message": message, **fields})
        return str(len(self.rows))


class LinkToLedger:
    """The ledger over a link that can be cut."""

    def __init__(self, ledger):
        self._ledger = ledger
        self.cut = False

    def __getattr__(self, name):
        method = getattr(self._ledger, name)

        async def call(*args):
            if self.cut:
                raise Unavailable("the link is cut")
            return await method(*args)

        return call


class Stand:
    def __init__(self, spec, engine, graders, ledger):
        self.spec = spec
        self.engine = engine
        self.graders = graders
        self.ledger = ledger
        self.link = LinkToLedger(ledger)
        self.events = EventList()
        self.runner = self.another("node-a")
        self.task = None

    def another(self, node_id, engine=None):
        settings = WorkerSettings(node_id, f"{node_id}:1")
        return JobRunner(
            "job", self.spec, settings, engine or self.engine, self.link, self.graders, self.events
        )

    async def install(self, version, timeout_s=5.0):
        try:
            report = await self.engine.install(WeightManifest(version, (), 0), timeout_s)
        except EpochBroken as error:
            self.runner.install_failed(error)
            raise
        self.runner.installed(report.version)

    async def count(self, field):
        return getattr(await self.ledger.counts(), field)

    async def reaches(self, field, value):
        async with asyncio.timeout(600):
            while await self.count(field) < value:  # noqa: ASYNC110 - virtual time
                await asyncio.sleep(0.005)

    async def train(self, step):
        """Takes and commits a step as the learner does; its groups."""
        async with asyncio.timeout(600):
            while (taken := await self.ledger.take(step)).ticket_ids is None:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        groups = [unpack_group(body) for body in await self.ledger.payloads(taken.ticket_ids)]
        await self.ledger.commit(step, taken.ticket_ids)
        return groups


@asynccontextmanager
async def stand(spec=None, num_tickets=20, graders=None, engine=None, install=True, **sim):
    spec = spec or job()
    sim = {"tokens_per_s": 10.0, "lengths": Lengths("constant", 10), **sim}
    engine = engine or SimEngine(SimSettings(**sim))
    await engine.start()
    ledger = MemoryLedger(asyncio.get_running_loop().time)
    await ledger.open(
        LedgerConfig(
            spec.data.train_batch_size,
            spec.algorithm.max_policy_lag,
            lease_s=spec.rollout.lease_s,
            max_attempts=3,
            max_outstanding_groups=max(num_tickets, spec.data.train_batch_size),
        )
    )
    await ledger.issue(tickets(0, num_tickets, spec.rollout.n))
    made = Stand(spec, engine, graders or Graders(), ledger)
    made.task = asyncio.create_task(made.runner.run())
    if install:
        await made.install(0)
    try:
        yield made
    finally:
        await made.runner.stop(0.0)
        await asyncio.gather(made.task, return_exceptions=True)
        assert (await ledger.counts()).conserved


def now():
    return asyncio.get_running_loop().time()


class FlawedEngine(SimEngine):
    """Spoils the groups of some tickets, told by their seed."""

    def __init__(self, spoil):
        super().__init__(SimSettings(tokens_per_s=10.0, lengths=Lengths("constant", 10)))
        self.spoil = spoil

    async def generate(self, request_id, prompt_ids, n, sampling, seed):
        completions = await super().generate(request_id, prompt_ids, n, sampling, seed)
        return self.spoil(completions, seed)
