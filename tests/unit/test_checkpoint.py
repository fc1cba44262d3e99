"""Checkpoints: there whole or not at all, whatever is killed when."""

import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headway.data import Cursor
from headway.errors import Conflict, InvalidSpec, NoCheckpoint, StorageFailed
from services.learner.checkpoint import (
    Checkpointer,
    Manifest,
    cleaned,
    complete,
    set_aside,
    verified,
)
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
    assert complete(tmp_path) == [path]
    found = verified(path, JOB)
    assert replace(found, files={}) == manifest(3)
    sizes = {p.name: p.stat().st_size for p in path.iterdir() if p.name != "manifest.json"}
    assert {name: size for name, (size, _) in found.files.items()} == sizes
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
    assert complete(tmp_path) == [again, tmp_path / "step-10"]
    assert verified(again, JOB).step == 12
    assert Checkpointer(tmp_path, keep=2).oldest() == 10


async def test_another_jobs_checkpoint_and_unknown_formats_are_refused(tmp_path):
    path = await save(tmp_path, 1)
    with pytest.raises(Conflict, match="another job"):
        verified(path, "b" * 64)
    (path / "manifest.json").write_text('{"format": 99}')
    with pytest.raises(InvalidSpec, match="format 99"):
        verified(path, JOB)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "file", "said"),
    [
        (truncate, "__0_0.distcp", r"__0_0.distcp has \d+ of \d+ bytes"),
        (flip_a_bit, "__0_0.distcp", "__0_0.distcp has changed since it was written"),
        (Path.unlink, "__0_0.distcp", "__0_0.distcp is missing"),
        (truncate, ".metadata", r".metadata has \d+ of \d+ bytes"),
        (truncate, "manifest.json", "unreadable manifest"),
        (Path.unlink, "manifest.json", "unreadable manifest"),
        (lambda path: path.write_text("[]"), "manifest.json", "unreadable manifest"),
        (lambda path: path.write_text('{"format": 2}'), "manifest.json", "unreadable manifest"),
    ],
)
async def test_what_a_disk_did_to_a_checkpoint_is_seen_before_it_is_loaded(
    tmp_path, harm, file, said
):
    path = await save(tmp_path, 1)
    harm(path / file)
    with pytest.raises(NoCheckpoint, match=said):
        verified(path, JOB)
    set_aside(path)
    assert [p.name for p in tmp_path.iterdir()] == ["damaged-step-1"]
    assert complete(tmp_path) == []


def test_no_folder_and_an_empty_one_hold_none(tmp_path):
    assert complete(tmp_path / "none") == []
    assert complete(tmp_path) == []


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
    assert cleaned(tmp_path) == [tmp_path / "step-1"]
    assert verified(tmp_path / "step-1", JOB).step == 1
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]  # debris is gone
    target = state(0)
    Checkpointer(tmp_path, keep=1).load(tmp_path / "step-1", target)
    assert float(target["updates"]) == 1.0


async def test_a_disk_that_fills_up_is_named_and_leaves_no_checkpoint(tmp_path):
    with files_end_at(64), pytest.raises(StorageFailed, match=f"cannot write {tmp_path}/.*step-1"):
        await save(tmp_path, 1)
    assert complete(tmp_path) == []
