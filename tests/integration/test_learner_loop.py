"""The learner around its trainer: whole jobs on a tiny model, a real store, a scripted node."""

import asyncio
import dataclasses
import hashlib
import json
import os
import signal

import pytest
from safetensors.torch import load_file

from headway.jobspec import parse_job
from headway.journal import Journal
from headway.ledger.redis_ledger import RedisLedger
from headway.lifecycle import end_tasks
from headway.redis_client import connect
from services.learner.lead import Lead
from services.learner.parts import ledger_config
from services.learner.ranks import Ranks, RanksSpec
from services.learner.run_folder import RunFolder
from services.learner.status import Reporter
from services.learner.train import RankSettings
from tests.support.scripted_node import ScriptedNode, scripted_group
from tests.support.tiny_model import build_tiny_model

STEPS, BATCH = 4, 2


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("model") / "tiny", seed=1)


def job(model, steps=STEPS, save_freq=2, ranks=1, lag=0, on_error="drop_group", lr=1e-3, **actor):
    return parse_job(
        {
            "name": "tiny",
            "seed": 3,
            "model": {"path": str(model), "max_model_len": 128},
            "data": {
                "source": "reasoning_gym",
                "name": "chain_sum",
                "size": 16,
                "train_batch_size": BATCH,
                "max_prompt_length": 96,
            },
            "reward": {"grader": {"type": "numeric"}, "on_error": on_error},
            "algorithm": {"max_policy_lag": lag},
            "actor": {
                "optim": {"lr": lr},
                "compute_dtype": "float32",
                "num_ranks": ranks,
                "max_nonfinite_steps": 2,
                **actor,
            },
            "rollout": {"n": 4, "max_tokens": 8, "dtype": "float32"},
            "trainer": {"total_training_steps": steps, "save_freq": save_freq},
        }
    )


class Place:
    """One job's ledger, journal and folder."""

    def __init__(self, url, job_id, folder):
        self.url, self.job_id = url, job_id
        self.redis = connect(url)
        self.ledger = RedisLedger(self.redis, job_id)
        self.journal = Journal(self.redis, job_id)
        self.folder = RunFolder(folder / job_id)

    async def lead(self, spec):
        """Rank 0 in this process; returns exit code and last status."""
        settings = RankSettings(
            self.job_id, self.url, self.folder.path, rank=0, world=1, store_port=0, host="127.0.0.1"
        )
        reporter = Reporter()
        code = await Lead(settings, spec, reporter).run()
        return code, reporter.status

    def ranks(self, spec, **changes):
        """The job's ranks as processes, as the agent starts them."""
        self.folder.create(spec)
        how = RanksSpec(
            job_id=self.job_id,
            job_file=self.folder.job,
            run_dir=self.folder.path,
            log_file=self.folder.log,
            redis_url=self.url,
            host="127.0.0.1",
            world=spec.actor.num_ranks,
            cores=(),
        )
        self.changed = asyncio.Event()
        return Ranks(dataclasses.replace(how, **changes), self.changed.set)

    def rows(self, name):
        path = self.folder.path / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    async def events(self):
        return await self.journal.read_events(limit=1000)

    def weights(self):
        return load_file(self.folder.model / "model.safetensors")


@pytest.fixture
async def place(valkey_url, job_id, tmp_path):
    here = Place(valkey_url, job_id, tmp_path)
    yield here
    await here.redis.aclose()


def sha256(place):
    return hashlib.sha256((place.folder.model / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def uninterrupted(valkey_url, model, tmp_path_factory):
    """A job that nobody disturbed: the yardstick of the others."""

    async def whole():
        place = Place(valkey_url, "undisturbed", tmp_path_factory.mktemp("runs"))
        async with ScriptedNode(place.ledger).serving() as node:
            code, status = await place.lead(job(model))
        place.code, place.status, place.node = code, status, node
        place.counts = await place.ledger.counts()
        place.journalled = await place.journal.read_metrics(limit=100)
        place.said = await place.events()
        await place.redis.aclose()
        return place

    return asyncio.run(whole())


def test_a_job_runs_to_its_end_and_leaves_a_whole_folder(uninterrupted, model):
    place = uninterrupted
    assert (place.code, place.status.phase, place.status.step) == (0, "succeeded", STEPS)
    names = {p.name for p in place.folder.path.iterdir()}
    assert names >= {
        "job.yaml", "environment.json", "metrics.jsonl", "samples.jsonl", "checkpoints",
        "model", "report.html",
    }  # fmt: skip
    assert sorted(p.name for p in place.folder.checkpoints.iterdir()) == ["step-2", "step-4"]
    facts = json.loads(place.folder.environment.read_text())
    assert facts["job"]["sha256"] == job(model).digest()
    assert facts["model"]["folder"] == str(model) and len(facts["model"]["sha256"]) == 64
    assert facts["data"]["name"] == "chain_sum" and facts["seeds"] == {"job": 3, "data": 0}
    before, after = load_file(model / "model.safetensors"), place.weights()
    assert before.keys() == after.keys()
    assert any((before[name] != after[name]).any() for name in before)


def test_rows_and_samples_say_what_was_trained(uninterrupted):
    place = uninterrupted
    rows = place.rows("metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["version"] for row in rows] == [0, 1, 2, 3]
    for row in rows:
        assert row["critic/score/mean"] == 0.5 and row["reward/correct/mean"] == 0.5
        assert row["lag/max"] == row["lag/mean"] == 0.0  # max_policy_lag 0: on-policy
        assert 3 <= row["response_length/min"] <= row["response_length/max"] <= 6
        assert row["timing_s/step"] > 0 and 0 <= row["pool/learner_busy"] <= 1
        assert row["rollout/generate_s_mean"] == 0.25
    samples = place.rows("samples.jsonl")
    assert [s["ticket_id"] for s in samples] == list(range(STEPS * BATCH))
    assert [s["step"] for s in samples] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert [row["step"] for row in place.journalled] == [1, 2, 3, 4]


def test_every_version_but_the_last_is_published_in_order(uninterrupted):
    assert uninterrupted.node.installed == [0, 1, 2, 3]
    kinds = [event["kind"] for event in uninterrupted.said]
    assert kinds.count("checkpoint_saved") == 2
    assert kinds.count("weights_published") == 4


def test_the_ledger_ends_closed_conserved_and_trimmed(uninterrupted):
    counts = uninterrupted.counts
    assert counts.conserved
    assert (counts.step, counts.consumed, counts.taken) == (STEPS, STEPS * BATCH, 0)
    assert counts.held_bytes == counts.payload_bytes  # nothing of trained steps is kept


async def until(holds):
    """Returns when the condition holds; the test's own time limit ends a wait in vain."""
    while not holds():  # noqa: ASYNC110 - other processes set no event of ours
        await asyncio.sleep(0.01)


async def seen_step(place, step):
    """Returns when the folder holds the row of `step`."""
    await until(lambda: any(row["step"] >= step for row in place.rows("metrics.jsonl")))


async def test_a_killed_rank_resumes_and_gives_the_same_bits(place, model, uninterrupted):
    ranks = place.ranks(job(model))
    async with ScriptedNode(place.ledger).serving() as node:
        node.held_from = 6  # step 4 waits while rank 0 is killed
        work = asyncio.create_task(ranks.run())
        await seen_step(place, 3)  # one step beyond the checkpoint
        await until((place.folder.checkpoints / "step-2").exists)
        os.kill(ranks.pids[0], signal.SIGKILL)
        node.gate.set()
        final = await work
    assert final.phase == "succeeded", final
    assert sha256(place) == sha256(uninterrupted)
    assert [row["step"] for row in place.rows("metrics.jsonl")] == [1, 2, 3, 4]
    trained = [s["ticket_id"] for s in place.rows("samples.jsonl")]
    assert trained == [s["ticket_id"] for s in uninterrupted.rows("samples.jsonl")]
    assert node.installed == sorted(node.installed)  # a version never goes back
    resumed = [e["message"] for e in await place.events() if e["kind"] == "starting"]
    assert resumed == [
        "resumed from the checkpoint of step 2: retracing steps 3 to 3 with the same groups"
    ]


MEGATRON = {"strategy": "megatron", "megatron": {"tensor_model_parallel_size": 2}}


@pytest.mark.parametrize("strategy", [{}, MEGATRON], ids=["fsdp", "megatron"])
async def test_two_ranks_train_as_one_does(place, model, uninterrupted, strategy):
    ranks = place.ranks(job(model, ranks=2, **strategy))
    async with ScriptedNode(place.ledger).serving():
        final = await ranks.run()
    assert final.phase == "succeeded", ranks.last_words()
    alone, together = uninterrupted.weights(), place.weights()
    start = load_file(model / "model.safetensors")
    for name, tensor in alone.items():
        moved = (tensor - start[name]).abs().max()
        assert (tensor - together[name]).abs().max() <= 0.02 * moved, name
    assert [row["step"] for row in place.rows("metrics.jsonl")] == [1, 2, 3, 4]


async def test_a_cancelled_job_leaves_a_readable_folder_and_a_closed_ledger(place, model):
    ranks = place.ranks(job(model, steps=100_000, save_freq=0))
    async with ScriptedNode(place.ledger).serving():
        work = asyncio.create_task(ranks.run())
        await seen_step(place, 2)
        ranks.cancel()
        final = await work
        refused = await place.ledger.claim("late", 0)
    assert (final.phase, final.error_kind) == ("cancelled", "")
    assert refused.refusal == "closed"
    assert (place.folder.path / "report.html").read_text().startswith("<!doctype html>")
    steps = [row["step"] for row in place.rows("metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= 2


async def test_a_failure_that_may_pass_and_does_not_is_reported_as_itself(place, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    final = await place.ranks(job("nobody/has-this"), max_restarts=0).run()
    assert (final.phase, final.error_kind) == ("failed", "unavailable")
    assert "nobody/has-this" in final.detail and "after 1 starts" in final.detail


async def test_without_a_checkpoint_steps_are_retraced_while_their_groups_are_there(
    place, model, uninterrupted
):
    spec = job(model, save_freq=0)
    async with ScriptedNode(place.ledger).serving() as node:
        node.held_from = 6
        work = asyncio.create_task(place.lead(spec))
        await seen_step(place, 3)
        await end_tasks([work])  # as sudden as a kill for what was not yet written
        node.gate.set()
        code, status = await place.lead(spec)
    assert (code, status.step) == (0, STEPS)
    assert sha256(place) == sha256(uninterrupted)
    assert node.installed == sorted(node.installed)
    said = [e["message"] for e in await place.events() if e["kind"] == "starting"]
    assert any("retracing" in message for message in said)


async def test_trained_steps_without_checkpoint_or_groups_are_never_started_again(place, model):
    spec = job(model)
    await place.ledger.open(ledger_config(spec))
    async with ScriptedNode(place.ledger).serving():
        assert (await place.lead(spec))[0] == 0
    for checkpoint in place.folder.checkpoints.iterdir():
        checkpoint.rename(place.folder.path / f"gone-{checkpoint.name}")
    code, status = await place.lead(spec)
    assert (code, status.phase, status.error_kind) == (1, "failed", "no_checkpoint")
    assert "4 steps" in status.detail and "step 0" in status.detail
    assert [row["step"] for row in place.rows("metrics.jsonl")] == [1, 2, 3, 4]  # untouched


def poisoned(*tickets):
    """Groups as always, but with a NaN among the log-probs of some."""

    def make(lease):
        group = scripted_group(lease)
        if lease.ticket.ticket_id not in tickets:
            return group
        second = group.completions[1]
        bad = dataclasses.replace(second, logprobs=(float("nan"), *second.logprobs[1:]))
        first, _, *rest = group.completions
        return dataclasses.replace(group, completions=(first, bad, *rest))

    return make


async def test_s083_a_step_that_is_not_finite_is_skipped_and_changes_nothing(place, model):
    spec = job(model, steps=2, save_freq=1)
    async with ScriptedNode(place.ledger, poisoned(2)).serving() as node:
        code, _ = await place.lead(spec)
    assert code == 0
    assert node.installed == [0, 1]
    assert [row["actor/skipped"] for row in place.rows("metrics.jsonl")] == [0.0, 1.0]
    assert "step_skipped" in [e["kind"] for e in await place.events()]
    assert all(bool(t.isfinite().all()) for t in place.weights().values())


async def test_s083_a_job_that_stays_not_finite_fails(place, model):
    async with ScriptedNode(place.ledger, poisoned(2, 3, 4, 5, 6, 7)).serving() as node:
        code, status = await place.lead(job(model, save_freq=1))
    assert (code, status.error_kind) == (1, "diverged")
    assert "actor.optim.lr" in status.detail
    assert node.installed == [0, 1, 2]  # version 2 is version 1 again; version 3 never was
    assert sorted(p.name for p in place.folder.checkpoints.iterdir()) == ["step-1", "step-2"]
    assert (place.folder.path / "report.html").exists()


@pytest.mark.parametrize(("on_error", "at_least"), [("drop_group", 8), ("fail", 1)])
async def test_a_job_whose_rewards_all_fail_ends_with_the_reason(place, model, on_error, at_least):
    node = ScriptedNode(place.ledger)
    node.filter_reason = "reward_error:timeout"
    async with node.serving():
        code, status = await place.lead(job(model, on_error=on_error))
    assert (code, status.error_kind) == (1, "job_failed")
    assert "could not be scored (reward_error:timeout" in status.detail
    assert len(node.delivered) >= at_least
    assert place.rows("metrics.jsonl") == []  # no step was trained on a failed scoring


async def test_a_job_whose_groups_never_differ_ends_after_its_rounds(place, model):
    spec = job(model)
    algorithm = spec.algorithm.model_copy(
        update={"dynamic_sampling": True, "max_num_gen_batches": 3}
    )
    node = ScriptedNode(place.ledger)
    node.filter_reason = "zero_variance"
    async with node.serving():
        code, status = await place.lead(spec.model_copy(update={"algorithm": algorithm}))
    assert (code, status.error_kind) == (1, "job_failed")
    assert (
        f"too many to fill a batch of {BATCH} in algorithm.max_num_gen_batches = 3" in status.detail
    )
    assert len(node.delivered) >= 3 * BATCH


async def test_bad_data_fails_at_once_and_says_so(place, model):
    spec = job(model)
    bad = spec.model_copy(update={"data": spec.data.model_copy(update={"name": "chain_summ"})})
    code, status = await place.lead(bad)
    assert (code, status.phase, status.error_kind) == (1, "failed", "invalid")
    assert "did you mean chain_sum" in status.detail
