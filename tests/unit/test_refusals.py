"""Jobs that are refused before anything starts: the file, its values, what it names."""

import itertools
import signal
from pathlib import Path

import pytest
from starlette.requests import Request

from headway import plan_data
from headway.cli.options import read_job
from headway.data.source import open_source
from headway.errors import InvalidSpec
from headway.graders import validate_grader
from headway.jobspec import DataSpec
from headway.plan_data import check_grader_data_sets
from headway.yamls import load_yaml
from services.coordinator.body import parse_submission
from services.coordinator.rest import _read_body

JOB = """\
model: {path: org/name}
data: {source: reasoning_gym, name: chain_sum}
reward: {grader: {type: numeric}}
trainer: {total_training_steps: 30}
"""


def refused(tmp_path: Path, text: str, *overrides: str) -> str:
    file = tmp_path / "job.yaml"
    file.write_text(text)
    with pytest.raises(InvalidSpec) as caught:
        read_job(file, overrides)
    return str(caught.value)


def test_the_job_itself_is_taken(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text(JOB)
    assert read_job(file, ()).trainer.total_training_steps == 30


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("actor.optim.betas=[0.9, 1]", "actor.optim.betas.1: Input should be less than 1"),
        ("actor.optim.betas=[-0.1, 0.9]", "actor.optim.betas.0: Input should be greater than"),
        ("data.size=2147483648", "size 2147483648 is not below 2147483648"),
        ("algorithm.max_policy_lag=99999999999999999999", "is not below 2147483648"),
        ("trainer.total_training_steps=2147483648", "is not below 2147483648"),
        ("rollout.stop=['']", "rollout.stop.0: String should have at least 1 character"),
        ("rollout.lease_s=0.5", "rollout.lease_s: Input should be greater than or equal to 1"),
        ("reward.timeout_s=1e9", "reward.timeout_s: Input should be less than or equal to 3600"),
        ("rollout.update_timeout_s=1e9", "rollout.update_timeout_s: Input should be less than"),
        ("actor.megatron.pipeline_model_parallel_size=2", "pipeline_model_parallel_size 2 is not"),
        ("actor.megatron.context_parallel_size=2", "context_parallel_size 2 is not possible"),
        ("actor.megatron.expert_model_parallel_size=2", "expert_model_parallel_size 2 is not"),
        ("actor.megatron.tensor_model_parallel_size=2", "is for strategy megatron"),
        ("actor.strategy=fsdp3", "actor.strategy: Input should be 'fsdp' or 'megatron'"),
        ("model.path=~nobody-of-this-name/x", "model.path '~nobody-of-this-name/x': there is no"),
        ("model.path=/tmp/" + "a" * 300, "File name too long"),
        ("trainer.max_record_gib=1e308", "trainer.max_record_gib: Input should be less than"),
        ("rollout.kv_cache_gib=1e308", "rollout.kv_cache_gib: Input should be less than"),
        ("data.config.min_terms=2001-01-01", "data.config.min_terms: a date cannot stand here"),
        ("data.config.min_terms=.nan", "data.config.min_terms: nan is not a number"),
        ('data.suffix="\\uD800"', "'data.suffix': half of a surrogate pair"),
    ],
)
def test_values_that_no_job_could_live_with(tmp_path, override, said):
    assert said in refused(tmp_path, JOB, override)


MEGATRON = JOB + "actor: {strategy: megatron, num_ranks: 6}\n"


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (4, "megatron.tensor_model_parallel_size 4 does not divide num_ranks 6"),
        (2, "actor.num_ranks 6 / actor.megatron.tensor_model_parallel_size 2 = 3 does not divide"),
    ],
)
def test_ranks_that_do_not_fit_the_layers_or_the_batch(tmp_path, size, said):
    override = f"actor.megatron.tensor_model_parallel_size={size}"
    assert said in refused(tmp_path, MEGATRON, override)


def test_ranks_that_share_layers_have_groups_in_common(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text(MEGATRON)
    actor = read_job(file, ("actor.megatron.tensor_model_parallel_size=3",)).actor
    assert (actor.num_ranks, actor.data_ranks, actor.model_ranks) == (6, 2, 3)


def test_a_data_file_in_a_home_that_is_not_there(tmp_path):
    text = JOB.replace("reasoning_gym, name: chain_sum", "jsonl, name: ~nobody-of-this-name/x")
    assert "data.name '~nobody-of-this-name/x': there is no" in refused(tmp_path, text)


def test_a_data_file_whose_name_is_too_long():
    data = DataSpec(source="jsonl", name="/tmp/" + "a" * 300)
    with pytest.raises(InvalidSpec, match=r"^data\.name '/tmp/a+': File name too long$"):
        open_source(data)


def test_aliases_that_stand_for_gigabytes(tmp_path):
    """Nine levels of nine: 387 million values in as many bytes as this line has."""
    levels = [f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]"
              for before, name in itertools.pairwise("abcdefghi")]  # fmt: skip
    said = refused(tmp_path, "\n".join([JOB, "a: &a [1,1,1,1,1,1,1,1,1]", *levels]))
    assert "the job has more than 100000 values, aliases written out" in said


def test_aliases_that_lead_to_themselves(tmp_path):
    text = JOB.replace("name: chain_sum", "name: chain_sum, config: &a {x: *a}")
    assert "the job is nested more than 40 deep" in refused(tmp_path, text)


def test_a_file_that_does_not_end():
    with pytest.raises(InvalidSpec, match="/dev/zero is not YAML: it has more than 256 KiB"):
        read_job(Path("/dev/zero"), ())


def test_a_data_set_that_never_makes_a_problem(monkeypatch):
    """Work without end; the limit is one of processor time, so a busy machine changes nothing."""
    monkeypatch.setattr(plan_data, "_PATIENCE_S", 0.3)
    config = {"min_terms": 10**9, "max_terms": 10**9}
    data = DataSpec(source="reasoning_gym", name="chain_sum", config=config)
    with pytest.raises(InvalidSpec, match=r"data\.config of chain_sum: no problem is made within"):
        plan_data.first_item(data)
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def test_a_key_that_stands_twice_is_refused_in_files_and_bodies(tmp_path):
    twice = JOB + "seed: 1\nseed: 2\n"
    assert "the key seed stands here twice" in refused(tmp_path, twice)
    with pytest.raises(InvalidSpec, match="the key seed stands here twice"):
        parse_submission(twice.encode(), "application/yaml")
    assert load_yaml("a: {x: 1}\nb: {x: 1}") == {"a": {"x": 1}, "b": {"x": 1}}
    assert load_yaml("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}")["b"] == {"x": 3, "y": 2}


def test_a_nest_too_deep_is_an_error_and_no_crash(tmp_path):
    deep = "a: " + "[" * 5000 + "]" * 5000
    assert "job.yaml is not YAML: it is nested too deep" in refused(tmp_path, deep)
    assert load_yaml("[[[[1]]]]") == [[[[1]]]]


def test_a_fault_of_the_grader_names_its_whole_path():
    with pytest.raises(InvalidSpec, match=r"^missing key reward\.grader\.pattern$"):
        validate_grader({"type": "regex"}, path="reward.grader")
    unknown = r"^unknown key reward\.grader\.extrac \(did you mean reward\.grader\.extract\?\)$"
    with pytest.raises(InvalidSpec, match=unknown):
        validate_grader({"type": "numeric", "extrac": "last"}, path="reward.grader")


def test_a_grader_of_a_data_set_that_is_not_there():
    parts = {"a": {"type": "reasoning_gym", "dataset": "chain_summ"}}
    grader = validate_grader({"type": "sum", "graders": parts})
    said = r"grader\.graders\.a\.dataset: .*'chain_summ' \(did you mean chain_sum\?\)"
    with pytest.raises(InvalidSpec, match=said):
        check_grader_data_sets(grader, "grader")
    check_grader_data_sets(validate_grader({"type": "reasoning_gym", "dataset": "chain_sum"}), "g")


async def test_a_client_that_hangs_up_half_way_is_no_crash():
    messages = iter([
        {"type": "http.request", "body": b"name: x", "more_body": True},
        {"type": "http.disconnect"},
    ])  # fmt: skip

    async def receive():
        return next(messages)

    request = Request({"type": "http", "method": "POST", "headers": []}, receive)
    with pytest.raises(InvalidSpec, match="broke off"):
        await _read_body(request)
