"""Checkpoints: there whole or not at all, whatever is killed when."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from headway.data import Cursor
from headway.errors import Conflict, InvalidSpec, StorageFailed
from services.learner.checkpoint import Checkpointer, Manifest, newest, read_manifest
from tests.support.small_disk import files_end_at

JOB = "a" * 64


def state(value: float):
    return {"model": {"w": torch.full((4, 3), value)}, "updates": torch.tensor(value)}


def manifest(step: int, job: str = JOB) -> Manifest:
    return Manifest(step, job, world_size=1, cursor=Cursor(step * 2, step * 3), num_nonfinite=1)


async def save(folder: Path, step: int, keep: int = 2, job: str = JOB) -> Path:
    checkpointer = Checkpointer(folder, keep=keep)
    return await checkpointer.finish(checkpointer.begin(step, state(step)), manifest(step, job))


async def test_what_is_saved_is_loaded_with_its_manifest(tmp_path):
    path = await save(tmp_path, 3)
    assert path == tmp_path / "step-3"
    assert newest(tmp_path, JOB) == (path, manifest(3))
    target = state(0)
    Checkpointer(tmp_path, keep=1).load(path, target)
    assert torch.equal(target["model"]["w"], torch.full((4, 3), 3.0))
    assert float(target["updates"]) == 3.0


async def test_the_state_may_change_once_it_is_taken(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep=1)
    live = state(1)
    writing = checkpointer.begin(1, live)
    writing.taken.result(timeout=60)
    live["model"]["w"].fill_(99.0)  # the next update
    path = await checkpointer.finish(writing, manifest(1))
    target = state(0)
    checkpointer.load(path, target)
    assert torch.equal(target["model"]["w"], torch.ones(4, 3))


async def test_only_the_newest_few_are_kept(tmp_path):
    for step in (2, 4, 10, 12):
        await save(tmp_path, step, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-10", "step-12"]
    again = await save(tmp_path, 12)  # a retraced step
    assert newest(tmp_path, JOB) == (again, manifest(12))


async def test_another_jobs_checkpoint_and_unknown_formats_are_refused(tmp_path):
    path = await save(tmp_path, 1)
    with pytest.raises(Conflict, match="another job"):
        newest(tmp_path, "b" * 64)
    (path / "manifest.json").write_text('{"format": 99}')
    with pytest.raises(InvalidSpec, match="format 99"):
        read_manifest(path)
    (path / "manifest.json").write_text("{")
    with pytest.raises(InvalidSpec, match="unreadable manifest"):
        newest(tmp_path, JOB)


def test_no_folder_and_an_empty_one_hold_none(tmp_path):
    assert newest(tmp_path / "none", JOB) is None
    assert newest(tmp_path, JOB) is None


CRASH = """
    import asyncio, os, signal, sys
    from pathlib import Path
    from tests.unit.test_checkpoint import Checkpointer, manifest, save, state
    folder, when = Path(sys.argv[1]), sys.argv[2]
    asyncio.run(save(folder, 1))
    if when == "writing":  # the parts are being written
        Checkpointer(folder, keep=2).begin(2, state(2))
        while not (folder / ".tmp-step-2").is_dir():
            pass
    else:  # all parts are down, the manifest too, and the rename is still to come
        Path.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        asyncio.run(save(folder, 2))
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("when", ["writing", "before the rename"])
def test_a_kill_in_the_middle_leaves_the_last_good_one(tmp_path, when):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CRASH), str(tmp_path), when],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / ".tmp-step-2").is_dir()
    assert newest(tmp_path, JOB) == (tmp_path / "step-1", manifest(1))
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]  # debris is gone
    target = state(0)
    Checkpointer(tmp_path, keep=1).load(tmp_path / "step-1", target)
    assert float(target["updates"]) == 1.0


async def test_a_disk_that_fills_up_is_named_and_leaves_no_checkpoint(tmp_path):
    with files_end_at(64), pytest.raises(StorageFailed, match=f"cannot write {tmp_path}/.*step-1"):
        await save(tmp_path, 1)
    assert newest(tmp_path, JOB) is None
