"""A learner killed anywhere (SIGKILL, real processes) and resumed trains the same bits."""

from __future__ import annotations

import asyncio
import hashlib
import signal

import pytest

from headway.patience import patiently
from headway.payloads import pack_group
from tests.integration.test_learner_loop import Place, job
from tests.support.mortal_rank import Death, MortalRanks
from tests.support.scripted_node import ScriptedNode
from tests.support.tiny_model import build_tiny_model

STEPS, SAVE = 8, 3

# One after the other in one job: each start dies at its point, the next resumes.
DEATHS = (
    Death("after take", 0),
    Death("before commit", 0),
    Death("after commit", 1),
    Death("mid-publish", 2),  # retraces from step 0: there is no checkpoint yet
    Death("writing a checkpoint", 3),
    Death("before the rename", 3),
    Death("in the manifest", 3),
    Death("before trim", 3),
    Death("mid-step", 4),
    Death("in the record", 4),
    Death("before the row", 6),
    Death("before staging", 7),
    Death("before the rename", 8),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("model") / "tiny", seed=1)


@pytest.fixture(scope="module")
def mortal():
    return MortalRanks()


@pytest.fixture
def place(valkey_url, tmp_path):
    """Makes the place of one job; every one of a test has its own."""

    def make(job_id):
        return Place(valkey_url, job_id, tmp_path)

    return make


class Killed:
    """One job, started again after each death until it ends by itself."""

    def __init__(self, place, mortal, spec):
        self.place, self.mortal, self.spec = place, mortal, spec
        self.node = ScriptedNode(place.ledger)
        place.folder.create(spec)

    def flags(self):
        place = self.place
        return ["--job-file", str(place.folder.job), "--job-id", place.job_id,
                "--redis", place.url, "--run-dir", str(place.folder.path),
                "--world", str(self.spec.actor.num_ranks)]  # fmt: skip

    async def start(self, death=None):
        codes = await self.mortal.run(self.flags(), self.spec.actor.num_ranks, death)
        log = self.place.folder.log.read_text()[-2000:]
        if death is None:
            assert codes == [0] * len(codes), log
        else:
            assert codes[death.rank] == -signal.SIGKILL, (death, codes, log)

    async def run(self, *deaths):
        async with self.node.serving():
            for death in (*deaths, None):
                await self.start(death)
        return self

    def digests(self):
        return [row["actor/weights_digest"] for row in self.place.rows("metrics.jsonl")]

    def sha256(self, name):
        return hashlib.sha256((self.place.folder.path / name).read_bytes()).hexdigest()

    async def check_equal(self, other):
        assert self.digests() == other.digests() and len(self.digests()) == STEPS
        for name in ("model/model.safetensors", "groups.log", "samples.jsonl"):
            assert self.sha256(name) == other.sha256(name), name
        assert self.node.installed == sorted(self.node.installed)  # a version never goes back
        counts = await self.place.ledger.counts()
        assert counts.conserved and (counts.step, counts.taken) == (STEPS, 0)
        assert counts.held_bytes == counts.payload_bytes


@pytest.fixture(scope="module")
def whole(valkey_url, mortal, model, tmp_path_factory):
    """The job that nobody killed."""

    async def run():
        place = Place(valkey_url, "never-killed", tmp_path_factory.mktemp("runs"))
        return await Killed(place, mortal, job(model, steps=STEPS, save_freq=SAVE)).run()

    return asyncio.run(run())


async def test_killed_at_every_point_one_after_the_other(place, mortal, model, whole, job_id):
    spec = job(model, steps=STEPS, save_freq=SAVE)
    killed = await Killed(place(job_id), mortal, spec).run(*DEATHS)
    await killed.check_equal(whole)
    starts = [e for e in await killed.place.events() if e["kind"] == "starting"]
    resumed = [e["step"] for e in starts]
    assert resumed == sorted(resumed) and set(resumed) == {0, 3, 6}


async def test_two_ranks_killed_give_the_bits_of_two_ranks(place, mortal, model, job_id):
    spec = job(model, steps=STEPS, save_freq=SAVE, ranks=2)
    whole = await Killed(place(job_id), mortal, spec).run()
    killed = Killed(place(f"{job_id}-b"), mortal, spec)
    await killed.run(Death("mid-step", 1, rank=1), Death("before the rename", 6))
    await killed.check_equal(whole)


async def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(
    place, mortal, model, whole, job_id
):
    spec = job(model, steps=STEPS, save_freq=SAVE)
    killed = Killed(place(job_id), mortal, spec)
    async with killed.node.serving():
        await killed.start(Death("after commit", 7))
        newest = killed.place.folder.checkpoints / "step-6" / "__0_0.distcp"
        newest.write_bytes(newest.read_bytes()[:-9])
        await killed.start()
    await killed.check_equal(whole)
    events = await killed.place.events()
    (damaged,) = [e["message"] for e in events if e["kind"] == "checkpoint_damaged"]
    assert "step-6 is damaged" in damaged
    starts = [e["message"] for e in events if e["kind"] == "starting"]
    assert starts == [
        "resumed from the checkpoint of step 3: retracing steps 4 to 8 with the same groups"
    ]
    names = {p.name for p in killed.place.folder.checkpoints.iterdir()}
    assert names == {"step-6", "step-8", "damaged-step-6"}


async def test_no_usable_checkpoint_is_a_refusal_that_touches_nothing(place, mortal, model, job_id):
    spec = job(model, steps=STEPS, save_freq=SAVE)
    killed = Killed(place(job_id), mortal, spec)
    async with killed.node.serving():
        await killed.start(Death("after commit", 7))
        for path in killed.place.folder.checkpoints.iterdir():
            (path / ".metadata").unlink()
        rows = killed.sha256("metrics.jsonl")
        code, status = await killed.place.lead(spec)
    assert (code, status.phase, status.error_kind) == (1, "failed", "no_checkpoint")
    assert "trained 8 steps" in status.detail and "step-3 is damaged" in status.detail
    assert "does not start again at step 0" in status.detail
    assert killed.sha256("metrics.jsonl") == rows
    assert {p.name for p in killed.place.folder.checkpoints.iterdir()} == {"step-3", "step-6"}


async def test_steps_are_not_retraced_from_another_base_model(place, mortal, tmp_path, job_id):
    model = build_tiny_model(tmp_path / "tiny", seed=1)
    spec = job(model, steps=STEPS, save_freq=0)
    killed = Killed(place(job_id), mortal, spec)
    async with killed.node.serving():
        await killed.start(Death("after commit", 2))
        build_tiny_model(tmp_path / "tiny", seed=2)
        code, status = await killed.place.lead(spec)
    assert (code, status.error_kind) == (1, "no_checkpoint")
    assert "the files of model.path have changed" in status.detail


def adapters_of(spec):
    return spec.model_copy(update={"model": spec.model.model_copy(update={"lora_rank": 4})})


async def test_adapters_killed_and_resumed_have_the_same_bits(place, mortal, model, job_id):
    spec = adapters_of(job(model, steps=STEPS, save_freq=SAVE))
    whole = await Killed(place(job_id), mortal, spec).run()
    killed = Killed(place(f"{job_id}-b"), mortal, spec)
    await killed.run(Death("mid-publish", 2), Death("mid-step", 4), Death("before the rename", 6))
    await killed.check_equal(whole)
    assert (killed.place.folder.model / "adapter" / "adapter_config.json").is_file()


async def test_adapters_do_not_go_on_from_another_base(place, mortal, tmp_path, job_id):
    model = build_tiny_model(tmp_path / "tiny", seed=1)
    spec = adapters_of(job(model, steps=STEPS, save_freq=SAVE))
    killed = Killed(place(job_id), mortal, spec)
    async with killed.node.serving():
        await killed.start(Death("mid-step", 4))
        build_tiny_model(tmp_path / "tiny", seed=2)
        code, status = await killed.place.lead(spec)
    assert (code, status.error_kind) == (1, "invalid")
    assert "hold adapters, and the files of model.path" in status.detail


class UnevenNode(ScriptedNode):
    """Every tenth ticket takes twenty rounds, the others one."""

    def __init__(self, ledger):
        super().__init__(ledger)
        self.round = 0
        self.working = []  # (round in which it is done, lease)

    async def _serve_one(self):
        self.round += 1
        version = self.installed[-1]
        claimed = await patiently(lambda: self.ledger.claim("scripted", version, limit=8))
        for lease in claimed.leases:
            long = lease.ticket.ticket_id % 10 == 3
            self.working.append((self.round + 20 * long, lease))
        done = [lease for due, lease in self.working if due <= self.round]
        self.working = [item for item in self.working if item[0] > self.round]
        for lease in done:
            payload = pack_group(self.make(lease))
            await patiently(lambda x=lease, p=payload: self.ledger.deliver(x, p))


async def test_s027_s031_an_epoch_with_five_kills_is_one_epoch(place, mortal, model, job_id):
    steps = 20  # of 2 prompts: two epochs of 20
    spec = job(model, steps=steps, save_freq=10, lag=2)
    spec = spec.model_copy(update={"data": spec.data.model_copy(update={"size": 20})})
    killed = Killed(place(job_id), mortal, spec)
    killed.node = UnevenNode(killed.place.ledger)
    await killed.run(
        Death("after take", 2),
        Death("before commit", 4),
        Death("mid-step", 6),
        Death("after commit", 7),
        Death("before the rename", 10),
    )
    samples = killed.place.rows("samples.jsonl")
    assert [s["step"] for s in samples] == [1 + i // 2 for i in range(2 * steps)]
    asked = [(s["data_epoch"], str(s["prompt"])) for s in samples]
    assert len(set(asked)) == len(asked)  # none twice in an epoch
    first = [s["ticket_id"] for s in samples if s["data_epoch"] == 0]
    assert sorted(first) == list(range(20))  # the two long ones too
    saved = [e["step"] for e in await killed.place.events() if e["kind"] == "checkpoint_saved"]
    assert saved == [10, 20]  # each epoch's end once
    assert all(row["lag/max"] <= 2 for row in killed.place.rows("metrics.jsonl"))
    counts = await killed.place.ledger.counts()
    assert counts.conserved and counts.consumed == 2 * steps
