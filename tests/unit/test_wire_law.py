"""Nothing is unpickled, evaluated or run from what came over a wire: held by reading the code."""

import ast
import io
import pickle

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import save

from headway.errors import InvalidSpec
from services.learner.checkpoint import Checkpointer
from services.learner.reader import TensorReader, read_index
from tests.unit.test_import_law import ROOT, files, imports

UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
# The restricted reader of checkpoint indices, tested below.
READER = ROOT / "services/learner/reader.py"
# Collectives that pickle what they send, and calls that run what they are given.
FORBIDDEN_CALLS = {
    "broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list",
    "send_object_list", "recv_object_list", "eval", "exec", "unsafe_load", "full_load", "system",
    "popen", "literal_eval", "load_module",
}  # fmt: skip


def calls(path):
    """(dotted name, keyword arguments) of each call in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            words = {k.arg: ast.unparse(k.value) for k in node.keywords if k.arg}
            yield ast.unparse(node.func), words


OURS = [*files("headway"), *files("services")]


def test_only_one_file_knows_pickle():
    assert len(OURS) > 150
    knowing = [
        path
        for path in OURS
        if {name.split(".")[0] for name in imports(path, top_level_only=False)} & UNPICKLERS
    ]
    assert knowing == [READER]


def test_no_call_unpickles_or_runs_what_it_is_given():
    for path in OURS:
        for name, words in calls(path):
            last = name.rpartition(".")[2]
            policy = name in ("policy.eval", "model.eval", "network.eval")  # torch modules
            sandboxed = name == "exec" and path.parent.name == "inside"  # it is there for that
            assert last not in FORBIDDEN_CALLS or policy or sandboxed, f"{path}: {name}"
            if name in ("torch.load", "load_file") and last == "load":
                assert words.get("weights_only") == "True", f"{path}: {name}"
            assert words.get("weights_only") != "False", f"{path}: {name}"
            assert words.get("allow_pickle", "False") == "False", f"{path}: {name}"
            assert words.get("trust_remote_code", "False") == "False", f"{path}: {name}"
            assert words.get("shell", "False") == "False", f"{path}: {name}"
            if name == "yaml.load":
                assert path.name in ("yamls.py", "body.py"), path  # with a SafeLoader of ours


# -- checkpoints: torch's index is a pickle --------------------------------------------


class Evil:
    def __reduce__(self):
        return print, ("this must not run",)


@pytest.mark.parametrize("value", [Evil(), {"a": Evil()}, 3, [1, 2], torch.nn.Linear(1, 1)])
def test_an_index_that_is_more_than_an_index_is_refused(value, capsys):
    with pytest.raises(InvalidSpec, match="the checkpoint's index"):
        read_index(pickle.dumps(value))
    assert capsys.readouterr().out == ""


def test_rubbish_is_no_index():
    for data in (b"", b"\x80", b"cos\nsystem\n(S'true'\ntR.", b"garbage" * 9):
        with pytest.raises(InvalidSpec, match="the checkpoint's index"):
            read_index(data)


def test_the_reader_gives_back_what_was_saved(tmp_path):
    state = {"model": {"w": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)},
             "step": torch.tensor(3.0), "rng": torch.get_rng_state()}  # fmt: skip
    save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    assert isinstance(TensorReader(tmp_path / "c").read_metadata(), Metadata)
    found = {"model": {"w": torch.zeros(2, 3, dtype=torch.bfloat16)},
             "step": torch.tensor(0.0), "rng": torch.zeros_like(state["rng"])}  # fmt: skip
    Checkpointer(tmp_path, keep=1).load(tmp_path / "c", found)
    assert torch.equal(found["model"]["w"], state["model"]["w"])
    assert found["step"] == 3 and torch.equal(found["rng"], state["rng"])


def test_what_is_no_tensor_is_not_loaded(tmp_path, capsys):
    save({"x": torch.zeros(1), "note": {"a": 1}}, checkpoint_id=tmp_path / "c", no_dist=True)
    with pytest.raises(BaseException, match=r"note\.a is no tensor"):
        Checkpointer(tmp_path, keep=1).load(
            tmp_path / "c", {"x": torch.zeros(1), "note": {"a": io.BytesIO()}}
        )
