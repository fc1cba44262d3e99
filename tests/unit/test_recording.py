"""The record of trained groups: whole steps, in order, cut and continued on a resume."""

import os

import pytest

from headway.errors import InvalidSpec
from services.learner.recording import RecordedStep, Recorder, Recording, count_steps, read_steps

HEADER = 24  # bytes: length and digest


def step(number: int) -> RecordedStep:
    ids = (2 * number, 2 * number + 1)
    return RecordedStep(ids, frozenset(ids[:1] if number % 2 else ()), (b"a" * 9, b"b" * number))


def recorded(path, num_steps: int, limit: int = 1 << 20) -> Recording:
    recording = Recording(path, limit)
    recording.resume(0)
    for number in range(num_steps):
        assert recording.append(number, step(number))
    recording.sync()
    return recording


def test_what_is_recorded_is_read_in_order(tmp_path):
    path = tmp_path / "groups.log"
    recorded(path, 4)
    assert count_steps(path) == 4
    assert list(read_steps(path)) == [step(0), step(1), step(2), step(3)]
    assert count_steps(tmp_path / "none") == 0


def test_a_resume_cuts_at_the_checkpoint_and_writes_on(tmp_path):
    path = tmp_path / "groups.log"
    recorded(path, 5)
    again = Recording(path, 1 << 20)
    again.resume(2)
    assert again.num_steps == 2
    assert again.append(2, step(9))
    assert list(read_steps(path)) == [step(0), step(1), step(9)]


@pytest.mark.parametrize("torn", [1, HEADER - 1, HEADER, HEADER + 1])
def test_a_torn_last_record_is_none(tmp_path, torn):
    path = tmp_path / "groups.log"
    recorded(path, 2)
    whole = path.stat().st_size
    recorded(path, 3)
    os.truncate(path, whole + torn)
    assert list(read_steps(path)) == [step(0), step(1)]
    again = Recording(path, 1 << 20)
    again.resume(7)  # further than it reaches: what is missing is not made up
    assert (again.num_steps, path.stat().st_size) == (2, whole)
    assert not again.append(7, step(7))


def test_a_step_that_does_not_fit_ends_the_record_for_good(tmp_path):
    path = tmp_path / "groups.log"
    size = recorded(path, 2).limit and path.stat().st_size
    full = Recording(path, size + 1)
    full.resume(2)
    assert not full.append(2, step(2))
    assert not full.append(3, RecordedStep((), frozenset(), ()))
    assert path.stat().st_size == size


@pytest.mark.parametrize("at", [8, HEADER, HEADER + 5, -1])
def test_a_changed_byte_is_an_error_that_names_the_step(tmp_path, at):
    path = tmp_path / "groups.log"
    recorded(path, 1)
    begin = path.stat().st_size
    recorded(path, 3)
    data = bytearray(path.read_bytes())
    data[begin + at if at >= 0 else -1] ^= 4
    path.write_bytes(data)
    with pytest.raises(InvalidSpec, match=f"step {2 if at >= 0 else 3} is damaged"):
        list(read_steps(path))


class Said:
    def __init__(self):
        self.messages = []

    def add(self, kind, message, **fields):
        self.messages.append((kind, message, fields["step"]))


async def test_a_full_record_is_said_once(tmp_path):
    said = Said()
    recorder = Recorder(recorded(tmp_path / "groups.log", 2, limit=300), said)
    await recorder.add(2, RecordedStep((1,), frozenset(), (b"x" * 300,)))
    await recorder.add(3, step(3))
    (message,) = said.messages
    assert message[0] == "record_ended" and message[2] == 3
    assert "is full" in message[1] and "first 2 steps" in message[1]


async def test_a_disk_that_takes_nothing_ends_the_record_and_not_the_job(tmp_path):
    said = Said()
    recording = Recording(tmp_path / "no such folder" / "groups.log", 1 << 20)
    await Recorder(recording, said).add(0, step(0))
    assert "groups.log: No such file or directory" in said.messages[0][1]
    assert "the first 0 steps only" in said.messages[0][1]


async def test_nothing_is_recorded_and_nothing_said_where_it_is_off(tmp_path):
    said = Said()
    await Recorder(Recording(tmp_path / "groups.log", 0), said).add(0, step(0))
    assert said.messages == [] and list(tmp_path.iterdir()) == []
