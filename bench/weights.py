"""A version's way to a rollout node, beside a bare Gloo broadcast of as many bytes.

    python bench/weights.py [--repeats 9] [--part transfer --part publish --part step]

Two processes on two cores, the tensors of SmolLM2-135M-Instruct, and beside every figure, run
in turns with it, a bare broadcast of one tensor of the same size.

transfer  packed buckets sent, received and hashed. ratio = bare / ours, seconds.
publish   all of it: gathered from the trainer, looked through, hashed, packed, sent, verified,
          loaded into a running vLLM engine and looked for there; with the engine idle and
          sampling. `pause_s`: for so long sampling stood still.
step      one training step of the quickstart's size, alone and with a publish beside it.
          ratio = (with - alone) / alone.

Seconds are medians; a ratio is the median of those of each turn. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from learner import make_groups
from torch import Tensor

from headway.jobspec import JobSpec, load_job
from headway.ledger.api import Member
from headway.messages import EpochInvite
from headway.models import resolve_model
from headway.pb import rollout_pb2, rollout_pb2_grpc
from headway.rpc import grpc_server
from headway.weights.group import Rendezvous, WeightGroup
from headway.weights.manifest import build_manifest, check_digests
from headway.weights.outcome import PublishReport
from headway.weights.publisher import Publisher
from headway.weights.snapshot import SnapshotServer
from headway.weights.transfer import Staging, send
from services.learner.crew import checked_finite
from services.learner.trainer import FsdpTrainer

ROOT = Path(__file__).resolve().parents[1]
CORES = sorted(os.sched_getaffinity(0))
TIMEOUT_S = 120.0
PARTS = ("transfer", "publish", "step")
Figures = dict[str, Any]


# -- the other process


def bare_peer(pipe: Any, port: int) -> None:
    """Rank 1 of a group: takes what it is told to expect, and says so."""
    use_core(-1)
    group = WeightGroup.join(invite(port, 1))
    staging, buffer = Staging(), torch.empty(0, dtype=torch.uint8)
    while (order := pipe.recv()) is not None:
        began = time.process_time()
        if isinstance(order, int):
            if buffer.numel() != order:
                buffer = torch.zeros(order, dtype=torch.uint8)
            group.broadcast(buffer)
        else:
            staging.receive(group, order, "cpu")
            check_digests(order, staging.digests, "the peer")
        pipe.send(time.process_time() - began)


def vllm_node(pipe: Any, model: str, job: JobSpec) -> None:
    """A rollout node without a fleet: vLLM behind the weight calls. Told to sample, or not."""
    use_core(-1)
    asyncio.run(_vllm_node(pipe, model, job))


async def _vllm_node(pipe: Any, model: str, job: JobSpec) -> None:
    from services.rollout.engines import sampling_of
    from services.rollout.vllm_engine import VllmConfig, VllmEngine

    config = VllmConfig(max_model_len=job.model.max_model_len, kv_cache_gib=0.5)
    engine = VllmEngine(model, config)
    await engine.start()

    class Calls(rollout_pb2_grpc.RolloutServiceServicer):
        async def JoinWeightGroup(self, request: Any, context: Any) -> Any:
            from headway.codec import invite_from_pb

            await engine.join(invite_from_pb(request))
            return rollout_pb2.JoinWeightGroupResponse()

        async def InstallWeights(self, request: Any, context: Any) -> Any:
            from headway.codec import manifest_from_pb

            report = await engine.install(manifest_from_pb(request.manifest), request.timeout_s)
            return rollout_pb2.InstallWeightsResponse(
                version=report.version, digest=report.digest, pause_s=report.pause_s
            )

    def register(server: Any) -> Sequence[str]:
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(Calls(), server)
        return ("headway.v1.RolloutService",)

    async def sample(slot: int) -> None:
        for number in range(1 << 30):
            prompt = tuple(range(100 + slot, 160 + slot))
            await engine.generate(f"{slot}-{number}", prompt, 8, sampling_of(job), number)

    sampling: list[asyncio.Task[None]] = []
    async with grpc_server("127.0.0.1", 0, register) as port:
        pipe.send(port)
        while (order := await asyncio.to_thread(pipe.recv)) is not None:
            if order == "sample":
                sampling = [asyncio.create_task(sample(slot)) for slot in range(8)]
                while engine.num_tokens_sampled == 0:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            pipe.send(engine.num_tokens_sampled)
        for task in sampling:
            task.cancel()
        await asyncio.gather(*sampling, return_exceptions=True)
    await engine.close()


# -- this one


class Peer:
    """A process, and the pipe to it."""

    def __init__(self, work: Callable[..., None], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, *args))
        self.process.start()

    def close(self) -> None:
        """Ends it."""
        self.pipe.send(None)
        self.process.join(60)


@dataclass(frozen=True)
class Cost:
    """Of one transfer: seconds, and CPU seconds of each side, which other work disturbs less."""

    seconds: float
    sender_cpu_s: float = 0.0
    receiver_cpu_s: float = 0.0


class Bare:
    """Bare broadcasts to a process of their own, and packed ones through the same group."""

    def __init__(self, num_bytes: int) -> None:
        meeting = Rendezvous("127.0.0.1", TIMEOUT_S)
        self._peer = Peer(bare_peer, meeting.port)
        self.group = WeightGroup.join(invite(meeting.port, 0), "cpu", meeting.store)
        self._meeting = meeting
        self._tensor = torch.ones(num_bytes, dtype=torch.uint8)

    def run(self) -> Cost:
        """One bare broadcast, until the other side has it."""
        return self.timed(self._tensor.numel(), lambda: self.group.broadcast(self._tensor))

    def timed(self, order: Any, work: Callable[[], None]) -> Cost:
        """One transfer, until the other side has it."""
        self._peer.pipe.send(order)
        began, cpu = time.monotonic(), time.process_time()
        work()
        cpu = time.process_time() - cpu
        theirs = self._peer.pipe.recv()
        return Cost(time.monotonic() - began, cpu, theirs)

    def close(self) -> None:
        """Ends both sides."""
        self._peer.close()
        self.group.close()
        self._meeting.close()


def transfer(named: Mapping[str, Tensor], bare: Bare, repeats: int) -> Figures:
    """Packed buckets against one bare tensor."""
    manifest = build_manifest(0, named)
    turns = []
    for _ in range(repeats + 2):
        ours = bare.timed(manifest, lambda: send(bare.group, manifest, named, "cpu"))
        turns.append((bare.run(), ours))
    figures = compared(turns[2:], num_bytes(named), "transfer_s")
    for side in ("sender_cpu_s", "receiver_cpu_s"):
        figures[side] = median([getattr(ours, side) for _, ours in turns[2:]])
        figures[f"bare_{side}"] = median([getattr(bare, side) for bare, _ in turns[2:]])
    return figures


async def publish(fleet: Fleet, bare: Bare, repeats: int) -> Figures:
    """Whole publishes against one bare tensor, the engine idle and then sampling."""
    figures: Figures = {}
    for how in ("idle", "sampling"):
        if how == "sampling":
            await fleet.order("sample")
        turns, reports = [], []
        for _ in range(repeats + 2):
            began = time.monotonic()
            reports.append(await fleet.publish())
            ours = Cost(time.monotonic() - began)
            turns.append((bare.run(), ours))
        figures[how] = compared(turns[2:], reports[-1].num_bytes, "publish_s")
        figures[how]["pause_s"] = median([r.pause_s for r in reports[2:]])
    return figures


async def step(fleet: Fleet, repeats: int) -> Figures:
    """Training steps alone and with a publish beside them."""
    groups = make_groups(8, 12, 49152)
    loop = asyncio.get_running_loop()
    alone, beside = [], []
    with ThreadPoolExecutor(1) as thread:

        async def train() -> float:
            began = time.monotonic()
            await loop.run_in_executor(thread, fleet.trainer.train_step, 0, groups)
            return time.monotonic() - began

        for _ in range(repeats + 1):
            alone.append(await train())
            sending = asyncio.create_task(fleet.publish())
            beside.append(await train())
            await sending
    ratios = [(b - a) / a for a, b in zip(alone[1:], beside[1:], strict=True)]
    return {
        "step_s": median(alone[1:]),
        "with_a_publish_s": median(beside[1:]),
        "ratio": round(statistics.median(ratios), 3),
    }


class Fleet:
    """A trainer, a publisher and one node."""

    def __init__(self, trainer: FsdpTrainer, publisher: Publisher, node: Peer) -> None:
        self.trainer = trainer
        self._publisher = publisher
        self._node = node
        self._version = 0

    async def publish(self) -> PublishReport:
        """What the learner does after a step."""
        self._version += 1
        self._publisher.retire()
        staged = checked_finite(self.trainer.weights(), self._version)
        report = await self._publisher.publish(self._version, staged)
        assert len(report.installed) == 1, report
        return report

    async def order(self, what: str) -> None:
        """Tells the node what to do."""
        self._node.pipe.send(what)
        await asyncio.to_thread(self._node.pipe.recv)


@asynccontextmanager
async def fleet(trainer: FsdpTrainer, model: Path, job: JobSpec) -> AsyncIterator[Fleet]:
    """The learner's side with one vLLM node."""
    node = Peer(vllm_node, str(model), job)
    port = await asyncio.to_thread(node.pipe.recv)

    async def members() -> list[Member]:
        return [Member("node", f"127.0.0.1:{port}", "broadcast")]

    async def on_event(kind: str, message: str, **fields: Any) -> None:
        if fields.get("level"):
            print(message, file=sys.stderr)

    publisher = Publisher("bench", members, on_event, SnapshotServer("bench"), timeout_s=TIMEOUT_S)
    try:
        yield Fleet(trainer, publisher, node)
    finally:
        await asyncio.to_thread(node.close)


def compared(turns: Sequence[tuple[Cost, Cost]], size: int, name: str) -> Figures:
    """Medians of (bare, ours), and what they mean."""
    bare_s, ours_s = (median([c.seconds for c in column]) for column in zip(*turns, strict=True))
    return {
        name: ours_s,
        "bare_s": bare_s,
        "mib_per_s": round(size / ours_s / 2**20),
        "bare_mib_per_s": round(size / bare_s / 2**20),
        "ratio": round(statistics.median(bare.seconds / ours.seconds for bare, ours in turns), 3),
    }


def median(values: Sequence[float]) -> float:
    """To a tenth of a millisecond."""
    return round(statistics.median(values), 4)


def num_bytes(named: Mapping[str, Tensor]) -> int:
    """Of all tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in named.values())


def invite(port: int, rank: int) -> EpochInvite:
    """A seat in the group of two."""
    return EpochInvite("bench", 1, "127.0.0.1", port, rank, 2, "gloo", TIMEOUT_S)


def use_core(index: int) -> None:
    """One core and one thread for this process."""
    os.sched_setaffinity(0, {CORES[index]})
    torch.set_num_threads(1)


async def main(arguments: Sequence[str]) -> int:
    """Runs the parts and prints one JSON object last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--part", choices=PARTS, action="append")
    options = parser.parse_args(arguments)
    parts = options.part or list(PARTS)
    use_core(0)
    job = load_job(ROOT / "examples/quickstart.yaml")
    model = resolve_model(job.model.path)
    trainer = FsdpTrainer(model, job, 0, 1, torch.device("cpu"))
    named = dict(trainer.weights())
    figures: Figures = {"bench": "weights", "mib": round(num_bytes(named) / 2**20)}
    bare = Bare(num_bytes(named))
    if "transfer" in parts:
        figures["transfer"] = transfer(named, bare, options.repeats)
        print(json.dumps(figures["transfer"]), flush=True)
    if {"publish", "step"} & set(parts):
        async with fleet(trainer, model, job) as running:
            if "publish" in parts:
                figures["publish"] = await publish(running, bare, options.repeats)
                print(json.dumps(figures["publish"]), flush=True)
            if "step" in parts:
                figures["step"] = await step(running, options.repeats)
    bare.close()
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1:])))
