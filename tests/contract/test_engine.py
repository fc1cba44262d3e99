"""What every Engine promises, over all of them. A further engine is one more harness."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import pytest
import pytest_asyncio
import torch

from headway.errors import EpochBroken, Unavailable, WeightMismatch
from headway.messages import Completion, InstallReport, WeightManifest
from headway.weights.manifest import bucket_layout, build_manifest, combined_digest
from headway.weights.packing import packed
from services.rollout.engine import Engine, Look, Piece, Sampling
from services.rollout.sim_broadcast import BroadcastSimEngine
from services.rollout.sim_engine import SimEngine, SimSettings
from services.rollout.vllm_engine import VllmConfig, VllmEngine
from tests.support.echoed import check_echo
from tests.support.sender import DirectSender, load_tensors
from tests.support.tiny_model import build_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = (5, 6, 7, 8)


class Harness(Protocol):
    engine: Engine

    async def install(self, version: int) -> InstallReport:
        """A version that is installed; what it holds is the harness's."""

    async def break_install(self, version: int) -> InstallReport:
        """An install whose weights never arrive."""

    async def install_snapshot(self, version: int, path: Path) -> InstallReport:
        """A version from a snapshot at `path`; a file that is there is left as it is."""

    async def close(self) -> None:
        """Ends the engine."""


async def from_file(
    engine: Engine, version: int, tensors: Mapping[str, Any], path: Path
) -> InstallReport:
    manifest = build_manifest(version, tensors)
    if not path.exists():
        path.write_bytes(b"".join(packed(b, tensors).numpy() for b in bucket_layout(manifest)))
    return await engine.install_snapshot(manifest, path, 20.0)


class SimHarness:
    def __init__(self) -> None:
        self.engine = SimEngine(SimSettings(tokens_per_s=2000.0, install_pause_s=0.01))

    async def install(self, version: int) -> InstallReport:
        return await self.engine.install(WeightManifest(version, (), 1), 5.0)

    async def break_install(self, version: int) -> InstallReport:
        return await self.engine.install(WeightManifest(version, (), 1), 0.001)

    async def install_snapshot(self, version: int, path: Path) -> InstallReport:
        return await self.engine.install_snapshot(WeightManifest(version, (), 1), path, 5.0)

    async def close(self) -> None:
        await self.engine.close()


class BroadcastSimHarness:
    """The sim engine over a real process group; only it needs torch."""

    def __init__(self) -> None:
        settings = SimSettings(tokens_per_s=2000.0, install_pause_s=0.01, broadcast=True)
        self.engine = BroadcastSimEngine(settings)
        self.sender = DirectSender(self.engine)

    async def install(self, version: int) -> InstallReport:
        await self.sender.form()
        return await self.sender.publish(version, {"w": torch.full((7,), float(version))})

    async def break_install(self, version: int) -> InstallReport:
        await self.sender.form()
        self.sender.close()
        return await self.engine.install(build_manifest(version, {"w": torch.zeros(7)}), 5.0)

    async def install_snapshot(self, version: int, path: Path) -> InstallReport:
        return await from_file(self.engine, version, {"w": torch.zeros(7)}, path)

    async def close(self) -> None:
        self.sender.close()
        await self.engine.close()


class VllmHarness:
    def __init__(self, folder: Path) -> None:
        self.folders = [build_tiny_model(folder / str(seed), seed=seed) for seed in (0, 1)]
        self.tensors = [load_tensors(f) for f in self.folders]
        self.engine = VllmEngine(
            self.folders[0],
            VllmConfig(dtype="float32", max_model_len=512, kv_cache_gib=0.1, max_num_seqs=32),
        )
        self.sender = DirectSender(self.engine)

    async def install(self, version: int) -> InstallReport:
        await self.sender.form()
        return await self.sender.publish(version, self.tensors[version % 2])

    async def break_install(self, version: int) -> InstallReport:
        await self.sender.form()
        self.sender.close()
        return await self.engine.install(build_manifest(version, self.tensors[0]), 5.0)

    async def install_snapshot(self, version: int, path: Path) -> InstallReport:
        return await from_file(self.engine, version, self.tensors[version % 2], path)

    async def close(self) -> None:
        self.sender.close()
        await self.engine.close()


def sim_harness(folder: Path) -> Harness:
    return SimHarness()


def vllm_harness(folder: Path) -> Harness:
    return VllmHarness(folder)


def broadcast_harness(folder: Path) -> Harness:
    return BroadcastSimHarness()


HARNESSES: dict[str, Callable[[Path], Harness]] = {
    "sim": sim_harness,
    "sim-broadcast": broadcast_harness,
    "vllm": vllm_harness,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=sorted(HARNESSES))
async def harness(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Harness]:
    made = HARNESSES[request.param](tmp_path_factory.mktemp("engine"))
    await made.engine.start()
    yield made
    await made.close()


def check(completion: Completion, sampling: Sampling) -> None:
    length = len(completion.token_ids)
    assert 1 <= length <= sampling.max_tokens
    assert len(completion.logprobs) == length
    assert all(logprob <= 0.0 for logprob in completion.logprobs)
    assert completion.finish_reason in ("stop", "length")
    if completion.finish_reason == "length":
        assert length == sampling.max_tokens
    starts = [span.start for span in completion.spans]
    ends = [span.end for span in completion.spans]
    assert starts == [0, *ends[:-1]] and ends[-1] == length
    assert all(span.start < span.end for span in completion.spans)
    versions = [span.version for span in completion.spans]
    assert versions == sorted(set(versions))


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - engines have no event for it
            await asyncio.sleep(0.01)


async def visited(
    engine: Engine, name: str, sampling: Sampling, look: Look, prompt: tuple[int, ...] = PROMPT
) -> list[Piece]:
    return [piece async for piece in engine.visit(name, prompt, sampling, 7, look)]


# in this order: the first test needs an engine that never had weights


async def test_nothing_is_sampled_before_the_first_install(harness: Harness) -> None:
    engine = harness.engine
    assert engine.version is None and engine.num_tokens_sampled == 0 and engine.busy_s == 0.0
    sampling = Sampling(max_tokens=4)
    early = asyncio.create_task(engine.generate("early", PROMPT, 2, sampling, 1))
    report = await harness.install(0)
    assert report.version == 0 and engine.version == 0 and report.pause_s >= 0.0
    for completion in await early:
        check(completion, sampling)
        assert [span.version for span in completion.spans] == [0]


async def test_completions_are_whole_and_counted(harness: Harness) -> None:
    engine = harness.engine
    tokens, busy = engine.num_tokens_sampled, engine.busy_s
    sampling = Sampling(max_tokens=12)
    completions = await engine.generate("whole", PROMPT, 5, sampling, 3)
    assert len(completions) == 5
    for completion in completions:
        check(completion, sampling)
    assert engine.num_tokens_sampled - tokens == sum(len(c.token_ids) for c in completions)
    assert engine.busy_s > busy
    assert engine.num_completions_in_flight == 0


async def test_the_seed_decides_and_completions_differ(harness: Harness) -> None:
    sampling = Sampling(max_tokens=16, min_tokens=16)
    runs = [
        [c.token_ids for c in await harness.engine.generate(f"s{i}", PROMPT, 4, sampling, seed)]
        for i, seed in enumerate((11, 11, 12))
    ]
    assert runs[0] == runs[1]
    assert not set(runs[0]) & set(runs[2])
    assert len(set(runs[0])) == 4


async def test_greedy_completions_are_alike_whatever_the_seed(harness: Harness) -> None:
    greedy = Sampling(max_tokens=12, temperature=0.0)
    first = await harness.engine.generate("g1", PROMPT, 2, greedy, 11)
    (second,) = await harness.engine.generate("g2", PROMPT, 1, greedy, 12)
    for completion in (*first, second):
        check(completion, greedy)
        assert completion.token_ids == second.token_ids
    (sampled,) = await harness.engine.generate("g3", PROMPT, 1, Sampling(max_tokens=12), 12)
    assert sampled.token_ids != second.token_ids


async def test_bounds_on_length_hold(harness: Harness) -> None:
    sampling = Sampling(max_tokens=7, min_tokens=7)
    for completion in await harness.engine.generate("bounds", PROMPT, 3, sampling, 5):
        check(completion, sampling)
        assert len(completion.token_ids) == 7


async def test_a_visitors_completion_is_the_same_whole_and_in_pieces(harness: Harness) -> None:
    engine, sampling = harness.engine, Sampling(max_tokens=60, min_tokens=60)
    (whole,) = await visited(engine, "v1", sampling, Look(alternatives=3))
    pieces = await visited(engine, "v2", sampling, Look(alternatives=3, in_pieces=True))
    assert len(pieces) > 1
    assert "".join(p.text for p in pieces) == whole.text
    assert sum(p.num_tokens for p in pieces) == whole.num_tokens == 60
    assert [t.token_id for p in pieces for t in p.tokens] == [t.token_id for t in whole.tokens]
    reasons = [piece.finish_reason for piece in pieces]
    assert reasons == [None] * (len(pieces) - 1) + [whole.finish_reason]
    assert whole.spans == pieces[-1].spans and whole.spans[-1].end == 60
    assert {span.version for span in whole.spans} == {engine.version}
    for token in whole.tokens:
        assert token.logprob is not None and token.logprob <= 0.0
        ranked = [logprob for _, logprob in token.others]
        assert ranked == sorted(ranked, reverse=True) and 1 <= len(ranked) <= 3
    assert whole.prompt == () and engine.num_completions_in_flight == 0


async def test_a_visitor_sees_what_the_model_makes_of_a_prompt(harness: Harness) -> None:
    engine, one = harness.engine, Sampling(max_tokens=1, temperature=0.0)
    look = Look(alternatives=1, prompt_alternatives=1)
    ids = (5, 6, 7, 8, 9, 10)
    (piece,) = await visited(engine, "p1", one, look, ids)
    assert [token.token_id for token in piece.prompt] == list(ids)
    assert piece.prompt[0].logprob is None
    assert all(t.logprob is not None and t.logprob < 0.0 for t in piece.prompt[1:])
    # what stands before a token decides on it, what comes after does not
    (shorter,) = await visited(engine, "p2", one, look, ids[:4])
    for ours, theirs in zip(piece.prompt[1:4], shorter.prompt[1:], strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
    words = await engine.words()
    assert words.encode("1 + 2?") and words.encode_chat([{"role": "user", "content": "1 + 2?"}])
    assert "2?" in words.decode(words.encode("1 + 2?"))
    if isinstance(harness, VllmHarness):  # the others' log-probs are made up
        assert engine.version == 0
        await check_echo(engine, harness.folders[0], tolerance=1e-4)


async def test_a_visitor_who_leaves_frees_the_engine(harness: Harness) -> None:
    engine, sampling = harness.engine, Sampling(max_tokens=400, min_tokens=400)
    stream = engine.visit("leaves", PROMPT, sampling, 3, Look(in_pieces=True))
    assert (await anext(stream)).finish_reason is None
    await stream.aclose()
    assert engine.num_completions_in_flight == 0


async def test_an_update_in_flight_splits_completions(harness: Harness) -> None:
    engine = harness.engine
    before = engine.version
    assert before is not None
    sampling = Sampling(max_tokens=400, min_tokens=400)
    flight = asyncio.create_task(engine.generate("flight", PROMPT, 4, sampling, 9))
    await eventually(lambda: engine.num_completions_in_flight == 4)
    await harness.install(before + 1)
    completions = await flight
    for completion in completions:
        check(completion, sampling)
    last = {completion.spans[-1].version for completion in completions}
    assert last == {before + 1}
    assert all(c.oldest_version in (before, before + 1) for c in completions)
    later = await engine.generate("later", PROMPT, 2, Sampling(max_tokens=4), 9)
    assert {c.oldest_version for c in later} == {before + 1}


async def test_cancelling_frees_the_engine(harness: Harness) -> None:
    engine = harness.engine
    sampling = Sampling(max_tokens=400, min_tokens=400)
    flight = asyncio.create_task(engine.generate("cancelled", PROMPT, 4, sampling, 2))
    await eventually(lambda: engine.num_completions_in_flight == 4)
    flight.cancel()
    with pytest.raises(asyncio.CancelledError):
        await flight
    assert engine.num_completions_in_flight == 0
    await engine.generate("next", PROMPT, 1, Sampling(max_tokens=3), 2)


async def test_after_a_broken_install_nothing_is_sampled_until_the_next(harness: Harness) -> None:
    engine = harness.engine
    with pytest.raises(EpochBroken):
        await harness.break_install(40)
    assert engine.version is None
    waiting = asyncio.create_task(engine.generate("wait", PROMPT, 2, Sampling(max_tokens=4), 1))
    report = await harness.install(41)
    assert engine.version == report.version == 41
    assert {c.oldest_version for c in await waiting} == {41}


async def test_the_report_carries_the_combined_digest(harness: Harness) -> None:
    report = await harness.install(50)
    if harness.engine.transport == "none":
        assert report.digest == combined_digest([])
    else:
        assert len(report.digest) == 32 and report.digest != combined_digest([])


async def test_a_snapshot_needs_no_seat_and_a_bad_one_changes_nothing(
    harness: Harness, tmp_path: Path
) -> None:
    engine = harness.engine
    await engine.leave()
    report = await harness.install_snapshot(60, tmp_path / "whole")
    assert engine.version == report.version == 60
    if engine.transport == "broadcast":
        data = bytearray((tmp_path / "whole").read_bytes())
        data[0] ^= 1
        (tmp_path / "spoilt").write_bytes(data)
        (tmp_path / "cut").write_bytes(data[:-1])
        for name, error in (("spoilt", WeightMismatch), ("cut", Unavailable)):
            with pytest.raises(error):
                await harness.install_snapshot(60, tmp_path / name)
    assert engine.version == 60
    after = await engine.generate("after", PROMPT, 2, Sampling(max_tokens=4), 1)
    assert {c.oldest_version for c in after} == {60}
    assert (await harness.install(61)).version == 61  # and takes a seat again


async def test_what_it_holds_can_be_given_a_version(harness: Harness) -> None:
    await harness.engine.adopt(70)
    assert harness.engine.version == 70
    (completion,) = await harness.engine.generate("own", PROMPT, 1, Sampling(max_tokens=4), 1)
    assert completion.oldest_version == 70


async def test_leaving_and_closing_repeat_and_end_it(harness: Harness) -> None:
    engine: Any = harness.engine
    for repeat in (engine.leave, engine.leave, engine.close, engine.close):
        call: Callable[[], Awaitable[None]] = repeat
        await call()
    with pytest.raises(Unavailable):
        await engine.generate("late", PROMPT, 1, Sampling(max_tokens=2), 1)
