"""A whole short job by the real command: vLLM, gRPC, Valkey, training, export, report."""

import json

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.support.tiny_model import build_tiny_model
from tests.support.whole_job import Run, run_job, tiny_job

STEPS, BATCH, N = 4, 2, 4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("model") / "tiny", seed=1, dtype="float32")


@pytest.fixture(scope="module")
def run(model, tmp_path_factory) -> Run:
    done = run_job(tmp_path_factory.mktemp("whole"), tiny_job(model), "--rollouts", "2")
    assert done.code == 0, done.output
    return done


def test_every_step_is_recorded_once_and_in_order(run):
    assert [row["step"] for row in run.rows("metrics.jsonl")] == list(range(1, STEPS + 1))


def test_no_trained_token_lags_more_than_the_bound(run):
    assert max(row["lag/max"] for row in run.rows("metrics.jsonl")) <= 2
    for sample in run.rows("samples.jsonl"):
        for completion in sample["completions"]:
            for version, start, end in completion["spans"]:
                assert start < end
                assert 0 <= sample["step"] - 1 - version <= 2


def test_each_group_is_whole_and_trained_once(run):
    samples = run.rows("samples.jsonl")
    tickets = [sample["ticket_id"] for sample in samples]
    assert len(tickets) == len(set(tickets)) == STEPS * BATCH
    for sample in samples:
        assert len(sample["completions"]) == N
        for completion in sample["completions"]:
            covered = [range(start, end) for _, start, end in completion["spans"]]
            assert sum(len(part) for part in covered) == completion["num_tokens"] > 0
            assert completion["reward"] in (0.0, 1.0)


def test_the_sampler_and_the_learner_agree_on_log_probs(run):
    # Both sides compute in float32 on the same weights when nothing lags; with lag the mean
    # difference is the policy's own movement, small at this learning rate.
    first = run.rows("metrics.jsonl")[0]
    assert first["lag/max"] == 0
    assert first["training/rollout_probs_diff_max"] < 1e-4


def test_the_run_folder_can_be_read_without_headway(run):
    resolved = yaml.safe_load((run.folder / "job.yaml").read_text())
    assert resolved["algorithm"]["max_policy_lag"] == 2
    environment = json.loads((run.folder / "environment.json").read_text())
    assert environment["packages"]["torch"].startswith("2.")
    assert environment["seeds"]["job"] == 3
    for hashed in (environment["model"]["sha256"], environment["job"]["sha256"]):
        assert len(hashed) == 64
    assert environment["data"]["digest"]
    assert "<svg" in (run.folder / "report.html").read_text()
    assert list((run.folder / "checkpoints").iterdir())


def test_the_exported_model_loads_and_has_moved(run, model):
    from transformers import AutoModelForCausalLM

    trained = AutoModelForCausalLM.from_pretrained(run.folder / "model").state_dict()
    base = AutoModelForCausalLM.from_pretrained(model).state_dict()
    assert trained.keys() == base.keys()
    moved = [name for name in base if not torch.equal(base[name], trained[name])]
    assert len(moved) > len(base) / 2
    assert all(torch.isfinite(tensor).all() for tensor in trained.values())


def test_lag_zero_is_a_synchronous_trainer(model, tmp_path):
    job = tiny_job(
        model, algorithm__max_policy_lag=0, trainer__total_training_steps=3, trainer__export=False
    )
    done = run_job(tmp_path, job)
    assert done.code == 0, done.output
    rows = done.rows("metrics.jsonl")
    assert [row["lag/max"] for row in rows] == [0, 0, 0]
    assert max(row["training/rollout_probs_diff_max"] for row in rows) < 1e-4
    for sample in done.rows("samples.jsonl"):
        assert {span[0] for c in sample["completions"] for span in c["spans"]} == {
            sample["step"] - 1
        }


def test_adapters_alone_bring_the_sampler_where_the_learner_is(model, tmp_path):
    job = tiny_job(
        model,
        model__lora_rank=4,
        algorithm__max_policy_lag=0,
        actor__optim__lr=5e-2,
        actor__entropy_coeff=0.01,  # every completion has a gradient, whatever its reward
        trainer__total_training_steps=3,
    )
    done = run_job(tmp_path, job)
    assert done.code == 0, done.output
    rows = done.rows("metrics.jsonl")
    assert [row["lag/max"] for row in rows] == [0, 0, 0]
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    # each step's completions were sampled by the adapters that the steps before have made
    assert all(0 < row["training/rollout_probs_diff_max"] < 1e-3 for row in rows)
    before, after = (load_file(f / "model.safetensors") for f in (model, done.folder / "model"))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if "_proj." in name}
    assert max(float((after[n] - before[n]).abs().max()) for n in moved) > 1e-2
    adapters = load_file(done.folder / "model" / "adapter" / "adapter_model.safetensors")
    assert len(adapters) == 2 * len(moved)


def test_held_out_prompts_are_sampled_by_one_version_while_training_goes_on(model, tmp_path):
    job = tiny_job(model, trainer__total_training_steps=3, trainer__export=False)
    data = {"source": "reasoning_gym", "name": "chain_sum", "size": 6, "data_source": "sums"}
    job["evaluation"] = {
        "data": [data], "n": 2, "temperature": 1.0, "max_tokens": 12, "test_freq": 2
    }  # fmt: skip
    done = run_job(tmp_path, job)
    assert done.code == 0, done.output
    records = done.rows("eval/samples.jsonl")
    asked = [(record["version"], record["index"]) for record in records]
    assert sorted(asked) == [(version, i) for version in (0, 2, 3) for i in range(6)]
    rows = done.rows("metrics.jsonl")
    assert [row["step"] for row in rows if row["version"] < row["step"]] == [1, 2, 3]
    for row in rows:
        if row["version"] == row["step"]:  # a validation
            rewards = [
                completion["reward"]
                for record in records if record["version"] == row["version"]
                for completion in record["completions"]
            ]  # fmt: skip
            assert len(rewards) == 12 and set(rewards) <= {0.0, 1.0}
            assert row["val-core/sums/reward/mean@2"] == pytest.approx(sum(rewards) / 12)
    assert max(row.get("lag/max", 0) for row in rows) <= 2


def test_an_eval_job_asks_every_prompt_once(model, tmp_path):
    prompts = [f"{i} + {i} =" for i in range(5)]
    lines = [json.dumps({"prompt": prompt, "answer": "1"}) + "\n" for prompt in prompts]
    (tmp_path / "sums.jsonl").write_text("".join(lines))
    job = {
        "kind": "eval",
        "name": "tiny",
        "model": {"path": str(model), "max_model_len": 128},
        "evaluation": {"data": [{"source": "jsonl", "name": str(tmp_path / "sums.jsonl")}]},
        "reward": {"grader": {"type": "regex", "pattern": "[a-m]", "match": "search"}},
        "rollout": {"max_tokens": 8, "dtype": "float32", "kv_cache_gib": 0.25},
    }
    done = run_job(tmp_path, job)
    assert done.code == 0, done.output
    records = done.rows("eval/samples.jsonl")
    assert sorted(record["index"] for record in records) == list(range(5))
    for record in records:
        (completion,) = record["completions"]
        assert record["version"] == 0 and 1 <= completion["num_tokens"] <= 8
    (row,) = done.rows("metrics.jsonl")
    mean = sum(record["completions"][0]["reward"] for record in records) / 5
    assert row["val-core/sums.jsonl/reward/mean@1"] == pytest.approx(mean)
