"""Adapters from a trainer in a running vLLM engine: only they travel, and they are seen to land."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headway.errors import WeightMismatch
from headway.messages import AdapterBase, VersionSpan, WeightManifest
from headway.weights.base import base_digest
from headway.weights.manifest import build_manifest, combined_digest, spec_bytes
from headway.weights.snapshot import Staged, write_snapshot
from services.learner.trainer import FsdpTrainer
from services.rollout.engine import Sampling
from services.rollout.vllm_engine import VllmEngine
from tests.integration.test_vllm_engine import CONFIG, EOS, PROMPT, check, eventually
from tests.support import engine_faults
from tests.support.learning import random_groups
from tests.support.sender import DirectSender, load_tensors
from tests.support.tiny_model import build_tiny_model
from tests.support.trainers import trainer, weights

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCALE = 2.0
# 2 layers, rank 4: q 128x64, k 64x64 (v has none), o 64x128, gate and up 128x64, down 64x128
TARGETS = ["q_proj", "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
NUM_BYTES = 4 * 2 * 4 * (192 + 128 + 192 + 192 + 192 + 192)


@dataclass
class Bench:
    engine: VllmEngine
    sender: DirectSender
    folder: Path
    trainer: FsdpTrainer
    exports: Path
    version: int = -1
    manifests: dict[int, WeightManifest] = field(default_factory=dict)

    def next_version(self) -> dict[str, Any]:
        """Trains a step, from version 1 on; what is to be published as `self.version`."""
        self.version += 1
        if self.version:
            groups = random_groups(4, 4, seed=self.version)
            self.trainer.train_step(0, groups)  # all they hold is of version 0
        self.trainer.export(self.exports / str(self.version))
        return weights(self.trainer)

    def manifest(self, tensors: dict[str, Any]) -> WeightManifest:
        base = AdapterBase(base_digest(self.folder), SCALE)
        made = build_manifest(self.version, tensors, 1 << 16, base)
        self.manifests[self.version] = made
        return made

    async def publish(self, tensors: dict[str, Any] | None = None) -> int:
        tensors = self.next_version() if tensors is None else tensors
        await self.sender.publish(self.version, tensors, manifest=self.manifest(tensors))
        return self.version

    def model(self, version: int) -> Any:
        """The merged export of a version."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.exports / str(version)).eval()

    async def call(self, fault: Callable[..., None], *args: Any) -> None:
        await self.engine._llm.collective_rpc(fault, args=args)

    async def sampled_by(self, version: int, tag: str) -> None:
        """Samples, and finds that all is of this version and that its merged export agrees."""
        completions = await self.engine.generate(tag, PROMPT, 4, Sampling(max_tokens=24), 3)
        for completion in completions:
            assert completion.spans == (VersionSpan(version, 0, len(completion.token_ids)),)
            check(self, PROMPT, completion)  # type: ignore[arg-type]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    root = tmp_path_factory.mktemp("lora")
    folder = build_tiny_model(root / "base", seed=0)
    learner = trainer(
        folder,
        model__lora_rank=4,
        model__lora_alpha=8,
        model__target_modules=TARGETS,
        actor__optim__lr=0.05,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # faults are functions
        engine = VllmEngine(folder, CONFIG)
        await engine.start()
        async with DirectSender(engine) as sender:
            yield Bench(engine, sender, folder, learner, root / "exports")
        await engine.close()


async def test_samples_of_two_updates_are_those_of_the_merged_model(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="services.rollout.vllm_engine"):
        await bench.publish()
        await bench.sampled_by(0, "base")
        await bench.publish()
        await bench.publish()
        await bench.sampled_by(2, "two")
    ways = [row.in_place for row in caplog.records if row.message == "weights installed"]
    assert ways == [False, True, True]
    for manifest in bench.manifests.values():
        assert sum(map(spec_bytes, manifest.tensors)) == NUM_BYTES
    # the updates matter: by the base, the log-probs are off
    base, now = load_tensors(bench.folder), load_tensors(bench.exports / "2")
    moved = {name for name in base if not base[name].equal(now[name])}
    assert len(moved) == 2 * len(TARGETS)


async def test_an_update_in_flight_splits_a_completion(bench: Bench) -> None:
    sampling = Sampling(max_tokens=200, min_tokens=200)
    flight = asyncio.create_task(bench.engine.generate("split", PROMPT, 4, sampling, 2))
    staged = bench.next_version()
    await eventually(lambda: bench.engine.num_completions_in_flight == 4)
    version = await bench.publish(staged)
    for completion in await flight:
        assert [span.version for span in completion.spans] == [version - 1, version]
        check(bench, PROMPT, completion, banned=EOS)  # type: ignore[arg-type]


async def test_adapters_that_do_not_reach_the_engine_are_found_out(bench: Bench) -> None:
    await bench.call(engine_faults.lose_writes, "q_proj")
    with pytest.raises(WeightMismatch, match=r"q_proj.weight\+.*: the running model does not hold"):
        await bench.publish()
    assert bench.engine.version is None
    await bench.call(engine_faults.mend)
    # the whole reload that must follow is looked at as well
    await bench.call(engine_faults.load_only_the_base)
    with pytest.raises(WeightMismatch, match="the running model does not hold what was sent"):
        await bench.publish()
    assert bench.engine.version is None
    await bench.call(engine_faults.mend)
    await bench.sampled_by(await bench.publish(), "mended")


async def test_adapters_of_another_base_are_refused(bench: Bench, tmp_path: Path) -> None:
    other = build_tiny_model(tmp_path / "other", seed=1)
    staged = bench.next_version()
    base = AdapterBase(base_digest(other), SCALE)
    manifest = build_manifest(bench.version, staged, 1 << 16, base)
    with pytest.raises(WeightMismatch, match="give both the same model folder"):
        await bench.sender.publish(bench.version, staged, manifest=manifest)
    assert bench.engine.version is None
    await bench.sampled_by(await bench.publish(staged), "again")


async def test_a_snapshot_of_adapters_is_installed(bench: Bench, tmp_path: Path) -> None:
    staged = bench.next_version()
    manifest = bench.manifest(staged)
    digest = combined_digest(spec.digest for spec in manifest.tensors)
    path = write_snapshot(tmp_path, "job", Staged(manifest, staged, digest))
    assert path.stat().st_size < 1.1 * NUM_BYTES
    report = await bench.engine.install_snapshot(manifest, path, 20.0)
    assert (report.version, report.digest) == (bench.version, digest)
    await bench.sampled_by(bench.version, "snapshot")


async def test_whole_weights_and_adapters_take_turns_in_one_engine(
    bench: Bench, tmp_path: Path
) -> None:
    other = load_tensors(build_tiny_model(tmp_path / "other", seed=1))
    await bench.sender.publish(500, other)
    greedy = Sampling(max_tokens=12, temperature=0.0)
    (whole,) = await bench.engine.generate("whole", PROMPT, 1, greedy, 0)
    # the other model's embedding and norms must go, and not its adapted weights alone
    version = await bench.publish()
    await bench.sampled_by(version, "after whole weights")
    (adapted,) = await bench.engine.generate("adapted", PROMPT, 1, greedy, 0)
    assert adapted.token_ids != whole.token_ids
