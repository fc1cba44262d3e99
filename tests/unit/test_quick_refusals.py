"""A bad job is refused without importing what only a good one needs."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SLOW = ("redis", "httpx", "torch", "transformers", "sympy", "matplotlib", "reasoning_gym.algebra")
JOB = """\
name: sum
model: {path: org/name}
data: {source: reasoning_gym, name: chain_sum}
reward: {grader: {type: numeric}}
trainer: {total_training_steps: 3}
"""
# Runs the command as `headway` does, then says what was imported on the way.
COMMAND = """
import json, sys
from headway.cli import run_command
code = run_command(sys.argv[2:])
print(json.dumps([code, [name for name in json.loads(sys.argv[1]) if name in sys.modules]]))
"""


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("trainer.stepps=1", "unknown key trainer.stepps"),
        ("model.path=/nowhere/x", "there is no such folder"),
        ("reward.grader.type=numerc", "did you mean numeric?"),
        ("data.name=chain_sun", "did you mean chain_sum?"),
        ("data.config.min_term=2", "did you mean min_terms?"),
        ("data.config.min_terms=0", "data.config of chain_sum: min_terms must be positive"),
        ("actor.ppo_mini_batch_size=3", "does not divide"),
        ("algorithm.max_policy_lag=-1", "algorithm.max_policy_lag"),
    ],
)
def test_a_bad_job_is_refused_without_slow_imports(tmp_path, setting, complaint):
    job = tmp_path / "job.yaml"
    job.write_text(JOB)
    arguments = ["run", str(job), "--set", setting, "--runs-dir", str(tmp_path / "runs")]
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, json.dumps(SLOW), *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == [2, []], done.stderr
    assert complaint in done.stderr


# Imports its data set alone and then the whole package, and compares what they make.
ALONE = """
import json, sys
from pathlib import Path
from headway.data.generated import ReasoningGym
from headway.data.one_of_gym import only_data_set
from headway.plan_data import reasoning_gym_datasets

def first_item(name, config):
    item = ReasoningGym(name, config, seed=1, size=3).row(0).item
    return item, sum(module.startswith("reasoning_gym.") for module in sys.modules)

package, name, config = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
file, _ = reasoning_gym_datasets(package)[name]
with only_data_set(file, package):
    alone, few = first_item(name, config)
left = [module for module in sys.modules if module.startswith("reasoning_gym")]
whole, many = first_item(name, config)
print(json.dumps([alone == whole, few < many, left]))
"""


@pytest.mark.parametrize(
    ("name", "config", "is_alone"),
    [
        ("chain_sum", {"max_terms": 3}, True),
        ("gsm_symbolic", {}, True),  # its package imports in a circle
        ("letter_jumble", {}, True),  # reads a file of the package
        ("composite", {"datasets": [{"name": "chain_sum", "weight": 1, "config": {}}]}, False),
    ],
)
def test_a_data_set_alone_makes_what_the_whole_package_makes(name, config, is_alone):
    package = Path(find_spec("reasoning_gym").origin).parent
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(package), name, json.dumps(config)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    same, fewer, left = json.loads(done.stdout)
    assert (same, fewer) == (True, is_alone)
    assert (left == []) == is_alone
