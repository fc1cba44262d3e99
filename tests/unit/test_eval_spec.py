"""Eval jobs and held-out data as users write them."""

import json

import pytest

from headway.errors import InvalidSpec
from headway.jobs import JobRecord
from headway.jobspec import parse_job
from headway.plan import Machine, Pools, make_plan
from tests.unit.test_plan import MACHINE, model_folder


def eval_job(**sections):
    job = {
        "kind": "eval",
        "model": {"path": "some/model", "max_model_len": 64},
        "evaluation": {"data": [{"source": "reasoning_gym", "name": "chain_sum", "size": 20}]},
        "reward": {"grader": {"type": "numeric"}},
    }
    return {**job, **sections}


def train_job(evaluation, steps=7):
    job = eval_job(evaluation={**eval_job()["evaluation"], **evaluation}, kind="train")
    data = {"source": "reasoning_gym", "name": "chain_sum", "max_prompt_length": 40}
    return {
        **job,
        "data": data,
        "rollout": {"max_tokens": 20},
        "trainer": {"total_training_steps": steps},
    }


def parsed(**sections):
    return parse_job(eval_job(rollout={"max_tokens": 20}, **sections))


def test_a_resolved_eval_job_has_no_key_of_training_and_reads_as_itself():
    job = parsed()
    plain = json.loads(job.canonical_json())
    assert plain.keys() == {
        "kind", "name", "seed", "model", "reward", "rollout", "evaluation"
    }  # fmt: skip
    assert not {"n", "temperature", "top_p", "top_k"} & plain["rollout"].keys()
    again = parse_job(plain)
    assert again == job and again.digest() == job.digest()
    record = JobRecord("e", plain, "", 0.0, 0.0)
    assert (record.total_steps, record.min_nodes) == (0, 1)


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"trainer": {"total_training_steps": 3}, "actor": {}}, "actor, trainer"),
        ({"data": {"source": "jsonl"}}, r"data \(write evaluation.data\)"),
        ({"rollout": {"n": 4}}, r"rollout.n \(write evaluation.n\)"),
        ({"model": {"path": "m", "lora_rank": 4}}, "model.lora_rank"),
        ({"evaluation": {"test_freq": 1}}, "evaluation.test_freq"),
        ({"evaluation": {}}, "evaluation.data is empty"),
        ({"rollout": {"max_tokens": 64}}, "rollout.max_tokens 64 leaves no token"),
        ({"reward": {"grader": {}, "overlong_buffer": {}}}, "reward.overlong_buffer"),
        ({"evaluation": {"data": [{"source": "jsonl", "nmae": "x"}]}}, "evaluation.data.name"),
    ],
)
def test_what_means_nothing_for_an_eval_job_is_refused_by_name(sections, named):
    with pytest.raises(InvalidSpec, match=named):
        parse_job(eval_job(**sections))


def test_the_nearest_key_of_another_section_is_named():
    job = train_job({})
    job["trainer"]["test_freq"] = 3  # where verl has it
    with pytest.raises(InvalidSpec, match=r"did you mean evaluation\.test_freq"):
        parse_job(job)


def test_versions_that_are_validated():
    def versions(**evaluation):
        job = parse_job(train_job(evaluation))
        return [version for version in range(12) if job.validates(version)]

    assert versions(test_freq=3) == [0, 3, 6, 7]
    assert versions(test_freq=3, val_before_train=False) == [3, 6, 7]
    assert versions(test_freq=7) == [0, 7]
    assert versions(test_freq=100) == [0, 7]
    assert versions() == []
    assert not parsed().validates(0)


def test_the_plan_of_an_eval_job(tmp_path):
    folder = model_folder(tmp_path / "m")
    job = parsed(model={"path": str(folder), "max_model_len": 64})
    plan = make_plan(job, MACHINE, Pools("vllm", 1, (0,), (1,)), tmp_path)
    assert plan.batch is None and not plan.problems
    assert plan.held_out is not None and plan.held_out.completions == 20
    assert plan.learner is not None
    assert not any("AdamW" in term or "gradient" in term for term in plan.learner.terms)
    assert plan.learner.terms["weights to be sent"] in (1448 * 2, 1448 * 4)
    names = {file.path.name for file in plan.files}
    assert names == {
        "job.yaml",
        "environment.json",
        "samples.jsonl",
        "metrics.jsonl",
        "learner.log",
    }


def test_the_plan_of_a_job_with_validations(tmp_path):
    folder = model_folder(tmp_path / "m")
    raw = train_job({"test_freq": 3, "n": 2, "temperature": 1.0, "max_tokens": 10})
    raw["model"]["path"] = str(folder)
    machine = Machine(MACHINE.cores, MACHINE.memory, MACHINE.free_disk, 0)
    plan = make_plan(parse_job(raw), machine, Pools("sim", 1, (0,), (1,)), tmp_path)
    assert plan.held_out is not None and plan.held_out.max_tokens == 10
    assert plan.held_out.completions == 4 * 20 * 2  # versions 0, 3, 6 and 7
