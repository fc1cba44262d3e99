"""`headway export`: a checkpoint becomes the folder that the trainer itself would have written."""

import pytest
from safetensors.torch import load_file

from headway.cli import run_command
from headway.data.stream import Cursor
from services.learner.checkpoint import Checkpointer, Manifest
from services.learner.run_folder import RunFolder
from tests.support.learning import job, random_groups
from tests.support.tiny_model import build_tiny_model
from tests.support.trainers import trainer


@pytest.fixture
async def run(tmp_path):
    """A run folder with checkpoints of steps 1 and 2, and what the trainer exported at each."""
    model = build_tiny_model(tmp_path / "model", seed=3)
    spec = job(model)
    folder = RunFolder(tmp_path / "runs" / "job-1")
    folder.create(spec)
    t = trainer(model)
    saves = Checkpointer(folder.checkpoints, keep=2)
    for step in (1, 2):
        t.train_step(step - 1, random_groups(2, 4, seed=step))
        writing = saves.begin(step, {"trainer": t.state()})
        t.hold(writing.taken)
        manifest = Manifest(step, spec.digest(), world_size=1, cursor=Cursor(0, 0))
        await saves.finish(writing, manifest)
        t.export(tmp_path / f"own-{step}")
    (folder.checkpoints / ".tmp-step-3").mkdir()  # one is being written just now
    return folder


def files(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix != ".safetensors"}


def test_the_newest_or_any_step_is_what_the_trainer_wrote(run, tmp_path, capsys):
    assert run_command(["export", "job-1", "--runs-dir", str(run.path.parent)]) == 0
    assert f"step 2 of job-1 is in {run.path / 'export'}" in capsys.readouterr().out
    assert run_command(["export", str(run.path), "--step", "1", "--out", str(tmp_path / "o")]) == 0
    for step, made in ((2, run.path / "export"), (1, tmp_path / "o")):
        own = tmp_path / f"own-{step}"
        assert files(made) == files(own)
        theirs, ours = (load_file(f / "model.safetensors") for f in (own, made))
        assert theirs.keys() == ours.keys()
        assert all((theirs[name] == ours[name]).all() for name in theirs)
    assert (run.checkpoints / ".tmp-step-3").is_dir()


def test_what_is_not_there_or_damaged_is_named(run, capfd):
    export = ["export", str(run.path)]
    assert run_command([*export, "--step", "7"]) == 2
    assert "no checkpoint of step 7; it has 1, 2" in capfd.readouterr().err
    (run.checkpoints / "step-2" / "__0_0.distcp").write_bytes(b"")
    assert run_command([*export, "--step", "2"]) == 2
    assert "is damaged: __0_0.distcp has 0 of" in capfd.readouterr().err
    assert run_command(export) == 0  # the newest that is whole
    assert "step 1 of" in capfd.readouterr().out
    assert run_command(export) == 2
    assert "is there already" in capfd.readouterr().err
