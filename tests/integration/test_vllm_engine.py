"""The vLLM engine on a tiny model: what travels is what was sampled, by the version it says."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest
import pytest_asyncio
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headway.errors import WeightMismatch
from headway.messages import Completion, VersionSpan
from headway.rpc import channel, grpc_server
from headway.weights.manifest import build_manifest
from services.rollout.engine import Sampling
from services.rollout.vllm_engine import VllmConfig, VllmEngine
from tests.support.sender import DirectSender, load_tensors
from tests.support.tiny_model import build_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

# float32 on both sides; kernels differ in the order of their sums
TOLERANCE = 2e-3
CONFIG = VllmConfig(dtype="float32", max_model_len=512, kv_cache_gib=0.25, max_num_seqs=64)
PROMPT = tuple(range(40, 60))
EOS = 2


@dataclass
class Bench:
    engine: VllmEngine
    sender: DirectSender
    folders: list[Path]
    version: int = -1

    def tensors(self, version: int) -> dict[str, Any]:
        """Even versions are checkpoint 0, odd ones checkpoint 1."""
        return load_tensors(self.folders[version % 2])

    async def publish(self) -> int:
        self.version += 1
        await self.sender.publish(self.version, self.tensors(self.version))
        return self.version

    def model(self, version: int) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.folders[version % 2]).eval()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    root = tmp_path_factory.mktemp("models")
    folders = [build_tiny_model(root / str(seed), seed=seed) for seed in (0, 1)]
    engine = VllmEngine(folders[0], CONFIG)
    await engine.start()
    async with DirectSender(engine) as sender:
        made = Bench(engine, sender, folders)
        await made.publish()
        yield made
    await engine.close()


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - the engine has no event for it
            await asyncio.sleep(0.005)


@torch.no_grad()
def rescored(
    bench: Bench,
    prompt: tuple[int, ...],
    completion: Completion,
    temperature: float = 1.0,
    banned: int | None = None,
) -> list[float]:
    """Log-probs by transformers, span by span.

    The first token of a new span comes from the forward of the token before it, under the
    new weights, over keys and values that the old weights left: so does this.
    """
    ids = [*prompt, *completion.token_ids]
    cache, start, out = None, 0, []
    for span in completion.spans:
        end = len(prompt) + span.end - 1  # the last token of a span is the next one's first input
        result = bench.model(span.version)(
            torch.tensor([ids[start:end]]), past_key_values=cache, use_cache=True
        )
        cache = result.past_key_values
        logits = result.logits[0].float() / temperature
        if banned is not None:
            logits[:, banned] = -torch.inf
        logprobs = torch.log_softmax(logits, -1)
        for position in range(len(prompt) + span.start - 1, end):
            out.append(float(logprobs[position - start, ids[position + 1]]))
        start = end
    return out


def check(bench: Bench, prompt: tuple[int, ...], completion: Completion, **how: Any) -> None:
    expected = rescored(bench, prompt, completion, **how)
    assert len(expected) == len(completion.token_ids) == len(completion.logprobs)
    worst = max(abs(a - b) for a, b in zip(expected, completion.logprobs, strict=True))
    assert worst < TOLERANCE


async def test_rescoring_reproduces_logprobs_before_and_after_an_update(bench: Bench) -> None:
    sampling = Sampling(max_tokens=40, temperature=0.8)
    before = await bench.engine.generate("before", PROMPT, 4, sampling, 1)
    version = await bench.publish()
    after = await bench.engine.generate("after", PROMPT, 4, sampling, 1)
    for completion, expected in [(c, version - 1) for c in before] + [(c, version) for c in after]:
        assert completion.spans == (VersionSpan(expected, 0, len(completion.token_ids)),)
        check(bench, PROMPT, completion, temperature=0.8)
    # the two checkpoints really differ: scored by the other one, the log-probs are off
    swapped = replace(after[0], spans=(VersionSpan(version - 1, 0, len(after[0].token_ids)),))
    other = rescored(bench, PROMPT, swapped, 0.8)
    assert max(abs(a - b) for a, b in zip(other, after[0].logprobs, strict=True)) > 0.5


async def test_rescoring_reproduces_a_completion_that_an_update_split(bench: Bench) -> None:
    sampling = Sampling(max_tokens=200, min_tokens=200)
    flight = asyncio.create_task(bench.engine.generate("split", PROMPT, 4, sampling, 2))
    await eventually(lambda: bench.engine.num_completions_in_flight == 4)
    version = await bench.publish()
    completions = await flight
    split = [c for c in completions if len(c.spans) == 2]
    assert len(split) == 4
    for completion in split:
        assert [span.version for span in completion.spans] == [version - 1, version]
        check(bench, PROMPT, completion, banned=EOS)  # min_tokens: no eos before them


async def test_s011_greedy_right_after_an_update_equals_a_fresh_engine(bench: Bench) -> None:
    prompts = [PROMPT, (*PROMPT * 8, 99), (*PROMPT * 8, 98)]  # long common heads: cached blocks
    greedy = Sampling(max_tokens=48, temperature=0.0)

    async def texts(engine: VllmEngine, tag: str) -> list[tuple[int, ...]]:
        groups = await asyncio.gather(
            *(engine.generate(f"{tag}{i}", p, 1, greedy, 0) for i, p in enumerate(prompts))
        )
        return [group[0].token_ids for group in groups]

    if bench.version % 2 == 1:
        await bench.publish()
    old = await texts(bench.engine, "old")
    version = await bench.publish()
    updated = await texts(bench.engine, "updated")
    fresh = VllmEngine(bench.folders[1], CONFIG)
    await fresh.start()
    try:
        async with DirectSender(fresh) as sender:
            await sender.publish(version, bench.tensors(version))
            expected = await texts(fresh, "fresh")
    finally:
        await fresh.close()
    assert updated == expected
    assert updated != old


async def test_eos_is_among_the_ids_and_not_in_the_text(bench: Bench) -> None:
    sampling = Sampling(max_tokens=150)
    completions = await bench.engine.generate("eos", PROMPT, 12, sampling, 4)
    stopped = [c for c in completions if c.finish_reason == "stop"]
    assert stopped
    for completion in stopped:
        assert completion.token_ids[-1] == EOS and EOS not in completion.token_ids[:-1]
        assert "<|im_end|>" not in completion.text
        check(bench, PROMPT, completion)


@pytest.mark.parametrize(
    "text",
    [
        "31415926535897932384626433",
        "🦊🦊👩‍👩‍👧 é",
        "a  b   c \t\n  d",
        "def f(x):\n    return x**2 #",
    ],
)
async def test_s023_ids_are_those_sampled_whatever_the_text(bench: Bench, text: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(bench.folders[0])
    prompt = tuple(tokenizer(text).input_ids)
    completions = await bench.engine.generate(text[:4], prompt, 4, Sampling(max_tokens=24), 6)
    for completion in completions:
        check(bench, prompt, completion)
    # the very case: some sampled ids are not what their text would be tokenised to
    assert any(tuple(tokenizer(c.text).input_ids) != c.token_ids for c in completions)


async def test_s015_weights_that_do_not_fit_are_named_and_stop_sampling(bench: Bench) -> None:
    engine, sender = bench.engine, bench.sender
    good = bench.tensors(0)
    embedding = good["model.embed_tokens.weight"]
    padded = {
        **good,
        "model.embed_tokens.weight": torch.cat([embedding, embedding[:64]]),
    }
    with pytest.raises(WeightMismatch, match=r"tensor model\.embed_tokens\.weight.*\[384, 64\]"):
        await sender.publish(900, padded)
    assert engine.version is None
    partial = {name: tensor for name, tensor in good.items() if name != "model.norm.weight"}
    with pytest.raises(WeightMismatch, match=r"tensor model\.norm\.weight: .* needs it"):
        await sender.publish(901, partial)
    with pytest.raises(WeightMismatch, match=r"tensor adapter: the learner sends it"):
        await sender.publish(902, {**good, "adapter": torch.zeros(3)})
    manifest = build_manifest(903, good)
    spoilt = {**good, "model.norm.weight": good["model.norm.weight"] + 1}
    with pytest.raises(WeightMismatch, match=r"tensor model\.norm\.weight: sent "):
        await sender.publish(903, spoilt, manifest=manifest)
    waiting = asyncio.create_task(engine.generate("held", PROMPT, 1, Sampling(max_tokens=4), 0))
    version = await bench.publish()
    assert [c.oldest_version for c in await waiting] == [version]


async def test_a_version_is_written_in_place_after_a_whole_reload(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="services.rollout.vllm_engine"):
        await bench.publish()
        with pytest.raises(WeightMismatch):
            await bench.sender.publish(901, {"model.norm.weight": torch.zeros(64)})
        for _ in range(5):
            version = await bench.publish()
    ways = [row.in_place for row in caplog.records if row.message == "weights installed"]
    # what did not arrive as it should has touched nothing
    assert ways == [True] * 6
    completions = await bench.engine.generate("in place", PROMPT, 4, Sampling(max_tokens=24), 3)
    for completion in completions:
        assert [span.version for span in completion.spans] == [version]
        check(bench, PROMPT, completion)


async def test_s019_health_answers_while_many_requests_and_an_update_run(bench: Bench) -> None:
    engine = bench.engine
    sampling = Sampling(max_tokens=16, min_tokens=16)
    waits: list[float] = []
    async with grpc_server("127.0.0.1", 0, lambda server: []) as port:
        flight = [
            asyncio.create_task(engine.generate(f"m{i}", (*PROMPT, 60 + i), 8, sampling, i))
            for i in range(64)
        ]
        await eventually(lambda: engine.num_completions_in_flight == CONFIG.max_num_seqs)
        update = asyncio.create_task(bench.publish())
        async with channel(f"127.0.0.1:{port}") as link:
            health: Any = health_pb2_grpc.HealthStub(link)
            while not update.done():
                started = asyncio.get_running_loop().time()
                answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=5.0)
                waits.append(asyncio.get_running_loop().time() - started)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
                await asyncio.sleep(0.005)
        version = await update
        groups = await asyncio.gather(*flight)
    assert waits and median(waits) < 1.0
    completions = [c for group in groups for c in group]
    assert len(completions) == 512
    for completion in completions:
        assert [span.version for span in completion.spans] in (
            [version - 1],
            [version - 1, version],
            [version],
        )
        assert completion.spans[-1].end == 16
    assert any(len(completion.spans) == 2 for completion in completions)


async def test_s007_cancels_and_updates_meet_in_any_order(bench: Bench) -> None:
    engine = bench.engine
    order = random.Random(7)
    sampling = Sampling(max_tokens=200, min_tokens=200)
    for round_ in range(20):
        flight = asyncio.create_task(engine.generate(f"c{round_}", PROMPT, 4, sampling, round_))
        for _ in range(order.randrange(8)):
            await asyncio.sleep(0)
        update = asyncio.create_task(bench.publish())
        for _ in range(order.choice([0, 3, 30, 300])):
            await asyncio.sleep(0)
        flight.cancel()
        await asyncio.gather(flight, update, return_exceptions=True)
        assert flight.cancelled() and update.exception() is None
        assert engine.version == bench.version and engine.num_completions_in_flight == 0
    (completion,) = await engine.generate("end", PROMPT, 1, Sampling(max_tokens=30), 1)
    assert completion.spans[0].version == bench.version
    check(bench, PROMPT, completion)


async def test_vllm_processes_end_with_a_killed_node(bench: Bench) -> None:
    code = (
        "import asyncio, os, signal, sys, psutil\n"
        "from services.rollout.vllm_engine import VllmConfig, VllmEngine\n"
        "async def main():\n"
        "    config = VllmConfig(max_model_len=128, kv_cache_gib=0.1)\n"
        "    await VllmEngine(sys.argv[1], config).start()\n"
        "    print(*(c.pid for c in psutil.Process().children(recursive=True)), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "if __name__ == '__main__':\n"
        "    asyncio.run(main())\n"
    )
    script = bench.folders[0] / "node.py"  # a file: spawned processes import the main module
    script.write_text(code)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(script), str(bench.folders[0])),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    # the output ends only when the last process that holds it has ended
    output, _ = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in output.splitlines()[-1].split()]
    assert len(pids) >= 2

    def gone() -> bool:
        return not any(
            psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
            for pid in pids
        )

    await eventually(gone)
