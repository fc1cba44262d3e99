"""Who may import what (docs/architecture.md): held by reading the code and by running it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "vllm", "transformers", "ray"}


def imports(path: Path, *, top_level_only: bool) -> set[str]:
    """Dotted names that a file imports."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def files(folder: str) -> list[Path]:
    return [p for p in (ROOT / folder).rglob("*.py") if "pb" not in p.parts]


def test_the_library_never_imports_a_service():
    for path in files("headway"):
        # The command starts services as processes; nothing of theirs is imported.
        names = imports(path, top_level_only=False)
        assert not {name for name in names if name.startswith("services")}, path


@pytest.mark.parametrize("service", ["coordinator", "reward", "rollout", "learner"])
def test_a_service_never_imports_another(service):
    for path in files(f"services/{service}"):
        for name in imports(path, top_level_only=False):
            if name.startswith("services."):
                assert name.split(".")[1] == service, f"{path}: {name}"


def test_the_library_imports_without_torch_except_weights_and_maths():
    heavy_rooms = {ROOT / "headway/weights", ROOT / "headway/rl"}
    for path in files("headway"):
        if heavy_rooms & set(path.parents):
            continue
        loaded = {name.split(".")[0] for name in imports(path, top_level_only=True)}
        assert not loaded & HEAVY, f"{path} imports {loaded & HEAVY} at its top"


def test_the_maths_does_no_io():
    allowed = {"torch", "headway.rl", "headway.messages", "headway.errors"}
    standard = set(sys.stdlib_module_names) - {"socket", "asyncio", "subprocess", "logging", "os"}
    for path in files("headway/rl"):
        for name in imports(path, top_level_only=False):
            root = name.split(".")[0]
            ours = any(name == a or name.startswith(a + ".") for a in allowed)
            assert ours or root in standard, f"{path}: {name}"


BLOCKED_IMPORT = """
import importlib, pkgutil, sys
blocked = set(sys.argv[2].split(","))
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked:
            raise ImportError(f"{name} is blocked by the import law")
sys.meta_path.insert(0, Blocker())
package = importlib.import_module(sys.argv[1])
for info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    if not info.name.endswith("__main__"):
        importlib.import_module(info.name)
main = importlib.import_module(sys.argv[1] + ".__main__")
"""


@pytest.mark.parametrize(
    ("service", "blocked"),
    [
        ("coordinator", "torch,vllm,transformers"),
        ("reward", "torch,vllm,transformers"),
        ("learner", "vllm,megatron"),
    ],
)
def test_a_service_runs_without_what_it_may_not_have(service, blocked):
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED_IMPORT, f"services.{service}", blocked],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr


def test_grader_workers_start_without_the_models_of_specifications():
    modules = "worker_main", "grading.combined", "grading.judge", "grading.served"
    loads = "; ".join(f"import services.reward.{module}" for module in modules)
    code = f"import sys; {loads}; print('pydantic' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) == "False\n"


def test_the_command_starts_without_torch():
    code = (
        "import sys, headway.cli; print(sorted({'torch', 'vllm', 'transformers'} & {*sys.modules}))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) == "[]\n"
